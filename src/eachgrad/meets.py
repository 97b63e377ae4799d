"""Ops in which elements meet: whose the result is (`tags.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eachgrad import tags
from eachgrad.moves import found
from eachgrad.tags import (
    Known,
    Mixed,
    Owners,
    Tag,
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


def elementwise(func: Callable, args: tuple, kwargs: dict, out: Any, first: Tensor, known: Known) -> Tag:
    ndim = first.ndim
    t, tag = known[0]
    if ndim < t.ndim:  # a loss that is reduced
        return settled(
            over(table_of(t.shape, tag), range(t.ndim)).view([1] * ndim), size_of(t.shape, tag), what_of(known)
        )
    if isinstance(tag, int):
        place = ndim - t.ndim + tag
        if len(known) == 1 or all(isinstance(k, int) and ndim - s.ndim + k == place for s, k in known):
            return place
    known = one_space(known, ndim)
    hidden = _hidden(name_of(func).removesuffix("_"), args, known)
    if hidden is None and all(k is tag and s.ndim == ndim for s, k in known):
        return tag
    table = joined([table_of(s.shape, k) for s, k in known], ndim)
    if hidden is not None and table is not None:
        if hidden.numel() > tags.LIMIT:
            return None
        table = torch.where(hidden.cpu().view((1,) * (ndim - hidden.ndim) + hidden.shape), tags.NOBODY, table)
    return settled(table, count_of(known), what_of(known))


def chosen(func: Callable, args: tuple, kwargs: dict, out: Any, first: Tensor, known: Known) -> Tag | list[Tag]:
    """where(condition, a, b): if a and b belong to different samples, the condition's values tell whose comes out."""
    if len(args) == 1:
        return found(func, args, kwargs, out, first, known)
    ndim = first.ndim
    if len(args) != 3 or (
        all(isinstance(k, int) for _, k in known) and len({ndim - t.ndim + k for t, k in known}) == 1  # pyright: ignore
    ):
        return elementwise(func, args, kwargs, out, first, known)
    condition, t, other = args if func is torch.where else (args[1], args[0], args[2])
    if condition.numel() > tags.LIMIT:
        return None
    known = one_space(known, first.ndim)
    picked = torch.where(condition.cpu(), owners_of(t, known), owners_of(other, known))
    return settled(joined([owners_of(condition, known), picked], first.ndim), count_of(known), what_of(known))


_GATES = {"mul", "multiply", "__rmul__", "__and__", "logical_and", "bitwise_and"}


def _hidden(name: str, args: tuple, known: Known) -> Tensor | None:
    """Where a mask leaves nothing of the arguments: samples that meet there meet nowhere."""
    if len(args) < 2 or not (name in _GATES or name in ("masked_fill", "add", "sub")):
        return None
    ours = {id(t) for t, _ in known}
    mask = next((t for t in args[:2] if id(t) not in ours), None)
    if isinstance(mask, (int, float)):
        return torch.tensor(True) if name in _GATES and mask == 0 else None
    # A mask of single elements makes a difference only where samples have met.
    if not isinstance(mask, Tensor) or (
        mask.numel() > 1 and not any(getattr(tag, "several", False) for _, tag in known)
    ):
        return None
    if name == "masked_fill":
        return mask
    if name in _GATES:
        return mask == 0
    return mask.abs() > 1e4 if mask.is_floating_point() else None  # as good as minus infinity, before a softmax


# Ops that compute over dimensions

_FREE = object()
# Where the dimension stands among the arguments, and which it is if none is named; None: all of them.
OVER: dict[str, tuple[int, Any]] = {
    **dict.fromkeys(
        """mean sum std var std_mean var_mean amax amin max min median nanmedian logsumexp prod nanmean nansum aminmax
        argmax argmin count_nonzero""".split(), (1, None),
    ),
    **dict.fromkeys("norm linalg_vector_norm linalg_norm quantile nanquantile".split(), (2, None)),
    **dict.fromkeys("softmax log_softmax cumsum cumprod cummax cummin logcumsumexp softmin diff".split(), (1, _FREE)),
    **dict.fromkeys("sort argsort mode".split(), (1, -1)),
    **dict.fromkeys("topk kthvalue fft_fft fft_ifft fft_rfft fft_irfft".split(), (2, -1)),
    "normalize": (2, 1), "renorm": (2, _FREE),
    "histc": (9, None), "bincount": (9, None), "unique": (9, None), "_unique2": (9, None), "unique_consecutive": (9, None),
}  # fmt: skip
_COUNTS = {"sum", "mean", "max", "min", "amax", "amin", "prod", "bincount", "unique", "argmax", "argmin",
    "_unique2", "count_nonzero", "histc"}  # fmt: skip


