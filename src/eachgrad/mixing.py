"""Samples that meet where no gradient shows it: whose each tensor is, as far as ordinary ops tell.

The measured layouts find every op that mixes samples on the way of a gradient. A mean over the batch of an input, or
one that is detached, lies on no such way, and still makes a sample's loss depend on the others; so does `x - x[0]`.
So the samples of the model's inputs are followed through the ops that are known here (`tags.py` says as what), and
where several come together this is remembered. Where they are lost from sight nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from eachgrad import meets, moves
from eachgrad.tags import (
    Loose,
    Mixed,
    Owners,
    Tag,
    Tagged,
    name_of,
)

# What a rule may raise for a call that it has not foreseen: nothing is claimed then. The tests let it through.
UNFORESEEN: tuple[type[Exception], ...] = (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError)


def follow(func: Callable, args: tuple, kwargs: dict, out: Any, tagged: Tagged) -> Tag | list[Tag]:
    """What `out` is, given the tags of the op's arguments; a list for an op that returns several tensors."""
    first = out
    if not isinstance(out, Tensor):
        first = next((t for t in out if isinstance(t, Tensor)), None) if isinstance(out, (tuple, list)) else None
        if first is None:
            return None
    known: Any = tagged
    loose = 0
    for _, tag in tagged:
        kind = type(tag)
        if kind is Mixed:
            return _after_mixed(func, args, kwargs, out, first, tagged)
        if kind is Loose:
            loose += 1
    rule = _rule(func)
    if rule is None:
        return None
    all_loose = loose == len(known)
    if loose and not all_loose:
        known = [(t, tag) for t, tag in known if type(tag) is not Loose]
    try:
        found = rule(func, args, kwargs, out, first, known)
    except UNFORESEEN:
        return None
    return _loosened(found) if all_loose else found


class Found(dict[Hashable, Tag | list[Tag]]):
    """Tags that were found before: a model asks the same at every step, and most is said faster than it is found again.

    None among them stands for samples that were lost from sight, and a list for an op that returns several tensors.
    """

    # So many, and so many elements of all their tables, 8 MiB: what an op that is not remembered made is not asked for again.
    calls, elements = 4096, 1 << 20
    held = 0

    def keep(self, key: Hashable, tag: Tag | list[Tag], elements: int) -> None:
        """The tag of a call whose tables have so many elements, unless they are too much of what there is room for."""
        if elements > self.elements // 16:
            return
        if len(self) >= self.calls or self.held + elements > self.elements:
            self.clear()
            self.held = 0
        self.held += elements
        self[key] = tag


FOUND = Found()


def key_of(func: Callable, call: Hashable, tags: Sequence[Tag], out: Tensor | tuple | list) -> Hashable:
    """A call whose tensors have these tags, None where one has none. `call`: its arguments as `signature.looked_at` has them.

    A table of owners stands for itself: it is never changed, and the same call has made the same one.
    """
    size = len(out) if isinstance(out, (tuple, list)) else out.shape
    return func, call, tuple([(Loose, tag) if type(tag) is Loose else tag for tag in tags]), size


def remember(
    key: Hashable, func: Callable, given: Sequence[Tensor], tags: Sequence[Tag], found: Tag | list[Tag]
) -> bool:
    """To be asked by `FOUND[key]`, where no tensor's values have a part in it, and nothing is to be said of the place.

    Returns whether that is so.
    """
    every = [*(found if isinstance(found, list) else [found]), *tags]
    if not all(tag is None or _is_plain(tag) for tag in every):
        return False
    rule = _rule(func)
    # A number may be a gate that is shut, a row, a dimension; of a mask nothing is asked unless samples have met.
    if rule not in _BY_SHAPES or any(t.numel() == 1 for t in given) or (rule is moves.viewed and len(given) > 1):
        return False
    FOUND.keep(key, found, sum(tag.table.numel() for tag in every if isinstance(tag, Owners)))
    return True


def _is_plain(tag: Tag) -> bool:
    return isinstance(tag, int) or (isinstance(tag, Owners) and not tag.several)


def _loosened(tag: Tag | list[Tag]) -> Tag | list[Tag]:
    """Of an input that may have no samples nothing is said but where they would lie, and what was taken over them."""
    if isinstance(tag, list):
        return [_loosened(each) for each in tag]  # pyright: ignore[reportReturnType]
    return Loose(tag) if isinstance(tag, int) else None if isinstance(tag, Owners) else tag


def _after_mixed(func: Callable, args: tuple, kwargs: dict, out: Any, first: Tensor, tagged: Tagged) -> Tag | list[Tag]:
    name = name_of(func)
    if name in _BLANK:
        return None
    mixed = [tag for _, tag in tagged if isinstance(tag, Mixed)]
    sizes = frozenset().union(*(tag.sizes for tag in mixed))
    hard = [tag for tag in mixed if not tag.places]
    if hard:
        return Mixed(sizes, hard[0].what)
    if name in _COMPUTES and (first.is_floating_point() or name not in _COMPARES):
        return Mixed(sizes, mixed[0].what, places=not first.is_floating_point())
    if isinstance(tagged[0][1], Mixed) and args and tagged[0][0] is args[0] and (name in _VIEWS or name == "argsort"):
        return Mixed(sizes, mixed[0].what, places=True)
    rest = [(t, tag) for t, tag in tagged if not isinstance(tag, Mixed)]
    return follow(func, args, kwargs, out, rest) if rest else None


