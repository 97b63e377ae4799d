"""Gradients in the memory of CUDA graphs while the optimizer takes them: they need none of their own.

The noise is written over the sums of a graph, or over those of several pieces at the end of the graphs' memory, where small
pieces leave room. When the optimizer has taken its step, `p.grad` is None. Whoever has kept a gradient by then keeps it as it
is: that memory is left to it, graphs are captured elsewhere, and nothing is lent from then on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from eachgrad.block import Block, alias, room_for
from eachgrad.private.gathering import Engine, Gathered, Sums

SOME = 4  # parameters that are looked at for a change


class Lending:
    """What a step has lent of the memory of its graphs."""

    def __init__(self, engine: Engine, parameters: Mapping[str, nn.Parameter]) -> None:
        self.engine, self.parameters = engine, parameters
        self._lent: list[StorageWeakRef] = []
        self._trusts = False  # whether the optimizer changes parameters in its step

    def over(self, sums: Sums) -> dict[str, Tensor] | None:
        """Tensors where the sums of a graph lie, to be written over; None where they are to stay, or no graph's."""
        self._lent = []
        bases = [getattr(getattr(value, "eachgrad_held", None), "base", None) for value in sums.values()]
        base = bases[0] if bases else None
        if not self.engine.lends or base is None or any(other is not base for other in bases):
            return None
        places = {name: (value, value.data_ptr() - base.data_ptr()) for name, value in sums.items()}
        if not all(0 <= place <= base.nbytes - value.nbytes and place % 4 == 0 for value, place in places.values()):
            return None
        return self._given(base, places) if _fit(sums, self.parameters) else None

    def beside(self, block: Block, sums: Sums) -> dict[str, Tensor] | None:
        """Tensors for the sums of several pieces, beside what the graphs of these use; None where there is no room."""
        self._lent = []
        usual = all(value.dtype == torch.float32 and value.is_contiguous() for value in sums.values())
        if not self.engine.lends or not usual or sum(map(room_for, sums.values())) > block.beside:
            return None
        room = block.room()
        if room is None or any(value.device != room.device for value in sums.values()):
            return None
        places, end = {}, 0
        for name, value in sums.items():
            places[name], end = (value, end), end + room_for(value)
        return self._given(room, places)

    def _given(self, memory: Tensor, places: Mapping[str, tuple[Tensor, int]]) -> dict[str, Tensor]:
        """Tensors like these, so many bytes into the memory. Each has a storage of its own: to save it saves no more."""
        whole = memory.view(torch.float32)
        start = int(whole.storage_offset())
        found = {
            name: alias(whole.as_strided(like.shape, like.stride(), start + place // 4))
            for name, (like, place) in places.items()
        }
        self._lent = [StorageWeakRef(t.untyped_storage()) for t in found.values()]
        return found

    @contextmanager
    def taken(self) -> Iterator[None]:
        """While the optimizer takes its step; afterwards no gradient is in lent memory, or that is no graph's any more.

        Gradients stay, with memory of their own, where the step fails, and as long as the optimizer has not been seen to
        change a parameter: it may take them later. (Fused optimizers change no version of a tensor.)
        """
        before = {} if self._trusts or not self._lent else self._some()
        keep = True
        try:
            yield
            if before:
                self._trusts = not all(map(torch.equal, before.values(), self._some().values()))
            keep = not self._trusts
        finally:
            self.end(keep)

    def _some(self) -> dict[str, Tensor]:
        """Copies of a few parameters: after a step each has changed by its noise."""
        small = sorted(self.parameters, key=lambda name: self.parameters[name].numel())[:SOME]
        return {name: self.parameters[name].detach().clone() for name in small}

    def end(self, keep: bool = False) -> None:
        """Take back what is lent; `keep`: the gradients are copied first."""
        lent, self._lent = self._lent, []
        if all(t.expired() for t in lent):  # or they were written elsewhere
            return
        for p in self.parameters.values():
            p.grad = p.grad.clone() if keep and p.grad is not None else None
        if not all(t.expired() for t in lent):
            self.stop()
            self.engine.release()

    def stop(self) -> None:
        """Lend nothing from now on."""
        self.engine.lends = False
        if self.engine.ask is not None:
            self.engine.ask.memory.block.keep_free(0, 0)

    def moved(self, gathered: Gathered) -> bool:
        """Whether the graphs' memory could be given back, now that the sums in it have memory of their own."""
        if not gathered.sums or not self._lent or all(t.expired() for t in self._lent):
            return False
        devices = {name: value.device for name, value in gathered.sums.items()}
        kept = {name: value.cpu() for name, value in gathered.sums.items()}  # there is no memory for a second copy
        gathered.sums, self._lent = {}, []
        self.engine.release()
        gathered.sums = {name: value.to(devices[name]) for name, value in kept.items()}
        return True


def _fit(sums: Sums, parameters: Mapping[str, nn.Parameter]) -> bool:
    """Whether each parameter has a sum that could be its gradient, and each of these memory that is none of another's."""
    if sums.keys() != parameters.keys():
        return False
    same = all(
        value.dtype == p.dtype == torch.float32 and value.shape == p.shape and value.is_contiguous()
        for value, p in ((sums[name], p) for name, p in parameters.items())
    )
    spans = sorted((value.data_ptr(), value.nbytes) for value in sums.values() if value.numel())
    return same and all(start + size <= after for (start, size), (after, _) in pairwise(spans))