def reduced(func: Callable, args: tuple, kwargs: dict, out: Any, first: Tensor, known: Known) -> Tag | list[Tag]:
    t, tag = known[0]
    name = func.__name__.rstrip("_")
    if not args or t is not args[0]:
        return None
    place, default = OVER[name]
    named = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else default))
    if isinstance(named, Tensor):  # max(input, other)
        return elementwise(func, args, kwargs, out, first, known)
    if named is _FREE:
        return None
    whole = t.is_floating_point() or t.is_complex() or name in _COUNTS
    dims = range(t.ndim) if named is None or named == () else [named] if isinstance(named, int) else named
    dims = {d % max(t.ndim, 1) for d in dims}
    if isinstance(tag, int) and tag not in dims:
        return tag - sum(d < tag for d in dims) if first.ndim < t.ndim else tag
    if isinstance(tag, Owners) and first.ndim == t.ndim and all(tag.table.shape[d] == 1 for d in dims):
        return tag if isinstance(out, Tensor) else [tag for _ in out]
    n, table = size_of(t.shape, tag), over(table_of(t.shape, tag), dims)
    if not whole and t.ndim == 1:  # an order or offsets, made from lengths, are no statistics
        return _of_lengths(name, out, table_of(t.shape, tag), n)
    if first.ndim < t.ndim:
        table = table.view([size for d, size in enumerate(table.shape) if d not in dims])
    if first.ndim != table.ndim:  # unique, histc: one dimension of their own
        if table.numel() > 1:
            return None
        table = table.view([1] * first.ndim)
    found = settled(table, n, what_of(known))
    if isinstance(out, Tensor):
        if name in ("histc", "bincount") and isinstance(found, Mixed):
            return Mixed(found.sizes, found.what, places=True)
        return _as_places(found, out) if name != "cumsum" else found
    return [_as_places(found, each) if isinstance(each, Tensor) else None for each in out]


def _as_places(tag: Tag, t: Tensor) -> Tag:
    """Integers that were computed over the samples say how many or where, until they are computed with."""
    if t.is_floating_point() or t.is_complex() or t.dtype == torch.bool:
        return tag
    if isinstance(tag, Owners) and tag.several:
        return None
    return Mixed(tag.sizes, tag.what, places=True) if isinstance(tag, Mixed) else tag


def _of_lengths(name: str, out: Any, table: Tensor, n: int) -> Tag | list[Tag]:
    if name != "sort":
        return None
    return [settled(table[out[1].cpu()], n), Mixed(frozenset({n}), places=True)]


_TRAILING = {"linear": 1, "layer_norm": None, "rms_norm": None}


def by_rows(func: Callable, args: tuple, kwargs: dict, out: Any, first: Tensor, known: Known) -> Tag:
    """Layers: all dimensions but the first, or the last ones only, are computed together."""
    t, tag = known[0]
    if t is not (args[0] if args else kwargs.get("input")) or first.ndim != t.ndim:
        return None
    name = func.__name__
    if name in _TRAILING:
        last = _TRAILING[name] or len(kwargs["normalized_shape"] if "normalized_shape" in kwargs else args[1])
        if tag < t.ndim - last if isinstance(tag, int) else all(n == 1 for n in tag.table.shape[-last:]):
            return tag
        table = over(table_of(t.shape, tag), range(t.ndim - last, t.ndim))
        return settled(table, size_of(t.shape, tag), what_of(known))
    if isinstance(tag, int):
        return tag if not tag else None
    return tag if all(size == 1 for size in tag.table.shape[1:]) else None


def products(func: Callable, args: tuple, kwargs: dict, out: Any, first: Tensor, known: Known) -> Tag:
    """Matrix products; an added matrix comes first."""
    added = name_of(func).removesuffix("_") in ("addmm", "baddbmm")
    factors = args[1:3] if added else args[1::-1] if name_of(func) == "__rmatmul__" else args[:2]
    if len(factors) < 2 or not all(isinstance(f, Tensor) and f.ndim for f in factors):
        return None
    if min(f.ndim for f in factors) > 1 and all(isinstance(k, int) and k < s.ndim - 2 for s, k in known):
        places = {first.ndim - s.ndim + k for s, k in known}  # pyright: ignore[reportOperatorIssue]
        if len(places) == 1:
            return places.pop()
    tag = known[0][1]
    same = all(k is tag and s.ndim == first.ndim for s, k in known)
    if same and isinstance(tag, Owners) and all(n == 1 for n in tag.table.shape[-2:]):
        return tag
    known = one_space(known, first.ndim)
    a, b = factors
    left, right = owners_of(a, known), owners_of(b, known)
    if a.ndim == 1:
        left, a = left[None], a[None]
    if b.ndim == 1:
        right, b = right[:, None], b[:, None]
    rows, columns = _summed(left, b), _summed(right.mT, a.mT)
    if rows is None or columns is None or (table := joined([rows, columns.mT], max(a.ndim, b.ndim))) is None:
        return None
    table = table.squeeze(-2) if factors[0].ndim == 1 else table
    table = table.squeeze(-1) if factors[1].ndim == 1 else table
    tables = [table, owners_of(args[0], known)] if added else [table]
    return settled(joined(tables, first.ndim), count_of(known), what_of(known))