def _words(text: str) -> set[str]:
    """Names of ops, with those that work in place."""
    return {form for name in text.split() for form in ((name,) if name[0] == "_" else (name, name + "_"))}


_COMPARES = _words("gt lt ge le eq ne logical_and logical_or logical_not logical_xor isnan isinf isfinite __and__ __or__ "
    "__invert__ __xor__ __eq__ __ne__ __lt__ __gt__ __le__ __ge__ bitwise_and bitwise_or bitwise_not isclose less greater "
    "less_equal greater_equal not_equal bool")  # fmt: skip
_COMPUTES = _COMPARES | _words(
    """
    relu relu6 gelu silu sigmoid tanh exp exp2 expm1 log log2 log10 log1p abs neg negative sqrt rsqrt pow square clone
    contiguous to cpu cuda float double half bfloat16 int long type detach clamp clamp_min clamp_max clip softplus
    leaky_relu elu selu celu sin cos tan atan asin acos sinh cosh dropout alpha_dropout sign sgn round floor ceil trunc frac
    hardtanh hardswish hardsigmoid hardshrink softshrink softsign logsigmoid mish nan_to_num erf erfc erfinv reciprocal
    type_as requires_grad threshold prelu rrelu logit positive absolute fake_quantize_per_tensor_affine quantize_per_tensor
    dequantize sinc real imag conj angle digamma lgamma bernoulli add sub mul div maximum minimum fmax fmin where lerp
    addcmul addcdiv remainder fmod floor_divide true_divide subtract multiply divide rsub atan2 hypot xlogy logaddexp
    masked_fill __radd__ __rsub__ __rmul__ __rtruediv__ __rdiv__ __add__ __sub__ __mul__ __truediv__ __iadd__ __isub__
    __imul__ __itruediv__ __pow__ __rpow__ __ipow__ __floordiv__ __rfloordiv__ __mod__ __rmod__ __neg__ __abs__
    mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits ldexp copysign heaviside
    """
)
_BLANK = set(
    """
    zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_empty new_full
    new_tensor arange zeros ones full empty grad backward
    """.split()
)
_VIEWS = set(
    """
    select narrow unbind chunk split split_with_sizes tensor_split hsplit vsplit dsplit expand expand_as broadcast_to
    unsqueeze unsqueeze_ squeeze squeeze_ transpose transpose_ swapaxes swapdims t permute movedim moveaxis diagonal unfold
    mT mH T H adjoint view_as_real atleast_2d atleast_3d unflatten flatten view reshape view_as reshape_as ravel __getitem__
    rot90
    """.split()
)
_SAME_ATTRIBUTES = {getattr(torch.Tensor, name).__get__ for name in ("data", "real", "imag")}


@cache
def _rule(func: Callable) -> Callable[..., Any] | None:
    name = name_of(func)
    if func is torch.nn.functional.unfold:
        return None
    if name == "__get__":
        return moves.viewed if func in moves.TURNED else meets.elementwise if func in _SAME_ATTRIBUTES else None
    if name in _COMPUTES:
        return meets.chosen if name == "where" else meets.elementwise
    if name in _VIEWS:
        return moves.indexed if name == "__getitem__" else moves.viewed
    return _RULES.get(name.removesuffix("_") if not name.endswith("__") else name)


# Whose answers depend on shapes, options and owners alone.
_BY_SHAPES = {meets.elementwise, meets.by_rows, meets.attended, moves.viewed, moves.put_together}


def _named(rule: Callable, names: str) -> dict[str, Callable]:
    return dict.fromkeys(names.split(), rule)


_RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(meets.OVER, meets.reduced),
    **_named(moves.picked, "flip roll repeat_interleave index_select"),
    **_named(moves.repeated, "repeat tile"),
    **_named(moves.gathered, "gather take_along_dim"),
    **_named(moves.put_together, "cat concat concatenate stack"),
    **_named(moves.added_at, "index_add index_copy"),
    **_named(moves.found, "nonzero argwhere"),
    **_named(moves.appended, "embedding one_hot"),
    **_named(meets.products, "matmul __matmul__ __rmatmul__ bmm mm mv dot addmm baddbmm"),
    **_named(meets.compared, "cdist outer ger cov corrcoef cosine_similarity pairwise_distance"),
    **_named(meets.by_rows, "linear layer_norm rms_norm group_norm instance_norm batch_norm conv1d conv2d conv3d max_pool1d "
        "max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
        "adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d conv_transpose1d conv_transpose2d interpolate"),
    **_named(meets.decomposed, "svd linalg_svd linalg_svdvals qr linalg_qr linalg_eigh linalg_eigvalsh linalg_inv inverse "
        "pinverse linalg_pinv linalg_cholesky linalg_solve linalg_det det linalg_slogdet slogdet logdet matrix_exp trace"),
    **_named(moves.left, "tril triu"),
    "einsum": meets.contracted, "scaled_dot_product_attention": meets.attended, "pad": moves.padded, "copy": meets.copied,
}  # fmt: skip
