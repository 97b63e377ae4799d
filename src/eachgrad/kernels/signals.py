"""signal: lets the host know a flag of a compiled step while the step goes on; Flag: of an eager one.

In a compiled one the device writes the flag into a number in the host's memory that the graph knows by its key: a CUDA graph,
which is replayed without the host, does it again every time.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from eachgrad.kernels.library import library

_UNKNOWN, _DOWN, _UP = 0, 1, 2
_PATIENCE = 0.2  # seconds after which the device is asked whether it is still at work

_lock = threading.Lock()
_slots: weakref.WeakValueDictionary[int, Slot] = weakref.WeakValueDictionary()


class Slot:
    """Where one flag of a step arrives."""

    def __init__(self) -> None:
        # The first that is free: a graph made anew has the key that it had, and is found in the compiler's cache.
        with _lock:
            self.key = next(key for key in itertools.count() if key not in _slots)
            _slots[self.key] = self

    @cached_property
    def _number(self) -> Tensor:  # not before the step runs: where it is traced, tensors have no numbers
        return torch.full((1,), _UNKNOWN, dtype=torch.int32, pin_memory=torch.cuda.is_available())

    @cached_property
    def _seen(self) -> Any:
        return self._number.numpy()  # reads it afresh, and faster than a tensor

    def clear(self) -> None:
        """Forget the last flag: that of the step that starts now counts."""
        self._seen[0] = _UNKNOWN

    def write(self, flag: Tensor) -> None:
        self._number.copy_(flag.to(torch.int32).view(1) + _DOWN, non_blocking=True)

    def wait(self) -> bool:
        """The flag, as soon as the device has come so far; a step that has ended without it counts as raised."""
        late = time.perf_counter() + _PATIENCE
        while self._seen[0] == _UNKNOWN:
            if time.perf_counter() > late:
                if not torch.cuda.is_available() or torch.cuda.current_stream().query():  # which raises if it failed
                    return bool(self._seen[0] != _DOWN)
                late = time.perf_counter() + _PATIENCE
        return bool(self._seen[0] != _DOWN)


class Flag:
    """A flag on its way from the device to the host, while the device goes on."""

    def __init__(self, flag: Tensor):
        self._here, self._event = flag, None
        if flag.is_cuda:
            self._here = torch.empty((), dtype=flag.dtype, pin_memory=True).copy_(flag, non_blocking=True)
            self._event = torch.cuda.current_stream(flag.device).record_event()

    def wait(self) -> bool:
        """The flag, as soon as the device has come so far."""
        if self._event is not None:
            self._event.synchronize()
        return bool(self._here)


def _signal(flag: Tensor, through: list[Tensor], key: int) -> tuple[Tensor, list[Tensor]]:
    slot = _slots.get(key)
    if slot is not None:
        slot.write(flag)
    return flag.clone(), [t.clone() for t in through]


library.define("signal(Tensor flag, Tensor[] through, int key) -> (Tensor, Tensor[])")
library.impl("signal", _signal, "CPU")
library.impl("signal", _signal, "CUDA")


@torch.library.register_fake("eachgrad::signal", lib=library)
def _(flag: Tensor, through: list[Tensor], key: int) -> tuple[Tensor, list[Tensor]]:
    return torch.empty_like(flag), [torch.empty_like(t) for t in through]


def signal(flag: Tensor, through: list[Tensor], slot: Slot) -> tuple[Tensor, list[Tensor]]:
    """The flag, which is on its way to the slot as well, and the tensors of `through`.

    What is computed from these comes after it, however a compiler orders its work.
    """
    return torch.ops.eachgrad.signal(flag, through, slot.key)
