"""One step of a run, from the batch to its noisy gradients, with as little as can be left to do when the device is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eachgrad import Tape
from eachgrad.private.gathering import Gathered, StepResult, Sums
from eachgrad.private.loading import Batch
from eachgrad.private.noise import noisy_gradients
from eachgrad.private.sampling import to_device
from eachgrad.private.watching import Buffers

if TYPE_CHECKING:
    from eachgrad.private.run import Run

Answered = tuple[Any, Tensor]  # answers for a piece, and its losses


@dataclass
class Open:
    """A step that has begun: its batch, what is gathered of it, and the piece that waits for run.backward."""

    batch: Batch
    gathered: Gathered
    buffers: Buffers  # before the forward
    pieces: int = 0  # gathered
    waiting: int | None = None  # samples of the piece
    tape: Tape | None = None


@dataclass
class Asked:
    """The last piece of a step, which the device may still be at: its tensors, its samples, what it is filled up to."""

    piece: Any
    size: int
    filled: int
    answer: Any  # and the losses; in doubt, until the device has come so far


def ask(run: Run, step: Open) -> Asked | None:
    """Gather all pieces of a batch but the last, which is asked for; None if there is no piece.

    While the device is at one, the next is fetched. What is in doubt is answered again from the same tensors: were it
    fetched again, one sample would decide over the chances of the others, which no noise covers.
    """
    asked = None
    for samples, size in zip(step.batch.samples(), step.batch.sizes, strict=True):
        filled = run.loader.divided.filled(size)
        piece = to_device(run.loader.samples.batch(samples, filled), run.device)
        if asked is not None:
            settle(run, step, asked, last=False)
        answer = _with_room(run, step, partial(run.engine.answer, piece, size, filled))
        asked = Asked(piece, size, filled, answer)
    return asked


def _with_room(run: Run, step: Open, ask: Callable[[], Answered]) -> Answered:
    """What `ask` returns, if need be after the memory of the graphs was given back, with the sums in it moved elsewhere."""
    try:
        return ask()
    except torch.OutOfMemoryError:
        if not run.lending.moved(step.gathered):
            raise
    return ask()


def settle(run: Run, step: Open, asked: Asked, last: bool) -> None:
    """Add the answer to a piece, or another one, once it is known to be right: what is added is not taken off again."""
    again = run.engine.doubted()
    found = _with_room(run, step, partial(run.engine.again, asked.piece, asked.filled)) if again else asked.answer
    answer, losses = found
    step.gathered.add(answer, losses, asked.size, last=last, room=partial(_room, run))
    if last and again:
        step.buffers.check()


def _room(run: Run, sums: Sums) -> Sums | None:
    """Where the sums of several pieces go, in memory of the graphs; None for memory of their own."""
    ask = run.engine.ask
    return None if ask is None else run.lending.beside(ask.memory.block, sums)


def outcome(run: Run, step: Open, asked: Asked | None) -> tuple[dict[str, Tensor], StepResult]:
    """The noisy gradients of a step that is counted, and its result, from answers that are known to be right.

    A CUDA graph says at two thirds of its time whether its answer is in doubt; from then on the last third is all that
    hides the host's work. So a piece that is alone gets its noise before that, and if it is in doubt, all is dropped and
    made anew: nothing of it has left this function. The sums of several pieces are added in place, once they are known.
    """
    if asked is None or step.gathered.samples:
        if asked is not None:
            settle(run, step, asked, last=True)
        return noisy(run, step), step.gathered.result()
    before = run.source.state()
    step.gathered.add(asked.answer[0], asked.answer[1], asked.size)
    found = noisy(run, step), step.gathered.result()
    if not run.engine.doubted():
        return found
    del found
    asked.answer, step.gathered = None, Gathered(run.rule)  # let go of what they hold: eagerly it takes more memory
    run.source.restore(before)  # a fixed source repeats itself, as if nothing had been drawn; others draw anew
    step.gathered.add(*run.engine.again(asked.piece, asked.filled), asked.size)
    step.buffers.check()
    return noisy(run, step), step.gathered.result()


def noisy(run: Run, step: Open) -> dict[str, Tensor]:
    """The gradient of each parameter, with its noise, from what is gathered."""
    rule, settings = run.rule, run.settings
    deviation = rule.sum_noise(settings.noise_multiplier) * rule.sensitivity
    sums, own = step.gathered.sums, step.gathered.own
    if not own and (lent := run.lending.over(sums)) is not None:
        sums, own = lent, True
    return noisy_gradients(run.parameters, sums, rule.unit, deviation, settings.batch_size, run.source, own)
