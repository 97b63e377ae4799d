"""A recurrence over all its steps as one op of a traced graph, which would hold hundreds of them one by one otherwise.

It takes what the inputs add to the gates, z, as `recurrent.py` has it, and gives z's gradient: on a CPU by a scan of our
own, on a GPU by cuDNN with the identity in the place of the input's weight.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from eachgrad.kernels.library import library
from eachgrad.rules import scan

_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # cuDNN's numbers
_GATES = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}


def recurrence(
    z: Tensor, w_hh: Tensor, b_hh: Tensor | None, state: Sequence[Tensor], kind: str, steps: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """z (T B, gates H) and the states (B, H) before the first step -> rows (T B, H) and the last states.

    All of one dtype. The weights have no gradient here.
    """
    found = torch.ops.eachgrad.recurrence(z, w_hh, b_hh, list(state), kind, steps)
    return found[0], tuple(found[1 : 1 + len(state)])


class _Context:
    """What a scan keeps for its backward, when autograd does not call it."""

    needs_input_grad = (True, False, False, True, True)

    def __init__(self, saved: Sequence[Tensor] = (), **known: Any):
        self.saved_tensors = tuple(saved)
        vars(self).update(known)

    def save_for_backward(self, *saved: Tensor) -> None:
        self.saved_tensors = saved

    def mark_non_differentiable(self, *outputs: Tensor) -> None:
        """Nobody asks."""

    def set_materialize_grads(self, value: bool) -> None:
        """Nobody asks."""


def _scan(kind: str) -> tuple[Any, tuple[bool, ...]]:
    if kind in ("lstm", "gru"):
        return {"lstm": scan.LSTM, "gru": scan.GRU}[kind], ()
    return scan.RNN, (kind == "rnn_relu",)


def _forward_cpu(
    z: Tensor, w_hh: Tensor, b_hh: Tensor | None, state: list[Tensor], kind: str, steps: int
) -> list[Tensor]:
    context, (layer, more) = _Context(), _scan(kind)
    sizes = (len(state[0]),) * steps
    rows, *rest = layer.forward(context, z.clone(), w_hh, b_hh, *state, sizes, *more)
    saved = [t for t in context.saved_tensors if not any(t is given for given in (w_hh, *state))]
    return [rows, *rest[: len(state)], *saved]


def _backward_cpu(
    grads: list[Tensor], z: Tensor, w_hh: Tensor, b_hh: Tensor | None, state: list[Tensor], kind: str, steps: int,
    found: list[Tensor],
) -> list[Tensor]:  # fmt: skip
    layer, more = _scan(kind)
    saved = [*found[1 + len(state) :], *state[1:], w_hh]
    sizes = (len(state[0]),) * steps
    context = _Context(saved, sizes=sizes, relu=bool(more and more[0]))
    unused = (None,) * (2 if kind == "gru" else 1)
    dz, _, _, *rest = layer.backward(context, *grads, *unused)
    return [dz, *rest[: len(state)]]


def _weights(z: Tensor, w_hh: Tensor, b_hh: Tensor | None) -> list[Tensor]:
    """cuDNN's weights of one layer, with the identity for the input."""
    eye = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device)
    return [eye, w_hh] if b_hh is None else [eye, w_hh, torch.zeros_like(eye[0]), b_hh]


def _settings(kind: str, H: int) -> tuple[Any, ...]:
    """mode, hidden and projection size, layers, batch_first, dropout, train, bidirectional, batch_sizes, dropout_state."""
    return _MODES[kind], H, 0, 1, False, 0.0, True, False, [], None


def _forward_cuda(
    z: Tensor, w_hh: Tensor, b_hh: Tensor | None, state: list[Tensor], kind: str, steps: int
) -> list[Tensor]:
    weights, H = _weights(z, w_hh, b_hh), state[0].shape[1]
    hx, cx = state[0][None].contiguous(), state[1][None].contiguous() if kind == "lstm" else None
    with warnings.catch_warnings():
        # The identity and the weights are packed together at every call: known, and small.
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous")
        out, hy, cy, reserve, packed = torch.ops.aten._cudnn_rnn(
            z.view(steps, -1, z.shape[-1]), weights, len(weights), None, hx, cx, *_settings(kind, H)
        )
    last = [hy[0], cy[0]] if kind == "lstm" else [hy[0]]
    return [out.flatten(0, 1), *last, reserve, packed]


def _backward_cuda(
    grads: list[Tensor], z: Tensor, w_hh: Tensor, b_hh: Tensor | None, state: list[Tensor], kind: str, steps: int,
    found: list[Tensor],
) -> list[Tensor]:  # fmt: skip
    weights, H = _weights(z, w_hh, b_hh), state[0].shape[1]
    hx, cx = state[0][None].contiguous(), state[1][None].contiguous() if kind == "lstm" else None
    g_rows, g_h, *g_c = grads
    *_, reserve, packed = found
    dz, dhx, dcx, _ = torch.ops.aten._cudnn_rnn_backward(
        z.view(steps, -1, z.shape[-1]), weights, len(weights), packed, hx, cx, found[0].view(steps, -1, H),
        g_rows.reshape(steps, -1, H).contiguous(), g_h[None].contiguous(), g_c[0][None].contiguous() if g_c else None,
        *_settings(kind, H), reserve, [True, True, kind == "lstm", False],
    )  # fmt: skip
    return [dz.flatten(0, 1), dhx[0], *([dcx[0]] if kind == "lstm" else [])]


