"""make_private: everything that a private training run needs, checked before the first step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

from eachgrad.private import accounting, checks, resuming
from eachgrad.private.accounting import History, Spent
from eachgrad.private.clipping import Clipping, rule_for, with_count_noise
from eachgrad.private.errors import PrivacyError
from eachgrad.private.gathering import Engine
from eachgrad.private.noise import Fixed, Secure, Source
from eachgrad.private.run import SPENT, Run, Settings
from eachgrad.private.sampling import Poisson, Samples, Shuffled, opened
from eachgrad.private.sizes import pieces
from eachgrad.receipt import aliases_of


def make_private(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    *,
    batch_size: int,
    target_delta: float,
    loss_fn: Callable[..., Tensor] | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    target_epsilon: float | None = None,
    noise_multiplier: float | None = None,
    max_grad_norm: float | None = None,
    clipping: str | Clipping = "flat",
    sampling: str = "poisson",
    accountant: str = "pld",
    max_physical_batch: int | None = None,
    nonfinite: str = "zero",
    compile: bool | None = None,
    graphs: int | str | None = None,
    recompute: float = 1.0,
    secure: bool = False,
    generator: Generator | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    scheduler: Any = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    history: Sequence[Spent] | None = None,
    progress: bool | None = None,
    batch_dim: int = 0,
    memory: int | str | None = None,
    fallback: str = "refuse",
) -> Run:
    """A run that trains `model` with `optimizer` under differential privacy: `for batch in run.loader: run.step(batch)`.

    `loss_fn` is as for `eachgrad.verify` and returns one loss per sample; a loop by hand needs none. A step draws each sample
    of `dataset` with probability batch_size / n, clips each gradient to `max_grad_norm` (1.0), adds the gradients up, adds
    noise of noise_multiplier times that norm, and divides by `batch_size`. `noise_multiplier` is given, or found so that the
    steps spend `target_epsilon` at `target_delta`. Two data sets are neighbours if one has one sample more.

    `max_physical_batch` bounds what is computed at a time. `nonfinite` samples are left out ("zero") or an error ("raise").
    `compile` is for `eachgrad.compile`; None compiles on CUDA. `graphs="any"`, the default, compiles one graph for as many
    samples as a step draws; a number one for each of so many sizes, which pieces of a batch are filled up to. `recompute` is
    that of `eachgrad.compile`.
    `generator` makes a run repeatable, for tests, and not private. `secure` draws from a cryptographic generator. With
    `checkpoint` every step is noted in a journal beside that file before it is taken; `resume` goes on from the file if it is
    there. `history` is what the same data has been used for before: the `history` of another run. `scheduler` is saved and
    loaded with the run, and stepped by you. `batch_dim`, `memory` and `fallback` are those of `eachgrad.record`.
    """
    checks.check_options(sampling, accountant, nonfinite, compile, recompute)
    checks.check_alone()
    parameters = checks.trainable(model)
    checks.check_optimizer(optimizer, model, parameters)
    checks.check_closure(optimizer)
    checks.check_modules(model)
    epochs, steps, batch_size, max_physical_batch = map(checks.plain, (epochs, steps, batch_size, max_physical_batch))
    if graphs is not None and graphs != "any":
        checks.check_size("graphs", graphs := checks.plain(graphs))
    target_epsilon, noise_multiplier, target_delta = map(checks.plain, (target_epsilon, noise_multiplier, target_delta))
    checks.check_target(target_epsilon, noise_multiplier)
    checks.check_size("batch_size", batch_size)
    data, collate = opened(dataset, sampling, batch_size, collate_fn)
    samples = Samples(data, collate, num_workers)
    n = samples.n
    checks.check_batch_size(batch_size, n)
    steps = checks.steps_of(epochs, steps, n, batch_size)
    checks.check_target_delta(target_delta, n)
    rule = rule_for(clipping, max_grad_norm, parameters, aliases_of(model))
    on_cuda = all(p.is_cuda for p in parameters.values())
    by_graph = on_cuda if compile is None else compile
    graphs = (graphs or "any") if by_graph else 0
    divided = pieces(max_physical_batch, n, batch_size, graphs, sampling == "poisson")
    noise, drawing = _sources(generator, secure)
    before = _before(model, history)
    settings = Settings(n, batch_size, steps, noise_multiplier or 0.0, target_delta, sampling, accountant)
    if target_epsilon is not None:
        found = accounting.noise_for(target_epsilon, target_delta, settings.spent(steps), before, accountant)
        settings = replace(settings, noise_multiplier=found)
    rule = with_count_noise(rule, settings.noise_multiplier, batch_size)
    options = {"batch_dim": batch_dim, "memory": memory, "fallback": fallback}
    engine = Engine(model, loss_fn, rule, nonfinite, options, divided if by_graph else None, recompute)
    sampler = Poisson(n, batch_size / n, drawing) if sampling == "poisson" else Shuffled(n, batch_size, drawing)
    run = Run(
        model, optimizer, scheduler, settings, engine, noise, sampler, samples, divided, before, progress
    )  # fmt: skip
    if checkpoint is not None:
        resuming.begin(run, checkpoint, resume)
    return run


def _before(model: nn.Module, history: Sequence[Spent] | None) -> History:
    """What has been spent before this run."""
    steps = sum(some.steps for some in SPENT.get(model, ()))
    if history is None and steps:
        raise PrivacyError(
            f"this model has been trained by a private run of {steps} steps, which a new one would forget: pass "
            "history=run.history of that run, or history=() if it was on other data or the model has been made anew"
        )
    if history is not None and not isinstance(history, (tuple, list)):
        raise TypeError(f"history is that of another run, not a {type(history).__name__}: pass history=run.history")
    before = tuple(history or ())
    if not all(isinstance(some, Spent) for some in before):
        raise TypeError("history is that of another run: pass history=run.history")
    return before


def _sources(generator: Generator | None, secure: bool) -> tuple[Source, Source]:
    """Where the noise comes from, and where the samples' draws do."""
    if generator is None:
        return (Secure(), Secure()) if secure else (Source(), Source())
    if secure:
        raise ValueError("secure=True and a fixed generator exclude each other: leave generator out")
    if not isinstance(generator, Generator):
        raise TypeError(f"generator is a torch.Generator, not {type(generator).__name__}")
    return Fixed(generator), Fixed(generator)
