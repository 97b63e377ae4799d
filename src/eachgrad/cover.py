"""Which uses count, and that together they cover every parameter the loss depends on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from eachgrad import layout as lay
from eachgrad.capture import Recorder
from eachgrad.errors import CaptureError
from eachgrad.foreign import is_function
from eachgrad.graph import Carried, Node, node_of
from eachgrad.use import Use


@dataclass
class Solved:
    """A use with its output gradient and where the samples lie in it; None where they mix."""

    use: Use
    g: Tensor
    layout: lay.Layout | None


class Halved(CaptureError):
    """Something is derived from a parameter partly before and partly after samples came in."""


Accepted = list[tuple[Solved, set[int]]]  # uses that count, each with the ids of the sources it counts for


def accept(recorder: Recorder, uses: list[Solved], roots: list[Tensor]) -> Accepted:
    """The uses that count; an error that names it for any parameter which they do not cover."""
    accepted = _accept(recorder, uses)
    check_complete(recorder, [(item.use, wanted) for item, wanted in accepted], roots)
    return accepted


def _accept(recorder: Recorder, uses: list[Solved]) -> list[tuple[Solved, set[int]]]:
    """Each use that counts, with the ids of the sources it counts for.

    A candidate counts if its output turned out to have samples of its own; then whatever was derived from
    that output is accounted for and drops out of the uses further on.
    """
    accepted: list[tuple[Solved, set[int]]] = []
    settled = {id(item.use): item.g for item in uses if not item.use.strong and item.layout is not None}
    begun = {node for item in uses if id(item.use) in settled for node in _begins(item.use)}
    for item in uses:
        use = item.use
        if not use.strong and item.layout is None:
            # Another output of the same call has samples of its own: what comes by this one would be lost.
            if begun.intersection(_begins(use)) and bool((item.g != 0).any()):
                _refuse_mixed(recorder, use)
            continue
        wanted = {id(s) for s in use.sources if item.g.numel() and _uncovered(recorder, use, s, settled)}
        if wanted and item.layout is None:
            _refuse_mixed(recorder, use)
        accepted.append((item, wanted))
    return accepted


def _begins(use: Use) -> set[Node]:
    """The nodes at which a candidate takes over from its sources."""
    return {alias.grad_fn for alias in use.aliases} | ({use.tap.node} if use.ways is not None else set())


def _uncovered(recorder: Recorder, use: Use, source: Tensor | Carried, settled: dict[int, Tensor]) -> bool:
    """Whether `source` reaches a parameter by a way that no settled candidate accounts for."""
    if id(source) in recorder.tensors.parameters:
        return True
    direct, through = False, list[Tensor]()
    seen, stack = set(), [node_of(source)]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if owners := [owner for owner in recorder.tensors.alias_nodes.get(node, ()) if id(owner) in settled]:
            through += [settled[id(owner)] for owner in owners]
            continue
        direct = direct or id(getattr(node, "variable", None)) in recorder.tensors.parameters
        stack.extend(below for below, _ in node.next_functions if below is not None)
    # Zeros have any layout: what they add is nothing, here and there.
    if direct and any(bool(g.count_nonzero()) for g in through):
        names = ", ".join(map(repr, recorder.tensors.names_of(source)))
        raise Halved(
            f"a tensor of shape {tuple(source.shape)}, given to {use.name} at {use.where}, is derived from {names} partly "
            "before and partly after the batch came in. Compute the two parts separately."
        )
    return direct


def check_complete(
    recorder: Recorder, accepted: list[tuple[Use, set[int]]], roots: list[Tensor], leaves: list[Tensor] | None = None
) -> None:
    """Every way from the loss to a parameter passes a use that was accepted, or the parameter is named.

    `accepted`: each with the ids of the sources it counts for. `leaves`: all that the roots reach, if that is known.
    """
    stops = {alias.grad_fn for use, _ in accepted for alias in use.aliases}
    through = {use.tap.node: _ways(use, wanted) for use, wanted in accepted if use.ways is not None}
    # Where no parameter is reached at all, none is by a way of its own; a piece may have ways beside the graph.
    if leaves is not None and not through and not any(id(v) in recorder.tensors.parameters for v in leaves):
        return
    seen: set[Node] = set()
    stack: list[tuple[Node, Node]] = [(t.grad_fn, None) for t in roots if t.grad_fn is not None]
    while stack:
        node, above = stack.pop()
        if node in seen or node in stops:
            continue
        seen.add(node)
        if node in through:
            stack.extend((below, node) for below in through[node])
            continue
        name = recorder.tensors.parameters.get(id(getattr(node, "variable", None)))
        if name is not None:
            _refuse_uncovered(recorder, name, above)
        stack.extend((below, node) for below, _ in node.next_functions if below is not None)


def _refuse_uncovered(recorder: Recorder, name: str, above: Node) -> None:
    if above is not None and is_function(above):
        code = above._forward_cls.forward.__code__
        raise CaptureError(
            f"no sample has a gradient of its own for {name!r}, used by the autograd.Function "
            f"{above._forward_cls.__qualname__} at {code.co_filename}:{code.co_firstlineno}: something after it mixes the "
            "samples of the batch. Take statistics per sample, or leave what compares samples out of the recorded loss."
        )
    for use in recorder.tensors.alias_nodes.get(above, ()):
        if use in recorder.uses:  # a candidate that was not accepted
            _refuse_mixed(recorder, use)
    op = recorder.without_rule.get(name) or (f"{above.name()} in the autograd graph" if above else "the loss")
    if not recorder.uses:
        op += ", outside the record block"
    raise CaptureError(
        f"parameter {name!r} is used by {op}, where its per-sample gradient cannot be followed. Run the forward inside the "
        "record block; a scripted function or an extension must be a torch.library.custom_op with a rule "
        "(docs/add_a_rule.md), or be written with ops that have one."
    )


def _ways(use: Use, wanted: set[int]) -> list[Node]:
    """Where to go on below a piece: the batch, and sources that are accounted for elsewhere."""
    return [*(use.ways or ()), *(node_of(s) for s in use.sources if id(s) not in wanted)]


def _refuse_mixed(recorder: Recorder, use: Use) -> None:
    after = next((u for u in recorder.uses[recorder.uses.index(use) + 1 :]), None)
    between = dict.fromkeys(after.ops_since if after else recorder.ops_so_far)
    ops = ", ".join(n for n in between if n and not n.startswith("__get")) or "not seen"
    raise CaptureError(
        f"no sample has a gradient of its own for {use}: something after it "
        f"mixes the samples of the batch (ops right after it: {ops}), or scales gradients unevenly in a hook. "
        "Batch statistics, losses that compare samples and sums over the batch do this; compute them without "
        "gradient, or leave them out of the recorded loss."
    )
