"""Gradient: the B gradients of one parameter, and the queries over them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eachgrad import plan
from eachgrad.blocks import Block
from eachgrad.blocks.arithmetic import accumulation_dtype, cast, on_gpu, real_dtype
from eachgrad.blocks.base import Measured, Rough, Shared, place_of, settled
from eachgrad.functions import precise

if TYPE_CHECKING:
    from eachgrad.use import Arrived, Use


@dataclass(eq=False)  # not frozen, which takes longer to make: each parameter has one at every step
class Gradient:
    """The B gradients of one parameter, in whatever form they came."""

    name: str
    parameter: Tensor
    block: Block | None  # None: the loss does not depend on the parameter
    batch_size: int
    guards: tuple[Use | Arrived, ...] = field(default=(), repr=False)  # what must not have changed since
    attached: bool = field(default=False, repr=False)  # whether answers are to be differentiated
    _memo: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.batch_size, *self.parameter.shape))

    @precise
    def dense(self) -> Tensor:
        """The gradients themselves, (B, *shape), in the parameter's dtype."""
        block = self.checked()
        if block is None:
            return self.parameter.detach().new_zeros(self.shape)
        return cast(block.dense(), self.parameter.dtype)

    @precise
    def squared_norms(self, shared: Shared | None = None) -> Tensor:
        """(B,), in float32 or better; computed once. `shared` is what other parameters' norms have found before."""
        block = self.checked()
        if not self.has_norms:
            rough = self._memo.get("rough")
            if rough is not None:
                self._note(rough.settled())
            else:
                self._note((self.zeros(self.batch_size), None) if block is None else block.measured(shared))
        return self._memo["squares"]

    @precise
    def look(self, shared: Shared | None = None) -> None:
        """Find what `squared_norms` is put together from; `settle` does so for many at once."""
        block = self.checked()
        if "rough" in self._memo:
            return
        if block is None or self.attached or self.has_norms:
            self.squared_norms(shared)
            return
        found = block.roughly(shared)
        if isinstance(found, Rough):
            self._memo["rough"] = found
        else:
            self._note(found)

    @property
    def rough(self) -> Rough | None:
        """What the norms are put together from, where they were looked at and not settled."""
        return self._memo.get("rough")

    def note_rough(self, found: Rough) -> None:
        """Keep what was found of these norms together with others'."""
        self._memo["rough"] = found

    def once(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """What several questions find on their way to the norms, under a name; computed once."""
        if name not in self._memo:
            self._memo[name] = compute()
        return self._memo[name]

    def _note(self, measured: Measured) -> None:
        squares, spread = measured
        self._memo["squares"] = self._real(squares)
        if spread is not None:
            self._memo["spread"] = self._real(spread)
        self._memo.pop("rough", None)

    def forget_norms(self) -> None:
        """They are to be found again."""
        for name in ("squares", "spread", "rough"):
            self._memo.pop(name, None)

    @property
    def spread(self) -> Tensor | None:
        """The squares of how far rounding may move each one's share of a sum, (B,), once the norms are known; None: not."""
        return self._memo.get("spread")

    def norms(self) -> Tensor:
        """(B,), in float32 or better."""
        return root(self.squared_norms())

    @precise
    def weighted_sum(self, c: Tensor, wide: bool = False) -> Tensor:
        """sum_i c[i] g[i], (*shape), in the parameter's dtype; (K, *shape) for c (K, B). `wide`: in float32 or better."""
        if c.ndim not in (1, 2) or c.shape[-1] != self.batch_size:
            raise ValueError(
                f"one weight per sample is ({self.batch_size},) or (K, {self.batch_size}), not {tuple(c.shape)}"
            )
        block, c = self.checked(), c if c.device == self.parameter.device else c.to(self.parameter.device)
        dtype = accumulation_dtype(self.parameter.dtype) if wide else self.parameter.dtype
        # No samples, or no sums, are no case for the blocks.
        if block is None or not c.numel():
            return self.parameter.detach().new_zeros((*c.shape[:-1], *self.parameter.shape), dtype=dtype)
        value = block.weighted_sum(c) if c.ndim == 1 else block.weighted_sums(c)
        return cast(value, dtype)

    @precise
    def dot(self, direction: Tensor, positions: bool = False) -> Tensor:
        """<g[i], v>, real part: (B,) for v (*shape), (B, K) for v (K, *shape).

        `positions`: the share of each position, (B, T) or (B, T, K); see `PerSampleGrads.dot`.
        """
        if positions:
            found = self.dot_by_position(direction)
            if found is None:
                raise ValueError(
                    f"the gradients of {self.name!r} are sums over positions, or zero: they have none. Ask without positions."
                )
            return found
        many, directions = self._directions(direction)
        block = self.checked()
        if block is None or not directions.numel():
            value = self.zeros(self.batch_size, len(directions))
        else:
            value = self._real(block.dot(directions.to(self.parameter.device)))
        return value if many else value[:, 0]

    @precise
    def dot_by_position(self, direction: Tensor) -> Tensor | None:
        """<g[i], v> as its positions share in it, (B, T) or (B, T, K); None where there are none."""
        many, directions = self._directions(direction)
        block = self.checked()
        # Of no direction at all the number of positions is still to be found.
        asked = directions if len(directions) else directions.new_zeros(1, *self.parameter.shape)
        found = [None if block is None else block.dot_by_position(v.to(self.parameter.device)) for v in asked]
        shares = [self._real(value) for value in found if value is not None]
        if not shares:
            return None
        return torch.stack(shares, 2)[..., : len(directions)] if many else shares[0]

    def _directions(self, direction: Tensor) -> tuple[bool, Tensor]:
        """Whether several are given, and all of them: (K, *shape)."""
        many = direction.ndim > self.parameter.ndim
        direction = direction if self.attached else direction.detach()
        return many, direction if many else direction[None]

    @precise
    def gram(self, other: Gradient) -> Tensor:
        """<g[i], h[j]> with the gradients of the same parameter for other samples, real part: (B, B')."""
        if self.parameter.shape != other.parameter.shape:
            shapes = tuple(self.parameter.shape), tuple(other.parameter.shape)
            raise ValueError(
                f"{self.name!r} has the shape {shapes[0]} on one side and {shapes[1]} on the other: ask for the gradients "
                "of the same parameter"
            )
        block, theirs = self.checked(), other.checked()
        if block is None or theirs is None or not self.parameter.numel():
            return self.zeros(self.batch_size, other.batch_size)
        return self._real(block.gram(theirs))

    @precise
    def mean(self) -> Tensor:
        """(1/B) sum_i g[i], (*shape), in the parameter's dtype."""
        like = {"dtype": real_dtype(self.parameter.dtype), "device": self.parameter.device}
        c = torch.ones(self.batch_size, **like) / self.batch_size
        block = self.checked()
        return self.weighted_sum(c) if block is None or not len(c) else cast(block.mean(c), self.parameter.dtype)

    def sum_of_squares(self, center: Tensor | None = None) -> Tensor:
        """sum_i |g[i] - center|^2, element by element, (*shape), in float32 or better."""
        shape, block = self.parameter.shape, self.checked()
        if block is None or not self.parameter.numel():
            return self.zeros(*shape)
        return self._real(block.sum_of_squares(center)).reshape(shape)

    def kept(self) -> Gradient:
        """The same gradients, formed once for several queries in a row."""
        block = self.checked()
        kept = block and block.kept()
        return self if kept is block else self._formed(kept)  # what is known of them stays known

    def _formed(self, block: Block | None) -> Gradient:
        """The same gradients, formed from what has arrived, which is not held any more."""
        return replace(self, block=block, guards=tuple(guard for guard in self.guards if guard.lasts))

    def read_once(self) -> Gradient:
        """The same gradients for their norms and their mean together: formed for both where that takes little room."""
        block, cost = self.checked(), self.cost()
        if block is None or self.attached or not on_gpu(self.parameter) or cost.kept > cost.factors:
            return self
        return self._formed(block.read_once())

    @property
    def has_norms(self) -> bool:
        """Whether the norms have been computed already, and can be differentiated if that may be asked for."""
        found = self._memo.get("squares")
        lost = self.attached and torch.is_grad_enabled() and found is not None and not found.requires_grad
        return found is not None and not lost

    def cost(self) -> plan.Cost:
        """What the gradients hold, and what answers about them cost."""
        if self.block is None:
            return plan.dense(self.batch_size, 0, 0, self.parameter.element_size())
        return self.block.cost()

    def take(self, index: Tensor) -> Gradient:
        """The gradients of the samples in `index` alone."""
        block = self.checked()
        index = index.to(self.parameter.device)
        return replace(self, block=block and block.take(index), batch_size=len(index))

    def checked(self) -> Block | None:
        """The block, if nothing it was made of has been changed since."""
        for use in self.guards if self.block is not None else ():
            use.check_versions()
        return self.block

    def _real(self, value: Tensor) -> Tensor:
        return cast(value, real_dtype(self.parameter.dtype))

    def zeros(self, *shape: int) -> Tensor:
        """Zeros in the dtype of the norms, on the parameter's device."""
        return torch.zeros(shape, dtype=real_dtype(self.parameter.dtype), device=self.parameter.device)

    def __repr__(self) -> str:
        kind = "unused" if self.block is None else type(self.block).__name__
        return f"Gradient({self.name!r}, {tuple(self.shape)}, {kind})"


def settle(gradients: Iterable[Gradient]) -> None:
    """Bring the norms to an end of those that were looked at."""
    rough = [gradient for gradient in gradients if "rough" in gradient._memo]
    for gradient, found in zip(rough, settled([gradient._memo["rough"] for gradient in rough]), strict=True):
        gradient._note(found)


def root(squares: Tensor) -> Tensor:
    """The square root, with the derivative 0 at 0, as a norm has in torch."""
    if not squares.requires_grad:
        return squares.sqrt()
    zero = squares == 0
    return squares.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0)


def costs_of(gradients: Mapping[str, Gradient]) -> dict[str, plan.Cost]:
    """The cost of each; of a factor that several hold, such as the input of q, k and v, each is charged its share."""
    factors = {name: g.block.factors() if g.block is not None else () for name, g in gradients.items()}
    users = Counter(place_of(t) for some in factors.values() for t in some)
    found = {}
    for name, gradient in gradients.items():
        cost = gradient.cost()
        spared = sum(t.nbytes * (1 - 1 / users[place_of(t)]) for t in factors[name])
        found[name] = replace(cost, factors=cost.factors - round(spared)) if spared else cost
    return found


def total(parts: Sequence[Tensor]) -> Tensor:
    """The sum of one tensor per parameter, on the first one's device, in the widest dtype."""
    dtype = max((part.dtype for part in parts), key=lambda d: torch.finfo(d).bits)
    device = parts[0].device
    if len(parts) == 2 and parts[0].dtype == parts[1].dtype and parts[1].device == device:
        return parts[0] + parts[1]
    fits = [part if part.dtype == dtype and part.device == device else part.to(device, dtype) for part in parts]
    return torch.stack(fits).sum(0)
