"""Private training of the digits CNN by eachgrad.private and by Opacus: test accuracy and wall time.

    python benchmarks/private.py [--seeds 5] [--only "eachgrad*" "Opacus hooks"] [--out benchmarks/results/private.json]

Data, model and settings are those of examples/private_digits.py. Everyone has the same split, first parameters, batch
size, epochs, optimizer, schedule, clipping norm and target. A seed chooses the split and the first parameters; the
contenders take turns at it. `set up` is what comes before the first step, the search for the noise included; `train` is
the loop over all steps. Ratios are a contender's time over eachgrad's, seed by seed. Opacus draws samples with
probability 1 / ceil(n / batch_size), eachgrad with batch_size / n. Needs opacus, of the extra "bench"; without it
eachgrad runs alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from timing import about, write
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from eachgrad.private import accounting, make_private

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from private_digits import DELTA, EPSILON, accuracy, build, load, loss_fn


@dataclass(frozen=True)
class Settings:
    """What all contenders share."""

    target_epsilon: float = EPSILON
    target_delta: float = DELTA
    batch_size: int = 256
    epochs: int = 60
    lr: float = 0.01
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class Result:
    """One training run."""

    accuracy: float
    epsilon: float
    noise_multiplier: float
    set_up: float  # seconds
    train: float  # seconds


def by_eachgrad(model: nn.Module, train: TensorDataset, settings: Settings, compile: bool) -> Result:
    accounting._epsilon.cache_clear()  # so that the noise is searched for from scratch each time
    clock = Clock()
    optimizer = torch.optim.Adam(model.parameters(), settings.lr)
    run = make_private(
        model, optimizer, train, loss_fn=loss_fn, batch_size=settings.batch_size, epochs=settings.epochs,
        target_epsilon=settings.target_epsilon, target_delta=settings.target_delta, max_grad_norm=settings.max_grad_norm,
        compile=compile, progress=False,
    )  # fmt: skip
    schedule = CosineAnnealingLR(optimizer, run.settings.steps)
    set_up = clock.lap()
    for batch in run.loader:
        run.step(batch)
        schedule.step()
    took = clock.lap()
    return Result(math.nan, run.epsilon(), run.settings.noise_multiplier, set_up, took)


def by_opacus(model: nn.Module, train: TensorDataset, settings: Settings, mode: str) -> Result:
    from opacus import PrivacyEngine

    clock = Clock()
    engine = PrivacyEngine()
    made: Any = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.Adam(model.parameters(), settings.lr), criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(train, settings.batch_size), target_epsilon=settings.target_epsilon,
        target_delta=settings.target_delta, epochs=settings.epochs, max_grad_norm=settings.max_grad_norm,
        grad_sample_mode=mode,
    )  # fmt: skip
    wrapped, optimizer, *criterion, loader = made
    criterion = criterion[0] if criterion else nn.CrossEntropyLoss()
    schedule = CosineAnnealingLR(optimizer, settings.epochs * len(loader))
    set_up = clock.lap()
    for _ in range(settings.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(wrapped(x), y).backward()
            optimizer.step()
            schedule.step()
    took = clock.lap()
    return Result(math.nan, engine.get_epsilon(settings.target_delta), optimizer.noise_multiplier, set_up, took)


Contender = Callable[[nn.Module, TensorDataset, Settings], Result]
CONTENDERS: dict[str, Contender] = {
    "eachgrad": lambda *given: by_eachgrad(*given, compile=False),
    "eachgrad compiled": lambda *given: by_eachgrad(*given, compile=True),
    "Opacus hooks": lambda *given: by_opacus(*given, mode="hooks"),
    "Opacus ghost": lambda *given: by_opacus(*given, mode="ghost"),
}


class Clock:
    """Seconds from one lap to the next."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        before, self._last = self._last, time.perf_counter()
        return self._last - before


def trained(contender: Contender, seed: int, settings: Settings) -> Result:
    """One run of a contender, with the accuracy on the digits that were held out."""
    train, test = load(seed)
    torch.manual_seed(seed)
    model = build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus' advice on its random numbers, and torch's on its hooks
        result = contender(model, train, settings)
    return replace(result, accuracy=accuracy(model, test))


def chosen(only: Iterable[str]) -> dict[str, Contender]:
    """The contenders that were asked for and are installed."""
    there = importlib.util.find_spec("opacus") is not None
    if not there:
        print("opacus is not installed: eachgrad runs alone")
    return {
        name: contender
        for name, contender in CONTENDERS.items()
        if any(fnmatch(name, pattern) for pattern in only) and (there or not name.startswith("Opacus"))
    }


def summary(results: dict[str, list[Result]]) -> dict[str, dict[str, Any]]:
    """Per contender: the mean accuracy, median times, and how many times longer than eachgrad it took."""
    base = results.get("eachgrad")
    found = {}
    for name, runs in results.items():
        row: dict[str, Any] = {
            "accuracy": statistics.mean(r.accuracy for r in runs),
            "lowest": min(r.accuracy for r in runs),
            "epsilon": max(r.epsilon for r in runs),
            "noise_multiplier": runs[0].noise_multiplier,
            "set_up": statistics.median(r.set_up for r in runs),
            "train": statistics.median(r.train for r in runs),
        }
        if base is not None:
            pairs = list(zip(runs, base, strict=True))
            row["train_ratio"] = statistics.median(r.train / b.train for r, b in pairs)
            row["total_ratio"] = statistics.median((r.set_up + r.train) / (b.set_up + b.train) for r, b in pairs)
        found[name] = row
    return found


def show(rows: dict[str, dict[str, Any]]) -> None:
    print("| | accuracy, mean (lowest) | epsilon | noise | set up s | train s | train / eachgrad | total / eachgrad |")
    print("|---" * 8 + "|")
    for name, row in rows.items():
        ratios = [f"{row[key]:.2f}" if key in row else "" for key in ("train_ratio", "total_ratio")]
        cells = [
            f"{row['accuracy']:.4f} ({row['lowest']:.4f})", f"{row['epsilon']:.3f}", f"{row['noise_multiplier']:.3f}",
            f"{row['set_up']:.2f}", f"{row['train']:.2f}", *ratios,
        ]  # fmt: skip
        print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=["*"])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "private.json")
    options = parser.parse_args()
    settings, contenders = Settings(), chosen(options.only)
    short = Settings(epochs=1)
    for contender in contenders.values():
        trained(contender, 0, short)  # what is paid once in a process, imports included
    results: dict[str, list[Result]] = {name: [] for name in contenders}
    for seed in range(options.seeds):
        for name, contender in contenders.items():
            result = trained(contender, seed, settings)
            results[name].append(result)
            print(
                f"seed {seed}, {name}: accuracy {result.accuracy:.4f}, {result.set_up + result.train:.1f} s", flush=True
            )
    rows = summary(results)
    show(rows)
    peers = {"opacus": version("opacus")} if any(name.startswith("Opacus") for name in contenders) else {}
    own = {name: version(name) for name in ("dp-accounting", "scikit-learn")}
    runs = {name: [asdict(result) for result in found] for name, found in results.items()}
    write(options.out, about(versions=own | peers, settings=asdict(settings), summary=rows, runs=runs))


if __name__ == "__main__":
    main()
