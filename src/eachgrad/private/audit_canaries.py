"""Canaries: samples whose gradient points at one number of the parameters, and what a run gives away of them."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eachgrad.private.gathering import arguments, check_count
from eachgrad.receipt import call_loss

if TYPE_CHECKING:
    from eachgrad.private.run import Run

# Instead of a canary's number: a sample of the data set, and a canary without a gradient.
NONE, SILENT = -1, -2
# So many empty places give a parameter's noise to 10%.
FEW = 50
# In clipping bounds: with less there is nothing left to tell apart, and where there is none it would be a division by zero.
LEAST_NOISE = 0.05


@dataclass(frozen=True)
class Places:
    """One number of the parameters for each of K canaries, each its own: parameter `which` at (row, column) of its table."""

    names: tuple[str, ...]  # of the parameters
    which: Tensor  # (K,)
    row: Tensor  # (K,)
    column: Tensor  # (K,)
    share: float  # of the run's bound, which clipping leaves to these parameters

    def read(self, values: Mapping[str, Tensor | None]) -> Tensor:
        """(K,) what tensors of the parameters' shapes hold there, in float64; zero where there is none."""
        found = torch.zeros(len(self.which), dtype=torch.float64, device=self.which.device)
        for k, name in enumerate(self.names):
            value = values.get(name)
            if value is not None:
                mine = self.which == k
                found[mine] = table(value.detach())[self.row[mine], self.column[mine]].double()
        return found

    def values(self, parameters: Mapping[str, nn.Parameter], slots: Tensor) -> Tensor:
        """(B,) the number that belongs to each sample's canary, to be differentiated."""
        which, row, column = (t[slots] for t in (self.which, self.row, self.column))
        total = torch.zeros((), device=slots.device)
        for k, name in enumerate(self.names):
            mine = which == k
            rows = F.embedding(torch.where(mine, row, 0), table(parameters[name]))
            picked = rows.gather(1, torch.where(mine, column, 0)[:, None])[:, 0]
            total = total + torch.where(mine, picked, 0.0)
        return total


def table(value: Tensor) -> Tensor:
    """A parameter as a table; one that is a table stays itself, whose rows are looked up at the price of a row."""
    return value if value.ndim == 2 else value.reshape(len(value) if value.ndim else 1, -1)


def places(run: Run, count: int, chance: random.Random) -> list[Places]:
    """Where `count` canaries live: once in each group that is clipped by itself and has room for all of them."""
    bounds, groups = run.rule.bounds, run.rule.groups
    if groups is None:
        groups, bounds = {"": list(run.parameters)}, {"": run.rule.sensitivity}
    assert isinstance(bounds, dict)
    real = {name: p for name, p in run.parameters.items() if p.is_floating_point()}
    found = []
    for group, names in groups.items():
        mine = {name: real[name] for name in names if name in real}
        if sum(p.numel() for p in mine.values()) >= count:
            found.append(_drawn(mine, count, bounds[group] / run.rule.sensitivity, chance))
    return found


def room(run: Run) -> int:
    """How many canaries the largest group has numbers for."""
    groups = [list(run.parameters)] if run.rule.groups is None else list(run.rule.groups.values())
    real = {name: p.numel() for name, p in run.parameters.items() if p.is_floating_point()}
    return max(sum(real.get(name, 0) for name in names) for names in groups)


