"""A forward in float32, by which one in sixteen bits is judged: rounding alone may be a quarter of an answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.node import map_aggregate

from eachgrad.dtypes import SIXTEEN_BITS
from eachgrad.functions import without_autocast


def in_float32(gm: GraphModule) -> GraphModule:
    """The graph of a forward with autocast off, and float32 wherever it makes numbers of sixteen bits."""
    found = GraphModule(gm, deepcopy(gm.graph))
    for node in found.graph.nodes:
        if node.target is torch.amp.autocast_mode._enter_autocast:
            kind, dtype, _, cache = node.args
            node.args = kind, dtype, False, cache
        elif node.op == "call_method" and node.target in ("half", "bfloat16"):
            node.target = "float"
        else:
            node.args, node.kwargs = map_aggregate((node.args, node.kwargs), _wide)  # type: ignore[misc]
    found.recompile()
    return found


def _wide(value: Any) -> Any:
    return torch.float32 if isinstance(value, torch.dtype) and value in SIXTEEN_BITS else value


def widened(args: tuple) -> tuple:
    """The arguments, with float32 for numbers of sixteen bits."""
    return tuple(_widened(a) for a in args)


def _widened(a: Any) -> Any:
    return a.detach().float() if isinstance(a, Tensor) and a.dtype in SIXTEEN_BITS else a


@contextmanager
def all_bits() -> Iterator[None]:
    """While this lasts, products of float32 have all of its bits, and nothing is cast."""
    own: Any = torch.backends
    each = [own.cuda.matmul, own.cudnn.conv, own.cudnn.rnn, own.mkldnn.matmul, own.mkldnn.conv, own.mkldnn.rnn]
    # One by one: the settings for all of them cannot be read back where these differ.
    before = [(part, part.fp32_precision) for part in each if part.fp32_precision not in ("none", "ieee")]
    for part, _ in before:
        part.fp32_precision = "ieee"
    try:
        with without_autocast():
            yield
    finally:
        for part, value in before:
            part.fp32_precision = value
