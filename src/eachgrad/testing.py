"""check_rule: the test that every rule of this library passes, for rules of your own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from eachgrad.receipt import deviation, loop
from eachgrad.rules import BROADCAST, COMPOSITES, RULES
from eachgrad.rules.registry import as_called
from eachgrad.tape import record

TOLERANCE = 1e-10


class _OneOp(nn.Module):
    """A model that is one call of one op, with the marked tensors as its parameters."""

    def __init__(self, op: Callable[..., Tensor], args: tuple, kwargs: dict):
        super().__init__()
        self.op = op
        self.leaves, self.spec = tree_flatten((args, kwargs))
        self.places = [k for k, v in enumerate(self.leaves) if isinstance(v, Tensor) and v.requires_grad]
        for k in self.places:
            setattr(self, f"argument_{k}", nn.Parameter(_double(self.leaves[k].detach().clone())))
        batch = [v for k, v in enumerate(self.leaves) if isinstance(v, Tensor) and k not in self.places]
        if not self.places or not batch:
            raise ValueError(
                "check_rule needs a tensor that requires grad (a parameter) and one that does not (samples)"
            )
        self.batch_size = len(batch[0])
        self.samples = [
            k
            for k, v in enumerate(self.leaves)
            if isinstance(v, Tensor) and k not in self.places and v.ndim and len(v) == self.batch_size
        ]

    def batch(self) -> list[Tensor]:
        return [_double(self.leaves[k]) for k in self.samples]

    def forward(self, *batch: Tensor) -> Tensor:
        leaves = [_double(v) for v in self.leaves]
        for k in self.places:
            leaves[k] = getattr(self, f"argument_{k}")
        for k, v in zip(self.samples, batch, strict=True):
            leaves[k] = v
        args, kwargs = tree_unflatten(leaves, self.spec)
        return self.op(*args, **kwargs)


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _losses(model: nn.Module, *batch: Tensor) -> Tensor:
    """A loss that weighs every number of the output differently, so that nothing cancels."""
    out = model(*batch)
    out = torch.view_as_real(out) if out.is_complex() else out
    weight = torch.linspace(0.5, 1.5, out[0].numel(), dtype=out.dtype, device=out.device).view_as(out[0])
    return (out * weight).sin().flatten(1).sum(1) if out.ndim > 1 else (out * weight).sin()


def check_rule(op: Callable[..., Tensor], *args: Any, **kwargs: Any) -> None:
    """Compare the rule of `op` with a loop over samples, in float64, for this call of it.

    Tensors that require grad stand for parameters; of the others, those that share the size of the first
    one in dimension 0 are batches of samples. Every query is checked, with the batch as it is, reversed,
    and cut to one sample. Raises AssertionError, with the argument and the error, where they differ.
    """
    if not any(as_called(op) in table for table in (RULES, COMPOSITES, BROADCAST)):
        raise AssertionError(f"{op} has no rule: register one with @eachgrad.rule")
    model = _OneOp(op, args, kwargs)
    batch = model.batch()
    for what, data in (
        ("the batch", batch),
        ("the batch reversed", [t.flip(0) for t in batch]),
        ("one sample", [t[:1] for t in batch]),
    ):
        _compare(model, data, what)


def _compare(model: _OneOp, batch: list[Tensor], what: str) -> None:
    want = loop(model, _losses, batch)
    with record(model) as tape:
        losses = _losses(model, *batch)
    grads = tape.backward(losses)
    c = torch.linspace(-1, 2, len(losses), dtype=losses.dtype, device=losses.device)
    for name, value in want.items():
        pairs = {
            "dense": (grads[name].dense(), value),
            "norms": (grads[name].norms(), value.flatten(1).norm(dim=1)),
            "weighted_sum": (grads[name].weighted_sum(c), torch.tensordot(c.to(value.dtype), value, dims=1)),
        }
        for query, (ours, theirs) in pairs.items():
            if ours.shape != theirs.shape:
                raise AssertionError(f"{name}, {query} of {what}: shape {tuple(ours.shape)}, not {tuple(theirs.shape)}")
            error = deviation(ours, theirs)
            if not error <= TOLERANCE:
                raise AssertionError(f"{name}, {query} of {what}: off by {error:.1e} from a loop over samples")
