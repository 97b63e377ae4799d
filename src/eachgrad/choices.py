"""Choices that nothing but speed depends on, made once for all sizes of a batch.

A kernel or none, and how a kernel divides its work, are chosen by how many numbers there are. Steps that are traced for other
numbers of samples, to be one graph, choose what the first one chose.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

T = TypeVar("T", bound=int)  # or a bool


class Choices:
    """What a step that was traced has chosen, in the order in which it was asked."""

    def __init__(self) -> None:
        self.made: list[int] = []

    @contextmanager
    def hold(self) -> Iterator[None]:
        """While this lasts, the first time, choices are noted; every other time they are the same again."""
        before = getattr(_state, "choosing", None)
        _state.choosing = _Choosing(self.made, again=bool(self.made))
        try:
            yield
        finally:
            _state.choosing = before


class _Choosing:
    def __init__(self, made: list[int], again: bool):
        self.made, self.again, self.count = made, again, 0

    def chosen(self, value: T) -> T:
        if not self.again:
            self.made.append(value)
        self.count += 1
        # One that the first had not to make: the graphs are not alike, which is seen when they are compared.
        return cast(T, self.made[self.count - 1]) if self.count <= len(self.made) else value


_state = threading.local()


def chosen(value: T) -> T:
    """The value, or where steps of several sizes are traced, the first one's at this point."""
    choosing: _Choosing | None = getattr(_state, "choosing", None)
    return value if choosing is None else choosing.chosen(value)
