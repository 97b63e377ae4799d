"""The rule table, and the decorators that fill it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from eachgrad.blocks import Block, Dense

RuleFunction = Callable[..., dict[str, Block]]
Arguments = dict[str, Any]  # an op's arguments by name
Lead = Callable[[Tensor, Arguments], int]


@dataclass(frozen=True)
class Rule:
    """How one op turns its output gradient into a block for each parameter among its arguments."""

    function: RuleFunction
    samples: tuple[str, ...]
    lead: Lead
    values: bool = True
    run: Callable[..., Tensor] | None = None
    saved: tuple[str, ...] = ()

    @cached_property
    def signature(self) -> inspect.Signature:
        return inspect.signature(self.function)

    @cached_property
    def parameters(self) -> list[inspect.Parameter]:
        """Those of the function that stand for the op's arguments: all but the gradient, which is the first."""
        return list(self.signature.parameters.values())[1:]

    @cached_property
    def takes_batch_dim(self) -> bool:
        return "batch_dim" in self.signature.parameters

    @cached_property
    def is_dense(self) -> bool:
        return isinstance(self.function, DenseRule)

    @cached_property
    def reads_parameters(self) -> bool:
        """Whether the values of the parameters may matter, and not their shapes alone."""
        return self.is_dense or self.values

    def bind(self, args: tuple, kwargs: dict) -> Arguments:
        """The call's arguments by name, defaults filled in."""
        if self.is_dense:
            return {str(k): v for k, v in enumerate(args)} | kwargs
        if self._names is not None and len(args) <= len(self._names):
            given = dict(zip(self._names, args, strict=False))
            if not kwargs:
                return {**self._defaults, **given}
            if kwargs.keys() <= self._known and not given.keys() & kwargs.keys():
                return {**self._defaults, **given, **kwargs}
        # The general way, and the one that says what is wrong: it took five times as long.
        bound = self.signature.bind_partial(None, *args, **kwargs)
        bound.apply_defaults()
        return dict(list(bound.arguments.items())[1:])

    def answer(self, g: Tensor, arguments: Arguments) -> dict[str, Block]:
        """What the function says of a call whose arguments were bound, spreading what it declares as *args."""
        order = self.order
        if order is not None and len(arguments) == len(order):
            return self.function(g, *map(arguments.__getitem__, order))
        positional, named = [], {}
        for parameter in self.parameters:
            name = parameter.name
            if name not in arguments:
                continue
            if parameter.kind is parameter.VAR_POSITIONAL:
                positional.extend(arguments[name])
            elif parameter.kind is parameter.KEYWORD_ONLY:
                named[name] = arguments[name]
            else:
                positional.append(arguments[name])
        return self.function(g, *positional, **named)

    @cached_property
    def order(self) -> list[str] | None:
        """The arguments, if all of them may be given by position, as a decorated function may want to have them."""
        names = self._names
        return names if names is not None and len(names) == len(self.parameters) else None

    @cached_property
    def _names(self) -> list[str] | None:
        """The arguments that may be given by position; None where one stands for several."""
        several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if any(p.kind in several for p in self.parameters):
            return None
        return [p.name for p in self.parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(p.name for p in self.parameters)

    @cached_property
    def _defaults(self) -> dict[str, Any]:
        return {p.name: p.default for p in self.parameters if p.default is not inspect.Parameter.empty}


class NoRule(Exception):
    """A composite has no answer for these arguments; the message says why, and what to do."""


class NeedsLoop(Exception):
    """Raised by a rule that cannot answer for this layout: the loop over samples takes over."""


RULES: dict[Callable, Rule] = {}
COMPOSITES: dict[Callable, Callable] = {}
BROADCAST: set[Callable] = set()


def as_called(op: Callable) -> Callable:
    """The function that a recording sees when `op` is called: a custom op's only overload."""
    op = getattr(op, "_opoverload", op)  # what torch.library.custom_op returns
    if isinstance(op, torch._ops.OpOverloadPacket) and op.overloads() == ["default"]:
        return op.default
    return op


def _first_dimension(g: Tensor, arguments: Arguments) -> int:
    return 1


def rule(
    *ops: Callable,
    samples: tuple[str, ...] = ("input",),
    lead: Lead = _first_dimension,
    values: bool = True,
    run: Callable[..., Tensor] | None = None,
    saved: tuple[str, ...] = (),
) -> Callable[[RuleFunction], RuleFunction]:
    """Register `f(g, *arguments of the op) -> {argument name: Block}` for each of `ops`.

    `g` is the gradient of the loss with respect to the op's output. Dimension 0 of `g`, and of the
    arguments named in `samples`, counts the samples. `lead(g, arguments)` says how many leading
    dimensions of the output the op treats index by index (default 1): within those the samples may lie
    along any dimension, or be folded with others, and are brought to the front before the rule is
    called. A rule with a keyword `batch_dim` gets everything as it was, and the dimension of `g` along
    which the samples lie. `values=False` says that the rule reads no parameter's values, so that they may
    change between the forward and the query. `run` computes the op while it is recorded, if something is faster than the
    op itself for parameters that ask for no gradient. `saved` names a node of autograd and results that it keeps of the
    forward, for a rule whose last argument is `saved`: a tuple of them, or None where they are not at hand. Any other layout
    is answered as well, exactly, by a loop over samples.
    """

    def register(function: RuleFunction) -> RuleFunction:
        for op in ops:
            RULES[as_called(op)] = Rule(function, samples, lead, values, run, saved)
        return function

    return register


def composite(*ops: Callable) -> Callable[[Callable], Callable]:
    """Register a function that computes each of `ops` from ops that have rules of their own."""

    def register(function: Callable) -> Callable:
        COMPOSITES.update({as_called(op): function for op in ops})
        return function

    return register


class DenseRule:
    """A rule that is given the call as it was, and answers with one block per source."""

    def __call__(
        self, g: Tensor, args: tuple, kwargs: dict, sources: tuple[Tensor, ...], samples: frozenset[int]
    ) -> tuple[Block, ...]:
        raise NotImplementedError


@dataclass(frozen=True)
class ViaVmap(DenseRule):
    """The derivative of any op, batched over dimension 0 of its output: a dense rule."""

    op: Callable

    def __call__(
        self, g: Tensor, args: tuple, kwargs: dict, sources: tuple[Tensor, ...], samples: frozenset[int]
    ) -> tuple[Block, ...]:
        """One block per source; tensors of the batch with g's size in dimension 0 are cut into samples."""
        cut: list[Tensor] = []
        keys = {id(s): k for k, s in enumerate(sources)}

        def mark(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) in keys:
                return _Slot("source", keys[id(value)])
            if id(value) in samples and value.ndim and len(value) == len(g):
                cut.append(value.detach())
                return _Slot("sample", len(cut) - 1)
            return value.detach()

        marked = tree_map(mark, (args, kwargs))

        def one(g_row: Tensor, rows: list[Tensor]) -> tuple[Tensor, ...]:
            def call(*parameters: Tensor) -> Tensor:
                def fill(value: Any) -> Any:
                    if not isinstance(value, _Slot):
                        return value
                    return parameters[value.index] if value.kind == "source" else rows[value.index][None]

                a, k = tree_map(fill, marked)
                return self.op(*a, **k)

            return torch.func.vjp(call, *(s.detach() for s in sources))[1](g_row[None])

        try:
            return tuple(Dense(v) for v in torch.func.vmap(one)(g, cut))
        except RuntimeError as error:  # some op in it cannot be batched, or the samples are not cut like this
            raise NeedsLoop from error


@dataclass(frozen=True)
class _Slot:
    kind: str
    index: int


def via_vmap(op: Callable) -> RuleFunction:
    """A dense rule for any op that torch.func.vmap can batch: `rule(op)(via_vmap(op))`."""
    return ViaVmap(op)  # type: ignore[return-value]
