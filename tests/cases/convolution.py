"""Convolutions."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .base import B, Case, T, batch, d, image, linear, made, net, reals, weight

# fmt: off
CONVOLUTION = [
    Case("conv1d", (), made(nn.Conv1d, 4, 2, 3), image(7)),
    Case("conv1d stride padding dilation", (), made(nn.Conv1d, 4, 2, 3, stride=2, padding=2, dilation=2), image(9)),
    Case("conv1d depthwise", ("groups",), made(nn.Conv1d, 4, 8, 3, groups=4, bias=False), image(7)),
    Case("conv1d T = B", ("T = B",), made(nn.Conv1d, 4, B, 1), image(B)),
    Case("conv2d", (), made(nn.Conv2d, 4, 3, 3), image(5, 6)),
    Case("conv2d without bias", (), made(nn.Conv2d, 4, 3, 3, bias=False), image(5, 6)),
    Case(
        "conv2d uneven everything", ("stride", "padding", "dilation"),
        made(nn.Conv2d, 4, 3, (3, 2), stride=(2, 3), padding=(1, 2), dilation=(2, 1)), image(8, 7),
    ),
    Case("conv2d groups", ("groups",), made(nn.Conv2d, 4, 6, 3, groups=2, padding=1), image(5, 6)),
    Case("conv2d depthwise", ("groups",), made(nn.Conv2d, 4, 4, 3, groups=4), image(5, 6)),
    Case("conv2d 1 x 1", (), made(nn.Conv2d, 4, 3, 1), image(5, 6)),
    Case("conv2d whole image", ("T = 1",), made(nn.Conv2d, 4, 3, (5, 6)), image(5, 6)),
    Case("conv2d same", ("same",), made(nn.Conv2d, 4, 3, 3, padding="same", dilation=2), image(5, 6)),
    Case("conv2d same even kernel", ("same",), made(nn.Conv2d, 4, 3, (2, 4), padding="same"), image(5, 6)),
    Case("conv2d valid", ("valid",), made(nn.Conv2d, 4, 3, 3, padding="valid", stride=2), image(5, 6)),
    *(
        Case(
            f"conv2d {mode}", ("padding_mode",), made(nn.Conv2d, 4, 3, 3, padding=(1, 2), padding_mode=mode),
            image(5, 6),
        )
        for mode in ("reflect", "replicate", "circular")
    ),
    Case("conv2d stride leaves a rest", ("stride",), made(nn.Conv2d, 4, 3, 3, stride=3), image(7, 8)),
    Case(
        "conv2d channels_last", ("channels_last",),
        lambda: nn.Sequential(nn.Conv2d(4, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 2)).to(
            memory_format=torch.channels_last,
        ),
        lambda g: (reals(B, 4, 5, 6)(g).to(memory_format=torch.channels_last),),
    ),
    Case(
        "patch embedding", ("stride",),
        net(
            lambda m, x: m.fc(m.patch(x).flatten(2).transpose(1, 2)), patch=made(nn.Conv2d, 4, d, 2, stride=2),
            fc=linear(d, 2),
        ),
        image(4, 6),
    ),
    Case("conv2d B = 1", ("B = 1",), made(nn.Conv2d, 4, 3, 3), batch(reals(1, 4, 5, 6))),
    Case("conv2d all sizes = B", ("T = B", "d = B"), made(nn.Conv2d, B, B, B, padding=1), batch(reals(B, B, B, B))),
    Case("conv3d", (), made(nn.Conv3d, 2, 3, 2), image(3, 4, 3, channels=2)),
    Case(
        "conv3d uneven everything", ("stride", "padding", "dilation", "groups"),
        made(nn.Conv3d, 2, 4, (2, 1, 3), stride=(1, 2, 1), padding=(1, 0, 2), dilation=(2, 1, 1), groups=2),
        image(4, 4, 3, channels=2),
    ),
    Case("conv1d transposed", ("transposed",), made(nn.ConvTranspose1d, 4, 2, 3, stride=2, padding=1), image(5)),
    Case(
        "conv2d transposed", ("transposed", "groups"),
        made(nn.ConvTranspose2d, 4, 6, 3, stride=2, padding=1, output_padding=1, groups=2, dilation=2), image(4, 3),
    ),
    Case(
        "conv3d transposed", ("transposed",), made(nn.ConvTranspose3d, 2, 3, 2, bias=False),
        image(2, 3, 2, channels=2),
    ),
    Case(
        "conv2d frames folded into the batch", ("folded",),
        net(
            lambda m, x: m.conv(x.flatten(0, 1)).relu().unflatten(0, (len(x), -1)).mean(1),
            conv=made(nn.Conv2d, 2, 3, 3),
        ),
        batch(reals(B, T, 2, 4, 4)),
    ),
    Case(
        "conv1d functional with string padding", ("functional use", "same"),
        net(lambda m, x: F.conv1d(x, m.w, padding="same"), w=weight(2, 4, 3)), image(7),
    ),
]
# fmt: on
