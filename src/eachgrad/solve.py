"""From recorded uses to a block per parameter: gradients, layouts, candidates, derived weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from eachgrad import layout as lay
from eachgrad import uses as use_blocks
from eachgrad.blocks import Block, Dense, add
from eachgrad.capture import Recorder
from eachgrad.errors import CaptureError
from eachgrad.functions import opened
from eachgrad.graph import Node, graph_nodes, node_of
from eachgrad.use import Use

Weights = list[Tensor]  # one cotangent per root

# Both hand themselves to an active mode, which would then be off inside; a checkpoint needs it on.
_grad, _backward = opened(torch.autograd.grad), opened(torch.autograd.backward)


@dataclass
class Solved:
    """A use with its output gradient and where the samples lie in it; None where they mix."""

    use: Use
    g: Tensor
    layout: lay.Layout | None


class Passes:
    """Backward passes over one recorded graph, each giving the gradient of every tap."""

    def __init__(self, recorder: Recorder, roots: list[Tensor]):
        self.recorder = recorder
        self.recorded = len(recorder.uses)
        self.nodes = list(graph_nodes([t.grad_fn for t in roots]))
        self.reentrant = any(node.name() == "CheckpointFunctionBackward" for node in self.nodes)
        self.leaves = [v for node in self.nodes if (v := getattr(node, "variable", None)) is not None]

    def reached(self) -> list[bool]:
        """Whether each use's output takes part in the roots."""
        nodes = set(self.nodes)
        return [use.tap.node in nodes for use in self.recorder.uses]

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
            return [found.get(n) for n in range(len(self.recorder.uses))]
        self.recorder.passes += 1
        taps = [use.tap.edge for use in self.recorder.uses]
        if not taps:
            return []
        before = [(p.grad, p.grad._version if p.grad is not None else 0) for p in self.recorder.leaves]
        with self.recorder.replay():
            keep = keep or create_graph
            gradients = _grad(roots, taps, weights, retain_graph=keep, create_graph=create_graph, allow_unused=True)
        if create_graph and self.recorder.rerun:
            _refuse_checkpoint()
        self._check_nothing_hidden(before)
        return list(gradients)

    def _check_nothing_hidden(self, before: list[tuple[Tensor | None, int]]) -> None:
        """No op may have a backward of its own inside, that gives a parameter its gradient unseen."""
        for p, (grad, version) in zip(self.recorder.leaves, before, strict=True):
            if p.grad is not grad or (grad is not None and grad._version != version):
                raise CaptureError(
                    f"the gradient of parameter {self.recorder.tensors.parameters[id(p)]!r} is computed by a backward inside "
                    "another op's backward, where it cannot be followed; use torch.utils.checkpoint for checkpoints"
                )

    def stream(
        self, roots: list[Tensor], weights: Weights, arrived: Callable[[int, Tensor], object], keep: bool = True
    ) -> None:
        """An ordinary backward, down to the leaves; each use's gradient is handed over as it arrives."""
        before, again, handles = self.recorder.uses[: self.recorded], [], []

        def watch(n: int, use: Use) -> None:
            handles.append(use.tap.watch(lambda g: hand_over(n, g)))

        def hand_over(n: int, g: Tensor) -> None:
            with self.recorder.away():  # the library itself is at work, which nobody records
                arrived(n, g)

        def recomputed(use: Use) -> None:
            again.append(use)
            if len(self.recorder.uses) < self.recorded + len(again):
                self.recorder.uses.append(use)
            watch(self.recorded + len(again) - 1, use)

        for n, use in enumerate(before):
            watch(n, use)
        self.recorder.on_recompute = recomputed if self.reentrant else None
        try:
            with self.recorder.replay():
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


def solved(recorder: Recorder, plain: Sequence[Tensor | None], evidence: Marked) -> list[Solved]:
    """Every use that has a gradient, with the place of its samples."""
    found = enumerate(zip(recorder.uses, plain, strict=True))
    return [Solved(use, g, evidence.place(n, g, use.strong)) for n, (use, g) in found if g is not None]


