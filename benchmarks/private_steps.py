"""What benchmarks/private_gpu.py times: training steps by plain, compiled PyTorch and by eachgrad.private."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol
from unittest.mock import patch

import torch
from gpu_contenders import MAX_NORM, Found, Task
from gpu_entrant import measures
from gpu_models import Setup
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from eachgrad.private import make_private
from eachgrad.private.sampling import Poisson
from eachgrad.replay import Replay
from eachgrad.step import Step

RATE = 1e-6  # small, so that every step is one of the same model
BATCHES = 64  # of the data set
MANY = 100_000  # steps that are planned
NOISE = 1.0

OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, RATE, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, RATE, fused=True),
}


@dataclass(frozen=True)
class Training:
    """A model that is trained, its data and its optimizer; `task` has the losses, the dtype and the compiler."""

    task: Task
    data: TensorDataset  # on the model's device
    optimizer: torch.optim.Optimizer

    @property
    def batch_size(self) -> int:
        return len(self.task.setup.x)


class Trainer(Protocol):
    def step(self) -> int:
        """Everything from the draw to the updated parameters; the number of samples."""
        ...

    def was_usual(self) -> bool:
        """Whether the last step was one like most others: none that measured where the samples lie, or followed on it."""
        ...

    def full(self) -> dict[str, AbstractContextManager[None]]:
        """Within each, a step has as many samples as one of that kind may have."""
        ...


def like(t: Tensor, n: int) -> Tensor:
    """n random samples of the shape and range of those of t (B, ...)."""
    shape = (n, *t.shape[1:])
    if t.is_floating_point():
        return torch.randn(shape, device=t.device)
    return torch.randint(int(t.max()) + 1, shape, device=t.device)


def data_for(setup: Setup) -> TensorDataset:
    n = BATCHES * len(setup.x)
    return TensorDataset(like(setup.x, n), like(setup.y, n))


class Plain:
    """The mean loss of B samples, compiled, its backward and the optimizer."""

    dynamic = False

    def __init__(self, training: Training):
        task, setup = training.task, training.task.setup
        self.task, self.data, self.optimizer, self.size = task, training.data, training.optimizer, training.batch_size
        self.order: list[Tensor] = []

        def mean_loss(x: Tensor, y: Tensor) -> Tensor:
            return setup.losses(setup.model, x, y).mean()

        self.loss = torch.compile(mean_loss, fullgraph=setup.fullgraph, dynamic=self.dynamic, backend=task.backend)

    def draw(self) -> Tensor:
        """The samples of the next step."""
        if not self.order:
            self.order = list(torch.randperm(len(self.data), device=self.data.tensors[0].device).split(self.size))
        return self.order.pop()

    def step(self) -> int:
        index = self.draw()
        x, y = (t[index] for t in self.data.tensors)
        with self.task.autocast():
            loss = self.loss(x, y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return len(index)

    def was_usual(self) -> bool:
        return True

    def full(self) -> dict[str, AbstractContextManager[None]]:
        return {"one": nullcontext()}


class Drawn(Plain):
    """The same with as many samples as a private run draws, by one graph for any number: what other sizes cost anyone."""

    dynamic = True

    def draw(self) -> Tensor:
        n = max(2, int(torch.poisson(torch.tensor(float(self.size)))))
        return torch.randint(len(self.data), (n,), device=self.data.tensors[0].device)


class Private:
    """`run.step` with the batches of `run.loader`, of `pieces` physical batches for one of B; None: as by default."""

    def __init__(
        self, training: Training, pieces: int | None = None, sampling: str = "poisson", graphs: int | str | None = None
    ):
        task, B = training.task, training.batch_size

        def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return task.losses(model, x, y)  # autocast goes inside

        self.training = training
        self.run = make_private(
            task.setup.model, training.optimizer, training.data, loss_fn=loss_fn, batch_size=B, steps=MANY,
            noise_multiplier=NOISE, target_delta=0.1 / len(training.data), max_grad_norm=MAX_NORM, sampling=sampling,
            max_physical_batch=pieces and math.ceil(B / pieces), compile=True, progress=False, graphs=graphs,
        )  # fmt: skip
        self.batches = iter(self.run.loader)
        self.drawn: list[list[int]] = []  # the sizes of the pieces of each step
        self._measured, self._usual = True, False

    def step(self) -> int:
        before, known = self._calls(), self._known()
        batch = next(self.batches)
        self.run.step(batch)
        self.drawn.append(batch.sizes)
        after = self._calls()
        measured = any(measures(k) for key, last in after.items() for k in range(before.get(key, 0) + 1, last + 1))
        # A size that is new, filled up or not, is compared with the eager answer, and has a CUDA graph when it comes next.
        measured = measured or self._known() != known
        self._usual, self._measured = not (measured or self._measured), measured
        return len(batch)

    def _calls(self) -> dict[int, int]:
        ask = self.run.engine.ask
        return {} if ask is None else {id(graph): graph.calls for graph in ask.graphs}

    def steps(self) -> list[Step]:
        """What is compiled."""
        ask = self.run.engine.ask
        return [] if ask is None else [step for graph in ask.graphs for step in graph.step.values()]

    def replays(self) -> list[Replay]:
        """What has a CUDA graph, or will have."""
        calls = [step.call for step in self.steps()]
        each = [[call] if isinstance(call, Replay) else [*getattr(call, "each", {}).values()] for call in calls]
        return [one for some in each for one in some]

    def _known(self) -> tuple[dict[int, tuple[int, int]], int]:
        """Which CUDA graphs there are, and how often each was tried; how many kinds of batches have been compared."""
        graphs = {id(one): (id(one.found), one.captures) for one in self.replays()}
        return graphs, sum(len(step.checked) for step in self.steps())

    def was_usual(self) -> bool:
        return self._usual

    def full(self) -> dict[str, AbstractContextManager[None]]:
        """As many as one piece has at most, and two pieces of as many as each of several has."""
        divided = self.run.loader.divided
        return {"one": self._of(divided.largest), "several": self._of(2 * (divided.several or divided.largest))}

    @contextmanager
    def _of(self, samples: int) -> Iterator[None]:
        sizes = self.run.loader.divided.split(samples)
        with patch.object(Poisson, "_drawn", lambda sampler: list(range(samples))):
            while self.drawn[-1] != sizes:  # what was drawn before comes first
                self.step()
            yield

    def answers(self) -> list[tuple[Task, Found]]:
        """Each piece of one more step, as a task of its own, and its clipped sum; the model is left as it is."""
        seen: list[tuple[Task, Found]] = []
        engine, task = self.run.engine, self.training.task
        answer = engine.answer

        def noting(batch: Any, *sizes: int) -> Any:
            found = answer(batch, *sizes)
            sums = {name: g.clone() for name, g in found[0].grad.items()}
            seen.append((replace(task, setup=replace(task.setup, x=batch[0], y=batch[1])), Found(sums)))
            return found

        with patch.object(engine, "answer", noting), patch.object(self.training.optimizer, "step", lambda: None):
            while not seen or not self._usual:
                seen.clear()
                self.step()
        return seen
