"""A loss that is one number: where its samples can still be told apart, and what reduced them.

The samples are marked at the model's outputs, whose batch dimension is known. That is right only if the
loss is a sum over samples of functions of their outputs, and if what it was divided by is what the caller
says; both are checked as far as the autograd graph shows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eachgrad import layout as lay
from eachgrad.capture import graph_nodes, node_of
from eachgrad.errors import CaptureError

REDUCTIONS = ("sum", "mean")


def cut(loss: Tensor, outputs: Sequence[Tensor]) -> list[Tensor]:
    """Those outputs that `loss` is computed from, and that lie behind no other such output."""
    below = set(graph_nodes([loss.grad_fn]))
    reached = list({id(t): t for t in outputs if t.requires_grad and node_of(t) in below}.values())
    reached = [t for t in reached if t.ndim > 0]
    behind = {id(t): set(graph_nodes([t.grad_fn])) - {t.grad_fn} for t in reached}
    return [t for t in reached if not any(node_of(t) in behind[id(s)] for s in reached if s is not t)]


def batch_layouts(t: Tensor, B: int, batch_dim: int) -> list[lay.Layout]:
    """Where the samples may lie in one of the model's outputs: one answer if its size says so."""
    if t.ndim > batch_dim and t.shape[batch_dim] == B:
        return [lay.Along(batch_dim)]
    return lay.regular(B, t.shape, t.device)


def mark(t: Tensor, v: Tensor, layout: lay.Layout, weights: Tensor) -> Tensor:
    """The cotangent `v` of `t` with each sample's share multiplied by its weight."""
    return v * weights.to(v.dtype)[lay.owners(layout, t.shape, t.device)]


def check_additive(
    outputs: list[Tensor], gradients: Sequence[Tensor], layouts: Sequence[lay.Layout], B: int
) -> None:
    """Raise if the gradient at one sample's outputs depends on another sample's: the loss mixes them."""
    if B == 1 or not any(v.requires_grad for v in gradients):
        return
    half = (torch.arange(B) % 2).to(outputs[0].device)
    generator = torch.Generator().manual_seed(0)
    pushes = [
        torch.randn(t.shape, generator=generator).to(device=t.device, dtype=t.dtype)
        * half[lay.owners(lo, t.shape, t.device)]
        for t, lo in zip(outputs, layouts, strict=True)
    ]
    pairs = [(v, p) for v, p in zip(gradients, pushes, strict=True) if v.requires_grad]
    try:
        found = torch.autograd.grad(
            [v for v, _ in pairs], outputs, [p for _, p in pairs], retain_graph=True, allow_unused=True
        )
    except RuntimeError:  # some op of the loss has no second derivative: nothing to see here
        return
    for t, lo, h in zip(outputs, layouts, found, strict=True):
        if h is None:
            continue
        others = half[lay.owners(lo, t.shape, t.device)] == 0
        leak = torch.where(others, h, torch.zeros_like(h)).abs().amax()
        if bool(leak > 1e-6 * h.abs().amax()):
            raise CaptureError(
                "the loss mixes samples: its gradient at one sample's outputs depends on the outputs of others "
                "(a contrastive or batch-normalised loss). No sample has a loss of its own here."
            )


def check_reduction(nodes: Sequence[Any], declared: str, B: int) -> None:
    """Raise if the nodes of the loss show another reduction than the declared one.

    A mean that leaves out ignored targets, or weighs classes, divides by a number that depends on the
    whole batch, so that it is neither.
    """
    if declared not in REDUCTIONS:
        raise ValueError(f"loss_reduction is one of {REDUCTIONS}, not {declared!r}")
    means, divided = False, False
    for node in nodes:
        name = node.name()
        if name.startswith("NllLoss") and getattr(node, "_saved_reduction", 0) == 1:
            _check_nll(node)
        mean = _takes_mean(node)
        means = means or mean
        divided = divided or name.startswith(("DivBackward", "MulBackward"))
    if B == 1:
        return
    if declared == "sum" and means:
        raise CaptureError(
            'loss_reduction="sum", but the loss takes a mean over the batch: pass loss_reduction="mean", or a vector '
            "of one loss per sample"
        )
    if declared == "mean" and not means and not divided:
        raise CaptureError(
            'loss_reduction="mean", but nothing in the loss divides by the size of the batch: pass '
            'loss_reduction="sum", or a vector of one loss per sample'
        )


def _takes_mean(node: Any) -> bool:
    name = node.name()
    if name == "MeanBackward0":  # over everything
        return True
    if name == "MeanBackward1":
        sizes, dims = node._saved_self_sym_sizes, node._saved_dim
        if not dims:
            return True
        dims = {d - 2**64 if d >= 2**63 else d for d in dims}
        return any(d % len(sizes) == 0 for d in dims)
    return "Loss" in name or "CrossEntropy" in name or "KlDiv" in name if _reduces_by_mean(node) else False


def _reduces_by_mean(node: Any) -> bool:
    return getattr(node, "_saved_reduction", 0) == 1


def _check_nll(node: Any) -> None:
    try:
        weight, total, target = node._saved_weight, node._saved_total_weight, node._saved_target
    except RuntimeError:  # the graph has been freed
        return
    if weight is not None or int(total) != target.numel():
        raise CaptureError(
            "the loss is a mean that leaves out ignored targets or weighs classes: it divides by the total weight of "
            'the whole batch, so that samples are not independent. Use reduction="none" and pass one loss per sample, '
            'or reduction="sum" with loss_reduction="sum".'
        )


def plausible(solved: Sequence[Any], inputs: Sequence[Tensor], batch_dim: int, B: int) -> bool:
    """Whether no certain use mixes samples, and uses that read an input directly read it as it lies."""
    for item in solved:
        if item.layout is None:
            if item.use.strong:
                return False
            continue
        for t in item.use.args[:1]:
            for leaf in inputs:
                if isinstance(t, Tensor) and not _reads_as_it_lies(t, leaf, item.layout, batch_dim, B):
                    return False
    return True


def _reads_as_it_lies(t: Tensor, leaf: Tensor, layout: lay.Layout, batch_dim: int, B: int) -> bool:
    """Whether the rows of `t`, a view of the input `leaf`, belong to the samples that `layout` says."""
    if not isinstance(layout, lay.Along) or layout.dim >= t.ndim or leaf.ndim <= batch_dim:
        return True
    same = t.untyped_storage().data_ptr() == leaf.untyped_storage().data_ptr()
    if not same or not leaf.is_contiguous() or leaf.shape[batch_dim] != B:
        return True
    n = t.shape[layout.dim]
    start = t.storage_offset() - leaf.storage_offset()
    place = start + torch.arange(n) * t.stride(layout.dim)
    sample = place // leaf.stride(batch_dim) % B
    shape = torch.Size([n if d == layout.dim else 1 for d in range(t.ndim)])
    return bool((lay.owners(layout, shape, torch.device("cpu")).flatten() == sample).all())
