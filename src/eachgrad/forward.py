"""The forward and the loss as the compiler's front end gives them: where samples lie, and the whole step as a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node
from torch.utils._pytree import TreeSpec, tree_flatten

from eachgrad import doubts, padding
from eachgrad.capture import Recorder
from eachgrad.cover import Solved, accept
from eachgrad.dtypes import SIXTEEN_BITS
from eachgrad.functions import without_autocast
from eachgrad.gradient import Gradient, costs_of
from eachgrad.grads import PerSampleGrads
from eachgrad.graph import named_trainable, tensors_in
from eachgrad.kernels.signals import Slot
from eachgrad.passes import Passes, marked
from eachgrad.queries import Accumulator, Query
from eachgrad.recall import Plan, is_regular, measured
from eachgrad.receipt import Record
from eachgrad.solve import blocks_of, solved
from eachgrad.tidy import writes_into_arguments


@dataclass(frozen=True)
class Given:
    """A batch as it was given, and as the graph takes it."""

    batch: tuple
    filled: padding.Padding | None = None
    is_alone: bool = False  # one sample, for a graph that is compiled for two and more

    @property
    def arguments(self) -> tuple:
        return self.batch if self.filled is None else (*self.filled.batch, self.filled.weights)

    @property
    def size(self) -> int:
        """The samples that it is filled up to; 0 where it is as it was given, and always the same number."""
        return 0 if self.filled is None else self.filled.size

    @property
    def is_filled(self) -> bool:
        """Whether samples were added."""
        return self.filled is not None and self.filled.samples < self.filled.size

    @property
    def is_pair(self) -> bool:
        """Whether it is one sample, filled up to two."""
        return self.filled is not None and (self.filled.samples, self.filled.size) == (1, 2)

    def samples(self, B: int, dim: int) -> tuple[Tensor, ...]:
        """The tensors of the batch, as the graph takes them, that have as many entries along `dim` as there are samples."""
        if self.filled is None:
            return tuple(t for t in tensors_in(self.batch) if t.ndim > dim and t.shape[dim] == B)
        pairs = zip(tensors_in(self.batch), tensors_in(self.filled.batch), strict=True)
        return tuple(t for own, t in pairs if own.ndim > dim and own.shape[dim] == self.filled.samples)

    def cut(self) -> Given:
        """One sample that was filled up to two, as one again."""
        assert self.filled is not None
        one = replace(self.filled, batch=self.batch, weights=self.filled.weights[:1], size=1)
        return Given(self.batch, one, is_alone=True)

    @property
    def kind(self) -> tuple[int, bool]:
        """What is compared with the eager answer once."""
        return self.size, self.is_filled


class NotCompiled(Exception):
    """This graph is answered eagerly, for this reason."""


class Traced(NamedTuple):
    """A step as a graph of torch's ops, and what is known of it."""

    gm: GraphModule
    slots: list[Slot]  # where its doubts arrive
    spec: TreeSpec  # of its answers
    unused: list[tuple[Tensor, bool]]  # parameters that it has no gradient of, and whether they were trained: zeros


# What a number of samples may be given to as a size, and what comes out does not depend on how many there are.
_SIZED = frozenset(
    """
    view reshape expand repeat tile unflatten getitem narrow split chunk unfold zeros ones empty arange eye rand randn
    new_zeros new_ones new_empty broadcast_to
    """.split()
)


def _calculates(node: Node) -> bool:
    """Whether a tensor is computed with a number that is open, of samples or what follows from it."""
    if node.op not in ("call_function", "call_method") or not isinstance(node.meta.get("example_value"), Tensor):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    given = [a.meta.get("example_value") for a in node.all_input_nodes]
    return name not in _SIZED and any(isinstance(a, (torch.SymInt, torch.SymFloat)) for a in given)


