"""When a CUDA graph is captured, replayed and given up, with a stand-in for the graph where there is no GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

import eachgrad
from eachgrad import replay


class Recorded:
    """Runs the call again on the tensors that it was captured with, and writes where it wrote then."""

    def __init__(self, call, args):
        self.call, self.args = call, args
        self.outputs = tuple(t.clone().fill_(float("nan")) for t in call(args))  # capturing computes nothing

    def replay(self):
        for out, value in zip(self.outputs, self.call(self.args), strict=True):
            out.copy_(value)


@pytest.fixture
def fake(monkeypatch):
    def captured(call, args, layout, pool, stream):
        graph = Recorded(call, args)
        return replay.Captured(graph, graph.outputs, None)

    monkeypatch.setattr(replay, "captured", captured)
    monkeypatch.setattr(replay, "_tried", lambda call, args, layout: (0, 0))
    monkeypatch.setattr(replay, "on_gpu", lambda t: True)


def product(args) -> tuple[Tensor, ...]:
    w, x, shift = args
    return (x @ w + shift,)


def problem():
    torch.manual_seed(0)
    return torch.randn(3, 2), torch.randn(2)


def test_every_batch_has_its_own_answer(fake):
    w, shift = problem()
    step = replay.Replay(product, frozenset([1]))
    for _ in range(5):
        x = torch.randn(4, 3)
        torch.testing.assert_close(step((w, x, shift))[0], x @ w + shift)
        w += 0.1  # an update in place is seen
    assert step.captures == 1


def test_an_answer_is_overwritten_by_the_next(fake):
    w, shift = problem()
    step = replay.Replay(product, frozenset([1]))
    answers = [step((w, torch.randn(4, 3), shift))[0] for _ in range(3)]
    assert answers[1] is answers[2]


def test_a_tensor_that_lies_elsewhere_is_another_graph(fake):
    w, shift = problem()
    step = replay.Replay(product, frozenset([1]))
    x = torch.randn(4, 3)
    for k in range(4):
        step((w, x, shift))
        if k == 2:
            w.data = w.data.clone() + 1.0  # the same parameter elsewhere
    torch.testing.assert_close(step((w, x, shift))[0], x @ w + shift)
    assert step.captures == 2


def test_another_shape_is_another_graph(fake):
    """And is not broadcast into the first."""
    w, shift = problem()
    step = replay.Replay(product, frozenset([1]))
    for n in (4, 4, 4, 1, 1, 4, 4):
        x = torch.randn(n, 3)
        torch.testing.assert_close(step((w, x, shift))[0], x @ w + shift)
    assert step.captures == 3


def test_tensors_that_move_every_time_are_given_up(fake):
    w, shift = problem()
    step = replay.Replay(product, frozenset([1]))
    kept = []
    for _ in range(replay.MOST + 3):
        kept.append(shift.clone())
        x = torch.randn(4, 3)
        torch.testing.assert_close(step((w, x, kept[-1]))[0], x @ w + shift)
    assert "elsewhere" in step.reason
    assert step.found is None


def test_released_memory_is_captured_again(fake):
    w, shift = problem()
    step = replay.Replay(product, frozenset([1]))
    for _ in range(2 * replay.MOST):
        x = torch.randn(4, 3)
        torch.testing.assert_close(step((w, x, shift))[0], x @ w + shift)
        step.release()
    assert not step.reason


def test_what_is_not_on_a_gpu_has_no_graph():
    w, shift = problem()
    step = replay.Replay(product, frozenset([1]))
    for _ in range(3):
        x = torch.randn(4, 3)
        torch.testing.assert_close(step((w, x, shift))[0], x @ w + shift)
    assert step.reason == "a tensor is not on the GPU"


def test_what_cannot_be_captured_runs_without(fake, monkeypatch):
    def captured(call, args, layout, pool, stream):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(replay, "captured", captured)
    w, shift = problem()
    step = replay.Replay(product, frozenset([1]))
    for _ in range(3):
        x = torch.randn(4, 3)
        torch.testing.assert_close(step((w, x, shift))[0], x @ w + shift)
    assert step.reason == "it cannot be captured: operation not permitted when stream is capturing"


MIB = 1 << 20


@pytest.mark.parametrize(
    ("sizes", "left", "best"),
    [
        ({"watched": 1000, "planned": 950, 700: 940, 800: 930, 900: 950}, 0, 800),
        ({"watched": 1000, "planned": 950, 700: 850}, 0, 700),  # good enough
        ({"watched": 1000, "planned": 890}, 0, "planned"),
        ({"watched": 1000, "planned": 920, 700: 930, 800: 930, 900: 950}, 0, "planned"),
        ({"watched": 1000, "planned": 1000, 700: 1100, 800: 1050, 900: 1000}, 0, 0),  # nothing helps
        ({"watched": 1000, "planned": None, 700: None, 800: None, 900: 990}, 0, 900),  # None: it does not fit
        ({"watched": 1000, "planned": None, 700: None, 800: None, 900: None}, 0, 0),
        ({"watched": 63}, 0, 0),
        ({"watched": 1000}, 1, 0),  # memory that stays when the graph is gone
    ],
)
def test_the_layout_with_the_fewest_bytes_is_taken(sizes, left, best, monkeypatch):
    """A graph is tried with each layout once, and captured with the best one whenever it is needed."""
    tried, asked = [], []

    def named(layout):
        kinds = {replay.Watch: "watched", replay.Plan: "planned", replay.Placed: "planned"}
        return kinds.get(type(layout)) or layout.size // MIB

    def attempt(call, args, layout):
        tried.append(named(layout))
        if sizes[tried[-1]] is None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return sizes[tried[-1]] * MIB, left

    def captured(call, args, layout, pool, stream):
        asked.append(named(layout))
        graph = Recorded(call, args)
        return replay.Captured(graph, graph.outputs, None)

    monkeypatch.setattr(replay, "_tried", attempt)
    monkeypatch.setattr(replay, "planned", partial(replay.planned, device="cpu"))
    monkeypatch.setattr(replay, "captured", captured)
    monkeypatch.setattr(replay, "on_gpu", lambda t: True)
    w, shift = problem()
    step = replay.Replay(product, frozenset([1]))
    for _ in range(4):
        x = torch.randn(4, 3)
        torch.testing.assert_close(step((w, x, shift))[0], x @ w + shift)
    step.release()
    step((w, x, shift))
    assert tried == list(sizes)
    assert asked == [best, best]
    assert step.captures == 1


def test_graphs_of_one_memory_share_it_until_all_are_gone(monkeypatch):
    """The first takes the room; the others are cut from the same memory, on the same stream."""
    asked = []

    def captured(call, args, layout, pool, stream):
        asked.append((layout.size, pool, stream))
        graph = Recorded(call, args)
        return replay.Captured(graph, graph.outputs, pool or f"pool {len(asked)}", stream or f"stream {len(asked)}")

    monkeypatch.setattr(replay, "captured", captured)
    kept = []
    monkeypatch.setattr(replay, "best_layout", lambda call, args, answers: kept.append(answers) or replay.Room(5))
    monkeypatch.setattr(replay, "on_gpu", lambda t: True)
    w, shift = problem()
    memory = replay.Memory()
    steps = [replay.Replay(product, frozenset([1]), memory) for _ in range(3)]

    def run():
        for step in steps:
            x = torch.randn(4, 3)
            torch.testing.assert_close(step((w, x, shift))[0], x @ w + shift)

    run()  # compiles
    run()
    assert asked == [(5, None, None), (0, "pool 1", "stream 1"), (0, "pool 1", "stream 1")]
    steps[0].release()
    run()
    assert asked[3:] == [(0, "pool 1", "stream 1")]
    for step in steps:
        step.release()
    run()
    assert asked[4:] == [(5, None, None), (0, "pool 5", "stream 5"), (0, "pool 5", "stream 5")]
    del step
    steps.clear()  # gone without a word
    steps.append(replay.Replay(product, frozenset([1]), memory))
    run()
    run()
    assert asked[7] == (5, None, None)
    assert not any(kept)  # answers stay when another graph runs


def test_inputs_of_one_kind_are_kept_apart(fake):
    """Two tensors of the batch of one dtype; a third that lies with its columns first keeps that."""
    product = lambda args: ((args[0] + 2 * args[1]) @ args[2],)  # noqa: E731
    steps = replay.Replays(product, frozenset([0, 1, 2]), replay.Memory(), (0, 0))

    def batch(n):
        return torch.randn(n, 3), torch.randn(n, 3), torch.randn(2, 3).T

    for n in (4, 6, 4, 6, 3, 3, 4, 6):
        x, y, z = batch(n)
        torch.testing.assert_close(steps((x, y, z))[0], (x + 2 * y) @ z)
    found = steps.each[4]
    assert found.found is not None
    assert found.own[0].data_ptr() != found.own[1].data_ptr()
    assert found.own[2].stride() == (1, 3)
    kept = {key: t.data_ptr() for key, t in steps.memory._inputs.items()}
    assert len(kept) == 2
    steps(batch(6))
    assert {key: t.data_ptr() for key, t in steps.memory._inputs.items()} == kept
    steps.release()
    assert not steps.memory._inputs


def test_too_little_memory_now_is_not_for_ever(fake, monkeypatch):
    """A capture that finds no memory is tried again, so many times; every answer is right."""
    left, own = [2], replay.captured

    def captured(*args):
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError
        return own(*args)

    monkeypatch.setattr(replay, "captured", captured)
    w, shift = problem()
    for failures, graph in ((2, True), (replay.MOST, False)):
        left[0], step = failures, replay.Replay(product, frozenset([1]))
        for _ in range(12):
            x = torch.randn(4, 3)
            torch.testing.assert_close(step((w, x, shift))[0], x @ w + shift)
        assert (step.found is not None) == graph
        assert step.reason == ("" if graph else "there is too little memory for it")


def test_a_graph_for_each_size(monkeypatch):
    """They share memory; when a larger one comes, those before it are captured again in what that takes."""
    asked = []

    def captured(call, args, layout, pool, stream):
        asked.append((len(args[1]), layout.size, pool))
        graph = Recorded(call, args)
        return replay.Captured(graph, graph.outputs, pool or f"pool {len(asked)}", stream or "stream")

    monkeypatch.setattr(replay, "captured", captured)
    monkeypatch.setattr(replay, "best_layout", lambda call, args, answers: answers and replay.Room(10 * len(args[1])))
    monkeypatch.setattr(replay, "on_gpu", lambda t: True)
    w, shift = problem()
    steps = replay.Replays(product, frozenset([1]), replay.Memory(), (1, 0))

    def run(*sizes):
        asked.clear()
        for n in sizes:
            x = torch.randn(n, 3)
            torch.testing.assert_close(steps((w, x, shift))[0], x @ w + shift)
        return [*asked]

    assert run(4, 6, 3, 9) == []  # compared with the eager answer, without a graph
    assert run(4, 3, 4) == [(4, 40, None), (3, 0, "pool 1")]
    assert steps.each[4].own[0].data_ptr() == steps.each[3].own[0].data_ptr()
    assert run(6, 4, 3, 6) == [(6, 60, None), (4, 0, "pool 1"), (3, 0, "pool 1")]
    assert run(4, 3, 6) == []
    steps.release()
    assert run(3, 9) == [(3, 60, None), (9, 90, None)]
    assert not steps.reason
    assert steps.each[9].captures == steps.each[3].captures + 1 == 1


def test_why_a_size_has_no_graph(fake, monkeypatch):
    monkeypatch.setattr(replay, "on_gpu", lambda t: len(t) != 5)
    w, shift = problem()
    steps = replay.Replays(product, frozenset([1]), replay.Memory(), (1, 0))
    for n in (4, 5, 4, 5):
        x = torch.randn(n, 3)
        torch.testing.assert_close(steps((w, x, shift))[0], x @ w + shift)
    assert steps.reason == "5 samples: a tensor is not on the GPU"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:TensorFloat32")
@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("sizes", [{"pad_to": (8, 16, 32)}, {"dynamic": True}], ids=str)
def test_sizes_in_turns_on_a_gpu(copies, sizes):
    """Graphs that share their memory, replayed in any order; nothing of it is left when they are gone."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 2000), torch.nn.GELU(), torch.nn.Linear(2000, 300)).cuda()
    losses = lambda model, x: model(x).square().mean((1, 2))  # noqa: E731
    queries = {"grad": eachgrad.clipped_sum(1e-3), "norms": eachgrad.norms()}
    ask = eachgrad.compile(model, losses, mode="reduce-overhead", copies=copies, **sizes, **queries)
    for n in (32, 3, 12, 8, 31, 16, 1) * 7:
        x = torch.randn(n, 256, 300, device="cuda")
        got, want = ask(x), ask.eager((x,))
        torch.testing.assert_close(got.norms, want.norms, rtol=1e-4, atol=0)
        for name, value in want.grad.items():
            torch.testing.assert_close(got.grad[name], value, rtol=1e-3, atol=1e-4 * float(value.abs().max()))
    assert not ask.reasons()
    calls = [step.call for graph in ask.graphs for step in graph.step.values()]
    replays = [one for call in calls for one in getattr(call, "each", {0: call}).values()]
    assert sum(one.found is not None for one in replays) >= 3
    pools = {one.found.pool for one in replays if one.found}
    assert len(pools) == 1
    (pool,) = pools
    block = ask.memory.block.base
    assert replay.taken(pool) + (0 if block is None else block.nbytes) >= replay.LARGE  # or one piece was not tried
    del got, block
    ask.release()
    torch.cuda.empty_cache()
    assert replay.taken(pool) == 0
    assert ask.memory.block.base is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("how", ["waits", "takes all"])
