"""compile: forward, backward and every answer as one compiled graph.

The compiler's front end turns the forward and the loss into a graph of torch's functions, with guards for everything
Python decided on the way: a change of shapes or of control flow gives another graph. The recorder watches that graph run
once, the layouts are measured as for any forward, and then forward, backward and answers are traced together, with the
layouts as they were found, and compiled. Layouts are measured again at the 2nd, 4th, 8th, ... call of each graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from eachgrad import padding
from eachgrad.errors import first_line
from eachgrad.forward import Forward, Given, NotCompiled
from eachgrad.queries import Accumulator, Answer, Query
from eachgrad.receipt import call_loss
from eachgrad.replay import Memory
from eachgrad.step import Step
from eachgrad.tape import record
from eachgrad.traced import Graph


def compile(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    *,
    batch_dim: int = 0,
    backend: str = "inductor",
    mode: str | None = None,
    pad_to: int | Sequence[int] | None = None,
    dynamic: bool | int = False,
    fewest: int = padding.FEWEST,
    usual: int | None = None,
    copies: bool = True,
    recompute: float = 0.1,
    **queries: Query,
) -> Compiled:
    """A callable that answers `queries` about the samples of a batch: `ask(x, y).norms`.

    `loss_fn` is as for `verify`, and returns one loss per sample. Calls 1, 2, 4, 8, ... for each shape run eagerly and
    measure; the others are one compiled graph. `backend` and `mode` are those of `torch.compile`. `answer.losses` has the
    losses, and `ask.reasons()` says why something is not compiled, and is answered eagerly instead.

    Each size of a batch has a graph of its own, unless `pad_to` says to how many samples batches are filled up: then one
    graph does for all, or one for each of several sizes, of which a batch gets the next. `dynamic` compiles one graph for
    batches of any size; a number has them filled up to its next multiple. Smaller ones than `fewest` are filled up to that,
    since where samples lie is measured more surely with more of them. Filled up is every tensor of the batch that has B
    entries along `batch_dim`, as its first one has. What is chosen by size is chosen for the `usual` number of samples, which
    is that of the first batch that is compiled if nobody says it.

    `mode="reduce-overhead"` (and "max-autotune") replays a CUDA graph, whose answers are copied for you: the next replay
    overwrites them. `copies=False` spares the copy, for loops that are done with an answer before the next call.

    `recompute` is the share of what the backward needs of the forward that may be computed again instead of kept, as far as
    pointwise ops do: 1.0 takes the least memory, 0.0 the least time.
    """
    options, sizes = {"backend": backend, "mode": mode}, padding.sizes_of(pad_to, dynamic, fewest, usual)
    return Compiled(model, loss_fn, queries, batch_dim, options, sizes, copies, recompute)


class Compiled:
    """See `compile`."""

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Tensor], queries: dict[str, Query], batch_dim: int,
        options: dict[str, Any], sizes: padding.Sizes | None = None, copies: bool = True, recompute: float = 0.0,
    ):  # fmt: skip
        Accumulator(**queries)  # checks them
        if not 0.0 <= recompute <= 1.0:
            raise ValueError(f"recompute is a share, from 0.0 to 1.0, not {recompute}")
        if sizes is not None:
            padding.check(queries)
        if "losses" in queries:
            raise ValueError("losses is the name of the losses themselves: ask under another name")
        self.model, self.loss_fn, self.queries = model, loss_fn, queries
        self.batch_dim, self.recompute = batch_dim, recompute
        self.sizes = sizes
        self.replays = options.get("mode") in _WITHOUT_GRAPHS and torch.cuda.is_available()
        self.options = options | {"mode": _WITHOUT_GRAPHS.get(options.get("mode"), options.get("mode"))}
        self.lends = not self.replays or not copies
        self.graphs: list[Graph] = []
        self.memory = Memory()
        self._given: Given | None = None
        self._answer: Answer | None = None
        self._refused = ""  # why the compiler's front end does not take the model
        self.trusts = False  # whether a step's answer is given before it is known to be right
        self.unsettled: list[Step] = []  # those that have not been asked yet
        self._doubted = False
        # A compiler around this one has nothing to see here.
        self._answered: Any = torch.compiler.disable(self._answer_for)
        self._apart = ""  # why each size has a graph of its own, where one was asked for all
        self._failed = False  # whether that is because none for all could be compiled
        self._front = self._begun()

    def _begun(self) -> Any:
        front = _losses_of(self.model, self.loss_fn, weighted=self.sizes is not None)
        dynamic = None if self.is_open else False  # None: as far as it is marked
        return torch.compile(front, fullgraph=True, dynamic=dynamic, backend=self._backend)

    @property
    def unit(self) -> int:
        """What all sizes are multiples of."""
        return 1 if self.sizes is None else self.sizes.unit

    @property
    def usual(self) -> int:
        """The samples that a graph for any number is to be best at, if that is known."""
        return self.sizes.fit(self.sizes.usual) if self.sizes is not None and self.sizes.usual else 0

    @property
    def is_open(self) -> bool:
        """Whether one graph is for batches of any size."""
        return self.sizes is not None and self.sizes.are_open

    def part(self, reason: str, exact: bool, failed: bool = False) -> None:
        """Go on with a graph for each size, of which there are few, unless they are to be `exact`.

        `failed`: the one for any size could not be compiled, and perhaps none can.
        """
        assert self.sizes is not None
        exact = exact or any(graph.counts for graph in self.graphs)
        self.sizes = replace(self.sizes, few=not exact, exact=exact)
        self._apart, self._failed = reason, failed
        self.memory.block.keep_free(0, 0)
        self._drop()
        self._front = self._begun()

    def hear(self, reason: str) -> None:
        """A graph of one size cannot be compiled: if none is, and none for any size could be, no other is tried."""
        if self._failed and not any(graph.step for graph in self.graphs):
            self._refused, self._apart = f"{reason}; {self._apart}", ""
            self._drop()

    def _drop(self) -> None:
        self.settle()
        self.release()  # the compiler may hold what is dropped for a while
        self.graphs.clear()

    def __call__(self, *batch: Any) -> Answer:
        """The answers for this batch."""
        return self._answered(*batch)

    def trusting(self, *batch: Any) -> Answer:
        """As a call, but nothing waits for the device: whether the answer is right is for `doubted` to say."""
        self.trusts = True
        try:
            return self._answered(*batch)
        finally:
            self.trusts = False

    def doubted(self) -> bool:
        """Whether an answer of `trusting` since the last time may be wrong: `again` gives the right one."""
        self.settle()
        found, self._doubted = self._doubted, False
        return found

    def again(self, *batch: Any) -> Answer:
        """The answer for a batch whose compiled one is in doubt: the eager one."""
        return self.with_room(lambda: self.eager(batch))

    def settle(self) -> None:
        """Hear of the steps that are still at work whether they have a doubt."""
        for step in self.unsettled:
            self._doubted = step.has_doubt() or self._doubted
        self.unsettled.clear()

    def _answer_for(self, *batch: Any) -> Answer:
        if self._refused:
            return self.eager(batch)
        filled = None if self.sizes is None else padding.padded(batch, self.sizes, self.batch_dim)
        self._given = Given(batch, filled)
        try:
            with torch._dynamo.config.patch(_SETTINGS):
                self._front(*self._given.arguments)
            # None where the compiler is switched off, by torch.compiler.set_stance or its environment.
            return self.eager(batch) if self._answer is None else self._answer
        except (TorchDynamoException, GuardOnDataDependentSymNode) as error:
            answer = self.eager(batch)  # or it is the model that fails, and says so better
            self._refused = f"the compiler does not take the forward as one graph: {first_line(error)}"
            return answer
        finally:
            self._given, self._answer = None, None

    def reasons(self) -> list[str]:
        """Why batches are answered eagerly, or without a CUDA graph where one was asked for."""
        apart = self._apart and f"each size has a graph of its own: {self._apart}"
        refused = [reason for reason in (self._refused, apart) if reason]
        return refused + [reason for graph in self.graphs for reason in graph.reasons()]

    def with_room(self, run: Callable[[], Answer]) -> Answer:
        """What `run` returns, which takes more memory than a compiled step: if it does not get it, CUDA graphs give way."""
        with suppress(torch.OutOfMemoryError):
            return run()
        self.release()
        return run()

    def release(self) -> None:
        """Give the memory of CUDA graphs back; they are captured again when they are needed."""
        for graph in self.graphs:
            for step in graph.step.values():
                step.release()

    def _backend(self, gm: GraphModule, example: Sequence[Tensor]) -> Callable[..., Any]:
        (returned,) = gm.graph.find_nodes(op="output")[0].args
        if len(returned) != 1:  # type: ignore[arg-type]
            raise NotCompiled("the forward keeps a tensor for later, beside the losses")
        dynamic = any(isinstance(a, torch.SymInt) for a in example)
        # By which tensors are trained: torch 2.11 has the same graph of the forward for a parameter that is frozen later on.
        known: dict[tuple[bool, ...], Graph] = {}

        def run(*args: Any) -> Any:
            assert self._given is not None
            trained = tuple(a.requires_grad for a in args if isinstance(a, Tensor))
            if trained not in known:
                known[trained] = self._graph(gm, dynamic)
            self._answer, out = known[trained].run(args, self._given)
            return out

        return run

    def _graph(self, gm: GraphModule, dynamic: bool) -> Graph:
        graph = Graph(self, Forward(self.model, self.queries, gm), dynamic=dynamic)
        if dynamic and not self.is_open:
            graph.traces = False
            graph.reason = (
                "a size is marked as dynamic for the compiler, where each has a graph of its own: do not mark it"
            )
        self.graphs.append(graph)
        return graph

    def eager(self, batch: tuple) -> Answer:
        """The same without the compiler."""
        tape = record(self.model, batch_dim=self.batch_dim)
        tape.recorder.by_kernels = False  # it judges a step that has them, and says what is wrong with a target
        with tape:
            losses = call_loss(self.model, self.loss_fn, batch)
        asked = Accumulator(**self.queries)
        tape.ask(losses, into=asked)
        answer = asked.answer()
        answer.losses = losses.detach()
        return answer


# The modes with CUDA graphs of their own, and what else they ask for: here the whole step is one.
_WITHOUT_GRAPHS: dict[str | None, str | None] = {
    "reduce-overhead": None,
    "max-autotune": "max-autotune-no-cudagraphs",
}

# Every shape and every way through the model is a graph of its own: as many as there are.
_SETTINGS = {
    "allow_rnn": True, "recompile_limit": 1000, "accumulated_recompile_limit": 100_000,
    "assume_static_by_default": True, "automatic_dynamic_shapes": False,
}  # fmt: skip


def _losses_of(model: nn.Module, loss_fn: Callable[..., Tensor], weighted: bool) -> Callable[..., Tensor]:
    """The losses as a function with a code object of its own: the compiler counts its graphs by code objects.

    `weighted`: the last argument is a weight for each loss.
    """

    def losses(*batch: Any) -> Tensor:
        if not weighted:
            return call_loss(model, loss_fn, batch)
        found = call_loss(model, loss_fn, batch[:-1])
        return found * batch[-1].to(found.dtype)

    code = losses.__code__.replace(co_name="losses")
    return FunctionType(code, losses.__globals__, "losses", None, losses.__closure__)
