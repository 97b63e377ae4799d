"""What is known of torch's functions as such: their names, their bodies, and those that need no care."""

from __future__ import annotations

import gc
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch.overrides import resolve_name

P = ParamSpec("P")
R = TypeVar("R")


def op_name(func: Callable) -> str:
    """What to call a function in a message, so that it can be pasted into code."""
    if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return f"torch.ops.{func}"
    name = resolve_name(func) or getattr(func, "__qualname__", repr(func))
    return name.replace("_VariableFunctionsClass.", "torch.")


@dataclass(eq=False, slots=True)  # not frozen, which takes twice as long to make: each use has one
class Place:
    """Where in the user's code something happened: the line, and the module whose forward it is in."""

    line: str
    module: nn.Module | None = field(default=None, repr=False)
    root: Callable[[], nn.Module | None] = field(default=lambda: None, repr=False)  # the recorded model, if it lives

    def __str__(self) -> str:
        root = self.root()
        if self.module is None or root is None:
            return self.line
        path = next((name for name, module in root.named_modules() if module is self.module), None)
        kind = type(self.module).__name__
        if path is None:
            return f"{self.line}, in a {kind}"
        return f"{self.line}, in module {path!r} ({kind})" if path else f"{self.line}, in the model ({kind})"


_CALL, _WRAPPED_CALL = nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__


def call_site(root: Callable[[], nn.Module | None] = lambda: None, depth: int = 1) -> Place:
    """The innermost frame that is neither torch's nor ours, and the innermost module that is being called.

    `depth`: how many frames are known to be ours. To skip one is cheaper than to look at it.
    """
    frame, line, module = sys._getframe(depth), None, None
    while frame is not None and (line is None or module is None):
        code = frame.f_code
        if module is None and (code is _CALL or code is _WRAPPED_CALL):
            # The call around it has three locals to copy, and not fifteen.
            if code is _CALL and frame.f_back is not None and frame.f_back.f_code is _WRAPPED_CALL:
                frame = frame.f_back
            module = frame.f_locals["self"]
        elif line is None and not frame.f_globals.get("__name__", "").startswith(("torch.", "eachgrad.")):
            line = f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return Place(line or "an unknown place", module, root)


def opened(func: Callable) -> Callable:
    """A Python function of torch that runs its own body, so that the ops inside it are seen one by one.

    Such a function hands itself to the active mode as a whole before anything else; the copy is told that
    there is none.
    """
    assert isinstance(func, types.FunctionType)
    blind = {n: _never for n in func.__globals__ if n.startswith("has_torch_function")}
    scope = func.__globals__ | blind
    copy = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def can_be_opened(func: Callable) -> bool:
    if not isinstance(func, types.FunctionType) or not func.__module__.startswith("torch"):
        return False
    return any(name.startswith("has_torch_function") for name in func.__code__.co_names)


@contextmanager
def without_autocast() -> Iterator[None]:
    """Autocast off: what is computed from gradients is computed in their own precision, or better."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def precise(function: Callable[P, R]) -> Callable[P, R]:
    """The function, with autocast off; where it is off already, which is looked at first, for a sixth of the price."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch._C._is_any_autocast_enabled():
            return function(*args, **kwargs)
        with without_autocast():
            return function(*args, **kwargs)

    return run


def plainer(func: Callable, args: tuple) -> tuple[Callable, tuple]:
    """One of TEMPLATED without the tensor that only says a shape, a dtype or a place: nothing of it comes in."""
    if len(args) != 2 or not isinstance(args[1], Tensor):
        return func, args
    t, other = args
    if func in _LIKE_TYPES:
        return torch.Tensor.to, (t, other.device, other.dtype)
    if func in _LIKE_SHAPES:
        return _LIKE_SHAPES[func], (t, other.shape)
    if not other.ndim and other.dtype in (torch.int64, torch.int32):
        return func, ((t, int(other)) if t.requires_grad else args)
    return func, args


