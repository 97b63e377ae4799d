"""One contender of benchmarks/gpu.py at work: its steps, their time, their memory, and whether it is right."""

from __future__ import annotations

import copy
import dataclasses
import fcntl
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from contenders import forget
from cpu import deviation
from gpu_contenders import Contender, Found, Task
from memory import peak
from timing import WARM_UP
from torch import Tensor

from eachgrad.kernels.noise import noisy

SEED = 0
RATE, NOISE = 1e-6, 1e-3  # small, so that every step is one of the same model
SECONDS, MOST = 0.1, 10  # a contender's share of a round: about this long, and no more steps than that
TOLERANCE = 1e-3
COMMON = (0, 0)  # the pool of everything that asked for no other

Row = dict[str, Any]
Pools = Counter[tuple[int, ...]]
Update = Callable[[list[Tensor], list[Tensor], bool], None]


def update(parameters: list[Tensor], grads: list[Tensor], noisy: bool) -> None:
    """One step of SGD in place, with noise on the gradients where it is private."""
    with torch.no_grad():
        if noisy:
            noise = [torch.randn_like(g) for g in grads]
            grads = list(torch._foreach_add(grads, noise, alpha=NOISE))  # type: ignore[attr-defined]
        torch._foreach_add_(parameters, grads, alpha=-RATE)  # type: ignore[attr-defined]


def on_gpu() -> bool:
    return torch.cuda.is_available()


def sync() -> None:
    if on_gpu():
        torch.cuda.synchronize()


class Turns:
    """Lets several processes warm up side by side, each measuring alone: by a lock on a file that all of them name."""

    def __init__(self, path: Path | None):
        self.file = path and path.open("w")

    @contextmanager
    def beside_others(self) -> Iterator[None]:
        with self._locked(fcntl.LOCK_SH):
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._locked(fcntl.LOCK_EX):
            yield
            sync()

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        if self.file is None:
            yield
            return
        sync()
        fcntl.flock(self.file, how)
        try:
            yield
        finally:
            fcntl.flock(self.file, fcntl.LOCK_UN)


def clean() -> None:
    """Give memory back that nothing holds any more."""
    if on_gpu():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def pools() -> Pools:
    """The bytes taken from the device for each of the allocator's pools, gaps between tensors with them."""
    found: Pools = Counter()
    for segment in torch.cuda.memory_snapshot() if on_gpu() else ():
        found[tuple(segment["segment_pool_id"])] += segment["total_size"]
    return found


def in_use() -> int:
    """The bytes of the common pool that are some tensor's: its gaps are for whoever comes next."""
    segments = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == COMMON] if on_gpu() else []
    return sum(block["size"] for s in segments for block in s["blocks"] if block["state"] != "inactive")


class Before(NamedTuple):
    """The device's memory before a contender has any."""

    pools: Pools
    in_use: int

    @classmethod
    def now(cls) -> Before:
        clean()
        return cls(pools(), in_use())


def taken(step: Callable[[], object], before: Before) -> int:
    """The bytes that one step takes from the device, with all that came to be in use since `before` and is kept.

    Gaps between tensors count. A CUDA graph keeps them in a pool of its own, and so every step gets one to begin with.
    """
    start = Before.now()
    pool = torch.cuda.MemPool()
    # The pool is this thread's: the backward must not run in another one.
    with torch.cuda.use_mem_pool(pool), torch.autograd.set_multithreading_enabled(False):
        step()
    torch.cuda.synchronize()
    end = pools()
    found = sum(size for name, size in end.items() if name not in before.pools and name != COMMON)
    # Some of a step may be in no pool of ours.
    found += start.in_use - before.in_use + end[COMMON] - start.pools[COMMON]
    del pool
    clean()
    return found


def seconds(step: Callable[[], object], times: int) -> float:
    """How long one step takes, over `times` of them in a row."""
    if not on_gpu():
        start = time.perf_counter()
        for _ in range(times):
            step()
        return (time.perf_counter() - start) / times
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first.record()
    for _ in range(times):
        step()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3 / times


