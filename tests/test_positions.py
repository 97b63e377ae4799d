"""dot(direction, positions=True): the share of each position in a product with a direction."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import eachgrad
from cases import CASES, Case
from oracle import assert_same, loop

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")

B, T, d, p, V = 3, 4, 5, 6, 7


class Net(nn.Module):
    """Tokens, two layers, and a head; `twice` uses the middle layer again, `tied` the table as the head."""

    def __init__(self, twice: bool = False, tied: bool = False):
        super().__init__()
        self.twice = twice
        self.table, self.a, self.b = nn.Embedding(V, d), nn.Linear(d, d), nn.Linear(d, V)
        if tied:
            self.b.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.a(self.table(ids)).tanh()
        return self.b(self.a(h).tanh() if self.twice else h)


def build(**options: bool) -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    model = Net(**options).double()
    return model, torch.tensor([[0, 1, 0, 3], [2, 2, 2, 2], [6, 5, 4, 0]])


def score(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return (out * torch.cos(torch.arange(out[0].numel()).view(out[0].shape) + 1.0)).sin().flatten(1).sum(1)


def ask(model: nn.Module, x: Tensor, losses: Callable[..., Tensor] = score, **options) -> eachgrad.PerSampleGrads:
    with eachgrad.record(model, **options) as tape:
        found = losses(model, x)
    return tape.backward(found)


def direction(model: nn.Module, *names: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    every = {n: torch.randn(q.shape, generator=generator, dtype=q.dtype) for n, q in model.named_parameters()}
    return {n: every[n] for n in names}


def share(model: nn.Module, x: Tensor, module: nn.Module, t: int, call: int, v: dict[str, Tensor]) -> Tensor:
    """<g[i], v> if the gradient of the module's output is let through at position t of one of its calls alone."""
    calls = 0

    def hook(_: nn.Module, args: tuple, out: Tensor) -> Tensor:
        nonlocal calls
        here, calls = calls, calls + 1
        keep = (torch.arange(out.shape[1]) == t).view(1, -1, 1)
        return torch.where(keep, out, out.detach()) if here == call else out.detach()

    total = torch.zeros(len(x), dtype=torch.float64)
    for i in range(len(x)):
        calls = 0
        handle = module.register_forward_hook(hook)
        (alone,) = score(model, x[i : i + 1])
        handle.remove()
        found = torch.autograd.grad(alone, [dict(model.named_parameters())[n] for n in v], allow_unused=True)
        total[i] = sum((g * w).sum() for g, w in zip(found, v.values(), strict=True) if g is not None)
    return total


@pytest.mark.parametrize("name", ["table", "a", "b"])
def test_each_position_alone(name):
    model, x = build()
    v = direction(model, f"{name}.weight")
    want = torch.stack([share(model, x, getattr(model, name), t, 0, v) for t in range(T)], 1)
    assert_same({"": ask(model, x).dot(v, positions=True)}, {"": want}, 1e-10)


def test_several_parameters_are_added():
    model, x = build()
    grads, names = ask(model, x), ("table.weight", "a.weight", "b.weight")
    want = sum(grads[n].dot(direction(model, *names)[n], positions=True) for n in names)
    found = grads.select("*.weight").dot(direction(model, *names), positions=True)
    assert found.shape == (B, T)
    assert_same({"": found}, {"": want}, 1e-12)
    assert_same({"": found.sum(1)}, {"": grads.dot(direction(model, *names))}, 1e-12)


def used_twice(model: Net, x: Tensor, v: dict[str, Tensor]) -> Tensor:
    """The second use's gradient passes the first one's op unhindered, but not its weight: by the uses' own factors."""
    kept = []
    ids, w, b = x, model.a.weight, model.a.bias
    first, second = (w.detach().clone().requires_grad_() for _ in range(2))
    for i in range(len(x)):
        h = F.linear(model.table(ids[i : i + 1]), first, b)
        mid = F.linear(h.tanh(), second, b)
        out = model.b(mid.tanh())
        loss = (out * torch.cos(torch.arange(out[0].numel()).view(out[0].shape) + 1.0)).sin().sum()
        row = []
        for use, inputs in ((h, model.table(ids[i : i + 1])), (mid, h.tanh())):
            (g,) = torch.autograd.grad(loss, use, retain_graph=True)
            row += [(torch.outer(g[0, t], inputs[0, t]) * v["a.weight"]).sum().detach() for t in range(T)]
        kept.append(torch.stack(row))
    return torch.stack(kept)


def test_used_twice():
    model, x = build(twice=True)
    v = direction(model, "a.weight")
    found = ask(model, x).dot(v, positions=True)
    assert found.shape == (B, 2 * T)
    assert_same({"": found}, {"": used_twice(model, x, v)}, 1e-10)


def test_tied():
    model, x = build(tied=True)
    v = direction(model, "table.weight")
    found, grads = ask(model, x).dot(v, positions=True), ask(model, x)
    assert found.shape == (B, 2 * T)
    assert_same({"": found.sum(1)}, {"": grads.dot(v)}, 1e-10)
    # The head by itself: the table is looked up without a gradient.
    apart, _ = build()
    apart.load_state_dict({**model.state_dict(), "b.weight": model.table.weight})
    head = ask(apart, x).dot({"b.weight": v["table.weight"]}, positions=True)
    assert_same({"": found[:, T:]}, {"": head}, 1e-10)


