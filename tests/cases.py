"""Every model the tests run, as data: what it is, what is hazardous about it, its batch, its losses.

`Case` holds what must come out right, `Refused` what must be refused and the words the refusal must contain.
Sizes collide on purpose in the cases marked "T = B" or "d = B"; elsewhere B, T and d differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from eachgrad import CaptureError, UnsupportedOp

B, T, d = 3, 4, 5
Batch = tuple[Tensor, ...]
Maker = Callable[[Generator], Tensor]


def score(out: Tensor, batch_dim: int = 0) -> Tensor:
    """(B,): a loss of each sample in which every element counts differently."""
    rows = out.movedim(batch_dim, 0).reshape(out.shape[batch_dim], -1)
    place = torch.arange(rows.shape[1], device=out.device)
    return (rows * torch.cos(1.0 + place).to(rows.real.dtype)).sin().sum(1) + (rows * rows).mean(1)


def scored(model: nn.Module, *batch: Tensor) -> Tensor:
    return score(model(*batch))


def scored_second(model: nn.Module, *batch: Tensor) -> Tensor:
    return score(model(*batch), 1)


def cut_first(batch: Batch, i: int) -> Batch:
    return tuple(t.narrow(0, i, 1) for t in batch)


def cut_second(batch: Batch, i: int) -> Batch:
    return tuple(t.narrow(1, i, 1) for t in batch)


def cut_only(*which: int) -> Callable[[Batch, int], Batch]:
    """Cut the batch tensors at these places; the others are the same for every sample."""
    return lambda batch, i: tuple(t.narrow(0, i, 1) if k in which else t for k, t in enumerate(batch))


@dataclass(frozen=True)
class Case:
    """A model, a batch, a loss per sample, and how sample i is cut out of the batch."""

    name: str
    hazards: tuple[str, ...]
    make: Callable[[], nn.Module]
    data: Callable[[Generator], Batch]
    losses: Callable[..., Tensor] = scored
    batch_dim: int = 0
    cut: Callable[[Batch, int], Batch] = cut_first
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-10
    batch_size: int | None = None  # given to record where no input has a dimension that counts the samples

    def build(self, seed: int = 0, dtype: torch.dtype | None = None) -> tuple[nn.Module, Batch]:
        """The model and its batch; no parameter is left at the zeros or ones it starts with."""
        dtype = dtype or self.dtype
        generator = Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.make()
        for p in model.parameters():
            p.data.add_(0.2 * torch.randn(p.shape, generator=generator).to(p.dtype))
        model._apply(lambda t: t.to(dtype) if t.is_floating_point() else t)
        return model, tuple(_cast(t, dtype) for t in self.data(generator))

    def samples(self, batch: Batch) -> list[Batch]:
        """The batch cut into batches of one."""
        count = self.batch_size or max(t.shape[self.batch_dim] for t in batch if t.ndim > self.batch_dim)
        cuts = [self.cut(batch, i) for i in range(count)]
        return [tuple(t.detach().requires_grad_(t.requires_grad) for t in cut) for cut in cuts]

    def __str__(self) -> str:
        return self.name.replace(" ", "_")


@dataclass(frozen=True)
class Refused:
    """What has no per-sample gradient, or none that can be followed: an error with these words."""

    name: str
    make: Callable[[], nn.Module]
    data: Callable[[Generator], Batch]
    losses: Callable[..., Tensor]
    error: type[RuntimeError]
    words: tuple[str, ...]
    batch_dim: int = 0
    batch_size: int | None = None

    def build(self) -> tuple[nn.Module, Batch]:
        return Case(self.name, (), self.make, self.data).build()

    def __str__(self) -> str:
        return self.name.replace(" ", "_")


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    if not t.is_floating_point() or t.dtype == dtype:
        return t
    return t.detach().to(dtype).requires_grad_(t.requires_grad)


def reals(*shape: int) -> Maker:
    return lambda g: torch.randn(*shape, generator=g, dtype=torch.float64)


def complexes(*shape: int) -> Maker:
    return lambda g: torch.randn(*shape, generator=g, dtype=torch.complex128)


def ids(high: int, *shape: int) -> Maker:
    return lambda g: torch.randint(high, shape, generator=g)


def fixed(*values: int) -> Maker:
    return lambda g: torch.tensor(values)


def batch(*makers: Maker) -> Callable[[Generator], Batch]:
    return lambda g: tuple(make(g) for make in makers)


class Net(nn.Module):
    """Modules, parameters (from tensors) and attributes under their names, and a forward that uses them."""

    def __init__(self, body: Callable[..., object], **parts: object):
        super().__init__()
        self.body = body
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, *inputs: object, **named: object) -> object:
        return self.body(self, *inputs, **named)


def net(body: Callable[..., object], **parts: Callable[[], object]) -> Callable[[], nn.Module]:
    """A function that makes a Net: `parts` are made anew each time."""
    return lambda: Net(body, **{name: make() for name, make in parts.items()})


def weight(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape)


def complex_weight(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape, dtype=torch.complex128)


def linear(d_in: int, d_out: int, bias: bool = True) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(d_in, d_out, bias=bias)


def made(kind: Callable[..., nn.Module], *args: object, **options: object) -> Callable[[], nn.Module]:
    return lambda: kind(*args, **options)


def windows(m: nn.Module, x: Tensor) -> Tensor:
    """Windows of 2 x 2 of a map (B, 4, 4, d) attended one by one, as rows of the batch."""
    rows = x.view(len(x), 2, 2, 2, 2, d).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, d)
    return m.out(m.fc(rows).softmax(1)).view(len(x), 2, 2, 2, 2, -1)


# Linear: ranks, layouts, calls

# fmt: off
LINEAR = [
    Case("linear", ("rank 2",), linear(d, 2), batch(reals(B, d))),
    Case("linear without bias", ("rank 2",), linear(d, 2, bias=False), batch(reals(B, d))),
    Case("linear rank 3", ("rank 3",), linear(d, 2), batch(reals(B, T, d))),
    Case("linear rank 4", ("rank 4",), linear(d, 2), batch(reals(B, 2, T, d))),
    Case("linear T = B", ("T = B",), linear(d, 2), batch(reals(B, B, d))),
    Case("linear d = B", ("d = B",), linear(B, B), batch(reals(B, B))),
    Case("linear all sizes = B", ("T = B", "d = B"), linear(B, B), batch(reals(B, B, B))),
    Case("linear T = 1", ("T = 1",), linear(d, 2), batch(reals(B, 1, d))),
    Case("linear B = 1", ("B = 1",), linear(d, 2), batch(reals(1, T, d))),
    Case("linear long and narrow", ("Gram or direct",), linear(2, 2), batch(reals(B, 40, 2))),
    Case("linear short and wide", ("Gram or direct",), linear(40, 30), batch(reals(B, 2, 40))),
    Case(
        "linear keyword call", ("functional use",),
        net(lambda m, x: F.linear(bias=m.b, weight=m.w, input=x), w=weight(2, d), b=weight(2)), batch(reals(B, d)),
    ),
    Case("linear time first", ("time first",), linear(d, 2), batch(reals(T, B, d)), scored_second, 1, cut_second),
    Case(
        "linear time first T = B", ("time first", "T = B"), linear(d, 2), batch(reals(B, B, d)), scored_second, 1,
        cut_second,
    ),
    Case(
        "linear time first inside", ("time first", "T = B"),
        net(lambda m, x: m.fc(x.transpose(0, 1)).tanh().transpose(0, 1), fc=linear(d, 2)), batch(reals(B, B, d)),
    ),
    Case(
        "linear folded (B*T, d)", ("folded",),
        net(lambda m, x: m.b(m.a(x.reshape(-1, d)).tanh()).view(len(x), -1, 2), a=linear(d, 4), b=linear(4, 2)),
        batch(reals(B, T, d)),
    ),
    Case(
        "linear folded (T*B, d)", ("folded", "time first"),
        net(
            lambda m, x: (m.b(m.a(x.transpose(0, 1).reshape(-1, d)).tanh()).view(-1, len(x), 2).transpose(0, 1)),
            a=linear(d, 4), b=linear(4, 2),
        ),
        batch(reals(B, T, d)),
    ),
    Case(
        "linear folded T = B", ("folded", "T = B"),
        net(
            lambda m, x: (m.b(m.a(x.transpose(0, 1).reshape(-1, d)).tanh()).view(-1, len(x), 2).transpose(0, 1)),
            a=linear(d, 4), b=linear(4, 2),
        ),
        batch(reals(B, B, d)),
    ),
    Case(
        "addmm on folded rows", ("folded", "functional use"),
        net(lambda m, x: torch.addmm(m.b, x.reshape(-1, d), m.w).view(len(x), -1, 2), w=weight(d, 2), b=weight(2)),
        batch(reals(B, T, d)),
    ),
    Case(
        "windows folded into the batch", ("folded", "windows"), net(windows, fc=linear(d, d), out=linear(d, 2)),
        batch(reals(B, 4, 4, d)),
    ),
    Case(
        "bilinear", ("two inputs",), net(lambda m, x, y: m.fc(x, y), fc=lambda: nn.Bilinear(d, 4, 3)),
        batch(reals(B, d), reals(B, 4)),
    ),
    Case(
        "complex linear", ("complex",), lambda: nn.Linear(d, 2, dtype=torch.complex128), batch(complexes(B, T, d)),
        lambda m, x: score(m(x).abs()),
    ),
    Case(
        "complex convolution", ("complex",), made(nn.Conv1d, 4, 2, 3, padding=1, dtype=torch.complex128),
        batch(complexes(B, 4, 6)), lambda m, x: score(m(x).abs()),
    ),
    Case(
        "complex filter of a spectrum", ("complex", "raw parameter"),
        net(lambda m, x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * m.w, n=T, dim=1), w=complex_weight(3, d)),
        batch(reals(B, T, d)),
    ),
    Case(
        "filter of a spectrum kept as pairs", ("complex", "derived weight"),
        net(
            lambda m, x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * torch.view_as_complex(m.w), n=T, dim=1),
            w=weight(3, d, 2),
        ),
        batch(reals(B, T, d)),
    ),
    Case(
        "complex matmul and einsum", ("complex", "raw parameter"),
        net(lambda m, x: torch.einsum("btd,dp->btp", x @ m.w, m.v), w=complex_weight(d, 3), v=complex_weight(3, 2)),
        batch(complexes(B, T, d)), lambda m, x: score(m(x).abs()),
    ),
    Case(
        "complex raw parameter", ("complex", "raw parameter"),
        net(lambda m, x: x * m.w + m.b, w=complex_weight(d), b=weight(d)), batch(reals(B, T, d)),
        lambda m, x: score((m(x) ** 2).abs()),
    ),
]
# fmt: on

# Embeddings: ids of every shape

REPEATED = fixed(1, 1, 4)
# fmt: off
EMBEDDING = [
    Case("ids (B, T)", (), lambda: nn.Embedding(7, d), batch(ids(7, B, T))),
    Case("ids (B,)", ("ids (B,)",), lambda: nn.Embedding(7, d), batch(ids(7, B))),
    Case("ids (B,) repeated", ("ids (B,)", "repeated index"), lambda: nn.Embedding(7, d), batch(REPEATED)),
    Case("ids repeated", ("repeated index",), lambda: nn.Embedding(2, d), batch(ids(2, B, T))),
    Case("ids (B, T, 2)", ("rank 3",), lambda: nn.Embedding(7, d), batch(ids(7, B, T, 2))),
    Case("ids T = B", ("T = B",), lambda: nn.Embedding(B, B), batch(ids(B, B, B))),
    Case(
        "ids time first T = B", ("T = B", "time first"), lambda: nn.Embedding(7, d), batch(ids(7, B, B)),
        scored_second, 1, cut_second,
    ),
    Case("ids B = 1", ("B = 1", "repeated index"), lambda: nn.Embedding(2, d), batch(ids(2, 1, T))),
    Case("padding_idx", ("padding_idx",), lambda: nn.Embedding(3, d, padding_idx=1), batch(ids(3, B, T))),
    Case(
        "functional padding_idx negative", ("padding_idx", "functional use"),
        net(lambda m, i: F.embedding(i, m.w, padding_idx=-1), w=weight(3, d)), batch(ids(3, B, T)),
    ),
    Case("max_norm", ("max_norm",), lambda: nn.Embedding(5, d, max_norm=0.7), batch(ids(5, B, T))),
    Case(
        "scale_grad_by_freq", ("scale_grad_by_freq", "repeated index"),
        lambda: nn.Embedding(3, d, scale_grad_by_freq=True), batch(ids(3, B, T)),
    ),
    Case("sparse embedding", ("sparse",), lambda: nn.Embedding(7, d, sparse=True), batch(ids(7, B, T))),
    Case("embedding_bag sum", ("repeated index",), lambda: nn.EmbeddingBag(4, d, mode="sum"), batch(ids(4, B, T))),
    Case(
        "embedding_bag mean", ("repeated index", "padding_idx"),
        lambda: nn.EmbeddingBag(4, d, mode="mean", padding_idx=2), batch(ids(4, B, T)),
    ),
    Case("embedding_bag max", ("repeated index",), lambda: nn.EmbeddingBag(4, d, mode="max"), batch(ids(4, B, T))),
    Case(
        "embedding_bag with weights", ("repeated index", "two inputs"),
        net(lambda m, i, w: m.bag(i, per_sample_weights=w), bag=made(nn.EmbeddingBag, 4, d, mode="sum")),
        batch(ids(4, B, T), reals(B, T)),
    ),
    Case(
        "embedding_bag with offsets", ("ragged", "no batch dimension"),
        net(lambda m, i, start: m.bag(i, start), bag=made(nn.EmbeddingBag, 4, d, mode="mean")),
        batch(ids(4, 7), fixed(0, 3, 4)),
        cut=lambda batch, i: (batch[0].tensor_split([3, 4])[i], torch.zeros(1, dtype=torch.long)), batch_size=B,
    ),
    Case(
        "positions (T,)", ("positions",),
        net(lambda m, x: m.fc(x + m.pos(torch.arange(T))), fc=linear(d, 2), pos=lambda: nn.Embedding(6, d)),
        batch(reals(B, T, d)),
    ),
    Case(
        "positions (1, T)", ("positions",),
        net(lambda m, x: m.fc(x + m.pos(torch.arange(T)[None])), fc=linear(d, 2), pos=lambda: nn.Embedding(6, d)),
        batch(reals(B, T, d)),
    ),
    Case(
        "positions (T,) T = B", ("positions", "T = B"),
        net(lambda m, x: m.fc(x + m.pos(torch.arange(B))), fc=linear(d, 2), pos=lambda: nn.Embedding(6, d)),
        batch(reals(B, B, d)),
    ),
    Case(
        "positions expanded", ("positions", "T = B"),
        net(
            lambda m, i: m.fc(m.tok(i) + m.pos(torch.arange(B)[None].expand(i.shape))),
            tok=lambda: nn.Embedding(7, d), pos=lambda: nn.Embedding(6, d), fc=linear(d, 2),
        ),
        batch(ids(7, B, B)),
    ),
    Case(
        "positions among the arguments (T,)", ("positions", "T = B"),
        net(
            lambda m, i, where: m.fc((m.tok(i) + m.pos(where)).tanh()), tok=lambda: nn.Embedding(7, d),
            pos=lambda: nn.Embedding(6, d), fc=linear(d, 2),
        ),
        batch(ids(7, B, B), fixed(2, 0, 2)), cut=cut_only(0),
    ),
    Case(
        "token types", ("two inputs",),
        net(
            lambda m, i, kind: m.fc(m.tok(i) + m.kind(kind)), tok=lambda: nn.Embedding(7, d),
            kind=lambda: nn.Embedding(2, d), fc=linear(d, 2),
        ),
        batch(ids(7, B, T), ids(2, B, T)),
    ),
    Case(
        "token types zeros in forward", ("repeated index",),
        net(
            lambda m, i: m.fc(m.tok(i) + m.kind(torch.zeros_like(i))), tok=lambda: nn.Embedding(7, d),
            kind=lambda: nn.Embedding(2, d), fc=linear(d, 2),
        ),
        batch(ids(7, B, T)),
    ),
]
# fmt: on

# Convolutions


def image(*space: int, channels: int = 4) -> Callable[[Generator], Batch]:
    return batch(reals(B, channels, *space))


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

# Norms


def frozen(module: nn.Module, *names: str) -> nn.Module:
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


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

# Recurrent nets


def outputs(module: nn.Module, x: Tensor, *state: Tensor) -> Tensor:
    """The output and the final state of a recurrent module side by side, (B, T + states, H), or time first."""
    out, final = module(x, *state)
    finals = final if isinstance(final, tuple) else (final,)
    flat = [f.transpose(0, 1) if module.batch_first else f for f in finals]
    dim = 1 if module.batch_first else 0
    width = max(t.shape[-1] for t in [out, *flat])
    return torch.cat([F.pad(t, (0, width - t.shape[-1])) for t in [out, *flat]], dim)


def recurrent(kind: type[nn.Module], *args: object, **options: object) -> Callable[[], nn.Module]:
    """A recurrent module, batch first, with its final state in the output."""
    return net(
        lambda m, x, *state: outputs(m.rnn, x, *state),
        rnn=lambda: kind(*args, **({"batch_first": True} | options)),
    )


def packed(model: nn.Module, x: Tensor, lengths: Tensor, is_sorted: bool, *state: object) -> Tensor:
    sequence = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=is_sorted)
    out, final = model(sequence, *state)
    finals = torch.cat(final if isinstance(final, tuple) else (final,), -1)
    padded, _ = pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])
    return score(padded) + score(finals, 1)


def packed_inside(m: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    sequence = pack_padded_sequence(m.fc(x), lengths, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(m.rnn(sequence)[0], batch_first=True, total_length=x.shape[1])[0]


def stepped(m: nn.Module, x: Tensor) -> Tensor:
    """A cell called once per step, from a state of zeros."""
    zeros = x.new_zeros(len(x), m.cell.hidden_size)
    is_lstm = isinstance(m.cell, nn.LSTMCell)
    state = (zeros, zeros) if is_lstm else zeros
    outs = []
    for step in x.unbind(1):
        state = m.cell(step, state)
        outs.append(state[0] if is_lstm else state)
    return torch.stack(outs, 1)


SEQUENCE = batch(reals(B, T, d))
SORTED, UNSORTED = fixed(4, 3, 1), fixed(2, 4, 3)
KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN, "rnn_relu": nn.RNN}


def kind_options(name: str) -> dict[str, object]:
    return {"nonlinearity": name[4:]} if name.startswith("rnn") else {}


# fmt: off
RECURRENT = [
    *(Case(name, (), recurrent(kind, d, 2, **kind_options(name)), SEQUENCE) for name, kind in KINDS.items()),
    *(
        Case(
            f"{name} two layers bidirectional", ("multi-layer", "bidirectional"),
            recurrent(kind, d, 2, num_layers=2, bidirectional=True, **kind_options(name)), SEQUENCE,
        )
        for name, kind in KINDS.items()
    ),
    *(
        Case(f"{name} without bias", (), recurrent(kind, d, 2, bias=False, **kind_options(name)), SEQUENCE)
        for name, kind in KINDS.items()
    ),
    *(
        Case(
            f"{name} time first T = B", ("time first", "T = B"),
            recurrent(kind, d, 2, batch_first=False, **kind_options(name)), batch(reals(B, B, d)), scored_second, 1,
            cut_second,
        )
        for name, kind in KINDS.items()
    ),
    *(
        Case(
            f"{name} packed sorted", ("packed", "sorted lengths"),
            made(kind, d, 2, batch_first=True, **kind_options(name)), batch(reals(B, T, d), SORTED),
            lambda m, x, n: packed(m, x, n, True),
        )
        for name, kind in KINDS.items()
    ),
    *(
        Case(
            f"{name} packed unsorted two layers bidirectional", ("packed", "unsorted lengths"),
            made(kind, d, 2, 2, batch_first=True, bidirectional=True, **kind_options(name)),
            batch(reals(B, T, d), UNSORTED), lambda m, x, n: packed(m, x, n, False),
        )
        for name, kind in KINDS.items()
    ),
    Case(
        "lstm packed inside unsorted", ("packed", "unsorted lengths"),
        net(packed_inside, fc=linear(d, 4), rnn=lambda: nn.LSTM(4, 2, batch_first=True)),
        batch(reals(B, T, d), UNSORTED),
    ),
    Case(
        "lstm packed inside T = B", ("packed", "T = B"),
        net(packed_inside, fc=linear(d, 4), rnn=lambda: nn.LSTM(4, 2, batch_first=True)),
        batch(reals(B, B, d), fixed(1, 3, 2)),
    ),
    Case(
        "lstm packed unsorted with given state", ("packed", "unsorted lengths", "given state"),
        made(nn.LSTM, d, 2, batch_first=True), batch(reals(B, T, d), UNSORTED, reals(B, 2), reals(B, 2)),
        lambda m, x, n, h, c: packed(m, x, n, False, (h[None], c[None])),
    ),
    Case(
        "gru packed unsorted with learned state", ("packed", "unsorted lengths", "learned state"),
        net(lambda m, x, h: m.rnn(x, h), rnn=made(nn.GRU, d, 2, batch_first=True), h=weight(1, 1, 2)),
        batch(reals(B, T, d), UNSORTED), lambda m, x, n: packed(m, x, n, False, m.h.expand(-1, len(x), -1)),
    ),
    Case("lstm proj_size", ("proj_size",), recurrent(nn.LSTM, d, 4, proj_size=2), SEQUENCE),
    Case(
        "lstm proj_size two layers bidirectional", ("proj_size", "multi-layer", "bidirectional"),
        recurrent(nn.LSTM, d, 4, num_layers=2, bidirectional=True, proj_size=2), SEQUENCE,
    ),
    Case(
        "lstm proj_size packed unsorted", ("proj_size", "packed", "unsorted lengths"),
        lambda: nn.LSTM(d, 4, batch_first=True, proj_size=2), batch(reals(B, T, d), UNSORTED),
        lambda m, x, n: packed(m, x, n, False),
    ),
    Case("lstm T = 1", ("T = 1",), recurrent(nn.LSTM, d, 2), batch(reals(B, 1, d))),
    Case("lstm B = 1", ("B = 1",), recurrent(nn.LSTM, d, 2, num_layers=2), batch(reals(1, T, d))),
    Case("gru all sizes = B", ("T = B", "d = B"), recurrent(nn.GRU, B, B), batch(reals(B, B, B))),
    Case(
        "gru given state", ("given state", "two inputs"), recurrent(nn.GRU, d, 2),
        batch(reals(B, T, d), reals(1, B, 2)),
        cut=lambda batch, i: (batch[0].narrow(0, i, 1), batch[1].narrow(1, i, 1)),
    ),
    Case(
        "lstm given state", ("given state", "two inputs"),
        net(lambda m, x, h, c: outputs(m.rnn, x, (h, c)), rnn=lambda: nn.LSTM(d, 2, batch_first=True)),
        batch(reals(B, T, d), reals(1, B, 2), reals(1, B, 2)),
        cut=lambda batch, i: (batch[0].narrow(0, i, 1), batch[1].narrow(1, i, 1), batch[2].narrow(1, i, 1)),
    ),
    Case(
        "lstm learned state", ("learned state", "raw parameter"),
        net(
            lambda m, x: outputs(m.rnn, x, (m.h.expand(-1, len(x), -1), m.c.expand(-1, len(x), -1))),
            rnn=lambda: nn.LSTM(d, 2, num_layers=2, batch_first=True), h=weight(2, 1, 2), c=weight(2, 1, 2),
        ),
        SEQUENCE,
    ),
    Case(
        "gru state computed from the input", ("given state",),
        net(
            lambda m, x: outputs(m.rnn, x, m.first(x.mean(1))[None].tanh()),
            rnn=lambda: nn.GRU(d, 2, batch_first=True), first=linear(d, 2),
        ),
        SEQUENCE,
    ),
    Case(
        "rnn learned state repeated", ("learned state", "T = B"),
        net(
            lambda m, x: outputs(m.rnn, x, m.h.repeat(1, len(x), 1)), rnn=lambda: nn.RNN(d, 2, batch_first=True),
            h=weight(1, 1, 2),
        ),
        batch(reals(B, B, d)),
    ),
    *(
        Case(f"{kind.__name__}", ("module used twice",), net(stepped, cell=made(kind, d, 2)), SEQUENCE)
        for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell)
    ),
    Case(
        "LSTMCell without bias T = B", ("module used twice", "T = B"),
        net(stepped, cell=lambda: nn.LSTMCell(d, 2, bias=False)), batch(reals(B, B, d)),
    ),
    Case(
        "encoder and decoder lstm", ("given state", "module used twice"),
        net(
            lambda m, x: m.fc(m.decode(x.flip(1), m.encode(x)[1])[0]), encode=lambda: nn.LSTM(d, 2, batch_first=True),
            decode=lambda: nn.LSTM(d, 2, batch_first=True), fc=linear(2, d),
        ),
        SEQUENCE,
    ),
    Case(
        "lstm over folded windows", ("folded",),
        net(
            lambda m, x: m.fc(m.rnn(x.flatten(0, 1))[0][:, -1]).view(len(x), -1),
            rnn=lambda: nn.LSTM(d, 2, batch_first=True), fc=linear(2, 2),
        ),
        batch(reals(B, 2, T, d)),
    ),
]
# fmt: on

# Attention


def attend(m: nn.Module, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """One head, by hand."""
    q, k, v = m.qkv(x).chunk(3, -1)
    weights = q @ k.mT
    if mask is not None:
        weights = weights.masked_fill(~mask, -torch.inf)
    return m.out(weights.softmax(-1) @ v)


def block_diagonal(m: nn.Module, x: Tensor) -> Tensor:
    """All samples in one row of tokens, kept apart by the mask."""
    rows = torch.arange(len(x)).repeat_interleave(x.shape[1])
    return attend(m, x.reshape(1, -1, d), rows[:, None] == rows).view(len(x), -1, 2)


def relative(m: nn.Module, x: Tensor) -> Tensor:
    distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1]) + x.shape[1] - 1
    return (m.qk(x) @ x.mT + m.table(distance).squeeze(-1)).softmax(-1) @ x


def with_mask(m: nn.Module) -> nn.Module:
    m.register_buffer("mask", torch.ones(B, B, dtype=torch.bool).tril())
    return m


def encoder(batch_first: bool, **options: object) -> Callable[[], nn.Module]:
    return lambda: nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=batch_first, **options)


# fmt: off
ATTENTION = [
    Case(
        "MultiheadAttention", (),
        net(lambda m, x: m.mha(x, x, x)[0], mha=lambda: nn.MultiheadAttention(4, 2, batch_first=True)),
        batch(reals(B, T, 4)),
    ),
    Case(
        "MultiheadAttention without weights T = B", ("T = B",),
        net(
            lambda m, x: m.mha(x, x, x, need_weights=False)[0],
            mha=lambda: nn.MultiheadAttention(4, 2, batch_first=True),
        ),
        batch(reals(B, B, 4)),
    ),
    Case(
        "MultiheadAttention time first T = B", ("time first", "T = B"),
        net(lambda m, x: m.mha(x, x, x)[0], mha=lambda: nn.MultiheadAttention(4, 2)), batch(reals(B, B, 4)),
        scored_second, 1, cut_second,
    ),
    Case(
        "MultiheadAttention kdim vdim bias_k zero_attn", ("raw parameter", "two inputs"),
        net(
            lambda m, x, y: m.mha(x, y, y)[0],
            mha=lambda: nn.MultiheadAttention(
                4, 2, kdim=d, vdim=d, batch_first=True, add_bias_kv=True, add_zero_attn=True,
            ),
        ),
        batch(reals(B, T, 4), reals(B, 3, d)),
    ),
    Case(
        "MultiheadAttention masked", ("two inputs",),
        net(
            lambda m, x, pad: m.mha(x, x, x, key_padding_mask=pad.bool())[0],
            mha=lambda: nn.MultiheadAttention(4, 2, batch_first=True),
        ),
        batch(reals(B, T, 4), lambda g: torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1]])),
    ),
    Case("TransformerEncoderLayer", ("T = B",), encoder(True), batch(reals(B, B, 4))),
    Case(
        "TransformerEncoderLayer norm first", (), encoder(True, norm_first=True, activation="gelu"),
        batch(reals(B, T, 4)),
    ),
    Case("TransformerEncoderLayer in eval", (), lambda: encoder(True)().eval(), batch(reals(B, T, 4))),
    Case(
        "TransformerEncoderLayer time first T = B", ("time first", "T = B"), encoder(False), batch(reals(B, B, 4)),
        scored_second, 1, cut_second,
    ),
    Case(
        "TransformerDecoderLayer", ("two inputs",),
        net(
            lambda m, x, y: m.layer(x, y),
            layer=lambda: nn.TransformerDecoderLayer(4, 2, 6, dropout=0.0, batch_first=True),
        ),
        batch(reals(B, T, 4), reals(B, 3, 4)),
    ),
    Case(
        "attention by hand, causal mask (B, B)", ("T = B", "mask (B, B)"),
        lambda: with_mask(Net(lambda m, x: attend(m, x, m.mask), qkv=nn.Linear(d, 9), out=nn.Linear(3, 2))),
        batch(reals(B, B, d)),
    ),
    Case(
        "attention mask (B, B) kept in an attribute", ("T = B", "mask (B, B)"),
        net(
            lambda m, x: attend(m, x, m.mask[0]), qkv=linear(d, 9), out=linear(3, 2),
            mask=lambda: [torch.ones(B, B, dtype=torch.bool).tril()],
        ),
        batch(reals(B, B, d)),
    ),
    Case(
        "all samples in one row of tokens", ("packed", "T = B"),
        net(block_diagonal, qkv=linear(d, 9), out=linear(3, 2)), batch(reals(B, B, d)),
    ),
    Case(
        "scaled_dot_product_attention with learned bias", ("raw parameter", "T = B"),
        net(
            lambda m, x: F.scaled_dot_product_attention(
                *m.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4), m.bias,
            ),
            qkv=linear(d, 24), bias=weight(2, B, B),
        ),
        batch(reals(B, B, d)),
    ),
    Case(
        "scaled_dot_product_attention over learned memory", ("raw parameter",),
        net(
            lambda m, x: F.scaled_dot_product_attention(
                m.q(x), m.k.expand(len(x), -1, -1), m.v.expand(len(x), -1, -1),
            ),
            q=linear(d, 4), k=weight(3, 4), v=weight(3, 4),
        ),
        batch(reals(B, T, d)),
    ),
    Case(
        "learned queries through a layer", ("raw parameter", "derived weight"),
        net(
            lambda m, x: m.out((m.q(m.queries).tanh() @ m.k(x).mT).softmax(-1) @ x), queries=weight(B, d),
            q=linear(d, 4), k=linear(d, 4), out=linear(d, 2),
        ),
        batch(reals(B, T, d)),
    ),
    Case(
        "relative positions", ("positions", "T = B", "derived weight"),
        net(relative, qk=linear(d, d), table=lambda: nn.Embedding(2 * B - 1, 1)), batch(reals(B, B, d)),
    ),
    Case(
        "grouped query attention", (),
        net(
            lambda m, x: F.scaled_dot_product_attention(
                m.q(x).unflatten(-1, (4, 2)).transpose(1, 2), m.k(x).unflatten(-1, (2, 2)).transpose(1, 2),
                m.v(x).unflatten(-1, (2, 2)).transpose(1, 2), is_causal=True, enable_gqa=True,
            ),
            q=linear(d, 8), k=linear(d, 4), v=linear(d, 4),
        ),
        batch(reals(B, T, d)),
    ),
]
# fmt: on

# Parameters used without a module


def raw(name: str, body: Callable[..., object], *hazards: str, x: Maker | None = None, **parts) -> Case:
    return Case(name, ("raw parameter", *hazards), net(body, **parts), batch(x or reals(B, T, d)))


def fill(x: Tensor, value: Tensor) -> Tensor:
    out = torch.zeros(len(x), 2 * d, dtype=x.dtype)
    out[:, :d] = x[:, 0]
    out[:, d:] = value
    return out


def prompt(m: nn.Module, x: Tensor) -> Tensor:
    table = torch.zeros(x.shape[1:], dtype=x.dtype)
    table[0] = m.w
    return (x + table).tanh()


# fmt: off
RAW = [
    raw("mul", lambda m, x: x * m.w, w=weight(d)),
    raw("mul d = B", lambda m, x: x * m.w, "d = B", "T = B", w=weight(B), x=reals(B, B, B)),
    raw("mul by a column d = B", lambda m, x: m.w * x, "d = B", "T = B", w=weight(B, 1), x=reals(B, B, B)),
    raw("add", lambda m, x: (x + m.w).tanh(), w=weight(d)),
    raw("position table", lambda m, x: (x + m.w[: x.shape[1]]).tanh(), "positions", w=weight(6, d)),
    raw(
        "position table T = B", lambda m, x: (x + m.w).tanh(), "positions", "T = B", w=weight(B, d), x=reals(B, B, d),
    ),
    raw("position table (1, T, d)", lambda m, x: (m.w + x).tanh(), "positions", w=weight(1, T, d)),
    raw(
        "position table with dropout off", lambda m, x: (x + F.dropout(m.w, 0.0)).tanh(), "positions", w=weight(T, d),
    ),
    raw("cls token", lambda m, x: torch.cat([m.w.expand(len(x), -1, -1), x], 1), w=weight(1, 1, d)),
    raw(
        "cls token B = 1", lambda m, x: torch.cat([m.w.expand(len(x), -1, -1), x], 1), "B = 1", w=weight(1, 1, d),
        x=reals(1, T, d),
    ),
    raw("cls token repeated", lambda m, x: torch.cat([m.w.repeat(len(x), 1, 1), x], 1), w=weight(1, 2, d)),
    raw(
        "cls token then attention", lambda m, x: m.enc(torch.cat([m.w.expand(len(x), -1, -1), x], 1) + m.pos)[:, 0],
        "T = B", w=weight(1, 1, 4), pos=weight(1, B, 4), enc=encoder(True), x=reals(B, B - 1, 4),
    ),
    raw("layer scale", lambda m, x: x + m.w * m.fc(x), w=weight(d), fc=linear(d, d)),
    raw("temperature", lambda m, x: x / m.w.exp(), "rank 0", w=weight()),
    raw("temperature of logits", lambda m, x: (m.fc(x) * m.w).log_softmax(-1), "rank 0", w=weight(), fc=linear(d, 2)),
    raw("power", lambda m, x: x.abs() ** m.w.abs(), w=weight(d)),
    raw("where", lambda m, x: torch.where(x > 0, x, m.w), w=weight(d)),
    raw("masked_fill", lambda m, x: x.masked_fill(x > 0, m.w) * m.w, "rank 0", w=weight()),
    raw("mask token", lambda m, x: torch.where((x[..., :1] > 0), m.w, x).tanh(), w=weight(1, 1, d)),
    raw("lerp", lambda m, x: torch.lerp(x, x.flip(1), m.w.sigmoid()), w=weight(d)),
    raw("addcmul", lambda m, x: torch.addcmul(m.b, x, m.w, value=0.5).tanh(), w=weight(d), b=weight(d)),
    raw("clamp by a parameter", lambda m, x: torch.clamp(x, -m.w.abs(), m.w.abs()) * x, w=weight(d)),
    raw("number minus", lambda m, x: (1 - m.w) * x + 2 / (3 + m.w**2), w=weight(d)),
    raw("matmul right", lambda m, x: x @ m.w, w=weight(d, 2)),
    raw("matmul left", lambda m, x: m.w @ x, w=weight(2, T)),
    raw("matmul left T = B", lambda m, x: m.w @ x, "T = B", w=weight(B, B), x=reals(B, B, B)),
    raw("matmul rank 2 d = B", lambda m, x: x @ m.w, "d = B", w=weight(B, B), x=reals(B, B)),
    raw("matmul by a vector", lambda m, x: x @ m.w, w=weight(d)),
    raw(
        "matmul both sides by one parameter", lambda m, x: m.w.T @ (x @ m.w), "T = B", "module used twice",
        w=weight(B, 2), x=reals(B, B, B),
    ),
    raw(
        "mm, mv", lambda m, x: torch.mm(x, m.w) * torch.mv(x, m.v)[:, None], w=weight(d, 2), v=weight(d),
        x=reals(B, d),
    ),
    raw("outer product with a vector", lambda m, x: torch.outer(x, m.w), w=weight(2), x=reals(B)),
    raw("bmm with per-sample copies", lambda m, x: torch.bmm(x, m.w.expand(len(x), -1, -1)), w=weight(d, 2)),
    raw("baddbmm", lambda m, x: torch.baddbmm(m.b, x, m.w.expand(len(x), -1, -1)), w=weight(d, 2), b=weight(1, 1, 2)),
    raw("tensordot", lambda m, x: torch.tensordot(x, m.w, dims=([2], [1])), w=weight(2, d)),
    raw("einsum", lambda m, x: torch.einsum("btd,dp->btp", x, m.w), w=weight(d, 2)),
    raw(
        "einsum transposed T = B", lambda m, x: torch.einsum("btd,pt->bpd", x, m.w), "T = B", w=weight(2, B),
        x=reals(B, B, d),
    ),
    raw("einsum diagonal", lambda m, x: torch.einsum("bij,ii->bj", x, m.w), w=weight(B, B), x=reals(B, B, d)),
    raw("einsum ellipsis", lambda m, x: torch.einsum("...d,pd->...p", x, m.w), w=weight(2, d)),
    raw("einsum implicit output", lambda m, x: torch.einsum("abd,dz", x, m.w), w=weight(d, 2)),
    raw(
        "einsum three operands", lambda m, x: torch.einsum("btd,dh,hp->btp", x, m.a, m.b), a=weight(d, 2),
        b=weight(2, 3),
    ),
    raw("einsum one parameter twice", lambda m, x: torch.einsum("btd,dh,ph->btp", x, m.w, m.w), w=weight(d, 2)),
    raw("weights per head", lambda m, x: torch.einsum("btd,hde->bhte", x, m.w), w=weight(2, d, 3)),
    raw("weights per head by matmul", lambda m, x: x[:, None] @ m.w, "d = B", w=weight(B, d, 2)),
    raw(
        "weights per position", lambda m, x: torch.einsum("btd,tde->bte", x, m.w), "T = B", w=weight(B, d, 2),
        x=reals(B, B, d),
    ),
    raw(
        "bmm over heads, samples folded", lambda m, x: torch.bmm(x.transpose(0, 1), m.w).transpose(0, 1), "T = B",
        w=weight(B, d, 2), x=reals(B, B, d),
    ),
    raw("setitem", lambda m, x: fill(x, m.w), w=weight(d)),
    raw("setitem into a table", prompt, w=weight(d)),
    raw("setitem into a table T = B", prompt, "T = B", w=weight(d), x=reals(B, B, d)),
    raw(
        "index_put into a table T = B",
        lambda m, x: (x + torch.zeros(B, d, dtype=x.dtype).index_put((torch.tensor([1]),), m.w[None])).tanh(),
        "T = B", w=weight(d), x=reals(B, B, d),
    ),
    raw("index by ids", lambda m, i: m.w[i].tanh(), "repeated index", w=weight(4, d), x=ids(4, B, T)),
    raw("index by negative ids", lambda m, i: m.w[i - 4].tanh(), "repeated index", w=weight(4, d), x=ids(4, B, T)),
    raw("index of a vector", lambda m, i: m.w[i].tanh(), "repeated index", "rank 1", w=weight(4), x=ids(4, B, T)),
    raw(
        "index of matrices", lambda m, i: torch.bmm(m.w[i], m.w[i].mT), "repeated index", "rank 3", w=weight(4, 2, 3),
        x=ids(4, B),
    ),
    raw(
        "index by two ids", lambda m, i: m.w[i[:, 0], i[:, 1]].tanh(), "repeated index", w=weight(4, 4, 2),
        x=ids(4, B, 2),
    ),
    raw("index_select", lambda m, i: m.w.index_select(0, i).tanh(), "repeated index", w=weight(4, 3), x=ids(4, B)),
    raw(
        "index_select of columns", lambda m, i: m.w.index_select(1, i).mT.tanh(), "repeated index", w=weight(3, 4),
        x=ids(4, B),
    ),
    raw(
        "gather", lambda m, i: m.w.expand(len(i), -1).gather(1, i).tanh(), "repeated index", w=weight(4),
        x=ids(4, B, T),
    ),
    raw("take", lambda m, i: torch.take(m.w, i).tanh(), "repeated index", w=weight(4), x=ids(4, B, T)),
    raw("norm of differences to a codebook", lambda m, x: torch.cdist(x, m.w), w=weight(3, d)),
    raw("squared distances to a codebook", lambda m, x: (x[:, :, None] - m.w).pow(2).sum(-1), w=weight(3, d)),
    raw("cosine similarity", lambda m, x: F.cosine_similarity(x[:, :, None], m.w, -1), w=weight(3, d)),
    raw(
        "null row before folded rows", lambda m, x: torch.cat([m.w, x.flatten(0, 1)])[1:].view(x.shape) + m.w,
        w=weight(1, d),
    ),
    raw(
        "penalty in every loss", lambda m, x: m.fc(x).sum((1, 2))[:, None] * 0.1 + m.fc.weight.pow(2).sum(),
        "derived weight", fc=linear(d, 2),
    ),
    raw(
        "convolution of a parameter", lambda m, x: F.conv1d(x, m.w) + F.conv1d(m.w, m.v).sum(), w=weight(2, T, 3),
        v=weight(1, T, 1),
    ),
    raw(
        "bias by addition time first", lambda m, x: (x.transpose(0, 1) + m.w).tanh().transpose(0, 1), "T = B",
        w=weight(B, 1, 1), x=reals(B, B, d),
    ),
    raw("cumulative gates", lambda m, x: (x.cumsum(1) * m.w.cumsum(0)).tanh(), "derived weight", w=weight(d)),
]
# fmt: on

# Weights computed from parameters


def straight_through(w: Tensor) -> Tensor:
    return w + ((w * 4).round() / 4 - w).detach()


def accumulated(m: nn.Module, x: Tensor) -> Tensor:
    """A derived tensor that grows in place between its uses."""
    level = m.w * 1.0
    x = (x + level).tanh()
    level.mul_(3.0)
    return (x + level).tanh()


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).T


def parametrized(module: nn.Module, transform: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(module, "weight", transform)


def derived(name: str, body: Callable[..., object], *hazards: str, x: Maker | None = None, **parts) -> Case:
    return Case(name, ("derived weight", *hazards), net(body, **parts), batch(x or reals(B, T, d)))


# fmt: off
DERIVED = [
    derived("transposed weight", lambda m, x: F.linear(x, m.w.T), w=weight(d, 2)),
    derived(
        "transposed weight d = B", lambda m, x: x @ m.w.t() @ m.w, "d = B", "T = B", w=weight(B, B), x=reals(B, B, B),
    ),
    derived(
        "weight viewed", lambda m, x: F.linear(x, m.w.view(2, d), m.b.squeeze(0)), w=weight(2 * d), b=weight(1, 2),
    ),
    Case("weight_norm", ("derived weight",), lambda: parametrizations.weight_norm(nn.Linear(d, 2)), SEQUENCE),
    Case(
        "weight_norm of a convolution", ("derived weight",), lambda: parametrizations.weight_norm(nn.Conv1d(4, 2, 3)),
        image(6),
    ),
    Case(
        "spectral_norm", ("derived weight", "buffers"), lambda: parametrizations.spectral_norm(nn.Linear(d, 3)),
        SEQUENCE,
    ),
    Case(
        "spectral_norm in eval", ("derived weight",), lambda: parametrizations.spectral_norm(nn.Linear(d, 3)).eval(),
        SEQUENCE,
    ),
    Case(
        "orthogonal", ("derived weight",), lambda: parametrizations.orthogonal(nn.Linear(3, 3)),
        batch(reals(B, T, 3)),
    ),
    Case(
        "symmetric", ("derived weight", "d = B"), lambda: parametrized(nn.Linear(B, B), Symmetric()),
        batch(reals(B, B, B)),
    ),
    derived("product of two weights", lambda m, x: F.linear(x, m.a @ m.b), a=weight(2, 4), b=weight(4, d)),
    derived(
        "masked weight", lambda m, x: F.linear(x, m.w * m.mask[0]), w=weight(2, d),
        mask=lambda: [torch.arange(d) % 2],
    ),
    derived(
        "masked weight all sizes = B", lambda m, x: F.linear(x, m.w * m.mask[0]), "T = B", "d = B", w=weight(B, B),
        mask=lambda: [torch.ones(B, B).tril()], x=reals(B, B, B),
    ),
    derived(
        "masked weight plus itself B = 1", lambda m, x: F.linear(x, m.w * m.mask[0] + m.w), "B = 1", w=weight(2, d),
        mask=lambda: [torch.arange(d) % 2], x=reals(1, T, d),
    ),
    derived(
        "slices of a packed weight",
        lambda m, x: (x @ m.w[:d].T @ (x @ m.w[d : 2 * d].T).mT).softmax(-1) @ (x @ m.w[2 * d :].T),
        w=weight(3 * d, d),
    ),
    derived(
        "chunks of a packed weight",
        lambda m, x: torch.cat([F.linear(x, w) * k for k, w in enumerate(m.w.chunk(3), 1)], -1), w=weight(6, d),
    ),
    derived(
        "LoRA merge", lambda m, x: F.linear(x, m.w + 0.5 * m.b @ m.a), w=weight(2, d), a=weight(1, d), b=weight(2, 1),
    ),
    derived(
        "LoRA on a frozen layer", lambda m, x: m.fc(x) + F.linear(F.linear(x, m.a), m.b), "frozen",
        fc=lambda: frozen(nn.Linear(d, 2), "weight", "bias"), a=weight(1, d), b=weight(2, 1),
    ),
    derived("straight-through quantiser", lambda m, x: F.linear(x, straight_through(m.w)), w=weight(2, d)),
    derived("cat of parameters", lambda m, x: F.linear(x, torch.cat([m.a, m.b])), a=weight(1, d), b=weight(2, d)),
    derived(
        "stack of parameters", lambda m, x: x @ torch.stack([m.a, m.b], 1) + torch.stack([m.a, m.b]).sum(),
        a=weight(d), b=weight(d),
    ),
    Case(
        "weight in another dtype", ("derived weight", "dtype"),
        net(lambda m, x: F.linear(x.float(), m.w.float()).double(), w=weight(2, d)), SEQUENCE, tolerance=1e-6,
    ),
    derived("softmax of a weight", lambda m, x: x @ m.w.softmax(0), w=weight(d, 2)),
    derived(
        "normalised rows", lambda m, x: F.linear(F.normalize(x, dim=-1), F.normalize(m.w, dim=-1)), w=weight(2, d),
    ),
    derived("state space decay", lambda m, x: (x.cumsum(1) * torch.exp(-torch.exp(m.w))).tanh(), w=weight(d)),
    derived("1 + w", lambda m, x: F.layer_norm(x, (d,), 1 + m.w, m.b * 2), w=weight(d), b=weight(d)),
    derived(
        "derived once, used twice", lambda m, x: (lambda w: F.linear(F.linear(x, w).tanh(), w.T))(m.w.exp()),
        "module used twice", w=weight(2, d),
    ),
    derived(
        "derived and used directly", lambda m, x: F.linear(x, m.w) + F.linear(x, m.w.tanh()), "module used twice",
        w=weight(2, d),
    ),
    derived(
        "generated by a layer", lambda m, x: F.linear(x, m.fc(m.code).view(2, d)), fc=linear(3, 2 * d),
        code=weight(3),
    ),
    derived("changed in place after its use", accumulated, "in-place after", w=weight(d)),
    derived(
        "filled in place d = B", lambda m, x: F.linear(x, m.w.clone().masked_fill_(m.mask[0], 0.3)),
        "in-place before", "d = B", "T = B", w=weight(B, B), mask=lambda: [torch.ones(B, B, dtype=torch.bool).tril()],
        x=reals(B, B, B),
    ),
    derived("fake quantised bias", lambda m, x: F.linear(x, m.w, straight_through(m.b)), w=weight(2, d), b=weight(2)),
    derived(
        "embedding of a derived table", lambda m, i: F.embedding(i, m.w * m.w), "repeated index", w=weight(4, d),
        x=ids(4, B, T),
    ),
    derived(
        "convolution by a derived kernel", lambda m, x: F.conv1d(x, m.w - m.w.mean((1, 2), keepdim=True)),
        w=weight(2, T, 3),
    ),
    derived("expanded kernel", lambda m, x: F.conv1d(x, m.w.expand(T, 1, 3), groups=T), w=weight(1, 1, 3)),
]
# fmt: on

# Several uses, sharing, freezing


class Aliased(nn.Module):
    """Layers that a plain list holds as well: the forward goes through the list."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(d, d), nn.Linear(d, 2)
        self.steps = [self.a, torch.tanh, self.b]
        self.own = [self.a.weight]

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x + F.linear(x[..., :1].expand(-1, -1, d), self.own[0])[..., :2]