def measures(call: int) -> bool:
    """Whether eachgrad measures where the samples lie at this call, the first being 1."""
    return call & (call - 1) == 0


@dataclasses.dataclass(frozen=True)
class Truth:
    """An answer in float32, and how far an eager one in the dtype of the race is from it."""

    found: Found
    usual: Row = dataclasses.field(default_factory=dict)


class Entrant:
    """A contender on its own copy of the model, warm, with what is known of it in `row`."""

    def __init__(self, contender: Contender, task: Task, truth: Truth | None, update: Update):
        """After one answer was compared with `truth`, the calls that come before the clock, and the peak."""
        model = contender.prepared(copy.deepcopy(task.setup.model))
        task = dataclasses.replace(task, setup=dataclasses.replace(task.setup, model=model))
        self.model, self.update, self.calls = model, update, 0
        self.noisy = task.work == "private" and contender.private
        self.torch_noise = contender.adds_torch_noise(task.work, on_gpu())
        # By name: Opacus' own layers have another order, which would be another graph of the update.
        self.parameters = dict(sorted(task.parameters.items()))
        self.row: Row = {}
        self.times: list[float] = []
        before = Before.now()
        start = time.perf_counter()
        built = contender.build(task)
        self.call, self.note = built.call, built.note
        found = self.third()
        if truth is not None and (contender.private or task.work == "norms"):
            self.row |= compared(found, truth)
        del found
        took = [seconds(self.step, 1) for _ in range(self.calls, WARM_UP)][-1]
        self.row["cold_seconds"] = time.perf_counter() - start
        self.row["bytes"] = self.peak(before)
        self.steps = min(MOST, max(1, round(SECONDS / took))) if on_gpu() else 1

    def third(self) -> Found:
        """The third call's answer, before any update: the first that eachgrad.compile has by a compiled graph."""
        for _ in range(2):
            self.answer()
        return self.answer()

    def answer(self) -> Found:
        self.calls += 1
        found = self.call()
        forget(self.model)
        return found

    def step(self) -> None:
        """Everything from the inputs to the updated parameters."""
        found = self.answer()
        grads = [found.grads[n] for n in self.parameters]
        if self.noisy and not self.torch_noise:  # in place: the answer is nobody else's
            noisy(grads, grads, 1.0, NOISE, 1.0, SEED, self.calls)
        self.update(list(self.parameters.values()), grads, self.torch_noise)

    def peak(self, before: Before) -> int:
        """The most bytes of a step beside the model, with whatever the contender keeps between steps."""
        return taken(self.step, before) if on_gpu() else peak(self.step)

    def run(self) -> None:
        """Time a few steps; those that measure where the samples lie run before, on a clock of their own."""
        self.step()  # fetches the memory that the contender before has given back
        while any(measures(self.calls + k) for k in range(1, self.steps + 1)):
            due = measures(self.calls + 1)
            took = seconds(self.step, 1)
            if due:
                self.row["measuring_milliseconds"] = 1e3 * took
                self.step()  # captures a CUDA graph again, which was given back for that
        self.times.append(seconds(self.step, self.steps))
        # Or the contenders' caches add up to more than there is, and a step's time has their release in it.
        if on_gpu():
            torch.cuda.empty_cache()


def compared(found: Found, truth: Truth) -> Row:
    """How far an answer is from the truth, and whether that is within rounding."""
    far: Row = {"deviation": deviation({n: g.float() for n, g in found.grads.items()}, truth.found.grads)}
    if found.norms is not None and truth.found.norms is not None:
        far["deviation_of_norms"] = deviation(found.norms.float(), truth.found.norms)
    right = all(value <= 2 * truth.usual.get(name, 0.0) + TOLERANCE for name, value in far.items())
    return far | {"right": right, "dtypes": sorted({str(g.dtype).removeprefix("torch.") for g in found.grads.values()})}
