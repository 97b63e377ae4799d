"""Which rows belong to which sample, read off the gradients themselves.

A backward pass is linear in the weights given to the losses. Run it twice, once with every weight 1 and
once with sample i weighted by a power of two of its own: whatever belongs to sample i alone comes back
multiplied by exactly that power (scaling by a power of two commutes with every rounding), and whatever
mixes samples does not. So the layout of each output gradient is measured, not guessed from sizes, and an
op that mixes samples is found wherever it hides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from eachgrad.blocks import Fold
from eachgrad.dtypes import SIXTEEN_BITS
from eachgrad.errors import CaptureError

# Powers of two given to the samples, in each dtype. They enlarge: small numbers must not be rounded away, and
# a backward that forgets the scale of its gradient must not look like a sample. float16 has so little room
# that four powers must do, with more passes.
_POWERS = {torch.float16: range(1, 5)}
_DEFAULT_POWERS = range(1, 62)

# How far a value may be from its exact multiple, relative to the largest of its row. Kernels that add in a fixed order
# are exact; the slack is for those that do not (atomics), layer after layer, and is far below what an op that mixes
# samples shows: among samples marked by powers of two up to 2**61 a leak is enlarged, in one direction or the other.
_SLACK = {torch.float64: 1e-13, torch.float32: 1e-6, torch.complex128: 1e-13, torch.complex64: 1e-6}
_SLACK_CUDA = {torch.float64: 1e-10, torch.float32: 1e-3, torch.complex128: 1e-10, torch.complex64: 1e-3}


@dataclass(frozen=True)
class Along:
    """Samples lie along one dimension of a tensor: index i is sample i, or as `fold` says."""

    dim: int
    fold: Fold | None = None
    alone: bool = field(default=True, compare=False, repr=False)  # no other regular layout fits the numbers as well


@dataclass(frozen=True)
class Scattered:
    """Each element has an owner of its own; -1 where the gradient is zero."""

    owner: Tensor


Layout = Along | Scattered


class Mixed(Exception):
    """Some element of this gradient comes from more than one sample."""


class Unclear(CaptureError):
    """The numbers do not allow to say where the samples lie."""


@dataclass(frozen=True)
class Marks:
    """Weights that tell B samples apart: one power of two per sample and pass."""

    powers: Tensor  # (passes, B), exponents
    samples: Tensor  # the samples by their number in the powers' digits
    coarse: torch.dtype | None = None  # the sixteen bits through which gradients pass, if they do

    @property
    def passes(self) -> int:
        return len(self.powers)

    def weights(self, k: int, like: Tensor) -> Tensor:
        dtype = like.dtype.to_real() if like.dtype.is_complex else like.dtype
        return torch.exp2(self.powers[k]).to(device=like.device, dtype=dtype)


def marks(B: int, dtypes: set[torch.dtype]) -> Marks:
    """Marks for B samples in gradients of these dtypes; the passes together tell all samples apart."""
    choices = [torch.tensor(_POWERS.get(dtype, _DEFAULT_POWERS), dtype=torch.float64) for dtype in dtypes]
    powers = min([*choices, torch.tensor(_DEFAULT_POWERS, dtype=torch.float64)], key=len)
    base = len(powers)
    passes = max(1, math.ceil(math.log(B) / math.log(base) - 1e-9))
    coarse = next((dtype for dtype in dtypes if dtype in SIXTEEN_BITS), None)
    # In no order: what leaks from a sample with a small power into one with a large power is as small as it is, and
    # any leak worth the name goes the other way as well, where it is enlarged.
    number = torch.randperm(B, generator=torch.Generator().manual_seed(B))
    return Marks(torch.stack([powers[number // base**k % base] for k in range(passes)]), number.argsort(), coarse)


@dataclass
class Evidence:
    """The gradients of one tensor: with all weights 1, and marked, pass by pass."""

    plain: Tensor
    marked: Sequence[Tensor]
    marks: Marks

    def owners(self, dim: int | None) -> Tensor:
        """The sample of each index along `dim` (or of each element), -1 where all is zero.

        Raises Mixed where it is not one sample.
        """
        plain = _magnitude(self.plain)
        size = plain.numel() if dim is None else plain.shape[dim]
        flat = plain.reshape(-1, 1) if dim is None else plain.movedim(dim, 0).reshape(size, -1)
        # Judge each row by its largest element: the best conditioned ratio there is.
        place = torch.nan_to_num(flat, nan=0.0, posinf=0.0).argmax(1, keepdim=True)
        top = flat.gather(1, place).squeeze(1)
        if bool((~flat.isfinite().all(1) & ~(top.isfinite() & (top > 0))).any()):
            raise Unclear("some samples have no finite gradient, and lie in no regular order: leave such samples out")
        owner = torch.zeros(size, dtype=torch.long, device=plain.device)
        for k in range(self.marks.passes):
            marked = _magnitude(self.marked[k])
            marked = marked.reshape(-1, 1) if dim is None else marked.movedim(dim, 0).reshape(size, -1)
            ratio = torch.log2(marked.gather(1, place).squeeze(1).double() / top.double())
            powers = torch.unique(self.marks.powers[k]).to(ratio.device)
            digit = (ratio.round()[:, None] == powers).double()
            if bool(((digit.sum(1) == 0) & (top != 0)).any()):
                raise Mixed
            base = len(torch.unique(self.marks.powers[0]))
            owner += digit.argmax(1) * base**k
        if bool(((owner >= self.marks.powers.shape[1]) & (top != 0)).any()):
            raise Mixed
        owner = self.marks.samples.to(owner.device)[owner.clamp(max=len(self.marks.samples) - 1)]
        owner[top == 0] = -1
        return owner

    def agrees(self, layout: Layout) -> bool:
        """Whether every element is exactly the multiple that its owner under `layout` prescribes."""
        if isinstance(layout, Along) and not self._may_agree(layout):
            return False
        return all(self._agrees(layout, k) for k in range(self.marks.passes))

    def _may_agree(self, layout: Along) -> bool:
        """A look at a few numbers, which is enough to see that most layouts are not the one."""
        place, plain, marked = self._probe
        if not len(place):
            return True
        shape = self.plain.shape
        index = place // math.prod(shape[layout.dim + 1 :]) % shape[layout.dim]
        factor = self._factors(layout, 0)[index]
        gap = torch.nan_to_num((marked / factor - plain).abs(), 0.0, 0.0)
        size = torch.nan_to_num(plain.abs(), 0.0, 0.0).amax()
        return bool((gap <= 0.1 * plain.abs() + _slack(plain, self.marks) * size + _smallest(plain.dtype)).all())

    @cached_property
    def _probe(self) -> tuple[Tensor, Tensor, Tensor]:
        """Some places of the flattened gradient that are not zero, with what the first two passes have there."""
        flat = self.plain.reshape(-1)
        step = max(1, flat.numel() // 65536)
        place = torch.arange(0, flat.numel(), step, device=flat.device)
        place = place[flat[place].abs() > 0][:: max(1, 65536 // 1024)][:2048]
        return place, flat[place], self.marked[0].reshape(-1)[place]

    def _agrees(self, layout: Layout, k: int) -> bool:
        plain, marked = self.plain, self.marked[k]
        factor = self._factors(layout, k)
        if isinstance(layout, Along):
            factor = factor.view([-1 if d == layout.dim else 1 for d in range(plain.ndim)])
        # Compare where the numbers are small: dividing by a power of two is exact as well.
        unmarked = marked / factor
        same = (unmarked == plain) | (unmarked.isnan() & plain.isnan())
        if bool(same.all()):
            return True
        slack, size = _slack(plain, self.marks), plain.abs()
        if isinstance(layout, Along):
            others = [d for d in range(plain.ndim) if d != layout.dim]
            size = size.amax(others, keepdim=True) if others else size
        close = (unmarked - plain).abs() <= slack * size + _smallest(plain.dtype)
        return bool((same | close).all())

    def _factors(self, layout: Layout, k: int) -> Tensor:
        plain = self.plain
        if isinstance(layout, Scattered):
            owner = layout.owner.clamp(min=0)
        elif layout.fold is None:
            owner = torch.arange(plain.shape[layout.dim], device=plain.device)
        else:
            owner = _rows_to_samples(layout.fold, plain.shape[layout.dim])
        return self.marks.weights(k, plain)[owner]


def find(evidence: Evidence) -> Layout:
    """Where the samples of this gradient lie; raises Mixed when some element has no single owner."""
    B, plain = evidence.marks.powers.shape[1], evidence.plain
    shape = plain.shape
    _check_range(evidence)
    fitting = [layout for layout in regular(B, shape, plain.device) if evidence.agrees(layout)]
    if fitting:
        if len(fitting) > 1 and not bool(plain.isfinite().all()):
            raise Unclear(
                "the gradients of some samples are not finite, and the others do not tell where samples lie: leave such "
                "samples out"
            )
        # Where several fit they differ only in zeros: any of them is right for these numbers.
        return replace(fitting[0], alone=len(fitting) == 1)
    for dim in range(len(shape)):
        try:
            owner = evidence.owners(dim)
        except Mixed:
            continue
        layout = Along(dim, ragged(owner, B))
        if evidence.agrees(layout):
            return layout
    layout = Scattered(evidence.owners(None).view(shape))
    if evidence.agrees(layout):
        return layout
    raise Mixed


def _check_range(evidence: Evidence) -> None:
    """Raise where numbers are so small, or so large, that marking them loses digits."""
    largest = float(torch.nan_to_num(evidence.plain.abs(), 0.0, 0.0).amax())
    if 0 < largest < 64 * _smallest(evidence.plain.dtype):
        raise Unclear(
            f"gradients of at most {largest:.0e} are too small for {evidence.plain.dtype}: scale the losses up"
        )
    for marked in evidence.marked:
        if bool((evidence.plain.isfinite() & ~marked.isfinite()).any()):
            raise Unclear(
                f"gradients of up to {largest:.0e} leave no room in {evidence.plain.dtype}: scale the losses down"
            )


def whole(g: Tensor) -> Layout:
    """The layout of a batch of one: everything belongs to sample 0."""
    if g.ndim == 0:
        return Scattered(torch.zeros((), dtype=torch.long, device=g.device))
    if g.shape[0] == 1 or not g.numel():
        return Along(0)
    return Along(0, Fold(torch.arange(g.shape[0], device=g.device)[None], "outer"))


def owners(layout: Layout, shape: torch.Size, device: torch.device) -> Tensor:
    """The sample of each element of a tensor of this shape: broadcastable to it."""
    if isinstance(layout, Scattered):
        return layout.owner
    n = shape[layout.dim]
    owner = torch.arange(n, device=device) if layout.fold is None else _rows_to_samples(layout.fold, n)
    return owner.view([-1 if d == layout.dim else 1 for d in range(len(shape))])


def rows(layout: Scattered, lead: int, B: int) -> Fold | None:
    """The fold of a tensor's first `lead` dimensions flattened, if the owner varies along no other."""
    owner = layout.owner
    flat = owner.reshape(math.prod(owner.shape[:lead]), -1)
    top = flat.amax(1)
    if bool(((flat != top[:, None]) & (flat >= 0)).any()):
        return None
    return ragged(top, B)


