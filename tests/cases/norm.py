"""Norms."""

from __future__ import annotations

import torch
from torch import nn

from .base import B, Case, T, batch, cut_second, d, frozen, image, made, net, reals, scored_second, weight


def running(module: nn.Module) -> nn.Module:
    """A norm in eval, whose running statistics are not those it starts with."""
    module.running_mean.normal_()
    module.running_var.uniform_(0.5, 2.0)
    return module.eval()


# fmt: off
NORM = [
    Case("layer_norm", (), lambda: nn.LayerNorm(d), batch(reals(B, T, d))),
    Case("layer_norm over two dimensions", (), lambda: nn.LayerNorm((T, d)), batch(reals(B, 2, T, d))),
    Case("layer_norm rank 2 d = B", ("rank 2", "d = B"), lambda: nn.LayerNorm(B), batch(reals(B, B))),
    Case("layer_norm without bias", (), lambda: nn.LayerNorm(d, bias=False), batch(reals(B, T, d))),
    Case("layer_norm frozen weight", ("frozen",), lambda: frozen(nn.LayerNorm(d), "weight"), batch(reals(B, T, d))),
    Case("layer_norm frozen bias", ("frozen",), lambda: frozen(nn.LayerNorm(d), "bias"), batch(reals(B, T, d))),
    Case(
        "layer_norm not affine", ("no parameters in it",),
        lambda: nn.Sequential(nn.Linear(d, d), nn.LayerNorm(d, elementwise_affine=False), nn.Linear(d, 2)),
        batch(reals(B, T, d)),
    ),
    Case(
        "layer_norm time first T = B", ("time first", "T = B"), lambda: nn.LayerNorm(d), batch(reals(B, B, d)),
        scored_second, 1, cut_second,
    ),
    Case("group_norm", (), lambda: nn.Sequential(nn.Conv2d(4, 6, 2), nn.GroupNorm(3, 6)), image(4, 4)),
    Case("group_norm rank 2", ("rank 2",), lambda: nn.GroupNorm(2, 4), batch(reals(B, 4))),
    Case("group_norm frozen bias", ("frozen",), lambda: frozen(nn.GroupNorm(2, 4), "bias"), image(4, 4)),
    Case(
        "group_norm not affine", ("no parameters in it",),
        lambda: nn.Sequential(nn.Conv2d(4, 6, 2), nn.GroupNorm(3, 6, affine=False)), image(4, 4),
    ),
    *(
        Case(f"instance_norm{k}d", (), made(kind, 4, affine=True), image(*(4, 3, 2)[:k]))
        for k, kind in enumerate((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), 1)
    ),
    Case(
        "instance_norm frozen weight", ("frozen",), lambda: frozen(nn.InstanceNorm2d(4, affine=True), "weight"),
        image(4, 3),
    ),
    Case(
        "instance_norm not affine", ("no parameters in it",),
        lambda: nn.Sequential(nn.Conv2d(4, 3, 2), nn.InstanceNorm2d(3)), image(4, 4),
    ),
    Case(
        "instance_norm running statistics in eval", ("running statistics",),
        lambda: nn.Sequential(
            nn.Conv2d(4, 3, 2), running(nn.InstanceNorm2d(3, affine=True, track_running_stats=True)),
        ),
        image(4, 4),
    ),
    Case(
        "instance_norm running statistics in training", ("running statistics", "buffers"),
        lambda: nn.Sequential(nn.Conv2d(4, 3, 2), nn.InstanceNorm2d(3, affine=True, track_running_stats=True)),
        image(4, 4),
    ),
    Case(
        "batch_norm in training B = 1", ("B = 1",), lambda: nn.Sequential(nn.Conv2d(4, 3, 2), nn.BatchNorm2d(3)),
        batch(reals(1, 4, 4, 4)),
    ),
    Case("rms_norm", (), lambda: nn.RMSNorm(d), batch(reals(B, T, d))),
    Case("rms_norm over two dimensions", ("T = B",), lambda: nn.RMSNorm((B, d), eps=1e-3), batch(reals(B, B, d))),
    Case(
        "rms_norm by hand", ("raw parameter",),
        net(lambda m, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + m.w), w=weight(d)),
        batch(reals(B, T, d)),
    ),
    Case(
        "batch_norm in eval", ("running statistics",),
        lambda: nn.Sequential(nn.Conv2d(4, 3, 2), running(nn.BatchNorm2d(3)), nn.ReLU(), nn.Conv2d(3, 2, 2)),
        image(4, 4),
    ),
    Case(
        "batch_norm in eval rank 2 d = B", ("running statistics", "d = B"), lambda: running(nn.BatchNorm1d(B)),
        batch(reals(B, B)),
    ),
    Case(
        "batch_norm frozen in eval", ("frozen",),
        lambda: nn.Sequential(nn.Linear(d, 4), frozen(running(nn.BatchNorm1d(4)), "weight", "bias")),
        batch(reals(B, d)),
    ),
    Case("prelu", ("raw parameter",), lambda: nn.Sequential(nn.Conv2d(4, 3, 2), nn.PReLU(3)), image(4, 4)),
    Case(
        "prelu one number", ("raw parameter",), lambda: nn.Sequential(nn.Linear(d, 3), nn.PReLU()),
        batch(reals(B, d)),
    ),
]
# fmt: on
