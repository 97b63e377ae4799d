"""What is done to a traced graph before it is compiled: the numbers stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import eachgrad
from eachgrad import laying, step
from eachgrad.alignment import align
from eachgrad.blocks import arithmetic, outer, patches, windows
from eachgrad.channels import channels_last
from eachgrad.laying import laid_out
from eachgrad.rules import norm
from eachgrad.tidy import changes, merge, narrow, write_apart

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
    return alone, seen + seen, row, whole, parts + 1, x.t().sin_()


def test_what_is_written_for_one_reader_is_made_for_it():
    traced = make_fx(writing, tracing_mode="fake")(torch.randn(3, 3, dtype=torch.float64))
    x = torch.randn(3, 3, dtype=torch.float64)
    want = writing(x.clone())
    written = [node.target for node in traced.graph.nodes if changes(node)]
    assert write_apart(traced.graph) >= 3
    left = [node.target for node in traced.graph.nodes if changes(node)]
    assert {aten.sin_.default, aten.neg_.default} <= set(left)  # into what was given, and into a part
    assert len(left) < len(written)
    traced.recompile()
    given = x.clone()
    for a, b in zip(traced(given), want, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(given, x.sin())


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
