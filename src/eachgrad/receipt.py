"""Trust: the receipt of an answer, the check of a recording, and verify, the loop over samples."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from eachgrad.capture import Recorder
from eachgrad.cover import Accepted
from eachgrad.errors import CaptureError
from eachgrad.passes import Passes, grads_untouched
from eachgrad.solve import pulled_back
from eachgrad.use import Use
from eachgrad.uses import derivative

if TYPE_CHECKING:
    from eachgrad.grads import PerSampleGrads

# How far two ways of adding the same numbers may differ, relative to the largest number added.
TOLERANCE = {
    torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4,
    torch.bfloat16: 5e-2, torch.float16: 1e-2,
}  # fmt: skip


@dataclass(frozen=True)
class Receipt:
    """What an answer covers, and how far it is from PyTorch's own derivatives."""

    batch_size: int
    covered: int  # numbers of trainable parameters with a gradient for every sample
    total: int
    unused: tuple[str, ...]  # parameters the loss does not depend on: their gradient is zero
    uses: int
    deviation: float  # of the sum over samples, relative, the largest over parameters
    exempt: tuple[str, ...]  # parameters whose batch gradient is no sum over samples
    pieces: tuple[str, ...] = ()  # what has no rule, and was differentiated once per sample

    def __str__(self) -> str:
        lines = [
            f"covers {self.covered:,} of {self.total:,} parameters for each of {self.batch_size} samples "
            f"({self.uses} uses); max deviation {self.deviation:.1e}"
        ]
        if self.unused:
            lines.append(f"unused, gradient zero: {', '.join(self.unused)}")
        if self.exempt:
            lines.append(f"not compared (gradients scaled by the batch's frequencies): {', '.join(self.exempt)}")
        lines += [f"without a rule, one derivative for each sample: {piece}" for piece in self.pieces]
        return "\n".join(lines)


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Every name of every parameter -> the one under which named_parameters() lists it."""
    first = {id(p): name for name, p in model.named_parameters()}
    return {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}


@dataclass
class Record:
    """What a PerSampleGrads remembers of its recording."""

    model: nn.Module
    recorder: Recorder
    accepted: Accepted
    aliases: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.aliases = aliases_of(self.model)

    def canonical(self, name: str) -> str:
        """The name under which named_parameters() lists the parameter, for any of its names."""
        return self.aliases.get(name, name)

    def receipt(self, grads: PerSampleGrads) -> Receipt:
        reference = self._reference()
        exempt = tuple(name for name in grads if name in self._exempt())
        ones = torch.ones(grads.batch_size)
        worst, floor = 0.0, 1e-3 * max(map(_largest, reference.values()), default=0.0)
        for name, gradient in grads.items():
            if name in reference and name not in exempt:
                ours = gradient.weighted_sum(ones.to(gradient.parameter.device))
                worst = max(worst, deviation(ours, reference[name], floor))
        sizes = {name: gradient.parameter.numel() for name, gradient in grads.items()}
        unused = tuple(name for name, gradient in grads.items() if gradient.block is None)
        total = sum(sizes.values())
        return Receipt(grads.batch_size, total, total, unused, len(self.accepted), worst, exempt, self._pieces())

    def _pieces(self) -> tuple[str, ...]:
        names_of = self.recorder.tensors.names_of
        return tuple(
            f"{', '.join(sorted(n for s in item.use.sources if id(s) in wanted for n in names_of(s)))} in {item.use.name} at "
            f"{item.use.where}"
            for item, wanted in self.accepted
            if wanted and item.use.piece is not None
        )

    def _reference(self) -> dict[str, Tensor]:
        """The sum over samples by PyTorch's own derivative of every recorded op."""
        found: dict[str, Tensor] = {}
        for item, wanted in self.accepted:
            if not wanted:
                continue
            pulled = derivative(item.use, item.g)
            for source, value in zip(item.use.sources, pulled, strict=True):
                if id(source) not in wanted or value is None:
                    continue
                name = self.recorder.tensors.parameters.get(id(source))
                if name is not None:
                    parts = {name: _strided(value)}
                else:
                    parts = {n: t[0] for n, t in pulled_back(self.recorder, item.use, source, value[None]).items()}
                for n, t in parts.items():
                    found[n] = found[n] + t if n in found else t
        return found

    def _exempt(self) -> set[str]:
        return {
            name for item, _ in self.accepted if _scaled_by_frequency(item.use)
            for source in item.use.sources for name in self.recorder.tensors.names_of(source)
        }  # fmt: skip


