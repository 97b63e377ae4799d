"""Norms by Grams of several layers in one launch: the numbers stay, and nothing is kept for it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import eachgrad
from eachgrad import step
from eachgrad.alive import memory_of, size_of
from eachgrad.blocks import arithmetic, outer
from eachgrad.kernels.gram import gram_parts
from eachgrad.launches import together
from oracle import assert_same as assert_near

ONE, MANY = torch.ops.eachgrad.gram_norms.default, torch.ops.eachgrad.gram_norms_of_many.default
B, T = 3, 5


def given(layers: int, dtype: torch.dtype = torch.bfloat16, sizes=((B, T),)) -> list[Tensor]:
    """Factors that a graph computes its own from: left and right of each layer."""
    torch.manual_seed(layers)
    shapes = [(*sizes[k % len(sizes)], n) for k in range(layers) for n in (8 + k, 16)]
    return [torch.randn(shape).to(dtype) for shape in shapes]


def traced(function: Callable, args: list[Tensor]) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(*args)


def groups(graph: Graph) -> list[int]:
    """How many layers each launch has, in the order of the graph."""
    return [len(n.args[0]) if n.target is MANY else 1 for n in graph.nodes if n.target in (ONE, MANY)]  # type: ignore[arg-type]


def held(graph: Graph) -> int:
    """The most bytes at once, if each tensor is free after its last reader."""
    memory, last = memory_of(graph), dict[Node, Node]()
    for node in graph.nodes:
        for a in node.all_input_nodes:
            last[memory[a]] = max(node, last.get(memory[a], node))
    now = most = 0
    for node in graph.nodes:
        if memory[node] is node and node.op == "call_function":
            now += size_of(node)
        most = max(most, now)
        now -= sum(size_of(m) for m, end in last.items() if end is node and m.op == "call_function")
    return most


def assert_same(function: Callable, args: list[Tensor], want: list[int]) -> Graph:
    """Gather the norms of what a function computes: so many for each launch, the numbers and the memory as before."""
    found = traced(function, args)
    before, returned = held(found.graph), found(*args)
    joined = together(found.graph)
    found.graph.lint()
    found.recompile()
    assert groups(found.graph) == want
    assert joined == sum(n for n in want if n > 1)
    assert all("val" in node.meta for node in found.graph.nodes if node.op == "call_function")
    # The norms themselves are next to nothing; here tensors are small, too.
    rest = sum(size_of(node) for node in found.graph.nodes if node.target is MANY)
    assert held(found.graph) <= before + rest
    for got, wanted in zip(found(*args), returned, strict=True):
        assert torch.equal(got, wanted)
    return found.graph


def in_turn(*args: Tensor) -> list[Tensor]:
    """A clipped sum in the order of a step: factors are asked for norms as they come, and read again when all are there."""
    pairs, parts = [], []
    for left, right in zip(args[::2], args[1::2], strict=True):
        pairs.append((left * 2, (right * 2).view(-1, 16).view(right.shape)))
        parts.append(gram_parts(*pairs[-1]))
    total = torch.cat(parts, 2).sum(2)[0]
    return [total, *((a.float().mT * total[:, None, None]) @ b.float() for a, b in pairs)]


@pytest.mark.parametrize(
    ("layers", "want"), [(1, [1]), (2, [2]), (4, [4]), (5, [4, 1]), (6, [4, 2]), (8, [4, 4]), (11, [4, 4, 3])]
)
def test_neighbours_of_one_size(layers, want):
    assert_same(in_turn, given(layers), want)


def test_where_the_last_one_was():
    graph = assert_same(in_turn, given(4), [4])
    (node,) = graph.find_nodes(op="call_function", target=MANY)
    assert max(node.all_input_nodes).next is node
    assert all(user.target is torch.ops.aten.select.int for user in node.users)


@pytest.mark.parametrize("sizes", [((3, 4), (4, 3)), ((3, 4), (3, 5)), ((3, 4), (2, 4))])
def test_other_sizes_have_other_launches(sizes):
    """What has one size is joined across the others; B by T is not T by B."""

    def run(*args: Tensor) -> list[Tensor]:
        factors = [a * 2 for a in args]
        found = [gram_parts(a, b) for a, b in zip(factors[::2], factors[1::2], strict=True)]
        return [*found, *factors]

    assert_same(run, given(6, sizes=sizes), [3, 3])


def test_other_dtypes_have_other_launches():
    def run(*args: Tensor) -> list[Tensor]:
        factors = [a * 2 for a in args]
        return [*(gram_parts(a, b) for a, b in zip(factors[::2], factors[1::2], strict=True)), *factors]

    some, others = given(2), given(2, torch.float16)
    assert_same(run, [*some[:2], *others[:2], *some[2:], *others[2:]], [2, 2])


def test_float32_stays():
    assert_same(in_turn, given(4, torch.float32), [1, 1, 1, 1])


def test_what_is_not_read_later_is_not_kept():
    """Norms alone: each factor is free when its norms are there, and stays so."""

    def run(*args: Tensor) -> list[Tensor]:
        found = []
        for left, right in zip(args[::2], args[1::2], strict=True):
            found.append(gram_parts(left * 2, right * 2))
        return found

    assert_same(run, given(5), [1] * 5)


def alone(*args: Tensor) -> list[Tensor]:
    """Norms alone, in the order of a step: of each layer as it comes, and added up when all are there."""
    pairs = zip(args[::2], args[1::2], strict=True)
    return [torch.cat([gram_parts(left * 2, right * 2) for left, right in pairs], 2).sum(2)]


@pytest.mark.parametrize(
    ("layers", "want"),
    [(15, [1] * 15), (16, [2] * 8), (24, [3] * 8), (31, [3] * 10 + [1]), (32, [4] * 8), (35, [4] * 8 + [3])],
)
def test_a_few_of_many_are_kept(layers, want):
    """Of norms alone an eighth of the layers, and four at most, wait for each other."""
    found = traced(alone, given(layers))
    (before,) = found(*given(layers))
    together(found.graph)
    found.graph.lint()
    found.recompile()
    assert groups(found.graph) == want
    assert most_kept(found.graph) == max(want)
    assert torch.equal(found(*given(layers))[0], before)


def most_kept(graph: Graph) -> int:
    """Of how many layers factors are there at once, beside those that are read again."""
    now, most, pairs = set[Node](), 0, {}
    for node in graph.nodes:
        if node.target in (ONE, MANY):
            lefts = node.args[0] if node.target is MANY else [node.args[0]]
            pairs |= dict.fromkeys(lefts, node)
    for node in graph.nodes:
        if node in pairs:
            now.add(node)
        most = max(most, len(now))
        now -= {left for left in now if pairs[left] is node}
    return most


@pytest.mark.parametrize("sizes", [((3, 4), (3, 5)), ((3, 4), (3, 5), (3, 6))])
def test_a_few_of_all_kinds_together_are_kept(sizes):
    """Four layers in all, and not four of each size."""
    found = traced(alone, given(36, sizes=sizes))
    (before,) = found(*given(36, sizes=sizes))
    together(found.graph)
    found.graph.lint()
    found.recompile()
    assert 1 < most_kept(found.graph) <= 4
    assert groups(found.graph) == ([2, 2] * 9 if len(sizes) == 2 else [1, 1, 2] * 9)
    assert torch.equal(found(*given(36, sizes=sizes))[0], before)


def test_what_is_read_again_is_none_of_the_few():
    """Every second layer is read again: that one waits anyway."""

    def run(*args: Tensor) -> list[Tensor]:
        parts, later = [], []
        for k, (left, right) in enumerate(zip(args[::2], args[1::2], strict=True)):
            a, b = left * 2, right * 2
            parts.append(gram_parts(a, b))
            later += [a, b] if k % 2 else []
        return [torch.cat(parts, 2).sum(2), *[t + 1 for t in later]]

    found = traced(run, given(16))
    together(found.graph)
    found.graph.lint()
    assert groups(found.graph) == [3, 4, 4, 4, 1]  # of the first three two would be kept, and one is


SECOND = {
    "gone": (lambda a: (a + 1, []), [2, 2]),
    "a copy of what stays": (lambda a: (a.mT.clone().mT, [a]), [2, 2]),
    "a view of what stays": (lambda a: (a[:, :, :8], [a]), [4]),
    "a cast that stays": (lambda a: (a, [a.float()]), [2, 2]),
}


@pytest.mark.parametrize("name", SECOND)
def test_one_that_is_free_early(name):
    """The last of a launch keeps nothing for it: the second of four may be that, and the others go on without it."""
    second, want = SECOND[name]

    def run(*args: Tensor) -> list[Tensor]:
        parts, later = [], []
        for k, (left, right) in enumerate(zip(args[::2], args[1::2], strict=True)):
            a, b = left * 2, right * 2
            a, more = second(a) if k == 1 else (a, [a])
            parts.append(gram_parts(a, b))
            later += [b, *more]
        return [*parts, *[t + 1 for t in later]]

    assert_same(run, given(4), want)


def test_read_by_a_view():
    """Another view of the same memory is read later: that keeps it."""

    def run(*args: Tensor) -> list[Tensor]:
        parts, later = [], []
        for left, right in zip(args[::2], args[1::2], strict=True):
            a, b = (left * 2).flatten(0, 1), (right * 2).split([8, 8], 2)
            parts.append(gram_parts(a.view(left.shape), b[0]))
            later += [a.mT, b[1]]
        return [*parts, *[t + 1 for t in later]]

    assert_same(run, given(4), [4])


def test_arguments_are_there_anyway():
    assert_same(lambda *args: [gram_parts(a, b) for a, b in zip(args[::2], args[1::2], strict=True)], given(5), [4, 1])


def test_a_copy_is_not_its_source():
    """A reshape that copies makes memory of its own, which its source's readers do not keep."""

    def run(*args: Tensor) -> list[Tensor]:
        parts, later = [], []
        for left, right in zip(args[::2], args[1::2], strict=True):
            later.append((left * 2).transpose(0, 1).contiguous())
            parts.append(gram_parts(later[-1].transpose(0, 1).reshape(left.shape), right))
        return [*parts, *[t + 1 for t in later]]

    args = [torch.randn(B, T, 8).bfloat16() for _ in range(8)]
    assert_same(run, args, [4])  # a view, in fact
    found = traced(run, args)
    for node in found.graph.nodes:  # the same graph, if the reshape had copied
        if node.target is ONE:
            view = node.args[0]
            with found.graph.inserting_before(node):
                other = found.graph.call_function(torch.ops.aten.reshape.default, (view, list(view.meta["val"].shape)))
            other.meta["val"] = view.meta["val"].clone()
            node.replace_input_with(view, other)
    assert together(found.graph) == 0


