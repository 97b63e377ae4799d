"""What may be changed in a traced graph without changing a number; above all, nodes that are one tensor are made one.

A rule sees its op's input by another way than the op did: detached, with its samples moved to the front of it where they
were already. The compiler does not know these as one, and computes statistics of a norm a second time.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from eachgrad.dtypes import SIXTEEN_BITS
from eachgrad.kernels import norm_sums, positions  # noqa: F401  (their ops)

aten = torch.ops.aten


def changes(node: Node) -> bool:
    """Whether an op changes its arguments."""
    return changes_by(node.target)


def changes_by(target: Any) -> bool:
    return getattr(getattr(target, "_schema", None), "is_mutable", False)


def write_apart(graph: Graph) -> int:
    """Let ops that write into a tensor which nobody else reads return another one instead; how many.

    A norm of torch adds its epsilon so, and a graph that writes is left as it is by all that comes after this.
    """
    found, seen = 0, Counter()
    graph.eliminate_dead_code()  # a view that nobody reads is no reader
    for node in graph.nodes:
        other = _out_of_place(node, seen) if node.op == "call_function" and changes(node) else None
        if other is not None:
            node.target, node.meta["val"] = other
            found += 1
        seen.update(_memory(node))
    return found


def _memory(node: Node) -> list[int]:
    """The memory that a node's tensors lie in; the node holds on to it."""
    values = [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]
    return [value.untyped_storage()._cdata for value in values]


def _out_of_place(node: Node, seen: Counter[int]) -> tuple[Any, Tensor] | None:
    """The op that returns what this one writes into its first argument, a tensor made for it alone, and the result."""
    given, target = node.args[0] if node.args else None, cast(Any, node.target)
    if not isinstance(given, Node) or _written(node) != [given]:
        return None
    # It may be a view, of what is there for that view alone; one of several parts shares its memory with the others.
    reader, made_by, views = node, given, 1
    while list(made_by.users) == [reader] and (source := _viewed(made_by)) is not None:
        if made_by.target is aten.as_strided.default:  # numbers may lie in it twice
            return None
        reader, made_by, views = made_by, source, views + 1
    if made_by.op != "call_function" or list(made_by.users) != [reader] or [*map(seen.get, _memory(given))] != [views]:
        return None
    other = getattr(getattr(aten, target._opname.removesuffix("_"), None), target._overloadname, None)
    # A user's op is not torch's of that name, and neither are some of torch's own: pow_ of a number is pow by one.
    if target.namespace != "aten" or other is None or changes_by(other) or _given(other) != _given(target):
        return None
    args, kwargs = tree_map(lambda a: a.meta["val"] if isinstance(a, Node) else a, (node.args, node.kwargs))
    made, before = other(*args, **kwargs), node.meta["val"]
    same = made.shape == before.shape and made.dtype == before.dtype and made.stride() == before.stride()
    return (other, made) if same else None


def _given(target: Any) -> list[tuple[str, str]]:
    """The arguments of an op: their names and kinds."""
    return [(argument.name, str(argument.type)) for argument in target._schema.arguments]


