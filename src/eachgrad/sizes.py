"""One graph for batches of any size, from the graphs of three sizes.

A step is planned, traced and tidied for a size that is a number: what decides a route or a kernel is known. Steps that were
traced for other sizes are the same ops, and where their numbers differ (the shape of a view, the end of a range) they are so
much for each sample, and so much beside. That is a graph for every size, which a compiler takes with the size left open.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from eachgrad.kernels import signals  # noqa: F401  (its op)


class NotAlike(Exception):
    """The graphs of two sizes are not one, for this reason."""


def resized(args: Sequence[Any], dims: Mapping[int, int], size: int) -> tuple:
    """The arguments for so many samples, the last one repeated; `dims`: which have samples, and along which dimension.

    A number among them is that of the samples: no other is left open.
    """
    before = {args[k].shape[dim] for k, dim in dims.items()}
    if any(type(a) is int and {a} != before for a in args):
        raise NotAlike("another number than that of the samples may be any")
    found = [size if type(a) is int else a for a in args]
    for k, dim in dims.items():
        index = torch.arange(size, device=args[k].device).clamp(max=args[k].shape[dim] - 1)
        found[k] = args[k].index_select(dim, index)
    return tuple(found)


def of_any_size(graphs: Mapping[int, GraphModule], given: tuple[int, int]) -> GraphModule:
    """The graph that all of `graphs` are, traced for so many samples, whatever their number is.

    Three are enough to see whether a number has so much for each sample. When the graph runs, it reads the number of samples
    off an argument: `given` is its place, and the dimension that they lie along.
    """
    sizes, modules = tuple(graphs), tuple(graphs.values())
    found = _Found(sizes)
    each = [list(gm.graph.nodes) for gm in modules]
    if len({len(nodes) for nodes in each}) > 1:
        raise NotAlike(found.told([f"{len(nodes)} ops" for nodes in each]))
    for nodes in zip(*each, strict=True):
        if any(node.op != nodes[0].op for node in nodes) or not _same([*map(_target, nodes, modules)]):
            raise NotAlike(found.told([node.target for node in nodes]))
        found.add(nodes, given)
    return GraphModule(modules[0], found.graph)


class _Found:
    """The graph of any size, as far as it is found."""

    def __init__(self, sizes: tuple[int, ...]):
        self.sizes, self.graph = sizes, Graph()
        self._size: Node | None = None  # the samples that the graph is given
        self._made: dict[tuple[Node, ...], Node] = {}
        self._arguments: list[Node] = []
        self._numbers: dict[tuple[int, int], Node] = {}

    def add(self, nodes: tuple[Node, ...], given: tuple[int, int]) -> None:
        """The node that these are."""
        first = nodes[0]
        if first.op != "placeholder" and self._size is None:
            self._size = self.graph.call_function(torch.ops.aten.sym_size.int, (self._arguments[given[0]], given[1]))
        args, kwargs = [node.args for node in nodes], [node.kwargs for node in nodes]
        if first.target is torch.ops.eachgrad.signal.default:  # each has a slot of its own: the first one's counts
            args = [(*some[:2], *first.args[2:]) for some in args]
        made = self.graph.create_node(first.op, first.target, self._one(args), self._one(kwargs), first.name)
        self._made[nodes] = made
        if first.op == "placeholder":
            self._arguments.append(made)

    def _one(self, values: Sequence[Any]) -> Any:
        """What an op is given in each graph, as one for the graph that they are."""
        first, alike = values[0], len({type(value) for value in values}) == 1
        if alike and isinstance(first, Node) and tuple(values) in self._made:
            return self._made[tuple(values)]
        if alike and isinstance(first, (tuple, list)) and len({len(value) for value in values}) == 1:
            return type(first)([self._one(some) for some in zip(*values, strict=True)])
        if alike and isinstance(first, dict) and all(value.keys() == first.keys() for value in values):
            return {key: self._one([value[key] for value in values]) for key in first}
        if alike and isinstance(first, slice):
            return slice(*self._one([(value.start, value.stop, value.step) for value in values]))
        if alike and not isinstance(first, (Node, tuple, list, dict)) and _same(values):
            return first
        if alike and type(first) is int:
            return self._number(values)
        raise NotAlike(self.told(values))

    def _number(self, values: Sequence[int]) -> Node:
        """What is so much for each sample, and so much beside."""
        each = (values[1] - values[0]) // (self.sizes[1] - self.sizes[0])
        beside = values[0] - each * self.sizes[0]
        if any(each * size + beside != value for size, value in zip(self.sizes, values, strict=True)):
            raise NotAlike(self.told(values))
        if (each, beside) not in self._numbers:
            assert self._size is not None
            found = self._size if each == 1 else self.graph.call_function(operator.mul, (self._size, each))
            found = found if not beside else self.graph.call_function(operator.add, (found, beside))
            self._numbers[each, beside] = found
        return self._numbers[each, beside]

    def told(self, values: Sequence[Any]) -> str:
        return ", ".join(f"{value} for {size} samples" for size, value in zip(self.sizes, values, strict=True))


def _same(values: Sequence[Any]) -> bool:
    return all(value == values[0] or (value != value and values[0] != values[0]) for value in values)


def _target(node: Node, gm: GraphModule) -> Any:
    """What a node calls; constants are compared by what they are."""
    if node.op in ("placeholder", "output"):
        return node.op
    if node.op != "get_attr":
        return node.target
    value = operator.attrgetter(str(node.target))(gm)
    return (value.dtype, value.device, value.shape, value.tolist()) if isinstance(value, Tensor) else value


def others(size: int, unit: int) -> tuple[int, int]:
    """Two other sizes to trace: near ones, as what is computed again is chosen by bytes, of which not all are samples'."""
    return size + unit, size + 3 * unit
