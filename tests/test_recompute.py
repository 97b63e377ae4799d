"""What is computed again in a traced step's backward instead of kept: the numbers stay, and less crosses the turn."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import eachgrad
from eachgrad import step
from eachgrad.recompute import Limits, kept, recompute, turn_of
from eachgrad.tidy import merge

aten = torch.ops.aten
ALL = Limits(large=0, fused=False)
B, D = 16, 32


def traced(fn, *args) -> GraphModule:
    """The graph of a function that returns (flag, losses, *answers), as it comes to the pass."""
    found = make_fx(fn, tracing_mode="fake")(*args)
    merge(found.graph)
    found.recompile()
    return found


def stepped(losses):
    """Losses of arguments, and the gradient of their sum for each argument, as a step has them."""

    def run(*args: Tensor) -> tuple[Tensor, ...]:
        leaves = [a.detach().requires_grad_() for a in args]
        found = losses(*leaves)
        grads = torch.autograd.grad(found.sum(), leaves)
        return (torch.zeros(()), found.detach(), *grads)

    return run


def sizes(found: GraphModule) -> dict:
    """The bytes that are kept, by op, without what is smaller than a matrix."""
    total: dict = {}
    for node, size in kept(found.graph, turn_of(found.graph)).items():
        if node.meta["val"].numel() > B * D // 2:
            total[node.target] = total.get(node.target, 0) + size
    return total


def check(found: GraphModule, make, limits: Limits = ALL, slack: float = 0.0, **options) -> int:
    """Run the pass; what it says it freed. On arguments that were not traced, the numbers must be what they were."""
    args = make()
    want, turn = found(*args), turn_of(found.graph)
    before = sum(kept(found.graph, turn).values())
    freed = recompute(found.graph, turn, limits, **options)
    assert before - sum(kept(found.graph, turn).values()) == freed
    found.graph.lint()
    found.recompile()
    got = found(*args)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert (a.dtype, a.stride()) == (b.dtype, b.stride())
        torch.testing.assert_close(a, b, rtol=slack, atol=slack * float(b.abs().max()))
    return freed


def matrices(count: int, dtype: torch.dtype = torch.float64, rows: int = B):
    """Arguments: (rows, D) and square ones."""
    return lambda: [torch.randn(rows if k == 0 else D, D, dtype=dtype) for k in range(count)]


def mlp(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return (F.gelu(x @ w) @ v).square().sum(1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_gelu_is_not_kept_beside_its_input(dtype):
    make, size = matrices(3, dtype), B * D * dtype.itemsize
    found = traced(stepped(mlp), *make())
    assert sizes(found) == {aten.mm.default: 2 * size, aten.gelu.default: size}
    assert check(found, make) == size
    assert sizes(found) == {aten.mm.default: 2 * size}


def test_what_is_computed_again_waits_for_the_backward():
    make = matrices(3)
    found = traced(stepped(mlp), *make())
    check(found, make)
    first, again = [node for node in found.graph.nodes if node.target is aten.gelu.default]
    turn = turn_of(found.graph)
    assert first < turn < again
    stack, seen = [again], set[Node]()
    while stack:
        node = stack.pop()
        seen.add(node)
        stack += node.all_input_nodes
    assert turn in seen  # or it could be computed with the first one, and kept


def gated(x: Tensor, w: Tensor, u: Tensor, v: Tensor) -> Tensor:
    return ((F.silu(x @ w) * (x @ u)) @ v).square().sum(1)


def test_gated():
    make, size = matrices(4), 8 * B * D
    found = traced(stepped(gated), *make())
    assert sizes(found) == {aten.mm.default: 3 * size, aten.silu.default: size, aten.mul.Tensor: size}
    assert check(found, make) == 2 * size
    assert sizes(found) == {aten.mm.default: 3 * size}


def test_what_is_fused_is_not_kept_and_not_counted():
    """A SiLU that products of elements alone read, and logits in float32, are never written."""
    make, size = matrices(4), 8 * B * D
    found = traced(stepped(gated), *make())
    assert check(found, make, Limits(large=0)) == size  # of the factor of a product alone
    again = [node.target for node in found.graph.nodes if node > turn_of(found.graph)]
    assert again.count(aten.silu.default) == 1  # computed again for it

    def losses(x: Tensor, w: Tensor) -> Tensor:
        return -(x @ w).float().log_softmax(1)[:, 0]

    make = matrices(2, torch.bfloat16)
    found = traced(stepped(losses), *make())
    assert aten._to_copy.default in [node.target for node in found.graph.nodes]
    assert check(found, make, Limits(large=0)) == 0


def layer(x, w, b, v):
    return (F.layer_norm(x @ v, (D,), w, b) @ v).square().sum(1)


def group(x, w, b, v):
    return (torch.relu(F.group_norm((x @ v).view(B, 8, 2, 2), 4, w, b)).view(B, D) @ v).square().sum(1)


NORMS = {"layer": (layer, D, aten.native_layer_norm.default), "group": (group, 8, aten.native_group_norm.default)}


@pytest.mark.parametrize("weighted", ["both", "weight", "neither"])
@pytest.mark.parametrize("name", NORMS)
def test_norms_follow_from_their_statistics(name, weighted):
    norm, size, op = NORMS[name]
    parameters = {"both": 2, "weight": 1, "neither": 0}[weighted]

    def losses(x, v, *given):
        w, b = (*given, None, None)[:2]
        return norm(x, w, b, v)

    def make() -> list[Tensor]:
        x, v = torch.randn(B, D, dtype=torch.float64), torch.randn(D, D, dtype=torch.float64)
        return [x, v, *(torch.randn(size, dtype=torch.float64) for _ in range(parameters))]

    def run(x, v, *given):
        return stepped(losses)(x, v, *given)

    torch.manual_seed(0)
    found = traced(run, *make())
    assert any(node.target is op for node in found.graph.nodes)
    assert check(found, make, slack=1e-14) == 8 * B * D  # of the norm's output, or of the ReLU's
    assert sizes(found) == {aten.mm.default: 2 * 8 * B * D}


def test_rms_norm():
    """Traced on a GPU it is one op; on a CPU it is not, so that it is put into a graph by hand."""
    torch.manual_seed(0)
    make = lambda: [torch.randn(B, D), torch.randn(D, D), torch.randn(D)]  # noqa: E731
    graph, fake = Graph(), torch._subclasses.FakeTensorMode()

    def call(target, *args) -> Node:
        node = graph.call_function(target, args)
        node.meta["val"] = target(*torch.fx.map_arg(args, lambda n: n.meta["val"]))
        return node

    given = [graph.placeholder(f"given_{k}") for k in range(3)]
    for node, value in zip(given, make(), strict=True):
        node.meta["val"] = fake.from_tensor(value)
    x = call(aten.mm.default, given[0], given[1])
    out = call(operator.getitem, call(aten._fused_rms_norm.default, x, [D], given[2], 1e-5), 0)
    losses = call(aten.sum.dim_IntList, out, [1])
    back = call(aten.mul.Tensor, x, call(aten.unsqueeze.default, call(aten.exp.default, losses), 1))
    graph.output((call(aten.sum.default, losses), losses, call(aten.mm.default, call(aten.t.default, back), out)))
    found = GraphModule({}, graph)
    assert sizes(found) == {aten.mm.default: 4 * B * D, operator.getitem: 4 * B * D}
    assert check(found, make, slack=1e-6) == 4 * B * D - 4 * B  # without the output, with one number for each row
    assert sizes(found) == {aten.mm.default: 4 * B * D}


def test_rounded_statistics_do_not_give_the_output_back():
    """A CPU rounds them to bfloat16: what is computed from them would be another number."""
    make = lambda: [torch.randn(*shape, dtype=torch.bfloat16) for shape in ((B, D), (D, D), (D,), (D,))]  # noqa: E731
    found = traced(stepped(lambda x, v, w, b: layer(x, w, b, v)), *make())
    assert check(found, make) == 0


def test_sixteen_bits_with_statistics_in_float32():
    """Computed in float32, as the op does, and rounded once."""
    torch.manual_seed(0)

    def make() -> list[Tensor]:
        x, v = (torch.randn(*shape, dtype=torch.bfloat16) for shape in ((B, D), (D, D)))
        return [x, v, torch.randn(D), torch.randn(D)]

    found = traced(stepped(lambda x, v, w, b: layer(x, w, b, v)), *make())
    for node in found.graph.find_nodes(op="call_function", target=operator.getitem)[1:3]:
        node.meta["val"] = node.meta["val"].float()  # which they are with a weight in float32; a trace says otherwise
    assert check(found, make, slack=2**-9) == 2 * B * D
    again = [node.target for node in found.graph.nodes if node > turn_of(found.graph)]
    assert again.count(aten._to_copy.default) == 2  # to float32, and back


def draws(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())]


def test_numbers_that_were_drawn_are_kept():
    def losses(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        mask = torch.bernoulli(torch.full((B, D), 0.5, dtype=x.dtype))
        noise = torch.rand_like(x)
        return ((F.gelu(x @ w) * mask + noise).tanh() @ v).square().sum(1) + (x * noise).sum(1)

    make = matrices(3)
    found = traced(stepped(losses), *make())
    drawing = draws(found.graph)
    assert len(drawing) == 2
    turn, args = turn_of(found.graph), make()
    torch.manual_seed(1)
    want = found(*args)
    assert recompute(found.graph, turn, Limits(large=0, reads=4, fused=False)) > 0
    found.recompile()
    assert draws(found.graph) == drawing
    torch.manual_seed(1)
    for a, b in zip(found(*args), want, strict=True):
        assert torch.equal(a, b)


def test_dropout_is_kept():
    make = matrices(3)
    losses = lambda x, w, v: (F.dropout(x @ w, 0.5) @ v).square().sum(1)  # noqa: E731
    found = traced(stepped(losses), *make())
    drawing = draws(found.graph)
    assert len(drawing) == 1
    recompute(found.graph, turn_of(found.graph), ALL)
    assert draws(found.graph) == drawing


def test_an_answer_stays():
    def run(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        leaves = [a.detach().requires_grad_() for a in (x, w, v)]
        hidden = F.gelu(leaves[0] @ leaves[1])
        losses = (hidden @ leaves[2]).square().sum(1)
        return torch.zeros(()), losses.detach(), *torch.autograd.grad(losses.sum(), leaves), hidden.detach()

    make = matrices(3)
    found = traced(run, *make())
    assert check(found, make) == 0


@pytest.mark.parametrize(
    "view", [lambda h: h.t(), lambda h: h.view(4, B // 4, D), lambda h: h[1:], lambda h: h.split(4)[1]]
)
def test_views_are_computed_from_the_same(view):
    """A view made before the turn and read after it keeps the whole memory: it is computed again as well."""

    def run(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        before = x @ w
        hidden = F.gelu(before)
        seen = view(hidden)
        losses = hidden.sum(1) + seen.sum()
        back = torch.ones_like(losses).cumsum(0)[:, None] * before @ w
        return torch.zeros(()), losses, back.t() @ hidden, back.sum() * seen

    make, size = matrices(2), 8 * B * D
    found = traced(run, *make())
    assert sizes(found) == {aten.mm.default: size, aten.gelu.default: size}
    assert check(found, make) == size
    assert sum(kept(found.graph, turn_of(found.graph)).values()) == size + 8 * B  # and the losses


def test_memory_read_by_strides_is_kept():
    def run(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        before = x @ w
        hidden = F.gelu(before)
        seen = hidden.as_strided((4, 4), (1, 5), 3)
        losses = hidden.sum(1) + seen.sum()
        back = torch.ones_like(losses).cumsum(0)[:, None] * before @ w
        return torch.zeros(()), losses, back.t() @ hidden, back.sum() * seen

    make = matrices(2)
    assert check(traced(run, *make()), make) == 0


def chain(x: Tensor, *weights: Tensor) -> Tensor:
    """A stream to which functions of arguments are added: each state follows from the one before."""
    for w in weights:
        x = torch.tanh(x + w[:1]) * 1.5
    return x.square().sum(1)


def test_depth():
    """Each state follows from the argument by twice as many ops as there were layers."""
    make, size = matrices(7), 8 * B * D
    crossing = []
    for depth in (0, 2, 4, 100):
        found = traced(stepped(chain), *make())
        check(found, make, Limits(large=0, depth=depth, reads=100, fused=False))
        crossing.append(sum(sizes(found).values()) // size)
    # The last is read by a power that waits for nothing: it would be computed at once.
    assert crossing[0] > crossing[1] > crossing[2] > crossing[3] == 1


def test_large():
    make, size = matrices(3), 8 * B * D
    assert check(traced(stepped(mlp), *make()), make, Limits(large=size + 1, fused=False)) == 0
    assert check(traced(stepped(mlp), *make()), make, Limits(large=size, fused=False)) == size


def test_what_would_have_to_be_kept_instead_is_not_worth_it():
    """The input of a tanh is not read again: kept in its place it would take as much."""
    make = matrices(3)
    losses = lambda x, w, v: (torch.tanh(x @ w) @ v).square().sum(1)  # noqa: E731
    assert check(traced(stepped(losses), *make()), make) == 0


def test_less_than_half_is_not_worth_it():
    """A product of eight bytes a number, from two of four and two that nothing else would keep."""

    def run(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        product = (x @ w).double() * (x.bfloat16() @ w.bfloat16()).double()
        losses = product.sum(1)
        back = (losses.tanh()[:, None].float() * x) @ w
        return torch.zeros(()), losses, back.double().t() @ product

    make = matrices(2, torch.float32)
    assert check(traced(run, *make()), make, Limits(large=0, reads=100, fused=False)) == 0


def test_what_would_lie_in_another_way_is_kept():
    """A norm's output is contiguous; computed from its input by pointwise ops, it would be turned as that is."""

    def losses(x: Tensor, w: Tensor) -> Tensor:
        return (F.layer_norm((w @ x.t()).t(), (D,)) @ w).square().sum(1)

    make = matrices(2)
    assert check(traced(stepped(losses), *make()), make) == 0


