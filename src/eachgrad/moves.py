"""Ops that move elements: where the samples are afterwards (`tags.py`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from eachgrad import tags
from eachgrad.tags import (
    Known,
    Loose,
    Mixed,
    Owners,
    Tag,
    Tagged,
    count_of,
    joined,
    name_of,
    one_space,
    over,
    owners_of,
    settled,
    size_of,
    table_of,
    what_of,
)

_SHAPES = {"view", "reshape", "flatten", "view_as", "reshape_as", "unflatten", "ravel"}
TURNED = {getattr(torch.Tensor, name).__get__: name for name in ("T", "mT", "H", "mH")}


def viewed(func: Callable, args: tuple, kwargs: dict, out: Any, first: Tensor, known: Known) -> Tag | list[Tag]:
    t, tag = known[0]
    if not args or t is not args[0]:
        return None
    name = TURNED.get(func) or name_of(func)
    old, new = t.shape, first.shape
    if name in _SHAPES:
        if tag == 0 and new and new[0] == old[0]:
            return 0
        return (_reshaped_once if _is_regular(tag) else _reshaped)(tag, old, new)
    if _is_regular(tag):
        return _moved_once(func, tag, old, _frozen(args[1:]), tuple(kwargs.items()) and _frozen(tuple(kwargs.items())))
    return _moved(func, tag, old, args[1:], kwargs)


def _is_regular(tag: int | Owners) -> bool:
    """Whether the same is likely to be asked again: a table of a batch's rows, in which no place in the code is noted."""
    return isinstance(tag, int) or (not tag.several and tag.table.numel() <= _REGULAR)


def _frozen(value: Any) -> Any:
    """Arguments of a view as something that can be a key, and back by `_thawed`."""
    kind = type(value)
    if kind is slice:
        return (slice, value.start, value.stop, value.step)
    return (
        (kind, *map(_frozen, value)) if kind in (tuple, list) else tuple(value) if isinstance(value, tuple) else value
    )


def _thawed(value: Any) -> Any:
    if type(value) is tuple and value and value[0] in (slice, tuple, list):
        kind, *rest = value
        return slice(*rest) if kind is slice else kind(_thawed(v) for v in rest)
    return value


def _reshaped(tag: int | Owners, old: torch.Size, new: torch.Size) -> Tag:
    return settled(tags.reshaped(table_of(old, tag), old, new), size_of(old, tag), getattr(tag, "what", ""))


def _moved(func: Callable, tag: int | Owners, shape: torch.Size, args: tuple, kwargs: dict) -> Tag | list[Tag]:
    """The tags of the views that `func` makes."""
    table, n, what = table_of(shape, tag), size_of(shape, tag), getattr(tag, "what", "")
    views = func(table.expand(shape), *args, **kwargs)
    return settled(views, n, what) if isinstance(views, Tensor) else [settled(view, n, what) for view in views]


# Elements of a table, and how many answers are remembered, of 64 MiB each at most: 64 samples of 197 positions are 12,608.
_REGULAR, _ANSWERS = 1 << 14, 512
_reshaped_once = lru_cache(_ANSWERS)(_reshaped)


@lru_cache(_ANSWERS)
def _moved_once(func: Callable, tag: int | Owners, shape: torch.Size, args: Any, kwargs: Any) -> Tag | list[Tag]:
    return _moved(func, tag, shape, _thawed(args), dict(_thawed(kwargs)))


def indexed(func: Callable, args: tuple, kwargs: dict, out: Any, first: Tensor, known: Known) -> Tag | list[Tag]:
    t, index = args
    tag = next((tag for s, tag in known if s is t), None)
    tensors = [k for k in (index if isinstance(index, tuple) else (index,)) if isinstance(k, (Tensor, list))]
    if not tensors and tag is not None:
        return viewed(func, args, kwargs, out, first, known)
    parts = tags.full_index(index, t.ndim)
    if parts is None:
        return None
    pointers = [(k, found) for k, found in known if any(k is part for part in parts)]
    if tag is None:
        return _looked_up(parts, pointers, t, first)
    table = tags.taken(table_of(t.shape, tag), t.shape, parts)
    n = size_of(t.shape, tag)
    if table is None:
        return None
    pointed = [_pointing(k, p) for k, p in pointers if size_of(k.shape, p) == n]
    if pointed and (at := _place_of_pointers(parts)) is not None:
        rest = first.ndim - at - max((k.ndim if not tags.is_mask(k) else 1) for k in parts if isinstance(k, Tensor))
        pointed = [p.view(*p.shape, *[1] * rest) for p in pointed if p is not None]
        table = joined([table, *pointed], first.ndim)
    return settled(table, n, getattr(tag, "what", ""))


