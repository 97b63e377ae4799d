"""Backward passes over a recorded graph, and the marked ones that tell samples apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from eachgrad import layout as lay
from eachgrad.capture import Recorder
from eachgrad.errors import CaptureError
from eachgrad.foreign import is_function
from eachgrad.functions import opened
from eachgrad.graph import Node, graph_nodes
from eachgrad.use import Use, refuse_written

Weights = list[Tensor]  # one cotangent per root

# Both hand themselves to an active mode, which would then be off inside; a checkpoint needs it on.
grad, _backward = opened(torch.autograd.grad), opened(torch.autograd.backward)


class Passes:
    """Backward passes over one recorded graph, each giving the gradient of every tap."""

    def __init__(self, recorder: Recorder, roots: list[Tensor]):
        self.recorder = recorder
        self.nodes = list(graph_nodes([t.grad_fn for t in roots]))
        written: list[Node] = [node for node in self.nodes if isinstance(node, BackwardCFunction)]  # in Python
        recorder.tensors.find_functions(written)
        self.recorded = len(recorder.uses)
        self.reentrant = any(node.name() == "CheckpointFunctionBackward" for node in written)
        # Whether a backward may run ops of the forward again, or others that are to be seen.
        self.reruns = recorder.may_rerun or self.reentrant or any(map(is_function, written))
        self.leaves = [v for node in self.nodes if (v := getattr(node, "variable", None)) is not None]

    @cached_property
    def known(self) -> set[Node]:
        """The nodes, to look one up."""
        return set(self.nodes)

    def reached(self) -> list[bool]:
        """Whether each use's output takes part in the roots."""
        return [use.tap.node in self.known for use in self.recorder.uses]

    def run(
        self, roots: list[Tensor], weights: Weights, keep: bool = True, create_graph: bool = False
    ) -> list[Tensor | None]:
        """All gradients together, nothing else touched; the graph is kept, or freed on the way."""
        if create_graph and self.reentrant:
            _refuse_checkpoint()
        if self.reentrant:  # such a checkpoint records in the backward and allows no torch.autograd.grad
            found: dict[int, Tensor] = {}
            with grads_untouched([*self.leaves, *self.recorder.leaves]):
                self.stream(roots, weights, found.__setitem__)
                self._check_nothing_unseen()
            return [found.get(n) for n in range(len(self.recorder.uses))]
        self.recorder.passes += 1
        taps = [use.tap.edge for use in self.recorder.uses]
        # A Function's own backward may give a parameter its gradient: it must run, also where no tap lies below it.
        functions = [] if create_graph else [node for node in self.nodes if is_function(node)]
        # Nor does the hook at a tap run that begins a graph, unless what is below it is asked for.
        functions += [use.tap.node for use in self.recorder.uses if use.tap.node.name() == "BeginBackward"]
        below = [GradientEdge(n, k) for node in functions for n, k in node.next_functions if n is not None]
        if not taps and not below:
            return []
        before = [(p.grad, p.grad._version if p.grad is not None else 0) for p in self.recorder.leaves]
        for use in self.recorder.uses:
            if use.tap.post is not None:
                use.tap.post.version = None
        with self.recorder.replay():
            keep = keep or create_graph
            options = {"retain_graph": keep, "create_graph": create_graph, "allow_unused": True}
            gradients = grad(roots, [*taps, *below], weights, **options)[: len(taps)]
        if create_graph and self.recorder.rerun:
            _refuse_checkpoint()
        self._check_nothing_hidden(before)
        self._check_nothing_written(gradients)
        return list(gradients)

    def _check_nothing_written(self, gradients: Sequence[Tensor | None]) -> None:
        """Each gradient must be what it was when it came by its tap."""
        for use, g in zip(self.recorder.uses, gradients, strict=True):
            post = use.tap.post
            if g is not None and post is not None and post.version not in (None, g._version):
                refuse_written(use)

    def _check_nothing_unseen(self) -> None:
        """No parameter may have a gradient of its own that was to be taken at the uses alone."""
        names_of = self.recorder.tensors.names_of
        attached = {name for use in self.recorder.uses if use.aliases for s in use.sources for name in names_of(s)}
        for p in self.recorder.leaves:
            name = self.recorder.tensors.parameters[id(p)]
            if p.grad is not None and name not in attached and not self.recorder.attach:
                raise CaptureError(
                    f"parameter {name!r} is used inside a reentrant checkpoint by something that hides its ops (an "
                    "autograd.Function, a script), where it cannot be followed: pass use_reentrant=False to "
                    "torch.utils.checkpoint"
                )

    def _functions(self) -> str:
        """The autograd.Functions on the way, and where they are written."""
        found = {n._forward_cls: n._forward_cls.forward.__code__ for n in self.nodes if is_function(n)}
        places = [f"{f.__qualname__} at {code.co_filename}:{code.co_firstlineno}" for f, code in found.items()]
        return ", ".join(places) or "an extension's"

    def _check_nothing_hidden(self, before: list[tuple[Tensor | None, int]]) -> None:
        """No op may have a backward of its own inside, that gives a parameter its gradient unseen."""
        for p, (grad, version) in zip(self.recorder.leaves, before, strict=True):
            if p.grad is not grad or (grad is not None and grad._version != version):
                raise CaptureError(
                    f"the gradient of parameter {self.recorder.tensors.parameters[id(p)]!r} is set inside another op's "
                    f"backward ({self._functions()}), where it cannot be followed: return it from the backward, or use "
                    "torch.utils.checkpoint for checkpoints"
                )

    def stream(
        self, roots: list[Tensor], weights: Weights, arrived: Callable[[int, Tensor], object], keep: bool = True
    ) -> None:
        """An ordinary backward, down to the leaves; each use's gradient is handed over as it arrives."""
        before, again, handles = self.recorder.uses[: self.recorded], [], []

        def watch(n: int, use: Use) -> None:
            handles.append(use.tap.watch(partial(handed, n)))

        def hand_over(n: int, g: Tensor) -> None:
            with self.recorder.away():  # the library itself is at work, which nobody records
                arrived(n, g)

        handed = hand_over if self.reruns else arrived

        def recomputed(use: Use) -> None:
            again.append(use)
            if len(self.recorder.uses) < self.recorded + len(again):
                self.recorder.uses.append(use)
            watch(self.recorded + len(again) - 1, use)

        for n, use in enumerate(before):
            watch(n, use)
        self.recorder.on_recompute = recomputed if self.reentrant else None
        try:
            with self.recorder.replay() if self.reruns else nullcontext():
                _backward(roots, weights, retain_graph=keep)
        finally:
            self.recorder.on_recompute = None
            for handle in handles:
                handle.remove()


