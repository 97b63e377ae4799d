"""One step's numbers: the clipped sums of its pieces, by the eager engine or by a compiled graph, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import eachgrad
from eachgrad.block import room_for
from eachgrad.graph import tensors_in
from eachgrad.private.clipping import Rule
from eachgrad.private.errors import PrivacyError
from eachgrad.private.sizes import Pieces
from eachgrad.receipt import call_loss

Sums = Mapping[str, Tensor]  # by the names of the parameters


class Engine:
    """How the pieces of a batch are answered, by graphs compiled for `pieces`, or eagerly if that is None.

    The options are those of `eachgrad.record`; `recompute` is that of `eachgrad.compile`.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Tensor] | None, rule: Rule, nonfinite: str, options: dict[str, Any],
        pieces: Pieces | None = None, recompute: float = 1.0,
    ):  # fmt: skip
        self.model, self.loss_fn, self.rule = model, loss_fn, rule
        self.nonfinite, self.options, self.pieces, self.recompute = nonfinite, options, pieces, recompute
        self.ask: Any = None
        self.trusts = True  # whether a compiled answer is given before it is known to be right
        self.lends = True  # whether gradients may lie in the memory of CUDA graphs
        self._sent: tuple[float, Tensor] | None = None

    def record(self) -> eachgrad.Tape:
        return eachgrad.record(self.model, **self.options)

    def answer(self, batch: Any, samples: int, filled: int) -> tuple[Any, Tensor]:
        """The answers for one piece, and its losses: after the first `samples` it is filled up with copies.

        Whether they are right, `doubted` says.
        """
        args = arguments(batch)
        if self.loss_fn is None:
            raise ValueError("run.step computes the losses itself: pass loss_fn to make_private, or go by hand")
        if self.ask is not None:
            self._check_size(args, filled)
            return self._compiled(self.ask.trusting if self.trusts else self.ask, args, filled)
        with self.record() as tape, _as_one_argument(batch):
            losses = call_loss(self.model, self.loss_fn, args)
        check_count(losses, filled)
        counted = torch.arange(filled, device=losses.device) < samples
        answer = self.answer_by(tape, losses * counted)
        if self.pieces is not None:  # what is wrong with the losses was said in plain words by the first piece
            self.ask = self._compile()
        return answer, losses.detach()

    def doubted(self) -> bool:
        """Whether an answer since the last time is in doubt: waits until the device has come so far that it can say."""
        return self.ask is not None and self.ask.doubted()

    def release(self) -> None:
        """Give the memory of CUDA graphs back; they are captured again when they are needed."""
        if self.ask is not None:
            self.ask.release()

    def again(self, batch: Any, filled: int) -> tuple[Any, Tensor]:
        """The answer for a piece whose compiled one is in doubt, by the eager code."""
        return self._compiled(self.ask.again, arguments(batch), filled)

    def _compiled(self, ask: Callable[..., Any], args: list[Any], filled: int) -> tuple[Any, Tensor]:
        unit = self._unit()
        found = ask(*args, unit)
        check_count(found.losses, filled)
        return found, found.losses if self.rule.unit == 1.0 else found.losses * unit

    def answer_by(self, tape: eachgrad.Tape, losses: Tensor) -> Any:
        """The answers for losses that were recorded."""
        asked = eachgrad.Accumulator(**self.rule.queries(self.nonfinite))
        tape.ask(losses / self.rule.unit, into=asked)
        return asked.answer()

    def _check_size(self, args: list[Any], size: int) -> None:
        """A batch with more samples than were drawn has more losses: say so before it is too large for the graph."""
        dim = self.options["batch_dim"]
        sizes = [t.shape[dim] for t in tensors_in(args) if t.ndim > dim]
        if sizes and self.pieces is not None and sizes[0] > self.pieces.largest:
            check_count(torch.empty(sizes[0]), size)

    def _unit(self) -> Tensor:
        """The rule's unit on the model's device, where it is sent only when it has changed: the host would wait for that."""
        if self._sent is None or self._sent[0] != self.rule.unit:
            self._sent = self.rule.unit, torch.tensor(self.rule.unit, device=next(self.model.parameters()).device)
        return self._sent[1]

    def _compile(self) -> Any:
        """A callable (*batch, unit) -> answers and losses, as one compiled graph for batches of any size.

        On a GPU it is a CUDA graph, whose answers the next call overwrites.
        """
        loss_fn = self.loss_fn
        assert loss_fn is not None
        assert self.pieces is not None

        def losses(model: nn.Module, *batch: Any) -> Tensor:
            *args, unit = batch
            return call_loss(model, loss_fn, args) / unit

        queries: dict[str, Any] = {**self.rule.queries(self.nonfinite)}
        options: dict[str, Any] = {
            "batch_dim": self.options["batch_dim"],
            "recompute": self.recompute,
            **self.pieces.options,
        }
        found = eachgrad.compile(self.model, losses, mode="reduce-overhead", copies=False, **options, **queries)
        if self.lends:
            sums = sum(room_for(p) for p in self.model.parameters() if p.requires_grad)
            found.memory.block.keep_free(sums, self.pieces.several)
        return found


