"""Matrices whose rows are no multiple of sixteen bytes, padded once in a traced step, where they are made.

A GPU multiplies such matrices several times as slowly, so that the compiler pads them, for each product anew: for a head
of 50257 tokens, the gradient of the logits was written three times, 3.6 GB in 2.6 ms on an H200. Padded in the graph, it
is written once, by the kernel that computes it, and all products read that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

from eachgrad import plan
from eachgrad.dtypes import SIXTEEN_BITS
from eachgrad.kernels import entropy  # noqa: F401  (its op)
from eachgrad.tidy import call, loosen

aten = torch.ops.aten

LARGE = 1 << 20  # numbers of a matrix that is worth it
_PRODUCTS = {aten.mm.default, aten.mm.dtype, aten.bmm.default, aten.bmm.dtype}
_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
_TURNS = {aten.t.default, aten.transpose.int, aten.permute.default}
_SAME = {*_VIEWS, aten.expand.default, aten.detach.default}

FILLED = "filled"  # in the meta of a node that cuts zeros off the end of its source's rows, which are aligned with them


def is_slow(value: Tensor) -> bool:
    """Whether a product with this matrix is slow unless its rows are a multiple of sixteen bytes long, and as far apart."""
    return value.is_cuda and value.dtype in SIXTEEN_BITS and value.numel() >= LARGE


def align(graph: Graph, slow: Callable[[Tensor], bool] = is_slow) -> int:
    """Rewrite the products of a traced graph whose operands are not aligned; how many there were."""
    heads = _heads(graph, slow)
    products = [n for n in graph.nodes if n.target in _PRODUCTS and (n in heads or any(_unaligned(n, slow)))]
    if not products:
        return 0
    loosen(graph)
    padding = _Padding(graph)
    for node in products:
        left, right = _unaligned(node, slow)
        if node in heads:
            right.add(-1)
        if left or right:  # not so, if what it reads was padded meanwhile
            padding.align(node, left, right)
    graph.eliminate_dead_code()
    return len(products)


def _heads(graph: Graph, slow: Callable[[Tensor], bool]) -> set[Node]:
    """The products that are logits of cross entropies, in rows of other lengths: gradients are to be written over them."""
    found = set[Node]()
    for node in graph.nodes:
        if node.target is torch.ops.eachgrad.entropies.default:
            logits = cast(Node, node.args[0])
            while logits.target in _SAME and _ends_alike(logits, cast(Node, logits.args[0])):
                logits = cast(Node, logits.args[0])
            if logits.target in _PRODUCTS and slow(_value(logits)) and _value(logits).shape[-1] % plan.ALIGNED:
                found.add(logits)
    return found


def _value(node: Node) -> Tensor:
    return node.meta["val"]


def _rows(value: Tensor) -> int | None:
    """The dimension, of the last two, along which a matrix lies in memory without gaps."""
    return next((dim for dim in (-1, -2) if value.stride(dim) == 1 and value.shape[dim] > 1), None)


def _unaligned(product: Node, slow: Callable[[Tensor], bool]) -> tuple[set[int], set[int]]:
    """The dimensions of both operands along which rows are to be made longer."""
    return tuple(set(_odd(operand, slow)) for operand in product.args[:2])  # type: ignore[return-value]


def _odd(operand: Any, slow: Callable[[Tensor], bool]) -> Iterator[int]:
    value = operand.meta.get("val") if isinstance(operand, Node) else None
    if isinstance(value, Tensor) and slow(value):
        dim = _rows(value)
        if dim is not None and (value.stride(-3 - dim) % plan.ALIGNED or value.shape[dim] % plan.ALIGNED):
            yield dim


@dataclass
class _Padding:
    graph: Graph
    made: dict[tuple[Node, int], Node] = field(default_factory=dict)

    def align(self, node: Node, left: set[int], right: set[int]) -> None:
        """Rewrite one product, whose operands are to be padded along these dimensions."""
        if -1 in left or -2 in right:  # what is summed over is padded in both
            left, right = left | {-1}, right | {-2}
        operands = cast(list[Node], list(node.args[:2]))
        for k, dims in enumerate((left, right)):
            for dim in sorted(dims):
                operands[k] = self.padded(operands[k], dim)
        self._replace(node, operands, rows=-2 in left, columns=-1 in right)

    def _replace(self, node: Node, operands: list[Node], rows: bool, columns: bool) -> None:
        shape = _value(node).shape
        value = self._call(node, node.target, *operands, *node.args[2:], **node.kwargs)
        for wanted, dim in ((rows, len(shape) - 2), (columns, len(shape) - 1)):
            if wanted:
                value = self._call(value, aten.slice.Tensor, value, dim, 0, shape[dim])
        value.meta["stride"] = node.meta.get("stride")  # as it lay
        node.replace_all_uses_with(value)

    def _call(self, after: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        while after.op == "placeholder" and after.next.op == "placeholder":  # which all come first
            after = after.next
        with self.graph.inserting_after(after):
            return call(self.graph, target, *args, **kwargs)

    def padded(self, node: Node, dim: int) -> Node:
        """The node with zeros after the end of a dimension, the last or the last but one."""
        node = _plain(node)
        if (node, dim) not in self.made:
            self.made[node, dim] = self._padded(node, dim)
        return self.made[node, dim]

    def _padded(self, node: Node, dim: int) -> Node:
        value, source = _value(node), _source(node)
        if source is not None and node.target in _TURNS:
            place = _origin(node, dim) - value.ndim
            if place >= -2:
                return self._again(node, self.padded(source, place), *node.args[1:])
        if source is not None and node.target in _VIEWS and dim == -1 and _ends_alike(source, node):
            size = value.shape[-1] + -value.shape[-1] % plan.ALIGNED
            return self._again(node, self.padded(source, -1), [*value.shape[:-1], size])
        if source is not None and node.meta.get(FILLED) and dim == -1:
            return source
        shape = list(value.shape)
        shape[dim] = -shape[dim] % plan.ALIGNED
        # The compiler writes what it computes straight into its part of a concatenation, in the kernel where it is
        # computed; what is padded it computes again, in a kernel of its own: 2.4 ms for a head.
        zeros = self._call(node, aten.new_zeros.default, node, shape)
        return self._call(zeros, aten.cat.default, [node, zeros], value.ndim + dim)

    def _again(self, node: Node, source: Node, *arguments: Any) -> Node:
        """The same view of a padded source."""
        target: Any = aten.reshape.default if node.target in _VIEWS else node.target
        return self._call(node, target, source, *arguments)


def _source(node: Node) -> Node | None:
    """What a view is a view of, if that is a tensor whose shape is known."""
    found = node.args[0] if node.args else None
    return found if isinstance(found, Node) and isinstance(found.meta.get("val"), Tensor) else None


def _ends_alike(a: Node, b: Node) -> bool:
    return _value(a).ndim > 1 and _value(a).shape[-1] == _value(b).shape[-1]


def _plain(node: Node) -> Node:
    """The node itself, where this one is the same seen in the same shape."""
    source = _source(node)
    while source is not None and node.target in _SAME and _value(node).shape == _value(source).shape:
        node, source = source, _source(source)
    return node


def _origin(node: Node, dim: int) -> int:
    """Which dimension of a transposed node's source is its dimension `dim`."""
    n, arguments = _value(node).ndim, cast(Any, node.args[1:])
    if node.target == aten.permute.default:
        order = [k % n for k in arguments[0]]
    else:
        a, b = (0, 1) if node.target == aten.t.default else (k % n for k in arguments)
        order = list(range(n))
        order[a], order[b] = order[b], order[a]
    return order[dim]
