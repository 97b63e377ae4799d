"""A loss that is one number: its samples are told apart at the model's outputs.

That is right only if the loss is a sum over samples of functions of their outputs. Where the graph is
still whole this is measured: no second derivative may connect two samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from eachgrad import layout as lay
from eachgrad import mixing
from eachgrad.capture import Recorder
from eachgrad.cover import Solved
from eachgrad.errors import CaptureError
from eachgrad.graph import edge_of, edges_below, tensors_in
from eachgrad.passes import Passes, marked
from eachgrad.solve import solved


@dataclass(frozen=True)
class Output:
    """A tensor that the model returned, and where its samples may lie: one place if that is certain."""

    tensor: Tensor
    places: tuple[lay.Layout, ...]


def outputs_of(value: Any, B: int, batch_dim: int) -> list[Output]:
    """The differentiable outputs in what a model returns.

    The first whose declared dimension has the right size has its samples there, and nowhere else; the
    others, such as final states, may have them along another dimension of that size.
    """
    found = _outputs(value, B, batch_dim)
    for k, output in enumerate(found):
        if output.places and is_declared(output.places[0], batch_dim):
            found[k] = Output(output.tensor, output.places[:1])
            break
    return found


def _outputs(value: Any, B: int, batch_dim: int) -> list[Output]:
    if isinstance(value, PackedSequence):
        return [Output(value.data, (_packed(value),))]
    if isinstance(value, Tensor):
        wanted = value.requires_grad and value.ndim > 0
        return [Output(value, tuple(_places(value, B, batch_dim)))] if wanted else []
    if isinstance(value, (tuple, list)):
        return [found for item in value for found in _outputs(item, B, batch_dim)]
    if isinstance(value, dict):
        return _outputs(list(value.values()), B, batch_dim)
    return _outputs(tensors_in(getattr(value, "__dict__", {})), B, batch_dim)


def _packed(value: PackedSequence) -> lay.Layout:
    sizes = value.batch_sizes
    starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    sequence = (torch.arange(len(starts)) - starts).to(value.data.device)
    owner = sequence if value.sorted_indices is None else value.sorted_indices[sequence]
    return lay.Along(0, lay.ragged(owner, int(sizes[0])))


def _places(t: Tensor, B: int, batch_dim: int) -> list[lay.Layout]:
    """The declared dimension first, if its size allows; then whatever else could hold B samples."""
    found = lay.regular(B, t.shape, t.device)
    declared = [p for p in found if p.dim == batch_dim]
    return [*declared, *(p for p in found if p.dim != batch_dim)]


def is_declared(place: lay.Layout, batch_dim: int) -> bool:
    """Whether a place is what the caller's batch dimension says, without folding."""
    return (
        isinstance(place, lay.Along) and (place.fold is None or place.fold.kind == "ragged") and place.dim == batch_dim
    )


def cut(loss: Tensor, outputs: Sequence[Output]) -> list[Output]:
    """Those outputs that `loss` is computed from, and that lie behind no other such output."""
    below = edges_below(loss) | {edge_of(loss)}
    reached = list({id(o.tensor): o for o in outputs if edge_of(o.tensor) in below}.values())
    behind = {id(o): edges_below(o.tensor) for o in reached}
    return [o for o in reached if not any(edge_of(o.tensor) in behind[id(p)] for p in reached if p is not o)]


def choices(outputs: Sequence[Output], batch_dim: int) -> Iterator[tuple[tuple[lay.Layout, ...], bool]]:
    """Every way to place the samples of all outputs, and whether it is the declared way."""
    for places in product(*(o.places for o in outputs)):
        yield (
            places,
            all(is_declared(p, batch_dim) or len(o.places) == 1 for p, o in zip(places, outputs, strict=True)),
        )


