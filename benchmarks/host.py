"""The host's part of an eager step: how long Python takes to start a clipped sum, beside a plain forward and backward.

    python benchmarks/host.py [--models gpt2 vit resnet18 lora] [--rounds 40] [--json FILE.json] [--profile KEY]

On a GPU an eager step is as fast as the host can start its kernels. So the models of benchmarks/gpu.py are run at their
depth on one core of a CPU, but so narrow that next to nothing is computed, under autocast to bfloat16. `forward` is the
recorded forward, `ask` the backward and the answer; a use is an op with a parameter. `collector` is what Python's garbage
collector took of the eager steps, on average: most of it goes by whole collections, every few dozen steps. `--profile
tottime` prints where the time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from gpu_models import Decoder, Setup, ViT, conv, image_losses, resnet, token_losses, with_lora
from timing import WARM_UP, about, write
from torch import Tensor, nn

import eachgrad


def gpt2() -> Setup:
    ids = torch.randint(64, (2, 4, 8))
    return Setup(Decoder(32, 12, 2, 64, 8, tied=True), ids[0], ids[1], token_losses)


def vit() -> Setup:
    return Setup(ViT(32, 12, 2, 8, 4, 10), torch.randn(4, 3, 8, 8), torch.randint(10, (4,)), image_losses)


def resnet18() -> Setup:
    model = resnet([conv(3, 8, 3, 1), nn.ReLU()], 8, [2, 2, 2, 2], 1, 10)
    return Setup(model, torch.randn(4, 3, 8, 8), torch.randint(10, (4,)), image_losses)


def lora() -> Setup:
    ids = torch.randint(64, (2, 4, 8))
    return Setup(with_lora(Decoder(32, 16, 2, 64, 8, tied=False), 2), ids[0], ids[1], token_losses)


MODELS: dict[str, Callable[[], Setup]] = {"gpt2": gpt2, "vit": vit, "resnet18": resnet18, "lora": lora}


class Collector:
    """Seconds that Python's garbage collector takes while it is listened to."""

    def __init__(self) -> None:
        self.seconds, self._start = 0.0, 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._start = time.perf_counter()
        else:
            self.seconds += time.perf_counter() - self._start

    def __enter__(self) -> Collector:
        gc.callbacks.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        gc.callbacks.remove(self)


class Step:
    """A step of one model, in parts."""

    def __init__(self, setup: Setup):
        self.setup = setup
        self.parameters = [p for p in setup.model.parameters() if p.requires_grad]

    def losses(self) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.setup.losses(self.setup.model, self.setup.x, self.setup.y)

    def plain(self) -> None:
        torch.autograd.grad(self.losses().mean(), self.parameters)

    def recorded(self) -> tuple[eachgrad.Tape, Tensor]:
        with eachgrad.record(self.setup.model) as tape:
            losses = self.losses()
        return tape, losses

    def timed(self) -> dict[str, float]:
        """Milliseconds of each part, one after another in one step."""
        marks = [time.perf_counter()]
        self.plain()
        marks.append(time.perf_counter())
        tape, losses = self.recorded()
        marks.append(time.perf_counter())
        answer = tape.ask(losses, grad=eachgrad.clipped_sum(1.0))
        marks.append(time.perf_counter())
        del answer
        plain, forward, ask = (1e3 * (b - a) for a, b in pairwise(marks))
        return {"plain": plain, "forward": forward, "ask": ask, "eager": forward + ask}

    def collected(self, steps: int) -> float:
        """Milliseconds of the garbage collector in an eager step."""
        with Collector() as collector:
            for _ in range(steps):
                tape, losses = self.recorded()
                tape.ask(losses, grad=eachgrad.clipped_sum(1.0))
        return 1e3 * collector.seconds / steps


def measured(step: Step, rounds: int) -> dict[str, Any]:
    for _ in range(WARM_UP):
        step.timed()
    found = [step.timed() for _ in range(rounds)]
    row: dict[str, Any] = {part: statistics.median(one[part] for one in found) for part in found[0]}
    row["uses"] = len(step.recorded()[0].recorder.uses)
    row["collector"] = step.collected(4 * rounds)
    return row | {"microseconds_a_use": 1e3 * (row["eager"] - row["plain"]) / row["uses"]}


def profiled(step: Step, key: str) -> None:
    profile = cProfile.Profile()
    for _ in range(20):
        with profile:
            tape, losses = step.recorded()
            tape.ask(losses, grad=eachgrad.clipped_sum(1.0))
    pstats.Stats(profile).sort_stats(key).print_stats(40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", help="of pstats: tottime, cumtime")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for name in options.models:
        torch.manual_seed(0)
        step = Step(MODELS[name]())
        results[name] = row = measured(step, options.rounds)
        print(
            f"{name:9s} plain {row['plain']:6.2f} ms, eager {row['eager']:6.2f} (forward {row['forward']:6.2f}, ask "
            f"{row['ask']:6.2f}), {row['microseconds_a_use']:.0f} us more for each of {row['uses']} uses, collector "
            f"{row['collector']:.2f} ms a step",
            flush=True,
        )
        if options.profile:
            profiled(step, options.profile)
    write(options.json, about(results=results))


if __name__ == "__main__":
    main()
