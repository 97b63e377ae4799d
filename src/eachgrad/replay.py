"""A compiled step as a CUDA graph: one launch for all of its kernels, however many there are.

A step of a GPT-2-size model has a thousand kernels, and the host needs longer to start them than the GPU to run them. A
CUDA graph reads and writes the same memory every time: the batch is copied into tensors of its own, parameters and
buffers are read where they were when it was captured, and its answers are overwritten by the next replay.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from eachgrad.blocks.arithmetic import on_gpu

Call = Callable[[Sequence[Any]], tuple[Tensor, ...]]

MOST = 8  # captures, after which a step whose tensors move is run without a graph


def captured(call: Call, args: Sequence[Any]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    """A graph of the call, and the tensors that hold what it returns after a replay."""
    graph, was_on = torch.cuda.CUDAGraph(), gc.isenabled()
    gc.collect()
    gc.disable()  # what it frees on the way, such as a module of kernels, may be forbidden during a capture
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            return graph, call(args)
    except RuntimeError:
        # The generator would take itself to be in a capture for ever.
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())
        raise
    finally:
        if was_on:
            gc.enable()


class Replay:
    """Calls `call(args)` as it is once, which compiles it, and by a graph from then on."""

    def __init__(self, call: Call, copied: frozenset[int]):
        """`copied`: the places of the arguments that are copied, since they are others every time."""
        self.call, self.copied = call, copied
        self.warm = False
        self.captures = 0
        self.reason = ""  # why there is no graph
        self._release()

    def _release(self) -> None:
        self.graph: torch.cuda.CUDAGraph | None = None
        self.own: list[Tensor] = []
        self.addresses: dict[int, int] = {}
        self.outputs: tuple[Tensor, ...] = ()

    def release(self) -> None:
        """Give the graph's memory back; the next call captures another."""
        if self.graph is not None:
            self._release()
            self.captures -= 1

    def __call__(self, args: Sequence[Any]) -> tuple[Tensor, ...]:
        """What `call` returns, in tensors that the next call overwrites."""
        if not self.warm or not self._ready(args):
            self.warm = True
            return self.call(args)
        assert self.graph is not None
        for mine, k in zip(self.own, sorted(self.copied), strict=True):
            mine.copy_(args[k])
        self.graph.replay()
        return self.outputs

    def _ready(self, args: Sequence[Any]) -> bool:
        """Whether there is a graph for these arguments, now."""
        if self.graph is not None and all(args[k].data_ptr() == place for k, place in self.addresses.items()):
            return True
        if not self.reason:
            self._capture(args)
        return self.graph is not None

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
        try:
            self.graph, self.outputs = captured(self.call, [mine.get(k, a) for k, a in enumerate(args)])
        except RuntimeError as error:
            self._release()
            self.reason = f"it cannot be captured: {str(error).partition(chr(10))[0]}"
            return
        self.addresses = {k: a.data_ptr() for k, a in tensors.items() if k not in self.copied}