def _scaled_by_frequency(use: Use) -> bool:
    return bool(use.rule.bind(use.args, use.kwargs).get("scale_grad_by_freq", False))


def deviation(ours: Tensor, theirs: Tensor, floor: float = 0.0) -> float:
    """Largest difference relative to the largest number (or `floor`); inf for a NaN on one side only."""
    if ours.numel() == 0:
        return 0.0
    ours, theirs = ours.detach(), theirs.detach().to(ours.dtype)
    both = ours.isnan() & theirs.isnan()
    gap = torch.where(both | (ours == theirs), torch.zeros_like(ours), ours - theirs).abs().amax()
    gap = float(gap) if not torch.isnan(gap) else float("inf")
    scale = max(_largest(theirs), floor)
    return gap / scale if scale else gap


def _largest(t: Tensor) -> float:
    return float(torch.nan_to_num(t.detach().abs()).amax()) if t.numel() else 0.0


def check_weighted_sum(
    grads: PerSampleGrads, loss: Tensor, recorder: Recorder, parameters: dict[str, nn.Parameter]
) -> None:
    """Raise if the samples' gradients, weighted at random, do not add up to the ordinary gradient."""
    B = grads.batch_size
    generator = torch.Generator().manual_seed(B)
    c = torch.rand(B, generator=generator).to(device=loss.device, dtype=loss.dtype) + 0.5
    weights = c if loss.ndim else torch.ones_like(loss)
    exempt = grads._record._exempt()
    names = [name for name in parameters if name not in exempt]
    if not names:
        return
    # An op that ran in a lower precision than its parameter's has rounded in it.
    limit = max((TOLERANCE[use.tap.dtype] for use in recorder.uses), default=0.0)
    wanted = [parameters[n] for n in names]
    with grads_untouched([*Passes(recorder, [loss]).leaves, *wanted]):
        Passes(recorder, [loss]).stream([loss], [weights], lambda n, g: None)
        theirs = [p.grad for p in wanted]
    scale = c if loss.ndim else torch.ones(B, device=loss.device, dtype=loss.dtype)
    floor = 1e-3 * max((_largest(_strided(t)) for t in theirs if t is not None), default=0.0)
    for name, value in zip(names, theirs, strict=True):
        ours = grads[name].weighted_sum(scale)
        gap = deviation(ours, torch.zeros_like(ours) if value is None else _strided(value), floor)
        if not gap <= max(limit, TOLERANCE[ours.dtype]):
            uses = [f"{use.name} at {use.where}" for use in recorder.uses if name in use.parameters()]
            raise CaptureError(
                f"check: the gradients of {name!r}, weighted and added, are off the ordinary gradient by {gap:.1e}. The "
                f"rule of an op is wrong ({'; '.join(uses) or 'no use was recorded'}), or a tensor was changed behind "
                "autograd's back; please report it."
            )


@dataclass(frozen=True)
class Verification:
    """How far each parameter's gradients are from a loop over samples."""

    rows: tuple[tuple[str, tuple[int, ...], float], ...]  # name, shape, largest relative error
    tolerance: float

    @property
    def ok(self) -> bool:
        return all(error <= self.tolerance for *_, error in self.rows)

    def __str__(self) -> str:
        width = max([len(name) for name, *_ in self.rows] + [9])
        lines = [f"{'parameter':<{width}}  {'shape':<18}  error"]
        for name, shape, error in self.rows:
            flag = "" if error <= self.tolerance else "  <-- wrong"
            lines.append(f"{name:<{width}}  {shape!s:<18}  {error:.1e}{flag}")
        return "\n".join(lines)