def _drawn(parameters: Mapping[str, nn.Parameter], count: int, share: float, chance: random.Random) -> Places:
    sizes = torch.tensor([p.numel() for p in parameters.values()])
    widths = torch.tensor([table(p.detach()).shape[1] for p in parameters.values()])
    ends = sizes.cumsum(0)
    flat = torch.tensor(chance.sample(range(int(ends[-1])), count))
    which = torch.bucketize(flat, ends, right=True)
    inside, width = flat - (ends - sizes)[which], widths[which]
    device = next(iter(parameters.values())).device
    index = [t.to(device) for t in (which, inside // width, inside % width)]
    return Places(tuple(parameters), index[0], index[1], index[2], share)


class Scores:
    """The evidence for each canary so far: the logarithm of how much likelier the gradients are if it is in the data.

    Only the first `count` places may have canaries. The others show the noise, which is not taken from what the run claims.
    """

    def __init__(self, run: Run, where: Sequence[Places], count: int):
        self.run, self.where, self.count = run, where, count
        self.total = torch.zeros(len(where[0].which), dtype=torch.float64)
        self.begin()

    def begin(self) -> None:
        """A step begins: what is known of its sum beforehand is nothing."""
        self.known = [torch.zeros(len(one.which), dtype=torch.float64, device=one.which.device) for one in self.where]
        self.bound = self.run.rule.sensitivity

    def subtract(self, sums: Mapping[str, Tensor]) -> None:
        """Take off the part of a step's sum that the other samples make: who guesses may know them all."""
        for known, one in zip(self.known, self.where, strict=True):
            known.add_(one.read(sums), alpha=self.run.rule.unit)

    def seen(self) -> list[Tensor]:
        """For each group (K,) what the step's gradient holds at the canaries' places beyond what is known, in bounds."""
        gradients = {name: p.grad for name, p in self.run.parameters.items()}
        B = self.run.settings.batch_size
        pairs = zip(self.known, self.where, strict=True)
        return [((one.read(gradients) * B - known) / self.bound).cpu() for known, one in pairs]

    def end(self) -> None:
        """A step has ended: take in the gradient that it left."""
        parts = [part.nan_to_num(nan=0.0, posinf=1e9, neginf=-1e9) for part in self.seen()]
        # A canary adds `signal` to a mean over the groups that counts each as much as clipping leaves of it.
        signal = math.sqrt(sum(one.share**2 for one in self.where))
        x, variance = torch.zeros_like(self.total), torch.zeros_like(self.total)
        for part, one in zip(parts, self.where, strict=True):
            x += one.share / signal * part
            variance += (one.share / signal * self._noise(part, one.which.cpu())) ** 2
        rate = self.run.settings.batch_size / self.run.settings.n
        drawn = math.log(rate) + (2 * signal * x - signal**2) / (2 * variance)
        left = torch.tensor(math.log1p(-rate) if rate < 1 else -math.inf, dtype=torch.float64)
        self.total += torch.logaddexp(drawn, left)

    def _noise(self, part: Tensor, which: Tensor) -> Tensor:
        """(K,) the deviation at the empty places of each place's parameter; of all, where a parameter has few of them."""
        empty = torch.arange(len(part)) >= self.count
        deviation = torch.full_like(part, float(part[empty].square().mean().sqrt()))
        for k in which.unique():
            mine = part[empty & (which == k)]
            if len(mine) >= FEW:
                deviation[which == k] = mine.square().mean().sqrt()
        return deviation.clamp(min=LEAST_NOISE)


class Planted:
    """A run's samples and canaries after them: sample n + k is canary `members[k]`, an ordinary one with a number on it."""

    def __init__(self, samples: Any, members: Sequence[int]):
        self.samples, self.members = samples, members
        self.n = samples.n + len(members)

    def fetched(self, indices: Iterator[list[int]]) -> Iterator[list[Any]]:
        """The samples of each list of numbers, each with its canary, or NONE for those of the data set."""
        slots: deque[list[int]] = deque()
        n = self.samples.n

        def ordinary() -> Iterator[list[int]]:
            for some in indices:
                slots.append([self.members[i - n] if i >= n else NONE for i in some])
                yield [i % n for i in some]

        for piece in self.samples.fetched(ordinary()):
            yield list(zip(piece, slots.popleft(), strict=True))

    def batch(self, samples: list[Any], size: int | None = None) -> list[Any]:
        """What a loss function is called with after the model, and the canaries (B,)."""
        ordinary = self.samples.batch([sample for sample, _ in samples], size)
        slots = [slot for _, slot in samples]
        slots += slots[:1] * (size - len(slots) if size else 0)
        return [*arguments(ordinary), torch.tensor(slots)]


def canary_loss(run: Run, where: Sequence[Places], norm: float) -> Callable[..., Tensor]:
    """The run's loss, except for canaries: theirs has a gradient of this norm in each group, at their places alone."""
    loss_fn, parameters = run.engine.loss_fn, run.parameters
    assert loss_fn is not None

    def losses(model: nn.Module, *batch: Any) -> Tensor:
        *args, slots = batch
        ordinary = call_loss(model, loss_fn, args)
        check_count(ordinary, len(slots))
        index = slots.clamp(min=0)
        total = sum((one.values(parameters, index) for one in where), torch.zeros((), device=slots.device))
        theirs = torch.where(slots == SILENT, 0.0, norm * total.to(ordinary.dtype))
        return torch.where(slots == NONE, ordinary, theirs)

    return losses


def watched(answer: Callable[..., Any], scores: Scores) -> Callable[..., Any]:
    """The same answers to the pieces of a batch; before, each is asked for with its canaries silent, for the scores."""

    def answered(batch: list[Any], *sizes: int) -> Any:
        *args, slots = batch
        if (slots == NONE).any():
            with torch.random.fork_rng(devices=[slots.device] if slots.is_cuda else []):  # the same dropout in both
                others = answer([*args, slots.where(slots == NONE, SILENT)], *sizes)
            scores.subtract(others[0].grad)
        return answer(batch, *sizes)

    return answered


@contextmanager
def planted(run: Any, scores: Scores, members: Sequence[int], norm: float) -> Iterator[None]:
    """Canaries in the run: drawn at its rate with its samples, through its own clipping and noise."""
    loader, engine = run.loader, run.engine
    samples, n, loss_fn = loader.samples, loader.sampler.n, engine.loss_fn
    engine.loss_fn, engine.answer = canary_loss(run, scores.where, norm), watched(engine.answer, scores)
    loader.samples, loader.sampler.n = Planted(samples, members), n + len(members)
    engine.ask = None  # a graph that is there, from a step that failed, has the loss without canaries
    trusts, engine.trusts = engine.trusts, False  # the scores take an answer for right
    try:
        yield
    finally:
        del engine.answer  # the class has it
        engine.trusts = trusts
        engine.loss_fn, engine.ask = loss_fn, None
        loader.samples, loader.sampler.n = samples, n
        loader.forget()
