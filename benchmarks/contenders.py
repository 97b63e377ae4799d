"""What benchmarks/cpu.py times: eachgrad, and the other ways to the same answers.

A contender is built on a model of its own and gives a call without arguments. Every call computes everything from
the inputs on and returns its answer under the names of the model's parameters: norms (B,), a clipped sum
{name: (*shape)}, or all gradients {name: (B, *shape)}.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import eachgrad

MAX_NORM = 1.0

Grads = dict[str, Tensor]
Call = Callable[[], "Tensor | Grads | None"]
Build = Callable[[nn.Module, Tensor, Tensor], Call]


@dataclass(frozen=True)
class Contender:
    name: str
    answer: str  # "nothing", "norms", "clipped sum" or "dense"
    build: Build
    package: str | None = None  # what it needs beside torch

    @property
    def missing(self) -> bool:
        return self.package is not None and importlib.util.find_spec(self.package) is None


def norms(grads: Grads) -> Tensor:
    return torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)


def clipped(grads: Grads) -> Grads:
    """The clipped sum of gradients that are all there, {name: (B, *shape)} -> {name: (*shape)}."""
    c = (MAX_NORM / norms(grads)).clamp(max=1.0)
    return {name: torch.tensordot(c, g, dims=1) for name, g in grads.items()}


def then_clipped(build: Build) -> Build:
    """The clipped sum by way of all gradients."""

    def clip(model: nn.Module, x: Tensor, y: Tensor) -> Call:
        dense = build(model, x, y)
        return lambda: clipped(dense())  # type: ignore[arg-type]

    return clip


def plain(model: nn.Module, x: Tensor, y: Tensor) -> Call:
    def call() -> None:
        F.cross_entropy(model(x), y, reduction="sum").backward()

    return call


def _recorded(model: nn.Module, x: Tensor, y: Tensor, memory: int | str | None = None) -> tuple[eachgrad.Tape, Tensor]:
    with eachgrad.record(model, memory=memory) as tape:
        losses = F.cross_entropy(model(x), y, reduction="none")
    return tape, losses


def eachgrad_norms(model: nn.Module, x: Tensor, y: Tensor) -> Call:
    def call() -> Tensor:
        tape, losses = _recorded(model, x, y)
        return tape.ask(losses, norms=eachgrad.norms()).norms

    return call


def eachgrad_clipped(memory: int | str | None) -> Build:
    """The clipped sum with a bound on what is held until the norms are known."""

    def build(model: nn.Module, x: Tensor, y: Tensor) -> Call:
        def call() -> Grads:
            tape, losses = _recorded(model, x, y, memory)
            return tape.ask(losses, grad=eachgrad.clipped_sum(MAX_NORM)).grad

        return call

    return build


def eachgrad_compiled(query: eachgrad.queries.Query) -> Build:
    """The same by eachgrad.compile: one graph from the third call on, but for those that measure again."""

    def build(model: nn.Module, x: Tensor, y: Tensor) -> Call:
        ask = eachgrad.compile(model, lambda m, x, y: F.cross_entropy(m(x), y, reduction="none"), found=query)
        return lambda: ask(x, y).found

    return build


def eachgrad_dense(model: nn.Module, x: Tensor, y: Tensor) -> Call:
    def call() -> Grads:
        tape, losses = _recorded(model, x, y)
        return tape.ask(losses, grads=eachgrad.dense()).grads

    return call


def loop_dense(model: nn.Module, x: Tensor, y: Tensor) -> Call:
    parameters = dict(model.named_parameters())

    def call() -> Grads:
        answer = {name: p.new_empty(len(x), *p.shape) for name, p in parameters.items()}
        for i in range(len(x)):
            loss = F.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
            for rows, g in zip(answer.values(), torch.autograd.grad(loss, list(parameters.values())), strict=True):
                rows[i] = g
        return answer

    return call


def loop_clipped(model: nn.Module, x: Tensor, y: Tensor) -> Call:
    parameters = dict(model.named_parameters())

    def call() -> Grads:
        answer = {name: torch.zeros_like(p) for name, p in parameters.items()}
        for i in range(len(x)):
            loss = F.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
            grads = torch.autograd.grad(loss, list(parameters.values()))
            norm = torch.stack([g.norm() for g in grads]).norm()
            c = float((MAX_NORM / norm).clamp(max=1.0))
            for total, g in zip(answer.values(), grads, strict=True):
                total.add_(g, alpha=c)
        return answer

    return call


def vmap_dense(model: nn.Module, x: Tensor, y: Tensor) -> Call:
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def one_loss(p: Grads, xi: Tensor, yi: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, p, (xi[None],)), yi[None])

    per_sample = torch.func.vmap(torch.func.grad(one_loss), (None, 0, 0))
    return lambda: per_sample(parameters, x, y)


def expanded_weights_dense(model: nn.Module, x: Tensor, y: Tensor) -> Call:
    from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

    def call() -> Grads:
        out = call_for_per_sample_grads(model, loss_reduction="sum")(x)
        F.cross_entropy(out, y, reduction="sum").backward()
        return {name: p.grad_sample for name, p in model.named_parameters()}  # type: ignore[misc]

    return call


def _for_opacus(model: nn.Module) -> nn.Module:
    """The model with the layers that Opacus cannot follow replaced by its own, as its documentation asks for."""
    from opacus.validators import ModuleValidator

    # Its own layers are made in float32, whatever they replace.
    return ModuleValidator.fix(model).to(next(model.parameters()).dtype)


def _joined(found: Grads, dim: int) -> Grads:
    """Opacus' answer under the model's own names: its attention keeps one matrix as three. `dim` counts the rows."""
    answer: Grads = {}
    thirds: dict[str, list[Tensor]] = {}
    for name, value in found.items():
        path, _, last = name.removeprefix("_module.").rpartition(".")
        owner, _, layer = path.rpartition(".")
        if layer in ("qlinear", "klinear", "vlinear"):
            thirds.setdefault(f"{owner}.in_proj_{last}", []).append(value)
        else:
            answer[f"{path}.{last}" if path else last] = value
    return answer | {name: torch.cat(parts, dim) for name, parts in thirds.items()}


def opacus_dense(model: nn.Module, x: Tensor, y: Tensor) -> Call:
    from opacus.grad_sample import GradSampleModule

    wrapped = GradSampleModule(_for_opacus(model), loss_reduction="sum")

    def call() -> Grads:
        wrapped.zero_grad()
        F.cross_entropy(wrapped(x), y, reduction="sum").backward()
        return _joined({name: p.grad_sample for name, p in wrapped.named_parameters()}, 1)  # type: ignore[misc]

    return call


def opacus_ghost(model: nn.Module, x: Tensor, y: Tensor) -> Call:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(
        _for_opacus(model), loss_reduction="sum", max_grad_norm=MAX_NORM, use_ghost_clipping=True
    )
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(wrapped.parameters(), lr=0.0),
        noise_multiplier=0.0,
        max_grad_norm=MAX_NORM,
        expected_batch_size=len(x),
        loss_reduction="sum",
    )
    criterion = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss(reduction="sum"), "sum")

    def call() -> Grads:
        optimizer.zero_grad(set_to_none=True)
        criterion(wrapped(x), y).backward()
        return _joined({name: p.grad for name, p in wrapped.named_parameters()}, 0)  # type: ignore[misc]

    return call


def backpack_dense(model: nn.Module, x: Tensor, y: Tensor) -> Call:
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad

    model, criterion = extend(model), extend(nn.CrossEntropyLoss(reduction="sum"))

    def call() -> Grads:
        with backpack(BatchGrad()):
            criterion(model(x), y).backward()
        without = [name for name, p in model.named_parameters() if getattr(p, "grad_batch", None) is None]
        if without:
            raise RuntimeError(f"no grad_batch for {len(without)} parameters, such as {without[0]}")
        return {name: p.grad_batch for name, p in model.named_parameters()}  # type: ignore[misc]

    return call


def forget(model: nn.Module) -> None:
    """Nothing of the last call is left on the parameters: each call pays for what it leaves there."""
    for p in model.parameters():
        p.grad = None
        for name in ("grad_sample", "grad_batch", "summed_grad"):
            if getattr(p, name, None) is not None:
                setattr(p, name, None)


_DENSE: list[tuple[str, Build, str | None]] = [
    ("loop", loop_dense, None),
    ("vmap", vmap_dense, None),
    ("ExpandedWeights", expanded_weights_dense, None),
    ("Opacus hooks", opacus_dense, "opacus"),
    ("BackPACK", backpack_dense, "backpack"),
]

CONTENDERS: list[Contender] = [
    Contender("plain", "nothing", plain),
    Contender("eachgrad norms", "norms", eachgrad_norms),
    Contender("eachgrad clipped sum", "clipped sum", eachgrad_clipped(None)),
    Contender("eachgrad clipped sum, memory=1GiB", "clipped sum", eachgrad_clipped("1GiB")),
    Contender("eachgrad clipped sum, memory=0", "clipped sum", eachgrad_clipped(0)),
    Contender("Opacus ghost clipped sum", "clipped sum", opacus_ghost, "opacus"),
    *(
        Contender(f"{who} clipped sum", "clipped sum", loop_clipped if who == "loop" else then_clipped(build), package)
        for who, build, package in _DENSE
    ),
    Contender("eachgrad dense", "dense", eachgrad_dense),
    Contender("eachgrad compiled, norms", "norms", eachgrad_compiled(eachgrad.norms())),
    Contender("eachgrad compiled, clipped sum", "clipped sum", eachgrad_compiled(eachgrad.clipped_sum(MAX_NORM))),
    Contender("eachgrad compiled, dense", "dense", eachgrad_compiled(eachgrad.dense())),
    *(Contender(f"{who} dense", "dense", build, package) for who, build, package in _DENSE),
]
