"""run.loader: logical batches, drawn as the accountant expects them, in pieces that fit into memory."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from eachgrad.private.errors import PrivacyError

if TYPE_CHECKING:
    from eachgrad.private.run import Run
    from eachgrad.private.sizes import Pieces


class Batch:
    """The samples that one step has drawn: `len(batch)` of them, possibly none.

    Give it to `run.step`. By hand it is an iterable of its physical batches, each of which wants `run.record` and
    `run.backward`; after the last one, or at once if there is none, the noisy gradient is in `p.grad`.
    """

    def __init__(self, loader: Loader, loop: object, pieces: list[list[int]], generators: Any):
        self._loader, self._loop, self._pieces, self.generators = loader, loop, pieces, generators
        self.state = "drawn"

    def __len__(self) -> int:
        return sum(map(len, self._pieces))

    def __iter__(self) -> Iterator[Any]:
        return self._loader.run.pieces(self)

    def is_of(self, loader: Loader) -> bool:
        """Whether it comes from the loop that reads this loader now."""
        return self._loader is loader and self._loop is loader.loop

    @property
    def sizes(self) -> list[int]:
        """The number of samples in each physical batch."""
        return [len(piece) for piece in self._pieces]

    def samples(self) -> Iterator[list[Any]]:
        """The samples of one physical batch after another, as the data set gives them."""
        for _ in self._pieces:
            yield self._loader.next_piece()

    def __repr__(self) -> str:
        return f"Batch({len(self)} samples in {len(self._pieces)} pieces, {self.state})"


class Loader:
    """The logical batches of all steps that are left: `for batch in run.loader: run.step(batch)`."""

    def __init__(self, run: Run, sampler: Any, samples: Any, divided: Pieces, progress: bool | None):
        self.run, self.sampler, self.samples, self.divided = run, sampler, samples, divided
        self.progress = sys.stderr.isatty() if progress is None else progress
        self._ahead: deque[list[Any]] = deque()
        self._pieces: Iterator[list[Any]] = iter(())
        self.loop = object()  # another one for every loop that begins, and after a load

    def __len__(self) -> int:
        """The number of steps that are left."""
        return self.run.remaining

    def __iter__(self) -> Iterator[Batch]:
        return self.take(self.run.remaining)

    def epoch(self) -> Iterator[Batch]:
        """The batches of the next n / batch_size steps, in which each sample is drawn once on average."""
        return self.take(min(self.run.remaining, -(-self.samples.n // self.run.settings.batch_size)))

    def take(self, steps: int) -> Iterator[Batch]:
        """The batches of the next steps."""
        drawn: deque[Batch] = deque()
        self._ahead.clear()
        self.run.begin_pass()  # what the loop before has drawn and not used is drawn again
        mine = self.loop = object()
        self._pieces = self.samples.fetched(self._draw(steps, drawn, mine))
        with Bar(self.run, self.progress) as bar:
            while (batch := self._next(drawn)) is not None:  # an empty one counts
                yield batch
                if mine is not self.loop:
                    raise PrivacyError(
                        "run.loader was begun anew, or the run was loaded, while this loop was reading it: begin another loop"
                    )
                if batch.state != "done":
                    raise PrivacyError(
                        f"a batch of {len(batch)} samples was drawn and not used: the accounting is for steps that use every "
                        "batch they draw, empty ones too. Call run.step(batch), or go through all pieces of the batch"
                    )
                bar.update()

    def forget(self) -> None:
        """End whatever loop is reading, and what it has drawn."""
        self.loop = object()
        self.sampler.forget()

    def next_piece(self) -> list[Any]:
        return self._ahead.popleft() if self._ahead else next(self._pieces)

    def _next(self, drawn: deque[Batch]) -> Batch | None:
        while not drawn:
            piece = next(self._pieces, None)
            if piece is None:
                break
            self._ahead.append(piece)
        return drawn.popleft() if drawn else None

    def _draw(self, steps: int, drawn: deque[Batch], loop: object) -> Iterator[list[int]]:
        """The samples' numbers of one piece after another; the batches they make up go to `drawn`."""
        for _ in range(steps):
            index = self.sampler.draw()
            left = iter(index)
            pieces = [list(islice(left, size)) for size in self.divided.split(len(index))]
            drawn.append(Batch(self, loop, pieces, self.sampler.source.state()))
            yield from pieces


class Bar:
    """A progress bar with the loss, epsilon and the share of clipped samples."""

    def __init__(self, run: Run, shown: bool):
        self.run = run
        self._bar = tqdm(total=run.settings.steps, initial=run.spent, unit="step", disable=not shown)
        self._epsilon, self._next = "", 0.0

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def update(self) -> None:
        """One more step."""
        self._bar.update()
        if self._bar.disable:
            return
        result = self.run.last
        assert result is not None
        shown = {"loss": f"{result.loss:.3g}", "clipped": f"{result.clipped:.0%}", "epsilon": self._spent()}
        self._bar.set_postfix(shown, refresh=False)

    def _spent(self) -> str:
        """Epsilon so far, as of a little while ago: the accountant may take a second, and gets 2% of the time."""
        start = time.monotonic()
        if start >= self._next or not self.run.remaining:
            self._epsilon = f"{self.run.epsilon():.3g}"
            now = time.monotonic()
            self._next = now + 50 * (now - start)
        return self._epsilon