def _places(args: Sequence[Any], batch: tuple) -> list[int]:
    """Which arguments are tensors of the batch."""
    ids = {id(t) for t in tensors_in(batch)}
    return [k for k, a in enumerate(args) if id(a) in ids]


def _check_filled(losses: Tensor, fixed: Tensor) -> None:
    """Samples that are added must not change the others' losses."""
    found = losses.detach()[: len(fixed)]
    slack = 1e-2 if losses.dtype in SIXTEEN_BITS or losses.is_cuda else 1e-4
    size = float(fixed.nan_to_num(0.0, 0.0, 0.0).abs().mean())
    if not torch.allclose(found, fixed, rtol=slack, atol=slack * size, equal_nan=True):
        raise NotCompiled(
            "filled up with copies, the batch has other losses: samples are mixed, or a tensor that has as many "
            "entries as there are samples by chance was filled up as well. Pass such a tensor another way than in the batch."
        )


@dataclass
class Forward:
    """A forward and its loss, and which of its arguments are what."""

    model: nn.Module
    queries: Mapping[str, Query]
    gm: GraphModule
    names: list[str | None] = field(default_factory=list)  # of each argument that is a parameter
    held: list[int] = field(default_factory=list)  # the places of these
    given: frozenset[int] = frozenset()  # arguments that are tensors of the batch
    inputs: set[int] = field(default_factory=set)  # those of them that hold samples
    weighted: int | None = None  # the one that has the losses' weights, where batches are filled up
    sampled: dict[int, int] = field(
        default_factory=dict
    )  # inputs and weights, with the dimension that samples lie along

    def counts(self) -> bool:
        """Whether the number of samples is a number in the forward, and no size alone: samples that are added change it."""
        return any(map(_calculates, self.gm.graph.nodes))

    def look(self, args: tuple, given: Given, B: int, dim: int) -> None:
        """Find out which arguments are what."""
        filled = given.filled
        self.given, self.weighted = frozenset(_places(args, given.arguments)), None
        if filled is not None:
            self.weighted = next(k for k, a in enumerate(args) if a is filled.weights)
        known = {id(p): name for name, p in named_trainable(self.model).items()}
        self.names = [known.get(id(a)) for a in args]
        self.held = [k for k, name in enumerate(self.names) if name is not None]
        # One that has as many entries as there are samples by chance is told from them when others come.
        inputs = set(_places(args, given.samples(B, dim)))
        self.inputs = inputs & self.inputs if self.inputs else inputs
        self.sampled = dict.fromkeys(sorted(self.inputs), dim) | ({} if self.weighted is None else {self.weighted: 0})

    def counting(self, args: tuple) -> tuple:
        """The arguments, with every loss at its full weight: what does not count would leave no trace."""
        return tuple(torch.ones_like(a) if k == self.weighted else a for k, a in enumerate(args))

    def found(self, args: tuple, B: int, fixed: Tensor | None = None) -> Plan:
        """Where B samples lie."""
        others = [a for a, n in zip(args, self.names, strict=True) if isinstance(a, Tensor) and n is None]
        buffers = [(a, a._version, a.clone()) for a in others]
        try:
            self._check_graph()
            recorder, losses = self._record(args)
            if fixed is not None:
                _check_filled(losses, fixed)
            passes = Passes(recorder, [losses])
            plain = passes.run([losses], [torch.ones_like(losses)])
            uses = solved(recorder, plain, marked(passes, [losses], lambda marks, k: [marks.weights(k, losses)], B))
            accepted = accept(recorder, uses, [losses])
            self._check(uses)
        finally:
            for a, version, value in buffers:
                if a._version != version:
                    a.copy_(value)
        found = measured(recorder.uses, plain, uses)
        found.note(recorder.uses, accepted)
        return found

    def _check_graph(self) -> None:
        for node in self.gm.graph.nodes:
            if isinstance(node.target, HigherOrderOperator):
                names = ", ".join(repr(name) for name in self.names if name is not None)
                raise NotCompiled(
                    f"the forward has {node.target.name()} in it (an autograd.Function, a checkpoint, a control flow op), "
                    f"which is answered eagerly; parameters {names}"
                )

    def _check(self, uses: list[Solved]) -> None:
        for item in uses:
            if item.use.piece is not None:
                raise NotCompiled(f"{item.use}: it has no rule, and is answered eagerly")
            if item.layout is not None and not is_regular(item.layout):
                raise NotCompiled(
                    f"{item.use}: the samples lie in no regular order, which may be another one next time"
                )

    def _record(self, args: Sequence[Any]) -> tuple[Recorder, Tensor]:
        parameters = {n: a for n, a in zip(self.names, args, strict=True) if n is not None}
        others = [a for k, a in enumerate(args) if isinstance(a, Tensor) and k not in self.given]
        recorder = Recorder(parameters, [a for a in others if not a.requires_grad], None)
        recorder.tensors.mark_strong([args[k] for k in sorted(self.inputs)])
        recorder.by_kernels = False  # what is traced is rewritten later, and what is not is held against that
        with recorder:
            out = self.gm(*args)
        return recorder, out[0] if isinstance(out, (tuple, list)) else out

    def traced(self, args: tuple, plan: Plan) -> Traced:
        """The step for arguments that lie as planned."""
        from torch.fx.experimental.proxy_tensor import make_fx

        known: dict[str, Any] = {}
        step = partial(self._step, plan, known)
        traced = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)
        for node, a in zip(traced.graph.find_nodes(op="placeholder"), args, strict=True):
            node.meta.setdefault("val", a)  # of a number, which torch 2.11 says nothing of
        if writes_into_arguments(traced.graph):
            raise NotCompiled(
                "the forward writes into a buffer or an input: where the eager code must answer instead, it would twice"
            )
        return Traced(traced, **known)

    def answered(self, args: tuple, plan: Plan) -> list[Tensor]:
        """Losses and answers for arguments that lie as planned, op by op: what is traced, for once as it is."""
        _, *found = self._step(plan, {}, *args)
        return found

    def _step(self, plan: Plan, known: dict[str, Any], *args: Any) -> tuple[Tensor, ...]:
        """Forward, backward and answers, as they are traced: whether the answers can be trusted, losses, answers."""
        fresh = [a if n is None else a.detach().requires_grad_() for n, a in zip(self.names, args, strict=True)]
        with torch.enable_grad():
            recorder, losses = self._record(fresh)
            passes = Passes(recorder, [losses])
            plain = passes.run([losses], [torch.ones_like(losses)])  # what a derived parameter needs is kept
        with torch.no_grad(), without_autocast(), doubts.gathered() as noted:
            B = len(losses)
            accepted = plan.accepted(recorder.uses, plain)
            blocks = blocks_of(recorder, accepted, B)
            given = {n: a for n, a in zip(self.names, fresh, strict=True) if n is not None}
            # A parameter that the graph does not use is no argument of it.
            every = named_trainable(self.model)
            known["unused"] = [(p, p.requires_grad) for n, p in self.model.named_parameters() if n not in given]
            parameters = {
                n: given[n] if n in given else torch.empty(p.shape, dtype=p.dtype, device=p.device)
                for n, p in every.items()
            }
            gradients = {n: Gradient(n, p, blocks.get(n), B) for n, p in parameters.items()}
            grads = PerSampleGrads(gradients, B, Record(self.model, recorder, accepted), None)
            asked = Accumulator(**self.queries)
            asked.run(grads._over, B, costs_of(grads), grads.feed)
            leaves, known["spec"] = tree_flatten(vars(asked.answer()))
            if not all(isinstance(leaf, Tensor) for leaf in leaves):
                raise NotCompiled("an answer is no tensor")
            doubt, known["slots"] = noted.any(losses.device), noted.slots
        return (doubt, losses.detach(), *leaves)
