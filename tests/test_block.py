"""Graphs of many sizes in one piece of memory, with sums of several beside them: nobody's numbers are written over."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from eachgrad import replay
from eachgrad.arena import Life, Plan, placed, planned
from eachgrad.block import Block, Placed
from eachgrad.private.lending import Lending

NUMBERS = 64


def plan_of(size: int) -> Plan:
    return planned([Life(size, 0, 2)], device="cpu")


def test_graphs_of_several_leave_room():
    block = Block()
    assert not block.has_room_for(plan_of(512), 2)
    block.keep_free(1024, several=4)
    first = block.placed(plan_of(2048), 3)
    assert first.base.nbytes == 3072
    assert block.has_room_for(plan_of(2048), 4)
    assert not block.has_room_for(plan_of(2560), 4)
    assert block.has_room_for(plan_of(3072), 5)  # alone in its step
    assert block.has_room_for(plan_of(3072), 0)
    assert block.placed(plan_of(3072), 5).base is first.base
    larger = block.placed(plan_of(2560), 4)
    assert larger.base.nbytes == 3584
    block.drop()
    assert block.placed(plan_of(512), 1).base.nbytes == 3584  # or the others would ask for more one after another


def test_what_there_is_no_memory_for_is_not_asked_again(monkeypatch):
    block, empty = Block(), torch.empty
    assert block.placed(plan_of(1024), 2).base.nbytes == 1024

    def failing(*args, **options):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "empty", failing)
    with pytest.raises(torch.OutOfMemoryError):
        block.placed(plan_of(4096), 9)
    monkeypatch.setattr(torch, "empty", empty)
    assert block.placed(plan_of(1024), 2).base.nbytes == 1024


class Graph:
    """Its answers lie in its memory, and a replay spoils all of its plan before."""

    def __init__(self, args, layout, chance: random.Random):
        self.args, self.layout = args, layout
        self.base = layout.base if isinstance(layout, Placed) else torch.empty(4096, dtype=torch.uint8)
        self.end = layout.size if isinstance(layout, Placed) else self.base.nbytes
        first = chance.choice([0, self.end - 1024]) // 512 * 512
        rows = (self.base[first + 512 * k :][: 4 * NUMBERS] for k in range(2))
        self.outputs = tuple(row.view(torch.float32) for row in rows)

    def replay(self) -> None:
        self.base[: self.end].view(torch.float32).fill_(float("nan"))
        total = self.args[1].sum(0)
        self.outputs[0].copy_(total)
        self.outputs[1].copy_(2 * total)


class World:
    """Two calls whose graphs share a memory, and a run that lends of it."""

    def __init__(self, chance: random.Random):
        self.chance, self.several = chance, chance.choice([3, 6])
        self.memory, self.zero = replay.Memory(), torch.zeros(1)
        self.memory.block.keep_free(1024, self.several)
        self.calls = [
            replay.Replays(lambda args, k=k: _sums(args), frozenset([1]), self.memory, (1, 0)) for k in range(2)
        ]
        self.parameters = {name: nn.Parameter(torch.zeros(NUMBERS)) for name in ("one", "two")}
        self.engine = SimpleNamespace(lends=True, release=self.release, ask=SimpleNamespace(memory=self.memory))
        self.lending = Lending(self.engine, self.parameters)  # type: ignore[arg-type]
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.lent = {"over": 0, "beside": 0}

    def release(self) -> None:
        for call in self.calls:
            call.release()

    def step(self) -> None:
        """One piece or several, added up, with something for noise; somebody may keep a gradient."""
        call, sums, want = self.calls[self.chance.random() < 0.2], dict[str, Tensor](), torch.zeros(NUMBERS)
        one = [self.chance.randint(1, 8)]
        sizes = self.chance.choice([one, [self.chance.randint(1, self.several) for _ in range(3)]])
        own = len(sizes) > 1
        for k, n in enumerate(sizes):
            x = torch.randn(n, NUMBERS)
            want += x.sum(0)
            found = dict(zip(self.parameters, call((self.zero, x)), strict=True))
            if not own:
                sums = self._noted("over", self.lending.over(found)) or found
            elif k == 0:
                sums = self._noted("beside", self.lending.beside(self.memory.block, found)) or {
                    name: torch.empty_like(t) for name, t in found.items()
                }
                torch._foreach_copy_([*sums.values()], [*found.values()])
            else:
                torch._foreach_add_([*sums.values()], [*found.values()])
            del found
            if self.chance.random() < 0.05:
                self.release()
        torch.testing.assert_close(sums["one"], want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(sums["two"], 2 * want, rtol=1e-4, atol=1e-4)
        if own or self.lending._lent:
            with self.lending.taken():
                self._take(sums)
                sums = {}
        for mine, copy in self.kept:
            assert torch.equal(mine, copy)
        if not self.engine.lends and self.chance.random() < 0.3:
            self.release()  # graphs that were captured meanwhile leave no room
            self.engine.lends = True
            self.memory.block.keep_free(1024, self.several)

    def _noted(self, kind: str, found):
        self.lent[kind] += found is not None
        return found

    def _take(self, sums: dict[str, Tensor]) -> None:
        for name, p in self.parameters.items():
            p.grad = sums[name].add_(1.0)
        sums.clear()
        with torch.no_grad():
            for p in self.parameters.values():
                p.sub_(p.grad)
        if self.chance.random() < 0.05:
            mine = self.chance.choice([p.grad for p in self.parameters.values()])
            mine = self.chance.choice([mine, mine[3:], mine.detach()])
            self.kept.append((mine, mine.clone()))
        elif self.kept and self.chance.random() < 0.1:
            self.kept.pop()


def _sums(args) -> tuple[Tensor, ...]:
    total = args[1].sum(0)
    return total, 2 * total


def _lent(t: Tensor, held: replay.Held) -> Tensor:
    found = placed(t.data_ptr(), t.nbytes, t, t.shape, t.stride())
    found.eachgrad_held = held  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("seed", range(3))
def test_steps_of_any_size_in_any_order(seed, monkeypatch):
    """Graphs are captured, given back and captured again, and sometimes cannot be."""
    torch.manual_seed(seed)
    chance = random.Random(seed)

    def captured(call, args, layout, pool, stream):
        if chance.random() < 0.05:
            raise torch.OutOfMemoryError
        graph = Graph(args, layout, chance)
        return replay.Captured(graph, graph.outputs, "pool", "stream")  # type: ignore[arg-type]

    def layout(call, args, answers):
        return planned([Life(512 * (2 + len(args[1]) * chance.choice([1, 2])), 0, 2)], device="cpu")

    monkeypatch.setattr(replay, "captured", captured)
    monkeypatch.setattr(replay, "best_layout", layout)
    monkeypatch.setattr(replay, "on_gpu", lambda t: True)
    monkeypatch.setattr(replay, "lent", _lent)
    lent = {"over": 0, "beside": 0}
    for _ in range(30):
        world = World(chance)
        for _ in range(60):
            world.step()
        lent = {kind: n + world.lent[kind] for kind, n in lent.items()}
    assert min(lent.values()) >= 300


def test_a_graph_that_would_write_into_the_room_does_not_run(monkeypatch):
    """A batch that is too large to be one of several is computed without a graph while the sums are there."""
    chance = random.Random(0)

    def captured(call, args, layout, pool, stream):
        graph = Graph(args, layout, chance)
        return replay.Captured(graph, graph.outputs, "pool", "stream")  # type: ignore[arg-type]

    monkeypatch.setattr(replay, "captured", captured)
    monkeypatch.setattr(replay, "best_layout", lambda call, args, answers: plan_of(2048))
    monkeypatch.setattr(replay, "on_gpu", lambda t: True)
    world = World(chance)
    x = torch.randn(8, NUMBERS)
    (call, _), block = world.calls, world.memory.block
    for _ in range(3):
        call((world.zero, x))
    assert call.each[8].found is not None
    assert block.base is not None
    assert call.each[8].found.base is block.base
    room = block.room()
    assert room is not None
    room.view(torch.float32).fill_(7.0)
    torch.testing.assert_close(call((world.zero, x))[0], x.sum(0), rtol=1e-4, atol=1e-4)
    assert bool((room.view(torch.float32) == 7.0).all())
    del room
    call((world.zero, x))
    assert block.base.view(torch.float32).isnan().any()
