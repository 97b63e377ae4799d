"""What the losses and the outputs of a recording must be, before anything is asked of them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from eachgrad import layout as lay
from eachgrad import lossgraph, scalar
from eachgrad.capture import Recorder
from eachgrad.errors import CaptureError
from eachgrad.tags import Mixed, Owners, Tag


def check_statistics(recorder: Recorder, batch_dim: int, tensors: list[Tensor], B: int) -> None:
    """Raise if one of these was computed from several samples, or from another sample than its own."""
    reasons = [_foreign_samples(t, recorder.tensors.tag(t), batch_dim, B) for t in tensors if B > 1]
    if any(reasons):
        raise CaptureError(next(filter(None, reasons)))


def _foreign_samples(t: Tensor, tag: Tag, batch_dim: int, B: int) -> str | None:
    """What is wrong with a result, given whose it is."""
    mixed = isinstance(tag, Mixed) and B in tag.sizes and not tag.places
    if mixed or (isinstance(tag, Owners) and tag.several and tag.n == B):
        assert isinstance(tag, (Mixed, Owners))
        return (
            "what the model computes for one sample depends on the others, by a statistic over the batch or because "
            f"samples meet in {tag.what}, along dimension {batch_dim} of the input: it mixes the samples, even where it "
            "is detached. Take statistics per sample, or use fixed ones; so with scales (of a quantisation)."
        )
    if isinstance(tag, Owners) and t.ndim == 1 and tag.n == B == len(t):
        owners = enumerate(tag.table.expand(B).tolist())
        moved = [(place, owner) for place, owner in owners if owner >= 0 and owner != place]
        if moved:
            return (
                f"loss {moved[0][0]} is computed from sample {moved[0][1]} of the input: the model moves the samples to "
                "other places along the batch (roll, sort, permutation). Move the losses back, or shuffle before the "
                "recording."
            )
    return None


def check_places(recorder: Recorder, outputs: Sequence[scalar.Output]) -> None:
    """Raise if an output's samples were seen to go to another dimension than the declared one."""
    for output in outputs:
        seen, place = recorder.tensors.tag(output.tensor), output.places[0] if output.places else None
        if isinstance(seen, int) and isinstance(place, lay.Along) and place.dim != seen:
            raise CaptureError(
                f"the samples of an output {tuple(output.tensor.shape)} lie along dimension {seen}, not "
                f"{place.dim}: return it with the samples along the declared batch dimension, or pass one loss per sample"
            )


def check_count(recorder: Recorder, inputs: Sequence[Tensor], B: int) -> None:
    """Tokens are no samples: as many losses as the model's inputs have entries along some dimension."""
    shapes = [tuple(t.shape[:2]) for t in inputs if t.ndim]
    known = [*shapes, (recorder.batch_size,)]
    if shapes and not any(B in shape for shape in known):
        raise CaptureError(
            f"{B} losses, but no input of the model has {B} samples (their first sizes are {shapes}): reduce the "
            f"losses to one per sample, or say record(model, batch_size={B}) if these are the samples"
        )


def place_state(places: Sequence[lay.Layout]) -> lossgraph.State:
    """How an output's samples lie, as the reading of the loss begins."""
    first = places[0] if places else None
    return lossgraph.Rows(first.dim) if isinstance(first, lay.Along) else "unknown"


def check_losses(losses: Tensor) -> None:
    if not isinstance(losses, Tensor):
        raise TypeError(f"losses is a tensor, not {type(losses).__name__}")
    if losses.ndim > 1:
        raise CaptureError(
            f"losses has shape {tuple(losses.shape)}: reduce it to one loss per sample, (B,), or to one number"
        )
    if losses.ndim == 1 and len(losses) == 0:
        raise CaptureError("no losses: an empty batch has no gradients, so skip it")
    if losses.is_complex():
        raise CaptureError("losses are real numbers: take the absolute value or the real part")
    if not losses.requires_grad:
        raise CaptureError(
            "the losses depend on no trainable parameter: was the forward run under no_grad, or outside the record "
            "block?"
        )
