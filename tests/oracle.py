"""The single ground truth: a loop over samples, each as a batch of one, by plain autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

# A gradient far below all others is rounding (the bias of an attention's keys): judge it by this share of the largest.
SHARE = 1e-3


def loop(model: nn.Module, losses: Callable[..., Tensor], samples: Sequence[tuple[Tensor, ...]]) -> dict[str, Tensor]:
    """{name: (B, *shape)} for the B batches of one in `samples`; zeros where a loss does not reach a parameter.

    Every sample meets its own copy of the model, so that none sees what another did to a buffer. The gradient is
    taken by backward(): reentrant checkpoints allow no torch.autograd.grad.
    """
    rows = []
    for sample in samples:
        alone = copy.deepcopy(model)
        named = {name: p for name, p in alone.named_parameters() if p.requires_grad}
        loss = losses(alone, *sample)
        assert loss.shape == (1,), f"one sample gave losses of shape {tuple(loss.shape)}"
        loss.sum().backward()
        rows.append({name: _dense(p.grad, p) for name, p in named.items()})
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _dense(g: Tensor | None, like: Tensor) -> Tensor:
    if g is None:
        return torch.zeros_like(like.detach())
    return g.to_dense() if g.is_sparse else g


def error(got: Tensor, want: Tensor, floor: float = 0.0) -> float:
    """The largest difference relative to the largest |want| (at least `floor`); inf where only one is finite."""
    wide = torch.complex128 if got.is_complex() or want.is_complex() else torch.float64
    got, want = got.detach().to(wide), want.detach().to(wide)
    finite = got.isfinite()
    if not torch.equal(finite, want.isfinite()) or not torch.equal(got.isnan(), want.isnan()):
        return float("inf")
    if not finite.any():
        return 0.0
    gap, size = (float(t[finite].abs().max()) for t in (got - want, want))
    scale = max(size, floor)
    return gap / scale if scale else gap  # where all is zero, what is left of it


def assert_same(got: Mapping[str, Tensor], want: Mapping[str, Tensor], tolerance: float, share: float = SHARE) -> None:
    """Same names, same shapes, and no relative error above `tolerance`."""
    assert set(got) == set(want), f"missing {set(want) - set(got)}, superfluous {set(got) - set(want)}"
    shapes = {name: (tuple(got[name].shape), tuple(want[name].shape)) for name in want}
    assert all(a == b for a, b in shapes.values()), f"shapes (got, wanted): {shapes}"
    sizes = [float(torch.nan_to_num(t.detach().abs(), 0.0, 0.0, 0.0).max()) for t in want.values() if t.numel()]
    floor = share * max(sizes, default=0.0)
    errors = {name: error(got[name], want[name], floor) for name in want}
    wrong = {name: e for name, e in errors.items() if not e <= tolerance}
    assert not wrong, f"relative errors above {tolerance}: {wrong}"


def rows(model: nn.Module, losses: Callable[..., Tensor], batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The same by one backward per row of the batched losses, for models that draw random numbers."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    each = [
        torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True)
        for loss in losses(model, *batch)
    ]
    return {name: torch.stack([_dense(found[k], p) for found in each]) for k, (name, p) in enumerate(named.items())}
