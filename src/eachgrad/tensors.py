"""What each tensor of a recorded forward is: a parameter or derived from some, of the batch, or neither."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from eachgrad import mixing
from eachgrad.graph import Node, graph_nodes, node_of, tensors_in

if TYPE_CHECKING:
    from eachgrad.use import Use


class Tensors:
    """The kinds of the tensors seen so far, by identity."""

    def __init__(self, parameters: Mapping[str, Tensor], constants: Sequence[Tensor]):
        self.parameters = {id(p): name for name, p in parameters.items()}
        self.constants = {id(t) for t in constants}
        self.alias_nodes: dict[Node, Use] = {}  # the sources of uses that stayed attached
        self.tap_nodes: set[Node] = set()  # the outputs of certain uses
        self.opaque = False  # a tensor of the batch came out of something that was not seen
        self._strong: dict[int, ref] = {}
        self._tags: dict[int, tuple[ref, mixing.Tag]] = {}
        self._carriers: dict[int, tuple[ref, int, str | None]] = {}

    def mark_strong(self, value: Any) -> None:
        for t in tensors_in(value):
            key = id(t)
            self._strong[key] = ref(t, lambda _, key=key, table=self._strong: table.pop(key, None))

    def tag(self, t: Tensor) -> mixing.Tag:
        """The dimension along which the samples of `t` lie, "mixed", or None where it is not known."""
        found = self._tags.get(id(t))
        return found[1] if found is not None and found[0]() is t else None

    def set_tag(self, value: Any, tag: mixing.Tag) -> None:
        for t in tensors_in(value):
            self._tags[id(t)] = (ref(t), tag)

    def follow(self, func: Callable, args: tuple, kwargs: dict, out: Any) -> None:
        if not self._tags:
            return
        tagged = [(t, tag) for t in tensors_in((args, kwargs)) if (tag := self.tag(t)) is not None]
        if tagged:
            self.set_tag(out, mixing.follow(func, args, kwargs, out, tagged))
            if func is torch.Tensor.__setitem__ and any(tag == "mixed" for _, tag in tagged):
                self.set_tag(args[0], "mixed")

    def is_strong(self, t: Tensor) -> bool:
        found = self._strong.get(id(t))
        return found is not None and found() is t

    def may_have_samples(self, t: Tensor) -> bool:
        """Whether `t`, of which nothing is known, may hold samples: it is no number and no buffer."""
        return t.ndim > 0 and id(t) not in self.constants

    def carrier(self, t: Tensor) -> str | None:
        """'pure' or 'impure' for a tensor that carries parameters, None for any other.

        An impure one has passed a candidate use, which may already account for it.
        """
        if not t.requires_grad:
            return None
        if id(t) in self.parameters:
            return "pure"
        if t.grad_fn is None:
            return None
        known = self._carriers.get(id(t))
        if known is not None and known[0]() is t and known[1] == t._version:
            return known[2]
        found = self._trace(t)
        self._carriers[id(t)] = (ref(t), t._version, found)
        return found

    def _trace(self, t: Tensor) -> str | None:
        kind = None
        for node in graph_nodes([t.grad_fn]):
            if node in self.tap_nodes:
                self.opaque = True
                self.mark_strong(t)
                return None
            if node in self.alias_nodes:
                kind = "impure"
            elif kind is None and id(getattr(node, "variable", None)) in self.parameters:
                kind = "pure"
        return kind

    def names_of(self, t: Tensor) -> list[str]:
        """The parameters that `t` is, or is derived from."""
        if id(t) in self.parameters:
            return [self.parameters[id(t)]]
        variables = (getattr(node, "variable", None) for node in graph_nodes([node_of(t)]))
        return [self.parameters[id(v)] for v in variables if id(v) in self.parameters]
