"""What is refused before a step is taken, by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from inspect import Parameter, signature
from numbers import Number
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from eachgrad.private.accounting import ACCOUNTANTS, SAMPLINGS, check_delta
from eachgrad.private.errors import PrivacyError

# Beyond this a guarantee says nothing, and the accountant takes minutes.
LARGEST_EPSILON = 100.0


def plain(value: Any) -> Any:
    """A number of numpy's as Python's own, which files can hold; anything else as it is."""
    item = getattr(value, "item", None)
    return item() if isinstance(value, Number) and item is not None else value


def check_size(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is a positive integer, not {value!r}")


def check_choice(name: str, value: Any, allowed: tuple) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is one of {', '.join(map(repr, allowed))}, not {value!r}")


def check_batch_size(batch_size: int, n: int) -> None:
    check_size("batch_size", batch_size)
    if batch_size > n:
        raise ValueError(f"batch_size={batch_size} is more than the {n} samples of the data set: pass {n} at most")


def steps_of(epochs: float | None, steps: int | None, n: int, batch_size: int) -> int:
    """How many steps are planned: as given, or so many that each sample is drawn `epochs` times on average."""
    if (epochs is None) == (steps is None):
        raise ValueError("pass exactly one of epochs and steps: the guarantee is for a number of steps")
    if steps is not None:
        check_size("steps", steps)
        return steps
    if isinstance(epochs, bool) or not isinstance(epochs, (int, float)) or not 0 < epochs < math.inf:
        raise ValueError(f"epochs is a positive number, not {epochs!r}")
    found = math.ceil(epochs * n / batch_size - 1e-9)
    if found < 1:
        raise ValueError(
            f"epochs={epochs!r} of {n} samples, {batch_size} at a time, is not one step: pass more, or steps"
        )
    return found


def check_target(target_epsilon: float | None, noise_multiplier: float | None) -> None:
    if (target_epsilon is None) == (noise_multiplier is None):
        raise ValueError("pass exactly one of target_epsilon and noise_multiplier: each follows from the other")
    if target_epsilon is not None and not (_number(target_epsilon) and 0 < target_epsilon <= LARGEST_EPSILON):
        raise ValueError(
            f"target_epsilon is a number above 0 and up to {LARGEST_EPSILON:g}, not {target_epsilon!r}: beyond it the "
            "guarantee says nothing; pass noise_multiplier to train with that little noise"
        )
    if noise_multiplier is not None and not (_number(noise_multiplier) and 0 <= noise_multiplier < math.inf):
        raise ValueError(f"noise_multiplier is a finite number, 0 or more, not {noise_multiplier!r}")


def check_target_delta(delta: Any, n: int) -> None:
    check_delta(delta)
    if delta >= 1 / n:
        raise PrivacyError(
            f"target_delta={delta:g} is not below 1/n = {1 / n:.3g} for {n} samples: publishing one sample as it is would "
            f"meet such a guarantee. Pass less, such as {0.1 / n:.1g}"
        )


def check_options(sampling: str, accountant: str, nonfinite: str, compile: Any, recompute: Any) -> None:
    check_choice("sampling", sampling, SAMPLINGS)
    check_choice("accountant", accountant, tuple(ACCOUNTANTS))
    check_choice("nonfinite", nonfinite, ("zero", "raise"))
    check_choice("compile", compile, (None, True, False))
    if isinstance(recompute, bool) or not isinstance(recompute, (int, float)) or not 0.0 <= recompute <= 1.0:
        raise ValueError(f"recompute is a share, from 0.0 to 1.0, not {recompute!r}")


def check_alone() -> None:
    """One process trains: with several, each would draw its own samples and add its own noise."""
    spread = torch.distributed.is_available() and torch.distributed.is_initialized()
    if spread and torch.distributed.get_world_size() > 1:
        raise PrivacyError(
            f"torch.distributed runs {torch.distributed.get_world_size()} processes, and the accounting is for one: train "
            "in one process"
        )


def trainable(model: Any) -> dict[str, nn.Parameter]:
    """{name: parameter} of all that is trained, once each."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is an nn.Module, not {type(model).__name__}")
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise PrivacyError(
            "the model has no trainable parameter: every one is frozen. Call requires_grad_() on those to train"
        )
    return found


def check_optimizer(optimizer: Any, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Every trained parameter is stepped, and every stepped one is the model's: no other has a clipped gradient.

    `parameters` are the trained ones of the model as it is now.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a torch.optim.Optimizer, not {type(optimizer).__name__}")
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    known = {id(p) for p in parameters.values()}
    if not stepped <= known:  # frozen ones may be stepped, too
        known = {id(p) for p in model.parameters()}
    for g, group in enumerate(optimizer.param_groups):
        for k, p in enumerate(group["params"]):
            if id(p) not in known:
                raise PrivacyError(
                    f"parameter {k} {tuple(p.shape)} of the optimizer's group {g} is none of the model's: no clipped "
                    "gradient covers it. Build the optimizer from model.parameters(), after anything that replaces them"
                )
    left = [name for name, p in parameters.items() if id(p) not in stepped]
    if left:
        raise PrivacyError(
            f"trainable parameters of the model that the optimizer does not have: {_some(left)}. Their gradient would be "
            "clipped and never used: freeze them with requires_grad_(False), or give them to the optimizer"
        )


def check_closure(optimizer: torch.optim.Optimizer) -> None:
    """The gradient of a step has noise in it once: it cannot be asked for again at other parameters."""
    given = signature(optimizer.step).parameters.get("closure")
    if given is not None and given.default is Parameter.empty:
        raise PrivacyError(
            f"{type(optimizer).__name__} computes the loss again within a step, by a closure, and a private step has one "
            "gradient, with its noise: use an optimizer that takes p.grad as it is, such as SGD or Adam"
        )


def check_unchanged(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """The parameters are those that the run began with."""
    now = {name: p for name, p in model.named_parameters() if p.requires_grad}
    other = [name for name in {**parameters, **now} if now.get(name) is not parameters.get(name)]
    if other:
        raise PrivacyError(
            f"the trainable parameters are not those of make_private: {_some(other)} came, went or were replaced. Call "
            "make_private again, with history=run.history"
        )


def check_modules(model: nn.Module) -> None:
    """No statistics over the batch, and none kept of it: they would leave without noise."""
    check_norms(norms_of(model))


def norms_of(model: nn.Module) -> list[tuple[str, _NormBase]]:
    """The modules that may keep statistics, by name."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, _NormBase)]


def check_norms(norms: Iterable[tuple[str, _NormBase]]) -> None:
    """As `check_modules`, of modules that are at hand."""
    for name, module in norms:
        kind = f"module {name!r} ({type(module).__name__})"
        mixes = not isinstance(module, nn.modules.instancenorm._InstanceNorm)
        if mixes and (module.training or not module.track_running_stats):
            how = "in training mode" if module.training else "without running statistics"
            raise PrivacyError(
                f"{kind} is a batch norm {how}: it mixes the samples of a batch, so that no bound on one sample's share "
                "holds. Replace it by GroupNorm, or keep it in eval mode with running statistics"
            )
        if module.training and module.track_running_stats:
            raise PrivacyError(
                f"{kind} keeps running statistics of the samples, which no noise covers: make it with "
                "track_running_stats=False, or call eval() on it"
            )


def _some(names: list[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
