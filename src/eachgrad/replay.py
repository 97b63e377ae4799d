"""A compiled step as a CUDA graph: one launch for all of its kernels, however many there are.

A step of a GPT-2-size model has a thousand kernels, and the host needs longer to start them than the GPU to run them. A
CUDA graph reads and writes the same memory every time: the batch is copied into tensors of its own, parameters and
buffers are read where they were when it was captured, and its answers are overwritten by the next replay.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eachgrad.blocks.arithmetic import on_gpu

Call = Callable[[Sequence[Any]], tuple[Tensor, ...]]

MOST = 8  # captures, after which a step whose tensors move is run without a graph

# What is taken from the device piece by piece is never joined again, and a graph holds on to all of it: 2.10 GiB for a
# private step of ResNet-18. Cut from one large piece it is 1.79; how large is best cannot be known.
SHARES = (0.7, 0.8, 0.9)  # of what it takes without
LARGE = 1 << 26  # bytes below which nobody cares


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    outputs: tuple[Tensor, ...]  # what it returns after a replay
    pool: Any  # its memory
    stream: Any = None  # that it was captured on


def taken(pool: tuple[int, int]) -> int:
    """The bytes that a pool has from the device."""
    return sum(s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(pool))


def captured(call: Call, args: Sequence[Any], room: int = 0, pool: Any = None, stream: Any = None) -> Captured:
    """A graph of the call. `room`: bytes that are taken in one piece before."""
    graph, was_on = torch.cuda.CUDAGraph(), gc.isenabled()
    stream, pool = stream or torch.cuda.Stream(), pool or torch.cuda.MemPool()
    gc.collect()
    gc.disable()  # what it frees on the way, such as a module of kernels, may be forbidden during a capture
    _forget_workspaces()
    try:
        if room:
            with torch.cuda.stream(stream), torch.cuda.use_mem_pool(pool):
                torch.empty(room, dtype=torch.uint8, device="cuda")
        with torch.cuda.graph(graph, pool=pool.id, stream=stream, capture_error_mode="thread_local"):
            return Captured(graph, call(args), pool, stream)
    except RuntimeError:
        # The generator would take itself to be in a capture for ever.
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())
        raise
    finally:
        _forget_workspaces()
        if was_on:
            gc.enable()


def _forget_workspaces() -> None:
    """Let go of the room that torch keeps for products of matrices, by stream.

    What a graph uses is taken from its own memory then, and nothing keeps that once the graph is gone. Torch's own graphs
    do the same around a capture.
    """
    torch._C._cuda_clearCublasWorkspaces()


def best_room(call: Call, args: Sequence[Any]) -> int:
    """How many bytes to take in one piece, so that a graph of the call holds the fewest."""
    plain, left = _tried(call, args, 0)
    found = {0: plain}
    if plain >= LARGE and not left:  # or what is tried would stay
        for room in [int(share * plain) for share in SHARES]:
            with suppress(RuntimeError):  # too little memory for that
                found[room], left = _tried(call, args, room)
                if left:
                    break
    return min(found, key=lambda room: found[room])


def _tried(call: Call, args: Sequence[Any], room: int) -> tuple[int, int]:
    """The bytes that a graph holds, and those that are still there when it is gone."""
    found = captured(call, args, room)
    pool = found.pool.id
    size = taken(pool)
    del found
    torch.cuda.empty_cache()
    return size, taken(pool)


class Memory:
    """The memory of several graphs, of which one is replayed at a time and its answers are used before the next is.

    What one writes on its way may lie where another's does: together they take about what the largest takes.
    """

    def __init__(self) -> None:
        self.room: int | None = None  # what is taken in one piece, once that is known
        self._users = weakref.WeakSet[Replay]()
        self._pool: Any = None
        self._stream: Any = None  # memory that is free on one stream is not on another

    def captured(self, user: Replay, call: Call, args: Sequence[Any]) -> Captured:
        """A graph of the call for this user."""
        if self.room is None:
            self.room = best_room(call, args)
        found = captured(call, args, self.room if self._pool is None else 0, self._pool, self._stream)
        self._pool, self._stream = found.pool, found.stream
        self._users.add(user)
        return found

    def drop(self, user: Replay) -> None:
        """The user's graph is gone: with the last one goes the memory."""
        self._users.discard(user)
        if not self._users:
            self._pool = self._stream = None


class Replay:
    """Calls `call(args)` as it is once, which compiles it, and by a graph from then on."""

    def __init__(self, call: Call, copied: frozenset[int], memory: Memory | None = None):
        """`copied`: the places of the arguments that are copied, since they are others every time."""
        self.call, self.copied, self.memory = call, copied, memory or Memory()
        self.warm = False
        self.captures = 0
        self.reason = ""  # why there is no graph
        self._release()

    def _release(self) -> None:
        self.found: Captured | None = None
        self.memory.drop(self)
        self.own: list[Tensor] = []
        self.addresses: dict[int, int] = {}

    def release(self) -> None:
        """Give the graph's memory back; the next call captures another."""
        if self.found is not None:
            self._release()
            self.captures -= 1

    def __call__(self, args: Sequence[Any]) -> tuple[Tensor, ...]:
        """What `call` returns, in tensors that the next call overwrites."""
        if not self.warm or not self._ready(args):
            self.warm = True
            return self.call(args)
        assert self.found is not None
        for mine, k in zip(self.own, sorted(self.copied), strict=True):
            mine.copy_(args[k])
        self.found.graph.replay()
        return self.found.outputs

    def _ready(self, args: Sequence[Any]) -> bool:
        """Whether there is a graph for these arguments, now."""
        if self.found is not None and all(args[k].data_ptr() == place for k, place in self.addresses.items()):
            return True
        if not self.reason:
            self._capture(args)
        return self.found is not None

    def _capture(self, args: Sequence[Any]) -> None:
        self._release()
        self.captures += 1
        tensors = {k: a for k, a in enumerate(args) if isinstance(a, Tensor)}
        if not all(map(on_gpu, tensors.values())):
            self.reason = "a tensor is not on the GPU"
        elif self.captures > MOST:
            self.reason = "tensors beside the batch lie elsewhere in memory every time"
        if self.reason:
            return
        self.own = [args[k].clone() for k in sorted(self.copied)]
        mine = dict(zip(sorted(self.copied), self.own, strict=True))
        places = {t.device for t in tensors.values() if t.is_cuda}
        try:
            with torch.cuda.device(places.pop()) if len(places) == 1 else nullcontext():
                self.found = self.memory.captured(self, self.call, [mine.get(k, a) for k, a in enumerate(args)])
        except RuntimeError as error:
            self._release()
            self.reason = f"it cannot be captured: {str(error).partition(chr(10))[0]}"
            return
        self.addresses = {k: a.data_ptr() for k, a in tensors.items() if k not in self.copied}