def attached(passes: Passes, uses: list[Solved], roots: list[Tensor]) -> list[Solved]:
    """The same uses, with gradients that can be differentiated.

    These are computed apart from those that are held against the marked ones: the derivatives of some ops (group_norm)
    take another way when they are to be differentiated, and round otherwise.
    """
    found = passes.run(roots, [torch.ones_like(t) for t in roots], create_graph=True)
    gradients = {id(use): g for use, g in zip(passes.recorder.uses, found, strict=True)}
    again = [Solved(item.use, g, item.layout) for item in uses if (g := gradients[id(item.use)]) is not None]
    for item in again:
        _check_zeros(passes, item)
    return again


def _check_zeros(passes: Passes, item: Solved) -> None:
    """Raise if a number of no known sample, because it is zero, has a derivative that is not."""
    g, unknown = item.g, _without_owner(item)
    if not g.requires_grad or not bool(unknown.any()):
        return
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(g.shape, generator=generator).to(g) * unknown
    found = torch.autograd.grad(g, passes.leaves, weights, retain_graph=True, allow_unused=True)
    if any(t is not None and bool((t != 0).any()) for t in found):
        names = ", ".join(repr(n) for s in item.use.sources for n in passes.recorder.tensors.names_of(s))
        raise CaptureError(
            f"create_graph=True: gradients behind {names}, used by {item.use.name} at {item.use.where}, are exactly zero, "
            "so that it cannot be seen which sample they belong to, and their derivatives are not zero. Move the "
            "parameters a little (one that starts at zero), or use a batch size that no other dimension has."
        )


def _without_owner(item: Solved) -> Tensor:
    """Which numbers of a gradient were given to a sample, or to none, only because they are zero; broadcastable."""
    place, zero = item.layout, item.g.detach() == 0
    if isinstance(place, lay.Scattered):
        return place.owner < 0
    if place is None:
        return torch.zeros((), dtype=torch.bool)
    if place.fold is not None and place.fold.kind == "ragged":
        rows = torch.ones(zero.shape[place.dim], dtype=torch.bool, device=zero.device)
        rows[place.fold.index[place.fold.index >= 0]] = False
        return rows.view([-1 if d == place.dim else 1 for d in range(zero.ndim)])
    # A regular layout in which some numbers fit, and in which no other one is possible, holds for the zeros too.
    certain = place.alone and (item.use.strong or not bool(zero.all()))
    return zero & (not certain)


Accepted = list[tuple[Solved, set[int]]]  # uses that count, each with the ids of the sources it counts for


def accept(recorder: Recorder, uses: list[Solved], roots: list[Tensor]) -> Accepted:
    """The uses that count; an error that names it for any parameter which they do not cover."""
    accepted = _accept(recorder, uses)
    check_complete(recorder, accepted, roots)
    return accepted


def blocks_of(recorder: Recorder, accepted: Accepted, B: int) -> dict[str, Block]:
    """A block for each parameter that the accepted uses reach."""
    parts: dict[str, list[Block]] = {}
    for item, wanted in accepted:
        if not wanted:
            continue
        assert item.layout is not None
        found = use_blocks.blocks(item.use, item.g, item.layout, B, recorder.create_graph)
        for source, block in zip(item.use.sources, found, strict=True):
            if id(source) not in wanted:
                continue
            if id(source) in recorder.tensors.parameters:
                parts.setdefault(recorder.tensors.parameters[id(source)], []).append(block)
                continue
            for name, piece in pulled_back(recorder, source, block.dense()).items():
                parts.setdefault(name, []).append(Dense(piece))
    return {name: add(pieces) for name, pieces in parts.items()}


def _accept(recorder: Recorder, uses: list[Solved]) -> list[tuple[Solved, set[int]]]:
    """Each use that counts, with the ids of the sources it counts for.

    A candidate counts if its output turned out to have samples of its own; then whatever was derived from
    that output is accounted for and drops out of the uses further on.
    """
    accepted: list[tuple[Solved, set[int]]] = []
    settled = {id(item.use) for item in uses if not item.use.strong and item.layout is not None}
    for item in uses:
        use = item.use
        if not use.strong and item.layout is None:
            continue
        wanted = {id(s) for s in use.sources if item.g.numel() and _uncovered(recorder, s, settled)}
        if wanted and item.layout is None:
            _refuse_mixed(recorder, use)
        accepted.append((item, wanted))
    return accepted


