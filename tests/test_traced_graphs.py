"""What is done to a traced graph before it is compiled: the numbers stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import eachgrad
from eachgrad import laying, step
from eachgrad.alignment import align
from eachgrad.blocks import arithmetic, outer, patches, windows
from eachgrad.channels import channels_last
from eachgrad.laying import laid_out
from eachgrad.rules import norm
from eachgrad.tidy import changes, draws, may_differ, merge, narrow, narrow_signs, write_apart

aten = torch.ops.aten
SUMS = torch.ops.eachgrad.position_sums.default


def targets(traced: torch.fx.GraphModule) -> list:
    return [node.target for node in traced.graph.nodes if node.op == "call_function"]


def detours(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The statistics of one input, reached by four ways, and of two others that only look alike."""
    ways = (x, x.detach(), x.unsqueeze(0)[0], x.permute(1, 0).t().view(x.shape))
    same = [torch.var_mean(way, 1)[0] for way in ways]
    return *same, torch.var_mean(x.t().contiguous().view(x.shape), 1)[0], torch.var_mean(x + 0, 1)[0], x @ w


def test_one_tensor_is_one_node():
    x, w = torch.randn(4, 6, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    traced = make_fx(detours, tracing_mode="fake")(x, w)
    want = detours(x, w)
    assert merge(traced.graph)
    traced.graph.lint()
    traced.recompile()
    for a, b in zip(traced(x, w), want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    statistics = [node for node in traced.graph.nodes if node.target == aten.var_mean.correction]
    assert len({node.args[0] for node in statistics}) == 3  # the input, transposed, and the sum
    assert aten.detach.default not in targets(traced)


def test_parts_of_a_tensor_are_not_one():
    def parts(x: Tensor) -> tuple[Tensor, ...]:
        return x[0].exp(), x[1].exp(), x.t()[0].exp(), x.view(torch.int64).bitwise_not()

    x = torch.randn(2, 2, dtype=torch.float64)
    traced = make_fx(parts, tracing_mode="fake")(x)
    merge(traced.graph)
    traced.recompile()
    for a, b in zip(traced(x), parts(x), strict=True):
        assert torch.equal(a, b)


def writing(x: Tensor) -> tuple[Tensor, ...]:
    alone = (x * 2).add_(1.0).mul_(x)  # what is written is read by nobody else
    seen = x * 3
    seen.add_(1.0)
    row = (x * 4)[0].add_(1.0)  # a view
    whole = x.round().to(torch.int64).mul_(2)
    parts = x * 5
    parts.split(1)[0].neg_()  # of memory that is read afterwards
    chain = (x @ x).view(9)[1:].view(2, 4).t().relu_().mul_(2.0)  # views of what is there for them alone
    both = x * 6
    first, second = both.view(9), both.t()
    first.exp_()  # of two views of one
    twice = (x * 7).as_strided((2, 3), (1, 1)).clone().add_(1.0)
    return alone, seen + seen, row, whole, parts + 1, chain, second + 1, twice, x.t().sin_()


def test_what_is_written_for_one_reader_is_made_for_it():
    traced = make_fx(writing, tracing_mode="fake")(torch.randn(3, 3, dtype=torch.float64))
    x = torch.randn(3, 3, dtype=torch.float64)
    want = writing(x.clone())
    written = [node.target for node in traced.graph.nodes if changes(node)]
    assert write_apart(traced.graph) >= 5
    left = [node.target for node in traced.graph.nodes if changes(node)]
    # Into what was given, into a part, and into one of two views.
    assert {aten.sin_.default, aten.neg_.default, aten.exp_.default} <= set(left)
    assert not {aten.relu_.default, aten.mul_.Tensor} & set(left)
    assert len(left) < len(written)
    traced.recompile()
    given = x.clone()
    for a, b in zip(traced(given), want, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(given, x.sin())


def test_numbers_that_lie_twice_are_written_as_they_were():
    def run(x: Tensor) -> tuple[Tensor, ...]:
        return ((x * 7).as_strided((2, 3), (3, 1)).add_(1.0),)

    traced = make_fx(run, tracing_mode="fake")(torch.randn(3, 3))
    assert write_apart(traced.graph) == 0


@pytest.mark.parametrize("recompute", [0.0, 1.0])
def test_relus_in_place_leave_a_graph_that_can_be_put_in_order(monkeypatch, recompute):
    """Directly after a convolution or a matrix, whose outputs are views."""
    graphs, order = [], step.soon
    monkeypatch.setattr(step, "takes_any_layout", lambda backend: True)
    monkeypatch.setattr(step, "soon", lambda graph, turn: (graphs.append(graph), order(graph, turn))[1])
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(3, 4, 3),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(64, 7),
        nn.ReLU(inplace=True),
        nn.Linear(7, 5),
    )
    model, y = nn.Sequential(*layers).double(), torch.randint(5, (5,))
    loss = lambda out, y: nn.functional.cross_entropy(out, y, reduction="none")  # noqa: E731
    queries = {"norms": eachgrad.norms(), "clipped": eachgrad.clipped_sum(0.1)}
    ask = eachgrad.compile(model, loss, backend="aot_eager", recompute=recompute, **queries)
    for _ in range(3):
        x = torch.randn(5, 3, 6, 6, dtype=torch.float64)
        got, want = ask(x, y), ask.eager((x, y))
        torch.testing.assert_close(got.norms, want.norms, rtol=1e-12, atol=0)
        torch.testing.assert_close(got.clipped, want.clipped, rtol=1e-10, atol=1e-12)
    assert graphs
    assert not any(changes(node) for graph in graphs for node in graph.nodes)
    assert not ask.reasons()


def test_ops_of_the_same_name_are_not_the_same(monkeypatch):
    """A user's op that writes, and torch's own whose arguments are others out of place."""
    library = torch.library.Library("eachgrad_tests_tidy", "FRAGMENT")
    library.define("round_(Tensor(a!) self) -> Tensor(a!)")
    library.impl("round_", lambda x: x.mul_(3.0), "CompositeExplicitAutograd")

    def run(x: Tensor) -> tuple[Tensor, ...]:
        return torch.ops.eachgrad_tests_tidy.round_(x * 1.5), (x * 2).pow_(2), (x * 3).pow_(x), (x * 4).add_(1)

    x = torch.rand(3, 3, dtype=torch.float64)
    traced = make_fx(run, tracing_mode="fake")(x)
    write_apart(traced.graph)
    traced.recompile()
    for got, want in zip(traced(x), run(x), strict=True):
        assert torch.equal(got, want)
    left = {node.target for node in traced.graph.nodes if changes(node)}
    assert left == {torch.ops.eachgrad_tests_tidy.round_.default, aten.pow_.Scalar, aten.pow_.Tensor}


def test_other_numbers_in_the_same_memory_are_not_read():
    def run(x: Tensor) -> Tensor:
        wide = torch.view_as_complex(x.float().view(2, 3, 2, 2))
        bits = x.float().view(torch.int32).view(torch.float32)
        return SUMS([torch.view_as_real(wide).reshape(2, 3, 4)]) + SUMS([bits])

    x = torch.randn(2, 3, 4).bfloat16()
    traced = make_fx(run, tracing_mode="fake")(x)
    assert narrow(traced.graph) == 0
    traced.recompile()
    assert torch.equal(traced(x), run(x))


def sums_over_positions(x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    wide = x.float()
    op = torch.ops.eachgrad.position_sums
    views = wide.view(2, 3, 4).transpose(0, 1), wide.double().float().view(3, 2, 4)
    return op([views[0], h]), op([views[1]]), op([h, wide.view(3, 2, 4)]), op([(2 * wide).view(3, 2, 4)]), wide + 1


def test_sums_over_positions_read_sixteen_bits():
    x, h = torch.randn(6, 4).bfloat16(), torch.randn(3, 2, 4)
    traced = make_fx(sums_over_positions, tracing_mode="fake")(x, h)
    want = sums_over_positions(x, h)
    assert narrow(traced.graph) == 2  # not what was rounded or computed on the way
    traced.graph.lint()
    traced.recompile()
    for a, b in zip(traced(x, h), want, strict=True):
        assert torch.equal(a, b)
    read = [node.args[0] for node in traced.graph.find_nodes(op="call_function", target=SUMS)]
    assert [[a.meta["val"].dtype for a in values] for values in read] == [
        [torch.bfloat16, torch.float32], [torch.float32], [torch.float32, torch.bfloat16], [torch.float32]
    ]  # fmt: skip


SIGNS = aten.threshold_backward
HARD = (1.0, -1.0, 0.0, -0.0, 1e-38, -1e-38, 2.0**-126, 2.0**-133, -(2.0**-140), 3.4e38, -3.4e38)
HARD = torch.tensor([*HARD, float("inf"), -float("inf"), float("nan")])


def rectified(x: Tensor, g: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    """A ReLU whose copy in bfloat16 is read before and after its backward, and one whose input is looked at."""
    out = torch.relu(x)
    small, given = out.to(torch.bfloat16), x.to(torch.bfloat16)
    return small.exp(), aten.threshold_backward(g, out, 0), small * h, aten.threshold_backward(g, x, 0), given * h


def test_signs_are_read_from_a_copy_in_bfloat16():
    x, g, h = HARD.clone(), torch.randn(len(HARD)), torch.randn(len(HARD)).bfloat16()
    traced = make_fx(rectified, tracing_mode="fake")(torch.randn(len(HARD)), g, h)
    want = traced(x, g, h)
    assert narrow_signs(traced.graph) == 2
    traced.graph.lint()
    traced.recompile()
    read = [
        node.args[1].meta["val"].dtype for node in traced.graph.find_nodes(op="call_function", target=SIGNS.default)
    ]
    assert read == [torch.bfloat16] * 2
    for a, b in zip(traced(x, g, h), want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)  # of the same dtype, too
    assert want[1].dtype == torch.float32
    assert torch.equal(want[1] != 0, (x > 0) | x.isnan())


def test_only_the_smallest_numbers_lose_their_sign():
    powers = range(-149, -100)  # all there are in float32 below
    x = torch.tensor([2.0**k for k in powers], dtype=torch.float64).float()
    assert (x > 0).all()
    g, h = torch.ones(len(x)), torch.ones(len(x)).bfloat16()
    traced = make_fx(rectified, tracing_mode="fake")(torch.randn(len(x)), g, h)
    want = traced(x, g, h)[1]
    narrow_signs(traced.graph)
    traced.recompile()
    got = traced(x, g, h)[1]
    assert (want == 1).all()
    assert [k for k, kept in zip(powers, got == 1, strict=True) if not kept] == list(range(-149, -133))


def with_copy(dtype: torch.dtype, threshold: float = 0.0, late: bool = False):
    """A ReLU's backward, and a copy of its output in another dtype that is read after it."""

    def run(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        out = torch.relu(x)
        small = None if late else out.to(dtype)
        back = aten.threshold_backward(g, out, threshold)
        return back, (out.to(dtype) if small is None else small) + 1

    return run


ALONE = {
    "float16": (with_copy(torch.float16), torch.float32),
    "float64": (with_copy(torch.bfloat16), torch.float64),
    "another threshold": (with_copy(torch.bfloat16, 0.5), torch.float32),
    "made later": (with_copy(torch.bfloat16, late=True), torch.float32),
}


@pytest.mark.parametrize("name", ALONE)
def test_signs_that_are_read_where_they_are(name):
    """What has other signs in the copy, and a copy that is not there yet."""
    fn, dtype = ALONE[name]
    x = torch.cat([HARD, torch.tensor([0.5, 0.501, 1e-7, 1e-8])]).to(
        dtype
    )  # 0.501 is 0.5 in bfloat16, and the last is 0 in float16
    g = torch.randn_like(x)
    traced = make_fx(fn, tracing_mode="fake")(torch.randn_like(x), g)
    assert narrow_signs(traced.graph) == 0
    traced.recompile()
    torch.testing.assert_close(traced(x, g), fn(x, g), rtol=0, atol=0, equal_nan=True)


def test_a_copy_that_nobody_reads_later_is_not_kept_for_signs():
    def run(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        out = torch.relu(x)
        first = out.to(torch.bfloat16).exp()
        return first.float(), aten.threshold_backward(g, out, 0)

    traced = make_fx(run, tracing_mode="fake")(HARD.clone(), HARD.clone())
    assert narrow_signs(traced.graph) == 0


ATTENTION = {  # by the place of their dropout
    aten._scaled_dot_product_flash_attention.default: 3,
    aten._scaled_dot_product_flash_attention_for_cpu.default: 3,
    aten._scaled_dot_product_efficient_attention.default: 5,
    aten._scaled_dot_product_cudnn_attention.default: 5,
    aten._scaled_dot_product_efficient_attention_backward.default: 9,
}


@pytest.mark.parametrize("op", ATTENTION, ids=str)
def test_attention_draws_with_dropout_alone(op):
    place = ATTENTION[op]
    assert op._schema.arguments[place].name == "dropout_p"

    def drawing(*dropout: float, **named: float) -> tuple[bool, bool]:
        graph = Graph()
        x = graph.placeholder("x")
        node = graph.call_function(op, (x,) * place + dropout, named)
        return draws(node), may_differ(graph)

    assert drawing(0.0) == (False, False)
    assert drawing(0.1) == (True, True)
    assert drawing(dropout_p=0.0) == (False, False)
    assert drawing(dropout_p=0.1) == (True, True)
    if op._schema.arguments[place].has_default_value():
        assert drawing() == (False, False)


def test_ops_that_draw():
    def run(q: Tensor, p: float) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, dropout_p=p)

    def found(fn) -> tuple[bool, bool]:
        graph = make_fx(fn, tracing_mode="fake")(torch.rand(2, 2, 4, 8)).graph
        return any(map(draws, graph.nodes)), may_differ(graph)

    assert found(lambda q: run(q, 0.0)) == (False, False)
    assert found(lambda q: run(q, 0.1))[0]
    assert found(lambda q: torch.native_dropout(q, 0.0, True)) == (True, False)  # torch's search leaves it alone
    assert found(lambda q: torch.bernoulli(q)) == (True, False)
    assert found(lambda q: torch.randn_like(q)) == (True, True)  # which that would take for one number
    assert found(lambda q: q.sin() @ q.mT) == (False, False)


def convolutions(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    where = ([1, 1], [1, 1], [1, 1])
    out = torch.relu(torch.convolution(x, w, None, *where, False, [0, 0], 1))
    back = aten.convolution_backward(g * out, x, w, None, *where, False, [0, 0], 1, [True, True, False])
    window = ([3, 3], [1, 1], [1, 1], [1, 1])
    ours = torch.ops.eachgrad.conv_squares(x, g * out, *window), torch.ops.eachgrad.conv_gradients(x, g * out, *window)
    grouped = torch.convolution(x, w[:, :2], None, *where, False, [0, 0], 2)
    sums = out.view(2, 4, -1).sum(2)  # as the statistics of a norm
    return (
        sums,
        back[0].view(2, 2, -1).sum(2),
        back[1],
        *ours,
        torch.ops.eachgrad.conv_sum(x, g * out, *window),
        grouped,
    )


@pytest.mark.parametrize("merged", [False, True])
def test_convolutions_have_their_channels_last(merged):
    torch.manual_seed(0)
    x, w, g = torch.randn(2, 4, 5, 6), torch.randn(8, 4, 3, 3), torch.randn(2, 8, 5, 6)
    traced = make_fx(convolutions, tracing_mode="fake")(x, w, g)
    want = traced(x, w, g)
    if merged:
        merge(traced.graph)
    assert channels_last(traced.graph) == 0  # not on a GPU
    assert channels_last(traced.graph, slow=lambda value: True) >= 3
    traced.graph.lint()
    traced.recompile()
    for a, b in zip(traced(x, w, g), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    clones = {node for node in traced.graph.nodes if node.target == aten.clone.default}
    for node in traced.graph.nodes:
        if node.target == aten.convolution_backward.default:
            assert set(node.args[:3]) <= clones
        if node.target == aten.convolution.default and node.args[8] == 2:
            assert not set(node.args[:2]) & clones


def read_in_many_ways(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """A map that convolutions read, and pointwise ops; what these make of it is read by its memory, as the map is."""
    where = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    out = x.exp() - 1
    signs = aten.threshold_backward(out.sin(), out, 0)
    both = torch.convolution(out, w, None, *where), *aten.convolution_backward(
        signs, out, w, None, *where, [True, True, False]
    )[:2]  # fmt: skip
    by_memory = [t.as_strided((5, 7), (7, 2), 3) for t in (out, signs)]
    return *both, *by_memory, out.view(2, -1)[:, ::3], signs.view(-1)[5:], torch.sort(signs.flatten())[0]


@pytest.mark.usefixtures("everywhere")
def test_pointwise_readers_of_a_map_read_what_convolutions_read():
    torch.manual_seed(0)
    args = torch.randn(2, 4, 5, 6, dtype=torch.float64), torch.randn(4, 4, 3, 3, dtype=torch.float64)
    traced = laid(read_in_many_ways, *args)
    for a, b in zip(traced(*args), read_in_many_ways(*args), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)

    def only(op) -> Node:
        (node,) = traced.graph.find_nodes(op="call_function", target=op.default)
        return node

    forward, back, sine, signs = only(aten.convolution), only(aten.convolution_backward), only(aten.sin), only(SIGNS)
    (turned,) = {forward.args[0], back.args[1], sine.args[0], signs.args[1]}  # one for all
    assert turned.kwargs == {"memory_format": torch.channels_last}
    out = turned.args[0]
    assert out.meta["val"].is_contiguous()
    assert signs.meta["val"].is_contiguous(memory_format=torch.channels_last)
    first, second = (
        node.args[0] for node in traced.graph.find_nodes(op="call_function", target=aten.as_strided.default)
    )
    assert first is out
    assert second is not signs  # put back


def strided(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Two products of odd sizes, of which the second's memory is read by strides."""
    out = (x @ w.t()) @ v
    return out, out.as_strided((3, 5), (1, 2), 4), out.view(-1)[::2]


def laid(fn, *args) -> torch.fx.GraphModule:
    """The traced function with everything laid out as on a GPU."""
    traced = make_fx(fn, tracing_mode="fake")(*args)
    traced.graph = laid_out(traced)
    traced.graph.lint()
    traced.recompile()
    return traced


@pytest.fixture
def everywhere(monkeypatch):
    """Everything is laid out anew, on a CPU as well."""
    for change in (align, channels_last):
        monkeypatch.setattr(laying, change.__name__, lambda graph, f=change: f(graph, lambda value: True))


@pytest.mark.usefixtures("everywhere")
def test_what_reads_memory_by_strides_finds_it_as_it_was():
    torch.manual_seed(0)
    args = [torch.randn(*shape, dtype=torch.float64) for shape in ((6, 16), (13, 16), (13, 5))]
    traced = laid(strided, *args)
    assert aten.cat.default in targets(traced)
    for a, b in zip(traced(*args), strided(*args), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("everywhere")
def test_memory_that_was_turned_is_turned_again():
    def turned(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        out = (x @ w).t()
        return out, out.as_strided((3, 5), (1, 2), 4)

    args = torch.randn(6, 13, dtype=torch.float64), torch.randn(13, 5, dtype=torch.float64)
    traced = laid(turned, *args)
    for a, b in zip(traced(*args), turned(*args), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("everywhere")
def test_memory_with_gaps_is_left_as_it_is():
    def gaps(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        out = (x @ w)[:, ::2]
        return out, out.as_strided((3, 2), (1, 2), 4)

    args = torch.randn(6, 13, dtype=torch.float64), torch.randn(13, 5, dtype=torch.float64)
    traced = laid(gaps, *args)
    assert aten.cat.default not in targets(traced)
    for a, b in zip(traced(*args), gaps(*args), strict=True):
        assert torch.equal(a, b)


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.GroupNorm(2, outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1), nn.GroupNorm(2, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x))))) + self.shortcut(x))


class Odd(nn.Module):
    """Linear layers of odd sizes over positions, one upon another, with norms between some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 11), nn.LayerNorm(11), nn.Tanh(), nn.Linear(11, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean(1)


class Attended(nn.Module):
    """A convolution's maps as the queries, keys and values of an attention, and weights of a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 3, 1, 1)
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(4, 5))
        self.norm = nn.GroupNorm(3, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.norm(self.conv(x)).flatten(2).transpose(1, 2).chunk(3, 2)
        return self.linear(nn.functional.scaled_dot_product_attention(q, k, v).mean(1))


def noting(change, calls):
    def run(graph):
        calls.append(change(graph, lambda value: True))
        return calls[-1]

    return run


MODELS = {
    "maps as queries": (Attended, (5, 3, 8, 8)),
    "convolutions": (
        lambda: nn.Sequential(Residual(3, 4, 1), Residual(4, 6, 2), nn.Flatten(), nn.Linear(6 * 16, 5)),
        (5, 3, 8, 8),
    ),
    "odd sizes": (Odd, (5, 9, 7)),
}


@pytest.mark.parametrize("name", MODELS)
def test_whole_steps_as_on_a_gpu(name, monkeypatch):
    """Forward, backward and answers with products padded and channels last are what they are without."""
    calls = []
    monkeypatch.setattr(step, "takes_any_layout", lambda backend: True)
    for module in (arithmetic, outer, patches, windows, norm):
        monkeypatch.setattr(module, "on_gpu", lambda t: True)
    monkeypatch.setattr(patches.Patches, "_native", False)
    for change in (align, channels_last):
        monkeypatch.setattr(laying, change.__name__, noting(change, calls))
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, y = make().double(), torch.randint(5, (5,))
    loss = lambda model, x, y: nn.functional.cross_entropy(model(x), y, reduction="none")  # noqa: E731
    queries = {"norms": eachgrad.norms(), "clipped": eachgrad.clipped_sum(0.1), "gram": eachgrad.gram()}
    ask = eachgrad.compile(model, loss, backend="aot_eager", **queries)
    for _ in range(3):
        x = torch.randn(shape, dtype=torch.float64)
        got, want = ask(x, y), ask.eager((x, y))
        torch.testing.assert_close(got.norms, want.norms, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(got.gram, want.gram, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(got.clipped, want.clipped, rtol=1e-10, atol=1e-10)
    assert not ask.reasons()
    assert any(calls)


class Shared(nn.Module):
    """Queries, keys and values by three layers of one norm's output, and a ReLU in float32 that two layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out, self.head = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.mix = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (layer(h).unflatten(2, (2, 4)).transpose(1, 2) for layer in self.mix)
        x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = torch.relu(x.float())
        return (self.head(x) + self.head(self.out(x))).mean(1)


class Dropped(nn.Module):
    """One tensor, dropped out twice: by other numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(F.scaled_dot_product_attention(x, x, x)).mean(1)
        a, b = (torch.native_dropout(h, 0.5, True)[0] for _ in range(2))
        return self.head(a * h.exp() + b)


@pytest.fixture
def graphs(monkeypatch) -> list[Graph]:
    """The graphs of compiled steps, as the compiler gets them."""
    found: list[Graph] = []
    original = step.soon

    def noting(graph: Graph, turn: Node) -> int:
        found.append(graph)
        return original(graph, turn)

    monkeypatch.setattr(step, "takes_any_layout", lambda backend: True)
    monkeypatch.setattr(step, "soon", noting)
    return found


def stepped(model: nn.Module, dtype: torch.dtype) -> tuple[dict, dict]:
    """The answers of a compiled step, and the eager ones with the same random numbers."""
    torch._dynamo.reset()
    loss = lambda model, x, y: F.cross_entropy(model(x).to(dtype), y, reduction="none")  # noqa: E731
    queries = {"norms": eachgrad.norms(), "clipped": eachgrad.clipped_sum(0.1)}
    ask = eachgrad.compile(model, loss, backend="aot_eager", **queries)
    for seed in range(3):
        torch.manual_seed(seed)
        batch = torch.randn(5, 4, 8, dtype=dtype), torch.randint(5, (5,))
        drawn = torch.get_rng_state()
        got = ask(*batch)
    torch.set_rng_state(drawn)
    want = ask.eager(batch)
    assert not ask.reasons()
    return ({"norms": answer.norms, **answer.clipped} for answer in (got, want))  # type: ignore[return-value]


def test_one_copy_of_a_norm_beside_attention(graphs, monkeypatch):
    """Under autocast each layer makes its own copy in bfloat16; they are one, and the ReLU's is read for its signs."""
    torch.manual_seed(0)
    model, signs = Shared(), []

    def noting(graph: Graph) -> int:
        signs.append(narrow_signs(graph))
        return signs[-1]

    monkeypatch.setattr(step, "narrow_signs", noting)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = stepped(model, torch.float32)
        monkeypatch.setattr(step, "may_differ", lambda graph: True)
        monkeypatch.setattr(step, "narrow_signs", lambda graph: 0)
        plain, _ = stepped(model, torch.float32)
    assert signs == [1]
    merged, apart = ([_copies(graph, op) for op in (aten.native_layer_norm, aten.relu)] for graph in graphs)
    assert merged == [1, 1]
    assert min(apart) > 1
    for name in plain:  # the very same numbers as before
        torch.testing.assert_close(got[name], plain[name], rtol=1e-6, atol=1e-7 * float(plain[name].abs().max()))
        size = float(want[name].abs().max())
        torch.testing.assert_close(got[name], want[name], rtol=0, atol=1e-2 * size)


def _copies(graph: Graph, op) -> int:
    """How many copies in bfloat16 there are of what an op puts out."""
    made, *_ = [node for node in graph.nodes if getattr(node.target, "overloadpacket", None) is op]
    outputs = [made, *(user for user in made.users if user.args[1:] == (0,))]
    found = {user for node in outputs for user in node.users if user.target is aten._to_copy.default}
    return sum(node.meta["val"].dtype == torch.bfloat16 for node in found)


def test_two_dropouts_of_one_tensor_are_two(graphs):
    torch.manual_seed(0)
    got, want = stepped(Dropped().double(), torch.float64)
    (graph,) = graphs
    assert not may_differ(graph)  # so that equal nodes were made one
    drawing = [node for node in graph.nodes if draws(node)]
    assert len(drawing) == 2
    assert drawing[0].args == drawing[1].args
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-10, atol=1e-10)


def test_signs_of_a_copy_that_lies_otherwise_are_not_read():
    """Of an expanded gradient the result lies as the signs do, and the norm's backward reads it as it was traced."""

    def run(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        out = torch.relu(x)
        small = out.to(torch.bfloat16, memory_format=torch.channels_last)
        back = aten.threshold_backward(g.expand_as(out), out, 0)
        return small.exp(), back.view(2, -1), small + 1

    args = torch.randn(2, 3, 4, 5), torch.randn(2, 1, 1, 1)
    traced = make_fx(run, tracing_mode="fake")(*args)
    assert narrow_signs(traced.graph) == 0
    traced.recompile()
    for a, b in zip(traced(*args), run(*args), strict=True):
        assert torch.equal(a, b)


def test_signs_for_a_gradient_of_another_dtype_are_not_read():
    """The result has the wider dtype of both."""

    def run(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        small = x.to(torch.bfloat16)
        return aten.threshold_backward(g, x, 0), small + 1

    args = torch.randn(8), torch.randn(8).bfloat16()
    traced = make_fx(run, tracing_mode="fake")(*args)
    assert narrow_signs(traced.graph) == 0
    traced.recompile()
    assert [t.dtype for t in traced(*args)] == [torch.float32, torch.bfloat16]


class Formatted(nn.Module):
    """A ReLU in float32 that a second convolution reads in bfloat16, with its channels last, and without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.second = nn.Conv2d(4, 4, 3, padding=1).bfloat16()
        nn.init.normal_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.first(x)))
        small = h.detach().to(torch.bfloat16, memory_format=torch.channels_last)
        return h.sum((1, 2, 3)) + self.second(small).float().flatten(1).sum(1)


def test_a_norm_before_a_copy_that_lies_otherwise():
    torch.manual_seed(0)
    model = Formatted()
    ask = eachgrad.compile(model, lambda model, x: model(x), backend="aot_eager", mean=eachgrad.mean())
    for _ in range(3):
        x = torch.randn(4, 3, 6, 6)
        got = ask(x).mean
    want = ask.eager((x,)).mean
    assert not ask.reasons()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-4 * float(want[name].abs().max()))


def test_a_zero_with_a_sign_is_another_zero():
    def run(x: Tensor) -> tuple[Tensor, ...]:
        return torch.copysign(x, 0.0), torch.copysign(x, -0.0)

    assert may_differ(make_fx(run, tracing_mode="fake")(torch.randn(3)).graph)
    assert not may_differ(make_fx(lambda x: torch.copysign(x, 0.0), tracing_mode="fake")(torch.randn(3)).graph)


class Signed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return (self.second(torch.copysign(h, 0.0)) - self.third(torch.copysign(h, -0.0))).square().sum(1)


def test_zeros_of_both_signs_in_a_step():
    torch.manual_seed(0)
    model = Signed()
    ask = eachgrad.compile(model, lambda model, x: model(x), backend="aot_eager", norms=eachgrad.norms())
    for _ in range(3):
        x = torch.randn(4, 5)
        torch.testing.assert_close(ask(x).norms, ask.eager((x,)).norms)
    assert not ask.reasons()
