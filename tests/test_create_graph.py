"""record(create_graph=True): answers that are differentiated once more, against a loop that is."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import eachgrad
from cases import CASES, Case
from eachgrad import CaptureError, blocks, plan, stream
from oracle import assert_same, loop

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")

# Torch has no second derivative of these ops; ours are composed of others, which have one.
ONLY_OURS = {str(case) for case in CASES if str(case).startswith("embedding_bag")}
NEITHER = {"norm_of_differences_to_a_codebook"}
REFUSED = {str(case) for case in CASES if "checkpoint" in case.name} | {"scale_grad_by_freq"}
STATEFUL = {"spectral_norm"}
FLOAT64 = [case for case in CASES if case.dtype == torch.float64 and str(case) not in NEITHER | REFUSED]


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def build(case: Case) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and its batch, of which all that can be asks for a gradient."""
    model, batch = case.build()
    return model, tuple(t.detach().requires_grad_() if t.is_floating_point() else t for t in batch)


def recorded(case: Case, model: nn.Module, batch: tuple[Tensor, ...], **options) -> tuple[eachgrad.Tape, Tensor]:
    sizes = {"batch_size": case.batch_size, "batch_dim": case.batch_dim}
    with eachgrad.record(model, create_graph=True, **sizes, **options) as tape:
        losses = case.losses(model, *batch)
    return tape, losses


