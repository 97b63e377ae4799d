"""What must be refused."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eachgrad import CaptureError, UnsupportedOp

from .base import B, Maker, Refused, T, batch, d, ids, linear, net, reals, scored, weight
from .layouts import forces, gradient_penalty


def in_a_nested_tensor(m: nn.Module, x: Tensor) -> Tensor:
    rows = torch.nested.nested_tensor_from_jagged(x.flatten(0, 1), torch.arange(B + 1) * x.shape[1])
    return m.b(m.a(rows).values()).view(len(x), -1)


def changed_after_use(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x)
    out = m.b(h)
    h.mul_(2)
    return out.sum(-1) + h.sum(-1)


def normalising_hook(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x)
    h.register_hook(lambda g: g / g.norm())
    return m.b(h)


def contrasted(m: nn.Module, x: Tensor) -> Tensor:
    z = m(x)
    return F.cross_entropy(z @ z.T, torch.arange(len(z)), reduction="none")


def refused(
    name: str, body: Callable[..., object], error: type[RuntimeError], *words: str,
    x: Maker | None = None, losses: Callable[..., Tensor] = scored, **parts: Callable[[], object],
) -> Refused:  # fmt: skip
    two = {"a": linear(d, 4), "b": linear(4, 2)}
    return Refused(name, net(body, **two, **parts), batch(x or reals(B, T, d)), losses, error, words)


def between(mix: Callable[[Tensor], Tensor]) -> Callable[..., object]:
    """Two layers, and something between them."""
    return lambda m, x: m.b(mix(m.a(x)))


MIXED = "'a.weight'"
# fmt: off
REFUSED = [
    refused(
        "batch_norm in training", lambda m, x: m.b(m.norm(m.a(x))), UnsupportedOp, "batch_norm", "training",
        x=reals(B, d), norm=lambda: nn.BatchNorm1d(4),
    ),
    refused(
        "batch_norm without parameters in training", lambda m, x: m.b(m.norm(m.a(x))), UnsupportedOp, "batch_norm",
        "training", x=reals(B, d), norm=lambda: nn.BatchNorm1d(4, affine=False),
    ),
    refused(
        "batch_norm without running statistics in eval", lambda m, x: m.b(m.norm.eval()(m.a(x))), UnsupportedOp,
        "batch_norm", x=reals(B, d), norm=lambda: nn.BatchNorm1d(4, track_running_stats=False),
    ),
    refused(
        "loss that compares samples", between(torch.tanh), CaptureError, MIXED, "mixes", x=reals(B, d),
        losses=contrasted,
    ),
    refused("mean over the batch subtracted", between(lambda h: h - h.mean(0)), CaptureError, MIXED, "mean"),
    refused(
        "mean over the batch subtracted T = B", between(lambda h: h - h.mean(0)), CaptureError, MIXED, "mean",
        x=reals(B, B, d),
    ),
    refused("roll over the batch added", between(lambda h: h + h.roll(1, 0)), CaptureError, MIXED, "roll"),
    refused("roll over the batch", between(lambda h: h.roll(1, 0)), CaptureError, "roll"),
    refused("softmax over the batch", between(lambda h: h.softmax(0)), CaptureError, MIXED, "softmax"),
    refused(
        "softmax over the batch that adds up to one", lambda m, x: m.a(x).softmax(0), CaptureError, MIXED, "softmax",
        losses=lambda m, x: m(x).sum((1, 2)),
    ),
    refused("maximum over the batch", between(lambda h: h - h.amax(0)), CaptureError, MIXED, "amax"),
    refused("cumulative sum over the batch", between(lambda h: h.cumsum(0)), CaptureError, MIXED, "cumsum"),
    refused("sorted over the batch", between(lambda h: h.sort(0).values), CaptureError, "sort"),
    refused(
        "attention between samples", between(lambda h: (h @ h.T).softmax(-1) @ h), CaptureError, MIXED, "mixes",
        x=reals(B, d),
    ),
    refused(
        "Gram matrix of the batch by matmul", lambda m, x: m.b(m.a(x @ (x.T @ x))), CaptureError,
        "statistic over the batch", x=reals(B, d),
    ),
    refused(
        "Gram matrix of the batch by einsum", lambda m, x: m.b(m.a(x @ torch.einsum("bi,bj->ij", x, x))),
        CaptureError, "statistic over the batch", x=reals(B, d),
    ),
    refused(
        "mean over the batch of a transposed input", lambda m, x: m.b(m.a(x - x.mT.mean(-1))), CaptureError,
        "statistic over the batch", x=reals(B, d),
    ),
    refused(
        "one sample compared with all", lambda m, x: m.b(m.a(x - x[0])), CaptureError, "samples meet in", "sub at",
    ),
    refused("mixup of the input", lambda m, x: m.b(m.a(x + x.flip(0))), CaptureError, "samples meet in", "add at"),
    refused(
        "one scale for the activations of all samples",
        lambda m, x: (lambda h: m.b(h / h.detach().abs().max()))(m.a(x)), CaptureError, "max at", "per sample",
    ),
    refused(
        "detached mean over folded tokens", lambda m, x: (lambda h: m.b(h - h.detach().reshape(-1, 4).mean(0)))(m.a(x)),
        CaptureError, "mean at", "per sample",
    ),
    refused("recorded input changed in place", changed_after_use, RuntimeError, "place"),
    refused(
        "op without a rule", lambda m, x: torch.linalg.lstsq(m.w, x)[0], UnsupportedOp, "'w'", "lstsq", x=reals(d, B),
        w=weight(d, d),
    ),
    refused("derivative by the input in the loss", between(torch.tanh), CaptureError, "derivative", losses=forces),
    refused("gradient penalty", between(torch.tanh), CaptureError, "derivative", losses=gradient_penalty),
    Refused(
        "second input's mean",
        net(lambda m, x, i: m.a(x) * (lambda e: e - e.mean(0))(m.e(i)), a=linear(d, 4), e=lambda: nn.Embedding(5, 4)),
        batch(reals(B, d), ids(5, B)), scored, CaptureError, ("statistic", "mean at"),
    ),
    refused("nested tensor", in_a_nested_tensor, UnsupportedOp, "'a.weight'", "linear", "nested tensor"),
    refused("gradient hook that mixes", normalising_hook, CaptureError, MIXED, "hook"),
    refused("losses per token", between(torch.tanh), CaptureError, "(3, 4)", losses=lambda m, x: m(x).sum(-1)),
    refused(
        "losses of folded tokens", between(torch.tanh), CaptureError, "12 losses",
        losses=lambda m, x: m(x).sum(-1).flatten(),
    ),
    refused("no gradient at all", lambda m, x: m.b(m.a(x)).detach(), CaptureError, "no trainable parameter"),
]
# fmt: on
