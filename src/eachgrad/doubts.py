"""Decisions that values make, in a step that is traced once: noted, and looked at when the step has run.

A compiled step cannot branch on numbers. Where the eager code would (a norm that cancels and is computed again, a
sample that is not finite), the traced code goes on and notes a doubt; a step with a doubt is answered by the eager code.

Eager code on a GPU may do the same for a while: to branch it would wait for the device, which would then wait for the host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from eachgrad.kernels.signals import Flag, Slot, signal

D = TypeVar("D", bound="Doubts")


@dataclass
class Doubts:
    """What the traced code has noted, as booleans."""

    noted: list[Tensor] = field(default_factory=list)
    settled: list[Tensor] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)  # where the host hears of them, while the step goes on

    def settle(self, through: list[Tensor]) -> list[Tensor]:
        if not self.noted:
            return through
        device = self.noted[0].device
        flag = torch.stack([doubt.to(device) for doubt in self.noted]).any()
        self.noted.clear()
        self.slots.append(Slot())
        settled, passed = signal(flag, through, self.slots[-1])
        self.settled.append(settled)
        return passed

    def any(self, device: torch.device) -> Tensor:
        """Whether there is one."""
        self.settle([])
        if not self.settled:
            return torch.zeros((), dtype=torch.bool, device=device)
        return torch.stack([flag.to(device) for flag in self.settled]).any()


class Postponed(Doubts):
    """The same of code that is not traced, which asks for them when the device has enough to do."""

    def __init__(self) -> None:
        super().__init__()
        self.flags: list[Flag] = []

    def settle(self, through: list[Tensor]) -> list[Tensor]:
        if self.noted:
            device = self.noted[0].device
            self.flags.append(Flag(torch.stack([doubt.to(device) for doubt in self.noted]).any()))
            self.noted.clear()
        return through

    def wait(self) -> bool:
        """Whether there is one."""
        self.settle([])
        return any(flag.wait() for flag in self.flags)


_state = threading.local()


def _current() -> Doubts | None:
    return getattr(_state, "doubts", None)


@contextmanager
def gathered() -> Iterator[Doubts]:
    """While this lasts, the code is being traced."""
    with _in_force(Doubts()) as doubts:
        yield doubts


@contextmanager
def postponed() -> Iterator[Postponed]:
    """While this lasts, nothing is decided; what follows has to be done again if there was a doubt."""
    with _in_force(Postponed()) as doubts:
        yield doubts


@contextmanager
def _in_force(doubts: D) -> Iterator[D]:
    before, _state.doubts = _current(), doubts
    try:
        yield doubts
    finally:
        _state.doubts = before


def are_gathered() -> bool:
    """Whether doubts are noted already."""
    return _current() is not None


def are_postponed() -> bool:
    """Whether what is in doubt is going to be done again by the same code."""
    return isinstance(_current(), Postponed)


def settle(through: list[Tensor]) -> list[Tensor]:
    """The doubts so far can be looked at: what comes now, from `through`, takes its time and adds no more, or few."""
    doubts = _current()
    return through if doubts is None else doubts.settle(through)


def note(condition: Callable[[], Tensor]) -> bool:
    """Whether nothing may be decided by this value now: then the doubt is noted. Otherwise it is not computed."""
    doubts = _current()
    if doubts is None:
        return False
    doubts.noted.append(condition())
    return True
