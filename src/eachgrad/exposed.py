"""Tensors that a forward reads by `.data`: what it writes there shows in no version, and whoever must know is told before."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

from torch import Tensor

EXPOSING = {Tensor.data.__get__}  # pyright: ignore[reportAttributeAccessIssue]

_state = threading.local()


def listen(listener: Callable[[Tensor], Any]) -> None:
    """From now on a method hears of every tensor in this thread whose `.data` a recorded forward reads, while it lives."""
    _state.listener = WeakMethod(listener)


def tell(t: Any) -> None:
    """Somebody reads `t.data`."""
    reference = getattr(_state, "listener", None)
    listener = None if reference is None else reference()
    if listener is not None and isinstance(t, Tensor):
        listener(t)
