"""One graph of the compiler's front end: where its samples lie, and forward, backward and answers as one compiled step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from eachgrad import doubts, padding
from eachgrad.agreement import difference, is_rough
from eachgrad.capture import Recorder
from eachgrad.cover import Solved, accept
from eachgrad.errors import CaptureError
from eachgrad.functions import without_autocast
from eachgrad.gradient import Gradient, costs_of
from eachgrad.grads import PerSampleGrads
from eachgrad.graph import named_trainable, tensors_in
from eachgrad.kernels.signals import Slot
from eachgrad.passes import Passes, marked
from eachgrad.queries import Accumulator, Answer
from eachgrad.recall import Plan, is_regular, measured
from eachgrad.receipt import Record
from eachgrad.solve import blocks_of, solved
from eachgrad.step import Graphs, Step, compiled
from eachgrad.tidy import writes_into_arguments

if TYPE_CHECKING:
    from eachgrad.compiled import Compiled


@dataclass(frozen=True)
class Given:
    """A batch as it was given, and as the graph takes it."""

    batch: tuple
    filled: padding.Padding | None = None

    @property
    def arguments(self) -> tuple:
        return self.batch if self.filled is None else (*self.filled.batch, self.filled.weights)


class NotCompiled(Exception):
    """This graph is answered eagerly, for this reason."""


def _generators() -> list[Tensor]:
    """The states of the generators that a forward draws from."""
    devices = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *devices]


def _same(before: list[Tensor], after: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def _places(args: Sequence[Any], batch: tuple) -> list[int]:
    """Which arguments are tensors of the batch."""
    ids = {id(t) for t in tensors_in(batch)}
    return [k for k, a in enumerate(args) if id(a) in ids]


def _check_filled(losses: Tensor, fixed: Tensor) -> None:
    """Samples that are added must not change the others' losses."""
    found = losses.detach()[: len(fixed)]
    slack = 1e-2 if losses.dtype in (torch.float16, torch.bfloat16) or losses.is_cuda else 1e-4
    size = float(fixed.nan_to_num(0.0, 0.0, 0.0).abs().mean())
    if not torch.allclose(found, fixed, rtol=slack, atol=slack * size, equal_nan=True):
        raise NotCompiled(
            "filled up to pad_to samples, the batch has other losses: samples are mixed, or a tensor that has as many "
            "entries as there are samples by chance was filled up as well. Pass such a tensor another way than in the batch."
        )


