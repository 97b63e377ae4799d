"""In which order a traced step computes: what is asked of a gradient follows it, and the numbers stay."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import eachgrad
from eachgrad import step
from eachgrad.kernels.signals import Slot
from eachgrad.ordering import in_order, late, soon
from eachgrad.recompute import Limits, turn_of
from eachgrad.recompute import recompute as again

aten = torch.ops.aten
B, T, D = 3, 4, 5


def names(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes]


def named(graph: Graph, target) -> list[Node]:
    return list(graph.find_nodes(op="call_function", target=target))


def traced(fn, make) -> GraphModule:
    return make_fx(fn, tracing_mode="fake")(*make())


def check(found: GraphModule, make) -> int:
    """Move what follows from the losses; the numbers of other arguments must be the same, to the bit, under one seed."""
    args, turn = make(), turn_of(found.graph)
    (output,) = found.graph.find_nodes(op="output")
    returned, before = output.args, set(found.graph.nodes)
    torch.manual_seed(1)
    want = found(*args)
    moved = soon(found.graph, turn)
    assert set(found.graph.nodes) == before
    assert output.args == returned
    found.graph.lint()  # every node after its inputs
    found.recompile()
    torch.manual_seed(1)
    for a, b in zip(found(*args), want, strict=True):
        assert torch.equal(a, b)
    return moved


def matrices() -> list[Tensor]:
    return [torch.randn(B, T, D, dtype=torch.float64), *(torch.randn(D, D, dtype=torch.float64) for _ in range(2))]


def asked(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Two layers, the whole backward, and after it each weight's gradients: of what was read the first is scaled then."""
    h = (x @ w).tanh()
    out = h @ v
    losses = out.square().sum((1, 2))
    g = 2 * out * torch.ones_like(losses)[:, None, None]
    inner = (g @ v.t()) * (1 - h.square())
    back = inner @ w.t()
    scaled, alone = x.sin().cos(), x.exp()
    first, second = torch.bmm(scaled.mT, inner), torch.bmm(h.mT, g)
    norms = first.square().sum((1, 2)) + second.square().sum((1, 2))
    return torch.zeros(()), losses, alone, back, norms, first.sum(0), second.sum(0)


def test_an_answer_follows_what_it_is_computed_from():
    found = traced(asked, matrices)
    *_, to_hidden, to_input = named(found.graph, aten.mm.default)
    first, second = named(found.graph, aten.bmm.default)
    assert to_hidden < to_input < first < second
    assert check(found, matrices) > 0
    assert second < to_hidden < first < to_input  # each before the backward goes on to the next layer
    # Between a product and the last gradient that it reads are only other readers of that: its view, and its own.
    assert second.prev is second.args[0]
    assert second.args[0].prev is second.args[1]
    squares = named(found.graph, aten.pow.Tensor_Scalar)
    assert {node.prev for node in squares if node.args[0] in (first, second)} <= {
        first,
        second,
        *first.users,
        *second.users,
    }


def test_what_it_reads_beside_comes_along_and_nothing_else():
    found = traced(asked, matrices)
    (sin,), (cos,), (exp,) = (named(found.graph, op.default) for op in (aten.sin, aten.cos, aten.exp))
    turn, first = turn_of(found.graph), named(found.graph, aten.bmm.default)[0]
    gradient, view, to_input = first.args[1], first.args[0], named(found.graph, aten.mm.default)[-1]
    assert turn < gradient < to_input < sin < cos < exp < view < first
    check(found, matrices)
    assert [sin.prev, cos.prev, view.prev, first.prev] == [
        gradient,
        sin,
        cos,
        view,
    ]  # in their order, with none between
    assert first < to_input < exp  # which no gradient meets, and which stays where it was


def test_what_comes_before_the_losses_stays():
    found = traced(asked, matrices)
    before = names(found.graph)
    end = before.index(turn_of(found.graph).name) + 1
    check(found, matrices)
    after = names(found.graph)
    assert after[:end] == before[:end]
    assert after[end:] != before[end:]