class Hooked(nn.Module):
    """Nested modules whose forward hooks change what passes."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Sequential(nn.Linear(d, 4), nn.Tanh()), nn.Linear(4, 2))
        self.body[0][0].register_forward_hook(lambda module, args, out: out * 2)
        self.body[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": self.body(x), "extra": x}


def tied() -> nn.Module:
    m = Net(
        lambda m, i: m.head(m.fc(m.tok(i)).tanh()),
        tok=nn.Embedding(6, d),
        fc=nn.Linear(d, d),
        head=nn.Linear(d, 6, bias=False),
    )
    m.head.weight = m.tok.weight
    return m


def shared_layers() -> nn.Module:
    one = nn.Linear(d, d)
    return nn.Sequential(one, nn.Tanh(), one, nn.Tanh(), nn.Linear(d, 2))


def partly_frozen(m: nn.Module) -> nn.Module:
    return frozen(m, "0.weight", "2.bias")


# fmt: off
TWICE = [
    Case(
        "module used twice", ("module used twice",), net(lambda m, x: m.fc(m.fc(x).tanh()), fc=linear(d, d)),
        SEQUENCE,
    ),
    Case("one layer under two names", ("shared",), shared_layers, SEQUENCE),
    Case("tied embedding and head", ("tied", "repeated index"), tied, batch(ids(6, B, T))),
    Case("tied embedding and head T = B", ("tied", "T = B"), tied, batch(ids(6, B, B))),
    Case(
        "tied by call and functionally", ("tied", "functional use"),
        net(lambda m, x: F.linear(m.fc(x).tanh(), m.fc.weight.T), fc=linear(d, 2)), SEQUENCE,
    ),
    Case(
        "tied convolution and its transpose", ("tied",),
        net(lambda m, x: F.conv_transpose1d(m.conv(x).tanh(), m.conv.weight), conv=made(nn.Conv1d, 4, 2, 3)),
        image(6),
    ),
    Case(
        "convolution used twice", ("module used twice",),
        net(lambda m, x: m.c(m.c(x).tanh()), c=made(nn.Conv1d, 4, 4, 3, padding=1)), image(5),
    ),
    Case(
        "weight used in linear and by multiplication", ("tied", "raw parameter"),
        net(lambda m, x: m.fc(x) * m.fc.weight.sum(1) + m.fc.bias, fc=linear(d, 2)), SEQUENCE,
    ),
    Case(
        "norm used twice on different shapes", ("module used twice",),
        net(lambda m, x: m.norm(x).mean(1) * m.norm(x[:, 0]), norm=lambda: nn.LayerNorm(d)), SEQUENCE,
    ),
    Case(
        "embedding used for (B,) and (B, T)", ("module used twice", "two inputs"),
        net(lambda m, i, j: m.tok(i).sum(1) * m.tok(j), tok=lambda: nn.Embedding(5, d)),
        batch(ids(5, B, T), ids(5, B)),
    ),
    Case("aliases in a list", ("aliased",), Aliased, SEQUENCE),
    Case("forward hooks and a dict", ("dict output", "hooks"), Hooked, SEQUENCE, lambda m, x: score(m(x)["out"])),
    Case(
        "unused parameter", ("unused",), net(lambda m, x: m.fc(x), fc=linear(d, 2), other=linear(d, 3), w=weight(2)),
        SEQUENCE,
    ),
    Case(
        "used but not in the loss", ("unused",),
        net(lambda m, x: (m.fc(x), m.other(x))[0], fc=linear(d, 2), other=linear(d, 3)), SEQUENCE,
    ),
    Case(
        "used under no_grad", ("unused",),
        net(lambda m, x: m.fc(x) * m.other(x).detach(), fc=linear(d, 2), other=linear(d, 2)), SEQUENCE,
    ),
    Case(
        "partly frozen", ("frozen",),
        lambda: partly_frozen(nn.Sequential(nn.Linear(d, 4), nn.Tanh(), nn.Linear(4, 2))), SEQUENCE,
    ),
    Case(
        "frozen trunk", ("frozen",),
        lambda: nn.Sequential(frozen(nn.Linear(d, 4), "weight", "bias"), nn.Tanh(), nn.Linear(4, 2)), SEQUENCE,
    ),
    Case(
        "siamese, two calls of the model", ("module used twice", "two inputs"), linear(d, 2),
        batch(reals(B, d), reals(B, d)), lambda m, x, y: score(m(x) * m(y)),
    ),
    Case(
        "submodules called, never the model", ("functional use",),
        net(lambda m, x: x, a=linear(d, 4), b=linear(4, 2)), SEQUENCE, lambda m, x: score(m.b(m.a(x).tanh())),
    ),
    Case(
        "micro-batches in one recording", ("module used twice",), linear(d, 2), batch(reals(5, T, d)),
        lambda m, x: torch.cat([score(m(part)) for part in x.split(2)]), batch_size=5,
    ),
    Case(
        "one sample at a time", ("rank 1",),
        net(lambda m, x: torch.stack([m.b(m.a(row).tanh()) for row in x]), a=linear(d, B), b=linear(B, B)),
        batch(reals(B, d)),
    ),
    Case(
        "one map at a time", ("no batch dimension",),
        net(
            lambda m, x: torch.stack([m.norm(m.conv(row)) for row in x]), conv=made(nn.Conv2d, 2, B, 2),
            norm=lambda: nn.LayerNorm(3),
        ),
        batch(reals(B, 2, 4, 4)),
    ),
    Case(
        "one sequence at a time", ("no batch dimension",),
        net(lambda m, x: torch.stack([m.rnn(row)[0] for row in x]), rnn=lambda: nn.LSTM(d, 2)), SEQUENCE,
    ),
]
# fmt: on

# In-place ops


def added_in_place(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x)
    h += m.w
    h.mul_(m.v)
    return m.b(h.tanh_())


def multiplied_into_copies(m: nn.Module, x: Tensor) -> Tensor:
    """A tensor made of a parameter is the target of an in-place op whose result is not looked at."""
    h = m.w.expand(len(x), d).clone()
    h.mul_(x)
    return m.b(h)


def written_back(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x)
    h[:, 0] = h[:, 0] * 2
    h[:, 1:] += m.w
    return m.b(h)


# fmt: off
IN_PLACE = [
    Case(
        "relu in place", ("in-place after",),
        lambda: nn.Sequential(nn.Linear(d, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)), SEQUENCE,
    ),
    Case(
        "residual in place", ("in-place after",),
        net(lambda m, x: m.b(m.a(x).add_(x)), a=linear(d, d), b=linear(d, 2)), SEQUENCE,
    ),
    Case(
        "relu in place on a convolution and norm", ("in-place after",),
        lambda: nn.Sequential(
            nn.Conv2d(4, 4, 2), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 2), nn.ReLU(inplace=True),
        ),
        image(4, 4),
    ),
    Case(
        "parameters in place", ("in-place after", "in-place before", "raw parameter"),
        net(added_in_place, a=linear(d, 4), b=linear(4, 2), w=weight(4), v=weight(4)), SEQUENCE,
    ),
    Case(
        "in place on copies of a parameter", ("in-place before", "raw parameter"),
        net(multiplied_into_copies, w=weight(d), b=linear(d, 2)), batch(reals(B, d)),
    ),
    Case(
        "slices written back", ("in-place after", "in-place before"),
        net(written_back, a=linear(d, 4), b=linear(4, 2), w=weight(4)), SEQUENCE,
    ),
    Case(
        "input changed before its use", ("in-place before",),
        net(lambda m, x: m.fc(x.clone().mul_(2).add_(1)), fc=linear(d, 2)), SEQUENCE,
    ),
    Case(
        "in place on an embedding", ("in-place after", "repeated index"),
        net(lambda m, i: m.fc(m.tok(i).mul_(3).tanh_()), tok=lambda: nn.Embedding(4, d), fc=linear(d, 2)),
        batch(ids(4, B, T)),
    ),
    Case(
        "sigmoid in place on a sum with a parameter", ("in-place after", "raw parameter"),
        net(lambda m, x: (x + m.w).sigmoid_() * (x * m.w).exp_(), w=weight(d)), SEQUENCE,
    ),
]
# fmt: on

# Samples that move, losses that mask


def routed(m: nn.Module, x: Tensor) -> Tensor:
    """A mixture of experts: tokens picked by a boolean mask."""
    rows = x.reshape(-1, d)
    choice = (rows * 3).sum(-1).long() % 2
    out = torch.zeros(len(rows), 2, dtype=x.dtype)
    for k, expert in enumerate(m.experts):
        out[choice == k] = expert(rows[choice == k])
    return (out * m.gate(rows).sigmoid()).view(len(x), -1, 2)


def routed_by_index(m: nn.Module, x: Tensor) -> Tensor:
    """A mixture of experts: tokens picked by index, weighted by a gate, added back."""
    rows = x.reshape(-1, d)
    gates, choice = m.gate(rows).softmax(-1).topk(2, -1)
    out = torch.zeros(len(rows), 2, dtype=x.dtype)
    for k, expert in enumerate(m.experts):
        token, slot = torch.where(choice == k)
        out.index_add_(0, token, expert(rows[token]) * gates[token, slot, None])
    return out.view(len(x), -1, 2)


def experts(n: int) -> Callable[[], nn.Module]:
    return lambda: nn.ModuleList(nn.Sequential(nn.Linear(d, 3), nn.GELU(), nn.Linear(3, 2)) for _ in range(n))


def ragged(m: nn.Module, x: Tensor, keep: Tensor) -> Tensor:
    """Only the tokens that are kept pass the layer."""
    rows = m.b(m.a(x[keep > 0]).tanh())
    return torch.zeros(*x.shape[:2], 2, dtype=x.dtype).masked_scatter(keep[..., None] > 0, rows)


def permuted(m: nn.Module, x: Tensor) -> Tensor:
    order = x[:, 0, 0].argsort()
    return m.b(m.a(x[order]).tanh())[order.argsort()]


def masked_loss(m: nn.Module, i: Tensor, target: Tensor) -> Tensor:
    each = F.cross_entropy(m(i).transpose(1, 2), target, ignore_index=0, reduction="none")
    return each.sum(1) / (target != 0).sum(1).clamp(min=1)


def several_views(m: nn.Module, x: Tensor) -> Tensor:
    out = m(torch.cat([x, x.flip(-1)]))
    return score(out[: len(x)] * out[len(x) :])


def nodes(n: int) -> Callable[[Generator], Batch]:
    return lambda g: (reals(n, d)(g), torch.arange(n) * B // n)


def graphs(m: nn.Module, x: Tensor, owner: Tensor) -> Tensor:
    """The nodes of all graphs in one table, summed by graph."""
    out = m.b(m.a(x).tanh())
    return torch.zeros(int(owner.max()) + 1, 2, dtype=x.dtype).index_add(0, owner, out)


class Reversed(torch.autograd.Function):
    """Passes values on and turns gradients round."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, g: Tensor) -> Tensor:
        return -2 * g


