"""Decisions that values make, in a step that is traced once: noted, and looked at when the step has run.

A compiled step cannot branch on numbers. Where the eager code would (a norm that cancels and is computed again, a
sample that is not finite), the traced code goes on and notes a doubt; a step with a doubt is answered by the eager code.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

_state = threading.local()


@contextmanager
def gathered() -> Iterator[list[Tensor]]:
    """While this lasts, the code is being traced; the doubts it notes, as booleans."""
    before, _state.found = getattr(_state, "found", None), []
    try:
        yield _state.found
    finally:
        _state.found = before


def note(condition: Tensor) -> bool:
    """Whether the code is being traced: then the doubt is noted, and nothing may be decided by its value."""
    found: list[Tensor] | None = getattr(_state, "found", None)
    if found is None:
        return False
    found.append(condition)
    return True