def loop(
    model: nn.Module, loss_fn: Callable[..., Tensor], batch: Sequence[Any], batch_dim: int = 0
) -> dict[str, Tensor]:
    """Per-sample gradients the slow way: each sample alone, as a batch of one."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    B = _batch_size(batch, batch_dim)
    rows = []
    for i in range(B):
        one = [_sample(t, i, B, batch_dim) for t in batch]
        loss = call_loss(model, loss_fn, one).sum()
        rows.append(torch.autograd.grad(loss, list(parameters.values()), allow_unused=True))
    return {
        name: torch.stack([torch.zeros_like(p) if row[k] is None else _strided(row[k]) for row in rows])
        for k, (name, p) in enumerate(parameters.items())
    }


def _strided(t: Tensor) -> Tensor:
    return t.to_dense() if t.is_sparse else t


def _batch_size(batch: Sequence[Any], batch_dim: int) -> int:
    sizes = [t.shape[batch_dim] for t in batch if isinstance(t, Tensor) and t.ndim > batch_dim]
    if not sizes:
        raise ValueError(
            f"the batch holds no tensor with samples along dimension {batch_dim}: pass the inputs of the model after "
            "loss_fn, and batch_dim where the samples lie along another one"
        )
    return sizes[0]


def _sample(value: Any, i: int, B: int, batch_dim: int) -> Any:
    if not isinstance(value, Tensor) or not value.ndim:
        return value
    dim = batch_dim if value.ndim > batch_dim and value.shape[batch_dim] == B else 0
    return value.narrow(dim, i, 1) if value.shape[dim] == B else value


def call_loss(model: nn.Module, loss_fn: Callable[..., Tensor], batch: Sequence[Any]) -> Tensor:
    """`loss_fn(model, *batch)`, or `loss_fn(model(batch[0]), *batch[1:])` if it takes one argument less.

    Where arguments with defaults leave both open, it is the first if its first argument is called model.
    """
    target = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    declared = list(inspect.signature(target).parameters.values())
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = [p for p in declared if p.kind in kinds]
    wanted = [p for p in taken if p.default is p.empty]
    named = len(wanted) <= len(batch) < len(taken) and taken[0].name == "model"
    if named or len(wanted) == len(batch) + 1 or any(p.kind is p.VAR_POSITIONAL for p in declared):
        return loss_fn(model, *batch)
    return loss_fn(model(batch[0]), *batch[1:])


def verify(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    *batch: Any,
    batch_dim: int = 0,
    loss_reduction: str | None = None,
    tolerance: float | None = None,
    quiet: bool = False,
    fallback: str = "refuse",
) -> Verification:
    """Compare eachgrad with a loop over samples, parameter by parameter, and print the table.

    `loss_fn(model, *batch)` or `loss_fn(model(batch[0]), *batch[1:])`, whichever fits its number of
    arguments, returns one loss per sample, or one number with `loss_reduction`. Dropout and other
    randomness must be off. `fallback` is that of `record`.
    """
    from eachgrad.tape import record

    with record(model, batch_dim=batch_dim, fallback=fallback) as tape:
        losses = call_loss(model, loss_fn, batch)
    ours = tape.backward(losses, loss_reduction).dense()
    theirs = loop(model, loss_fn, batch, batch_dim)
    limits = [TOLERANCE[p.dtype] for p in model.parameters() if p.requires_grad]
    # A gradient that is zero but for rounding is judged by the size of the others.
    floor = 1e-3 * max(map(_largest, theirs.values()), default=0.0)
    rows = tuple((n, tuple(value.shape[1:]), deviation(ours[n], value, floor)) for n, value in theirs.items())
    result = Verification(rows, tolerance if tolerance is not None else max(limits, default=0.0))
    if not quiet:
        print(result)
    return result
