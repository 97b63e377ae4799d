"""Tensors of compiled code in places that were planned: the same numbers, in little memory, whatever the plan."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch._inductor.codecache import PyCodeCache
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F

import eachgrad
from eachgrad.arena import UNIT, Life, Make, Plan, Watch, _Giving, made_by, planned, size_of
from eachgrad.kernels.library import new_empty


def peak(lives: list[Life]) -> int:
    """The most bytes that are there at once."""
    rooms = [-(-life.size // UNIT) * UNIT for life in lives]
    moments = range(len(lives) + 1)
    return max(sum(r for r, life in zip(rooms, lives, strict=True) if life.first <= t < life.last) for t in moments)


def check(plan: Plan) -> None:
    """No two that are there together have a byte in common."""
    both = [(life, place) for life, place in zip(plan.lives, plan.places, strict=True) if place is not None]
    for k, (a, at) in enumerate(both):
        assert at % UNIT == 0
        assert at + a.size <= plan.size
        for b, other in both[:k]:
            together = a.first < b.last and b.first < a.last
            assert not together or at + a.size <= other or other + b.size <= at


def test_what_is_there_together_lies_apart():
    generator = torch.Generator().manual_seed(0)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    for n in (1, 2, 7, 60):
        lives = [Life(number(0, 9) * number(1, 3000), k, k + number(1, n + 2)) for k in range(n)]
        plan = planned(lives)
        check(plan)
        assert peak(lives) <= plan.size <= 1.5 * peak(lives) + UNIT
        assert [place is None for place in plan.places] == [life.size == 0 for life in lives]


def test_a_step_of_layers_takes_what_is_there_at_once():
    """Kept for the backward, with others in between: torch's allocator would leave gaps."""
    made = [(3000, 3), (100, 1), (1000, 2), (400, 1)]
    n, lives = 12 * len(made), []
    for layer in range(12):
        for k, (size, kind) in enumerate(made):
            first = len(lives)
            lives.append(Life(UNIT * size, first, first + 2 if kind == 1 else 2 * n - layer * 4 - k))
    for _ in range(12):
        first = len(lives)
        lives += [Life(UNIT * size, first + k, first + k + 2) for k, size in enumerate((3000, 1500, 700, 1000))]
    plan = planned(lives)
    check(plan)
    assert plan.size <= 1.02 * peak(lives)


def test_bytes_of_a_tensor_reach_to_its_last_number():
    for shape, stride in (((3, 5), (5, 1)), ((3, 5), (8, 1)), ((4, 2, 3), (1, 40, 7)), ((), ()), ((1, 1), (9, 9))):
        t = torch.empty_strided(shape, stride, dtype=torch.bfloat16)
        assert size_of(shape, stride, torch.bfloat16) == t.untyped_storage().nbytes()
    assert size_of((3, 0), (5, 1), torch.float32) == 0


