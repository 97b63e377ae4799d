"""record: watch an ordinary forward, then ask about each sample's gradient."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from eachgrad import checks, familiar, foreign, lossgraph, recall, scalar, stream
from eachgrad.capture import Recorder
from eachgrad.cover import Halved, Solved, accept, check_complete
from eachgrad.errors import CaptureError
from eachgrad.functions import as_written, precise, uncollected, uncompiled, unseen
from eachgrad.gradient import Gradient, costs_of
from eachgrad.grads import PerSampleGrads
from eachgrad.graph import Node, graph_nodes, modules_of, named_trainable, node_of, tensors_in
from eachgrad.passes import Passes, marked
from eachgrad.plan import parse_bytes
from eachgrad.queries import Accumulator, Answer, Over, Query
from eachgrad.receipt import Record, aliases_of, check_weighted_sum
from eachgrad.selection import Aliases
from eachgrad.signature import of_graph
from eachgrad.solve import attached, blocks_of, solved
from eachgrad.use import Use

_active = threading.local()


@uncompiled
def record(
    model: nn.Module,
    *,
    batch_size: int | None = None,
    batch_dim: int = 0,
    check: bool = False,
    memory: int | str | None = None,
    create_graph: bool = False,
    fallback: str = "refuse",
) -> Tape:
    """A context in which the forward of `model` is recorded; `tape.backward(losses)` ends it.

    `batch_size` is needed only where it can be read neither from the losses nor from the model's inputs.
    `batch_dim` is the dimension of the model's inputs and outputs that counts the samples; what lies
    inside the model is measured. `check` compares the answer with an ordinary gradient, for the price of
    one more backward pass, and raises if they differ. `memory`, such as "2GiB", bounds what a clipped sum holds until
    the norms are known: with more than it needs, gradients are kept for speed; with less, some are computed twice.

    `create_graph` makes the answers differentiable once more, with respect to the parameters and to inputs that require
    grad: `grads.norms().square().sum().backward()`, or `grads.dot(v)` for products with each sample's Hessian. Nothing
    is streamed or freed, recurrent layers run step by step, and checkpoints are refused. As everywhere in torch, a
    second backward over the same answers needs `retain_graph=True`. `noise_scale` stays a few plain numbers.

    `fallback` says what happens to an op that has no rule: "refuse" raises, "vmap" differentiates it for all samples at
    once, "loop" one sample after another where vmap cannot. Both are exact, and cost B derivatives of that op.
    """
    return Tape(model, batch_size, batch_dim, check, parse_bytes(memory), create_graph, fallback)


class Tape:
    """One recorded forward."""

    def __init__(
        self, model: nn.Module, batch_size: int | None, batch_dim: int, check: bool, budget: int | None = None,
        create_graph: bool = False, fallback: str = "refuse",
    ):  # fmt: skip
        if fallback not in ("refuse", "vmap", "loop"):
            raise ValueError(f'fallback is "refuse", "vmap" or "loop", not {fallback!r}')
        if not isinstance(model, nn.Module):
            raise TypeError(f"record takes an nn.Module, not {type(model).__name__}")
        if batch_size is not None and (
            isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1
        ):
            raise ValueError(f"batch_size is a positive integer, not {batch_size!r}")
        self.model, self.batch_dim, self.check, self.budget = model, batch_dim, check, budget
        self.given_batch_size, self.create_graph = batch_size, create_graph
        self._modules = modules_of(model)
        constants = [t for module in self._modules.values() for t in module._buffers.values() if t is not None]
        self.trainable = named_trainable(model, self._modules)
        self.recorder = Recorder(self.trainable, constants, batch_size, check, create_graph, model, fallback)
        self.inputs: list[Tensor] = []
        self.outputs: list[Any] = []
        self._thread = threading.get_ident()
        self.disagreeing: set[int] = set()  # sizes of the inputs along the batch dimension
        self._end = 0
        self._kind: Hashable = None  # of the inputs, if a forward like this one may be followed by a script
        self._plan: recall.Plan | None = None
        self._state = "new"

    @unseen
    def __enter__(self) -> Tape:
        if self._state != "new":
            raise CaptureError("this tape has been used: call eachgrad.record again for another forward")
        if getattr(_active, "tape", None) is not None:
            raise CaptureError("record inside another record: end the outer one first")
        if isinstance(self.model, torch.jit.ScriptModule):
            raise CaptureError("a scripted model hides its ops: record the nn.Module it was made from")
        for name, p in self.trainable.items():
            late = self.check and getattr(p, "_post_accumulate_grad_hooks", None)
            if p._backward_hooks or late:
                raise CaptureError(
                    f"parameter {name!r} has a gradient hook, which per-sample gradients would not pass: remove it, and "
                    "apply it to the answer"
                )
        self._thread = threading.get_ident()
        with ExitStack() as settings:
            settings.callback(self.model.register_forward_pre_hook(self._entering, with_kwargs=True).remove)
            settings.callback(self.model.register_forward_hook(self._leaving).remove)
            settings.enter_context(uncollected)
            settings.enter_context(as_written())  # so that the ops of what the user compiled can be seen
            settings.enter_context(self.recorder.kernels())
            settings.enter_context(foreign.modules_watched(self.recorder, self._modules))
            settings.enter_context(self.recorder)
            self._settings = settings.pop_all()  # from here on they are left by `__exit__`
        _active.tape, self._state = self, "recording"
        return self

    @unseen
    def __exit__(self, *error: Any) -> None:
        try:
            if self.recorder.follower is not None:
                # After an error, too, all is said: who catches it may ask about the losses that there are.
                self.recorder.follower.end() if error[:1] == (None,) else self.recorder.follower.leave()
            self._settings.__exit__(*error)
        finally:
            self.recorder.follower = None
            _active.tape, self._state = None, "recorded"
        # What autograd makes from here on is no part of the recording.
        self._end = torch._C._autograd._get_sequence_nr()  # pyright: ignore[reportAttributeAccessIssue]

    @uncompiled
    @precise
    def backward(self, losses: Tensor, loss_reduction: str | None = None) -> PerSampleGrads:
        """The gradient of each sample's loss: `losses` is (B,), or one number with "sum" or "mean".

        As with torch's own backward, the graph may be freed on the way, unless it was recorded with `create_graph`.
        """
        self._check_askable(losses, loss_reduction)
        self._state = "done"
        if losses.ndim == 0:
            return self._scalar(losses, loss_reduction)
        passes, key = self._prepared(losses)
        placed = self._placed(passes, key, losses, self._recalled(passes, key))
        return self._answer(placed, losses, [losses], len(losses))

    @overload
    def ask(self, losses: Tensor, *, loss_reduction: str | None = None, **queries: Query) -> Answer: ...

    @overload
    def ask(self, losses: Tensor, *, loss_reduction: str | None = None, into: Accumulator) -> None: ...

    @uncompiled
    @precise
    def ask(self, losses, *, loss_reduction=None, into=None, **queries):
        """Answers to questions that are known before the backward: {name: answer} as attributes.

        Gradients are used and let go layer by layer, where the layouts of an earlier forward like this one are known;
        otherwise as by `backward`. `into` gathers the answers of several batches.
        """
        if (into is None) == (not queries):
            raise ValueError("pass queries by name, such as norms=eachgrad.norms(), or into=an Accumulator")
        asked = Accumulator(**queries) if into is None else into
        self._check_askable(losses, loss_reduction)
        parameters: dict[str, Any] = {**self.trainable}
        if losses.ndim:
            passes, key = self._prepared(losses)
            plan = self._recalled(passes, key)
            if plan is not None and plan.costs and plan.wanted is not None and not self.check and not self.create_graph:
                self._state = "done"
                self._stream(asked, passes, plan, losses, parameters)
                return None if into else asked.answer()
            grads = self._answer(self._placed(passes, key, losses, plan), losses, [losses], len(losses))
        else:
            grads = self._scalar(losses, loss_reduction)
        self._state = "done"
        costs = costs_of(grads)
        if self._plan is not None:
            self._plan.costs = costs
        asked.run(grads._over, grads.batch_size, costs, grads.feed)
        return None if into else asked.answer()

    def _stream(
        self, asked: Accumulator, passes: Passes, plan: recall.Plan, losses: Tensor, parameters: dict[str, Any]
    ) -> None:
        counted = plan.counted(self.recorder.uses)
        covering = zip(self.recorder.uses, counted, strict=True)
        accepted = [(use, some[1]) for use, some in covering if some is not None]
        check_complete(self.recorder, accepted, [losses], passes.leaves)
        checks.check_statistics(self.recorder, self.batch_dim, self._ends([losses], passes.known), len(losses))
        over = Over(parameters, Aliases(partial(aliases_of, self.model)), self.budget)
        twice = asked.needs_again(over, plan.costs)

        def visit(add: Callable[[Gradient], None], names: set[str] | None) -> None:
            stream.visit(passes, losses, plan, parameters, add, names, last=not twice or names is not None)

        with uncollected:
            asked.run(over, len(losses), plan.costs, visit)

    def _check_askable(self, losses: Tensor, reduction: str | None) -> None:
        if self._state == "recording":
            raise CaptureError("leave the record block before calling tape.backward")
        if self._state != "recorded":
            raise CaptureError("a tape answers one backward: record the forward again for another")
        checks.check_losses(losses)
        if self.create_graph and not torch.is_grad_enabled():
            raise CaptureError("create_graph=True, but gradients are off: call tape.backward outside of torch.no_grad")
        if self.recorder.differentiated:
            raise CaptureError(
                "a derivative of the recorded forward was taken with create_graph, and the loss may depend on it: "
                "parameters are used in its backward, where they cannot be followed. Leave derivatives out of the loss."
            )
        if losses.ndim and reduction is not None:
            raise ValueError(
                "loss_reduction goes with a loss that is one number; these are one per sample: leave it out"
            )
        if losses.ndim and self.given_batch_size not in (None, len(losses)):
            raise CaptureError(
                f"{len(losses)} losses, but batch_size={self.given_batch_size}: pass one loss per sample"
            )

    def _prepared(self, losses: Tensor) -> tuple[Passes, Hashable]:
        """The passes over the graph of losses per sample, and the key of the plan they may have; None if none."""
        B = len(losses)
        if self.given_batch_size is None:
            checks.check_count(self.recorder, self.inputs, B)
        passes = Passes(self.recorder, [losses])
        forward = None if self.recorder.tensors.opaque or passes.reentrant else self.recorder.signature.value
        loss = None if forward is None else of_graph(passes.nodes, self._end)
        if loss is None or B == 1:
            return passes, None
        taps = tuple(tuple(use.tap.shape) for use in self.recorder.uses)
        return passes, (forward, loss, B, self.batch_dim, tuple(self.trainable), taps)

    def _recalled(self, passes: Passes, key: Hashable) -> recall.Plan | None:
        plan = None if key is None else recall.find(self.model, key)
        if plan is None or not plan.fits(passes.reached()):
            return None
        if self._kind is not None:
            familiar.expect(self.model, self._kind)
        return plan

    def _placed(self, passes: Passes, key: Hashable, losses: Tensor, plan: recall.Plan | None) -> list[Solved]:
        """Every use with the layout of its samples: by the plan of an earlier forward like this one, or measured."""
        keep, attach = plan is None or self.check or self._has_derived(), plan is not None and self.create_graph
        plain = passes.run([losses], [torch.ones_like(losses)], keep, attach)
        if plan is not None:
            self._plan = plan
            return plan.apply(self.recorder.uses, plain)
        evidence = marked(passes, [losses], lambda marks, k: [marks.weights(k, losses)], len(losses))
        uses = solved(self.recorder, plain, evidence)
        scalar.check_order(self.recorder, uses, self.inputs, self.batch_dim, len(losses))
        if key is not None:
            self._plan = recall.keep(self.model, key, self.recorder.uses, plain, uses)
        return attached(passes, uses, [losses]) if self.create_graph else uses

    def _scalar(self, loss: Tensor, reduction: str | None) -> PerSampleGrads:
        if reduction is None:
            raise ValueError('a loss that is one number needs loss_reduction="sum" or "mean"')
        if reduction not in ("sum", "mean"):
            raise ValueError(f'loss_reduction is "sum" or "mean", not {reduction!r}')
        B = self.recorder.batch_size
        if B is None:
            raise CaptureError(
                "the batch size is not known: pass record(model, batch_size=...), or one loss per sample"
            )
        returned = [o for value in self.outputs for o in scalar.outputs_of(value, B, self.batch_dim)]
        outputs = scalar.cut(loss, returned)
        if len(self.disagreeing) > 1 and not all(
            o.places and scalar.is_declared(o.places[0], self.batch_dim) for o in outputs
        ):
            raise CaptureError(
                f"the model's inputs have sizes {sorted(self.disagreeing)} along dimension {self.batch_dim}: pass "
                "record(model, batch_size=...), or one loss per sample"
            )
        if not outputs:
            raise CaptureError(
                "a loss that is one number is followed from the model's outputs, and it depends on none of them: call "
                "the recorded model itself, or pass one loss per sample"
            )
        checks.check_places(self.recorder, outputs)
        edges = {(node_of(o.tensor), o.tensor.output_nr): checks.place_state(o.places) for o in outputs}
        lossgraph.check(loss.grad_fn, edges, reduction, B, None, measured=True)
        v = torch.autograd.grad(loss, [o.tensor for o in outputs], create_graph=True)
        passes = Passes(self.recorder, [loss])
        plain = passes.run([loss], [torch.ones_like(loss)])
        uses = scalar.settle(passes, outputs, v, plain, self.inputs, B, self.batch_dim)
        if self.create_graph:
            uses = attached(passes, uses, [loss])
        scale = B if reduction == "mean" else 1
        return self._answer(
            [Solved(u.use, u.g * scale, u.layout) for u in uses], loss * scale, [o.tensor for o in outputs], B
        )

    def _answer(self, uses: list[Solved], loss: Tensor, ends: list[Tensor], B: int) -> PerSampleGrads:
        try:
            accepted = accept(self.recorder, uses, [loss])
        except Halved:  # a statistic over the batch is what it most likely comes from
            checks.check_statistics(self.recorder, self.batch_dim, self._ends(ends), B)
            raise
        checks.check_statistics(self.recorder, self.batch_dim, self._ends(ends), B)
        if self._plan is not None:
            self._plan.note(self.recorder.uses, accepted)
        made: dict[str, list[Use]] = {}
        blocks, parameters = blocks_of(self.recorder, accepted, B, made), self.trainable
        gradients = {
            name: Gradient(name, p, blocks.get(name), B, tuple(made.get(name, ())), self.create_graph)
            for name, p in parameters.items()
        }
        grads = PerSampleGrads(gradients, B, Record(self.model, self.recorder, accepted), self.budget)
        if self.check:
            check_weighted_sum(grads, loss, self.recorder, parameters)
        return grads

    def _has_derived(self) -> bool:
        """Whether a use is attached to what its argument was derived by, which a backward would free on its way."""
        known = self.recorder.tensors.parameters
        return any(use.aliases and any(id(source) not in known for source in use.sources) for use in self.recorder.uses)

    def _ends(self, ends: list[Tensor], nodes: set[Node] | None = None) -> list[Tensor]:
        """These, and the model's outputs behind them: a loss may be computed outside of the block.

        `nodes`: all that these are computed by, if that is known.
        """
        nodes = set(graph_nodes([t.grad_fn for t in ends])) if nodes is None else nodes
        return [*ends, *(t for t in tensors_in(self.outputs) if t.grad_fn is not None and t.grad_fn in nodes)]

    # Hooks on the model, gone with the context

    def _entering(self, module: nn.Module, args: tuple, kwargs: dict | None = None) -> None:
        if threading.get_ident() != self._thread or not torch.is_grad_enabled():
            return
        leaves, begins = tensors_in((args, kwargs)), not self.inputs and self.recorder.is_new
        if self.recorder.follower is not None:  # the model is called a second time
            self.recorder.follower.leave()
        packed = [p for p in (*args, *(kwargs or {}).values()) if isinstance(p, PackedSequence)]
        batched = [p.data for p in packed] or [t for t in leaves if t.ndim > self.batch_dim]
        if packed:
            sizes = [int(p.batch_sizes[0]) for p in packed]
        else:
            sizes = [t.shape[self.batch_dim] for t in batched]
        if self.recorder.batch_size is None and sizes:
            self.recorder.batch_size = sizes[0]
        if self.given_batch_size is None:
            self.disagreeing.update(sizes)
        # The tensor with most dimensions is of the batch for certain: the others may be masks or positions.
        fitting = [t for t, n in zip(batched, sizes, strict=True) if n == self.recorder.batch_size]
        if len({*sizes, self.recorder.batch_size}) == 1:
            main = sorted(fitting, key=lambda t: -t.ndim)[:1]
            # So are ids: as positions they would be of no sample, and be refused for that.
            ids = [t for t in fitting if t.ndim == 2 and t.dtype in (torch.int64, torch.int32)]
            self.recorder.tensors.mark_strong([*main, *ids])
        if not packed:
            self.recorder.tensors.set_tag(batched, self.batch_dim)
        self.inputs.extend(leaves)
        if begins and not packed and not (self.check or self.create_graph):
            self._kind = self._kind_of(leaves)
            self.recorder.follower = familiar.begin(self.recorder, self.model, self._kind, leaves)

    def _kind_of(self, inputs: list[Tensor]) -> Hashable:
        """What forwards that a script may follow have in common."""
        each = tuple([(type(t), t.shape, t.dtype, t.requires_grad) for t in inputs])
        places = {id(t): n for n, t in enumerate(inputs)}  # one tensor may be several inputs
        names = self.recorder.tensors.parameters
        which = tuple([(places[id(t)], names.get(id(t))) for t in inputs])
        return each, which, self.batch_dim, self.given_batch_size, tuple(self.trainable)

    def _leaving(self, module: nn.Module, args: tuple, output: Any) -> None:
        if threading.get_ident() == self._thread:
            self.outputs.append(output)
