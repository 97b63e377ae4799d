"""What a forward and its loss have run: two runs with the same signature place their samples alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.parameter import is_lazy

from eachgrad.graph import Node, tensors_in, tensors_of

# Ops that move rows to where a tensor says; with such a tensor a forward has no signature.
_INDEXED = set(
    """
    __getitem__ __setitem__ index index_select gather take take_along_dim scatter scatter_add index_add index_copy index_put
    masked_select masked_scatter index_fill scatter_reduce index_reduce put select narrow slice repeat_interleave
    _pack_padded_sequence _pad_packed_sequence lstm gru rnn_tanh rnn_relu
    """.split()
)
_PLAIN = {int, float, bool, str, type(None)}
_OPTIONS = {bool, str, type(None), complex, torch.dtype, torch.device}
_LOOK_UPS = {"embedding", "embedding_bag"}
# Ops that bring samples together along a dimension, as they do not in a model whose samples have gradients of their
# own: with a factor that happens to be zero nothing shows, until it is not.
_MOVING = {"flip", "roll", "rot90", "fliplr", "flipud", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"}
_MOVING_NODES = ("Flip", "Roll", "Rot90", "Cum", "LogCumsumexp", "Mm", "Mv", "Addmm", "Addmv", "Dot", "Index", "Gather")
_PRODUCTS = {"einsum", "matmul", "__matmul__", "__rmatmul__", "mm", "mv", "addmm", "addmv", "dot", "vdot", "inner"}
_SUMMING = {"tensordot", "multi_dot", "chain_matmul", "addbmm", "vecdot", "bilinear", "cov", "corrcoef", "kron"}
_BATCHED = {"bmm", "baddbmm"}
_WEIGHTED = {"linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}
_BY_VALUE = {"sort", "argsort", "topk", "kthvalue", "unique", "nonzero", "msort"}
# All of these together: of any other op nothing but the call itself is looked at.
_CAREFUL = _INDEXED | _LOOK_UPS | _MOVING | _PRODUCTS | _SUMMING | _BATCHED | _WEIGHTED | _BY_VALUE


class Signature:
    """What a forward has run so far, as one number; None once it depends on data."""

    def __init__(self, of_batch: Callable[[Tensor], bool]) -> None:
        self.value: int | None = 0
        self._of_batch = of_batch
        self._trusting = False

    @contextmanager
    def trusting(self) -> Iterator[None]:
        """While a composite of the library runs: what it turns round lies along no batch."""
        before, self._trusting = self._trusting, True
        try:
            yield
        finally:
            self._trusting = before

    def note(self, *what: Hashable) -> None:
        """Something else that happened, as an op of its own."""
        if self.value is not None:
            self.value = hash((self.value, *what))

    def add(
        self, func: Callable, args: tuple, kwargs: dict, tensors: list[Tensor], numbers: tuple[int, ...],
        call: tuple[Hashable, Hashable] | None = None,
    ) -> None:  # fmt: skip
        """An op more; `numbers` says which tensors of the batch it is given: Python may put rows in any order.

        `tensors` and `call` are what `looked_at` has found.
        """
        if self.value is None:
            return
        name = _careful_name(func)
        if (call is None and _has_tensor_slices(args)) or (name and self._depends_on_data(func, name, args, tensors)):
            self.value = None
            return
        given, options = call or (_describe(args), _describe(kwargs) if kwargs else ())
        self.value = hash((self.value, func, given, options, numbers))

    def _depends_on_data(self, func: Callable, name: str, args: tuple, tensors: list[Tensor]) -> bool:
        """Whether values may decide where the op puts the samples."""
        if name in _WEIGHTED:  # most of those that are asked about
            return not self._trusting and self._adds_rows(func, name, args, tensors)
        indexed = name in _INDEXED and any(not t.is_floating_point() and not t.is_complex() for t in tensors)
        if name in _LOOK_UPS:  # of a parameter's rows it moves none of the batch
            indexed = not any(isinstance(t, nn.Parameter) for t in tensors)
        moving = name in _MOVING or self._adds_rows(func, name, args, tensors)
        return indexed or name in _BY_VALUE or (moving and not self._trusting)

    def _adds_rows(self, func: Callable, name: str, args: tuple, tensors: list[Tensor]) -> bool:
        """Whether the first dimension of something of the batch is added up: it may be that of the samples."""
        if name in _SUMMING:
            return any(map(self._counts, tensors))
        if name in _WEIGHTED:
            return len(args) > 1 and self._counts(args[1])
        if name not in _PRODUCTS and name not in _BATCHED:
            return False
        # A matrix that is made anew for each batch may be one that puts rows in order.
        if any(map(self._counts, tensors)) and any(map(self._is_made, tensors)):
            return True
        if name in _BATCHED:
            return False
        if func is torch.einsum and isinstance(args[0], str):
            subscripts, _, out = args[0].replace(" ", "").partition("->")
            pairs = zip(subscripts.split(","), args[1:], strict=False)
            return any(s[:1].isalpha() and s[0] not in out and self._counts(t) for s, t in pairs)
        right = args[0] if func is torch.Tensor.__rmatmul__ else args[-1]
        return self._counts(right) and right.ndim <= 2

    def _is_made(self, t: Tensor) -> bool:
        return not t.requires_grad and not isinstance(t, nn.Parameter) and t.ndim > 1 and not self._of_batch(t)

    def _counts(self, t: Any) -> bool:
        return isinstance(t, Tensor) and t.requires_grad and self._of_batch(t)


@lru_cache(maxsize=4096)  # a name is a function's own, and does not change
def _careful_name(func: Callable) -> str:
    """The name of an op without its overload, and without the underscore of what works in place; "" for most."""
    name = getattr(func, "__name__", "").partition(".")[0]
    name = name if name.endswith("__") else name.rstrip("_")
    return name if name in _CAREFUL else ""


def looked_at(args: tuple, kwargs: dict) -> tuple[list[Tensor], tuple[Hashable, Hashable] | None]:
    """The tensors among the arguments of a call, and the arguments as `_describe` has them, in one pass for every op.

    None instead of the latter where something else than tensors and plain values is given: a slice, a type of the user's.
    """
    found: list[Tensor] = []
    given: list[Hashable] = []
    options: list[Hashable] = []
    if _look(args, found, given) and (not kwargs or _look(kwargs.values(), found, options)):
        return found, (tuple(given), tuple(zip(kwargs, options, strict=True)) if kwargs else ())
    return tensors_of(args, kwargs), None


def _look(values: Iterable[Any], found: list[Tensor], described: list[Hashable]) -> bool:
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is nn.Parameter:
            found.append(value)
            described.append((value.shape, value.dtype))
        elif kind is int or kind is float:
            described.append(("minus", -value) if value == -1 or value == -2 else value)
        elif kind in _OPTIONS:
            described.append(value)
        elif kind is tuple or kind is list or kind is torch.Size:
            inner: list[Hashable] = []
            if not _look(value, found, inner):
                return False
            described.append(tuple(inner))
        else:
            return False
    return True


def _has_tensor_slices(args: tuple) -> bool:
    """Whether a tensor says where a slice begins or ends."""
    # Written out: it runs for every op.
    for item in args:
        if type(item) in _PLAIN:
            continue
        for k in item if isinstance(item, (tuple, list)) else (item,):
            if isinstance(k, slice) and tensors_in((k.start, k.stop, k.step)):
                return True
    return False


def of_graph(nodes: Sequence[Node], since: int) -> Hashable:
    """The nodes of a loss that were made after the recording, by name, sizes and options; None if data decides."""
    found, order = [], {node: n for n, node in enumerate(nodes)}
    for node in nodes:
        if node._sequence_nr() < since or node.name().endswith("AccumulateGrad"):
            continue
        described = _options(node)
        if described is None:
            return None
        edges = tuple((order.get(below, -1), output) for below, output in node.next_functions)
        found.append((node.name(), edges, *described))
    return tuple(found)


def _options(node: Node) -> tuple[Hashable, ...] | None:
    if isinstance(node, BackwardCFunction):  # written in Python: its options are not seen
        return None
    if node.name().startswith(_MOVING_NODES):  # may bring samples together, if values say so
        return None
    found: list[Hashable] = [tuple(m.shape) for m in node._input_metadata]
    for name in dir(type(node)):
        if not name.startswith("_saved_"):
            continue
        try:
            value = getattr(node, name)
        except RuntimeError:  # a tensor that was changed since: its values do not matter here
            continue
        tensors = tensors_in(value)
        if tensors and node.name().startswith("MaskedSelect"):  # the mask decides where the rows go
            return None
        if any(not t.is_floating_point() and not t.is_complex() and t.dtype != torch.bool for t in tensors):
            if not node.name().startswith("NllLoss"):  # whose classes move no sample
                return None
        elif not tensors:
            found.append((name, _describe(value)))
    return tuple(found)


def _describe(value: Any) -> Hashable:
    kind = type(value)
    if kind is Tensor or kind is nn.Parameter:  # most of what there is; a lazy one has a type of its own
        return value.shape, value.dtype
    if (kind is int or kind is float) and (value == -1 or value == -2):  # which have the same hash
        return "minus", -value
    if kind in _PLAIN:
        return value
    if kind is tuple:
        return tuple([_describe(item) for item in value])
    if isinstance(value, Tensor) and is_lazy(value):  # of a lazy module that is making its parameters
        return type(value).__name__, value.dtype
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(_describe(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _describe(item)) for key, item in value.items())
    if isinstance(value, slice):
        return "slice", _describe(value.start), _describe(value.stop), _describe(value.step)
    if value is None or isinstance(value, (int, float, str, bool, complex, torch.dtype, torch.device)):
        return value
    return repr(type(value)), repr(value)