def _pointing(k: Tensor, tag: int | Owners) -> Tensor | None:
    """The owners of the entries of an index."""
    table = table_of(k.shape, tag)
    return tags.taken(table, k.shape, [k]) if tags.is_mask(k) else table


def _place_of_pointers(parts: list) -> int | None:
    """The dimension of `t[parts]` where those of the tensors among the parts begin."""
    where = [place for place, k in enumerate(parts) if isinstance(k, Tensor)]
    if where[-1] - where[0] + 1 != len(where):
        return None
    return sum(k is None or type(k) is slice for k in parts[: where[0]])


def _looked_up(parts: list, pointers: Known, t: Tensor, first: Tensor) -> Tag:
    """Rows of a table that belongs to nobody, looked up for each sample."""
    at = _place_of_pointers(parts)
    if at is None or any(tags.is_mask(k) for k, _ in pointers):
        return None
    wide = max(k.ndim for k in parts if isinstance(k, Tensor))
    pointers = one_space(pointers, wide)
    found = settled(joined([table_of(k.shape, p) for k, p in pointers], wide), count_of(pointers))
    if isinstance(found, int):
        return at + found
    if not isinstance(found, Owners):
        return found
    return settled(
        found.table.view(*[1] * at, *found.table.shape, *[1] * (first.ndim - at - wide)), found.n, found.what
    )


def picked(func: Callable, args: tuple, kwargs: dict, out: Any, first: Tensor, known: Known) -> Tag:
    """flip, roll, repeat_interleave, index_select: along named dimensions only."""
    t, tag = known[0]
    if not args or t is not args[0]:
        return None
    table, name = table_of(t.shape, tag), name_of(func)
    if name == "flip":
        dims = kwargs.get("dims", args[1] if len(args) == 2 and not isinstance(args[1], int) else args[1:])
        table = table.flip(dims)
    elif name == "roll":
        if (kwargs.get("dims", args[2] if len(args) > 2 else ())) in ((), None):
            return None
        table = func(table, *args[1:], **kwargs)
    else:
        dim = kwargs.get("dim", args[{"index_select": 1, "repeat_interleave": 2}[name]] if len(args) > 2 else None)
        if dim is None:
            return settled(over(table, range(t.ndim)).reshape(1), size_of(t.shape, tag)) if t.ndim == 1 else None
        if table.shape[dim] > 1:
            cpu = [a.cpu() if isinstance(a, Tensor) else a for a in args[1:]]
            table = func(table, *cpu, **{k: v.cpu() if isinstance(v, Tensor) else v for k, v in kwargs.items()})
    return settled(table, size_of(t.shape, tag), getattr(tag, "what", ""))


def repeated(func: Callable, args: tuple, kwargs: dict, out: Any, first: Tensor, known: Known) -> Tag:
    t, tag = known[0]
    table = table_of(t.shape, tag)
    table = table.view((1,) * (first.ndim - t.ndim) + tuple(table.shape))
    old = (1,) * (first.ndim - t.ndim) + tuple(t.shape)
    times = [new // was if size > 1 else 1 for new, was, size in zip(first.shape, old, table.shape, strict=True)]
    return settled(table.repeat(times), size_of(t.shape, tag), getattr(tag, "what", ""))


def gathered(func: Callable, args: tuple, kwargs: dict, out: Any, first: Tensor, known: Known) -> Tag:
    if len(args) != 3 or not all(isinstance(args[k], Tensor) for k in (0, 2 if func not in _ALONG else 1)):
        return None
    t, dim, index = (args[0], args[2], args[1]) if func in _ALONG else args
    known = one_space(known, first.ndim)
    table = owners_of(t, known)
    dim %= max(t.ndim, 1)
    if table.ndim and table.shape[dim] > 1:
        sizes = [max(a, b) if d != dim else -1 for d, (a, b) in enumerate(zip(table.shape, index.shape, strict=True))]
        rows = table.expand([n if d != dim else -1 for d, n in enumerate(sizes)])
        if index.numel() > tags.LIMIT:
            return None
        rows = rows[tuple(slice(0, n) if d != dim else slice(None) for d, n in enumerate(index.shape))]
        table = rows.gather(dim, index.cpu().expand([m if d != dim else -1 for d, m in enumerate(rows.shape)]))
    else:
        table = table[tuple(slice(0, n) for n in index.shape)]
    return settled(joined([table, owners_of(index, known)], first.ndim), count_of(known))


_ALONG = {torch.take_along_dim, torch.Tensor.take_along_dim}


def put_together(func: Callable, args: tuple, kwargs: dict, out: Any, first: Tensor, known: Known) -> Tag:
    parts = args[0] if args else kwargs.get("tensors", ())
    name = name_of(func)
    dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0)) % first.ndim
    known = one_space(known, first.ndim)
    tables = [owners_of(t, known) for t in parts]
    if name == "stack":
        tables = [table.unsqueeze(dim) for table in tables]
    elif any(t.ndim != first.ndim for t in parts):  # an empty one, of one dimension, may be among them
        return None
    else:
        tables = [tags.spread(table, [dim], t.shape) for table, t in zip(tables, parts, strict=True)]
    wide = [max(sizes) for sizes in zip(*(table.shape for table in tables), strict=True)]
    tables = [table.expand([n if d != dim else -1 for d, n in enumerate(wide)]) for table in tables]
    if sum(table.numel() for table in tables) > tags.LIMIT:
        return None
    return settled(torch.cat(tables, dim), count_of(known), what_of(known))


