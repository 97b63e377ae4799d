"""One recurrent layer step by step, with a backward that yields the gradient of every gate at once.

Rows are flat: step t takes `sizes[t]` rows, and `sizes` never grow. What autograd would record op by op is
written out: one product and a few element-wise ops a step, local derivatives for all steps together.

Every scan overwrites z with its gates, which saves a copy of the size of the gates: its caller gives z away.
The outputs after the final states say what the use of `w_hh` needs to know, and have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# grad * y * (1 - y) and grad * (1 - y * y), each in one pass over memory; `grad_input` is where to.
_by_sigmoid = torch.ops.aten.sigmoid_backward.grad_input
_by_tanh = torch.ops.aten.tanh_backward.grad_input

Result = TypeVar("Result")


def _unseen(function: Callable[..., Result]) -> Callable[..., Result]:
    """`function` with no recorder to see its ops: one is on in a backward too, and hundreds of small ops would pass it."""

    @wraps(function)
    def run(*args: Any) -> Result:
        with torch._C.DisableTorchFunction():
            return function(*args)

    return run


def before(first: Tensor, rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """The state before each row, (N, H), from the initial ones (B, H) and the rows."""
    if sizes[0] == sizes[-1]:
        return torch.cat([first, rows[: len(rows) - sizes[-1]]])
    steps = rows.split(sizes)[:-1]
    return torch.cat([first, *(step[:n] for step, n in zip(steps, sizes[1:], strict=True))])


def _last(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """The last state of each sequence, (B, H)."""
    if sizes[0] == sizes[-1]:
        return rows[len(rows) - sizes[-1] :].clone()
    ended = zip(rows.split(sizes), (*sizes[1:], 0), strict=True)
    return torch.cat([step[n:] for step, n in ended if n < len(step)][::-1])


def _first(state: Tensor, n: int) -> Tensor:
    return state if state.shape[0] == n else state[:n]  # len of a tensor takes microseconds


def _backwards(sizes: Sequence[int], *rows: Tensor) -> Iterator[tuple[int, int, tuple[Tensor, ...]]]:
    """Each step from the last to the first: its sequences, how many of them end at it, and its part of `rows`."""
    ended = [n - after for n, after in zip(sizes, (*sizes[1:], 0), strict=True)]
    steps = zip(*(r.split(sizes) for r in rows), strict=True)
    return zip(reversed(sizes), reversed(ended), reversed(list(steps)), strict=True)


def _joined(carried: Tensor | None, ended: Tensor, n: int, count: int) -> Tensor:
    """What flows back to the n sequences of a step: from the step after it, and from those that end here."""
    if carried is None:
        return ended[:n].clone()
    return torch.cat([carried, ended[n - count : n]]) if count else carried


def _or_zeros(g: Tensor | None, like: Tensor, n: int) -> Tensor:
    return like.new_zeros(()).expand(n, like.shape[1]) if g is None else g


class _Scan(torch.autograd.Function):
    """What the three kinds of layers share."""

    @staticmethod
    def keep(ctx: Any, sizes: tuple[int, ...], previous: Tensor, *saved: Tensor) -> None:
        ctx.sizes = sizes
        ctx.save_for_backward(previous, *saved)
        ctx.mark_non_differentiable(previous)
        ctx.set_materialize_grads(False)  # zeros for `previous`, which never has a gradient

    @staticmethod
    def hidden_gradients(ctx: Any, g: Tensor, previous: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of the hidden weight and bias, where they are asked for."""
        weight = g.mT @ previous if ctx.needs_input_grad[1] else None
        bias = g.sum(0) if ctx.needs_input_grad[2] else None
        return weight, bias


