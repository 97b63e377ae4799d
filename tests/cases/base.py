"""What cases are made of: `Case`, `Refused`, their data, and nets from functions.

`Case` holds what must come out right, `Refused` what must be refused and the words the refusal must contain.
Sizes collide on purpose in the cases marked "T = B" or "d = B"; elsewhere B, T and d differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

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


def image(*space: int, channels: int = 4) -> Callable[[Generator], Batch]:
    return batch(reals(B, channels, *space))


def frozen(module: nn.Module, *names: str) -> nn.Module:
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


def rows_of(*lengths: int) -> Callable[[Generator], Batch]:
    """Sequences of these lengths in one table (N, d), and where each of them begins and the last ends."""
    return lambda g: (reals(sum(lengths), d)(g), torch.tensor([0, *lengths]).cumsum(0))


def cut_rows(batch: Batch, i: int) -> Batch:
    x, offsets = batch
    part = x[offsets[i] : offsets[i + 1]]
    return part, torch.tensor([0, len(part)])


SEQUENCE = batch(reals(B, T, d))