library.define(
    "recurrence(Tensor z, Tensor w_hh, Tensor? b_hh, Tensor[] state, str kind, int steps) -> Tensor[]"
)  # rows, the last states, and what the backward needs
library.define(
    "recurrence_backward(Tensor[] grads, Tensor z, Tensor w_hh, Tensor? b_hh, Tensor[] state, str kind, int steps, "
    "Tensor[] found) -> Tensor[]"
)  # the gradients of z and of the states
library.impl("recurrence", _forward_cpu, "CPU")
library.impl("recurrence", _forward_cuda, "CUDA")
library.impl("recurrence_backward", _backward_cpu, "CPU")
library.impl("recurrence_backward", _backward_cuda, "CUDA")


@cache
def _reserved(kind: str, steps: int, B: int, H: int, dtype: torch.dtype, biased: bool) -> tuple[int, int]:
    """How much cuDNN keeps for a backward, and how large the packed weights are: it alone knows."""
    with unset_fake_temporarily(), torch.no_grad():
        z = torch.zeros(steps * B, _GATES[kind] * H, dtype=dtype, device="cuda")
        w_hh, b_hh = z.new_zeros(z.shape[1], H), z.new_zeros(z.shape[1]) if biased else None
        *_, reserve, packed = _forward_cuda(
            z, w_hh, b_hh, [z.new_zeros(B, H)] * (2 if kind == "lstm" else 1), kind, steps
        )
        return reserve.numel(), packed.numel()


def _by_cudnn(z: Tensor) -> bool:
    """Whether it is computed by cuDNN, which keeps what it likes for a backward."""
    return z.is_cuda


def _kept(
    kind: str, steps: int, B: int | torch.SymInt, H: int, dtype: torch.dtype, biased: bool
) -> tuple[int | torch.SymInt, int | torch.SymInt]:
    """As `_reserved`; in a graph for any number of samples, sizes that are read off the tensors when it runs."""
    if not isinstance(B, torch.SymInt):
        return _reserved(kind, steps, B, H, dtype, biased)
    # cuDNN chooses by the batch how it computes, and so what it keeps: that need not be so much for each sample.
    context = torch.library.get_ctx()
    return context.new_dynamic_size(), context.new_dynamic_size()


@torch.library.register_fake("eachgrad::recurrence", lib=library)
def _(z: Tensor, w_hh: Tensor, b_hh: Tensor | None, state: list[Tensor], kind: str, steps: int) -> list[Tensor]:
    (B, H), N = state[0].shape, z.shape[0]
    found = [z.new_empty(N, H), *(torch.empty_like(s) for s in state)]
    if _by_cudnn(z):
        reserve, packed = _kept(kind, steps, B, H, z.dtype, b_hh is not None)
        return [*found, z.new_empty(reserve, dtype=torch.uint8), z.new_empty(packed)]
    kept = {"lstm": (1, 4, 1, 1), "gru": (1, 3, 1)}.get(kind, (1, 1))
    return [*found, *(z.new_empty(N, width * H) for width in kept)]


@torch.library.register_fake("eachgrad::recurrence_backward", lib=library)
def _(
    grads: list[Tensor], z: Tensor, w_hh: Tensor, b_hh: Tensor | None, state: list[Tensor], kind: str, steps: int,
    found: list[Tensor],
) -> list[Tensor]:  # fmt: skip
    return [torch.empty_like(z), *(torch.empty_like(s) for s in state)]


def _setup(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    z, w_hh, b_hh, state, ctx.kind, ctx.steps = inputs
    ctx.biased, ctx.states = b_hh is not None, len(state)
    ctx.set_materialize_grads(False)  # or what is kept, of a size that is in no graph, gets a gradient of zeros
    ctx.save_for_backward(z, w_hh, *([b_hh] if ctx.biased else []), *state, *output)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    z, w_hh, *rest = ctx.saved_tensors
    b_hh = rest.pop(0) if ctx.biased else None
    state, found = rest[: ctx.states], rest[ctx.states :]
    count = 1 + ctx.states
    wanted = [torch.zeros_like(t) if g is None else g for t, g in zip(found[:count], grads[:count], strict=True)]
    dz, *dstate = torch.ops.eachgrad.recurrence_backward(wanted, z, w_hh, b_hh, state, ctx.kind, ctx.steps, found)
    return dz, None, None, list(dstate), None, None


torch.library.register_autograd("eachgrad::recurrence", _backward, setup_context=_setup, lib=library)
