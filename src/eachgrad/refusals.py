"""What is refused while a forward is recorded, in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eachgrad.errors import CaptureError, UnsupportedOp
from eachgrad.functions import op_name
from eachgrad.graph import graph_nodes, tensors_in
from eachgrad.rules import RULES

if TYPE_CHECKING:
    from eachgrad.capture import Recorder


def refuse_op(recorder: Recorder, func: Callable, t: Tensor) -> None:
    names, op = recorder.tensors.names_of(t), op_name(func)
    raise UnsupportedOp(
        f"parameter {names[0]!r} {tuple(t.shape)} is used by {op} at {recorder.place()}, which has no rule. Write one "
        f"with @eachgrad.rule (docs/add_a_rule.md), or allow the dense route for it with "
        f'eachgrad.rule({op})(eachgrad.via_vmap({op})), or for this recording with record(fallback="vmap").'
    )


def refuse_call(recorder: Recorder, func: Callable, t: Tensor, why: Exception) -> NoReturn:
    raise UnsupportedOp(
        f"parameter {recorder.tensors.names_of(t)[0]!r} is used by {op_name(func)} at {recorder.place()}: {why}"
    ) from None


def check_derivative(recorder: Recorder, func: Callable, args: tuple, kwargs: dict) -> None:
    again = kwargs.get("create_graph") or any(args[4:5]) or func is not torch.autograd.grad
    # A Function that was given no parameter asks for one in its backward: what it does with it is not seen.
    asked = tensors_in((args[1:2], kwargs.get("inputs")))
    hidden = recorder.replaying and not recorder.unseen and any(id(t) in recorder.tensors.parameters for t in asked)
    if again or hidden:
        if recorder.replaying:
            raise CaptureError(
                f"torch.autograd.{func.__name__} at {recorder.place()} runs in the backward of another op, where parameters "
                "cannot be followed: use torch.utils.checkpoint for checkpoints, or return the gradients from the backward"
            )
        nodes = set(graph_nodes([t.grad_fn for t in tensors_in(args[:1])]))
        names = dict.fromkeys(n for use in recorder.uses if use.tap.node in nodes for n in use.parameters())
        raise CaptureError(
            f"torch.autograd.{func.__name__} at {recorder.place()} takes a derivative inside the record block, on which the "
            f"loss may depend: the parameters {', '.join(map(repr, names)) or 'of the model'} are used in its backward, "
            "where they cannot be followed. Leave derivatives out of the loss."
        )


def check_batch_norm(recorder: Recorder, func: Callable, args: tuple, kwargs: dict) -> None:
    if recorder.batch_size == 1:
        return
    if isinstance(args[0], Tensor) and recorder.tensors.carrier(args[0]) == "pure":  # weight standardisation
        return
    training = args[5] if func is torch.batch_norm else RULES[func].bind(args, kwargs)["training"]
    if training:
        named = [
            recorder.tensors.parameters[id(t)]
            for t in tensors_in((args, kwargs))
            if id(t) in recorder.tensors.parameters
        ]
        about = f" (parameters {', '.join(map(repr, named))})" if named else ""
        raise UnsupportedOp(
            f"batch_norm{about} at {recorder.place()}, {_why_training(recorder.place().module)} or use GroupNorm, LayerNorm "
            "or InstanceNorm."
        )


def _why_training(module: nn.Module | None) -> str:
    mixes = "it mixes the samples of a batch, so that no sample has a gradient of its own."
    if module is not None and not module.training:
        return f"keeps no running statistics: {mixes} Build it with track_running_stats=True,"
    return f"is in training mode: {mixes} Call eval() on it,"


def check_nested(recorder: Recorder, func: Callable, given: list[Tensor], sources: list[Tensor]) -> None:
    if any(t.is_nested for t in given):
        raise UnsupportedOp(
            f"parameter {recorder.tensors.names_of(sources[0])[0]!r} is used by {op_name(func)} at {recorder.place()} with "
            "a nested tensor. Pass its values() through the layer and compute with the offsets, or pad it."
        )


def check_observer(recorder: Recorder, func: Callable, args: tuple, kwargs: dict) -> None:
    """Quantisation that measures its scale on the batch; weights have none, and a fixed scale is any number."""
    x, observing = args[0], args[1] if len(args) > 1 else kwargs["observer_on"]
    if recorder.batch_size != 1 and recorder.tensors.is_strong(x) and bool(observing):
        raise UnsupportedOp(
            f"{op_name(func)} at {recorder.place()} takes its scale from the batch: it mixes the samples of a batch, so that "
            "no sample has a gradient of its own. Call model.apply(torch.ao.quantization.disable_observer) first."
        )


CHECKED: dict[Callable, Callable[[Recorder, Callable, tuple, dict], None]] = {
    torch.autograd.grad: check_derivative, torch.autograd.backward: check_derivative,
    torch.Tensor.backward: check_derivative, F.batch_norm: check_batch_norm, torch.batch_norm: check_batch_norm,
    torch.fused_moving_avg_obs_fake_quant: check_observer,
}  # fmt: skip