def scaled_by_a_hook(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x)
    h.register_hook(lambda g: g * 3)
    return m.b(h)


def derivative(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The model's outputs, and their derivative by the input, with a graph of its own."""
    x = x.detach().requires_grad_()
    out = m(x)
    return out, torch.autograd.grad(out.sum(), x, create_graph=True)[0]


def forces(m: nn.Module, x: Tensor) -> Tensor:
    energy, force = derivative(m, x)
    return score(energy) + score(force)


def gradient_penalty(m: nn.Module, x: Tensor) -> Tensor:
    return (derivative(m, x)[1].flatten(1).norm(dim=1) - 1) ** 2


def adversarial(m: nn.Module, x: Tensor) -> Tensor:
    """The loss at an input moved by a gradient that is taken while recording."""
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(score(m(x)).sum(), x)
    return score(m((x + 0.1 * g.sign()).detach()))


def hooked_backward() -> nn.Module:
    m = nn.Sequential(nn.Linear(d, 4), nn.Tanh(), nn.Linear(4, 2))
    m[1].register_full_backward_hook(lambda module, g_in, g_out: (g_in[0] * 2,))
    m[2].register_full_backward_pre_hook(lambda module, g_out: (g_out[0] * 3,))
    return m


def one_loss_at_a_time(m: nn.Module, x: Tensor) -> Tensor:
    return torch.stack([m(row).pow(2).sum() + 0.1 * m.weight.pow(2).sum() for row in x])


KEEP = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 1], [1, 1, 1, 1]])
LANGUAGE = net(lambda m, i: m.fc(m.tok(i).cumsum(1).tanh()), tok=lambda: nn.Embedding(5, d), fc=linear(d, 5))
TARGETS = torch.tensor([[1, 2, 0, 0], [3, 0, 4, 1], [0, 0, 0, 0]])
# fmt: off
SAMPLES = [
    Case("experts by mask", ("ragged", "setitem"), net(routed, experts=experts(2), gate=linear(d, 1)), SEQUENCE),
    Case(
        "experts by mask T = B", ("ragged", "T = B"), net(routed, experts=experts(2), gate=linear(d, 1)),
        batch(reals(B, B, d)),
    ),
    Case("experts by index", ("ragged",), net(routed_by_index, experts=experts(3), gate=linear(d, 3)), SEQUENCE),
    Case(
        "tokens selected", ("ragged", "two inputs"), net(ragged, a=linear(d, 4), b=linear(4, 2)),
        batch(reals(B, T, d), lambda g: KEEP),
    ),
    Case(
        "tokens selected, one sample has none", ("ragged", "zero-gradient sample"),
        net(ragged, a=linear(d, 4), b=linear(4, 2)),
        batch(reals(B, T, d), lambda g: KEEP * torch.tensor([[1], [0], [1]])),
    ),
    Case("batch permuted and put back", ("permuted",), net(permuted, a=linear(d, 4), b=linear(4, 2)), SEQUENCE),
    Case(
        "batch flipped and put back T = B", ("permuted", "T = B"),
        net(lambda m, x: m.fc(x.flip(0)).tanh().flip(0), fc=linear(d, B)), batch(reals(B, B, d)),
    ),
    Case(
        "masked loss", ("masked loss", "zero-gradient sample"), LANGUAGE, batch(ids(5, B, T), lambda g: TARGETS),
        masked_loss,
    ),
    Case(
        "last token only", ("masked loss",), LANGUAGE, batch(ids(5, B, T), fixed(0, 3, 1)),
        lambda m, i, last: score(m(i)[torch.arange(len(i)), last]),
    ),
    Case(
        "only position i of sample i T = B", ("masked loss", "T = B"),
        net(lambda m, x: m.fc(x + m.w).tanh(), fc=linear(d, 2), w=weight(B, d)),
        batch(reals(B, B, d), fixed(0, 1, 2)), lambda m, x, k: score(m(x)[torch.arange(len(x)), k]),
    ),
    Case(
        "weights per sample", ("masked loss", "zero-gradient sample"), linear(d, 2),
        batch(reals(B, d), lambda g: torch.tensor([0.0, 2.0, -1.0])), lambda m, x, w: score(m(x)) * w,
    ),
    Case(
        "all but one sample weigh nothing", ("zero-gradient sample", "T = B"),
        net(lambda m, x: m.fc(x + m.w).tanh(), fc=linear(d, 2), w=weight(B, d)),
        batch(reals(B, B, d), lambda g: torch.tensor([0.0, 2.0, 0.0])), lambda m, x, w: score(m(x)) * w,
    ),
    Case(
        "several views of each sample", ("folded", "2B rows"), linear(d, 2), batch(reals(B, d)), several_views,
        batch_size=B,
    ),
    Case(
        "two inputs T = B", ("two inputs", "T = B"),
        net(lambda m, x, y: m.a(x) * m.b(y), a=linear(d, 2), b=linear(4, 2)), batch(reals(B, B, d), reals(B, B, 4)),
    ),
    Case(
        "second input meets a parameter first", ("two inputs", "T = B", "raw parameter"),
        net(lambda m, x, y: x * (m.w * y).tanh() + m.v * y, w=weight(B, d), v=weight(d)),
        batch(reals(B, B, d), reals(B, B, d)),
    ),
    Case(
        "positions are the first argument T = B", ("positions", "T = B", "two inputs"),
        net(lambda m, where, x: m.fc(x + m.pos(where)).tanh(), pos=lambda: nn.Embedding(B, d), fc=linear(d, 2)),
        lambda g: (torch.arange(B), reals(B, B, d)(g)), lambda m, where, x: score(m(where, x)), cut=cut_only(1),
    ),
    Case(
        "large batch", ("two passes",), net(routed_by_index, experts=experts(2), gate=linear(d, 2)),
        batch(reals(70, 2, d)),
    ),
    Case(
        "mask is the first argument T = B", ("mask (B, B)", "T = B", "two inputs"),
        net(lambda m, mask, x: attend(m, x, mask > 0), qkv=linear(d, 9), out=linear(3, 2)),
        lambda g: (torch.ones(B, B).tril(), reals(B, B, d)(g)), cut=cut_only(1),
    ),
    Case(
        "adversarial input made while recording", ("double backward", "module used twice"),
        lambda: nn.Sequential(nn.Linear(d, 4), nn.Tanh(), nn.Linear(4, 2)), batch(reals(B, d)), adversarial,
    ),
    Case("backward hooks of modules", ("hooks",), hooked_backward, SEQUENCE),
    Case(
        "one loss at a time, with a penalty", ("rank 0", "derived weight"), linear(d, 2), SEQUENCE,
        one_loss_at_a_time, batch_size=B,
    ),
    Case(
        "an ensemble by vmap", ("raw parameter", "d = B"),
        net(lambda m, x: torch.vmap(lambda w: x @ w)(m.w).movedim(0, 1), w=weight(B, d, 2)), SEQUENCE,
    ),
    Case(
        "masked_fill_ by a parameter", ("in-place before", "raw parameter", "rank 0"),
        net(lambda m, x: m.fc(x.clone().masked_fill_(x > 0, m.w)), w=weight(), fc=linear(d, 2)), SEQUENCE,
    ),
    Case(
        "an expert without tokens", ("ragged", "unused"), net(routed, experts=experts(3), gate=linear(d, 1)),
        SEQUENCE,
    ),
    Case(
        "list of samples", ("no batch dimension",),
        net(lambda m, xs: torch.stack([m.fc(x).tanh().sum(0) for x in xs]), fc=linear(d, 2)), SEQUENCE,
        lambda m, x: score(m(list(x))), batch_size=B,
    ),
    *(
        Case(
            f"graphs, {n} nodes with a sample index", ("ragged", "no batch dimension"),
            net(graphs, a=linear(d, 4), b=linear(4, 2)), nodes(n),
            cut=lambda batch, i: (batch[0][batch[1] == i], batch[1][batch[1] == i] * 0), batch_size=B,
        )
        for n in (6, 7)
    ),
    Case(
        "keyword arguments", ("keyword call", "two inputs"),
        net(
            lambda m, *, ids, kind: m.tok(ids) * m.kind(kind), tok=lambda: nn.Embedding(7, d),
            kind=lambda: nn.Embedding(2, d),
        ),
        batch(ids(7, B, T), ids(2, B, T)), lambda m, i, k: score(m(kind=k, ids=i)),
    ),
    Case(
        "dict input and tuple output", ("dict input",),
        net(lambda m, inputs: (m.a(inputs["x"]), [m.b(inputs["y"])]), a=linear(d, 2), b=linear(4, 2)),
        batch(reals(B, T, d), reals(B, 4)),
        lambda m, x, y: (lambda out: score(out[0]) * score(out[1][0]))(m({"y": y, "x": x})),
    ),
    Case(
        "functional_call with derived weights", ("functional use", "derived weight"), linear(d, 2), SEQUENCE,
        lambda m, x: score(torch.func.functional_call(m, {n: p * 2 for n, p in m.named_parameters()}, (x,))),
    ),
    Case(
        "functional_call with the model's own weights", ("functional use",), linear(d, 2), SEQUENCE,
        lambda m, x: score(torch.func.functional_call(m, dict(m.named_parameters()), (x,))),
    ),
    Case(
        "weights generated for each sample", ("hypernetwork",),
        net(lambda m, x: torch.bmm(x, m.fc(x.mean(1)).view(len(x), d, 2)) + m.w, fc=linear(d, 2 * d), w=weight(2)),
        SEQUENCE,
    ),
    Case(
        "custom function without parameters", ("custom function",),
        net(lambda m, x: m.b(Reversed.apply(m.a(x))), a=linear(d, 4), b=linear(4, 2)), SEQUENCE,
    ),
    Case("gradient hook that scales", ("hooks",), net(scaled_by_a_hook, a=linear(d, 4), b=linear(4, 2)), SEQUENCE),
    Case(
        "parameters in lists and dicts", ("raw parameter",),
        net(
            lambda m, x: sum(x * w for w in m.many) @ m.named["w"],
            many=lambda: nn.ParameterList([torch.randn(d), torch.randn(1)]),
            named=lambda: nn.ParameterDict({"w": torch.randn(d, 2)}),
        ),
        SEQUENCE,
    ),
    Case("non-contiguous input", ("non-contiguous",), linear(d, 2), lambda g: (reals(d, T, B)(g).permute(2, 1, 0),)),
    Case(
        "every other row", ("non-contiguous",), lambda: nn.Conv1d(4, 2, 3),
        lambda g: (reals(2 * B, 4, 14)(g)[::2, :, ::2],),
    ),
    Case(
        "expanded input", ("non-contiguous", "expanded"), net(lambda m, x, y: m.fc(x) * y, fc=linear(d, 2)),
        lambda g: (reals(1, T, d)(g).expand(B, -1, -1), reals(B, 1, 2)(g)),
    ),
    Case(
        "input that requires grad", ("input requires grad",),
        lambda: nn.Sequential(nn.Linear(d, 4), nn.Tanh(), nn.Linear(4, 2)),
        lambda g: (reals(B, T, d)(g).requires_grad_(),),
    ),
    Case(
        "hidden state that requires grad", ("input requires grad", "given state"), recurrent(nn.GRU, d, 2),
        lambda g: (reals(B, T, d)(g), reals(1, B, 2)(g).requires_grad_()),
        cut=lambda batch, i: (batch[0].narrow(0, i, 1), batch[1].narrow(1, i, 1)),
    ),
    Case(
        "image as rows, T = B", ("folded", "T = B"),
        net(lambda m, x: m.fc(x.permute(0, 2, 3, 1).reshape(-1, B)).view(len(x), -1), fc=linear(B, B)),
        batch(reals(B, B, B, B)),
    ),
    Case(
        "pixel shuffle and pooling", (),
        net(
            lambda m, x: F.max_pool2d(F.pixel_shuffle(m.a(x), 2), 2) + m.b(x), a=made(nn.Conv2d, 4, 8, 1),
            b=made(nn.Conv2d, 4, 2, 1),
        ),
        image(4, 4),
    ),
]
# fmt: on

