"""Plans: layouts that were measured once and hold for every forward that runs the same ops.

Where the samples lie is decided by the ops that ran, their shapes and their options, unless an op moves rows
by an index or by values. A forward without such ops gets a signature; the layouts found for it are used
again, and measured again at the 2nd, 4th, 8th, ... call, in case something mixes samples only now and then.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from eachgrad import layout as lay
from eachgrad.cover import Solved
from eachgrad.plan import Cost
from eachgrad.use import Use

_KEPT = 16  # plans a model may have; the oldest goes first


@dataclass
class Plan:
    """The layout of every use, in the order of the forward; None for a use without a gradient."""

    layouts: list[lay.Layout | None]
    costs: dict[str, Cost] = field(default_factory=dict)  # by parameter, when its gradients were formed last
    calls: int = 1
    stale: bool = False  # due, and not measured again so far

    def is_due(self) -> bool:
        """Whether this call measures the layouts again."""
        self.calls += 1
        return self.calls & (self.calls - 1) == 0

    def fits(self, reached: list[bool]) -> bool:
        """Whether the same uses take part in the losses."""
        return reached == [place is not None for place in self.layouts]

    def apply(self, uses: list[Use], plain: list[Tensor | None]) -> list[Solved]:
        """The uses of another forward, each with the layout of its place."""
        triples = zip(uses, plain, self.layouts, strict=True)
        return [Solved(use, g, place) for use, g, place in triples if g is not None]


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
    certain = all(use.strong for use in uses) and all(is_regular(item.layout) for item in found)
    kept = _plans.setdefault(model, {})
    if not certain:
        kept.pop(key, None)
        return None
    layouts = {id(item.use): item.layout for item in found}
    plan = Plan([None if g is None else layouts.get(id(use)) for use, g in zip(uses, plain, strict=True)])
    plan.calls = kept[key].calls if key in kept else 1
    kept[key] = plan
    while len(kept) > _KEPT:
        del kept[next(iter(kept))]
    return plan


def is_regular(layout: lay.Layout | None) -> bool:
    return isinstance(layout, lay.Along) and layout.alone and (layout.fold is None or layout.fold.kind != "ragged")
