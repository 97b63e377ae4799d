"""Small private runs for the tests: a table, a model of two layers, and whatever options a test is about."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from eachgrad.private import Run, make_private

N, WIDTH = 60, 5


def table(n: int = N, seed: int = 0) -> TensorDataset:
    """n samples of WIDTH numbers, and the sign of their sum."""
    x = torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x.sum(1) > 0).long())


def network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 2))


def losses_of(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.float(), y, reduction="none")


def make(model: nn.Module | None = None, dataset: Any = None, **options: Any) -> Run:
    """A run over the table with noise multiplier 1, 10 steps of 12 samples and no progress bar, unless told otherwise.

    The RDP accountant takes a tenth of the other's time.
    """
    model = network() if model is None else model
    given: dict[str, Any] = {
        "optimizer": None, "loss_fn": losses_of, "batch_size": 12, "target_delta": 1e-3, "progress": False,
        "accountant": "rdp",
    }  # fmt: skip
    given |= options
    if not {"target_epsilon", "noise_multiplier"} & set(options):
        given["noise_multiplier"] = 1.0
    if not {"epochs", "steps"} & set(options):
        given["steps"] = 10
    optimizer = given.pop("optimizer") or torch.optim.SGD(model.parameters(), lr=0.1)
    return make_private(model, optimizer, table() if dataset is None else dataset, **given)


def train(run: Run, steps: int | None = None) -> Run:
    """The run, after so many steps or all that are left."""
    for batch in run.loader if steps is None else run.loader.take(steps):
        run.step(batch)
    return run


def by_hand(run: Run) -> Run:
    """The same as `train`, piece by piece."""
    for batch in run.loader:
        for x, y in batch:
            with run.record():
                losses = losses_of(run.model(x), y)
            run.backward(losses)
        run.optimizer.step()
        run.optimizer.zero_grad()
    return run


def fixed(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def parameters_of(run: Run) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in run.model.named_parameters()}


def size(values: Mapping[str, Tensor]) -> float:
    """The norm of all of them together."""
    return math.sqrt(sum(float(t.detach().abs().double().square().sum()) for t in values.values()))


def clipped_sum(model: nn.Module, x: Tensor, y: Tensor, C: float, gamma: float | None = None) -> dict[str, Tensor]:
    """The truth: each sample's gradient by itself, clipped (or normalised), and added up in float64."""
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters() if p.requires_grad}
    for i in range(len(x)):
        loss = losses_of(model(x[i : i + 1]), y[i : i + 1]).sum()
        wanted = [p for p in model.parameters() if p.requires_grad]
        g = dict(zip(total, torch.autograd.grad(loss, wanted), strict=True))
        factor = C / max(C, size(g)) if gamma is None else C / (size(g) + gamma)
        for name, value in g.items():
            total[name] += factor * value.double()
    return total