_LIKE_TYPES = {torch.Tensor.to, torch.Tensor.type_as}
_LIKE_SHAPES: dict[Callable, Callable] = {
    torch.Tensor.view_as: torch.Tensor.view, torch.Tensor.reshape_as: torch.Tensor.reshape,
    torch.Tensor.expand_as: torch.Tensor.expand,
}  # fmt: skip


TEMPLATED = {*_LIKE_TYPES, *_LIKE_SHAPES, torch.Tensor.__getitem__}


def _never(*_: Any) -> bool:
    return False


# Functions that read something about a tensor, or move no numbers of the batch.
PASSIVE = {
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.stride, torch.Tensor.is_contiguous,
    torch.Tensor.is_floating_point, torch.is_floating_point, torch.Tensor.__len__, torch.Tensor.get_device,
    torch.Tensor.data_ptr, torch.Tensor.element_size, torch.Tensor.requires_grad_, torch.Tensor.retain_grad,
    torch.Tensor.register_hook, torch.Tensor.__hash__, torch.Tensor.__format__, torch.Tensor.__repr__,
}  # fmt: skip
_ATTRIBUTES = """
shape dtype device layout is_cuda is_nested is_sparse is_quantized is_leaf grad_fn requires_grad ndim names grad is_meta
is_mkldnn is_mps is_xpu itemsize nbytes output_nr _version is_cpu _backward_hooks
""".split()
PASSIVE |= {getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES if hasattr(torch.Tensor, name)}
EXPANDING = {
    torch.Tensor.expand, torch.broadcast_to, torch.Tensor.broadcast_to, torch.Tensor.repeat,
    torch.tile, torch.Tensor.tile,
}  # fmt: skip


@contextmanager
def as_written() -> Iterator[None]:
    """Compiled functions run as they are written, also where a compiler is at work around this."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and loading the compiler takes seconds
        yield
        return
    before = eval_frame.set_eval_frame(None)
    try:
        with _stance:
            yield
    finally:
        eval_frame.set_eval_frame(before)


class _ForcedEager:
    """torch.compiler.set_stance("force_eager"), from the first who enters to the last who leaves.

    The stance is one for all threads: two whose blocks overlap would each put back what they found, and the last one the
    other's.
    """

    def __init__(self) -> None:
        self.lock, self.inside, self.set = threading.Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        with self.lock:
            if not self.inside:
                self.set.enter_context(torch.compiler.set_stance("force_eager"))
            self.inside += 1

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.inside -= 1
            if not self.inside:
                self.set.close()


_stance = _ForcedEager()


class _Uncollected:
    """Python looks for no cycles, from the first who enters to the last who leaves.

    A step makes some thousand small objects that live until it ends, and every few hundred of them Python looks at all that
    are young. Those that were looked at twice count as old, and once there are enough of these it looks at every object there
    is (benchmarks/host.py prints what it takes).
    """

    def __init__(self) -> None:
        self.lock, self.inside, self.was_on = threading.Lock(), 0, False

    def __enter__(self) -> None:
        with self.lock:
            if not self.inside:
                self.was_on = gc.isenabled()
                gc.disable()
            self.inside += 1

    def __exit__(self, *error: object) -> None:
        with self.lock:
            if self.inside == 1 and self.was_on:
                gc.enable()
            self.inside -= 1


uncollected = _Uncollected()


def unseen(function: Callable[P, R]) -> Callable[P, R]:
    """The function, as something that a compiler around it calls and does not look into."""
    return _skipped(function, eval_frame._FrameAction.DEFAULT)


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """The same, with all that the function calls."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    return _skipped(run, eval_frame._FrameAction.SKIP)


def _skipped(function: Callable[P, R], inside: Any) -> Callable[P, R]:
    strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, inside)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    function._torchdynamo_disable = True  # pyright: ignore[reportFunctionMemberAccess]
    return function