def settle(
    passes: Passes,
    outputs: Sequence[Output],
    v: Sequence[Tensor],
    plain: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    B: int,
    batch_dim: int,
) -> list[Solved]:
    """The layout of every use, from samples marked at the outputs in the one way that fits everything."""
    tensors, fitting = [o.tensor for o in outputs], []
    for places, declared in choices(outputs, batch_dim):
        check_additive(tensors, v, places, B)
        found = solved(passes.recorder, plain, marked(passes, tensors, marker(tensors, v, places), B))
        if plausible(found, inputs, batch_dim, B) and not any(_elsewhere(passes.recorder, item) for item in found):
            if declared:
                return found
            fitting.append(found)
        elif all(len(o.places) == 1 for o in outputs) and _mixes(found):
            return found  # nothing else to try: what mixes is reported by name
    if len(fitting) != 1:
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
        raise CaptureError(
            f"the samples cannot be told apart in the model's outputs {shapes} for a batch of {B}: return them with the "
            f"samples along dimension {batch_dim}, or use eachgrad.record and pass one loss per sample to tape.backward"
        )
    return fitting[0]


def marker(
    tensors: Sequence[Tensor], v: Sequence[Tensor], places: Sequence[lay.Layout]
) -> Callable[[lay.Marks, int], list[Tensor]]:
    """Cotangents of the outputs with the samples marked, pass by pass."""
    return lambda marks, k: [
        mark(t, x.detach(), place, marks.weights(k, x)) for t, x, place in zip(tensors, v, places, strict=True)
    ]


def mark(t: Tensor, v: Tensor, place: lay.Layout, weights: Tensor) -> Tensor:
    """The cotangent `v` of `t` with each sample's share multiplied by its weight."""
    return v * weights.to(v.dtype)[lay.owners(place, t.shape, t.device).clamp(min=0)]


def check_additive(tensors: list[Tensor], v: Sequence[Tensor], places: Sequence[lay.Layout], B: int) -> None:
    """Raise if the gradient at one sample's outputs depends on another sample's: the loss mixes them."""
    pairs = [k for k, t in enumerate(v) if t.requires_grad]
    if B == 1 or not pairs:
        return
    # Any two samples are on different sides of one of these splits.
    for bit in range((B - 1).bit_length()):
        _check_split(tensors, v, places, torch.arange(B).bitwise_right_shift(bit) % 2)


def _check_split(tensors: list[Tensor], v: Sequence[Tensor], places: Sequence[lay.Layout], half: Tensor) -> None:
    """Raise if the gradient at the samples on side 0 changes with the outputs of those on side 1."""
    pairs = [k for k, t in enumerate(v) if t.requires_grad]
    half = half.to(tensors[0].device)
    sides = [half[lay.owners(p, t.shape, t.device).clamp(min=0)] for t, p in zip(tensors, places, strict=True)]
    generator = torch.Generator().manual_seed(0)
    pushes = [torch.randn(t.shape, generator=generator).to(t) * s for t, s in zip(tensors, sides, strict=True)]
    try:
        found = torch.autograd.grad(
            [v[k] for k in pairs], tensors, [pushes[k] for k in pairs], retain_graph=True, allow_unused=True
        )
    except RuntimeError:  # some op of the loss has no second derivative: nothing to measure
        return
    for side, h in zip(sides, found, strict=True):
        if h is None:
            continue
        leak = torch.where(side == 0, h, torch.zeros_like(h)).abs().amax()
        if bool(leak > 1e-6 * h.abs().amax()):
            raise CaptureError(
                "the loss mixes samples: its gradient at one sample's outputs depends on the outputs of others (a "
                "contrastive or batch-normalised loss), so that no sample has a loss of its own. Leave that part out of "
                "the recorded loss."
            )


def plausible(solved: Sequence[Solved], inputs: Sequence[Tensor], batch_dim: int, B: int) -> bool:
    """Whether no certain use mixes samples, and uses that read an input directly read it as it lies."""
    return not _mixes(solved) and not any(_misread(item, inputs, batch_dim, B) for item in solved)