# Checkpoints, dtypes, autocast


def checkpointed(reentrant: bool, **parts) -> Callable[[], nn.Module]:
    return net(lambda m, x: m.c(checkpoint(lambda h: m.b(h).tanh(), m.a(x), use_reentrant=reentrant)), **parts)


def two_checkpoints(m: nn.Module, x: Tensor, reentrant: bool) -> Tensor:
    h = m.a(x)
    for layer in (m.b, m.b, m.c):
        h = checkpoint(layer, h, use_reentrant=reentrant)
    return h


def derived_in_checkpoint(m: nn.Module, x: Tensor, reentrant: bool) -> Tensor:
    return checkpoint(lambda h: m.b(h).tanh() @ m.w.tanh() + m.v, m.a(x), use_reentrant=reentrant)


def in_bfloat16(model: nn.Module, *batch: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        out = model(*batch)
    return score(out.float())


ENCODER = encoder(True, norm_first=True)
# fmt: off
MODES = [
    *(
        Case(
            f"checkpoint, {'' if reentrant else 'non-'}reentrant{' T = B' if t == B else ''}", ("checkpointing",),
            checkpointed(reentrant, a=linear(d, 4), b=linear(4, 4), c=linear(4, 2)), batch(reals(B, t, d)),
        )
        for reentrant in (True, False)
        for t in (T, B)
    ),
    *(
        Case(
            f"derived weight inside a checkpoint, {'' if reentrant else 'non-'}reentrant",
            ("checkpointing", "derived weight"),
            net(
                partial(derived_in_checkpoint, reentrant=reentrant), a=linear(d, 4), b=linear(4, 4), w=weight(4, 2),
                v=weight(T, 2),
            ),
            SEQUENCE,
        )
        for reentrant in (True, False)
    ),
    *(
        Case(
            f"checkpoints in a row, {'' if reentrant else 'non-'}reentrant", ("checkpointing", "module used twice"),
            net(
                partial(two_checkpoints, reentrant=reentrant), a=linear(d, 4),
                b=lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.ReLU(inplace=True)), c=encoder(True),
            ),
            SEQUENCE,
        )
        for reentrant in (True, False)
    ),
    *(
        Case(name, ("autocast",), make, data, in_bfloat16, dtype=torch.float32, tolerance=9e-3)
        for name, make, data in [
            ("autocast linear", lambda: nn.Sequential(nn.Linear(d, 4), nn.Tanh(), nn.Linear(4, 2)), SEQUENCE),
            ("autocast encoder", ENCODER, batch(reals(B, T, 4))),
            ("autocast convolution", lambda: nn.Sequential(nn.Conv2d(4, 4, 2), nn.GroupNorm(2, 4)), image(4, 4)),
            ("autocast lstm", recurrent(nn.LSTM, d, 4), SEQUENCE),
            (
                "autocast one sample at a time",
                net(lambda m, x: torch.stack([m.b(m.a(row).tanh()) for row in x]), a=linear(d, 3), b=linear(3, 2)),
                batch(reals(B, d)),
            ),
            (
                "autocast layer_norm of bfloat16",
                net(lambda m, x: m.norm(m.fc(x)), fc=linear(d, 4), norm=lambda: nn.LayerNorm(4)), SEQUENCE,
            ),
            (
                "autocast einsum",
                net(lambda m, x: torch.einsum("...d,pd->...p", x, m.w) + m.b, w=weight(2, d), b=weight(2)), SEQUENCE,
            ),
            (
                "autocast weight per position",
                net(lambda m, x: (x.transpose(0, 1) @ m.w).transpose(0, 1), w=weight(T, d, 2)), SEQUENCE,
            ),
            ("autocast tied", tied, batch(ids(6, B, T))),
            (
                "autocast derived weight", net(lambda m, x: F.linear(x, m.w.T, m.b * 2), w=weight(d, 2), b=weight(2)),
                SEQUENCE,
            ),
        ]
    ),
    *(
        Case(
            f"{name}, {str(dtype)[6:]}", ("dtype",), make, data, lambda m, *batch: score(m(*batch).float()),
            dtype=dtype, tolerance=tolerance,
        )
        for dtype, tolerance in ((torch.bfloat16, 9e-3), (torch.float16, 1e-3), (torch.float32, 1e-5))
        for name, make, data in [
            ("linear", lambda: nn.Sequential(nn.Linear(d, 4), nn.Tanh(), nn.Linear(4, 2)), SEQUENCE),
            ("tied", tied, batch(ids(6, B, T))),
            ("raw", net(lambda m, x: F.layer_norm(x * m.w, (d,)) + m.w, w=weight(d)), SEQUENCE),
            ("convolution", made(nn.Conv1d, 4, 2, 3, padding=1), image(6)),
        ]
    ),
]
# fmt: on

