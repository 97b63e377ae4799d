"""What benchmarks/gpu.py times: a step's gradient by plain PyTorch, by eachgrad and by its peers.

A contender is built on a model of its own and gives a call without arguments, which computes everything from the
inputs on. The work is "private", the sum of the samples' gradients each clipped to MAX_NORM, or "norms", the norm of
each sample and the gradient of the mean loss. Plain PyTorch gives the gradient of the mean loss in both.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from contenders import Grads, norms
from gpu_models import Setup
from torch import Tensor, nn

import eachgrad
from eachgrad.queries import Query

MAX_NORM = 1.0


@dataclass(frozen=True)
class Task:
    """One step's work on one batch, by a model that the contender may do with as it likes."""

    setup: Setup
    work: str  # "private" or "norms"
    dtype: str  # "bf16" for autocast, "fp32"
    backend: str  # of torch.compile

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.setup.model.named_parameters() if p.requires_grad}

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.setup.x.device.type, torch.bfloat16, enabled=self.dtype == "bf16")

    def compiler(self, mode: str | None) -> dict[str, str | None]:
        """The options of torch.compile; modes are the default compiler's."""
        return {"backend": self.backend, "mode": mode if self.backend == "inductor" else None}

    def losses(self, model: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
        """The losses (B,), the forward under autocast where that is asked for."""
        with self.autocast():
            return self.setup.losses(model, x, y)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Found:
    grads: Grads  # {name: (*shape)}
    norms: Tensor | None = None  # (B,)


@dataclass(frozen=True)
class Built:
    call: Callable[[], Found]
    note: Callable[[], str] = str  # what a reader should know of how it was answered


Build = Callable[[Task], Built]


@dataclass(frozen=True)
class Contender:
    name: str
    build: Build
    package: str | None = None  # what it needs beside torch
    private: bool = True  # whether it clips, and so adds noise, in a private step
    kernel: bool = False  # whether its noise is eachgrad's own, in one launch for all parameters

    def adds_torch_noise(self, work: str, on_gpu: bool) -> bool:
        """Whether torch's noise is part of its update."""
        return work == "private" and self.private and not (self.kernel and on_gpu)

    @property
    def missing(self) -> bool:
        return self.package is not None and importlib.util.find_spec(self.package) is None

    def prepared(self, model: nn.Module) -> nn.Module:
        """The model, for Opacus with its own layers in place of those that it cannot follow."""
        if self.package != "opacus":
            return model
        from opacus.validators import ModuleValidator

        return ModuleValidator.fix(model).to(next(model.parameters()).device)


def plain(task: Task) -> Built:
    setup, parameters = task.setup, task.parameters

    def call() -> Found:
        loss = task.losses(setup.model, setup.x, setup.y).mean()
        return Found(dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True)))

    return Built(call)


def plain_compiled(task: Task, mode: str | None = None) -> Built:
    setup, parameters = task.setup, task.parameters

    def mean_loss(x: Tensor, y: Tensor) -> Tensor:
        return setup.losses(setup.model, x, y).mean()

    compiled = torch.compile(mean_loss, fullgraph=setup.fullgraph, dynamic=False, **task.compiler(mode))

    def call() -> Found:
        with task.autocast():
            loss = compiled(setup.x, setup.y)
        return Found(dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True)))

    return Built(call)


def _queries(work: str) -> dict[str, Query]:
    if work == "private":
        return {"grad": eachgrad.clipped_sum(MAX_NORM)}
    return {"grad": eachgrad.mean(), "norms": eachgrad.norms()}


def eachgrad_eager(task: Task) -> Built:
    setup, queries = task.setup, _queries(task.work)

    def call() -> Found:
        with eachgrad.record(setup.model) as tape:
            losses = task.losses(setup.model, setup.x, setup.y)
        answer = tape.ask(losses, **queries)  # type: ignore[call-overload]
        return Found(answer.grad, getattr(answer, "norms", None))

    return Built(call)


def eachgrad_compiled(task: Task, mode: str | None = None) -> Built:
    setup = task.setup
    # Each answer is used before the next call.
    options = task.compiler(mode) | {"copies": False, "recompute": setup.recompute}
    ask = eachgrad.compile(setup.model, setup.losses, **options, **_queries(task.work))  # type: ignore[arg-type]

    def call() -> Found:
        with task.autocast():
            answer = ask(setup.x, setup.y)
        return Found(answer.grad, getattr(answer, "norms", None))

    return Built(call, lambda: "; ".join(f"answered eagerly: {reason}" for reason in ask.reasons()))


