"""Gradients that stay in the memory of a CUDA graph until the next step: their noise is written over the sums there.

`p.grad` then takes no memory of its own, 0.46 GiB for GPT-2 small. Before the graph runs again everything is taken back.
Whoever has kept a gradient by then keeps it as it is: the graph's memory is left to it, the graph is captured elsewhere, and
nothing is lent from then on.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from eachgrad.arena import placed

_LEFT: list[tuple[list[StorageWeakRef], object]] = []  # gradients that somebody has kept, and the graph they are in


class Lending:
    """What a run has lent of the memory of its graphs."""

    def __init__(self) -> None:
        self.allowed = True
        self._lent: list[StorageWeakRef] = []
        self._graph: object = None

    def over(self, sums: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor] | None:
        """Tensors where the sums lie, to be written over and lent; None where the sums are to stay, or no graph's."""
        graphs = [getattr(value, "eachgrad_held", None) for value in sums.values()]
        if not self.allowed or not graphs or graphs[0] is None or any(graph is not graphs[0] for graph in graphs):
            return None
        if not _fit(sums, parameters):
            return None
        found = {name: placed(t.data_ptr(), t.nbytes, t, t.shape, t.stride()) for name, t in sums.items()}
        self._lent = [StorageWeakRef(t.untyped_storage()) for t in found.values()]
        self._graph = graphs[0]
        return found

    def take_back(self) -> bool:
        """Whether nobody has what was lent. If somebody has, it is left to them with all of the graph's memory."""
        _LEFT[:] = [left for left in _LEFT if not all(t.expired() for t in left[0])]
        kept = [t for t in self._lent if not t.expired()]
        if kept:
            _LEFT.append((kept, self._graph))
            self.allowed = False
        self._lent, self._graph = [], None
        return not kept

    def end_with(self, run: object, parameters: Iterable[nn.Parameter]) -> None:
        """When the run goes, the gradients that are still there get memory of their own, and the graph's is free."""
        weakref.finalize(run, _ended, self, list(parameters)).atexit = False


def _fit(sums: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> bool:
    """Whether each parameter has a sum that could be its gradient, and each of these memory that is none of another's."""
    if sums.keys() != parameters.keys():
        return False
    same = all(
        value.dtype == p.dtype == torch.float32 and value.shape == p.shape and value.is_contiguous()
        for value, p in ((sums[name], p) for name, p in parameters.items())
    )
    spans = sorted((value.data_ptr(), value.nbytes) for value in sums.values() if value.numel())
    return same and all(start + size <= after for (start, size), (after, _) in pairwise(spans))


def _ended(lending: Lending, parameters: list[nn.Parameter]) -> None:
    lent = {t.cdata for t in lending._lent if not t.expired()}
    # A copy in the middle of a capture would become part of that: then they stay where they are.
    if lent and not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
        for p in parameters:
            if p.grad is not None and p.grad.untyped_storage()._cdata in lent:
                p.grad = p.grad.clone()
    lending.take_back()
