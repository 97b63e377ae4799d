"""Norms, and sums over samples: weighted, and clipped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from eachgrad import doubts, plan
from eachgrad.blocks import Outer, Summed, form
from eachgrad.blocks.arithmetic import on_gpu
from eachgrad.blocks.base import Shared
from eachgrad.gradient import Gradient, root, settle, total
from eachgrad.queries.base import Over, PerParameter, PerSample, Query, Running
from eachgrad.queries.joining import Joined
from eachgrad.queries.packing import Held, Pack, key_of
from eachgrad.queries.waiting import Measuring, pack_for_norms, room_of
from eachgrad.selection import check_clipping, clip_factors, grouped


@dataclass(frozen=True)
class Norms(Query):
    by: str | None = None
    pads = True

    def start(self, over: Over) -> Running:
        if self.by not in (None, "parameter", "module"):
            raise ValueError(f'norms(by=...) is None, "parameter" or "module", not {self.by!r}')
        return RunningNorms(over, self.by)


class RunningNorms(PerSample):
    reads = "norms"

    def __init__(self, over: Over, by: str | None):
        super().__init__(over)
        self.by = by

    def begin(self, batch_size: int, costs: Mapping[str, plan.Cost]) -> None:
        super().begin(batch_size, costs)
        self.shared = Shared()
        self.packs: dict[Any, Measuring] = {}
        self.room = room_of(costs, self.over.budget)
        self.awaited: dict[Held, list[Gradient]] = {}  # in packs of a clipped sum, which computes the norms

    def row(self, gradient: Gradient) -> Tensor:
        return gradient.squared_norms(self.shared)

    def add(self, gradient: Gradient) -> None:
        pack, key = (self.holders.of(gradient), key_of(gradient)) if self.by is None else (None, None)
        if pack is not None:
            self.awaited.setdefault(pack, []).append(gradient)
        elif key is not None:
            if key not in self.packs:
                self.packs[key] = pack_for_norms(key[0], gradient, self.room)
            self.packs[key].add(gradient)
        else:
            super().add(gradient)

    def again(self) -> set[str]:
        for key, some in self.packs.items():
            if isinstance(some, Joined):
                self.packs[key] = self.holders.shared(some, self.reads)
        for pack, some in self.awaited.items():
            self.gather("", pack.squares_of(some))
        self.awaited = {}  # what they hold is free before anything runs again
        return set()

    def end(self) -> None:
        for pack in self.packs.values():
            self.gather("", pack.squares())
        self.shared, self.packs = Shared(), {}
        super().end()

    def key(self, name: str) -> str:
        if self.by is None:
            return ""
        return name if self.by == "parameter" else name.rpartition(".")[0]

    def answer(self) -> Any:
        found = {key: root(squares) for key, squares in self.joined().items()}
        if self.by is None:
            return found[""] if found else torch.zeros(self.samples)
        keys = dict.fromkeys(self.key(name) for name in self.over.parameters)
        return {key: found[key] for key in keys}


@dataclass(frozen=True)
class TopkNorms(Query):
    k: int
    largest: bool = True

    def start(self, over: Over) -> Running:
        return RunningTopk(over, self)


class RunningTopk(RunningNorms):
    def __init__(self, over: Over, query: TopkNorms):
        super().__init__(over, None)
        self.query = query

    def answer(self) -> tuple[Tensor, Tensor]:
        if not 0 <= self.query.k <= self.samples:
            raise ValueError(f"k is between 0 and the {self.samples} samples, not {self.query.k}")
        values, indices = super().answer().topk(self.query.k, largest=self.query.largest)
        return values, indices


@dataclass(frozen=True)
class WeightedSum(Query):
    c: Tensor

    def start(self, over: Over) -> Running:
        return RunningSum(over, self.c)


class RunningSum(PerParameter):
    """The weights are those of all batches, one after another."""

    def __init__(self, over: Over, c: Tensor):
        super().__init__(over)
        self.c = c

    def add(self, gradient: Gradient) -> None:
        c, end = self.c, self.samples + self.batch_size
        if c.ndim not in (1, 2) or end > c.shape[-1]:
            raise ValueError(f"one weight per sample is ({end},) or (K, {end}), not {tuple(c.shape)}")
        self.batch[gradient.name] = gradient.weighted_sum(c[..., self.samples : end])

    def answer(self) -> dict[str, Tensor]:
        if self.c.shape[-1] != self.samples:
            raise ValueError(
                f"one weight per sample is ({self.samples},) or (K, {self.samples}), not {tuple(self.c.shape)}"
            )
        return self.in_order()


@dataclass(frozen=True)
class ClippedSum(Query):
    max_norm: float | Mapping[str, float]
    groups: str | Mapping[str, Iterable[str]] | None = None
    normalise: bool = False
    gamma: float = 0.01
    nonfinite: str = "raise"
    wide: bool = False  # in float32 or better, whatever the parameter has
    holds = True
    pads = True

    def unpadded(self, answer: Any, samples: int, size: int) -> Any:
        return answer

    def start(self, over: Over) -> Running:
        return RunningClip(over, self)


_Parts = dict[str, list[Tensor]]  # by group, (B,) each

# After a sum that was begun early and had to be formed again, so many of the same parameters are formed in order: where norms
# are in doubt at one step they mostly are at the next.
_IN_ORDER = 16
_doubted = WeakTensorKeyDictionary()  # by the first parameter, how many are left


class RunningClip(PerParameter):
    """Norms as the gradients come; the sum when all norms are known."""

    def __init__(self, over: Over, query: ClippedSum):
        super().__init__(over)
        self.query = query
        self.members = grouped(query.groups, over.parameters, over.aliases)
        self.owner = {name: group for group, names in self.members.items() for name in names}
        check_clipping(self.members, query.max_norm, self._gamma, query.nonfinite)  # before any work

    def begin(self, batch_size: int, costs: Mapping[str, plan.Cost]) -> None:
        super().begin(batch_size, costs)
        self.how = plan.schedule({n: costs[n] for n in self.over.parameters}, self.over.budget)
        self.shared = Shared()
        self.seen: set[str] = set()
        self.squares: _Parts = {group: [] for group in self.members}  # of gradients that are not held
        self.spreads: _Parts = {group: [] for group in self.members}
        self.held: dict[str, Gradient] = {}
        self.packs: dict[Any, Pack] = {}
        self.lefts: set[int] = set()  # ids of the factors that packs hold
        self.factors: tuple[dict[str, Tensor], Tensor | None] | None = None

    def keeps(self, name: str) -> bool:
        return self.factors is None and self.how[name] == "gradients"

    def add(self, gradient: Gradient) -> None:
        if self.factors is not None:  # a second time
            self._sum(gradient)
            return
        name, group = gradient.name, self.owner[gradient.name]
        self.seen.add(name)
        key = key_of(gradient, self.holders) if self.how[name] != "again" else None
        if key is not None:
            pack = self.packs.get((group, key))
            if pack is None:
                pack = self.packs[group, key] = key[0]()
            pack.add(gradient)
            if isinstance(pack, Held):
                self.holders.note(gradient, pack)
            self._wait(gradient)
            return
        if self.how[name] == "again":
            self._measure(gradient, self.squares, self.spreads)
            return
        # Norms are found when all have come, one after another: between the ops of a backward they take longer to start.
        # But another sum's pack, which has this gradient, is to know of them.
        if self.holders.of(gradient) is not None:
            gradient.look(self.shared)
        self.held[name] = gradient

    def _wait(self, gradient: Gradient) -> None:
        """Sums over positions wait for those of other layers only where the same terms are held for a weight."""
        block = gradient.block
        if isinstance(block, Outer):
            self.lefts.add(id(block.left))
        elif isinstance(block, Summed) and block.terms is not None and id(block.terms) not in self.lefts:
            form([block])

    def _measure(self, gradient: Gradient, squares: _Parts, spreads: _Parts) -> None:
        group = self.owner[gradient.name]
        squares[group].append(gradient.squared_norms(self.shared))
        if gradient.spread is not None:
            spreads[group].append(gradient.spread)

    def _settle(self) -> None:
        """The norms of what is held."""
        for gradient in self.held.values():
            gradient.look(self.shared)
        settle(self.held.values())

    def again(self) -> set[str]:
        if not self._clipped_at_once():
            self._clip()
        return self.seen - set(self.batch)

    def _clipped_at_once(self) -> bool:
        """Sum on a GPU before it is known whether a norm is in doubt; whether none was.

        To look at the norms first would be to wait for the device, which would then wait for the host to begin the sums.
        Until then all gradients are held.
        """
        packs = [(key, pack, [*pack.gradients]) for key, pack in self.packs.items()]
        every = [*self.held.values(), *(gradient for _, _, some in packs for gradient in some)]
        ready = bool(every) and all(on_gpu(gradient.parameter) and not gradient.attached for gradient in every)
        if not ready or len(every) < len(self.seen) or doubts.are_gathered() or self._was_in_doubt():
            return False
        held, known = dict(self.held), {id(gradient) for gradient in every if gradient.has_norms}
        with doubts.postponed() as postponed:
            self._clip()
        if not postponed.wait():
            return True
        _doubted[next(iter(self.over.parameters.values()))] = _IN_ORDER
        for gradient in every:
            if id(gradient) not in known:
                gradient.forget_norms()
        for key, pack, some in packs:
            pack.restore(some)
            self.packs[key] = pack
        self.held = held
        return False

    def _was_in_doubt(self) -> bool:
        """Whether one of the last sums of these parameters had to be formed again."""
        first = next(iter(self.over.parameters.values()))
        left = _doubted.pop(first, 0)
        if left > 1:
            _doubted[first] = left - 1
        return left > 0

    def _clip(self) -> None:
        """The norms of what is held, and the sums, each of which lets its gradients go."""
        self._settle()
        squares = {group: [*some] for group, some in self.squares.items()}
        spreads = {group: [*some] for group, some in self.spreads.items()}
        for gradient in self.held.values():
            self._measure(gradient, squares, spreads)
        for (group, _), pack in self.packs.items():
            squares[group].append(pack.squares())
            if (spread := pack.spread()) is not None:
                spreads[group].append(spread)
        factors, index = self._factors({group: self._norms(squares[group], spreads[group]) for group in self.members})
        settled = doubts.settle(list(factors.values()))
        self.factors, self.shared = (dict(zip(factors, settled, strict=True)), index), Shared()
        for name in list(self.held):
            self._sum(self.held.pop(name))
        for group, key in list(self.packs):
            self.batch |= self.packs.pop((group, key)).sums(self.factors[0][group], index, self.query.wide)

    def _norms(self, squares: list[Tensor], spreads: list[Tensor]) -> Tensor:
        """The norms of what is going to be summed, (B,): at most so large, where the sum rounds its terms."""
        norms = root(total(squares or [torch.zeros(self.batch_size)]))
        return norms + root(total(spreads)) if spreads else norms

    def _sum(self, gradient: Gradient) -> None:
        assert self.factors is not None
        factors, index = self.factors
        taken = gradient if index is None else gradient.take(index)
        self.batch[gradient.name] = taken.weighted_sum(factors[self.owner[gradient.name]], self.query.wide)

    def _factors(self, norms: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor | None]:
        return clip_factors(norms, self.query.max_norm, self._gamma, self.query.nonfinite, self.samples)

    @property
    def _gamma(self) -> float | None:
        return self.query.gamma if self.query.normalise else None

    def answer(self) -> dict[str, Tensor]:
        return self.in_order()
