"""Times of several calls on one noisy machine."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import eachgrad

# eachgrad measures where the samples lie at the 1st, 2nd, 4th, 8th, ... call of a model: what is measured starts
# with the 6th, and medians leave out the few calls that look again.
WARM_UP = 5

Call = Callable[[], object]


def seconds(call: Call) -> float:
    """How long one call takes; what it returns is freed after the clock has stopped."""
    start = time.perf_counter()
    answer = call()
    took = time.perf_counter() - start
    del answer
    return took


def interleaved(calls: Mapping[str, Call], rounds: int, reset: Call | None = None) -> dict[str, list[float]]:
    """{name: seconds of each round}: every round runs every call once, so that a slow moment hits all of them."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            if reset is not None:
                reset()
            times[name].append(seconds(call))
    return times


def ratio(times: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of the ratios round by round."""
    values = [t / b for t, b in zip(times, base, strict=True)]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"ratio": middle, "low": low, "high": high}


def milliseconds(times: Sequence[float]) -> float:
    return 1e3 * statistics.median(times)


def about(**more: Any) -> dict[str, Any]:
    """What a result depends on beside the code: the device and the versions."""
    device = {
        "processor": platform.processor() or platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
    versions = {"torch": torch.__version__, "eachgrad": eachgrad.__version__, "python": platform.python_version()}
    return {"device": device, "versions": versions | more.pop("versions", {}), **more}


def write(path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