def regular(B: int, shape: torch.Size, device: torch.device) -> list[Along]:
    """The layouts that ordinary models have, most common first."""
    found: list[Along] = [Along(dim) for dim, n in enumerate(shape) if n == B]
    for dim, n in enumerate(shape):
        if n > B and n % B == 0:
            index = torch.arange(n, device=device)
            found.append(Along(dim, Fold(index.view(B, -1), "outer")))
            found.append(Along(dim, Fold(index.view(-1, B).T, "inner")))
    return found


def ragged(owner: Tensor, B: int) -> Fold:
    """The rows of each sample, padded with -1 to the longest."""
    counts = torch.bincount(owner[owner >= 0], minlength=B)
    m = max(1, int(counts.max()))
    order = torch.argsort(owner, stable=True)
    order = order[int((owner < 0).sum()) :]
    sample = owner[order]
    slot = torch.arange(len(order), device=owner.device) - (counts.cumsum(0) - counts)[sample]
    index = torch.full((B, m), -1, device=owner.device)
    index[sample, slot] = order
    return Fold(index, "ragged")


def _rows_to_samples(fold: Fold, n: int) -> Tensor:
    B, m = fold.index.shape
    owner = torch.zeros(n, dtype=torch.long, device=fold.index.device)
    sample = torch.arange(B, device=owner.device)[:, None].expand(B, m)
    present = fold.index >= 0
    owner[fold.index[present]] = sample[present]
    return owner


def _magnitude(t: Tensor) -> Tensor:
    return t.detach().abs()


def _smallest(dtype: torch.dtype) -> float:
    """How far a number may be off because it is too small for its dtype's precision."""
    return 16 * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def _slack(t: Tensor, marks: Marks) -> float:
    if not t.is_cuda:
        return _SLACK.get(t.dtype, 0.0)
    # A GPU adds in no fixed order; what passed sixteen bits on the way has their rounding, whatever its own dtype.
    coarse = marks.coarse or t.dtype
    return _SLACK_CUDA.get(coarse) or 16 * torch.finfo(coarse).eps
