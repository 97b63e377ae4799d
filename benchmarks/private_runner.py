"""One contender of benchmarks/private_gpu.py at work: its steps, their time and memory, the host's part, and its answers."""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from gpu import eager, in_float32
from gpu_contenders import Task
from gpu_entrant import Before, Row, Truth, compared, on_gpu, sync, taken
from private_steps import OPTIMIZERS, Private, Trainer, Training

from eachgrad.kernels.signals import Slot
from eachgrad.private import gathering, sampling, stepping, watching

Steps = list[tuple[float, int]]  # seconds and samples of each

WARM_UP = 10  # steps: the 8th call of the graph has measured, and the 9th has captured

# Where the host's time goes: functions and methods by the part of a step that they belong to.
PARTS: list[tuple[Any, str, str]] = [
    (watching.Watch, "check", "checks"), (watching.Buffers, "__init__", "Buffers"), (watching.Buffers, "check", "Buffers"),
    (sampling.Samples, "batch", "batch"), (stepping, "to_device", "to_device"), (gathering.Engine, "answer", "answer"),
    (Slot, "wait", "wait"), (gathering.Gathered, "add", "gather"), (gathering.Gathered, "result", "gather"),
    (stepping, "noisy_gradients", "noise"), (sampling.Poisson, "draw", "draw"), (sampling.Poisson, "prepare", "draw"),
    (sampling.Shuffled, "draw", "draw"),
]  # fmt: skip


