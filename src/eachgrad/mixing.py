"""Batch statistics that no gradient shows: where the batch dimension goes, as far as ordinary ops tell.

The measured layouts find every op that mixes samples on the way of a gradient. A mean over the batch of an
input, or one that is detached, lies on no such way, and still makes a sample's loss depend on the others.
So the batch dimension of the model's inputs is followed through ops that keep it, and what is computed over
it is remembered as mixed. Where the dimension is lost from sight nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mixed:
    """Computed over a dimension that holds the samples, if there are as many as it had entries."""

    sizes: frozenset[int]
    what: str = ""  # the op that did it, and where


Tag = int | Mixed | None  # the dimension of the samples, what was computed over it, or nothing known

_OVER = set(
    """
    mean sum std var std_mean var_mean amax amin max min median nanmedian norm vector_norm logsumexp prod softmax
    log_softmax cumsum cumprod sort topk nanmean nansum quantile aminmax normalize
    """.split()
)
_SECOND = {"norm", "vector_norm", "quantile", "topk", "normalize"}  # the dimension comes third
_LAST = {"sort", "topk"}  # the last dimension unless another is named
_COUNTS = {"sum", "mean", "max", "min", "amax", "amin", "prod"}
_SAME = set(
    """
    relu relu_ gelu silu sigmoid tanh exp log log1p abs neg sqrt rsqrt pow square clone contiguous to float double half
    bfloat16 type detach clamp softplus leaky_relu elu selu celu sin cos dropout dropout_ sign round hardtanh hardswish
    hardsigmoid mish tanh_ sigmoid_ nan_to_num erf reciprocal type_as requires_grad_ linear layer_norm rms_norm group_norm
    instance_norm batch_norm conv1d conv2d conv3d embedding max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d __get__
    """.split()
)
_BINARY = set(
    """
    add sub mul div add_ sub_ mul_ div_ maximum minimum where lerp addcmul addcdiv __radd__ __rsub__ __rmul__ __rtruediv__
    __rdiv__ __add__ __sub__ __mul__ __truediv__ __iadd__ __isub__ __imul__ __itruediv__ true_divide subtract multiply divide
    __pow__ copy_
    """.split()
)
_TURNS = {"transpose", "swapaxes", "swapdims", "t", "permute", "unsqueeze"}
_SHAPES = {"view", "reshape", "flatten", "view_as", "reshape_as", "unflatten"}


def follow(func: Callable, args: tuple, kwargs: dict, out: Any, tagged: Sequence[tuple[Tensor, Tag]]) -> Tag:
    """What `out` is, given the tags of the op's arguments."""
    if not isinstance(out, Tensor) and not isinstance(out, (tuple, list)):
        return None
    first = out if isinstance(out, Tensor) else next((t for t in out if isinstance(t, Tensor)), None)
    if first is None:
        return None
    mixed = [tag for _, tag in tagged if isinstance(tag, Mixed)]
    if mixed:
        return Mixed(frozenset().union(*(tag.sizes for tag in mixed)), mixed[0].what)
    name = getattr(func, "__name__", "")
    t, dim = tagged[0]
    assert isinstance(dim, int)
    if name in _OVER and t is args[0]:
        return _reduced(name, args, kwargs, t, dim, first)
    if name in _SAME and func not in _TRANSPOSED and first.ndim >= t.ndim:
        return dim
    if name in _BINARY:
        # The outermost: what is broadcast (positions, masks) has its own first dimension further in.
        return first.ndim - max(s.ndim - k for s, k in tagged if isinstance(k, int))
    if name in _TURNS:
        return _turned(name, args, kwargs, t, dim)
    if name in _SHAPES and dim == 0 and first.ndim and first.shape[0] == t.shape[0]:
        return 0
    return _moved(func, name, args, kwargs, t, dim, first)


def _turned(name: str, args: tuple, kwargs: dict, t: Tensor, dim: int) -> Tag:
    """The same dimension after some have changed places."""
    rank = t.ndim
    if name in ("transpose", "swapaxes", "swapdims") and len(args) == 3:
        a, b = args[1] % rank, args[2] % rank
        return {a: b, b: a}.get(dim, dim)
    if name == "t" and rank == 2:
        return 1 - dim
    if name == "permute" and not kwargs:
        order = args[1] if len(args) == 2 and not isinstance(args[1], int) else args[1:]
        return [d % rank for d in order].index(dim)
    if name == "unsqueeze" and len(args) == 2:
        return dim + (args[1] % (rank + 1) <= dim)
    return None