def test_no_cycles():
    """A layer whose factor is computed from the norms of one before: the two are never one launch."""

    def run(*args: Tensor) -> list[Tensor]:
        parts, kept = [], []
        for left, right in zip(args[::2], args[1::2], strict=True):
            a, b = left * 2, right * 2
            if len(parts) in (1, 4):
                a = a * parts[-1].sum(2)[0].to(a.dtype)[:, None, None]
            parts.append(gram_parts(a, b))
            kept += [a, b]
        return [*parts, *kept]

    graph = assert_same(run, given(7), [1, 3, 3])
    for node in graph.find_nodes(op="call_function", target=MANY):
        assert all(a < node for a in node.all_input_nodes)


def test_a_result_that_is_needed_before():
    """Nothing depends on it, but it is read where the last one is not there yet."""

    def run(*args: Tensor) -> list[Tensor]:
        parts, kept = [], []
        for left, right in zip(args[::2], args[1::2], strict=True):
            kept += [left * 2, right * 2]
            parts.append(gram_parts(*kept[-2:]).sum(2))
        return [*parts, *kept]

    assert_same(run, given(3), [1, 1, 1])


def test_one_factor_for_several():
    """Queries, keys and values read one input, which is there until the norms of the last of them."""

    def run(*args: Tensor) -> list[Tensor]:
        x = args[1] * 2
        lefts = [a * 2 for a in args[::2]]
        return [*(gram_parts(a, x) for a in lefts), *lefts]

    assert_same(run, given(3), [3])


