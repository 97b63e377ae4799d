"""Use: one op in which a parameter meets the batch, as it was recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eachgrad.errors import CaptureError
from eachgrad.functions import op_name
from eachgrad.rules import Rule


@dataclass(eq=False)
class Use:
    """One op in which parameters, or tensors derived from them, meet the batch."""

    op: Callable
    rule: Rule
    args: tuple
    kwargs: dict
    sources: tuple[Tensor, ...]
    tap: Tensor  # the op's output: its gradient decides everything
    strong: bool
    where: str
    ops_since: tuple[str, ...]  # what ran between the use before this one and this one
    aliases: tuple[Tensor, ...] = ()  # the sources as the op saw them, where it stayed attached
    samples: frozenset[int] = frozenset()  # ids of the arguments that are, or may be, of the batch
    versions: tuple[tuple[Tensor, int], ...] = field(default=(), repr=False)
    source_versions: tuple[tuple[Tensor, int], ...] = field(default=(), repr=False)
    autocast: tuple[str, torch.dtype] | None = None

    @property
    def name(self) -> str:
        return op_name(self.op)

    def check_sources(self) -> None:
        """To be called where the values of the parameters are used, and not their shapes alone."""
        for source, version in self.source_versions:
            if source._version != version:
                raise CaptureError(
                    f"a parameter used by {self.name} at {self.where} was changed in place between the forward and "
                    "the backward; update parameters after the gradients have been computed"
                )

    def check_versions(self) -> None:
        for tensor, version in self.versions:
            if not tensor.is_inference() and tensor._version != version:
                raise CaptureError(
                    f"an input of {self.name} at {self.where} was changed in place after it had been recorded; "
                    "use the out-of-place form of that op, or clone the tensor first"
                )


def version_of(t: Tensor) -> tuple[Tensor, int]:
    return t, 0 if t.is_inference() else t._version


def autocast_of(device: str) -> tuple[str, torch.dtype] | None:
    return (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