def arguments(batch: Any) -> list[Any]:
    """What a loss function is called with after the model."""
    return list(batch) if isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields") else [batch]


@contextmanager
def _as_one_argument(batch: Any) -> Iterator[None]:
    """Whoever wrote loss_fn(out, y) for a batch that is a dict is told what it was called with."""
    try:
        yield
    except (TypeError, AttributeError) as error:
        if not isinstance(batch, Mapping):
            raise
        raise TypeError(
            f"loss_fn(model, batch) has failed: {error}. A batch that is a dict is one argument: take what is needed from "
            "it, as in model(batch['x']); for loss_fn(model(x), y) have collate_fn return (x, y)"
        ) from error


def check_count(losses: Any, size: int) -> None:
    """A privacy unit is a sample of the data set: one loss for each, no more and no less."""
    if not isinstance(losses, Tensor) or losses.ndim != 1 or len(losses) != size:
        got = f"a tensor {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise PrivacyError(
            f"the losses are {got}, and the batch has {size} samples: return one loss for each sample, ({size},), such as "
            'F.cross_entropy(..., reduction="none"); sum over positions'
        )


def _copies(sums: Sums, room: Sums | None) -> dict[str, Tensor]:
    """Many at a time: a clone of each of 148 gradients took the host 1 ms."""
    if room is None:
        kept = torch._foreach_mul(list(sums.values()), 1.0)  # pyright: ignore[reportPrivateImportUsage]
        return dict(zip(sums, kept, strict=True))
    torch._foreach_copy_([room[name] for name in sums], list(sums.values()))  # pyright: ignore[reportPrivateImportUsage]
    return dict(room)


@dataclass
class Gathered:
    """The sums over the pieces of one logical batch so far."""

    rule: Rule
    samples: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)
    own: bool = False  # whether the sums are copies, each in memory of its own
    loss: Tensor | None = None
    counts: Tensor | None = None

    def add(
        self,
        answer: Any,
        losses: Tensor,
        size: int,
        last: bool = True,
        room: Callable[[Sums], Sums | None] | None = None,
    ) -> None:
        """Take in the answers for a piece whose first `size` samples are real.

        Unless it is the `last` one, the next piece's may overwrite them: they are copied, into what `room` gives for them.
        """
        grads: Sums = answer.grad
        if not self.sums and last:
            self.sums = dict(grads)
        elif not self.sums:
            self.sums, self.own = _copies(grads, room and room(grads)), True
        else:
            torch._foreach_add_(list(self.sums.values()), [grads[name] for name in self.sums])  # pyright: ignore
        over, bad = self.rule.clipped(answer)
        counts = torch.stack([over > bad, bad])[:, :size].sum(1)
        loss = losses[:size].detach().float().sum()
        self.samples += size
        self.counts = counts if self.counts is None else self.counts + counts
        self.loss = loss if self.loss is None else self.loss + loss

    def result(self) -> StepResult:
        if self.loss is None or self.counts is None:
            return StepResult(0, torch.zeros(()), torch.zeros(2, dtype=torch.int64))
        return StepResult(self.samples, self.loss, self.counts)


@dataclass(frozen=True)
class StepResult:
    """What a step saw of the samples it drew: for the eyes of whoever trains, since there is no noise on it."""

    samples: int  # drawn
    loss_sum: Tensor = field(repr=False)
    counts: Tensor = field(repr=False)  # (2,): the samples that were clipped, and those that were left out

    @property
    def clipped_sum(self) -> Tensor:
        return self.counts[0]

    @property
    def nonfinite_sum(self) -> Tensor:
        return self.counts[1]

    @property
    def loss(self) -> float:
        """The mean loss; NaN where no sample was drawn."""
        return float(self.loss_sum) / self.samples if self.samples else float("nan")

    @property
    def clipped(self) -> float:
        """The share of samples whose gradient was longer than allowed; 0 where none was drawn."""
        return float(self.clipped_sum) / max(1, self.samples)

    @property
    def nonfinite(self) -> int:
        """The number of samples that were left out, for a NaN or an infinite gradient."""
        return int(self.nonfinite_sum)

    def __str__(self) -> str:
        left_out = f", {self.nonfinite} not finite" if self.nonfinite else ""
        return f"{self.samples} samples, loss {self.loss:.4g}, {self.clipped:.0%} clipped{left_out}"
