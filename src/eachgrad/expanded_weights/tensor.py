"""ExpandedWeight: a parameter that sends each sample's gradient to the tensor it was made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import resolve_name
from torch.utils._pytree import tree_leaves

from eachgrad.blocks import Block, Dense
from eachgrad.rules import RULES, rule
from eachgrad.rules.registry import DenseRule

FunctionClass = TypeVar("FunctionClass", bound=type[torch.autograd.Function])
Decomposition = Callable[..., tuple[Tensor, ...]]

# The autograd.Function that answers for each torch function.
HANDLED_FUNCTIONS: dict[Callable, type[torch.autograd.Function]] = {}
# The (padded, packed) forms of each recurrent function, written with F.linear.
expanded_weights_rnn_decomps: dict[Callable, tuple[Decomposition, Decomposition]] = {}

# It only moves weights in memory, and the originals have their place.
_FLATTEN = torch._cudnn_rnn_flatten_weight  # type: ignore[attr-defined]
# Questions about the tensor itself, which the original answers.
_ABOUT_THE_ORIGINAL = {
    torch.Tensor.data_ptr,
    torch.Tensor.get_device,
    *(getattr(torch.Tensor, name).__get__ for name in ("data", "device", "dtype", "is_cuda", "shape")),
}


def implements_per_sample_grads(torch_function: Callable) -> Callable[[FunctionClass], FunctionClass]:
    """Register the decorated autograd.Function for `torch_function`.

    It is called as `apply(names of the keyword arguments, torch_function, *positional, *keyword values)`.
    """

    def register(function: FunctionClass) -> FunctionClass:
        HANDLED_FUNCTIONS[torch_function] = function
        if torch_function not in RULES:  # a rule of the engine's own is the better one
            rule(torch_function)(_ByFunction(torch_function, function))  # type: ignore[arg-type]
        return function

    return register


@dataclass(frozen=True)
class _ByFunction(DenseRule):
    """The engine's rule for an op that was given an autograd.Function here."""

    op: Callable
    function: type[torch.autograd.Function]

    def __call__(
        self, g: Tensor, args: tuple, kwargs: dict, sources: tuple[Tensor, ...], samples: frozenset[int]
    ) -> tuple[Block, ...]:
        leaves = {id(s): s.detach().clone().requires_grad_() for s in sources}
        expanded = {key: ExpandedWeight(leaf, len(g), "sum") for key, leaf in leaves.items()}

        def seen(value: Any) -> Any:
            return expanded.get(id(value), value.detach()) if isinstance(value, Tensor) else value

        with torch.enable_grad():
            values = (*map(seen, args), *map(seen, kwargs.values()))
            out = self.function.apply(tuple(kwargs), self.op, *values)
            torch.autograd.backward(out, g)
        return tuple(Dense(leaf.grad_sample) for leaf in leaves.values())  # type: ignore[attr-defined]


class ExpandedWeight(torch.Tensor):
    """A stand-in for `orig_weight` in forward; backward adds to `orig_weight.grad_sample`."""

    orig_weight: Tensor
    batch_size: int
    loss_reduction: str
    batch_first: bool
    allow_smaller_batches: bool

    def __new__(cls, orig_weight: Tensor, batch_size: int, loss_reduction: str) -> ExpandedWeight:
        if not isinstance(orig_weight, Tensor):
            raise RuntimeError(f"Can only make Expanded Weights of Tensors, got {type(orig_weight).__name__}.")
        if not orig_weight.requires_grad:
            raise RuntimeError("Can only make Expanded Weights of tensors that requires_grad.")
        if loss_reduction not in ("sum", "mean"):
            raise RuntimeError(f"Expected loss_reduction argument to be sum or mean, got {loss_reduction!r}.")
        return torch.Tensor._make_subclass(cls, orig_weight.detach(), True)

    def __init__(self, orig_weight: Tensor, batch_size: int, loss_reduction: str) -> None:
        self.orig_weight = orig_weight
        self.batch_size = batch_size
        self.loss_reduction = loss_reduction
        self.batch_first = True
        self.allow_smaller_batches = False

    def set_batch_first(self, is_batch_first: bool = True) -> None:
        """Say whether the samples lie along dimension 0 of the inputs (True) or along dimension 1."""
        self.batch_first = is_batch_first

    def set_allow_smaller_batches(self, is_allowed: bool = True) -> None:
        """Say whether an input may hold the first few samples only; the others' gradients are zero."""
        self.allow_smaller_batches = is_allowed

    def __repr__(self, *, tensor_contents: object = None) -> str:
        shape = tuple(self.orig_weight.shape)
        return f"ExpandedWeight({shape}, batch_size={self.batch_size}, loss_reduction={self.loss_reduction!r})"

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Iterable[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in HANDLED_FUNCTIONS:
            return HANDLED_FUNCTIONS[func].apply(tuple(kwargs), func, *args, *kwargs.values())
        if func in expanded_weights_rnn_decomps:
            padded, packed = expanded_weights_rnn_decomps[func]
            plain = not _is_packed(args, kwargs)
            with setup_rnn(plain, args, kwargs):
                return (padded if plain else packed)(*args, **kwargs)
        if func is _FLATTEN:
            return None
        if func in _ABOUT_THE_ORIGINAL:
            return func(*(a.orig_weight if isinstance(a, ExpandedWeight) else a for a in args), **kwargs)
        name = resolve_name(func) or getattr(func, "__name__", func)
        raise RuntimeError(f"Expanded Weights encountered but cannot handle function {name}")


def _is_packed(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a recurrent call is the one with batch sizes, the only integer tensor among its arguments."""
    second = args[1] if len(args) > 1 else kwargs.get("batch_sizes")
    return isinstance(second, Tensor) and second.dtype == torch.int64


@contextmanager
def _with_flag(name: str, value: bool, args: Any, kwargs: Any) -> Iterator[None]:
    leaves = tree_leaves((args, kwargs))
    before = {id(w): (w, getattr(w, name)) for w in leaves if isinstance(w, ExpandedWeight)}
    try:
        for weight, _ in before.values():
            setattr(weight, name, value)
        yield
    finally:
        for weight, old in before.values():
            setattr(weight, name, old)


def batch_second(args: Any, kwargs: Any) -> AbstractContextManager[None]:
    """A context in which the ExpandedWeights among the arguments look for samples along dimension 1."""
    return _with_flag("batch_first", False, args, kwargs)


def allow_smaller_batches(args: Any, kwargs: Any) -> AbstractContextManager[None]:
    """A context in which the ExpandedWeights among the arguments take inputs of fewer samples."""
    return _with_flag("allow_smaller_batches", True, args, kwargs)


def setup_rnn(use_input_variant: bool, args: Any, kwargs: Any) -> AbstractContextManager[None]:
    """The context of a recurrent decomposition: padded input if `use_input_variant`, else packed data."""
    return (batch_second if use_input_variant else allow_smaller_batches)(args, kwargs)