def test_a_gradient_that_is_there_at_once_moves_nothing():
    def run(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        flag, losses = torch.zeros(()), (x @ w).sum((1, 2))
        return flag, losses, losses.exp().sin()

    found = traced(run, matrices)
    before = names(found.graph)
    assert check(found, matrices) == 0
    assert names(found.graph) == before


def drawn(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Random numbers after the losses, of what comes later, of what comes earlier, and of what follows from neither."""
    losses = (x @ w).square().sum((1, 2))
    g = x * losses[:, None, None]
    back = g @ v
    late, early = torch.bernoulli(back.sigmoid()), torch.bernoulli(g.sigmoid())
    noise = torch.rand_like(x)
    return torch.zeros(()), losses, late * back, early * g, noise * g, torch.bmm(g.mT, x)


def test_random_numbers_are_drawn_in_their_order():
    found = traced(drawn, matrices)
    kinds = (aten.bernoulli.default, aten.rand_like.default)
    before = [node for node in found.graph.nodes if node.target in kinds]
    assert len(before) == 3
    assert check(found, matrices) > 0
    assert [node for node in found.graph.nodes if node.target in kinds] == before
    (product,), (back,) = named(found.graph, aten.bmm.default), named(found.graph, aten.mm.default)[1:]
    assert product < back < before[0]  # while all else is moved


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_draws_with_dropout_alone(dropout):
    """An attention of what follows from the losses; a CPU has no such kernel with dropout, so the graph does not run."""

    def run(x: Tensor) -> tuple[Tensor, ...]:
        losses = x.sum((1, 2, 3))
        g = losses[:, None, None, None] * x
        far = g.exp().sin()
        return torch.zeros(()), losses, far, aten._scaled_dot_product_flash_attention_for_cpu(g, g, g, dropout)[0]

    found = traced(run, lambda: [torch.randn(2, 2, 4, 8)])
    (attention,) = named(found.graph, aten._scaled_dot_product_flash_attention_for_cpu.default)
    (exp,), g = named(found.graph, aten.exp.default), attention.args[0]
    assert g < exp < attention
    soon(found.graph, turn_of(found.graph))
    found.graph.lint()
    assert (attention < exp) == (dropout == 0.0)


def scrambled(seed: int):
    """A function of three matrices: random ops, of which some follow from the losses, in any order."""
    source = random.Random(seed)
    plan = [(source.randrange(6), source.random(), source.random()) for _ in range(25)]

    def run(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        h = (x @ w).tanh()
        losses = h.sum((1, 2))
        made = [x, h, x * torch.ones_like(losses)[:, None, None]]
        for kind, i, j in plan:
            a, b = made[int(i * len(made))], made[int(j * len(made))]
            made.append(
                (
                    a + b,
                    a * b,
                    torch.bmm(a.mT, b).sum(1, keepdim=True) + a,
                    a @ v,
                    a.sin(),
                    a.split(2, 1)[0].mean() - b,
                )[kind]
            )
        return torch.zeros(()), losses, *made[-8:]

    return run


@pytest.mark.parametrize("seed", range(12))
def test_any_graph(seed):
    def make():
        return [t / 4 for t in matrices()]

    found = traced(scrambled(seed), make)
    turn = turn_of(found.graph)
    before = names(found.graph)
    follows = {turn}
    for node in found.graph.nodes:
        if not follows.isdisjoint(node.all_input_nodes):
            follows.add(node)
    check(found, make)
    after, end = names(found.graph), before.index(turn.name) + 1
    assert after[:end] == before[:end]
    place = {name: k for k, name in enumerate(before)}
    for node in follows - {turn}:
        last = max((a for a in node.all_input_nodes if a in follows), default=None)
        if node.op == "output" or last is None:
            continue
        # What lies between was behind it before, or is needed by it or by such a one: put there after it.
        other, needed = node.prev, set(node.all_input_nodes)
        while other is not last:
            needed |= {a for a in other.all_input_nodes if other in needed or place[other.name] > place[node.name]}
            assert other in needed or place[other.name] > place[node.name]
            other = other.prev


class Layer(nn.Module):
    """A transformer's layer, and a head."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.dropout = dropout
        self.norm1, self.norm2 = nn.LayerNorm(6), nn.LayerNorm(6)
        self.mix, self.out = nn.Linear(6, 18), nn.Linear(6, 6)
        self.wide, self.narrow, self.head = nn.Linear(6, 10), nn.Linear(10, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(2, (2, 3)).transpose(1, 2) for t in self.mix(self.norm1(x)).chunk(3, 2))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropped(self.out(found.transpose(1, 2).flatten(2)))
        return self.head(x + self.dropped(self.narrow(F.relu(self.wide(self.norm2(x))))))

    def dropped(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, self.dropout, True)[0] if self.dropout else x  # as on a GPU


def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1)


def answers(model: nn.Module, **options) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a compiled step says of a batch, and what the eager code does with the same random numbers."""
    torch._dynamo.reset()
    queries = {"norms": eachgrad.norms(), "clipped": eachgrad.clipped_sum(0.1), "mean": eachgrad.mean()}
    ask = eachgrad.compile(model, losses_of, **queries, **options)
    for k in range(3):  # of which two are answered eagerly
        torch.manual_seed(k)
        batch = torch.randn(4, 5, 6, dtype=torch.float64), torch.randint(5, (4, 5))
        drawn = torch.get_rng_state()
        found = flat(ask(*batch))
    torch.set_rng_state(drawn)
    assert not ask.reasons()
    assert ask.graphs[0].step
    return found, flat(ask.eager(batch))


def flat(answer) -> dict[str, Tensor]:
    sums = {f"{kind} {name}": t for kind in ("clipped", "mean") for name, t in getattr(answer, kind).items()}
    return {"norms": answer.norms, "losses": answer.losses} | sums


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("recompute", [0.0, 1.0])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_whole_steps(dropout, recompute, monkeypatch):
    """A transformer's answers are the eager ones, and those of the same step without."""
    moved = []

    def noting(graph: Graph, turn: Node) -> int:
        moved.append(soon(graph, turn))
        graph.lint()
        return moved[-1]

    monkeypatch.setattr(step, "takes_any_layout", lambda backend: True)
    monkeypatch.setattr(step, "recompute", lambda graph, turn, share: again(graph, turn, Limits(large=0), share))
    torch.manual_seed(0)
    model = Layer(dropout).double()
    monkeypatch.setattr(step, "soon", noting)
    found, eager = answers(model, backend="aot_eager", recompute=recompute)
    monkeypatch.setattr(step, "soon", lambda graph, turn: 0)
    plain, _ = answers(model, backend="aot_eager", recompute=recompute)
    assert len(moved) == 1
    assert moved[0] > 20
    assert_same(found, plain)
    assert_same(found, eager)


def test_options_of_the_compiler():
    assert in_order({"backend": "aot_eager", "mode": None}) == {"backend": "aot_eager", "mode": None}
    assert in_order({"backend": "inductor", "mode": None}) == {
        "backend": "inductor", "options": {"reorder_for_locality": False}
    }  # fmt: skip
    options = in_order({"backend": "inductor", "mode": "max-autotune-no-cudagraphs"})["options"]
    assert options["max_autotune"]
    assert options["coordinate_descent_tuning"]
    assert options["reorder_for_locality"] is False
    with pytest.raises(RuntimeError, match="Unrecognized mode=fastest"):
        in_order({"backend": "inductor", "mode": "fastest"})


def test_the_real_compiler_keeps_the_order(monkeypatch):
    """Its own pass over the order does not run, whatever the mode, and the answers are the eager ones."""
    from torch._functorch import config as functorch
    from torch._inductor import config
    from torch._inductor.fx_passes import post_grad

    calls, original = [], post_grad.reorder_for_locality

    def noting(graph: Graph) -> None:
        calls.append(len(graph.nodes))
        original(graph)

    monkeypatch.setattr(post_grad, "reorder_for_locality", noting)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 5)).double()
    with config.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        for mode in (None, "max-autotune-no-cudagraphs"):
            assert_same(*answers(model, mode=mode))
        assert not calls
        with torch.no_grad():
            torch.compile(lambda x: x.sin() + 1)(torch.randn(3))
    assert calls  # or nothing is asserted above