# Random numbers: no batch of one draws them as the batch does


# fmt: off
RANDOM = [
    Case("dropout", ("dropout",), lambda: nn.Sequential(nn.Linear(d, 8), nn.Dropout(0.5), nn.Linear(8, 2)), SEQUENCE),
    Case(
        "dropout of an encoder", ("dropout",), lambda: nn.TransformerEncoderLayer(4, 2, 6, 0.4, batch_first=True),
        batch(reals(B, T, 4)),
    ),
    Case(
        "dropout of a position table", ("dropout", "positions"),
        net(lambda m, x: m.fc(x + F.dropout(m.w, 0.5)), w=weight(T, d), fc=linear(d, 2)), SEQUENCE,
    ),
    Case(
        "dropout inside a checkpoint", ("dropout", "checkpointing"),
        net(
            lambda m, x: checkpoint(lambda h: m.b(F.dropout(h)), m.a(x), use_reentrant=False), a=linear(d, 8),
            b=linear(8, 2),
        ),
        SEQUENCE,
    ),
    *(
        Case(
            f"dropout between layers of {name}", ("dropout",),
            recurrent(kind, d, 4, num_layers=3, dropout=0.5, bidirectional=True, **kind_options(name)), SEQUENCE,
        )
        for name, kind in KINDS.items()
    ),
    Case(
        "dropout between layers of a packed lstm", ("dropout", "packed"),
        made(nn.LSTM, d, 4, 2, batch_first=True, dropout=0.5), batch(reals(B, T, d), UNSORTED),
        lambda m, x, n: packed(m, x, n, False),
    ),
]
# fmt: on

