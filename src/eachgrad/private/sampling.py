"""Which samples a step takes: each one on its own with the same probability (Poisson), or all in a shuffled order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler, TensorDataset, default_collate

from eachgrad.private.errors import PrivacyError
from eachgrad.private.noise import Source

# Random numbers at a time, 32 MiB: a choice of memory.
_AT_A_TIME = 1 << 22


class Poisson:
    """Every sample is drawn by itself with probability `rate`: a draw may be of any size, none included."""

    def __init__(self, n: int, rate: float, source: Source):
        self.n, self.rate, self.source = n, rate, source
        self._ahead: tuple[int, list[int]] | None = None  # out of how many, and which

    def draw(self) -> list[int]:
        """The numbers of the samples drawn, in order."""
        self.prepare()
        assert self._ahead is not None
        taken, self._ahead = self._ahead[1], None
        return taken

    def prepare(self) -> None:
        """Draw now what the next `draw` comes back with."""
        if self._ahead is None or self._ahead[0] != self.n:
            self._ahead = self.n, self._drawn()

    def forget(self) -> None:
        """Let go of what was drawn and not asked for: the source is another one now, or goes on from elsewhere."""
        self._ahead = None

    def _drawn(self) -> list[int]:
        taken: list[int] = []
        for start in range(0, self.n, _AT_A_TIME):
            numbers = self.source.uniform(min(_AT_A_TIME, self.n - start))
            # By numpy: torch took twice its time for 1,000 samples and five times for 60,000.
            taken += (np.flatnonzero(numbers.numpy() < self.rate) + start).tolist()
        return taken

    def restart(self) -> None:
        """Draws have no memory: there is nothing to begin anew."""


class Shuffled:
    """Every sample once in each pass, `batch_size` at a time, in an order that is new for each pass."""

    def __init__(self, n: int, batch_size: int, source: Source):
        self.n, self.batch_size, self.source = n, batch_size, source
        self._left: list[int] = []

    def draw(self) -> list[int]:
        """The numbers of the next batch's samples."""
        if not self._left:
            self._left = self.source.uniform(self.n).argsort().tolist()
        taken, self._left = self._left[: self.batch_size], self._left[self.batch_size :]
        return taken

    def prepare(self) -> None:
        """Nothing is drawn ahead: the next batch may belong to a pass that does not begin."""

    def forget(self) -> None:
        """There is nothing that was drawn ahead."""

    def restart(self) -> None:
        """Begin a new pass: what the accountant takes for granted after a load."""
        self._left = []


class Samples:
    """The data set: its size, samples by number, and how they make a batch."""

    def __init__(self, dataset: Dataset, collate: Callable[[list[Any]], Any] | None, workers: int):
        self.dataset, self.n, self.workers = dataset, size_of(dataset), workers
        # Rows of tensors need not be taken one by one and put together again.
        self.tensors = dataset.tensors if type(dataset) is TensorDataset and collate is None and not workers else None
        self.collate = default_collate if collate is None else collate

    def fetched(self, indices: Iterator[list[int]]) -> Iterator[list[Any]]:
        """The samples of each list of numbers, in order; by other processes, ahead of time, if there are workers."""
        indices = self._checked(indices)
        if self.tensors is not None:
            yield from indices
        elif self.workers:
            # Poisson draws have no end and are drawn ahead: a DataLoader takes any iterable for its batches.
            lists: Any = _Lists(indices)
            yield from DataLoader(self.dataset, batch_sampler=lists, collate_fn=_as_they_are, num_workers=self.workers)
        else:
            for some in indices:
                yield self._taken(some)

    def _checked(self, indices: Iterator[list[int]]) -> Iterator[list[int]]:
        """The same, as long as the data set has the size it had: the rate of the draws is for that one."""
        for some in indices:
            now = len(self.dataset)  # pyright: ignore[reportArgumentType]
            if now != self.n:
                raise PrivacyError(
                    f"the data set had {self.n} samples when the run was made, and has {now}: the accounting is for draws "
                    f"from {self.n}. Call make_private again, with history=run.history"
                )
            yield some

    def batch(self, samples: list[Any], size: int | None = None) -> Any:
        """One batch of these samples; the first is repeated up to `size`."""
        filled = samples + samples[:1] * (size - len(samples) if size else 0)
        if self.tensors is None:
            return self.collate(filled)
        # From pinned memory, or the host would wait for the device to be done with all that it was given before.
        index = torch.tensor(filled, pin_memory=any(t.is_cuda for t in self.tensors))
        sent = {device: index.to(device, non_blocking=True) for device in {t.device for t in self.tensors}}
        return [t[sent[t.device]] for t in self.tensors]

    def _taken(self, index: Sequence[int]) -> list[Any]:
        many: Any = getattr(self.dataset, "__getitems__", None)
        return list(many(index)) if many is not None else [self.dataset[i] for i in index]


class _Lists:
    def __init__(self, lists: Iterator[list[int]]):
        self.lists = lists

    def __iter__(self) -> Iterator[list[int]]:
        return self.lists


def _as_they_are(samples: list[Any]) -> list[Any]:
    return samples


def size_of(dataset: Any) -> int:
    """The number of samples, which a rate needs."""
    try:
        n = len(dataset)
    except TypeError as error:
        raise PrivacyError(
            f"{type(dataset).__name__} has no length: the probability that a sample is drawn is batch_size over the number "
            "of samples, so pass a data set with __len__ and __getitem__"
        ) from error
    if n < 1:
        raise ValueError("the data set is empty: pass one with samples")
    return n


def opened(given: Any, sampling: str, batch_size: int, collate: Callable | None) -> tuple[Any, Callable | None]:
    """The data set and its collate function, from a data set or, for shuffled batches, from a loader."""
    if not isinstance(given, DataLoader):
        if not hasattr(given, "__getitem__"):
            raise PrivacyError(
                f"{type(given).__name__} cannot be drawn from: it has no __getitem__. Pass a data set with __len__ and "
                "__getitem__, and run.loader draws the batches"
            )
        return given, collate
    if sampling == "poisson":
        raise PrivacyError(
            f"this DataLoader draws its batches with {type(given.sampler).__name__}, and the accountant counts on Poisson "
            'sampling, each sample drawn by itself. Pass the data set instead, loader.dataset, or sampling="shuffled"'
        )
    sampler = given.sampler
    plain = isinstance(sampler, SequentialSampler) or (isinstance(sampler, RandomSampler) and not sampler.replacement)
    if not plain or given.batch_size is None:
        raise PrivacyError(
            f"this DataLoader draws with {type(sampler).__name__}, and shuffled batches take every sample once in each "
            "pass: pass the data set instead, loader.dataset"
        )
    if given.batch_size != batch_size:
        raise ValueError(
            f"the DataLoader has batches of {given.batch_size}, and batch_size={batch_size}: pass the same"
        )
    return given.dataset, collate or given.collate_fn


def to_device(value: Any, device: torch.device) -> Any:
    """The same with every tensor on the device, through tuples, lists, dicts and whatever has a `to`."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=device.type == "cuda")
    if isinstance(value, dict):
        moved = {key: to_device(item, device) for key, item in value.items()}
        return moved if type(value) is dict else type(value)(moved)
    if hasattr(value, "to"):
        return value.to(device)
    if isinstance(value, (list, tuple)):
        moved = [to_device(item, device) for item in value]
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    return value