def _mixes(solved: Sequence[Solved]) -> bool:
    return any(item.layout is None and item.use.strong for item in solved)


def _misread(item: Solved, inputs: Sequence[Tensor], batch_dim: int, B: int) -> bool:
    read = [t for t in item.use.args[:1] if isinstance(t, Tensor)]
    place, rule = item.layout, item.use.rule
    if not bool((item.g != 0).any()):  # zeros lie anywhere
        return False
    if isinstance(place, lay.Along) and not rule.is_dense and not rule.takes_batch_dim:
        lead = rule.lead(item.g, rule.bind(item.use.args, item.use.kwargs))
        whole = any(_same_storage(t, leaf) and t.numel() >= leaf.numel() for t in read for leaf in inputs)
        if (
            whole and place.alone and place.dim >= lead and B > 1
        ):  # every sample of the input would be in every sample of the output
            return True
    return place is not None and not all(
        _reads_as_it_lies(t, leaf, item.g, place, batch_dim, B) for t in read for leaf in inputs
    )


def _elsewhere(recorder: Recorder, item: Solved) -> bool:
    """Whether a use's samples were seen to lie along another dimension of its output than the measured one."""
    place, use = item.layout, item.use
    if not isinstance(place, lay.Along) or place.fold is not None or not bool((item.g != 0).any()):
        return False
    tagged = [(t, k) for t in tensors_in((use.args, use.kwargs)) if isinstance(k := recorder.tensors.tag(t), int)]
    if not tagged:
        return False
    like = torch.empty(use.tap.shape, dtype=use.tap.dtype, device="meta")
    seen = mixing.follow(use.op, use.args, use.kwargs, like, tagged)
    return isinstance(seen, int) and seen != place.dim


def check_order(recorder: Recorder, solved: Sequence[Solved], inputs: Sequence[Tensor], batch_dim: int, B: int) -> None:
    """Raise if the loss of one sample is computed from the input of another, as far as this can be seen."""
    for item in solved:
        place = item.layout
        fold = place.fold if isinstance(place, lay.Along) and place.dim == batch_dim else None
        irregular = isinstance(place, lay.Scattered) or (fold is not None and fold.kind == "ragged")
        if irregular and _misread(item, inputs, batch_dim, B):
            raise CaptureError(
                f"the loss of one sample depends on the input of another one, which is read with {item.use}: the model "
                "mixes the samples, or moves them to other places along the batch (roll, sort, permutation). Move the "
                "losses back, or shuffle before the recording."
            )


def _same_storage(t: Tensor, leaf: Tensor) -> bool:
    return t.untyped_storage().data_ptr() == leaf.untyped_storage().data_ptr()


def _reads_as_it_lies(t: Tensor, leaf: Tensor, g: Tensor, place: lay.Layout, batch_dim: int, B: int) -> bool:
    """Whether the rows of `t`, if it is a view of the input `leaf`, belong to the samples that `place` says."""
    dim = place.dim if isinstance(place, lay.Along) else batch_dim
    if dim >= min(t.ndim, g.ndim) or leaf.ndim <= batch_dim:
        return True
    if t.shape[dim] != g.shape[dim]:  # not the dimension that the output has there
        return True
    if not _same_storage(t, leaf) or not leaf.is_contiguous() or leaf.shape[batch_dim] != B:
        return True
    n = t.shape[dim]
    offset = torch.arange(n).mul(t.stride(dim)).add(t.storage_offset() - leaf.storage_offset())
    sample = torch.div(offset, leaf.stride(batch_dim), rounding_mode="floor") % B
    sample = sample.view([-1 if d == dim else 1 for d in range(g.ndim)]).to(g.device)
    # A zero gradient lies anywhere.
    return bool(((lay.owners(place, g.shape, g.device) == sample) | (g == 0)).all())
