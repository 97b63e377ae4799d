"""Time of norms and clipped sums on a CPU, as ratios to a plain forward and backward in the same run.

    python benchmarks/cpu.py [--rounds 9] [--out benchmarks/results/cpu.json]

Every round times every contender once, one after another, so that a slow moment of the machine hits all of
them; the median over rounds is reported, with the spread between its quartiles.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from models import MODELS
from torch import Tensor, nn
from torch.nn import functional as F

import eachgrad

MAX_NORM = 1.0


def contenders(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Callable[[], object]]:
    """What is timed, by name; each computes everything from the inputs on."""

    def plain() -> None:
        model.zero_grad()
        F.cross_entropy(model(x), y, reduction="sum").backward()

    def grads() -> eachgrad.PerSampleGrads:
        with eachgrad.record(model) as tape:
            losses = F.cross_entropy(model(x), y, reduction="none")
        return tape.backward(losses)

    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def one_loss(p: dict[str, Tensor], xi: Tensor, yi: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, p, (xi[None],)), yi[None])

    def vmap_clip() -> dict[str, Tensor]:
        per_sample = torch.func.vmap(torch.func.grad(one_loss), (None, 0, 0))(parameters, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in per_sample.values()]).norm(dim=0)
        c = (MAX_NORM / norms).clamp(max=1.0)
        return {name: torch.tensordot(c, g, dims=1) for name, g in per_sample.items()}

    return {
        "plain": plain,
        "eachgrad norms": lambda: grads().norms(),
        "eachgrad clipped sum": lambda: grads().clipped_sum(MAX_NORM),
        "eachgrad dense": lambda: grads().dense(),
        "vmap clipped sum": vmap_clip,
    }


def measure(name: str, rounds: int) -> dict[str, dict[str, float]]:
    """{contender: median and spread of its ratio to plain, median milliseconds}."""
    torch.manual_seed(0)
    functions = contenders(*MODELS[name]())
    works = {}
    for contender, function in functions.items():
        try:
            function()
            works[contender] = function
        except RuntimeError as error:
            print(f"{name}: {contender} fails: {str(error).splitlines()[0][:100]}")
    times: dict[str, list[float]] = {contender: [] for contender in works}
    for _ in range(rounds):
        for contender, function in works.items():
            start = time.perf_counter()
            function()
            times[contender].append(time.perf_counter() - start)
    ratios = {c: [t / p for t, p in zip(ts, times["plain"], strict=True)] for c, ts in times.items()}
    found = {}
    for contender, values in ratios.items():
        low, middle, high = statistics.quantiles(values, n=4)
        milliseconds = 1e3 * statistics.median(times[contender])
        found[contender] = {"ratio": middle, "low": low, "high": high, "milliseconds": milliseconds}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = {}
    for name in options.models:
        results[name] = measure(name, options.rounds)
        for contender, row in results[name].items():
            spread = f"{row['low']:.2f}-{row['high']:.2f}"
            print(
                f"{name:12s} {contender:22s} {row['ratio']:6.2f}  ({spread})  {row['milliseconds']:8.1f} ms", flush=True
            )
    if options.out:
        about = {"processor": platform.processor() or platform.machine(), "threads": options.threads}
        versions = {"torch": torch.__version__, "eachgrad": eachgrad.__version__, "python": platform.python_version()}
        options.out.write_text(json.dumps({"device": about, "versions": versions, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