def with_a_flag(slot: Slot, leads: bool = False, random: bool = False):
    """Four products that are answers; the flag is computed beside them, or from the last one."""

    def run(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        means = [torch.mm(a.mT, b * k) / 3 for k in range(1, 5)]
        of = means[-1] if leads else a
        flag, _ = torch.ops.eachgrad.signal((of.sum() > 0), [], slot.key)
        return (flag, *(F.dropout(m, 0.5) for m in means)) if random else (flag, *means)

    return run


def halves() -> list[Tensor]:
    return [torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)]


def test_products_that_nobody_waits_for_come_behind_the_flag():
    slot = Slot()
    found = traced(with_a_flag(slot), halves)
    args = halves()
    want = found(*args)
    assert late(found.graph) == 0  # on a CPU nothing runs ahead
    assert late(found.graph, "cpu") == 4  # two products, by size half of them, each with its division
    found.graph.lint()
    found.recompile()
    (flag,) = named(found.graph, torch.ops.eachgrad.signal.default)
    assert {node.name for node in named(found.graph, aten.mm.default) if node > flag} == {"mm_2", "mm_3"}
    for a, b in zip(found(*args), want, strict=True):
        assert torch.equal(a, b)


def test_what_the_flag_is_computed_from_stays_before_it():
    slot = Slot()
    found = traced(with_a_flag(slot, leads=True), halves)
    late(found.graph, "cpu")
    found.graph.lint()
    (flag,) = named(found.graph, torch.ops.eachgrad.signal.default)
    assert {node.name for node in named(found.graph, aten.mm.default) if node > flag} == {"mm_1", "mm_2"}


def test_products_behind_which_random_numbers_are_drawn_stay():
    slot = Slot()
    assert late(traced(with_a_flag(slot, random=True), halves).graph, "cpu") == 0


def test_without_a_flag_nothing_moves():
    assert late(traced(lambda a, b: (torch.mm(a.mT, b),), halves).graph, "cpu") == 0