def attached_loop(case: Case, model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """{name: (B, *shape)} by a loop over samples, still attached to the parameters and the batch."""
    named, rows = trainable(model), []
    with sdpa_kernel(SDPBackend.MATH):
        if str(case) in STATEFUL:  # every forward changes the model: one for all samples
            each = list(case.losses(model, *batch))
        else:
            each = [case.losses(model, *case.cut(batch, i)).sum() for i in range(len(case.samples(batch)))]
        for loss in each:
            found = torch.autograd.grad(loss, list(named.values()), create_graph=True, allow_unused=True)
            rows.append([dense(g, p) for g, p in zip(found, named.values(), strict=True)])
    return {name: torch.stack([row[k] for row in rows]) for k, name in enumerate(named)}


def dense(g: Tensor | None, like: Tensor) -> Tensor:
    if g is None:
        return torch.zeros_like(like)
    return g.to_dense() if g.is_sparse else g


def derivatives(value: Tensor, of: dict[str, Tensor]) -> dict[str, Tensor]:
    if not value.requires_grad:
        return {name: torch.zeros_like(t) for name, t in of.items()}
    found = torch.autograd.grad(value, list(of.values()), retain_graph=True, allow_unused=True)
    return {name: dense(g, t) for (name, t), g in zip(of.items(), found, strict=True)}


def directions(named: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {n: torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype) for n, p in named.items()}


def along(grads: dict[str, Tensor], v: dict[str, Tensor]) -> Tensor:
    return torch.stack([(grads[name] * v[name].conj()).real.sum() for name in v]).sum()


def answers(grads: eachgrad.PerSampleGrads, v: dict[str, Tensor], c: Tensor, bound: float) -> dict[str, Tensor]:
    """One number from each query."""
    return {
        "squares": grads.norms().square().sum(), "dot": (c * grads.dot(v)).sum(), "gram": grads.gram().sum(),
        "clipped": along(grads.clipped_sum(bound), v), "sum": along(grads.weighted_sum(c), v),
        "norms": (c * grads.norms()).sum(),
    }  # fmt: skip


def wanted(grads: dict[str, Tensor], v: dict[str, Tensor], c: Tensor, bound: float) -> dict[str, Tensor]:
    """The same numbers from the gradients themselves."""
    flat = torch.cat([t.reshape(len(c), -1) for t in grads.values()], 1)
    flat = torch.view_as_real(flat).flatten(1) if flat.is_complex() else flat
    norms = torch.linalg.vector_norm(flat, dim=1)
    dots = sum(((t * v[n].conj()).real.reshape(len(c), -1).sum(1) for n, t in grads.items()), torch.zeros(()))
    return {
        "squares": (flat * flat).sum(), "dot": (c * dots).sum(), "gram": (flat @ flat.mT).sum(),
        "clipped": (dots * bound / norms.clamp(min=bound)).sum(), "sum": (c * dots).sum(), "norms": (c * norms).sum(),
    }  # fmt: skip


@pytest.mark.parametrize("case", [c for c in FLOAT64 if str(c) not in ONLY_OURS], ids=str)
def test_every_answer_is_differentiable(case: Case):
    model, batch = build(case)
    tape, losses = recorded(case, model, batch)
    grads = tape.backward(losses)
    other, _ = build(case)  # the same numbers, in parameters of their own
    want = attached_loop(case, other, batch)
    c = torch.linspace(-1, 2, grads.batch_size, dtype=torch.float64)
    size = torch.cat([t.detach().reshape(len(c), -1) for t in want.values()], 1).norm(dim=1)
    v, bound = directions(trainable(model)), float(size.mean()) * 0.999
    inputs = {f"input {k}": t for k, t in enumerate(batch) if t.requires_grad}
    ours, theirs = answers(grads, v, c, bound), wanted(want, v, c, bound)
    tolerance = max(1e-8, case.tolerance)
    assert all(p.grad is None for p in model.parameters())
    for name, value in ours.items():
        assert_same({name: value}, {name: theirs[name]}, tolerance)
        got = derivatives(value, trainable(model) | inputs)
        assert_same(got, derivatives(theirs[name], trainable(other) | inputs), tolerance)


@pytest.mark.parametrize("case", [case for case in FLOAT64 if str(case) in ONLY_OURS], ids=str)
def test_where_torch_has_no_second_derivative(case: Case):
    model, batch = build(case)
    tape, losses = recorded(case, model, batch)
    grads = tape.backward(losses)
    named = trainable(model)
    v, c = directions(named), torch.linspace(-1, 2, grads.batch_size, dtype=torch.float64)
    found = derivatives((c * grads.dot(v)).sum(), named)
    step = 1e-5
    generator = torch.Generator().manual_seed(5)
    push = {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in named.items()}

    def moved(sign: int) -> Tensor:
        there = copy.deepcopy(model)
        for name, p in trainable(there).items():
            p.data.add_(push[name], alpha=sign * step)
        each = loop(there, case.losses, case.samples(batch))
        return along({name: torch.tensordot(c, g, dims=1) for name, g in each.items()}, v)

    slope = (moved(1) - moved(-1)) / (2 * step)
    assert_same({"": along(found, push)}, {"": slope}, 1e-6)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().flatten(1).sum(1)


def batch(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def ask(model: nn.Module, x: Tensor, **options) -> eachgrad.PerSampleGrads:
    with eachgrad.record(model, create_graph=True, **options) as tape:
        losses = squares(model, x)
    return tape.backward(losses)


def test_numerically():
    model = mlp()

    def found(x: Tensor) -> tuple[Tensor, ...]:
        grads = ask(model, x)
        return grads.norms(), grads.gram(), grads.project(3, seed=1), *grads.variance().values()

    assert torch.autograd.gradcheck(found, (batch(3, 4).requires_grad_(),))


def test_backward_gives_parameters_their_gradient():
    model, x = mlp(), batch(6, 4)
    ask(model, x).norms().square().sum().backward()
    want = [torch.autograd.grad(loss, list(model.parameters()), create_graph=True) for loss in squares(model, x)]
    total = torch.stack([g.square().sum() for row in want for g in row]).sum()
    expected = dict(zip(trainable(model), torch.autograd.grad(total, list(model.parameters())), strict=True))
    assert_same({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, expected, 1e-10)


def test_products_with_the_hessian_of_each_sample():
    model, x = mlp(), batch(3, 4)
    named = trainable(model)
    v = directions(named)
    products = ask(model, x).dot(v)
    for i in range(3):
        first = torch.autograd.grad(squares(model, x[i : i + 1])[0], list(named.values()), create_graph=True)
        along_v = along(dict(zip(named, first, strict=True)), v)
        assert_same(derivatives(products[i], named), derivatives(along_v, named), 1e-10)


def test_the_direction_has_a_gradient_too():
    model, x = mlp(), batch(3, 4)
    v = {name: t.requires_grad_() for name, t in directions(trainable(model)).items()}
    grads = ask(model, x)
    found = derivatives(grads.dot(v).sum(), v)
    assert_same(found, grads.weighted_sum(torch.ones(3)), 1e-10)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_loss_that_is_one_number(reduction):
    model, x = mlp(), batch(6, 4)
    want = derivatives(ask(model, x).norms().square().sum(), trainable(model))
    with eachgrad.record(model, create_graph=True) as tape:
        out = model(x)
    loss = out.square().sum() if reduction == "sum" else out.square().sum(1).mean()
    found = tape.backward(loss, reduction).norms().square().sum()
    assert_same(derivatives(found, trainable(model)), want, 1e-10)


def test_asked_first_and_with_a_plan(monkeypatch):
    monkeypatch.setattr(stream, "visit", None)  # nothing is streamed
    model, x = mlp(), batch(6, 4)
    want = derivatives(ask(model, x).norms().square().sum(), trainable(model))
    for _ in range(4):
        with eachgrad.record(model, create_graph=True) as tape:
            losses = squares(model, x)
        answer = tape.ask(losses, norms=eachgrad.norms())
        assert_same(derivatives(answer.norms.square().sum(), trainable(model)), want, 1e-10)


@pytest.mark.parametrize("case", FLOAT64[::7], ids=str)
def test_checked(case: Case):
    model, batch = build(case)
    tape, losses = recorded(case, model, batch, check=True)
    grads = tape.backward(losses)
    assert grads.receipt().deviation < 1e-9
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("case", FLOAT64[::5], ids=str)
def test_without_it_no_answer_has_a_graph(case: Case):
    model, batch = build(case)
    with eachgrad.record(model, batch_size=case.batch_size, batch_dim=case.batch_dim) as tape:
        losses = case.losses(model, *batch)
    grads = tape.backward(losses)
    c = torch.ones(grads.batch_size, dtype=torch.float64)
    found = answers(grads, directions(trainable(model)), c, 1.0)
    found |= grads.dense() | {"to parameters": grads.dot(trainable(model))}
    assert not any(t.requires_grad for t in found.values())


def test_norms_that_were_asked_for_without_a_graph():
    model, x = mlp(), batch(6, 4)
    grads = ask(model, x)
    with torch.no_grad():
        assert not grads.norms().requires_grad
    want = derivatives(ask(model, x).norms().sum(), trainable(model))
    assert_same(derivatives(grads.norms().sum(), trainable(model)), want, 1e-12)


def test_a_sample_with_a_zero_gradient():
    model, x = mlp(), batch(6, 4)
    with eachgrad.record(model, create_graph=True) as tape:
        losses = squares(model, x) * torch.tensor([1.0, 0, 1, 1, 0, 1])
    grads = tape.backward(losses)
    for value in answers(grads, directions(trainable(model)), torch.ones(6), 0.1).values():
        assert all(t.isfinite().all() for t in derivatives(value, trainable(model)).values())


class Parted(nn.Module):
    """Two layers with the same numbers for input, of which one sees no derivative."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        return self.b(h) * self.c(h.detach())


def test_the_same_numbers_with_other_derivatives():
    torch.manual_seed(0)
    model, x = Parted().double(), batch(3, 4, 16)
    assert plan.product_norms(3, 4, 16, 16, 8).name == "Gram"
    grads = ask(model, x)
    rows = [torch.autograd.grad(loss, list(model.parameters()), create_graph=True) for loss in squares(model, x)]
    for part in ("*", "b.weight", "c.weight"):
        names = list(grads.select(part))
        want = sum(g.square().sum() for row in rows for n, g in zip(grads, row, strict=True) if n in names)
        found = grads.select(part).norms().square().sum()
        assert_same(derivatives(found, trainable(model)), derivatives(want, trainable(model)), 1e-10)


def pair(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]


def patches(size: int, C: int, p: int, kernel: int, groups: int = 1, padding: int = 1) -> blocks.Patches:
    x, g = pair((3, 1, C, size, size), (3, 1, p, *[size + 2 * padding - kernel + 1] * 2))
    pads = ((padding, padding),) * 2
    return blocks.Patches(x, g, blocks.Geometry((kernel,) * 2, (1, 1), pads, (1, 1), groups))


BLOCKS = {
    "one position": lambda: blocks.Outer(*pair((3, 1, 4), (3, 1, 5))),
    "few positions": lambda: blocks.Outer(*pair((3, 4, 16), (3, 4, 16))),
    "many positions": lambda: blocks.Outer(*pair((3, 70, 4), (3, 70, 5))),
    "rows": lambda: blocks.Rows(torch.tensor([[0, 1, 0], [2, 2, 2], [1, -1, -1]]), pair((3, 3, 5))[0], 4),
    "small map": lambda: patches(3, 16, 16, 3),
    "large map": lambda: patches(9, 2, 3, 3),
    "groups": lambda: patches(4, 4, 4, 3, groups=4),
    "one pixel": lambda: patches(1, 3, 3, 1, padding=0),
}


@pytest.mark.parametrize("make", BLOCKS.values(), ids=BLOCKS)
def test_every_route_of_every_block(make, monkeypatch):
    monkeypatch.setattr(plan, "CHUNK", 200)  # several pieces
    block = make()
    factors = {n: t for n, t in vars(block).items() if isinstance(t, Tensor) and t.requires_grad}
    if isinstance(block, blocks.Rows):
        factors["value"].data[2, 1:] = 0
    whole = blocks.Dense(block.dense().detach().requires_grad_())
    (v,) = pair((2, *whole.value.shape[1:]))
    c = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    queries = {
        "dense": lambda b: b.dense(), "squares": lambda b: b.squared_norms(), "sum": lambda b: b.weighted_sum(c),
        "sums": lambda b: b.weighted_sums(torch.stack([c, c * c])), "dot": lambda b: b.dot(v[:1]),
        "dots": lambda b: b.dot(v), "gram": lambda b: b.gram(b), "moment": lambda b: b.sum_of_squares(),
        "taken": lambda b: b.take(torch.tensor([2, 0])).squared_norms(), "kept": lambda b: b.kept().squared_norms(),
        "with another": lambda b: b.dots(whole),
    }  # fmt: skip
    for name, query in queries.items():
        (weights,) = pair(tuple(query(block).shape))
        found = derivatives((query(block) * weights).sum(), factors)
        direct = derivatives((query(blocks.Dense(block.dense())) * weights).sum(), factors)
        assert_same({f"{name} {k}": t for k, t in found.items()}, {f"{name} {k}": t for k, t in direct.items()}, 1e-10)
    # And the dense gradients themselves, against numbers.
    assert torch.autograd.gradcheck(lambda *_: make_again(block).dense(), tuple(factors.values()))


def make_again(block: blocks.Block) -> blocks.Block:
    return type(block)(**vars(block))


class Zeroed(nn.Module):
    """A last layer that starts at zero, so that no gradient comes to the first one; B = T."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 2)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


def test_zeros_of_no_known_sample():
    torch.manual_seed(0)
    model = Zeroed().double()
    with pytest.raises(CaptureError, match=r"'a.weight', 'a.bias'.*exactly zero"):
        ask(model, batch(3, 3, 4))
    # One dimension alone can hold the samples.
    grads = ask(model, batch(3, 6, 4)[:, :4])
    v = directions(trainable(model))
    rows = [
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        for loss in squares(model, batch(3, 6, 4)[:, :4])
    ]
    want = torch.stack([along(dict(zip(v, row, strict=True)), v) for row in rows]).sum()
    named = trainable(model)
    assert_same(derivatives(grads.dot(v).sum(), named), derivatives(want, named), 1e-10)


def test_refusals():
    model, x = mlp(), batch(6, 4)
    with eachgrad.record(model, create_graph=True) as tape:
        losses = squares(model, x)
    with torch.no_grad(), pytest.raises(CaptureError, match="no_grad"):
        tape.backward(losses)
    for reentrant in (True, False):
        with eachgrad.record(model, create_graph=True) as tape:
            losses = checkpoint(model, x.requires_grad_(), use_reentrant=reentrant).square().sum(1)
        with pytest.raises(CaptureError, match="checkpoint"):
            tape.backward(losses)
    table = nn.Embedding(5, 4, scale_grad_by_freq=True)
    with eachgrad.record(table, create_graph=True) as tape:
        losses = table(torch.tensor([[0, 1, 1], [2, 0, 0]])).square().sum((1, 2))
    with pytest.raises(CaptureError, match="scale_grad_by_freq"):
        tape.backward(losses)


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


def test_kernels_are_chosen_in_the_block_alone():
    x = batch(1, 1, 4, 8).float()
    before = torch.backends.cuda.flash_sdp_enabled()
    with eachgrad.record(nn.Sequential(nn.Linear(8, 8), Attention()), create_graph=True) as tape:
        assert not torch.backends.cuda.flash_sdp_enabled()
        losses = tape.model(x).square().sum((1, 2, 3))
    assert torch.backends.cuda.flash_sdp_enabled() == before
    assert tape.backward(losses).norms().requires_grad
    assert torch.backends.cuda.flash_sdp_enabled() == before


class Overwritten(nn.Module):
    """A copy of a parameter is multiplied in place by what an earlier layer made."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.w = nn.Linear(4, 5), nn.Linear(5, 2), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.w.expand(len(x), 5).clone()
        h.mul_(self.a(x))
        return self.b(h)


@pytest.mark.parametrize("options", [{}, {"check": True}, {"create_graph": True}], ids=str)
def test_what_is_overwritten_is_kept_for_the_backward(options):
    torch.manual_seed(0)
    model, x = Overwritten().double(), batch(3, 4)
    with eachgrad.record(model, **options) as tape:
        losses = squares(model, x)
    want = loop(model, squares, [(x[i : i + 1],) for i in range(3)])
    assert_same(tape.backward(losses).dense(), want, 1e-10)
