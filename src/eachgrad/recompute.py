"""Cheap tensors of a traced step's forward, computed again where its backward reads them instead of kept until then.

A compiler that is given forward and backward apart decides what is kept between them. In one graph nothing is decided:
whatever the forward has made stays until its last reader, the output of a GELU beside its input.

A tensor that crosses the turn (made in the forward, read after it) is computed again if it follows by pointwise ops from
tensors that are there anyway. The output of a norm counts as that, given its statistics.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves, tree_map_only

from eachgrad.alive import GIVEN, bytes_of, memory_of, size_of
from eachgrad.cheap import NORMS, inputs_of, name_statistics, normed
from eachgrad.tidy import call, changes, origins

aten = torch.ops.aten


@dataclass(frozen=True)
class Limits:
    """What is computed again."""

    large: int = 1 << 20  # no tensor of fewer bytes
    depth: int = 12  # none of more ops: a residual stream is not, from its first layer on
    reads: float = 2.5  # nor where more bytes are read for each that is not kept
    fused: bool = True  # whether a compiler fuses pointwise ops, and keeps nothing that these alone read


DEFAULT = Limits()
SMALL = 8  # what is this many times smaller than a tensor computed from it may stay longer for that: statistics

# Ops that a compiler leaves to a library.
SOLID = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, aten.convolution_backward, aten.sort}

_RESHAPED = {aten.view.default, aten._unsafe_view.default}


def turn_of(graph: Graph) -> Node:
    """The last node of the forward in a graph that returns (flag, losses, *answers): the backward begins after it."""
    (output,) = graph.find_nodes(op="output")
    return origins(graph)[output.args[0][1]]  # type: ignore[index]


def recompute(graph: Graph, turn: Node, limits: Limits = DEFAULT, share: float = 1.0) -> int:
    """Let readers after `turn` have what is cheap computed again; the bytes that are not kept any more.

    No more than about this `share` of what is kept: first the tensors that are computed from the fewest bytes for their
    size, and of these the first of the forward, which are read last. A graph that writes into tensors is left as it is.
    """
    if any(map(changes, graph.nodes)):
        return 0
    name_statistics(graph)
    tensors, before = _Tensors.of(graph, turn, limits), sum(kept(graph, turn).values())
    waiting = [m for m in tensors.members if tensors.is_kept(m) and bytes_of(m) >= limits.large]
    waiting.sort(key=tensors.price)  # stable: in the order of the graph, where they are equal
    progress, left = True, share * sum(bytes_of(m) for m in tensors.members if tensors.is_kept(m))
    while progress:  # what was kept for another may be free now
        progress = False
        for m in list(waiting):
            plan = tensors.plan(m) if left > 0 else None
            if plan is not None and _Copies(tensors, plan).done():
                waiting.remove(m)
                left -= bytes_of(m)
                progress = True
    graph.eliminate_dead_code()
    return before - sum(kept(graph, turn).values())


def kept(graph: Graph, turn: Node) -> dict[Node, int]:
    """The bytes of each tensor that is made before the turn, read after it, and no argument of the graph."""
    tensors = _Tensors.of(graph, turn)
    return {m: bytes_of(m) for m in tensors.members if tensors.crosses(m)}


@dataclass(frozen=True)
class _Plan:
    """How the memory of one tensor is computed again."""

    wanted: list[Node]  # the tensor and views of it that are read after the turn
    cone: list[Node]  # what is computed for them, in the order of the graph
    anchor: Node  # what it is computed before
    gate: Node  # a tensor of the backward that it waits for


@dataclass
class _Tensors:
    """The tensors of a graph, by their memory, and where they are read."""

    turn: Node
    limits: Limits
    memory: dict[Node, Node]
    members: dict[Node, list[Node]]  # of each memory
    late: set[Node]  # what the backward computes from the losses

    @classmethod
    def of(cls, graph: Graph, turn: Node, limits: Limits = DEFAULT) -> _Tensors:
        memory, late, members = memory_of(graph), {turn}, dict[Node, list[Node]]()
        for node in graph.nodes:
            members.setdefault(memory[node], []).append(node)
            if not late.isdisjoint(node.all_input_nodes):
                late.add(node)
        return cls(turn, limits, memory, members, late - {turn})

    def readers(self, node: Node) -> list[Node]:
        """Who reads a node of the forward after the turn."""
        return [user for user in node.users if user > self.turn] if node <= self.turn else []

    def crosses(self, m: Node) -> bool:
        return m.op not in GIVEN and any(map(self.readers, self.members[m]))

    def users(self, m: Node) -> list[Node]:
        """Who reads this memory after the turn, also by views that are made there."""
        return [user for node in self.members[m] for user in node.users if user > self.turn]

    def is_kept(self, m: Node) -> bool:
        """Whether it crosses where ops are fused, too: a tensor that pointwise ops and sums read alone is never written."""
        if not self.crosses(m):
            return False
        return not self.limits.fused or inputs_of(m, self.memory) is None or any(map(_is_solid, self.users(m)))

    def cone(self, wanted: Iterable[Node], m: Node) -> tuple[list[Node], list[Node]] | None:
        """What has to be computed again for these views of m, and from which nodes; None if it is not cheap."""
        cone, leaves, stack = set[Node](), dict[Node, None](), list(wanted)
        while stack:
            node = stack.pop()
            if node in cone or node in leaves:
                continue
            origin, inputs = self.memory[node], inputs_of(node, self.memory)
            if inputs is None and (origin is m or not isinstance(node.meta.get("val"), Tensor)):
                return None
            if inputs is None or (origin is not m and (origin.op in GIVEN or self.is_kept(origin))):
                leaves[node] = None
            else:
                cone.add(node)
                stack += inputs
        return sorted(cone), list(leaves)

    def plan(self, m: Node) -> _Plan | None:
        """How m is computed again; None if it cannot be, or is not worth it."""
        wanted = [node for node in self.members[m] if self.readers(node)]
        readers = {user for node in wanted for user in self.readers(node)}
        found = self.cone(wanted, m) if all("val" in node.meta for node in wanted) else None
        if found is None or self.ops(found[0]) > self.limits.depth or any(user.op == "output" for user in readers):
            return None
        # Where one of what it is computed from is read last, that may go as well, and it needs no room from there on.
        sources = {self.memory[leaf] for leaf in found[1]}
        ends = {s: max(self.users(s), default=None) for s in sources if s.op not in GIVEN}
        big = [end for s, end in ends.items() if end is not None and bytes_of(s) * SMALL >= bytes_of(m)]
        anchor = min([*readers, *big])
        longer = [s for s, end in ends.items() if end is None or end < anchor]
        freed, gate = bytes_of(m) - sum(map(bytes_of, longer)), self.gate(anchor, self.users(m))
        if gate is None or 2 * freed < bytes_of(m) or self.read(sources, m) > self.limits.reads * freed:
            return None
        return _Plan(wanted, found[0], anchor, gate)

    @staticmethod
    def read(sources: Iterable[Node], m: Node) -> int:
        """The bytes of what m is computed from."""
        return sum(size for size in map(size_of, sources) if size * SMALL >= bytes_of(m))

    def ops(self, cone: list[Node]) -> int:
        return sum(self.memory[node] is node for node in cone)

    def price(self, m: Node) -> float:
        """The bytes that are read to compute m again, for each byte of it."""
        found = self.cone([node for node in self.members[m] if self.readers(node)], m)
        if found is None:
            return float("inf")
        return self.read({self.memory[leaf] for leaf in found[1]}, m) / bytes_of(m)

    def gate(self, anchor: Node, users: Iterable[Node]) -> Node | None:
        """A tensor of the backward that is there at the anchor and is needed there or later."""

        def known(readers: Iterable[Node]) -> list[Node]:
            read = {self.memory[a] for reader in readers for a in reader.all_input_nodes}
            return [a for a in read if a in self.late and a < anchor and size_of(a)]

        # What an op reads that is not fused has memory of its own.
        solid = known(user for user in users if inputs_of(user, self.memory) is None)
        if solid:
            return max(solid)
        near, found = known([anchor]) or known(users), None
        while near:
            found = max(near)
            near = known([found]) if inputs_of(found, self.memory) is not None else []
        return found


@dataclass
class _Copies:
    """A plan, carried out."""

    tensors: _Tensors
    plan: _Plan
    made: dict[Node, Node] = field(default_factory=dict)  # the copy of each node
    new: list[Node] = field(default_factory=list)

    def done(self) -> bool:
        """Whether the readers have it computed again now; not, if it would lie in another way in memory."""
        self._waiting()
        for node in self.plan.cone:
            self.made[node] = self._copy(node)
        if not all(_lies_alike(node, self.made[node]) for node in self.plan.wanted):
            for node in reversed(self.new):
                node.graph.erase_node(node)
            return False
        for node in self.plan.wanted:
            for user in self.tensors.readers(node):
                user.replace_input_with(node, self.made[node])
        return True

    def _waiting(self) -> None:
        """Let what is not computed again wait for the gate.

        Computed from the same tensors as the first time, it might be put into one kernel with that, and kept. A choice
        between two that are one depends on the gate, and a compiler of kernels drops it.
        """
        cone, memory = set(self.plan.cone), self.tensors.memory
        leaves = {a: None for node in self.plan.cone for a in inputs_of(node, memory) or () if a not in cone}
        chosen = [a for a in leaves if memory[a].op not in GIVEN] or list(leaves)
        first = self.plan.gate
        while first.meta["val"].ndim:
            first = self._call(aten.select.int, first, 0, 0)
        choice = self._call(aten.eq.Scalar, first, 0)
        for leaf in chosen:
            self.made[leaf] = self._call(aten.where.self, choice, leaf, leaf)

    def _copy(self, node: Node) -> Node:
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, Node) and source.target in NORMS:
            return normed(source, self._call, self._now)
        target: Any = aten.reshape.default if node.target in _RESHAPED else node.target
        return self._call(
            target, *tree_map_only(Node, self._now, node.args), **tree_map_only(Node, self._now, node.kwargs)
        )

    def _now(self, node: Node) -> Node:
        return self.made.get(node, node)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A new node before the anchor, with what is known of its tensor."""
        anchor = self.plan.anchor
        with anchor.graph.inserting_before(anchor):
            node = call(anchor.graph, target, *args, **kwargs)
        self.tensors.memory[node] = node
        self.new.append(node)
        return node


def _is_solid(node: Node) -> bool:
    """Whether an op reads tensors from memory: a kernel of its own."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target.namespace != "aten" or target.overloadpacket in SOLID or "scaled_dot_product" in target._opname


def _lies_alike(node: Node, copy: Node) -> bool:
    pairs = zip(tree_leaves(node.meta["val"]), tree_leaves(copy.meta["val"]), strict=True)
    return all(_place(a) == _place(b) for a, b in pairs)


def _place(value: Tensor) -> tuple:
    return value.shape, value.dtype, [s for s, n in zip(value.stride(), value.shape, strict=True) if n > 1]