def test_a_capture_that_fails_on_a_gpu_leaves_nothing_behind(how):
    """The stream, the generator and the memory are as before, and the next capture works."""
    x, stream = torch.randn(4, 3, device="cuda"), torch.cuda.current_stream()

    def fails(args):
        out = args[0] * 2
        if torch.cuda.is_current_stream_capturing():
            if how == "waits":
                out.sum().item()
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        return (out,)

    step = replay.Replay(fails, frozenset([0]))
    for _ in range(3):
        torch.testing.assert_close(step((x,))[0], 2 * x)
        assert torch.cuda.current_stream() == stream
        torch.cuda.empty_cache()
        torch.randn(3, device="cuda")
    assert bool(step.reason) == (how == "waits")  # there may be more memory next time
    other = replay.Replay(lambda args: (args[0] * 3,), frozenset([0]))
    for _ in range(3):
        torch.testing.assert_close(other((x,))[0], 3 * x)
    assert other.found is not None
    assert not other.reason


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("size", [0, 4])
def test_captured_while_a_pool_of_the_user_is_in_use_on_a_gpu(size):
    """What is tried and thrown away on the way ends nothing, and the graph has memory that stays when that pool goes."""
    x, pool = torch.randn(4, 1 << 23, device="cuda"), torch.cuda.MemPool()
    step = replay.Replay(lambda args: (args[0] * 2 + 1,), frozenset([0]), replay.Memory(), size)
    with torch.cuda.use_mem_pool(pool):
        for _ in range(3):
            torch.testing.assert_close(step((x,))[0], 2 * x + 1)
    assert step.found is not None
    assert replay.taken(step.found.pool) >= replay.LARGE
    del pool
    others = [torch.full_like(x, float("nan")) for _ in range(4)]
    torch.testing.assert_close(step((x,))[0], 2 * x + 1)
    assert all(bool(t.isnan().all()) for t in others)
