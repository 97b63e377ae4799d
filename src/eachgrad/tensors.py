"""What each tensor of a recorded forward is: a parameter or derived from some, of the batch, or neither."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from eachgrad import mixing, moves
from eachgrad.errors import UnsupportedOp
from eachgrad.foreign import is_function
from eachgrad.functions import op_name
from eachgrad.graph import Carried, Node, graph_nodes, node_of, tensors_in
from eachgrad.tags import Loose, Owners

if TYPE_CHECKING:
    from eachgrad.use import Use


_UNKNOWN: Any = object()


class Tensors:
    """The kinds of the tensors seen so far, by identity."""

    def __init__(self, parameters: Mapping[str, Tensor], constants: Sequence[Tensor]):
        self.parameters = {id(p): name for name, p in parameters.items()}
        self.constants = {id(t) for t in constants}
        self.alias_nodes: dict[Node, list[Use]] = {}  # where uses that stayed attached begin
        self.tap_nodes: set[Node] = set()  # the outputs of certain uses
        self.opaque = False  # a tensor of the batch came out of something that was not seen
        self.strong: dict[int, tuple[ref, int]] = {}  # what is of the batch, with the number of each
        self.count = 0
        self._tags: dict[int, tuple[ref, mixing.Tag]] = {}
        self.sure = True  # whether the last tag follows from the call and the tags of what it was given
        self._carriers: dict[int, tuple[ref, int, str | None]] = {}
        self.place: Callable[[], object] = lambda: "an unknown place"
        self.on_function: Callable[[Node], None] = lambda node: None  # called once for each autograd.Function met
        self._functions: set[Node] = set()
        self.certain: set[Node] = set()  # those whose output is certainly of the batch
        self._begin = _sequence()
        self._open = 1 << 62  # where the op that is being seen began
        self._seen: list[tuple[int, int]] = []  # sequence numbers of the nodes that ops on carriers have made

    def mark_strong(self, value: Any) -> None:
        for t in (value,) if type(value) is Tensor else tensors_in(value):
            self.count += 1
            self.strong[id(t)] = (ref(t), self.count)

    def tag(self, t: Tensor) -> mixing.Tag:
        """The dimension along which the samples of `t` lie, what was computed over it, or None where it is not known."""
        found = self._tags.get(id(t))
        return found[1] if found is not None and found[0]() is t else None

    def put_tag(self, t: Tensor, tag: mixing.Tag) -> None:
        """What was found of `t` before."""
        if tag is not None or id(t) in self._tags:
            self._tags[id(t)] = ref(t), tag

    def set_tag(self, inputs: Sequence[Tensor], dim: int) -> None:
        """Inputs whose samples lie along `dim`. Beside one that certainly has samples, others are masks, perhaps."""
        strong = [t.ndim for t in inputs if self.is_strong(t)]
        for t in inputs:
            if self.tag(t) is None:  # what an earlier call has computed is known better
                certain = not strong or (self.is_strong(t) and t.ndim == max(strong))
                self._tags[id(t)] = (ref(t), dim if certain else Loose(dim))

    def follow(
        self, func: Callable, args: tuple, kwargs: dict, out: Any, given: Sequence[Tensor], call: Hashable = None
    ) -> None:
        """`given`: the tensors among the arguments, and `call`, as `signature.looked_at` has them."""
        if not self._tags:
            return
        # For every op: `self.tag` written out.
        tagged, tags = [], []
        for t in given:
            found = self._tags.get(id(t))
            if found is not None and found[1] is not None and found[0]() is t:
                tagged.append((t, found[1]))
                tags.append(found[1])
            else:
                tags.append(None)
        if not tagged:
            return
        key, self.sure = None, False
        if call is not None and (type(out) is Tensor or type(out) in (tuple, list)):
            key = mixing.key_of(func, call, tags, out)
            known = mixing.FOUND.get(key, _UNKNOWN)
            if known is not _UNKNOWN:
                self._note(out, known, tagged)
                self.sure = True
                return
        if func is torch.Tensor.__setitem__:
            out, tag = args[0], moves.assigned(args, tagged)
        else:
            tag = mixing.follow(func, args, kwargs, out, tagged)
            if key is not None:
                self.sure = mixing.remember(key, func, given, tags, tag)
        self._note(
            out,
            [self._placed(each, func) for each in tag] if isinstance(tag, list) else self._placed(tag, func),
            tagged,
        )

    def _note(self, out: Any, tag: mixing.Tag | list[mixing.Tag], tagged: mixing.Tagged) -> None:
        if type(out) is Tensor and tag is not None and not isinstance(tag, list):
            self._tags[id(out)] = (ref(out), tag)
            return
        for t, each in zip(out, tag, strict=True) if isinstance(tag, list) else [(t, tag) for t in tensors_in(out)]:
            # What ran inside a function that is not known itself was followed there.
            if each is not None or any(t is s for s, _ in tagged):
                self._tags[id(t)] = (ref(t), each)

    def _placed(self, tag: mixing.Tag, func: Callable) -> mixing.Tag:
        """The tag with the op that brought samples together, if it was this one."""
        if isinstance(tag, int) or tag is None or tag.what or (isinstance(tag, Owners) and not tag.several):
            return tag
        return replace(tag, what=f"{op_name(func)} at {self.place()}")

    def is_strong(self, t: Tensor) -> bool:
        found = self.strong.get(id(t))
        return found is not None and found[0]() is t

    def told_apart(self, given: Sequence[Tensor], anew: bool) -> tuple[list[tuple[Tensor, str]], bool, tuple[int, ...]]:
        """The carriers among an op's arguments, each with its kind, whether one of the others is of the batch, and the
        number of each argument.

        `anew`: a checkpoint runs its forward again, where what asks for a gradient is of the batch.
        """
        carriers: list[tuple[Tensor, str]] = []
        numbers: list[int] = []
        strong = False
        for t in given:
            found, number = self.strong.get(id(t)), 0
            if found is not None and found[0]() is t:  # `is_strong` written out: this runs for every op
                strong, number = True, found[1]
                if isinstance(t.grad_fn, BackwardCFunction):
                    self.meet(t)
            elif t.requires_grad:
                kind = "pure" if id(t) in self.parameters else self.carrier(t)
                if kind is not None:
                    carriers.append((t, kind))
                else:
                    number = self.number(t)  # it may be of the batch now that its history has been looked at
                    strong = strong or anew or number > 0
            numbers.append(number)
        return carriers, strong, tuple(numbers)

    def number(self, t: Tensor) -> int:
        """Which tensor of the batch this is, in the order in which they came; 0 for any other."""
        found = self.strong.get(id(t))
        return found[1] if found is not None and found[0]() is t else 0

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
        found = self._look(t.grad_fn)
        if found == "batch":
            self.opaque, found = True, None
            self.mark_strong(t)
        self._carriers[id(t)] = (ref(t), t._version, found)
        return found

    def kind(self, root: Node) -> str | None:
        """The same for what a node of the graph has computed."""
        found = self._look(root)
        return None if found == "batch" else found

    def meet(self, t: Tensor) -> None:
        """`t` is certainly of the batch; where an autograd.Function made it, so is its output."""
        node = t.grad_fn
        if isinstance(node, BackwardCFunction) and node not in self._functions:
            self.certain.add(node)
            self.find_functions((node,))

    def find_functions(self, nodes: Iterable[Node]) -> None:
        """Make calls of autograd.Functions known, each after those it was computed from.

        What runs inside an op that was seen (a custom op's own Function) is part of that op.
        """
        for node in nodes:
            if is_function(node) and node not in self._functions:
                self._functions.add(node)
                if not self._was_seen(node):
                    self.on_function(node)

    def _look(self, root: Node) -> str | None:
        kind, hidden = None, None
        for node in graph_nodes([root]):
            self.find_functions((node,))
            if node in self.tap_nodes:
                return "batch"
            if node in self.alias_nodes:
                kind = "impure"
            elif kind is None and id(getattr(node, "variable", None)) in self.parameters:
                kind = "pure"
            elif hidden is None and not self._is_known(node):
                hidden = node
        if kind is not None and hidden is not None:
            self._refuse_hidden(root, hidden)
        return kind

    def watched(self) -> _Watch:
        """A context: the nodes that are made meanwhile come from an op that was seen."""
        return _Watch(self)

    def _is_known(self, node: Node) -> bool:
        """Whether what made this node was seen: an op on carriers, or something before the recording."""
        if getattr(node, "variable", None) is not None or isinstance(node, BackwardCFunction):
            return True
        if node.name().startswith(_SHAPES):  # of one tensor: nothing else comes in (vmap moves dimensions so)
            return True
        return node._sequence_nr() < self._begin or self._was_seen(node)

    def _was_seen(self, node: Node) -> bool:
        number = node._sequence_nr()
        place = bisect_right(self._seen, (number, 1 << 62))
        return number >= self._open or (place > 0 and number < self._seen[place - 1][1])

    def _refuse_hidden(self, root: Node, hidden: Node) -> None:
        variables = (getattr(node, "variable", None) for node in graph_nodes([root]))
        name = next(self.parameters[id(v)] for v in variables if id(v) in self.parameters)
        raise UnsupportedOp(
            f"parameter {name!r} goes through {hidden.name().removesuffix('Backward0')} inside something that hides its "
            f"ops (a scripted function, an extension), and what comes of it is used at {self.place()}: call the Python "
            "function it was made from, or make it a torch.library.custom_op with a rule (docs/add_a_rule.md)"
        )

    def names_of(self, t: Tensor | Carried) -> list[str]:
        """The parameters that `t` is, or is derived from."""
        return names_of(self.parameters, t)


def names_of(parameters: Mapping[int, str], t: Tensor | Carried) -> list[str]:
    """The same by a table of names: `Tensors.parameters`."""
    if id(t) in parameters:
        return [parameters[id(t)]]
    variables = (getattr(node, "variable", None) for node in graph_nodes([node_of(t)]))
    return [parameters[id(v)] for v in variables if id(v) in parameters]


_SHAPES = ("Permute", "Transpose", "View", "UnsafeView", "Expand", "Unsqueeze", "Squeeze", "Alias")


class _Watch:
    """Written out, and no generator: it runs for every op on parameters."""

    __slots__ = ("before", "begin", "tensors")

    def __init__(self, tensors: Tensors):
        self.tensors = tensors

    def __enter__(self) -> None:
        self.begin, self.before = _sequence(), self.tensors._open
        self.tensors._open = min(self.begin, self.before)

    def __exit__(self, *error: object) -> None:
        self.tensors._open = self.before
        seen, end = self.tensors._seen, _sequence()
        if end > self.begin:
            while seen and seen[-1][0] >= self.begin:
                seen.pop()
            seen.append((self.begin, end))


def _sequence() -> int:
    return torch._C._autograd._get_sequence_nr()  # pyright: ignore[reportAttributeAccessIssue]
