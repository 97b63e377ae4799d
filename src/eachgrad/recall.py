"""Plans: layouts that were measured once and hold for every forward that runs the same ops.

Where the samples lie is decided by the ops that ran, their shapes and their options, unless an op moves rows
by an index or by values. A forward without such ops gets a signature; the layouts found for it are used
again, and measured again at the 2nd, 4th, 8th, ... call, in case something mixes samples only now and then.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from eachgrad import layout as lay
from eachgrad.cover import Accepted, Solved
from eachgrad.plan import Cost
from eachgrad.use import Use
from eachgrad.uses import Recipe

_KEPT = 16  # plans a model may have; the oldest goes first


Counted = tuple[lay.Layout, set[int]]


@dataclass
class Plan:
    """The layout of every use, in the order of the forward; None for one without a gradient, or without samples."""

    layouts: list[lay.Layout | None]
    reached: list[bool]  # by use, whether it takes part in the losses
    wanted: list[set[int]] | None = None  # by use, which of its sources it counts for, when that was found last
    costs: dict[str, Cost] = field(default_factory=dict)  # by parameter, when its gradients were formed last
    recipes: dict[int, Recipe | None] = field(default_factory=dict)  # by use, when one was asked for first
    calls: int = 1
    stale: bool = False  # due, and not measured again so far

    def is_due(self) -> bool:
        """Whether this call measures the layouts again."""
        self.calls += 1
        return self.calls & (self.calls - 1) == 0

    def fits(self, reached: list[bool]) -> bool:
        """Whether the same uses take part in the losses."""
        return reached == self.reached

    def apply(self, uses: list[Use], plain: list[Tensor | None]) -> list[Solved]:
        """The uses of another forward, each with the layout of its place."""
        triples = zip(uses, plain, self.layouts, strict=True)
        return [Solved(use, g, place) for use, g, place in triples if g is not None]

    def counted(self, uses: list[Use]) -> list[Counted | None]:
        """By use of another forward, its layout and the ids of the sources it counts for."""
        assert self.wanted is not None
        triples = zip(uses, self.layouts, self.wanted, strict=True)
        return [None if place is None else (place, {id(use.sources[k]) for k in some}) for use, place, some in triples]

    def recipe(self, n: int, use: Use, g: Tensor, B: int) -> Recipe | None:
        """How the blocks of use `n` are found."""
        if n not in self.recipes:
            place = self.layouts[n]
            self.recipes[n] = None if place is None else Recipe.of(use, g, place, B)
        return self.recipes[n]

    def accepted(self, uses: list[Use], plain: Sequence[Tensor | None]) -> Accepted:
        """The uses of another forward that count, with their gradients."""
        triples = zip(uses, plain, self.counted(uses), strict=True)
        return [(Solved(use, g, some[0]), some[1]) for use, g, some in triples if g is not None and some is not None]

    def same(self, other: Plan) -> bool:
        """Whether samples lie in the same places, and the same sources count."""
        mine, theirs = (list(map(_key, plan.layouts)) for plan in (self, other))
        return self.wanted == other.wanted and mine == theirs

    def alike(self, other: Plan) -> bool:
        """The same for two batches of whatever sizes, where no layout but a regular one is planned."""
        mine, theirs = (list(map(_kind, plan.layouts)) for plan in (self, other))
        return self.wanted == other.wanted and mine == theirs

    def of_size(self, B: int) -> Plan:
        """The plan for B samples of a forward whose layouts are all regular, and that runs the same ops for any number."""
        return replace(self, layouts=[_of_size(place, B) for place in self.layouts], recipes={})

    def note(self, uses: list[Use], accepted: Accepted) -> None:
        """Remember which uses counted for which of their sources."""
        counted = {id(item.use): some for item, some in accepted}
        self.wanted = [{k for k, s in enumerate(use.sources) if id(s) in counted.get(id(use), ())} for use in uses]


def measured(uses: list[Use], plain: Sequence[Tensor | None], found: list[Solved]) -> Plan:
    """What was found of a forward, use by use."""
    layouts = {id(item.use): item.layout for item in found}
    places = [None if g is None else layouts.get(id(use)) for use, g in zip(uses, plain, strict=True)]
    return Plan(places, [g is not None for g in plain])


_plans: WeakKeyDictionary[nn.Module, dict[Hashable, Plan]] = WeakKeyDictionary()


def find(model: nn.Module, key: Hashable) -> Plan | None:
    """The plan to use for this forward, or None: measure."""
    plan = _plans.get(model, {}).get(key)
    if plan is None:
        return None
    # Until it has been measured again: a refusal must not leave the old layouts behind.
    plan.stale = plan.is_due() or plan.stale
    return None if plan.stale else plan


def keep(
    model: nn.Module, key: Hashable, uses: list[Use], plain: list[Tensor | None], found: list[Solved]
) -> Plan | None:
    """Remember what was measured, if it is regular and certain enough to hold for the next forward."""
    # A candidate without samples of its own has no layout, and will have none.
    certain = all(is_regular(i.layout) or (i.layout is None and not i.use.strong) for i in found)
    kept = _plans.setdefault(model, {})
    if not certain:
        kept.pop(key, None)
        return None
    plan = measured(uses, plain, found)
    plan.calls = kept[key].calls if key in kept else 1
    kept[key] = plan
    while len(kept) > _KEPT:
        del kept[next(iter(kept))]
    return plan


def _key(place: lay.Layout | None) -> Hashable:
    if not isinstance(place, lay.Along) or place.fold is None:
        return place
    return place.dim, place.fold.kind, tuple(map(tuple, place.fold.index.tolist()))


def _kind(place: lay.Layout | None) -> Hashable:
    if not isinstance(place, lay.Along):
        return type(place)
    return place.dim, None if place.fold is None else place.fold.kind


def _of_size(place: lay.Layout | None, B: int) -> lay.Layout | None:
    if not isinstance(place, lay.Along) or place.fold is None:
        return place
    assert place.fold.kind != "ragged"
    each = place.fold.index.shape[1]
    index = torch.arange(B * each, device=place.fold.index.device)
    rows = index.view(B, each) if place.fold.kind == "outer" else index.view(each, B).T
    return replace(place, fold=replace(place.fold, index=rows))


def is_regular(layout: lay.Layout | None) -> bool:
    return isinstance(layout, lay.Along) and layout.alone and (layout.fold is None or layout.fold.kind != "ragged")
