"""Gradients in the memory of CUDA graphs while the optimizer takes them: they need none of their own.

The noise is written over the sums of a graph, or over those of several pieces at the end of the graphs' memory, where small
pieces leave room. When the optimizer has taken its step, `p.grad` is None. Whoever has kept a gradient by then keeps it as it
is: that memory is left to it, graphs are captured elsewhere, and nothing is lent from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from eachgrad.block import Block, alias, room_for
from eachgrad.private.gathering import Engine


class Lending:
    """What a step has lent of the memory of its graphs."""

    def __init__(self) -> None:
        self.allowed = True
        self._lent: StorageWeakRef | None = None

    def over(self, sums: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor] | None:
        """Tensors where the sums of a graph lie, to be written over; None where they are to stay, or no graph's."""
        self._lent = None
        bases = [getattr(getattr(value, "eachgrad_held", None), "base", None) for value in sums.values()]
        base = bases[0] if bases else None
        if not self.allowed or base is None or any(other is not base for other in bases) or not _fit(sums, parameters):
            return None
        places = {name: (value, value.data_ptr() - base.data_ptr()) for name, value in sums.items()}
        if not all(0 <= place <= base.nbytes - value.nbytes and place % 4 == 0 for value, place in places.values()):
            return None
        return self._given(alias(base).view(torch.float32), places)

    def beside(self, block: Block, sums: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Tensors for the sums of several pieces, beside what the graphs of these use; None where there is no room."""
        self._lent = None
        usual = all(value.dtype == torch.float32 and value.is_contiguous() for value in sums.values())
        if not self.allowed or not usual or sum(map(room_for, sums.values())) > block.beside:
            return None
        room = block.room()
        if room is None or any(value.device != room.device for value in sums.values()):
            return None
        places, end = {}, 0
        for name, value in sums.items():
            places[name], end = (value, end), end + room_for(value)
        return self._given(room.view(torch.float32), places)

    def _given(self, whole: Tensor, places: Mapping[str, tuple[Tensor, int]]) -> dict[str, Tensor]:
        """Tensors like these, so many bytes into the whole."""
        self._lent = StorageWeakRef(whole.untyped_storage())
        start = int(whole.storage_offset())
        return {
            name: whole.as_strided(like.shape, like.stride(), start + place // 4)
            for name, (like, place) in places.items()
        }

    def end(self, parameters: Iterable[nn.Parameter], engine: Engine) -> None:
        """The optimizer has taken its step: no gradient is in lent memory any more, or that is no graph's any more."""
        lent, self._lent = self._lent, None
        if lent is None or lent.expired():  # or they were written elsewhere
            return
        for p in parameters:
            p.grad = None
        if not lent.expired():
            self.allowed = False
            engine.release()


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
