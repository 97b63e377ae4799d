"""Pieces of a forward that have no rule: differentiated as they stand, once per sample.

The gradient of one sample's loss at a piece's output is the output's gradient with every other sample's part set to
zero. What the piece makes of it is that sample's gradient, whatever happens inside. This costs B derivatives of the
piece, batched by vmap where its ops allow.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from eachgrad import layout as lay
from eachgrad.blocks import Block, Dense
from eachgrad.errors import CaptureError, UnsupportedOp
from eachgrad.functions import opened
from eachgrad.graph import Node, mapped, tensors_in

Pulled = tuple[Tensor | None, ...]  # a gradient for each source

_ELEMENTS = 1 << 24  # numbers in the output gradients of one batched derivative
_grad = opened(torch.autograd.grad)


class Piece:
    """Turns a gradient of its output into gradients of its sources."""

    loops: bool = True  # whether it may be differentiated one sample after another
    recorded: bool = True  # whether it lies in the recorded graph, where a checkpoint may have to run again

    def pull(self, g: Tensor, create_graph: bool = False) -> Pulled:
        raise NotImplementedError

    def pull_all(self, rows: Tensor) -> Pulled:
        """The same for many gradients at once; any error means that this piece cannot be batched."""
        raise NotImplementedError

    def check(self, what: str, B: int, create_graph: bool) -> None:
        """Raise if the piece is seen to mix samples, or cannot be differentiated again."""


@dataclass(eq=False)
class Span(Piece):
    """The graph from an output down to the sources as the op saw them."""

    edge: GradientEdge
    ends: tuple[Tensor, ...]
    loops: bool = True

    def pull(self, g: Tensor, create_graph: bool = False) -> Pulled:
        return self._pull(g, create_graph=create_graph)

    def pull_all(self, rows: Tensor) -> Pulled:
        return self._pull(rows, is_grads_batched=True)

    def _pull(self, g: Tensor, **options: bool) -> Pulled:
        return tuple(_grad(self.edge, self.ends, g, retain_graph=True, allow_unused=True, **options))


@dataclass(eq=False)
class FunctionNode(Piece):
    """One call of an autograd.Function: its own backward."""

    node: Node
    output: int
    places: tuple[int, ...]  # of the sources among the arguments of forward
    like: tuple[tuple[torch.Size, torch.dtype], ...]  # the shape and dtype of each source
    outputs: tuple[tuple[torch.Size, torch.dtype, torch.device], ...]  # of the call; the node forgets when it is freed
    unseen: Callable[[], AbstractContextManager[None]]  # in which its backward is not recorded

    def pull(self, g: Tensor, create_graph: bool = False) -> Pulled:
        with torch.set_grad_enabled(create_graph):
            return self._pull(g)

    def pull_all(self, rows: Tensor) -> Pulled:
        # vmap returns no None: say which there are beforehand.
        known = [t is not None for t in self.pull(rows[0])]
        with torch.no_grad():
            found = torch.func.vmap(lambda g: tuple(t for t in self._pull(g) if t is not None))(rows)
        values = iter(found)
        return tuple(next(values) if k else None for k in known)

    def _pull(self, g: Tensor) -> Pulled:
        outputs = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in self.outputs]
        outputs[self.output] = g
        with self.unseen():
            found = self.node.apply(*outputs)
        found = found if isinstance(found, tuple) else (found,)
        return tuple(_fitted(found[k], *like) for k, like in zip(self.places, self.like, strict=True))


def _fitted(t: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
    """What autograd makes of a gradient that a backward returns: a backward need not sum what was broadcast."""
    if t is None or t.is_sparse:
        return t
    return (t if t.shape == shape else t.sum_to_size(shape)).to(dtype)


@dataclass(eq=False)
class Scripted(Piece):
    """One call of a scripted or traced module, run again: its ops cannot be seen."""

    module: nn.Module
    path: str
    args: tuple
    kwargs: dict
    output: int | None
    sources: tuple[Tensor, ...]
    autocast: tuple[str, torch.dtype] | None = None
    recorded: bool = False
    _out: Tensor | None = field(default=None, repr=False)

    def pull(self, g: Tensor, create_graph: bool = False) -> Pulled:
        with torch.enable_grad():
            out = self._again()
        return tuple(_grad(out, self.sources, g, retain_graph=True, allow_unused=True))

    def _again(self) -> Tensor:
        if self._out is None:
            self._out = self._run(lambda t: t)
        return self._out

    def _run(self, cut: Callable[[Tensor], Tensor]) -> Tensor:
        args, kwargs = mapped(lambda t: cut(t.detach()), (self.args, self.kwargs))
        with torch.autocast(*self.autocast) if self.autocast is not None else nullcontext():
            found = self.module(*args, **kwargs)
        return found if self.output is None else found[self.output]

    def _agree(self, whole: Tensor, rows: Tensor) -> bool:
        """Whether these have the same values, and the same derivative in a direction taken at random."""
        generator = torch.Generator().manual_seed(0)
        v = torch.randn(whole.shape, generator=generator).to(whole)
        try:
            pulled = [_grad(out, self.sources, v, retain_graph=True, allow_unused=True) for out in (whole, rows)]
        except RuntimeError:  # it changes a buffer of its own that it has used
            return False
        pairs = [(a, b) for a, b in zip(*pulled, strict=True) if a is not None or b is not None]
        return _near(rows.detach(), whole.detach(), whole.dtype) and all(
            a is not None and b is not None and _near(b, a, whole.dtype) for a, b in pairs
        )

    def check(self, what: str, B: int, create_graph: bool) -> None:
        """Each sample alone must give its part of the output: nothing else shows what a script does."""
        if create_graph:
            raise CaptureError(
                f"create_graph=True, but {what}, is in the scripted module {self.path!r}, which is run apart: record the "
                "nn.Module it was made from, or ask without create_graph"
            )
        with torch.enable_grad():
            whole = self._again()
            sizes = {len(t) if t.ndim else None for t in tensors_in((self.args, self.kwargs))}
            if sizes == {B} and whole.ndim and len(whole) == B:
                rows = [self._run(lambda t, i=i: t[i : i + 1]) for i in range(B)]
                if all(r.shape == (1, *whole.shape[1:]) for r in rows) and self._agree(whole, torch.cat(rows)):
                    return
        raise CaptureError(
            f"{what}: the scripted module {self.path!r} computes something else for a sample alone than in the batch, or not "
            "with the samples first (batch statistics, dropout). Its ops cannot be seen: record the nn.Module it was made "
            "from."
        )


def _near(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Whether these are the same but for rounding in `dtype`."""
    if not b.numel():
        return True
    return float((a - b).abs().amax()) <= _slack(dtype) * max(float(b.abs().amax()), 1e-30)