CASES = (
    LINEAR + EMBEDDING + CONVOLUTION + NORM + RECURRENT + ATTENTION + RAW + DERIVED + TWICE + IN_PLACE + SAMPLES + MODES
)


class Hidden(torch.autograd.Function):
    """A product with a parameter that only autograd sees."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.mT, (x.mT @ g).sum(0)


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
    refused("recorded input changed in place", changed_after_use, RuntimeError, "place"),
    refused(
        "parameter hidden in a custom function", lambda m, x: m.b(Hidden.apply(x, m.w)), CaptureError, "'w'",
        "Hidden", w=weight(d, 4),
    ),
    refused(
        "op without a rule", lambda m, x: torch.linalg.solve_triangular(m.w, x.mT, upper=True), UnsupportedOp, "'w'",
        "solve_triangular", w=weight(d, d),
    ),
    refused("derivative by the input in the loss", between(torch.tanh), CaptureError, "derivative", losses=forces),
    refused("gradient penalty", between(torch.tanh), CaptureError, "derivative", losses=gradient_penalty),
    refused(
        "samples by vmap", lambda m, x: torch.vmap(lambda row: m.b(m.a(row)))(x), UnsupportedOp, "vmap", "'a.weight'",
    ),
    refused("gradient hook that mixes", normalising_hook, CaptureError, MIXED, "hook"),
    refused("losses per token", between(torch.tanh), CaptureError, "(3, 4)", losses=lambda m, x: m(x).sum(-1)),
    refused(
        "losses of folded tokens", between(torch.tanh), CaptureError, "12 losses",
        losses=lambda m, x: m(x).sum(-1).flatten(),
    ),
    refused("no gradient at all", lambda m, x: m.b(m.a(x)).detach(), CaptureError, "no trainable parameter"),
]
# fmt: on