def test_a_factor_with_itself():
    assert_same(lambda *args: [*(gram_parts(a, a) for a in args), *args], given(2), [4])


@pytest.mark.parametrize("sizes", [(3, 4, 6), (5, 7, 11)])  # with as many samples as positions among them
def test_the_same_for_any_number_of_samples(sizes):
    graphs = []
    for n in sizes:
        found = traced(in_turn, given(6, sizes=((n, T),)))
        together(found.graph)
        graphs.append([(node.op, str(node.target)) for node in found.graph.nodes])
    assert graphs[0] == graphs[1] == graphs[2]


library = torch.library.Library("launches_test", "DEF")
library.define("product(Tensor left, Tensor right) -> Tensor")
library.impl("product", lambda left, right: left.float() @ right.float(), "CPU")


@torch.library.register_fake("launches_test::product", lib=library)
def _(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty((left.shape[0], right.shape[1]), dtype=torch.float32)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 48), *(nn.Linear(48, 48) for _ in range(4)), nn.Linear(48, 5)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.mean(1)


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(model(x).float(), y, reduction="none")


class Found(list):
    """By graph: the layers of each launch, those kept at most, and the comparisons by which norms are doubted."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.doubts = list[int](), list[int]()


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """How many layers each launch has, in each graph that is tidied, and how many it keeps."""
    found = Found()

    def noted(graph: Graph) -> None:
        together(graph)
        found.append(groups(graph))
        found.kept.append(most_kept(graph))
        found.doubts.append(sum(node.target is torch.ops.aten.lt.Tensor for node in graph.nodes))

    for module in (arithmetic, outer):
        monkeypatch.setattr(module, "on_gpu", lambda t: True)
    # A CPU has no product of sixteen bits that is float32: what it reads would be made float32 early, and be free.
    monkeypatch.setattr(arithmetic, "wide_product", torch.ops.launches_test.product)
    monkeypatch.setattr(outer, "products", lambda left, right: left.float() @ right.float())
    monkeypatch.setattr(step, "takes_any_layout", lambda backend: True)
    monkeypatch.setattr(step, "together", noted)
    return found


@pytest.mark.parametrize("dynamic", [False, True])
def test_whole_steps(dynamic, as_on_a_gpu):
    """Of a clipped sum the layers of one size are joined, in graphs for one number of samples and for any."""
    torch.manual_seed(0)
    model = Layers()
    queries = {"grad": eachgrad.clipped_sum(0.01), "norms": eachgrad.norms()}
    ask = eachgrad.compile(copy.deepcopy(model), losses, backend="aot_eager", dynamic=dynamic, **queries)
    for n in (7, 7, 7, 9, 7, 11) if dynamic else (7, 7, 7, 7):  # as many as positions
        x, y = torch.randn(n, 7, 16), torch.randint(5, (n,))
        got, want = ask(x, y), ask.eager((x, y))
        torch.testing.assert_close(got.norms, want.norms, rtol=1e-5, atol=0)
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-2, atol=1e-6)  # terms are rounded to bfloat16
    assert not ask.reasons()
    assert as_on_a_gpu == [[4, 1]] * (3 if dynamic else 1)


class Attention(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).chunk(3, 2)
        x = x + self.out(torch.softmax(q @ k.mT / 4, 2) @ v)
        return x + self.down(F.gelu(self.up(self.second(x))))


class Transformer(nn.Module):
    """32 layers whose norms go by Grams, and a head of one position."""

    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Attention(d) for _ in range(8)]), nn.Linear(d, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


WORKS = {
    "norms": {"norms": eachgrad.norms()},
    "norms and mean": {"grad": eachgrad.mean(), "norms": eachgrad.norms()},
    "norms twice": {"grad": eachgrad.mean(), "norms": eachgrad.norms(), "same": eachgrad.norms()},
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", WORKS)
def test_whole_steps_of_norms(name, dynamic, as_on_a_gpu):
    """Four layers a launch, no more kept, and one doubt for a question; the numbers are those of the eager code."""
    torch.manual_seed(0)
    ask = eachgrad.compile(Transformer(), losses, backend="aot_eager", dynamic=dynamic, **WORKS[name])
    for n in (7, 7, 7, 9, 7, 11) if dynamic else (7, 7, 7, 7):
        x, y = torch.randn(n, 6, 32), torch.randint(5, (n,))
        got, want = ask(x, y), ask.eager((x, y))
        torch.testing.assert_close(got.norms, want.norms, rtol=1e-5, atol=0)
        if "grad" in WORKS[name]:
            assert_near(got.grad, want.grad, 1e-5)
        if "same" in WORKS[name]:
            assert torch.equal(got.norms, got.same)
    assert not ask.reasons()
    assert as_on_a_gpu == [[4] * 8] * (3 if dynamic else 1)
    assert as_on_a_gpu.kept == [4] * len(as_on_a_gpu)
    assert as_on_a_gpu.doubts == [2 if "same" in WORKS[name] else 1] * len(as_on_a_gpu)


class Parallel(nn.Module):
    """16 layers that read two positions alike: what the gradients of these add up to is a small part of each, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 48, bias=False) for _ in range(16)])

    def forward(self, x: Tensor, share: Tensor) -> Tensor:
        out = torch.stack([layer(x) for layer in self.layers], 3).float()
        return (out[:, 0] - share[:, None] * out[:, 1]).flatten(1).sum(1, keepdim=True)