class LSTM(_Scan):
    """(z, w_hh, b_hh, h0, c0, sizes) -> (rows, last h, last c, h before each row)."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, w_hh: Tensor, b_hh: Tensor | None, h0: Tensor, c0: Tensor, sizes: tuple[int, ...]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        H, w = h0.shape[1], w_hh.mT
        gates = z.detach()
        if b_hh is not None:
            gates.add_(b_hh)
        cells, tanh_c, rows = (z.new_empty(len(z), H) for _ in range(3))
        h, c = h0, c0
        parts = (gates, gates[:, : 2 * H], *gates.chunk(4, 1), cells, tanh_c, rows)
        for n, gate, i_f, i, f, g, o, cell, tanh, row in zip(sizes, *(p.split(sizes) for p in parts), strict=True):
            gate.addmm_(_first(h, n), w)
            i_f.sigmoid_()
            g.tanh_()
            o.sigmoid_()
            c = torch.mul(f, _first(c, n), out=cell).addcmul_(i, g)
            h = torch.mul(o, torch.tanh(c, out=tanh), out=row)
        previous = before(h0, rows, sizes)
        _Scan.keep(ctx, sizes, previous, gates, cells, tanh_c, c0, w_hh)
        return rows, _last(rows, sizes), _last(cells, sizes), previous

    @staticmethod
    @once_differentiable
    @_unseen
    def backward(  # type: ignore[override]
        ctx: Any, g_rows: Tensor | None, g_h: Tensor | None, g_c: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        previous, gates, cells, tanh_c, c0, w_hh = ctx.saved_tensors
        B, H = c0.shape
        i, f, g, o = gates.chunk(4, 1)
        # d(gate before its nonlinearity) per d(c), for i, f and g; per d(h), for o.
        out = torch.empty_like(gates)
        by_i, by_f, by_g, by_o = out.chunk(4, 1)
        _by_sigmoid(g, i, grad_input=by_i)
        _by_sigmoid(before(c0, cells, ctx.sizes), f, grad_input=by_f)
        _by_tanh(i, g, grad_input=by_g)
        _by_sigmoid(tanh_c, o, grad_input=by_o)
        c_by_h = _by_tanh(o, tanh_c, grad_input=torch.empty_like(tanh_c))
        g_rows, g_h, g_c = _or_zeros(g_rows, c0, len(out)), _or_zeros(g_h, c0, B), _or_zeros(g_c, c0, B)
        dh = dc = None
        parts = (out, out[:, : 3 * H].unflatten(1, (3, H)), by_o, f, c_by_h, g_rows)
        for n, count, (gate, i_f_g, o_, f_, c_by_h_, g_row) in _backwards(ctx.sizes, *parts):
            dh = _joined(dh, g_h, n, count).add_(g_row)
            dc = _joined(dc, g_c, n, count).addcmul_(dh, c_by_h_)
            i_f_g.mul_(dc.unsqueeze(1))
            o_.mul_(dh)
            dh, dc = gate @ w_hh, dc.mul_(f_)
        return out, *_Scan.hidden_gradients(ctx, out, previous), dh, dc, None


class GRU(_Scan):
    """(z, w_hh, b_hh, h0, sizes) -> (rows, last h, h before each row, reset gates)."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, w_hh: Tensor, b_hh: Tensor | None, h0: Tensor, sizes: tuple[int, ...]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        H, w = h0.shape[1], w_hh.mT
        gates, candidate, rows = z.detach(), z.new_zeros(len(z), H), z.new_empty(len(z), H)
        if b_hh is not None:
            gates[:, : 2 * H].add_(b_hh[: 2 * H])
            candidate.add_(b_hh[2 * H :])
        h = h0
        parts = (gates[:, : 2 * H], *gates.chunk(3, 1), candidate, rows)
        for n, r_u, r, u, new, hidden, row in zip(sizes, *(p.split(sizes) for p in parts), strict=True):
            h = _first(h, n)
            r_u.addmm_(h, w[:, : 2 * H]).sigmoid_()
            new.addcmul_(r, hidden.addmm_(h, w[:, 2 * H :])).tanh_()
            h = torch.lerp(new, h, u, out=row)
        previous, reset = before(h0, rows, sizes), gates[:, :H].clone()
        _Scan.keep(ctx, sizes, previous, gates, candidate, w_hh)
        ctx.mark_non_differentiable(previous, reset)
        return rows, _last(rows, sizes), previous, reset

    @staticmethod
    @once_differentiable
    @_unseen
    def backward(  # type: ignore[override]
        ctx: Any, g_rows: Tensor | None, g_h: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        previous, gates, candidate, w_hh = ctx.saved_tensors
        H = previous.shape[1]
        r, u, new = gates.chunk(3, 1)
        # d(gate before its nonlinearity) per d(h) for u and new, per d(new before it) for r.
        out = torch.empty_like(gates)
        by_r, by_u, by_new = out.chunk(3, 1)
        _by_sigmoid(candidate, r, grad_input=by_r)
        _by_sigmoid(previous - new, u, grad_input=by_u)
        _by_tanh(1 - u, new, grad_input=by_new)
        g_rows, g_h = _or_zeros(g_rows, previous, len(out)), _or_zeros(g_h, previous, ctx.sizes[0])
        dh = None
        parts = (out[:, : 2 * H], by_r, out[:, H:].unflatten(1, (2, H)), by_new, r, u, g_rows)
        for n, count, (r_u, r_, u_new, new_, reset, u_, g_row) in _backwards(ctx.sizes, *parts):
            dh = _joined(dh, g_h, n, count).add_(g_row)
            u_new.mul_(dh.unsqueeze(1))
            r_.mul_(new_)
            dh = dh.mul_(u_).addmm_(r_u, w_hh[: 2 * H]).addmm_(new_ * reset, w_hh[2 * H :])
        hidden = torch.cat([out[:, : 2 * H], by_new * r], 1) if any(ctx.needs_input_grad[1:3]) else out
        return out, *_Scan.hidden_gradients(ctx, hidden, previous), dh, None


class RNN(_Scan):
    """(z, w_hh, b_hh, h0, sizes, relu) -> (rows, last h, h before each row)."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, w_hh: Tensor, b_hh: Tensor | None, h0: Tensor, sizes: tuple[int, ...], relu: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        saved, w, h = z.detach(), w_hh.mT, h0
        if b_hh is not None:
            saved.add_(b_hh)
        for n, row in zip(sizes, saved.split(sizes), strict=True):
            row.addmm_(_first(h, n), w)
            h = row.relu_() if relu else row.tanh_()
        rows, previous = saved.clone(), before(h0, saved, sizes)
        _Scan.keep(ctx, sizes, previous, saved, w_hh)
        ctx.relu = relu
        return rows, _last(rows, sizes), previous

    @staticmethod
    @once_differentiable
    @_unseen
    def backward(  # type: ignore[override]
        ctx: Any, g_rows: Tensor | None, g_h: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        previous, rows, w_hh = ctx.saved_tensors
        out = (rows > 0).to(rows.dtype) if ctx.relu else 1 - rows * rows
        g_rows, g_h = _or_zeros(g_rows, rows, len(rows)), _or_zeros(g_h, rows, ctx.sizes[0])
        dh = None
        for n, count, (row, g_row) in _backwards(ctx.sizes, out, g_rows):
            dh = row.mul_(_joined(dh, g_h, n, count).add_(g_row)) @ w_hh
        return out, *_Scan.hidden_gradients(ctx, out, previous), dh, None, None