def call(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A new node where the graph inserts now, with what is known of its tensor."""
    node = graph.call_function(target, args, kwargs)
    given, named = tree_map_only(Node, lambda a: a.meta["val"], (args, kwargs))
    node.meta["val"] = target(*given, **named)
    return node


def origins(graph: Graph) -> dict[Node, Node]:
    """The node whose memory each node is a view of, by what the ops say of themselves; most are their own.

    Two arguments are two, though they may have shared their memory when the graph was traced.
    """
    found: dict[Node, Node] = {}
    for node in graph.nodes:
        source = _viewed(node)
        found[node] = node if source is None else found[source]
    return found


def _viewed(node: Node) -> Node | None:
    """The argument that an op returns a view of, or returns."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or len(schema.returns) != 1:
        return None
    if node.target is aten._unsafe_view.default:  # a view by another name, of what nobody else holds
        return node.args[0]  # type: ignore[return-value]
    alias = schema.returns[0].alias_info
    if alias is None:
        return None
    for k, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.before_set == alias.before_set:
            given = node.args[k] if k < len(node.args) else node.kwargs.get(argument.name)
            return given if isinstance(given, Node) else None
    return None


def writes_into_arguments(graph: Graph) -> bool:
    """Whether an op changes what the graph was given, or a view of it."""
    found = origins(graph)
    given = {"placeholder", "get_attr"}
    return any(found[a].op in given for node in graph.nodes if changes(node) for a in _written(node))


def _written(node: Node) -> list[Node]:
    schema: Any = node.target._schema  # type: ignore[union-attr]
    found = []
    for k, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[k] if k < len(node.args) else node.kwargs.get(argument.name)
            found += [a for a in (given if isinstance(given, (list, tuple)) else [given]) if isinstance(a, Node)]
    return found


def merge(graph: Graph) -> int:
    """Replace nodes that view the same memory in the same way by the first of them; how many there were.

    The graph must not write into tensors.
    """
    first: dict[Any, Node] = {}
    origin, found = origins(graph), 0
    for node in graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or not all(isinstance(n, int) for n in (*value.shape, *value.stride())):
            continue  # or of a size that numbers decide
        same = first.setdefault((origin[node], *_place(value)), node)
        if same is not node and node.op == "call_function":
            node.replace_all_uses_with(same)
            found += 1
    graph.eliminate_dead_code()
    return found


def _place(value: Tensor) -> tuple:
    """Where a tensor lies: two views of one tensor with the same place are equal."""
    storage = value.untyped_storage()._cdata  # of a fake one, which the node holds on to
    flags = value.is_conj(), value.is_neg(), value.device, value.dtype
    return storage, value.storage_offset(), tuple(value.shape), value.stride(), *flags


def narrow(graph: Graph) -> int:
    """Let sums over positions read sixteen bits where these were made float32 for them alone; how many.

    They add in float32 whatever they read. A copy in float32 would be written and read: six bytes instead of two.
    """
    found = 0
    for node in list(graph.nodes):
        if node.target in _ADDING:
            given = [a for a in node.all_input_nodes if a.meta["val"].ndim == 3 and a.meta["val"].shape[2] > 1]
            for a in given:
                source = narrower(graph, a)
                if source is not None:
                    node.replace_input_with(a, source)
                    found += 1
    graph.eliminate_dead_code()
    return found


_ADDING = {torch.ops.eachgrad.position_sums.default, torch.ops.eachgrad.norm_sums.default}


def narrower(graph: Graph, node: Node) -> Node | None:
    """The same numbers in sixteen bits, if the node is a view of such a tensor made float32."""
    if node.target is aten._to_copy.default:
        source: Any = node.args[0]
        before, after = source.meta["val"], node.meta["val"]
        widened = before.dtype in SIXTEEN_BITS and after.dtype == torch.float32
        return source if widened and before.device == after.device else None
    viewed = _viewed(node)
    if viewed is None or viewed is not node.args[0] or viewed.meta["val"].dtype != node.meta["val"].dtype:
        return None  # no view of the same numbers
    source = narrower(graph, viewed)
    if source is None:
        return None
    with graph.inserting_after(node):
        made = graph.node_copy(node, lambda a: source if a is viewed else a)
    made.meta["val"] = node.meta["val"].to(source.meta["val"].dtype)
    return made


def narrow_signs(graph: Graph) -> int:
    """Let a ReLU's backward see which numbers are positive in a copy in bfloat16 that is read later on; how many.

    The ReLU's float32 is not kept for that then. Up to 2^-134 a number is zero in the copy, and passes no gradient: far less
    than the rounding of what it was added up from.
    """
    found = 0
    for node in graph.nodes:
        if node.target is not aten.threshold_backward.default or node.args[2] != 0:
            continue
        g, source = cast(tuple[Node, Node], node.args[:2])
        if {g.meta["val"].dtype, source.meta["val"].dtype} != {torch.float32}:  # or what comes out would be another
            continue
        for copy in source.users:
            rounded = copy.target is aten._to_copy.default and copy.meta["val"].dtype == torch.bfloat16
            if rounded and copy < node and any(user > node for user in copy.users) and _lies_alike(copy, source):
                node.replace_input_with(source, copy)
                found += 1
                break
    return found


def _lies_alike(a: Node, b: Node) -> bool:
    """Whether what is computed from one lies as if it were computed from the other."""
    return a.meta["val"].device == b.meta["val"].device and a.meta["val"].stride() == b.meta["val"].stride()


# Ops that draw which torch's own search for equal nodes knows as such.
_KNOWN = {
    aten.dropout, aten._fused_dropout, aten._standard_gamma, aten.bernoulli, aten.multinomial, aten.native_dropout,
    aten.normal, aten.poisson, aten.binomial, aten.rrelu, aten.rand_like, aten.rand, aten.randint, aten.randn, aten.randperm,
}  # fmt: skip


def may_differ(graph: Graph) -> bool:
    """Whether two nodes with one op and equal arguments may be two numbers: it draws, or nobody knows what it does."""
    return any(_may_differ(node) for node in graph.nodes if node.op == "call_function")


def _may_differ(node: Node) -> bool:
    if any(
        isinstance(a, float) and a == 0.0 and math.copysign(1.0, a) < 0 for a in tree_leaves((node.args, node.kwargs))
    ):
        return True  # -0.0 is equal to 0.0
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target.namespace not in ("aten", "prims", "eachgrad"):
        return True
    return draws(node) and node.target.overloadpacket not in _KNOWN


def draws(node: Node) -> bool:
    """Whether an op of torch draws random numbers; attention does with dropout alone."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    schema: Any = node.target._schema  # type: ignore[union-attr]
    names = [argument.name for argument in schema.arguments]
    if "dropout_p" not in names:
        return True
    k = names.index("dropout_p")
    given = node.args[k] if k < len(node.args) else node.kwargs.get("dropout_p", schema.arguments[k].default_value)
    return bool(given != 0)


_VIEWS = {aten.view.default, aten._unsafe_view.default}


def loosen(graph: Graph) -> None:
    """Let nodes lie in memory otherwise than when they were traced: views become reshapes, which copy where they must."""
    for node in graph.nodes:
        if node.target in _VIEWS:
            node.target = aten.reshape.default
