"""Batch statistics that no gradient shows: where the batch dimension goes, as far as ordinary ops tell.

The measured layouts find every op that mixes samples on the way of a gradient. A mean over the batch of an
input, or one that is detached, lies on no such way, and still makes a sample's loss depend on the others.
So the dimension of the model's main input is followed through ops that keep it, and what is computed over
it is remembered as mixed. Where the dimension is lost from sight nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

Tag = int | str | None  # the dimension of the samples, "mixed", or nothing known

_OVER = set(
    """
    mean sum std var std_mean var_mean amax amin max min median nanmedian norm vector_norm logsumexp prod softmax
    log_softmax cumsum cumprod sort topk nanmean nansum quantile aminmax normalize
    """.split()
)
_SECOND = {"norm", "vector_norm", "quantile", "topk", "normalize"}  # the dimension comes third
_LAST = {"sort", "topk"}  # the last dimension unless another is named
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
    if first is None or not first.is_floating_point():
        return None
    if any(tag == "mixed" for _, tag in tagged):
        return "mixed"
    name = getattr(func, "__name__", "")
    t, dim = tagged[0]
    assert isinstance(dim, int)
    if name in _OVER and t is args[0]:
        return _reduced(name, args, kwargs, t, dim, first)
    if name in _SAME and first.ndim >= t.ndim:
        return dim
    if name in _BINARY:
        from_right = {s.ndim - k for s, k in tagged if isinstance(k, int)}
        return first.ndim - from_right.pop() if len(from_right) == 1 else None
    if name in _TURNS:
        return _turned(name, args, kwargs, t, dim)
    if name in _SHAPES and dim == 0 and first.ndim and first.shape[0] == t.shape[0]:
        return 0
    return None


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


def _reduced(name: str, args: tuple, kwargs: dict, t: Tensor, dim: int, out: Tensor) -> Tag:
    if not t.is_floating_point():
        return None
    position = 2 if name in _SECOND else 1
    over = kwargs.get("dim", kwargs.get("axis", args[position] if len(args) > position else None))
    if over is None:
        over = t.ndim - 1 if name in _LAST else 1 if name == "normalize" else None
    if isinstance(over, Tensor):  # max(input, other)
        return dim if out.shape == t.shape else None
    if over is None:
        return "mixed" if t.shape[dim] > 1 else None
    dims = {d % t.ndim for d in ((over,) if isinstance(over, int) else over)} or set(range(t.ndim))
    if dim in dims:
        return "mixed" if t.shape[dim] > 1 else None
    return dim - sum(d < dim for d in dims) if out.ndim < t.ndim else dim