def assigned(args: tuple, tagged: Tagged) -> Tag:
    """What a tensor is after `t[index] = value`."""
    t, index, value = args
    mixed = [tag for s, tag in tagged if isinstance(tag, Mixed) and (not tag.places or s is value or s is t)]
    if mixed:
        return mixed[0]
    known: Known = [(s, tag) for s, tag in tagged if not isinstance(tag, (Mixed, Loose)) and tag is not None]
    parts = tags.full_index(index, t.ndim)
    if not known or parts is None:
        return None
    known = one_space(known, t.ndim)
    with torch.no_grad():
        ndim = torch.empty(t.shape, device="meta")[tuple(parts)].ndim if not any(map(tags.is_mask, parts)) else None
    if ndim is None:
        ndim = t.ndim - sum(k.ndim - 1 for k in parts if tags.is_mask(k))
    return settled(
        tags.put(owners_of(t, known), t.shape, parts, owners_of(value, known), ndim), count_of(known), what_of(known)
    )


def added_at(func: Callable, args: tuple, kwargs: dict, out: Any, first: Tensor, known: Known) -> Tag:
    """index_add, index_copy: rows of a source to places of a target."""
    if len(args) != 4 or kwargs.keys() - {"alpha"} or not isinstance(args[2], Tensor):
        return None
    t, dim, index, source = args
    known = one_space(known, first.ndim)
    target, rows = owners_of(t, known), tags.spread(owners_of(source, known), [dim % t.ndim], source.shape)
    wide = [max(a, b) for a, b in zip(target.shape, rows.shape, strict=True)]
    wide[dim] = -1
    rows = rows.expand(wide)
    wide[dim] = t.shape[dim]
    if target.expand(wide).numel() + rows.numel() > tags.LIMIT:
        return None
    index = index.cpu()
    at = index.view([-1 if d == dim % t.ndim else 1 for d in range(t.ndim)]).expand(rows.shape)
    high = torch.full(wide, tags.NOBODY).scatter_reduce(dim, at, rows, "amax")
    low = high.scatter_reduce(dim, at, rows.where(rows != tags.NOBODY, 1 << 40), "amin")
    added = torch.where((low == high) | (high == tags.NOBODY) & (low > 0), high, tags.SEVERAL)
    if "copy" in name_of(func):
        new = target.expand(wide).index_copy(dim, index, rows)
        return settled(new, count_of(known), what_of(known))
    return settled(joined([target.expand(wide), added], t.ndim), count_of(known), what_of(known))


def found(func: Callable, args: tuple, kwargs: dict, out: Any, first: Tensor, known: Known) -> Tag | list[Tag]:
    """nonzero: each place belongs to whom the element there belongs."""
    t, tag = known[0]
    n = size_of(t.shape, tag)
    places = out if isinstance(out, tuple) else tuple(out.unbind(1))
    table = tags.taken(table_of(t.shape, tag), t.shape, list(places))
    if table is None:
        return None
    return [settled(table, n)] * len(places) if isinstance(out, tuple) else settled(table[:, None], n)


def appended(func: Callable, args: tuple, kwargs: dict, out: Any, first: Tensor, known: Known) -> Tag:
    """embedding, one_hot: dimensions are added behind the others."""
    t, tag = known[0]
    if t is not (args[0] if args else kwargs.get("input")) or first.ndim <= t.ndim:
        return None
    if isinstance(tag, int):
        return tag
    return settled(tag.table.view(*tag.table.shape, *[1] * (first.ndim - t.ndim)), tag.n, tag.what)


def padded(func: Callable, args: tuple, kwargs: dict, out: Any, first: Tensor, known: Known) -> Tag:
    t, tag = known[0]
    table = table_of(t.shape, tag)
    return tag if all(a == b or n == 1 for a, b, n in zip(t.shape, first.shape, table.shape, strict=True)) else None


def left(func: Callable, args: tuple, kwargs: dict, out: Any, first: Tensor, known: Known) -> Tag:
    """tril, triu and the like: what is left is as it was."""
    return known[0][1]