def _uncovered(recorder: Recorder, source: Tensor, settled: set[int]) -> bool:
    """Whether `source` reaches a parameter by a way that no settled candidate accounts for."""
    if id(source) in recorder.tensors.parameters:
        return True
    direct, through = False, False
    seen, stack = set(), [node_of(source)]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        owner = recorder.tensors.alias_nodes.get(node)
        if owner is not None and id(owner) in settled:
            through = True
            continue
        direct = direct or id(getattr(node, "variable", None)) in recorder.tensors.parameters
        stack.extend(below for below, _ in node.next_functions if below is not None)
    if direct and through:
        names = ", ".join(map(repr, recorder.tensors.names_of(source)))
        raise CaptureError(
            f"a tensor of shape {tuple(source.shape)} is derived from {names} partly before and partly after the batch "
            "came in; compute the two parts separately"
        )
    return direct


def check_complete(recorder: Recorder, accepted: Accepted, roots: list[Tensor]) -> None:
    """Every way from the loss to a parameter passes a use that was accepted, or the parameter is named."""
    stops = {alias.grad_fn for item, _ in accepted for alias in item.use.aliases}
    seen: set[Node] = set()
    stack: list[tuple[Node, Node]] = [(t.grad_fn, None) for t in roots if t.grad_fn is not None]
    while stack:
        node, above = stack.pop()
        if node in seen or node in stops:
            continue
        seen.add(node)
        name = recorder.tensors.parameters.get(id(getattr(node, "variable", None)))
        if name is not None:
            op = recorder.without_rule.get(name) or (f"{above.name()} in the autograd graph" if above else "the loss")
            if not recorder.uses:
                op += ", outside the record block"
            raise CaptureError(
                f"parameter {name!r} is used by {op}, where its per-sample gradient cannot be followed. Run the forward "
                "inside the record block; an autograd.Function or a scripted function must be a torch.library.custom_op "
                "with a rule (docs/add_a_rule.md), or be written with ops that have one."
            )
        stack.extend((below, node) for below, _ in node.next_functions if below is not None)


def _refuse_mixed(recorder: Recorder, use: Use) -> None:
    names = ", ".join(repr(n) for s in use.sources for n in recorder.tensors.names_of(s))
    after = next((u for u in recorder.uses[recorder.uses.index(use) + 1 :]), None)
    between = dict.fromkeys(after.ops_since if after else recorder.ops_so_far)
    ops = ", ".join(n for n in between if n and not n.startswith("__get")) or "not seen"
    raise CaptureError(
        f"no sample has a gradient of its own for {names}, used by {use.name} at {use.where}: something after it "
        f"mixes the samples of the batch (ops right after it: {ops}), or scales gradients unevenly in a hook. "
        "Batch statistics, losses that compare samples and sums over the batch do this; compute them without "
        "gradient, or leave them out of the recorded loss."
    )


def pulled_back(recorder: Recorder, source: Tensor, value: Tensor) -> dict[str, Tensor]:
    """Gradients of a derived tensor, (n, *shape), as gradients of the parameters it was derived from."""
    reached = {id(v): v for node in graph_nodes([source.grad_fn]) if (v := getattr(node, "variable", None)) is not None}
    parameters = [v for key, v in reached.items() if key in recorder.tensors.parameters]
    with recorder.replay():
        value = value.to(source.dtype).reshape(-1, *source.shape)
        found = _batched_pull(source, parameters, value, recorder.create_graph)
    return {recorder.tensors.parameters[id(p)]: f for p, f in zip(parameters, found, strict=True) if f is not None}


def _batched_pull(source: Tensor, parameters: list[Tensor], value: Tensor, create_graph: bool) -> list[Tensor | None]:
    options = {"retain_graph": True, "allow_unused": True, "create_graph": create_graph}
    try:
        return list(_grad(source, parameters, value, is_grads_batched=True, **options))
    except RuntimeError as error:
        if "second time" in str(error):
            raise CaptureError(
                "a weight is derived from parameters inside a reentrant checkpoint, whose graph is gone: pass "
                "use_reentrant=False"
            ) from error
        # An op in between cannot be batched: one sample at a time.
        rows = [_grad(source, parameters, v, **options) for v in value]
        columns = zip(*rows, strict=True)
        return [None if c[0] is None else torch.stack([t.to_dense() if t.is_sparse else t for t in c]) for c in columns]