class Parts:
    """The host's seconds in each part of a step, while it is entered: {part: seconds}, without those inside another."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.places = [*PARTS, (optimizer, "step", "optimizer")]
        self.seconds: dict[str, float] = {}
        self.unhidden: list[float] = []  # from the last flag of a step to the first question of the next
        self._heard: float | None = None
        self._inside = [0.0]  # what was spent in parts within the one that is open
        self._stack = ExitStack()

    def __enter__(self) -> Parts:
        for owner, name, label in self.places:
            self._stack.enter_context(patch.object(owner, name, self._timed(label, getattr(owner, name))))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _timed(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(0.0)
            start = time.perf_counter()
            if label == "answer" and not self.seconds.get(label) and self._heard is not None:
                self.unhidden.append(start - self._heard)
            try:
                return function(*args, **kwargs)
            finally:
                end = time.perf_counter()
                took, self._heard = end - start, end if label == "wait" else self._heard
                self.seconds[label] = self.seconds.get(label, 0.0) + took - self._inside.pop()
                self._inside[-1] += took

        return call

    def taken(self, total: float) -> dict[str, float]:
        """The parts of a step that took `total`, with the rest of it as "other"; the count begins anew."""
        found, self.seconds = self.seconds, {}
        return found | {"other": total - sum(found.values())}


def seconds(step: Callable[[], object], times: int) -> list[float]:
    """How long each of `times` steps takes, one after another with no wait in between."""
    if not on_gpu():
        marks = [time.perf_counter()]
        for _ in range(times):
            step()
            marks.append(time.perf_counter())
        return [b - a for a, b in pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    sync()
    for k, event in enumerate(events):
        if k:
            step()
        event.record()
    sync()
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]


class Runner:
    """A contender on its own copy of the model, warm; its figures in `row`, its steps in `rounds`."""

    def __init__(self, build: Callable[[Training], Trainer], task: Task, data: Any, options: argparse.Namespace):
        setup = replace(task.setup, model=copy.deepcopy(task.setup.model))
        task = replace(task, setup=setup)
        optimizer = OPTIMIZERS[options.optimizer](p for p in setup.model.parameters() if p.requires_grad)
        self.training, self.options = Training(task, data, optimizer), options
        self.rounds: list[Steps] = []
        self.unusual: list[float] = []
        self.before, fewest = Before.now(), allocated()
        start = time.perf_counter()
        self.trainer = build(self.training)
        for _ in range(max(WARM_UP, options.warm if isinstance(self.trainer, Private) else 0)):
            self.trainer.step()
        sync()
        self.row: Row = {"cold_seconds": time.perf_counter() - start}
        if on_gpu():
            self.row["allocated_at_most"] = torch.cuda.max_memory_allocated() - fewest

    def weigh(self) -> None:
        """The most bytes during a usual step, with all that is kept between steps, of one piece and of several."""
        if not on_gpu() or "bytes" in self.row:
            return
        each: dict[str, int] = {}
        for which, full in self.trainer.full().items():
            with full:
                while which not in each:
                    self.trainer.step()
                    if self.trainer.was_usual():  # one that is not leaves memory behind, and so might the next
                        found = taken(self.trainer.step, self.before)
                        each |= {which: found} if self.trainer.was_usual() else {}
        self.row |= {"bytes": max(each.values()), "bytes_of": each}

    def round(self) -> None:
        """Time so many usual steps."""
        self.trainer.step()  # fetches the memory that the other contender has given back
        done: Steps = []
        while len(done) < self.options.steps:
            seen: list[tuple[int, bool]] = []
            times = seconds(lambda seen=seen: seen.append((self.trainer.step(), self.trainer.was_usual())), 5)
            done += [(t, n) for t, (n, usual) in zip(times, seen, strict=True) if usual]
            self.unusual += [t for t, (_, usual) in zip(times, seen, strict=True) if not usual]
        self.rounds.append(done)
        if on_gpu():
            torch.cuda.empty_cache()

    def host(self, alone: bool) -> Row:
        """Milliseconds that the host spends in each part of a usual step, medians; `alone`: the device idle before.

        "unhidden" is from the flag of a step's last piece to the next step's first question, which the rest of the device's
        work on that piece has to hide.
        """
        found: list[dict[str, float]] = []
        with Parts(self.training.optimizer) as parts:
            while len(found) < self.options.steps:
                if alone:
                    sync()
                start = time.perf_counter()
                self.trainer.step()
                taken = parts.taken(time.perf_counter() - start)
                if self.trainer.was_usual():
                    found.append(taken)
        sync()
        names = sorted({name for taken in found for name in taken})
        each = {name: 1e3 * statistics.median(taken.get(name, 0.0) for taken in found) for name in names}
        work = 1e3 * statistics.median(sum(taken.values()) - taken.get("wait", 0.0) for taken in found)
        unhidden = 1e3 * statistics.median(parts.unhidden) if parts.unhidden and not alone else None
        return {"work": work, "parts": each, "unhidden": unhidden}

    def waits(self) -> list[str]:
        """The places in a usual step at which the host waits for the device, as torch sees them."""
        if not on_gpu():
            return []
        while True:
            torch.cuda.set_sync_debug_mode("warn")
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                self.trainer.step()
            torch.cuda.set_sync_debug_mode("default")
            if self.trainer.was_usual():
                return [f"{Path(w.filename).name}:{w.lineno}" for w in said if "called a synchron" in str(w.message)]

    def look(self) -> None:
        """What is measured once, after all rounds."""
        self.weigh()
        self.row["host"] = self.host(alone=True)
        self.row["host_in_flow"] = self.host(alone=False)
        self.row["waits"] = self.waits()

    def check(self) -> None:
        """What a private run has done, and whether it is right; its figures stay where there is no memory to tell."""
        if isinstance(self.trainer, Private):
            self.row |= facts(self.trainer)
            try:
                self.row |= checked(self.trainer)
            except torch.OutOfMemoryError:
                self.row |= {"deviation": None, "deviation_of_eager": None, "right": False}


def allocated() -> int:
    """Bytes of tensors; the count of their peak begins anew."""
    if not on_gpu():
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def facts(private: Private) -> Row:
    """What a run has drawn, and how its steps were answered."""
    ask, drawn = private.run.engine.ask, private.drawn
    divided, fit = private.run.loader.divided, ask.sizes.fit
    filled = [sum(map(fit, some)) for some in drawn]
    return {
        "sizes": divided.sizes, "multiple": divided.multiple, "samples_a_step": statistics.mean(map(sum, drawn)),
        "pieces_a_step": statistics.mean(map(len, drawn)), "graphs": len(ask.graphs), "compiled": len(private.steps()),
        "computed_a_step": statistics.mean(filled),
        "replayed": sum(one.found is not None for one in private.replays()), "reasons": ask.reasons(),
    }  # fmt: skip


def checked(private: Private) -> Row:
    """How far the clipped sums of a step's pieces are from eager ones in float32, and whether that is by rounding."""
    rows: list[Row] = []
    eagerly: list[float] = []
    for task, found in private.answers():
        exact = in_float32(partial(eager, task, "private"))
        usual = compared(eager(task, "private", task.dtype), Truth(exact))
        eagerly.append(usual["deviation"])
        rows.append(compared(found, Truth(exact, usual)))
    found = {"deviation": max(row["deviation"] for row in rows), "deviation_of_eager": max(eagerly)}
    return found | {"right": all(row["right"] for row in rows)}