@pytest.mark.parametrize("cancelled", [0, 1, 16])
def test_a_doubt_about_one_sample(cancelled, as_on_a_gpu, monkeypatch):
    """All layers of a sample cancel: the step is doubted, and answered eagerly. One of sixteen does: the norm is right."""
    doubts = []
    has_doubt = step.Step.has_doubt
    monkeypatch.setattr(step.Step, "has_doubt", lambda self: doubts.append(has_doubt(self)) or doubts[-1])

    def losses(model: nn.Module, x: Tensor, share: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x, share)[:, 0]

    torch.manual_seed(0)
    model = Parallel()
    ask = eachgrad.compile(model, losses, backend="aot_eager", norms=eachgrad.norms())
    for n in range(3):
        x = torch.randn(3, 1, 16).expand(3, 2, 16).contiguous()
        share = torch.full((3, 16), -0.5)
        share[1, : cancelled if n == 2 else 0] = 1 - 2.0**-6
        got = ask(x, share)
    assert not ask.reasons()
    want = x[:, 0].bfloat16().double().norm(dim=1) * 48**0.5 * (1 - share.double()).norm(dim=1)
    torch.testing.assert_close(got.norms.double(), want, rtol=1e-5, atol=0)
    assert any(doubts) == (cancelled == 16)


def test_norms_alone_as_they_were(as_on_a_gpu):
    torch.manual_seed(0)
    ask = eachgrad.compile(Layers(), losses, backend="aot_eager", norms=eachgrad.norms())
    for _ in range(3):
        x, y = torch.randn(6, 7, 16), torch.randint(5, (6,))
        torch.testing.assert_close(ask(x, y).norms, ask.eager((x, y)).norms, rtol=1e-5, atol=0)
    assert as_on_a_gpu == [[1] * 5]