_TRANSPOSED = {getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH")}
_PRODUCTS = {"matmul", "__matmul__", "bmm", "mm"}
_PIECES = {"unbind", "chunk", "split", "tensor_split", "select", "narrow", "stack", "cat", "concat"}


def _moved(func: Callable, name: str, args: tuple, kwargs: dict, t: Tensor, dim: int, out: Tensor) -> Tag:
    """The same for ops that put dimensions elsewhere; all that name them by keyword are left alone."""
    if func in _TRANSPOSED:
        return {t.ndim - 1: t.ndim - 2, t.ndim - 2: t.ndim - 1}.get(dim, dim) if t.ndim > 1 else None
    if kwargs and name != "einsum":
        return None
    if name in ("movedim", "moveaxis") and len(args) == 3:
        places = torch.movedim(torch.empty(tuple(range(2, 2 + t.ndim)), device="meta"), *args[1:]).shape
        return list(places).index(dim + 2)
    if name == "einsum" and isinstance(args[0], str):
        return _contracted(args[0], args[1:], t, dim)
    if name in _PRODUCTS and len(args) == 2 and min(args[0].ndim, args[1].ndim) > 1:
        summed = t.ndim - 1 if t is args[0] else t.ndim - 2
        return _over(t, dim) if dim == summed else out.ndim - t.ndim + dim
    if name in _PIECES:
        return _pieces(name, args, t, dim)
    if name == "__getitem__":
        return _indexed(args[1], t, dim)
    return None


def _contracted(equation: str, operands: Sequence[Any], t: Tensor, dim: int) -> Tag:
    subscripts, arrow, result = equation.replace(" ", "").partition("->")
    if "." in equation or not arrow:
        return None
    letters = next((s for s, o in zip(subscripts.split(","), operands, strict=False) if o is t), None)
    if letters is None:
        return None
    return result.index(letters[dim]) if letters[dim] in result else _over(t, dim)


def _pieces(name: str, args: tuple, t: Tensor, dim: int) -> Tag:
    """After tensors were taken apart along a dimension, or put together along one."""
    if name in ("stack", "cat", "concat"):
        along = args[1] if len(args) > 1 else 0
        if name == "stack":
            return dim + (along % (t.ndim + 1) <= dim)
        return None if along % t.ndim == dim else dim
    if name in ("select", "narrow"):
        along = args[1] % t.ndim
    else:
        place = 1 if name == "unbind" else 2
        along = (args[place] if len(args) > place else 0) % t.ndim
    if along == dim:
        return None
    return dim - (along < dim) if name in ("unbind", "select") else dim


def _indexed(index: Any, t: Tensor, dim: int) -> Tag:
    """After an index of numbers, slices, None and ...; None if it touches the dimension itself."""
    index = index if isinstance(index, tuple) else (index,)
    if not all(k is None or k is Ellipsis or type(k) in (int, slice) for k in index):
        return None
    used = sum(k is not None and k is not Ellipsis for k in index)
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index = (*index[:at], *[slice(None)] * (t.ndim - used), *index[at + 1 :])
    index = (*index, *[slice(None)] * (t.ndim - sum(k is not None for k in index)))
    source = place = 0
    for k in index:
        if k is None:
            place += 1
            continue
        if source == dim:
            return place if k == slice(None) else None
        source, place = source + 1, place + (type(k) is slice)
    return None


def _reduced(name: str, args: tuple, kwargs: dict, t: Tensor, dim: int, out: Tensor) -> Tag:
    if not t.is_floating_point() and name not in _COUNTS:  # an order or offsets, made from lengths, are no statistics
        return None
    position = 2 if name in _SECOND else 1
    over = kwargs.get("dim", kwargs.get("axis", args[position] if len(args) > position else None))
    if over is None:
        over = t.ndim - 1 if name in _LAST else 1 if name == "normalize" else None
    if isinstance(over, Tensor):  # max(input, other)
        return dim if out.shape == t.shape else None
    if over is None:
        return _over(t, dim)
    dims = {d % t.ndim for d in ((over,) if isinstance(over, int) else over)} or set(range(t.ndim))
    if dim in dims:
        return _over(t, dim)
    return dim - sum(d < dim for d in dims) if out.ndim < t.ndim else dim


def _over(t: Tensor, dim: int) -> Tag:
    return Mixed(frozenset({t.shape[dim]})) if t.shape[dim] > 1 else None