def _slack(dtype: torch.dtype) -> float:
    # A thousand roundings; in 16 bits that would be anything.
    return min(1e3 * torch.finfo(dtype).eps, 0.05)


def blocks(
    piece: Piece, what: str, g: Tensor, layout: lay.Layout, like: tuple[Any, ...], B: int, create_graph: bool
) -> tuple[Block, ...]:
    """A dense block for each source of the piece; `like` says their shapes and dtypes."""
    finite = g.isfinite()
    if not bool(finite.all()):
        raise CaptureError(
            f"a sample is not finite, and {what}, is differentiated one sample after another, where NaN and inf would "
            "spread to the others: leave such samples out"
        )
    piece.check(what, B, create_graph)
    owner = lay.owners(layout, g.shape, g.device)

    def rows(first: int, last: int) -> Tensor:
        which = torch.arange(first, last, device=g.device).view(-1, *[1] * g.ndim)
        return torch.where(owner == which, g, torch.zeros_like(g))

    found, how = None if create_graph else _batched(piece, rows, g, B), "by vmap"
    if found is None:
        how = "by a loop"
        if not piece.loops:
            raise UnsupportedOp(
                f'{what}: the op cannot be batched by vmap: pass record(fallback="loop"), or write a rule for it'
            )
        each = _one_by_one(piece, what, rows, B, create_graph)
        found = tuple(_stacked([row[k] for row in each]) for k in range(len(like)))
        if not create_graph and _is_finite(whole := piece.pull(g)) and not _add_up(found, whole, 0.01):
            raise CaptureError(
                f"{what}: its derivative for the batch is not the sum of those for each sample, so that its backward mixes "
                "the samples or is not linear in the gradient it is given. Write the backward for each sample apart."
            )
    return tuple(
        Dense(torch.zeros((B, *source.shape), dtype=source.dtype, device=g.device) if t is None else t, how)
        for t, source in zip(found, like, strict=True)
    )


def _one_by_one(
    piece: Piece, what: str, rows: Callable[[int, int], Tensor], B: int, create_graph: bool
) -> list[Pulled]:
    try:
        return [piece.pull(rows(i, i + 1)[0], create_graph) for i in range(B)]
    except RuntimeError as error:
        if "unpacked once" in str(error):
            raise CaptureError(
                f"{what}, lies inside a checkpoint, and is differentiated for each sample inside your backward, where a "
                "checkpoint runs again only once: use eachgrad.record instead"
            ) from error
        if "second time" not in str(error):
            raise
        raise CaptureError(
            f"{what}, lies inside a reentrant checkpoint, whose graph is gone when it is differentiated for each sample. "
            "Pass use_reentrant=False to torch.utils.checkpoint."
        ) from error


def _batched(piece: Piece, rows: Callable[[int, int], Tensor], g: Tensor, B: int) -> Pulled | None:
    """All samples' gradients by vmap; None where it cannot, or where their sum is not the derivative."""
    step = max(1, _ELEMENTS // max(1, g.numel()))
    try:
        parts = [piece.pull_all(rows(i, min(B, i + step))) for i in range(0, B, step)]
    except Exception:  # whatever an op says that cannot be batched: the loop says whether something is wrong
        return None
    found = tuple(
        None if some[0] is None else torch.cat([_plain(t) for t in some]) for some in zip(*parts, strict=True)
    )
    return found if _add_up(found, piece.pull(g), _slack(g.dtype)) else None


def _is_finite(found: Pulled) -> bool:
    return all(t is None or bool(_plain(t).isfinite().all()) for t in found)


def _add_up(found: Pulled, whole: Pulled, slack: float) -> bool:
    """Whether the samples' gradients add up to the derivative for the batch."""
    for t, total in zip(found, whole, strict=True):
        if t is None or total is None:
            if any(one is not None and bool((_plain(one) != 0).any()) for one in (t, total)):
                return False
        elif not _sums_to(t, _plain(total), slack):
            return False
    return True


def _sums_to(rows: Tensor, total: Tensor, slack: float) -> bool:
    if rows.shape[1:] != total.shape:
        return False
    gap, size = (rows.sum(0) - total).abs(), rows.abs().sum(0)
    if not gap.numel():
        return True
    return bool(gap.amax() <= slack * size.amax().clamp(min=1e-30))


def _stacked(rows: list[Tensor | None]) -> Tensor | None:
    known = next((t for t in rows if t is not None), None)
    if known is None:
        return None
    return torch.stack([torch.zeros_like(_plain(known)) if t is None else _plain(t) for t in rows])


def _plain(t: Tensor) -> Tensor:
    return t.to_dense() if t.is_sparse else t
