"""A script: the ops of a recorded forward in their order, each with what it was given and what came of it.

`familiar.py` holds later forwards against it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn import functional as F

from eachgrad import mixing, recording, refusals
from eachgrad.exposed import EXPOSING
from eachgrad.functions import PASSIVE, TEMPLATED
from eachgrad.graph import tensors_in, tensors_of
from eachgrad.rules import BROADCAST, COMPOSITES, RULES, Rule
from eachgrad.tags import Owners, Tag
from eachgrad.use import Use

if TYPE_CHECKING:
    from eachgrad.capture import Recorder

# What an argument may be
RESULT, VALUE, PARAMETER, OTHER, SEVERAL, SLICE = range(6)
# How an op goes: as it is, as a use of parameters, or the ordinary way
PASSES, MEETS, ORDINARY = range(3)

_VALUES = {
    int, float, bool, str, complex, type(None), type(...), torch.dtype, torch.device, torch.memory_format, torch.layout,
}  # fmt: skip
# Functions of which a recorder knows more than that they are ops.
_SPECIAL = {
    *TEMPLATED, *recording.OWN, *refusals.CHECKED, *EXPOSING, F.cross_entropy, F.instance_norm, torch.Tensor.__setitem__,
    torch.Tensor.__iter__,
}  # fmt: skip


class Given(NamedTuple):
    """What an argument was."""

    kind: int
    what: Any  # the slot of a result, a value, or what it must have in common with what it was
    version: int = 0
    requires_grad: bool = False  # of a result: what an op has made without, an autograd.Function around it gives one


class Result(NamedTuple):
    """A tensor that an op has returned."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    number: int  # as `Tensors.number` has it
    tag: Tag


class Meeting(NamedTuple):
    """What is remembered of a use: all that is not of one forward alone."""

    rule: Rule
    sources: tuple[int | str, ...]  # the places, or names, of the parameters' arguments, in the order of `Use.sources`
    samples: tuple[int, ...]  # the places of what is of the batch
    line: str
    module: Callable[[], nn.Module | None]
    ops_since: tuple[str, ...]


@dataclass(eq=False, slots=True)
class Entry:
    """One op."""

    func: Callable
    args: tuple[Given, ...]
    kwargs: dict[str, Given]
    with_grad: bool
    slot: int  # of its first result
    kind: int = ORDINARY
    results: tuple[Result, ...] = ()
    returns: type = Tensor
    signature: int | None = 0  # of the forward so far, with this op
    count: int = 0  # of the tensors of the batch so far
    uses: int = 0  # so far
    name: str = ""
    meeting: Meeting | None = None


@dataclass
class Script:
    """The ops of a forward, and how many tensors they and the inputs are."""

    entries: list[Entry]
    slots: int


class _Unknown(Exception):
    """An argument that cannot be compared with a later one."""