def _refuse_checkpoint() -> None:
    # Differentiating the answer would run it again, with nobody there to run it as it was recorded.
    raise CaptureError(
        "create_graph=True with parameters inside a checkpoint: leave torch.utils.checkpoint out of the model, or ask "
        "without create_graph"
    )


@contextmanager
def grads_untouched(leaves: list[Tensor]) -> Iterator[None]:
    kept = [(leaf, leaf.grad) for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, grad in kept:
            leaf.grad = grad


@dataclass
class Marked:
    """The gradients of all uses in the marked passes, against which the plain ones are held."""

    marks: lay.Marks | None  # None: a batch of one
    gradients: list[list[Tensor | None]]  # by pass and use

    def place(self, n: int, g: Tensor, certain: bool = True) -> lay.Layout | None:
        """Where the samples lie in the gradient of use `n`; None where they mix."""
        if self.marks is None or not g.numel():
            return lay.whole(g)
        found = [m for row in self.gradients if (m := row[n]) is not None]
        if len(found) < len(self.gradients):  # it came by a way on which no sample was marked
            return None
        if not certain and not bool(g.isfinite().all()):  # no evidence to accept a candidate on
            return None
        try:
            return lay.find(lay.Evidence(g, found, self.marks))
        except lay.Mixed:
            return None

    def forget(self, n: int) -> None:
        for row in self.gradients:
            row[n] = None


def marked(passes: Passes, roots: list[Tensor], weights: Callable[[lay.Marks, int], Weights], B: int) -> Marked:
    """Run the marked passes: as many as it takes to tell B samples apart."""
    if B == 1:
        return Marked(None, [])
    dtypes = {use.tap.dtype for use in passes.recorder.uses} | {t.dtype for t in roots}
    found = _marked(passes, roots, weights, lay.marks(B, dtypes))
    if torch.float16 in dtypes or all(
        bool(g.isfinite().all()) for row in found.gradients for g in row if g is not None
    ):
        return found
    # Something between the taps works in float16 (a cast, a fused op under autocast): smaller marks, more passes.
    return _marked(passes, roots, weights, lay.marks(B, {torch.float16}))


def _marked(
    passes: Passes, roots: list[Tensor], weights: Callable[[lay.Marks, int], Weights], marks: lay.Marks
) -> Marked:
    return Marked(marks, [passes.run(roots, weights(marks, k)) for k in range(marks.passes)])