def test_a_cast_is_kept_in_the_narrower_of_two():
    def losses(x: Tensor, w: Tensor) -> Tensor:
        wide = (x @ w).double()
        return (wide * wide).sum(1)

    make, size = matrices(2, torch.float32), B * D
    found = traced(stepped(losses), *make())
    assert sizes(found) == {aten._to_copy.default: 8 * size}
    assert check(found, make) == 4 * size
    assert sizes(found) == {aten.mm.default: 4 * size}


def test_reads():
    """Of many tensors that are kept anyway, one more is not computed again."""

    def losses(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        parts = [(x + k) @ w for k in range(4)]
        total = parts[0] * parts[1] * parts[2] * parts[3]
        return (total @ v).square().sum(1) + sum(part.square().sum(1) for part in parts)

    make, size = matrices(3), 8 * B * D
    few, many = (traced(stepped(losses), *make()) for _ in range(2))
    check(few, make, Limits(large=0, reads=2.5, fused=False))
    check(many, make, Limits(large=0, reads=4, fused=False))
    assert sum(sizes(few).values()) > sum(sizes(many).values()) == 5 * size


def test_without_a_backward_nothing_changes():
    run = lambda x, w: (torch.zeros(()), F.gelu(x @ w).sum(1), x.sum(), w.sum())  # noqa: E731
    make = matrices(2)
    found = traced(run, *make())
    before = str(found.graph)
    assert check(found, make) == 0
    assert str(found.graph) == before


def test_a_graph_that_writes_is_left():
    def losses(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return (F.gelu((x @ w).add_(1)) @ v).square().sum(1)

    make = matrices(3)
    found = traced(stepped(losses), *make())
    assert check(found, make) == 0


def test_a_share():
    """No more is computed again than was asked for, and what comes first in the forward is."""
    losses = lambda x, *ws: _deep(x, ws)  # noqa: E731
    make, size = matrices(7, rows=4 * D), 8 * 4 * D * D
    graphs = [traced(stepped(losses), *make()) for _ in range(3)]
    before = sum(kept(graphs[0].graph, turn_of(graphs[0].graph)).values())
    everything = check(graphs[0], make)
    assert everything >= 5 * size
    assert check(graphs[1], make, share=0.0) == 0
    assert check(graphs[2], make, share=1.5 * size / before) == 2 * size
    again = [
        node for node in graphs[2].graph.nodes if node.target is aten.gelu.default and node > turn_of(graphs[2].graph)
    ]
    first = [node for node in graphs[2].graph.nodes if node.target is aten.mm.default][:2]
    assert {_source(node) for node in again} == set(first)


def _source(node: Node) -> Node:
    """The product that a GELU is of, whatever it waits for."""
    while node.target is not aten.mm.default:
        node = node.args[1 if node.target is aten.where.self else 0]
    return node


def _deep(x: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
    for w in weights:
        x = F.gelu(x @ w)
    return x.square().sum(1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attend, self.norm2 = nn.LayerNorm(8), nn.Linear(8, 24), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attend(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, 1, 1, bias=False), nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norm(self.conv(x)))


def transformer() -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 8), Block(), Block(), nn.Linear(8, 5))


def maps() -> nn.Module:
    ends = nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 5)
    return nn.Sequential(nn.Conv2d(3, 4, 3), Residual(), Residual(), *ends)


