"""The autograd graph, and the tensors in nested arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_map

Node = Any  # torch.autograd.graph.Node


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    _collect((value,), found)
    return found


def tensors_of(args: tuple, kwargs: dict) -> list[Tensor]:
    """Every tensor among the arguments of a call, as `tensors_in` finds them."""
    found: list[Tensor] = []
    _collect(args, found)
    if kwargs:
        _collect(kwargs.values(), found)
    return found


_PLAIN = {int, float, bool, str, type(None)}
_SINGLE = {*_PLAIN, Tensor, nn.Parameter}


def _collect(values: Iterable[Any], found: list[Tensor]) -> None:
    # Called for every op of a forward: one call per container, and no test for what is plainly no tensor.
    for value in values:
        if type(value) in _PLAIN:
            continue
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            _collect(value, found)
        elif isinstance(value, dict) and value:
            _collect(value.values(), found)


def mapped(f: Callable[[Tensor], Any], value: Any) -> Any:
    """`f` of every tensor in nested tuples, lists and dicts: tree_map without its registry, ten times as fast."""
    if isinstance(value, Tensor):
        return f(value)
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([mapped(f, item) for item in value])
    if kind is dict:
        return {key: mapped(f, item) for key, item in value.items()}
    if isinstance(value, (tuple, list, dict)):  # named tuples and the like
        return tree_map(lambda t: f(t) if isinstance(t, Tensor) else t, value)
    return value


def replace(value: Any, new: dict[int, Tensor]) -> Any:
    """The value with each tensor of `new`, by id, in place of another."""
    kind = type(value)
    if kind is tuple or kind is list:  # `mapped` written out, with a look at what holds no tensor but itself
        return kind([new.get(id(item), item) if type(item) in _SINGLE else replace(item, new) for item in value])
    if isinstance(value, Tensor):
        return new.get(id(value), value)
    return mapped(lambda t: new.get(id(t), t), value)


def graph_nodes(roots: list[Node]) -> Iterator[Node]:
    """Every node of the autograd graph below `roots`."""
    seen: set[Node] = set()
    stack = [root for root in roots if root is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                stack.append(below)


def edges_below(t: Tensor) -> set[tuple[Node, int]]:
    """Every (node, output) that `t` was computed from."""
    return {edge for node in graph_nodes([t.grad_fn]) for edge in node.next_functions}


def edge_at(t: Tensor) -> GradientEdge:
    """torch's `get_gradient_edge`, for half the price where a node of C++ has made `t`."""
    node = t.grad_fn
    if node is None or isinstance(node, torch._C._FunctionBase):  # a node of Python needs a token of C++ to live on
        return get_gradient_edge(t)
    return GradientEdge(node, t.output_nr)


def edge_of(t: Tensor) -> tuple[Node, int]:
    """The node that delivers the gradient of `t`, and which of its outputs `t` is."""
    return node_of(t), t.output_nr


@dataclass(frozen=True, eq=False)
class Carried:
    """A tensor that is known by its place in the graph alone."""

    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype

    @property
    def grad_fn(self) -> Node:
        return self.edge.node


def source_at(node: Node, output: int) -> Tensor | Carried:
    """The leaf that is reached here, or what stands for the tensor."""
    variable = getattr(node, "variable", None)
    if variable is not None:
        return variable
    like = node._input_metadata[output]
    return Carried(GradientEdge(node, output), torch.Size(like.shape), like.dtype)


def node_of(t: Tensor | Carried) -> Node:
    """The node that delivers the gradient of `t`: its own, or its accumulator if it is a leaf."""
    return t.grad_fn if isinstance(t, Carried) else get_gradient_edge(t).node


def depends(out: Any, sources: list[Tensor]) -> bool:
    """Whether a gradient would flow from the output of an op to one of these tensors."""
    wanted = {node_of(t) for t in sources}
    return any(node in wanted for t in tensors_in(out) if t.requires_grad for node in graph_nodes([t.grad_fn]))


_unsafe_view = torch.ops.aten._unsafe_view.default  # to look for the overload takes a third of the time


def same(t: Tensor) -> Tensor:
    """`t` by another name, with a node of its own; not a view, so that what happens to `t` later is apart."""
    return _unsafe_view(t, t.shape)


def own_history(out: Tensor) -> Tensor:
    """`out` again, as a tensor that may be changed in place without moving the tap."""
    if _saves_its_result(type(out.grad_fn), out.output_nr):
        return out.clone()  # its own op needs the values for its backward
    return same(out)


@cache
def _saves_its_result(node: type, output: int) -> bool:
    # Of several results the number says which: a norm keeps its statistics, 1 and 2, and not its output, which is 0.
    return any(hasattr(node, name) for name in ("_saved_result", f"_saved_result{output}"))


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """`model.named_modules()`, in its order, for a quarter of the price: its generators are one for each level."""
    found: dict[nn.Module, str] = {}
    stack: list[tuple[str, nn.Module]] = [("", model)]
    while stack:
        name, module = stack.pop()
        if type(module).named_modules is not nn.Module.named_modules:
            return dict(model.named_modules())
        if module not in found:
            found[module] = name
            below = [(f"{name}.{part}" if name else part, m) for part, m in module._modules.items() if m is not None]
            stack += reversed(below)
    return {name: module for module, name in found.items()}


def named_trainable(model: nn.Module, modules: Mapping[str, nn.Module] | None = None) -> dict[str, nn.Parameter]:
    """The parameters that are trained, as `model.named_parameters()` names them; `modules`: as `modules_of` has them."""
    if type(model).named_parameters is not nn.Module.named_parameters:
        return {name: p for name, p in model.named_parameters() if p.requires_grad}
    seen, found = set[nn.Parameter](), dict[str, nn.Parameter]()
    for prefix, module in (modules_of(model) if modules is None else modules).items():
        for name, p in module._parameters.items():
            if p is not None and p.requires_grad and p not in seen:
                seen.add(p)
                found[f"{prefix}.{name}" if prefix else name] = p
    return found
