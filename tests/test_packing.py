"""Small gradients side by side: the clipped sums are those of each by itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import eachgrad
from eachgrad.queries import packing
from oracle import assert_same

B = 5


class Mixed(nn.Module):
    """Biases, norms and numbers of several dtypes, a frozen one and one that the loss does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 3)
        self.scale, self.single = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(3, dtype=torch.float32))
        self.phase, self.unused = nn.Parameter(torch.randn(3, dtype=torch.complex128)), nn.Parameter(torch.ones(2))
        self.norm.bias.requires_grad_(False)

    def forward(self, x):
        out = self.second(self.norm(self.first(x)).tanh()) * self.scale * self.single.double()
        return out + (self.phase * out).real


def problem(seed: int = 0):
    torch.manual_seed(seed)
    model = Mixed().double()
    model.single.data = model.single.data.float()
    return model, torch.randn(B, 4, 6, dtype=torch.float64), torch.randint(3, (B, 4))


def losses(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none").view(y.shape).sum(1)


def clipped(monkeypatch, small: int, poisoned: bool = False, **options):
    monkeypatch.setattr(packing, "SMALL", small)
    model, x, y = problem()
    with eachgrad.record(model) as tape:
        found = losses(model, x, y)
        if poisoned:
            found = found * torch.tensor([1.0, 1.0, float("nan"), 1.0, 1.0], dtype=found.dtype)
    return tape.ask(found, grad=eachgrad.clipped_sum(**options), norms=eachgrad.norms())


GROUPS = {"a": ["first*", "scale"], "b": ["norm*", "second*", "single", "phase", "unused"]}
OPTIONS = {
    "flat": {"max_norm": 0.3},
    "by groups": {"max_norm": {"a": 0.2, "b": 0.5}, "groups": GROUPS},
    "by parameter": {"max_norm": 0.1, "groups": "parameter"},
    "normalised": {"max_norm": 0.3, "normalise": True},
    "wide": {"max_norm": 0.3, "wide": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_packed_and_by_themselves_are_the_same(name, monkeypatch):
    packed, alone = (clipped(monkeypatch, small, **OPTIONS[name]) for small in (packing.SMALL, 0))
    assert packed.grad.keys() == alone.grad.keys()
    for key, value in alone.grad.items():
        assert packed.grad[key].dtype == value.dtype
        assert packed.grad[key].shape == value.shape
    assert_same(packed.grad, alone.grad, 1e-6)
    torch.testing.assert_close(packed.norms, alone.norms, rtol=1e-6, atol=0)


def test_against_a_loop(monkeypatch):
    model, x, y = problem()
    given = {n: p for n, p in model.named_parameters() if p.requires_grad}
    want, rows = {n: torch.zeros_like(p) for n, p in given.items()}, []
    for i in range(B):
        loss = losses(model, x[i : i + 1], y[i : i + 1]).sum()
        found = torch.autograd.grad(loss, list(given.values()), allow_unused=True)
        rows.append({n: torch.zeros_like(given[n]) if g is None else g for n, g in zip(given, found, strict=True)})
    for row in rows:
        size = sum(float(g.abs().square().sum()) for g in row.values()) ** 0.5
        for n in want:
            want[n] += min(1.0, 0.3 / size) * row[n]
    assert_same(clipped(monkeypatch, packing.SMALL, max_norm=0.3).grad, want, 1e-6)


def test_a_sample_that_is_not_finite_is_left_out_of_the_pack(monkeypatch):
    got, want = (clipped(monkeypatch, small, True, max_norm=0.3, nonfinite="zero") for small in (packing.SMALL, 0))
    assert all(value.isfinite().all() for value in got.grad.values())
    assert_same(got.grad, want.grad, 1e-6)


def test_small_gradients_share_their_ops(monkeypatch):
    """Fewer ops the more there are to pack."""
    counts = []
    for small in (packing.SMALL, 0):
        with torch.profiler.profile() as profile:
            clipped(monkeypatch, small, max_norm=0.3)
        counts.append(sum(event.count for event in profile.key_averages() if event.key == "aten::linalg_vector_norm"))
    assert counts[0] < counts[1]
