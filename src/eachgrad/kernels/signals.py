"""signal: lets the host know a flag of a compiled step while the step goes on."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from eachgrad.kernels.library import library

_state = threading.local()


def _signal(flag: Tensor) -> Tensor:
    found: list | None = getattr(_state, "found", None)
    if found is not None:
        if flag.is_cuda:
            host = torch.empty((), dtype=torch.bool, pin_memory=True)
            host.copy_(flag, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            found.append((host, event))
        else:
            found.append((flag, None))
    return flag.clone()


library.define("signal(Tensor flag) -> Tensor")
library.impl("signal", _signal, "CPU")
library.impl("signal", _signal, "CUDA")


@torch.library.register_fake("eachgrad::signal", lib=library)
def _(flag: Tensor) -> Tensor:
    return torch.empty_like(flag)


def signal(flag: Tensor) -> Tensor:
    """The flag, which is on its way to the host as well: `wait` has it as soon as the device has come so far."""
    return torch.ops.eachgrad.signal(flag)


def listen() -> None:
    """Forget earlier flags: those of the step that starts now count."""
    _state.found = []


def wait() -> list[bool]:
    """The flags of the step that was started last, in the order in which they were given."""
    found, _state.found = _state.found, None
    for _, event in found:
        if event is not None:
            event.synchronize()
    return [bool(flag) for flag, _ in found]
