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

from eachgrad.arena import Plan, Room, Watch, placed, planned
from eachgrad.block import Block, Placed
from eachgrad.blocks.arithmetic import on_gpu

Call = Callable[[Sequence[Any]], tuple[Tensor, ...]]
Layout = Plan | Room  # where the tensors of a graph lie

NONE = Room()

MOST = 8  # captures, after which a step whose tensors move is run without a graph

# What is taken from the device piece by piece is never joined again, and a graph holds on to all of it: 2.10 GiB for a
# private step of ResNet-18. Cut from one large piece it is 1.79; how large is best cannot be known. Where the compiler makes
# most tensors, and not cuDNN, a plan is better still.
SHARES = (0.7, 0.8, 0.9)  # of what it takes without
GOOD = 0.9  # of it, with which nothing else is tried: each is one more capture
LARGE = 1 << 26  # bytes below which nobody cares


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    outputs: tuple[Tensor, ...]  # what it returns after a replay
    pool: Any  # its memory, by the name that torch has for it
    stream: Any = None  # that it was captured on
    base: Tensor | None = None  # and memory that others use, too


class Held(NamedTuple):
    """What an answer is in, and keeps."""

    graph: torch.cuda.CUDAGraph
    base: Tensor | None


def taken(pool: tuple[int, int]) -> int:
    """The bytes that a pool has from the device."""
    return sum(s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(pool))


def captured(
    call: Call, args: Sequence[Any], layout: Layout | Placed | Watch = NONE, pool: Any = None, stream: Any = None
) -> Captured:
    """A graph of the call, with its tensors where the layout puts them."""
    graph, was_on, before = torch.cuda.CUDAGraph(), gc.isenabled(), torch.cuda.current_stream()
    # No torch.cuda.MemPool, which ends the process if it goes while another pool is in use, such as one of the user's.
    stream, pool = stream or torch.cuda.Stream(), pool or torch.cuda.graph_pool_handle()
    gc.collect()
    gc.disable()  # what it frees on the way, such as a module of kernels, may be forbidden during a capture
    _forget_workspaces()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"), layout.within():
            return Captured(graph, call(args), pool, stream)
    except RuntimeError:
        _end(pool, before)
        raise
    finally:
        _forget_workspaces()
        if was_on:
            gc.enable()


def _end(pool: Any, stream: Any) -> None:
    """Let torch know that a capture has failed: it would take itself to be in one for ever, on another stream.

    Its generator draws nothing then, and its memory is not given back.
    """
    torch.cuda.set_stream(stream)
    device = torch.cuda.current_device()
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())
    with suppress(RuntimeError):  # it has been told
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)  # as a graph does that goes, if its capture has come to its end


def _forget_workspaces() -> None:
    """Let go of the room that torch keeps for products of matrices, by stream.

    What a graph uses is taken from its own memory then, and nothing keeps that once the graph is gone. Torch's own graphs
    do the same around a capture.
    """
    torch._C._cuda_clearCublasWorkspaces()


def best_layout(call: Call, args: Sequence[Any], answers: bool) -> Layout:
    """The one with which a graph of the call holds the fewest bytes; `answers`: these may be overwritten, too."""
    watch = Watch()
    plain, left = _tried(call, args, watch)
    found: dict[int, Layout] = {plain: NONE}
    if plain >= LARGE and not left:  # or what is tried would stay
        rooms = [Room(int(share * plain)) for share in SHARES]
        for layout in (planned(watch.lives(), answers), *rooms):
            with suppress(RuntimeError):  # too little memory for that
                size, left = _tried(call, args, layout)
                found.setdefault(size, layout)
                if left or min(found) < GOOD * plain:
                    break
    return found[min(found)]


def _tried(call: Call, args: Sequence[Any], layout: Layout | Watch) -> tuple[int, int]:
    """The bytes that a graph holds, and those that are still there when it is gone."""
    found = captured(call, args, layout)
    pool = found.pool
    size = taken(pool)
    del found
    torch.cuda.empty_cache()
    return size, taken(pool)