MODELS = {
    "transformer": (transformer, lambda: torch.randint(11, (4, 6))),
    "maps": (maps, lambda: torch.randn(4, 3, 8, 8)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("double")
def test_whole_steps(name, monkeypatch):
    """Compiled with everything computed again that can be, answers are the eager ones in float64."""
    freed: list[int] = []

    def noting(graph: Graph, turn: Node, share: float) -> int:
        freed.append(recompute(graph, turn, ALL, share))
        return freed[-1]

    monkeypatch.setattr(step, "recompute", noting)
    make, batch = MODELS[name]
    model = make()

    def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        return F.cross_entropy(out.mean(1) if out.ndim == 3 else out, y, reduction="none")

    ask = eachgrad.compile(model, losses, recompute=1.0, norms=eachgrad.norms(), clipped=eachgrad.clipped_sum(0.1))
    for _ in range(3):
        given = batch(), torch.randint(5, (4,))
        got, want = ask(*given), ask.eager(given)
        torch.testing.assert_close(got.norms, want.norms, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(got.clipped, want.clipped, rtol=1e-11, atol=1e-11)
    assert not ask.reasons()
    assert len(freed) == 1
    assert freed[0] > 0


def test_a_share_is_a_share():
    for wrong in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"recompute is a share, from 0\.0 to 1\.0, not"):
            eachgrad.compile(nn.Linear(2, 1), lambda model, x: model(x)[:, 0], recompute=wrong, norms=eachgrad.norms())