def test_what_stays_may_be_put_elsewhere():
    lives = [Life(1000, 0, 3), Life(2000, 1, 5), Life(500, 2, 3), Life(700, 3, 4)]
    assert planned(lives).places.count(None) == 0
    plan = planned(lives, answers=False)
    check(plan)
    assert [place is None for place in plan.places] == [False, True, False, False]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = (48, 96, 24, 80, 48, 64, 32, 48)
        self.layers = torch.nn.ModuleList(map(torch.nn.Linear, widths, widths[1:]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = []
        for layer in self.layers:
            kept.append(x)
            x = F.gelu(layer(F.layer_norm(x, x.shape[-1:])))
        total = x
        for layer, y in zip(reversed(self.layers), reversed(kept), strict=True):
            total = total @ layer.weight + y.mT.cumsum(-1).mT
        return total, kept[1].sum(0)


@pytest.fixture(scope="module")
def step():
    torch.manual_seed(0)
    net = Net().requires_grad_(False)
    compiled = torch.compile(net, dynamic=True)

    def run(n: int) -> tuple[Tensor, ...]:
        torch.manual_seed(n)
        return compiled(torch.randn(n, 32, 48))

    run(5)
    return run


def watched(step, n: int) -> list[Life]:
    watch = Watch("cpu")
    with watch.within():
        kept = step(n)
    assert len(kept) == 2
    return watch.lives()


def test_a_compiled_step_is_watched(step):
    lives = watched(step, 7)
    assert len(lives) > 10
    assert sum(life.last > len(lives) for life in lives) == 2
    assert all(life.first < life.last for life in lives)
    assert max(life.size for life in lives) >= 4 * 7 * 32 * 48
    again = watched(step, 7)
    assert again == lives
    assert [life[1:] for life in watched(step, 4)] == [life[1:] for life in lives]


@pytest.mark.parametrize("answers", [True, False])
def test_a_compiled_step_has_its_places(step, answers):
    """Of batches as large as the one that was planned for, smaller and larger ones."""
    plan = planned(watched(step, 7), answers, device="cpu")
    check(plan)
    assert plan.size < 0.8 * sum(life.size for life in plan.lives)
    in_place = sum(place is not None for place in plan.places)
    assert in_place == len(plan.lives) - (0 if answers else 2)
    for n in (7, 7, 4, 9, 2):
        want, given = step(n), list[bool]()
        with within(plan, given):
            found = step(n)
            for a, b in zip(found, want, strict=True):
                assert torch.equal(a, b)
        assert len(given) == len(plan.places)
        assert (given.count(True) == in_place) == (n <= 7)  # what is larger than planned lies elsewhere


@contextmanager
def within(plan: Plan, given: list[bool]) -> Iterator[None]:
    """The plan, on memory full of NaN; `given`: whether each tensor came from it."""
    base = torch.full((plan.size // 4 + 1,), float("nan")).view(torch.uint8)
    giving = _Giving(plan, base)

    def wrap(own: Make) -> Make:
        make = giving.wrapped(own)

        def note(*like):
            found = make(*like)
            given.append(0 <= found.data_ptr() - base.data_ptr() < base.nbytes)
            return found

        return note

    with made_by(wrap, "cpu"):
        yield


def test_a_plan_of_something_else_does_no_harm(step):
    """Everything at one place, or for other tensors: what is there is not overwritten."""
    lives = watched(step, 7)
    want = step(7)
    size = max(life.size for life in lives)
    odd = [lives[::-1], lives[1:], lives[: len(lives) // 2], [Life(1, 0, 1)] * len(lives)]
    plans = [Plan(lives, [0] * len(lives), size, "cpu"), *(planned(some, device="cpu") for some in odd)]
    for plan in plans:
        given: list[bool] = []
        with within(plan, given):
            found = step(7)
            for a, b in zip(found, want, strict=True):
                assert torch.equal(a, b)
        assert len(given) == len(lives)
    assert given.count(True) == 0  # one byte each


def test_other_threads_have_memory_of_their_own(step):
    plan = planned(watched(step, 7), device="cpu")
    want, found, given = step(7), [], []
    with within(plan, given):
        thread = threading.Thread(target=lambda: found.append(step(7)))
        thread.start()
        thread.join()
    assert not given
    for a, b in zip(found[0], want, strict=True):
        assert torch.equal(a, b)


def test_nothing_is_left_behind(step):
    plan = planned(watched(step, 7), device="cpu")

    def failing() -> None:
        with plan.within():
            step(7)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    own = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]
    written = [vars(module) for module in PyCodeCache.modules]
    found = [names["empty_strided_cpu"] for names in written if "empty_strided_cpu" in names]
    assert found
    assert all(one is own for one in found)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:TensorFloat32")
@pytest.mark.parametrize("options", [{"dynamic": True}, {}], ids=str)
def test_a_plan_on_a_gpu(options):
    """Less memory than torch's allocator takes, and the numbers of the eager code, in batches that come in turns."""
    torch.manual_seed(0)
    widths = (256, 1024, 192, 2048, 256, 768, 512)
    layers = [layer for n, m in pairwise(widths) for layer in (torch.nn.Linear(n, m), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers).cuda()
    losses = lambda model, x: model(x).square().mean((1, 2))  # noqa: E731
    queries = {"grad": eachgrad.clipped_sum(1e-3), "norms": eachgrad.norms()}
    ask = eachgrad.compile(model, losses, mode="reduce-overhead", copies=False, **options, **queries)
    for n in (24, 24, 17, 30, 24, 17, 30, 24, 17, 30, 24, 17, 30, 30, 17):
        x = torch.randn(n, 256, 256, device="cuda")
        found = ask(x)
        want = ask.eager((x,))
        torch.testing.assert_close(found.norms, want.norms, rtol=1e-4, atol=0.0)
        for name, g in want.grad.items():
            torch.testing.assert_close(found.grad[name], g, rtol=1e-3, atol=1e-4 * float(g.abs().max()))
    assert not ask.reasons()
    layouts = [layout for known in ask.memory._layouts.values() for _, layout in known.values()]
    assert layouts
    assert all(isinstance(layout, Plan) for layout in layouts)


def test_what_ops_return_is_planned_as_well():
    torch.manual_seed(0)
    x, g = torch.randn(3, 2, 9, 9), torch.randn(3, 4, 9, 9)

    def run() -> Tensor:
        return torch.ops.eachgrad.conv_squares(x, g, [3, 3], [1, 1], [1, 1], [1, 1])

    want, watch = run(), Watch("cpu")
    with watch.within():
        kept = run()
    (life,) = watch.lives()
    assert life == Life(kept.nbytes, 0, 2)
    plan, given = planned([life], device="cpu"), list[bool]()
    with within(plan, given):
        assert torch.equal(run(), want)
    assert given == [True]


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (2, 0, 3), (1, 5, 1)])
def test_memory_for_what_an_op_returns_is_as_torch_makes_it(shape):
    like = torch.zeros(2, dtype=torch.bfloat16)
    for dtype in (None, torch.float32):
        found, want = new_empty(like, shape, dtype), like.new_empty(shape, dtype=dtype)
        assert (found.shape, found.dtype, found.device) == (want.shape, want.dtype, want.device)
        assert found.is_contiguous()
        assert not found.numel() or found.stride() == want.stride()
    with FakeTensorMode() as mode:
        fake = new_empty(mode.from_tensor(like), shape)
    assert isinstance(fake, FakeTensor)
    assert fake.shape == shape