class Writer:
    """Has a forward recorded in the ordinary way, and writes its ops down."""

    def __init__(self, recorder: Recorder, inputs: Sequence[Tensor], written: Callable[[Script], None]):
        self.recorder, self.written = recorder, written
        self.entries: list[Entry] = []
        self.slots: dict[int, tuple[ref[Tensor], int]] = {}
        self.count = 0
        self.failed = False
        self._number(inputs)

    def __call__(self, func: Callable, types: Any, args: tuple, kwargs: dict) -> Any:
        recorder = self.recorder
        if self.failed or func in PASSIVE or not (given := tensors_of(args, kwargs)):
            self.failed = self.failed or func is torch.Tensor.register_hook
            return recorder.seen(func, types, args, kwargs)
        entry, uses = self._described(func, args, kwargs), len(recorder.uses)
        plain = all(map(self._is_plain, given))  # before an op in place changes what they are
        recorder.tensors.sure = True
        out = recorder.apart(self, func, types, args, kwargs)
        if entry is not None:
            self._finish(entry, args, kwargs, out, recorder.uses[uses:], plain)
        return out

    def leave(self) -> None:
        """Something has happened that is no op."""
        self.failed = True

    def end(self) -> None:
        recorder = self.recorder
        if self.failed or recorder.signature.value is None or recorder.tensors.opaque:
            return
        tables = [r.tag.table for e in self.entries for r in e.results if isinstance(r.tag, Owners)]
        if sum({id(table): table.numel() for table in tables}.values()) <= mixing.FOUND.elements:
            self.written(Script(self.entries, self.count))

    def _described(self, func: Callable, args: tuple, kwargs: dict) -> Entry | None:
        try:
            given = tuple([self._given(value) for value in args])
            options = {name: self._given(value) for name, value in kwargs.items()}
        except _Unknown:
            self.failed = True
            return None
        return Entry(func, given, options, torch.is_grad_enabled(), self.count)

    def _is_plain(self, t: Tensor) -> bool:
        """Whether nothing has to be found out of a tensor's history: a parameter's, or what is of the batch has none.

        A Function is met where what it returned is used, and what it was given is known by then.
        """
        tensors = self.recorder.tensors
        if not t.requires_grad or id(t) in tensors.parameters:
            return True
        return tensors.is_strong(t) and not isinstance(t.grad_fn, BackwardCFunction)

    def _given(self, value: Any) -> Given:
        kind = type(value)
        if kind is Tensor or kind is nn.Parameter:
            return self._given_tensor(value)
        if kind in _VALUES:
            return Given(VALUE, value)
        if kind is tuple or kind is list or kind is torch.Size:
            return Given(SEVERAL, (kind, tuple([self._given(item) for item in value])))
        if kind is slice:
            return Given(SLICE, tuple([self._given(item) for item in (value.start, value.stop, value.step)]))
        raise _Unknown

    def _given_tensor(self, t: Tensor) -> Given:
        name = self.recorder.tensors.parameters.get(id(t))
        if name is not None:
            if not t.requires_grad:  # not any more
                raise _Unknown
            return Given(PARAMETER, (name, type(t), t.shape, t.dtype))
        found = self.slots.get(id(t))
        if found is not None and found[0]() is t:
            if t.is_inference():
                raise _Unknown
            return Given(RESULT, found[1], t._version, t.requires_grad)
        if t.requires_grad or t.is_nested:
            raise _Unknown
        return Given(OTHER, (type(t), t.shape, t.dtype))

    def _number(self, tensors: Sequence[Tensor]) -> None:
        for t in tensors:
            self.slots[id(t)] = ref(t), self.count
            self.count += 1

    def _finish(self, entry: Entry, args: tuple, kwargs: dict, out: Any, uses: list[Use], plain: bool) -> None:
        recorder, tensors = self.recorder, self.recorder.tensors
        entry.signature, entry.count, entry.uses = recorder.signature.value, tensors.count, len(recorder.uses)
        entry.name, entry.returns = getattr(entry.func, "__name__", ""), type(out)
        returned = results_of(out)
        plain = plain and bool(returned) and all(type(t) is Tensor for t in returned)
        if plain and tensors.sure and entry.func not in _SPECIAL and "out" not in kwargs:
            self._classify(entry, args, kwargs, uses)
        known = entry.kind != ORDINARY  # otherwise its tags are found anew each time
        entry.results = tuple([
            Result(t.shape, t.dtype, t.requires_grad, tensors.number(t), tensors.tag(t) if known else None)
            for t in returned
        ])  # fmt: skip
        self._number(returned)
        self.entries.append(entry)

    def _classify(self, entry: Entry, args: tuple, kwargs: dict, uses: list[Use]) -> None:
        func, given, known = entry.func, tensors_of(args, kwargs), self.recorder.tensors.parameters
        parameters = [t for t in given if id(t) in known]
        if not uses:
            if not parameters:
                entry.kind = PASSES
            return
        if len(uses) > 1 or func in COMPOSITES or func in BROADCAST or func not in RULES or entry.returns is not Tensor:
            return
        use = uses[0]
        # Its parameters are arguments of the op, each once. Other tensors are given by position, and none is inside of
        # something else.
        places: dict[int, int | str] = {id(t): k for k, t in (*enumerate(args), *kwargs.items()) if id(t) in known}
        fits = all(type(s) is nn.Parameter and id(s) in places for s in use.sources)
        fits = fits and len(use.sources) == len(parameters) == len(places)
        fits = fits and len(given) == sum(isinstance(t, Tensor) for t in args) + sum(
            map(_is_parameter, kwargs.values())
        )
        if fits and use.op is func and use.args is args and use.strong and not use.aliases and use.piece is None:
            module = use.where.module
            entry.kind = MEETS
            entry.meeting = Meeting(
                use.rule, tuple([places[id(s)] for s in use.sources]),
                tuple([k for k, t in enumerate(args) if id(t) in use.samples]), use.where.line,
                _nothing if module is None else ref(module), use.ops_since,
            )  # fmt: skip


def _is_parameter(value: Any) -> bool:
    return type(value) is nn.Parameter


def _nothing() -> None:
    return None


def results_of(out: Any) -> list[Tensor]:
    """The tensors that an op has returned."""
    return [out] if type(out) is Tensor else tensors_in(out)