def _summed(table: Tensor, other: Tensor) -> Tensor | None:
    """The owners (..., I, K) of a factor after the sum over K with `other` (..., K, J), whose zeros leave nothing."""
    if table.shape[-1] == 1:
        return table
    zeros = other == 0
    if not bool(zeros.any()):
        return over(table, [-1])
    if table.shape[-2] > 1 or zeros.numel() > tags.LIMIT:
        return None
    return over(torch.where(zeros.cpu(), tags.NOBODY, table.mT), [-2])


def compared(func: Callable, args: tuple, kwargs: dict, out: Any, first: Tensor, known: Known) -> Tag:
    """cdist, outer, cov, cosine_similarity, pairwise_distance."""
    name, known = func.__name__, one_space(known, max(t.ndim for t, _ in known))
    if name in ("cov", "corrcoef"):
        rows = over(owners_of(args[0], known), [args[0].ndim - 1])
        tables = [rows, rows.mT] if args[0].ndim == 2 else [rows.squeeze(-1)]
    elif name == "cdist":
        tables = [
            over(owners_of(args[0], known), [args[0].ndim - 1]),
            over(owners_of(args[1], known), [args[1].ndim - 1]).mT,
        ]
    elif name in ("outer", "ger"):
        tables = [owners_of(args[0], known)[:, None], owners_of(args[1], known)[None]]
    else:
        wide = max(args[0].ndim, args[1].ndim)
        both = joined([owners_of(args[0], known), owners_of(args[1], known)], wide)
        if both is None:
            return None
        dim = kwargs.get("dim", args[2] if len(args) > 2 else 1) if name == "cosine_similarity" else -1
        both = over(both, [dim % wide])
        tables = [both if first.ndim == wide else both.squeeze(dim)]
    return settled(joined(tables, first.ndim), count_of(known), what_of(known))


def decomposed(func: Callable, args: tuple, kwargs: dict, out: Any, first: Tensor, known: Known) -> Tag:
    """What is computed from whole matrices: an inverse, eigenvalues."""
    t, tag = known[0]
    if isinstance(tag, int) and tag < t.ndim - 2:
        return tag
    table = over(table_of(t.shape, tag), range(t.ndim))
    return settled(table.view([1] * first.ndim), size_of(t.shape, tag), what_of(known)) if t.ndim == 2 else None


def contracted(func: Callable, args: tuple, kwargs: dict, out: Any, first: Tensor, known: Known) -> Tag:
    if not isinstance(args[0], str):
        return None
    operands = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
    subscripts, arrow, result = args[0].replace(" ", "").partition("->")
    if "." in args[0] or not arrow:
        return None
    known, tables = one_space(known, first.ndim), []
    if any(bool((t == 0).any()) for t in operands) and any(not isinstance(tag, int) for _, tag in known):
        return None  # one-hot rows pick, and add up nothing
    for letters, t in zip(subscripts.split(","), operands, strict=True):
        if not any(t is s for s, _ in known) or len(set(letters)) < len(letters):
            continue
        table = over(owners_of(t, known), [k for k, letter in enumerate(letters) if letter not in result])
        kept = [letter for letter in letters if letter in result]
        table = table.reshape([size for size, letter in zip(table.shape, letters, strict=True) if letter in result])
        order = sorted(range(len(kept)), key=lambda k: result.index(kept[k]))
        sizes = dict(zip(kept, table.shape, strict=True))
        tables.append(table.permute(order).reshape([sizes.get(letter, 1) for letter in result]))
    return settled(joined(tables, first.ndim), count_of(known), what_of(known)) if tables else None


def attended(func: Callable, args: tuple, kwargs: dict, out: Any, first: Tensor, known: Known) -> Tag:
    """Attention; between samples only where no mask could keep them apart."""
    known = [(t, k) for t, k in known if any(t is a for a in args[:3])]
    places = {first.ndim - t.ndim + k if isinstance(k, int) else -1 for t, k in known}
    if len(places) == 1 and -1 < min(places) < first.ndim - 2:
        return places.pop()
    if not known or len(args) > 3 or kwargs.keys() & {"attn_mask", "is_causal"}:
        return None
    q, k, v = (owners_of(t, known) for t in args[:3])
    last = first.ndim - 1
    keys = [over(table, [last - 1, last]) for table in (k, v)]
    return settled(joined([over(q, [last]), *keys], first.ndim), count_of(known), what_of(known))


def copied(func: Callable, args: tuple, kwargs: dict, out: Any, first: Tensor, known: Known) -> Tag:
    """copy_: nothing of the first argument is left."""
    source = [(t, tag) for t, tag in known if t is args[1]]
    return elementwise(func, args, kwargs, out, first, source) if source else None
