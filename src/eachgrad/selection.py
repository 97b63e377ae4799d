"""Which parameters a name or a glob means, which group each is in, and how far each sample is scaled down."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cached_property

import torch
from torch import Tensor

from eachgrad import doubts
from eachgrad.errors import CaptureError


class Aliases(Mapping[str, str]):
    """Other names of parameters, found when somebody asks: of most questions nobody does."""

    def __init__(self, find: Callable[[], dict[str, str]]):
        self._find = find

    @cached_property
    def _found(self) -> dict[str, str]:
        return self._find()

    def __getitem__(self, name: str) -> str:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def matching(pattern: str, names: Iterable[str], aliases: Mapping[str, str]) -> list[str]:
    """The names that match a glob; if none does, those of which another name does (tied parameters)."""
    names = list(names)
    found = [name for name in names if name == pattern or fnmatchcase(name, pattern)]
    if found:
        return found
    also = {name for alias, name in aliases.items() if alias == pattern or fnmatchcase(alias, pattern)}
    return [name for name in names if name in also]


def grouped(
    groups: str | Mapping[str, Iterable[str]] | None, names: Iterable[str], aliases: Mapping[str, str]
) -> dict[str, list[str]]:
    """{group: its parameters}, every parameter in exactly one; None: all in one group called ""."""
    names = list(names)
    if groups is None:
        return {"": names}
    if isinstance(groups, str):
        if groups != "parameter":
            raise ValueError(f'groups is None, "parameter" or {{group: names or globs}}, not {groups!r}')
        return {name: [name] for name in names}
    owners: dict[str, list[str]] = {name: [] for name in names}
    for group, patterns in groups.items():
        if isinstance(patterns, str):
            raise ValueError(f"group {group!r} is a list of names or globs, not the text {patterns!r}")
        found = {pattern: matching(pattern, names, aliases) for pattern in patterns}
        if missing := [pattern for pattern, some in found.items() if not some]:
            raise ValueError(
                f"group {group!r} names {missing[0]!r}, which matches no parameter: see model.named_parameters()"
            )
        for name in dict.fromkeys(name for some in found.values() for name in some):
            owners[name].append(group)
    for name, owner in owners.items():
        if len(owner) != 1:
            where = f"in the groups {', '.join(map(repr, owner))}" if owner else "in no group"
            raise ValueError(f"parameter {name!r} is {where}: put each parameter in exactly one")
    return {group: [name for name in names if owners[name] == [group]] for group in groups}


def check_clipping(
    groups: Iterable[str], max_norm: float | Mapping[str, float], gamma: float | None, nonfinite: str
) -> dict[str, float]:
    """{group: its bound}; an error that names what is no option."""
    if nonfinite not in ("raise", "zero"):
        raise ValueError(f'nonfinite is "raise" or "zero", not {nonfinite!r}')
    if gamma is not None and not gamma > 0:
        raise ValueError(f"gamma is a positive number, not {gamma}")
    return _bounds(max_norm, groups)


def clip_factors(
    norms: Mapping[str, Tensor],
    max_norm: float | Mapping[str, float],
    gamma: float | None,
    nonfinite: str,
    start: int = 0,
) -> tuple[dict[str, Tensor], Tensor | None]:
    """{group: a factor per sample} from {group: norms (B,)}, and the samples they are for (None: all).

    `start` is the number of the first sample in what is said of them.
    """
    bounds = check_clipping(norms, max_norm, gamma, nonfinite)
    first = next(iter(norms.values()))
    bad = torch.stack([~n.isfinite().to(first.device) for n in norms.values()]).any(0)
    index = None
    if not doubts.note(bad.any) and bad.any():
        if nonfinite == "raise":
            samples = (bad.nonzero().flatten() + start).tolist()
            raise CaptureError(
                f"clipped_sum: the gradients of samples {samples} have a NaN or infinite norm. "
                'Leave them out with nonfinite="zero", or look at their inputs and losses.'
            )
        index = (~bad).nonzero().flatten()
        norms = {group: n[index.to(n.device)] for group, n in norms.items()}
    return {group: _factor(n, bounds[group], gamma) for group, n in norms.items()}, index


def _factor(norms: Tensor, bound: float, gamma: float | None) -> Tensor:
    # A few roundings, of the norm, of the factor and of the product, must not lead above the bound.
    bound = bound * (1 - 4 * torch.finfo(norms.dtype).eps)
    if gamma is not None:
        return bound / (norms + gamma)
    return bound / norms.clamp(min=bound)  # not (bound / norms).clamp(max=1), whose derivative at 0 is NaN


def _bounds(max_norm: float | Mapping[str, float], groups: Iterable[str]) -> dict[str, float]:
    groups = list(groups)
    if not isinstance(max_norm, Mapping):
        max_norm = dict.fromkeys(groups, max_norm)
    elif set(max_norm) != set(groups) or groups == [""]:
        raise ValueError(f"max_norm is a number, or one for each group {groups}, not {dict(max_norm)}")
    for bound in max_norm.values():
        if not 0 < bound < float("inf"):
            raise ValueError(f"max_norm is a positive number, not {bound}")
    return dict(max_norm)
