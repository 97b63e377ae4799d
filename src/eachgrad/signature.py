"""What a forward and its loss have run: two runs with the same signature place their samples alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from eachgrad.graph import Node, tensors_in

# Ops that move rows to where a tensor says; with such a tensor a forward has no signature.
_INDEXED = set(
    """
    __getitem__ __setitem__ index_select gather take take_along_dim scatter scatter_ scatter_add scatter_add_ index_add
    index_add_ index_copy index_copy_ index_put index_put_ masked_select masked_scatter index_fill scatter_reduce
    repeat_interleave _pack_padded_sequence _pad_packed_sequence lstm gru rnn_tanh rnn_relu
    """.split()
)
_LOOK_UPS = {"embedding", "embedding_bag"}
_BY_VALUE = {"sort", "argsort", "topk", "kthvalue", "unique", "nonzero", "msort"}


class Signature:
    """What a forward has run so far, as one number; None once it depends on data."""

    def __init__(self) -> None:
        self.value: int | None = 0

    def add(self, func: Callable, args: tuple, kwargs: dict, tensors: list[Tensor]) -> None:
        if self.value is None:
            return
        name = getattr(func, "__name__", "")
        indexed = name in _INDEXED and any(not t.is_floating_point() and not t.is_complex() for t in tensors)
        if name in _LOOK_UPS:  # of a parameter's rows it moves none of the batch
            indexed = not any(isinstance(t, nn.Parameter) for t in tensors)
        if indexed or name in _BY_VALUE:
            self.value = None
            return
        self.value = hash((self.value, func, _describe(args), _describe(kwargs)))


def of_graph(nodes: Sequence[Node], since: int) -> Hashable:
    """The nodes of a loss that were made after the recording, by name, sizes and options; None if data decides."""
    found = []
    for node in nodes:
        if node.name().endswith("AccumulateGrad") or node._sequence_nr() < since:
            continue
        described = _options(node)
        if described is None:
            return None
        found.append((node.name(), *described))
    return tuple(found)


def _options(node: Node) -> tuple[Hashable, ...] | None:
    if isinstance(node, BackwardCFunction):  # written in Python: its options are not seen
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
        if any(not t.is_floating_point() and not t.is_complex() and t.dtype != torch.bool for t in tensors):
            if not node.name().startswith("NllLoss"):  # whose classes move no sample
                return None
        elif not tensors:
            found.append((name, _describe(value)))
    return tuple(found)


def _describe(value: Any) -> Hashable:
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