class Memory:
    """The memory of several graphs, of which one is replayed at a time and its answers are used before the next is.

    What one writes may lie where another's does: together they take about what the largest takes.
    """

    def __init__(self) -> None:
        self.size = 0  # the largest so far
        self.block = Block()
        # Of large batches, and of those that may be one of several of a step; and the size that each is for.
        self._layouts = weakref.WeakKeyDictionary[Call, dict[bool, tuple[int, Layout]]]()
        self._users = weakref.WeakSet[Replay]()
        self._pool: Any = None
        self._stream: Any = None  # memory that is free on one stream is not on another
        self._inputs: dict[tuple, Tensor] = {}

    def captured(self, user: Replay, call: Call, args: Sequence[Any], size: int = 0) -> Captured:
        """A graph of the call for this user; `size` grows with the memory that it takes."""
        if size > self.size:
            # What the smaller ones have would not do, and would stay: they are captured again in what this one takes.
            self._release()
            self.size = size
        layout = self._placed(self._layout(call, args, size), size)
        found = captured(call, args, layout if layout.lasts or self._pool is None else NONE, self._pool, self._stream)
        found = found._replace(base=layout.base if isinstance(layout, Placed) else None)
        self._pool, self._stream = found.pool, found.stream
        self._users.add(user)
        if not size:
            return found
        # As long as somebody has an answer, its graph is there, and with it the memory.
        return found._replace(outputs=tuple(lent(t, Held(found.graph, found.base)) for t in found.outputs))

    def _release(self) -> None:
        for other in list(self._users):
            other.release()

    def _placed(self, layout: Layout, size: int) -> Layout | Placed:
        if not isinstance(layout, Plan):
            return layout
        if not self.block.has_room_for(layout, size):
            self._release()  # all of them move
        return self.block.placed(layout, size)

    def _layout(self, call: Call, args: Sequence[Any], size: int) -> Layout:
        """Where the tensors of a call lie: for a smaller batch, as for a larger one, of which all are larger."""
        known, small = self._layouts.setdefault(call, {}), self.block.is_one_of_several(size)
        if small not in known or known[small][0] < size:
            try:
                best = best_layout(call, args, answers=bool(size))
            except torch.OutOfMemoryError:
                self._release()  # it is tried beside what the others have
                best = best_layout(call, args, answers=bool(size))
            known[small] = size, best
        return known[small][1]

    def input(self, place: int, like: Tensor, size: int) -> Tensor:
        """A copy of an argument, for good; in memory that graphs of other sizes use as well, if there are such."""
        if not size or not like.is_contiguous():
            return like.clone()
        key = place, like.dtype, like.device
        if key not in self._inputs or self._inputs[key].numel() < like.numel():
            self._inputs[key] = torch.empty(like.numel(), dtype=like.dtype, device=like.device)
        return self._inputs[key][: like.numel()].view(like.shape).copy_(like)

    def drop(self, user: Replay) -> None:
        """The user's graph is gone: with the last one goes the memory."""
        self._users.discard(user)
        if not self._users:
            self._pool = self._stream = None
            self.block.drop()
            self._inputs.clear()


def lent(t: Tensor, held: object) -> Tensor:
    """The same numbers, in memory that does not count as taken: another graph of the same memory may write there."""
    if not t.is_cuda:
        return t
    mine = t.untyped_storage()
    found = placed(mine.data_ptr(), mine.nbytes(), t, t.shape, t.stride(), int(t.storage_offset()))
    found.eachgrad_held = held  # type: ignore[attr-defined]
    return found


class Replay:
    """Calls `call(args)` as it is once, which compiles it, and by a graph from then on."""

    def __init__(self, call: Call, copied: frozenset[int], memory: Memory | None = None, size: int = 0):
        """`copied`: the places of the arguments that are copied, since they are others every time.

        `size`: the samples of the batch, where there are replays of other sizes.
        """
        self.call, self.copied, self.memory, self.size = call, copied, memory or Memory(), size
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
        if not self.warm or self.memory.block.is_in_use(self.size) or not self._ready(args):
            self.warm = True
            return self.call(args)
        assert self.found is not None
        for mine, k in zip(self.own, sorted(self.copied), strict=True):
            mine.copy_(args[k])
        self.found.graph.replay()
        return self.found.outputs

    def _ready(self, args: Sequence[Any]) -> bool:
        """Whether there is a graph for these arguments, now."""
        if self.found is not None and self._fits(args):
            return True
        if not self.reason:
            self._capture(args)
        return self.found is not None

    def _fits(self, args: Sequence[Any]) -> bool:
        """Whether what is copied has the graph's shapes, to which it would be broadcast, and the rest is in its place."""
        copied = zip(self.own, sorted(self.copied), strict=True)
        return all(mine.shape == args[k].shape for mine, k in copied) and all(
            args[k].data_ptr() == place for k, place in self.addresses.items()
        )

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
        self.own = [self.memory.input(k, args[k], self.size) for k in sorted(self.copied)]
        mine = dict(zip(sorted(self.copied), self.own, strict=True))
        places = {t.device for t in tensors.values() if t.is_cuda}
        try:
            with torch.cuda.device(places.pop()) if len(places) == 1 else nullcontext():
                given = [mine.get(k, a) for k, a in enumerate(args)]
                self.found = self.memory.captured(self, self.call, given, self.size)
        except torch.OutOfMemoryError:
            self._release()  # there may be more of it next time
            self.reason = "there is too little memory for it" if self.captures >= MOST else ""
            return
        except RuntimeError as error:
            self._release()
            self.reason = f"it cannot be captured: {str(error).partition(chr(10))[0]}"
            return
        self.addresses = {k: a.data_ptr() for k, a in tensors.items() if k not in self.copied}


class Replays:
    """Calls `call(args)` by a graph for each size of the batch."""

    def __init__(self, call: Call, copied: frozenset[int], memory: Memory, counted: tuple[int, int]):
        """`counted`: the place of an argument that has all samples, and the dimension they lie along."""
        self.call, self.copied, self.memory, self.counted = call, copied, memory, counted
        self.each: dict[int, Replay] = {}

    def __call__(self, args: Sequence[Any]) -> tuple[Tensor, ...]:
        place, dim = self.counted
        size = args[place].shape[dim]
        if size not in self.each:
            self.each[size] = Replay(self.call, self.copied, self.memory, size)
        return self.each[size](args)

    @property
    def reason(self) -> str:
        """Why there is no graph for some size."""
        return next((f"{n} samples: {one.reason}" for n, one in self.each.items() if one.reason), "")

    def release(self) -> None:
        """Give the graphs' memory back; the next calls capture others."""
        for one in self.each.values():
            one.release()
