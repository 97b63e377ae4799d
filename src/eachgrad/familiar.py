"""Forwards that have come before, followed op by op: what was found out about an op then is not found out again.

A `Reader` holds the ops of a forward against the script of an earlier one, before and after they run: the same function, on
the same earlier results and on parameters of the same names, with the same options, whose results have the shapes and dtypes
they had. As long as all is the same, so is what a recorder says of it. The first op that differs, and all that follow, go the
ordinary way, and before them the recorder is told what it would have said of the others. What is more than an op, or where
values decide whose samples are where, goes the ordinary way every time, and is held to the forward's signature.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from eachgrad import foreign, recording
from eachgrad.exposed import EXPOSING
from eachgrad.functions import PASSIVE
from eachgrad.graph import tensors_of
from eachgrad.rules import RULES
from eachgrad.script import (
    ORDINARY,
    OTHER,
    PARAMETER,
    PASSES,
    RESULT,
    SEVERAL,
    VALUE,
    Entry,
    Given,
    Script,
    Writer,
    results_of,
)

if TYPE_CHECKING:
    from eachgrad.capture import Recorder

_KEPT = 8  # kinds of input that a model may have; the oldest goes first
_TRIES = 4  # scripts for one kind: a forward that is another one each time is not followed
_STRAYS = 3  # forwards in a row that differ from a script, until another one is written


@dataclass
class _Known:
    """What is known of a model's forward on inputs of one kind."""

    script: Script | None = None
    wanted: bool = False  # the next one is to be written down
    tries: int = 0
    strays: int = 0

    def keep(self, script: Script) -> None:
        self.script, self.strays = script, 0


_known: WeakKeyDictionary[nn.Module, dict[Hashable, _Known]] = WeakKeyDictionary()


def expect(model: nn.Module, kind: Hashable) -> None:
    """A forward on such inputs has come again, with its samples where they were."""
    kinds = _known.setdefault(model, {})
    known = kinds.setdefault(kind, _Known())
    known.wanted = known.script is None and known.tries < _TRIES
    while len(kinds) > _KEPT:
        del kinds[next(iter(kinds))]


def begin(recorder: Recorder, model: nn.Module, kind: Hashable, inputs: Sequence[Tensor]) -> Reader | Writer | None:
    """What follows a forward on such inputs, or writes it down; None for one that is simply recorded."""
    known = _known.get(model, {}).get(kind)
    if known is None:
        return None
    if known.script is not None:
        return Reader(recorder, known, known.script, inputs)
    if not known.wanted:
        return None
    known.wanted, known.tries = False, known.tries + 1
    return Writer(recorder, inputs, known.keep)