@dataclass
class Graph:
    """One graph of the front end: a forward and its loss, for one set of shapes and one way through the Python code."""

    owner: Compiled
    gm: GraphModule
    calls: int = 0
    reason: str = ""  # why it is not compiled, if it is not
    plan: Plan | None = None  # where the samples lie, as it was measured last
    names: list[str | None] = field(default_factory=list)  # of each argument that is a parameter
    given: frozenset[int] = frozenset()  # arguments that are tensors of the batch
    inputs: set[int] = field(default_factory=set)  # those of them that hold samples
    step: dict[Any, Step] = field(default_factory=dict)  # compiled, by the state of autocast
    held: list[Tensor] = field(default_factory=list)  # the parameters that are compiled into it
    unused: list[tuple[Tensor, bool]] = field(default_factory=list)  # others, and whether they were trained: zeros
    spec: TreeSpec | None = None
    slots: list[Slot] = field(default_factory=list)  # of the step that was traced last
    fresh: bool = False  # whether nothing has been compared with the eager answers yet
    traces: bool = True  # whether forward, backward and answers could be traced, as far as it was tried

    def reasons(self) -> list[str]:
        """Why it is not compiled, or has no CUDA graph where one was asked for."""
        found = [self.reason, *(step.reason for step in self.step.values())]
        return [reason for reason in found if reason]

    def run(self, args: tuple, given: Given) -> tuple[Answer, Any]:
        """The answer for this batch, and what the graph returns."""
        self.calls += 1
        due = self.calls & (self.calls - 1) == 0
        found = None if due or self.plan is None else self._run_step(args)
        if found is None:
            self.owner.settle()
            self.owner.release()  # eagerly it takes more memory
            drawn = _generators()
            answer = self.owner.eager(given.batch)
            if due:
                fixed = answer.losses if _same(drawn, _generators()) else None
                self._measure(args, given, len(answer.losses), fixed)
            return answer, (answer.losses,)
        losses, *leaves = found if self.owner.lends else [t.clone() for t in found]
        assert self.spec is not None
        answer = Answer(**tree_unflatten(list(leaves), self.spec))
        answer.losses = losses
        if given.filled is not None:
            answer = given.filled.undo(answer, self.owner.queries)
        if self.fresh:
            answer = self._checked(answer, args, given)
        return answer, (losses,)

    def _checked(self, answer: Answer, args: tuple, given: Given) -> Answer:
        """The first answer of a compiled step, if it is the eager one; that one, and no compiled one ever, if not."""
        self.fresh, drawn = False, _generators()
        wanted = self.owner.eager(given.batch)
        if not _same(drawn, _generators()):
            return answer  # random numbers, which are others every time
        far = difference(answer, wanted, is_rough(args))
        if not far:
            return answer
        self.plan, self.traces = None, False
        self._forget()
        self.reason = f"compiled, its answers differ from the eager ones: {far}"
        return wanted

    def _forget(self) -> None:
        """Drop what is compiled."""
        for step in self.step.values():
            step.release()
        self.step.clear()

    def _run_step(self, args: tuple) -> tuple[Tensor, ...] | None:
        """Losses and answers by the compiled step; None where there is none, or where it has a doubt."""
        kinds = {a.device.type for a in args if isinstance(a, Tensor)}
        key = tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in sorted(kinds))
        held = [a for a, name in zip(args, self.names, strict=True) if name is not None]
        if len(held) != len(self.held) or any(a is not b for a, b in zip(held, self.held, strict=True)):
            self.held = held
            self._forget()  # what is compiled has other parameters in it: one was replaced
        if any(p.requires_grad != trained for p, trained in self.unused):
            self._forget()  # it has answers about those that were trained in it
        known = key in self.step
        try:
            step = self.step[key] if known else self._compiled(args)
            self.owner.settle()  # of one that runs again the flag would be lost
            found = step.run(args)
        except torch.OutOfMemoryError:
            if known:
                raise
            return None
        except Exception as error:  # whatever the compiler says of what it cannot trace
            if known:
                raise
            self.plan, self.traces = None, False
            self.reason = f"it cannot be traced: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            return None
        self.step[key] = step
        self.fresh = self.fresh or not known
        self.owner.unsettled.append(step)  # also while it is waited for: what is interrupted comes late
        if self.owner.trusts and not self.fresh:
            return found
        doubt = step.has_doubt()
        self.owner.unsettled.remove(step)
        return None if doubt else found

    def _measure(self, args: tuple, given: Given, B: int, fixed: Tensor | None) -> None:
        """Find out where the samples lie in this graph, or why it cannot be compiled.

        `fixed`: the losses, where no random number was drawn for them.
        """
        if not self.traces:
            return
        self.given = frozenset(_places(args, given.arguments))
        if given.filled is not None:  # what does not count would leave no trace
            weights, B = given.filled.weights, given.filled.size
            args = tuple(torch.ones_like(a) if a is weights else a for a in args)
        known = {id(p): name for name, p in named_trainable(self.owner.model).items()}
        self.names = [known.get(id(a)) for a in args]
        batch = given.batch if given.filled is None else given.filled.batch
        dim = self.owner.batch_dim
        self.inputs = {k for k in _places(args, batch) if args[k].ndim > dim and args[k].shape[dim] == B}
        others = [a for a, n in zip(args, self.names, strict=True) if isinstance(a, Tensor) and n is None]
        buffers = [(a, a._version, a.clone()) for a in others]
        try:
            self._check_graph()
            recorder, losses = self._record(args)
            if given.filled is not None and fixed is not None:
                _check_filled(losses, fixed)
            passes = Passes(recorder, [losses])
            plain = passes.run([losses], [torch.ones_like(losses)])
            uses = solved(recorder, plain, marked(passes, [losses], lambda marks, k: [marks.weights(k, losses)], B))
            accepted = accept(recorder, uses, [losses])
            self._check(uses)
        except (CaptureError, NotCompiled) as error:
            self.plan, self.reason = None, str(error)
            return
        finally:
            for a, version, value in buffers:
                if a._version != version:
                    a.copy_(value)
        found = measured(recorder.uses, plain, uses)
        found.note(recorder.uses, accepted)
        if self.plan is None or not found.same(self.plan):
            self._forget()  # what is compiled has the old layouts in it
        self.plan, self.reason = found, ""

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
        with recorder:
            out = self.gm(*args)
        return recorder, out[0] if isinstance(out, (tuple, list)) else out

    def _compiled(self, args: tuple) -> Step:
        from torch.fx.experimental.proxy_tensor import make_fx

        traced = make_fx(self._step, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)
        if writes_into_arguments(traced.graph):
            raise NotCompiled(
                "the forward writes into a buffer or an input: where the eager code must answer instead, it would twice"
            )
        held = {k: a for k, (a, name) in enumerate(zip(args, self.names, strict=True)) if name is not None}
        graphs = Graphs(self.given, self.owner.memory) if self.owner.replays else None
        return compiled(traced, held, self.slots, self.owner.options, graphs, self.owner.recompute)

    def _step(self, *args: Any) -> tuple[Tensor, ...]:
        """Forward, backward and answers, as they are traced: whether the answers can be trusted, losses, answers."""
        assert self.plan is not None
        fresh = [a if n is None else a.detach().requires_grad_() for n, a in zip(self.names, args, strict=True)]
        with torch.enable_grad():
            recorder, losses = self._record(fresh)
            passes = Passes(recorder, [losses])
            plain = passes.run([losses], [torch.ones_like(losses)], keep=False)
        with torch.no_grad(), without_autocast(), doubts.gathered() as noted:
            B = len(losses)
            accepted = self.plan.accepted(recorder.uses, plain)
            blocks = blocks_of(recorder, accepted, B)
            given = {n: a for n, a in zip(self.names, fresh, strict=True) if n is not None}
            # A parameter that the graph does not use is no argument of it.
            every = named_trainable(self.owner.model)
            self.unused = [(p, p.requires_grad) for n, p in self.owner.model.named_parameters() if n not in given]
            parameters = {
                n: given[n] if n in given else torch.empty(p.shape, dtype=p.dtype, device=p.device)
                for n, p in every.items()
            }
            gradients = {n: Gradient(n, p, blocks.get(n), B) for n, p in parameters.items()}
            grads = PerSampleGrads(gradients, B, Record(self.owner.model, recorder, accepted), None)
            asked = Accumulator(**self.owner.queries)
            asked.run(grads._over, B, costs_of(grads), grads.feed)
            leaves, self.spec = tree_flatten(vars(asked.answer()))
            if not all(isinstance(leaf, Tensor) for leaf in leaves):
                raise NotCompiled("an answer is no tensor")
            doubt, self.slots = noted.any(losses.device), noted.slots
        return (doubt, losses.detach(), *leaves)