def test_samples_along_the_second_dimension():
    torch.manual_seed(0)
    model = nn.Linear(d, p).double()
    x = torch.randn(T, B, d, dtype=torch.float64)

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        return score(lambda x: model(x).transpose(0, 1), x)

    v = direction(model, "weight")
    found = ask(model, x, losses, batch_dim=1).dot(v, positions=True)
    want = ask(model, x.transpose(0, 1).contiguous()).dot(v, positions=True)
    assert_same({"": found}, {"": want}, 1e-12)


def test_several_directions():
    model, x = build()
    grads, names = ask(model, x), ("table.weight", "a.weight", "b.weight")
    one = direction(model, *names)
    many = {n: torch.stack([w, -2 * w, w * w]) for n, w in one.items()}
    found = grads.dot(many, positions=True)
    assert found.shape == (B, T, 3)
    assert_same({"": found[..., 1]}, {"": -2 * grads.dot(one, positions=True)}, 1e-12)
    assert_same({"": found.sum(1)}, {"": grads.dot(many)}, 1e-12)
    assert grads.dot({n: w[:0] for n, w in many.items()}, positions=True).shape == (B, T, 0)


@pytest.mark.parametrize("case", [case for case in CASES if case.tolerance <= 1e-6], ids=str)
def test_the_shares_of_every_case_add_up(case: Case):
    model, batch = case.build()
    with eachgrad.record(model, batch_size=case.batch_size, batch_dim=case.batch_dim) as tape:
        losses = case.losses(model, *batch)
    grads = tape.backward(losses)
    each = loop(model, case.losses, case.samples(batch)) if str(case) != "spectral_norm" else grads.dense()
    v = direction(model, *grads)
    for name, gradient in grads.items():
        found = gradient.dot_by_position(v[name])
        if found is not None:
            assert found.ndim == 2
            want = (each[name] * v[name].conj()).real.flatten(1).sum(1)
            assert_same({name: found.sum(1)}, {name: want}, max(1e-9, case.tolerance))


def test_asked_first_and_over_micro_batches():
    model, x = build()
    v = direction(model, "a.weight", "b.weight")
    want, gathered = ask(model, x).dot(v, positions=True), eachgrad.Accumulator(shares=eachgrad.dot(v, positions=True))
    for _ in range(3):
        with eachgrad.record(model) as tape:
            losses = score(model, x)
        assert_same({"": tape.ask(losses, shares=eachgrad.dot(v, positions=True)).shares}, {"": want}, 1e-12)
        with eachgrad.record(model) as tape:
            losses = score(model, x)
        tape.ask(losses, into=gathered)
    assert_same({"": gathered.answer().shares}, {"": want.repeat(3, 1)}, 1e-12)
    with eachgrad.record(model) as tape:
        losses = score(model, x[:, :2])
    with pytest.raises(ValueError, match="number of positions: 4, then"):
        tape.ask(losses, into=gathered)


def test_differentiable():
    model, x = build()
    v = direction(model, "table.weight", "a.weight", "b.weight")
    grads = ask(model, x, create_graph=True)
    c = torch.randn(B, T, dtype=torch.float64)
    found = torch.autograd.grad((grads.dot(v, positions=True) * c).sum(), model.a.weight, retain_graph=True)[0]
    # Position by position, by the same query with all other weights at zero.
    parts = [
        c[i, t] * torch.autograd.grad(grads.dot(v, positions=True)[i, t], model.a.weight, retain_graph=True)[0]
        for i in range(B)
        for t in range(T)
    ]
    assert_same({"": found}, {"": torch.stack(parts).sum(0)}, 1e-10)
    whole = torch.autograd.grad(grads.dot(v).sum(), model.a.weight, retain_graph=True)[0]
    shares = torch.autograd.grad(grads.dot(v, positions=True).sum(), model.a.weight)[0]
    assert_same({"": shares}, {"": whole}, 1e-10)


def test_what_has_no_positions_is_named():
    model, x = build()
    grads = ask(model, x)
    every = direction(model, *grads)
    with pytest.raises(ValueError, match=r"'a.bias', 'b.bias' are sums over positions"):
        grads.dot(every, positions=True)
    with pytest.raises(ValueError, match=r"'a.bias' are sums over positions"):
        grads["a.bias"].dot(every["a.bias"], positions=True)
    assert grads.dot({}, positions=True).shape == (B, 0)
    conv = nn.Conv1d(2, 3, 3).double()
    with pytest.raises(ValueError, match="'weight' are sums over positions"):
        ask(conv, torch.randn(B, 2, T, dtype=torch.float64)).dot(direction(conv, "weight"), positions=True)


def test_other_numbers_of_positions_are_named():
    model, x = build(twice=True)
    v = direction(model, "a.weight", "b.weight")
    with pytest.raises(ValueError, match=r"'a.weight': 8, 'b.weight': 4"):
        ask(model, x).dot(v, positions=True)