def clipped(dense: Grads) -> Grads:
    """The clipped sum of gradients that are all there, {name: (B, *shape)} -> {name: (*shape)}, in float32."""
    c = (MAX_NORM / norms(dense).float()).clamp(max=1.0)
    return {name: torch.tensordot(c, g.to(c.dtype), dims=1) for name, g in dense.items()}


def opacus(task: Task) -> Built:
    """All gradients by hooks, then the clipped sum, as Opacus' optimizer forms it."""
    from opacus.grad_sample import GradSampleModule

    setup, parameters = task.setup, task.parameters
    wrapped = GradSampleModule(setup.model, loss_reduction="mean")

    def call() -> Found:
        task.losses(wrapped, setup.x, setup.y).mean().backward()
        dense = {name: p.grad_sample for name, p in parameters.items()}  # type: ignore[attr-defined]
        if task.work == "private":
            return Found(clipped(dense))
        return Found({name: p.grad for name, p in parameters.items()}, norms(dense))  # type: ignore[misc]

    return Built(call)


def opacus_ghost(task: Task) -> Built:
    """Norms without gradients in one backward, and a second one for the clipped sum."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    setup, parameters = task.setup, task.parameters
    wrapped = GradSampleModuleFastGradientClipping(setup.model, max_grad_norm=MAX_NORM)  # type: ignore[arg-type]
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(list(parameters.values()), lr=0.0), noise_multiplier=0.0, max_grad_norm=MAX_NORM,
        expected_batch_size=len(setup.x),
    )  # fmt: skip

    def call() -> Found:
        losses = task.losses(wrapped, setup.x, setup.y)
        if task.work == "private":
            DPTensorFastGradientClipping(wrapped, optimizer, losses).backward()
            found = None
        else:
            losses.mean().backward()
            found = wrapped.get_norm_sample()
        return Found({name: p.grad for name, p in parameters.items()}, found)  # type: ignore[misc]

    return Built(call)


def vmap(task: Task, chunk: int | None = None) -> Built:
    """All gradients of `chunk` samples at a time by vmap(grad), by default of all of them."""
    setup, size = task.setup, chunk or len(task.setup.x)
    parameters = {name: p.detach() for name, p in task.parameters.items()}

    def one_loss(p: Grads, x: Tensor, y: Tensor) -> Tensor:
        return task.losses(lambda ids: torch.func.functional_call(setup.model, p, (ids,)), x[None], y[None]).sum()

    dense_of = torch.func.vmap(torch.func.grad(one_loss), (None, 0, 0), randomness="different")

    def part(x: Tensor, y: Tensor) -> Found:
        dense = dense_of(parameters, x, y)
        if task.work == "private":
            return Found(clipped(dense))
        return Found({name: g.sum(0) / len(setup.x) for name, g in dense.items()}, norms(dense))

    def call() -> Found:
        grads: Grads = {}
        sizes: list[Tensor] = []
        for x, y in zip(setup.x.split(size), setup.y.split(size), strict=True):
            found = part(x, y)
            grads = {name: grads[name].add_(g) if grads else g for name, g in found.grads.items()}
            sizes += [] if found.norms is None else [found.norms]
        return Found(grads, torch.cat(sizes) if sizes else None)

    return Built(call, lambda: f"in chunks of {chunk}" if chunk else "")


def vmap_chunked(chunk: int) -> Contender:
    return Contender("vmap_chunked", partial(vmap, chunk=chunk))


CONTENDERS: dict[str, Contender] = {
    c.name: c
    for c in (
        Contender("plain", plain, private=False),
        Contender("plain_compiled", plain_compiled, private=False),
        Contender("plain_graphs", partial(plain_compiled, mode="reduce-overhead"), private=False),
        Contender("eachgrad", eachgrad_eager, kernel=True),
        Contender("eachgrad_compiled", eachgrad_compiled, kernel=True),
        Contender("eachgrad_graphs", partial(eachgrad_compiled, mode="reduce-overhead"), kernel=True),
        Contender("opacus", opacus, "opacus"),
        Contender("opacus_ghost", opacus_ghost, "opacus"),
        Contender("vmap", vmap),
    )
}
