"""Every query over all samples against the dense gradients of the loop over samples; errors, memory, projections."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import eachgrad
from cases import CASES, B, Case, batch, d, ids, net, reals, weight
from eachgrad import CaptureError, PerSampleGrads, plan, projection
from eachgrad.blocks import Block, Dense, Geometry, Outer, Patches, Rows, Sum, arithmetic, base
from eachgrad.gradient import Gradient
from oracle import assert_same, loop
from test_cases import answer, norms, record_and_answer, squared_norms, truth, weighted
from test_memory import Largest, Tied, linears, recorded
from test_memory import bound as far_below

NAMES = [
    "linear", "linear rank 3", "linear B = 1", "complex linear", "complex convolution", "complex raw parameter",
    "ids repeated", "scale_grad_by_freq", "conv2d", "lstm", "weight_norm", "tied embedding and head", "module used twice",
    "weight used in linear and by multiplication", "unused parameter", "tokens selected", "bilinear",
    "tied convolution and its transpose", "layer_norm", "embedding_bag with offsets", "penalty in every loss",
]  # fmt: skip
EXTRA = [
    Case(
        "grouped convolution", (), lambda: nn.Conv2d(4, 6, (2, 3), stride=2, padding=1, dilation=(1, 2), groups=2),
        batch(reals(B, 4, 5, 6)),
    ),
    Case(
        "transposed convolution with room to spare", (),
        lambda: nn.ConvTranspose1d(4, 6, 3, stride=1, dilation=3, output_padding=2, groups=2), batch(reals(B, 4, 5)),
    ),
    Case("parameter of one number", (), net(lambda m, x: x * m.w, w=weight()), batch(reals(B, d))),
    Case("tied twice", (), net(lambda m, i: F.linear(F.embedding(i, m.w), m.w), w=weight(6, d)), batch(ids(6, B, 3))),
]  # fmt: skip
CHOSEN = [*(case for case in CASES if case.name in NAMES), *EXTRA]
Truth = Mapping[str, Tensor]


def test_every_case_exists():
    assert {case.name for case in CHOSEN} >= set(NAMES)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(*shape: int, like: Tensor | None = None) -> Tensor:
    dtype = torch.float64 if like is None else like.dtype
    return torch.randn(shape, generator=generator(len(shape)), dtype=dtype)


def flat(want: Truth) -> Tensor:
    """(B, P) real numbers: complex ones count as two."""
    rows = [torch.view_as_real(g) if g.is_complex() else g for g in want.values()]
    return torch.cat([g.double().reshape(len(g), -1) for g in rows], 1)


def same(got: Tensor | Mapping[str, Tensor], want: Tensor | Mapping[str, Tensor]) -> None:
    got, want = ({"": t} if isinstance(t, Tensor) else t for t in (got, want))
    assert_same(got, want, 1e-10)


# Queries


def ask_sums(grads: PerSampleGrads, want: Truth) -> None:
    c = draw(5, grads.batch_size)
    each = [weighted(want, row) for row in c]
    same(grads.weighted_sum(c), {name: torch.stack([e[name] for e in each]) for name in want})
    same(grads.weighted_sum(c[0]), each[0])


def ask_modules(grads: PerSampleGrads, want: Truth) -> None:
    paths = {name.rpartition(".")[0] for name in want}
    parts = {path: {n: g for n, g in want.items() if n.rpartition(".")[0] == path} for path in paths}
    same(grads.norms(by="module"), {path: norms(part) for path, part in parts.items()})


def ask_topk(grads: PerSampleGrads, want: Truth) -> None:
    for largest in (True, False):
        values, indices = grads.topk_norms(1, largest)
        assert indices.tolist() == norms(want).topk(1, largest=largest).indices.tolist()
        same(values, norms(want)[indices])


def ask_dot(grads: PerSampleGrads, want: Truth) -> None:
    one = {name: draw(*g.shape[1:], like=g) for name, g in want.items()}
    same(grads.dot(one), flat(want) @ flat({n: v[None] for n, v in one.items()})[0])


def ask_dots(grads: PerSampleGrads, want: Truth) -> None:
    for K in (1, 4):
        many = {name: draw(K, *g.shape[1:], like=g) for name, g in want.items()}
        same(grads.dot(many), flat(want) @ flat(many).T)


def ask_gram(grads: PerSampleGrads, want: Truth) -> None:
    same(grads.gram(), flat(want) @ flat(want).T)
    same(grads.gram().diagonal(), grads.norms().square())


def ask_mean(grads: PerSampleGrads, want: Truth) -> None:
    same(grads.mean(), {name: g.mean(0) for name, g in want.items()})


def ask_second_moment(grads: PerSampleGrads, want: Truth) -> None:
    same(grads.second_moment(), {name: g.abs().square().mean(0) for name, g in want.items()})


def ask_variance(grads: PerSampleGrads, want: Truth) -> None:
    for unbiased in (False, True) if grads.batch_size > 1 else (False,):
        same(grads.variance(unbiased), {name: g.var(0, correction=int(unbiased)) for name, g in want.items()})


def ask_noise_scale(grads: PerSampleGrads, want: Truth) -> None:
    if grads.batch_size == 1:
        return

    def estimate(rows: Tensor) -> tuple[Tensor, Tensor]:
        n, mean = len(rows), rows.mean(0)
        trace = (rows - mean).square().sum() / (n - 1)
        return trace, mean.square().sum() - trace / n

    rows = flat(want)
    noise, signal = estimate(rows)
    found = grads.noise_scale()
    same(torch.tensor([found.noise, found.signal], dtype=torch.float64), torch.stack([noise, signal]))
    assert found.value == pytest.approx(float(noise / signal), rel=1e-8)
    left_out = torch.stack([torch.div(*estimate(rows[torch.arange(len(rows)) != i])) for i in range(len(rows))])
    error = ((left_out - left_out.mean()).square().mean() * (len(rows) - 1)).sqrt()
    assert found.error == pytest.approx(float(error), rel=1e-7, nan_ok=True)


def ask_clipped(grads: PerSampleGrads, want: Truth) -> None:
    size = norms(want)
    bound = float(size.mean())
    same(grads.clipped_sum(bound), weighted(want, (bound / size).clamp(max=1)))
    same(grads.clipped_sum(bound, normalise=True, gamma=0.1), weighted(want, bound / (size + 0.1)))
    each = {n: q.sqrt() for n, q in squared_norms(want).items()}
    factors = {n: (bound / q).clamp(max=1) for n, q in each.items()}
    parts = {n: weighted({n: g}, factors[n])[n] for n, g in want.items()}
    same(grads.clipped_sum(bound, groups="parameter"), parts)
    first, *rest = want
    groups = {"first": [first], "rest": rest} if rest else {"first": ["*"]}
    bounds = {group: bound / (k + 2) for k, group in enumerate(groups)}
    both = {}
    for group, names in zip(groups, ([first], rest), strict=False):
        part = {n: want[n] for n in names}
        both |= weighted(part, (bounds[group] / norms(part)).clamp(max=1))
    same(grads.clipped_sum(bounds, groups=groups), both)


def explicit(kind: str, want: Truth, dim: int, seed: int) -> Tensor:
    """The projection by a matrix that is written out, from the random numbers alone."""
    total = torch.zeros((), dtype=torch.float64)
    for name, g in want.items():
        key = projection.key(seed, name, kind)
        places = torch.arange(g[0].numel() * (2 if g.is_complex() else 1))
        if kind == "kronecker" and g.ndim > 2 and not g.is_complex():
            left, right = (projection.gaussian(key + k, torch.arange(n), m) for k, n, m in (
                (1, g.shape[1], 2), (2, g[0, 0].numel(), dim // 2),
            ))  # fmt: skip
            total = total + torch.einsum("bpd,pm,dn->bmn", g.flatten(2), left, right).flatten(1) / math.sqrt(dim)
            continue
        if kind in ("sjlt", "kronecker"):
            matrix = torch.zeros(len(places), dim, dtype=torch.float64)
            for k in range(projection.BUCKETS):
                for place, word in enumerate(projection.words(key, places * projection.BUCKETS + k).tolist()):
                    word &= projection.MASK
                    matrix[place, (word >> 32) * dim >> 32] += (word & 1) * 2 - 1
            matrix *= math.sqrt(dim / projection.BUCKETS)
        else:
            matrix = (projection.signs if kind == "rademacher" else projection.gaussian)(key, places, dim).double()
        total = total + flat({name: g}) @ matrix / math.sqrt(dim)
    return total


def ask_project(grads: PerSampleGrads, want: Truth) -> None:
    for kind in projection.KINDS:
        same(grads.project(6, seed=3, kind=kind), explicit(kind, want, 6, 3))


QUERIES = [
    ask_sums, ask_modules, ask_topk, ask_dot, ask_dots, ask_gram, ask_mean, ask_second_moment, ask_variance,
    ask_noise_scale, ask_clipped, ask_project,
]  # fmt: skip
each_query = pytest.mark.parametrize("query", QUERIES, ids=lambda q: q.__name__[4:])


@each_query
@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_query(case: Case, query: Callable[..., None]):
    query(answer(case), truth(case))


@each_query
@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_query_in_small_pieces(case: Case, query: Callable[..., None], monkeypatch):
    monkeypatch.setattr(base, "TILE", 7)
    monkeypatch.setattr(arithmetic, "RUN", 4)
    monkeypatch.setattr(projection, "NUMBERS", 12)
    monkeypatch.setattr(plan, "CHUNK", 7)
    query(answer(case), truth(case))


@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_gram_with_other_samples(case: Case):
    mine, theirs = answer(case), answer(case, seed=1)
    same(mine.gram(theirs), flat(truth(case)) @ flat(truth(case, 1)).T)


def test_gram_of_different_blocks_and_batch_sizes():
    model = nn.Linear(d, 2).double()
    many, few = draw(4, 3, d), draw(2, d)
    case = Case("", (), lambda: model, batch())
    mine, theirs = (record_and_answer(case, model, (x,)) for x in (many, few))
    want = [loop(model, case.losses, case.samples((x,))) for x in (many, few)]
    same(mine.gram(theirs), flat(want[0]) @ flat(want[1]).T)
    same(theirs.gram(mine), flat(want[1]) @ flat(want[0]).T)


CHANGED = [
    lambda g: g.dot({n: x.parameter.detach() for n, x in g.items()}), lambda g: g.gram(), lambda g: g.mean(),
    lambda g: g.second_moment(), lambda g: g.variance(), lambda g: g.noise_scale(), lambda g: g.project(4),
    lambda g: g.topk_norms(1), lambda g: g.norms(by="module"), lambda g: g.weighted_sum(torch.ones(2, B)),
    lambda g: g.clipped_sum(1.0, groups="parameter"),
]  # fmt: skip


@pytest.mark.parametrize("query", CHANGED)
def test_input_changed_in_place_is_noticed(query):
    case = next(case for case in CASES if case.name == "linear rank 3")
    model, inputs = case.build()
    grads = record_and_answer(case, model, inputs)
    query(grads)
    inputs[0].mul_(2)
    with pytest.raises(CaptureError, match="place"):
        query(grads)


# Selection


@pytest.fixture
def stack() -> PerSampleGrads:
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.ModuleDict({"attn": nn.Linear(4, 4), "mlp": nn.Linear(4, 4)}) for _ in range(2))
    model.double()
    with eachgrad.record(model, batch_size=B) as tape:
        h = draw(B, 4)
        for block in model.blocks:
            h = block["mlp"](block["attn"](h).tanh()).tanh()
        losses = h.sum(1)
    return tape.backward(losses)


def test_select(stack):
    chosen = stack.select("blocks.*.attn.*")
    assert list(chosen) == [f"blocks.{k}.attn.{part}" for k in range(2) for part in ("weight", "bias")]
    dense = {name: stack[name].dense() for name in chosen}
    same(chosen.dense(), dense)
    same(chosen.norms(), norms(dense))
    same(chosen.gram(), flat(dense) @ flat(dense).T)
    assert set(stack.select(["*.bias", "blocks.0.*"])) == {n for n in stack if "bias" in n or "s.0" in n}
    assert list(stack.select("blocks.0.mlp.bias")) == ["blocks.0.mlp.bias"]
    assert chosen.receipt().deviation < 1e-10
    with pytest.raises(ValueError, match=r"no parameter matches 'heads\.\*'"):
        stack.select("heads.*")
    with pytest.raises(ValueError, match="no parameter matches"):
        chosen.select("*.mlp.*")


def test_select_by_another_name_of_a_tied_parameter():
    grads = answer(next(case for case in CASES if case.name == "tied embedding and head"))
    other = next(alias for alias, name in grads._record.aliases.items() if alias != name)
    assert list(grads.select(other)) == [grads._record.canonical(other)]


# Clipping


def test_groups_are_complete_and_disjoint(stack):
    with pytest.raises(ValueError, match=r"'blocks\.1\.attn\.weight' is in no group"):
        stack.clipped_sum(1.0, groups={"first": ["blocks.0.*"]})
    with pytest.raises(ValueError, match=r"'blocks\.0\.attn\.bias' is in the groups 'all', 'bias'"):
        stack.clipped_sum(1.0, groups={"all": ["*"], "bias": ["*.bias"]})
    with pytest.raises(ValueError, match=r"'all' names 'heads\.\*'"):
        stack.clipped_sum(1.0, groups={"all": ["*", "heads.*"]})
    with pytest.raises(ValueError, match="not the text"):
        stack.clipped_sum(1.0, groups={"all": "*"})
    with pytest.raises(ValueError, match="not 'module'"):
        stack.clipped_sum(1.0, groups="module")
    with pytest.raises(ValueError, match="one for each group"):
        stack.clipped_sum({"some": 1.0}, groups={"all": ["*"]})
    with pytest.raises(ValueError, match="max_norm is a number"):
        stack.clipped_sum({"": 1.0})


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_bounds_are_positive(stack, bad):
    with pytest.raises(ValueError, match="max_norm is a positive number"):
        stack.clipped_sum(bad)
    with pytest.raises(ValueError, match="max_norm is a positive number"):
        stack.clipped_sum({"all": bad}, groups={"all": ["*"]})


def test_gamma_and_nonfinite_are_checked(stack):
    with pytest.raises(ValueError, match="gamma"):
        stack.clipped_sum(1.0, normalise=True, gamma=0.0)
    with pytest.raises(ValueError, match="nonfinite"):
        stack.clipped_sum(1.0, nonfinite="ignore")


BAD = ["linear rank 3", "conv2d", "lstm", "weight_norm", "layer_norm", "module used twice"]


@pytest.mark.parametrize("groups", [None, "parameter"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_sample_adds_nothing(name, value, groups):
    case = next(case for case in CASES if case.name == name)
    model, inputs = case.build()
    good = record_and_answer(case, *case.build())
    inputs[0][1] = value
    grads = record_and_answer(case, model, inputs)
    with pytest.raises(CaptureError, match=r"samples \[1\]"):
        grads.clipped_sum(1.0, groups=groups)
    got = grads.clipped_sum(1.0, groups=groups, nonfinite="zero")
    assert all(t.isfinite().all() for t in got.values())
    rest = {n: g[torch.tensor([0, 2])] for n, g in good.dense().items()}
    each = {n: {n: g} for n, g in rest.items()} if groups else {"": rest}
    want = {n: t for part in each.values() for n, t in weighted(part, (1 / norms(part)).clamp(max=1)).items()}
    same(got, want)


def test_all_samples_are_bad():
    case = next(case for case in CASES if case.name == "linear rank 3")
    model, inputs = case.build()
    inputs[0].fill_(torch.nan)
    got = record_and_answer(case, model, inputs).clipped_sum(1.0, nonfinite="zero")
    assert all(t.eq(0).all() for t in got.values())


def test_a_bad_sample_by_its_loss_alone():
    model = nn.Embedding(5, 3)
    with eachgrad.record(model) as tape:
        losses = model(torch.tensor([[0, 1], [1, 1], [2, 0]])).sum((1, 2)) * torch.tensor([1.0, torch.nan, 1.0])
    grads = tape.backward(losses)
    want = torch.zeros(5, 3)
    want[[0, 1, 2]] = torch.tensor([2.0, 1.0, 1.0])[:, None]
    torch.testing.assert_close(grads.clipped_sum(100.0, nonfinite="zero")["weight"], want)


def contributions(grads: PerSampleGrads, max_norm: float) -> Tensor:
    """The norm, in float64, of what each sample adds to the clipped sum."""
    factors = grads.norms()
    assert factors.isfinite().all()
    found = []
    for i in range(grads.batch_size):
        index = torch.tensor([i])
        alone = PerSampleGrads({n: g.take(index) for n, g in grads.items()}, 1, grads._record)
        value = alone.clipped_sum(max_norm)
        found.append(math.sqrt(sum(float(t.abs().double().square().sum()) for t in value.values())))
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_no_sample_adds_more_than_the_bound(case: Case, dtype):
    grads = record_and_answer(case, *case.build(dtype=dtype))
    for max_norm in (1e-3, 0.1):
        assert contributions(grads, max_norm).max() <= max_norm * (1 + 1e-5)


@pytest.mark.parametrize(("T", "p"), [(4, 64), (64, 8), (48, 128)], ids=["Gram", "direct", "long"])
def test_no_sample_adds_more_than_the_bound_where_gradients_cancel(T, p):
    model = nn.Linear(p, p, bias=False)
    for scale in (1e-3, 1e-2, 1e-1, 1.0):
        x = 1 + scale * torch.randn(8, T, p, generator=generator())
        g = torch.randn(8, T, p, generator=generator(1))
        g = g - g.mean(1, keepdim=True)
        with eachgrad.record(model) as tape:
            losses = (model(x) * g).sum((1, 2))
        size = torch.einsum("btp,btd->bpd", g.double(), x.double()).flatten(1).norm(dim=1)
        # What the numbers of a gradient, sums over T, lose in float32 before any norm is taken.
        rounding = 2e-7 * x.flatten(1).norm(dim=1) * g.flatten(1).norm(dim=1) / size
        found = contributions(tape.backward(losses), 0.1) / 0.1 - 1
        assert found.le(1e-5 + rounding * (T * 2 * p >= p * p)).all()


def test_no_sample_adds_more_than_the_bound_of_many_numbers():
    model = nn.Linear(2000, 2000, bias=False)
    x = 1 + 0.1 * torch.randn(2, 2, 2000, generator=generator())
    with eachgrad.record(model) as tape:
        losses = F.linear(x, model.weight).sum((1, 2))
    assert contributions(tape.backward(losses), 1.0).max() <= 1 + 1e-6
    parameter = nn.Parameter(torch.ones(4_000_000))
    ones = Gradient("w", parameter, Dense(1 + 0.1 * torch.randn(1, 4_000_000, generator=generator())), 1)
    want = ones.dense().double().square().sum(1)
    torch.testing.assert_close(ones.squared_norms().double(), want, rtol=1e-6, atol=0)


# Errors


def test_directions_are_checked(stack):
    name = "blocks.0.attn.weight"
    with pytest.raises(ValueError, match=r"names 'heads\.weight'"):
        stack.dot({"heads.weight": torch.zeros(4, 4)})
    for shape in ((4,), (4, 5), (1, 1, 4, 4), ()):
        with pytest.raises(ValueError, match=r"the direction of 'blocks\.0\.attn\.weight'"):
            stack.dot({name: torch.zeros(shape)})
    with pytest.raises(ValueError, match="same number of directions"):
        stack.dot({name: torch.zeros(2, 4, 4), "blocks.0.attn.bias": torch.zeros(3, 4)})
    with pytest.raises(ValueError, match="same number of directions"):
        stack.dot({name: torch.zeros(4, 4), "blocks.0.attn.bias": torch.zeros(1, 4)})
    assert stack.dot({}).eq(0).all()
    one = stack.dot({name: draw(4, 4)})
    same(one, (stack[name].dense() * draw(4, 4)).sum((1, 2)))


def test_other_arguments_are_checked(stack):
    with pytest.raises(ValueError, match="one weight per sample"):
        stack.weighted_sum(torch.ones(2, B + 1))
    with pytest.raises(ValueError, match="one weight per sample"):
        stack.weighted_sum(torch.ones(2, 2, B))
    with pytest.raises(ValueError, match="only one side has"):
        stack.gram(stack.select("*.bias"))
    with pytest.raises(ValueError, match="module"):
        stack.norms(by="layer")
    with pytest.raises(ValueError, match="k is between"):
        stack.topk_norms(B + 1)
    with pytest.raises(ValueError, match="dim is a positive"):
        stack.project(0)
    with pytest.raises(ValueError, match="kind is one of"):
        stack.project(4, kind="dense")
    single = answer(next(case for case in CASES if case.name == "linear B = 1"))
    with pytest.raises(ValueError, match="two samples"):
        single.variance()
    with pytest.raises(ValueError, match="two samples"):
        single.noise_scale()


# Memory


N = 64
LIGHT = {
    "dot": lambda g: g.dot({n: x.parameter.detach() for n, x in g.items()}),
    "gram": lambda g: g.gram(),
    "second_moment": lambda g: g.second_moment(),
    "weighted_sum": lambda g: g.weighted_sum(torch.ones(3, N)),
    "clipped_sum": lambda g: g.clipped_sum(1.0, groups="parameter", nonfinite="zero"),
    "noise_scale": lambda g: g.noise_scale(),
    "kronecker": lambda g: g.project(16, kind="kronecker"),
}
MODELS = {
    "linear, T = 1": (linears, lambda: (torch.randn(N, 128),)),
    "embedding": (lambda: nn.Embedding(5000, 16), lambda: (torch.randint(5000, (N, 8)),)),
}


@pytest.mark.parametrize("query", LIGHT)
@pytest.mark.parametrize("name", MODELS)
def test_no_query_makes_the_gradients_of_all_samples(name, query):
    make, inputs = MODELS[name]
    model = make()
    grads = recorded(model, *inputs())
    if name == "embedding" and query == "gram":
        # N T rows of N samples at most, instead of all 5000.
        limit = N * N * 8 * 16 + 1
    else:
        limit = far_below(model)
    with Largest() as largest:
        LIGHT[query](grads)
    assert 0 < largest.numel < limit, largest.op


TILED = LIGHT | {
    "variance": lambda g: g.variance(),
    "dots": lambda g: g.dot({n: torch.ones(4, *x.parameter.shape) for n, x in g.items()}),
    "gaussian": lambda g: g.project(8),
    "sjlt": lambda g: g.project(8, kind="sjlt"),
}


@pytest.mark.parametrize("query", TILED)
@pytest.mark.parametrize(
    ("make", "data"),
    [
        (lambda: nn.Linear(128, 128), lambda: torch.randn(N, 4, 128)),
        (lambda: nn.Conv2d(8, 128, 3), lambda: torch.randn(N, 8, 4, 4)),
        (lambda: Tied(600, 64), lambda: torch.randint(600, (N, 2))),
    ],
    ids=["linear", "convolution", "tied"],
)
def test_the_dense_routes_go_in_tiles(make, data, query, monkeypatch):
    model = make()
    monkeypatch.setattr(base, "TILE", 1 << 14)
    monkeypatch.setattr(projection, "NUMBERS", 1 << 14)
    monkeypatch.setattr(plan, "CHUNK", 1 << 14)
    grads = recorded(model, data())
    with Largest() as largest:
        TILED[query](grads)
    assert 0 < largest.numel < far_below(model), largest.op


# Projections


def test_the_random_numbers_are_splitmix64():
    def splitmix(key: int, place: int) -> int:
        mask = (1 << 64) - 1
        z = (key + (place + 1) * 0x9E3779B97F4A7C15) & mask
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    # The first output of the generator's reference implementation for the seed 0.
    assert splitmix(0, 0) == 0xE220A8397B1DCDAF
    places = torch.tensor([0, 1, 2, 10**9, 10**15])
    for key in (0, 1, projection.key(7, "fc.weight", "gaussian")):
        got = [word & projection.MASK for word in projection.words(key, places).tolist()]
        assert got == [splitmix(key, place) for place in places.tolist()]


def test_the_random_numbers_are_normal():
    z = projection.gaussian(projection.key(0, "w", "gaussian"), torch.arange(2000), 101)
    assert z.shape == (2000, 101)
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        assert float(z.pow(power).mean()) == pytest.approx(moment, abs=0.05)
    correlation = torch.corrcoef(z.T) - torch.eye(101, dtype=z.dtype)
    assert correlation.abs().max() < 0.12
    s = projection.signs(projection.key(0, "w", "rademacher"), torch.arange(2000), 101).double()
    assert s.abs().eq(1).all()
    assert (torch.corrcoef(s.T) - torch.eye(101, dtype=s.dtype)).abs().max() < 0.12


def golden_model() -> PerSampleGrads:
    model = nn.Linear(3, 2).double()
    with eachgrad.record(model) as tape:
        out = model(torch.arange(6, dtype=torch.float64).view(2, 3))
        losses = (out * torch.tensor([[1.0, 2.0], [3.0, -1.0]], dtype=torch.float64)).sum(1)
    return tape.backward(losses)


GOLDEN = {
    "gaussian": [
        [2.462442062863, 2.897803680336, 0.467311914617, -0.040244779088],
        [-13.631500759586, 11.096923609643, -9.958533525258, -8.738595664014],
    ],
    "rademacher": [[1.0, 3.0, -4.0, 2.0], [-13.0, -4.0, -1.0, 9.0]],
    "sjlt": [[-2.0, -1.5, 2.5, -2.0], [-16.5, 4.0, 5.0, -3.5]],
    "kronecker": [
        [-1.706718852733, -1.844919431009, 0.320249960786, -1.734690130334],
        [-8.841545281392, 20.129046188028, 4.480686989020, -15.722530084664],
    ],
}


@pytest.mark.parametrize("kind", projection.KINDS)
def test_projections_never_change(kind):
    got = golden_model().project(4, seed=5, kind=kind)
    torch.testing.assert_close(got, torch.tensor(GOLDEN[kind], dtype=torch.float64), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(got, golden_model().project(4, seed=6, kind=kind))


@pytest.mark.parametrize("kind", projection.KINDS)
def test_projections_keep_inner_products(kind):
    model = nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 4)).double()
    model.requires_grad_(True)
    with torch.no_grad():
        for k, p in enumerate(model.parameters()):
            p.copy_(0.3 * torch.randn(p.shape, generator=generator(k), dtype=p.dtype))
    grads = recorded_few(model, draw(6, 5, 12))
    gram = grads.gram()
    size = gram.diagonal().sqrt()
    found = torch.stack([p @ p.T for p in (grads.project(64, seed, kind) for seed in range(200))])
    gap = (found.mean(0) - gram) / (size[:, None] * size)
    # One projection is off by about 1/sqrt(64) (more for a product of two), the mean of 200 by a 14th of that.
    assert gap.abs().max() < (0.08 if kind == "kronecker" else 0.04)
    assert ((found - gram) / (size[:, None] * size)).std(0).max() < (0.6 if kind == "kronecker" else 0.25)


def recorded_few(model: nn.Module, x: Tensor) -> PerSampleGrads:
    with eachgrad.record(model) as tape:
        losses = model(x).square().sum((1, 2))
    return tape.backward(losses)


def test_a_selection_is_projected_as_the_whole_is(stack):
    parts = stack.select("*.bias").project(8), stack.select("*.weight").project(8)
    same(parts[0] + parts[1], stack.project(8))


# Tests of the tests

OFF = 1.01
GEOMETRY = Geometry((2,), (1,), ((0, 0),), (1,), 1)


def off(value):
    if isinstance(value, Tensor):
        return value * OFF if value.is_floating_point() or value.is_complex() else value
    if value is None:
        return None
    if isinstance(value, tuple):
        return tuple(off(v) for v in value)
    if isinstance(value, Block):
        return Dense(value.dense() * OFF)
    if isinstance(value, dict):
        return {name: off(v) for name, v in value.items()}
    return type(value)(**{k: v * OFF for k, v in vars(value).items()})


def wrong(case: Case) -> bool:
    grads, want = answer(case), truth(case)
    for query in QUERIES:
        try:
            query(grads, want)
        except AssertionError:
            return True
    return False


METHODS = [
    (cls, name)
    for cls in (Block, Dense, Outer, Patches, Rows, Sum)
    for name in ("weighted_sums", "slice", "dot", "gram", "sum_of_squares", "compressed", "support", "measured")
    if name in vars(cls) and (cls, name) != (Block, "support")  # hands on what it was given
] + [(Outer, "_dot"), (Rows, "_runs"), (Rows, "_among"), (Geometry, "convolve")]
SMALL = [
    "linear", "linear rank 3", "ids repeated", "conv2d", "tied embedding and head", "layer_norm",
    "tied convolution and its transpose", "weight used in linear and by multiplication", "transposed weight d = B",
]  # fmt: skip


@pytest.mark.parametrize(("cls", "method"), METHODS, ids=lambda v: v.__name__ if isinstance(v, type) else v)
def test_an_error_in_a_block(cls, method, monkeypatch):
    original = getattr(cls, method)
    monkeypatch.setattr(cls, method, functools.wraps(original)(lambda *a, **k: off(original(*a, **k))))
    assert any(wrong(case) for case in CHOSEN if case.name in (*SMALL, "tied twice"))


@pytest.mark.parametrize(
    "method",
    [
        "dot",
        "gram",
        "mean",
        "second_moment",
        "variance",
        "noise_scale",
        "project",
        "topk_norms",
        "norms",
        "clipped_sum",
    ],
)
def test_an_error_in_a_query(method, monkeypatch):
    case = next(case for case in CASES if case.name == "linear rank 3")
    assert not wrong(case)
    original = getattr(PerSampleGrads, method)
    monkeypatch.setattr(PerSampleGrads, method, lambda *a, **k: off(original(*a, **k)))
    assert wrong(case)