class Reader:
    """Follows a forward by a script."""

    def __init__(self, recorder: Recorder, known: _Known, script: Script, inputs: Sequence[Tensor]):
        self.recorder, self.known, self.entries = recorder, known, script.entries
        self.place = 0  # of the next op
        self.told = 0  # ops of which the recorder knows
        self.live: list[Any] = [None] * script.slots  # references to inputs and results
        self.slots: dict[int, int] = {}  # those of inputs, and of results that are of no batch
        for slot, t in enumerate(inputs):
            self.live[slot], self.slots[id(t)] = ref(t), slot

    def __call__(self, func: Callable, types: Any, args: tuple, kwargs: dict) -> Any:
        if self.place < len(self.entries):
            entry = self.entries[self.place]
            if (entry.func is func or entry.func == func) and self._fits(entry, args, kwargs):
                if entry.kind == PASSES:
                    out = func(*args, **kwargs)
                    return out if self._goes_on(entry, out) else self._differs(entry, args, kwargs, out)
                meeting = entry.meeting
                if meeting is not None and RULES.get(func) is meeting.rule:
                    out = recording.meet_again(self.recorder, func, args, kwargs, meeting)
                    return out if self._goes_on(entry, out) else self._differs(entry, args, kwargs, out, met=True)
                return self._ordinary(entry, types, args, kwargs)
        if func in PASSIVE and func is not torch.Tensor.register_hook:
            return func(*args, **kwargs)
        if tensors_of(args, kwargs) or func in EXPOSING:
            self.leave()
        return self.recorder.seen(func, types, args, kwargs)

    def leave(self) -> None:
        """The rest of the forward goes the ordinary way."""
        self.known.strays += 1
        if self.known.strays >= _STRAYS:
            self.known.script = None
        self.tell()
        self.recorder.follower = None

    def end(self) -> None:
        """The forward has come to its end."""
        if self.place < len(self.entries):
            self.leave()
        else:
            self.known.strays = 0
            self.tell()

    def tell(self) -> None:
        """Tell the recorder what it would have found of the ops that were followed."""
        if self.told == self.place:
            return
        tensors, live = self.recorder.tensors, self.live
        for entry in self.entries[self.told : self.place]:
            if entry.kind != ORDINARY:
                for slot, result in enumerate(entry.results, entry.slot):
                    t = live[slot]()
                    if t is not None:
                        tensors.put_tag(t, result.tag)
        last = self.entries[self.place - 1]
        self.recorder.signature.value, tensors.count = last.signature, last.count
        self.told = self.place

    def _fits(self, entry: Entry, args: tuple, kwargs: dict) -> bool:
        """Whether an op is given what it was given before."""
        given = entry.args
        if len(args) != len(given) or torch.is_grad_enabled() is not entry.with_grad or foreign.is_inside_transform():
            return False
        live = self.live
        try:
            for value, (kind, what, version, requires_grad) in zip(args, given, strict=True):
                if kind == RESULT:  # `_matches` written out; None is what a reference to nothing gives, too
                    if value is None or live[what]() is not value or value._version != version:
                        return False
                    if value.requires_grad is not requires_grad:
                        return False
                elif kind == VALUE:
                    if type(value) is not type(what) or value != what:
                        return False
                elif not self._is(value, kind, what):
                    return False
            return not (kwargs or entry.kwargs) or self._are(kwargs, entry.kwargs)
        except RuntimeError:  # a tensor of inference mode has no version
            return False

    def _are(self, kwargs: dict, given: dict[str, Given]) -> bool:
        return kwargs.keys() == given.keys() and all(self._matches(kwargs[name], one) for name, one in given.items())

    def _matches(self, value: Any, given: Given) -> bool:
        kind, what, version, requires_grad = given
        if kind == RESULT:
            if value is None or self.live[what]() is not value:
                return False
            return value._version == version and value.requires_grad is requires_grad
        return (type(value) is type(what) and value == what) if kind == VALUE else self._is(value, kind, what)

    def _is(self, value: Any, kind: int, what: Any) -> bool:
        """The same for what is neither a result nor a value."""
        if kind == PARAMETER:
            name, own, shape, dtype = what
            known = self.recorder.tensors.parameters.get(id(value)) == name and value.requires_grad
            return known and type(value) is own and value.shape == shape and value.dtype == dtype
        if kind == OTHER:
            own, shape, dtype = what
            return type(value) is own and value.shape == shape and value.dtype == dtype and self._is_other(value)
        if kind == SEVERAL:
            own, items = what
            fits = type(value) is own and len(value) == len(items)
            return fits and all(map(self._matches, value, items))
        return type(value) is slice and all(map(self._matches, (value.start, value.stop, value.step), what))

    def _is_other(self, t: Tensor) -> bool:
        """Whether a tensor is none that this forward has made or was given, and has no gradient to ask for."""
        tensors, slot = self.recorder.tensors, self.slots.get(id(t))
        ours = (slot is not None and self.live[slot]() is t) or tensors.is_strong(t) or tensors.tag(t) is not None
        return not (ours or t.requires_grad or t.is_nested or id(t) in tensors.parameters)

    def _goes_on(self, entry: Entry, out: Any) -> bool:
        """Whether an op has returned what it did before, which then counts as it did."""
        if type(out) is not entry.returns:
            return False
        returned = (out,) if type(out) is Tensor else results_of(out)
        if len(returned) != len(entry.results):
            return False
        slot, number, live, strong = entry.slot, 0, self.live, self.recorder.tensors.strong
        for t, (shape, dtype, requires_grad, number, _) in zip(returned, entry.results, strict=True):
            if t.shape != shape or t.dtype is not dtype or t.requires_grad is not requires_grad:
                return False
            live[slot] = reference = ref(t)
            if number:
                strong[id(t)] = reference, number
            else:
                self.slots[id(t)] = slot
            slot += 1
        if number and entry.kind == PASSES:
            self.recorder.note_op(entry.name)
        self.place += 1
        return True

    def _differs(self, entry: Entry, args: tuple, kwargs: dict, out: Any, met: bool = False) -> Any:
        """An op has run, and returned something else than before."""
        self.leave()
        return self.recorder.returned(entry.func, args, kwargs, out, met)

    def _ordinary(self, entry: Entry, types: Any, args: tuple, kwargs: dict) -> Any:
        recorder = self.recorder
        self.tell()
        out = recorder.apart(self, entry.func, types, args, kwargs)
        known = recorder.signature.value, recorder.tensors.count, len(recorder.uses)
        if known == (entry.signature, entry.count, entry.uses) and self._goes_on(entry, out):
            self.told = self.place
        else:
            self.leave()
        return out
