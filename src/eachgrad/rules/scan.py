"""One recurrent layer step by step, with a backward that yields the gradient of every gate at once.

Rows are flat: step t takes `sizes[t]` rows, and `sizes` never grow. What autograd would record op by op is
written out: two products and a few element-wise ops a step, local derivatives for all steps together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def _slices(sizes: Sequence[int]) -> list[slice]:
    found, start = [], 0
    for n in sizes:
        found.append(slice(start, start + n))
        start += n
    return found


def states(h0: Tensor, rows: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The state before each row, (N, H), and the last one of each sequence, (B, H)."""
    steps = _slices(sizes)
    before = torch.cat([h0, *(rows[step][: sizes[t + 1]] for t, step in enumerate(steps[:-1]))])
    last = [rows[step][(sizes[t + 1] if t + 1 < len(sizes) else 0) :] for t, step in enumerate(steps)]
    return before, torch.cat(last[::-1])


def _backwards(sizes: Sequence[int]) -> Iterator[tuple[slice, int]]:
    """Each step from the last to the first, with how many sequences end at it."""
    steps = _slices(sizes)
    for t in range(len(sizes) - 1, -1, -1):
        yield steps[t], sizes[t] - (sizes[t + 1] if t + 1 < len(sizes) else 0)


def _joined(carried: Tensor, ended: Tensor, n: int, count: int) -> Tensor:
    """What flows back to the n sequences of a step: from the step after it, and from those that end here."""
    return torch.cat([carried, ended[n - count : n]]) if count else carried


class _Scan(torch.autograd.Function):
    """What the three kinds of layers share: gradients of the hidden weights, where they are asked for."""

    @staticmethod
    def hidden_gradients(ctx: Any, g: Tensor, before: Tensor) -> tuple[Tensor | None, Tensor | None]:
        weight = g.mT @ before if ctx.needs_input_grad[1] else None
        bias = g.sum(0) if ctx.needs_input_grad[2] else None
        return weight, bias


class LSTM(_Scan):
    """(z, w_hh, b_hh, h0, c0, sizes) -> (rows, last h, last c)."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, w_hh: Tensor, b_hh: Tensor | None, h0: Tensor, c0: Tensor, sizes: tuple[int, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        H = h0.shape[1]
        gates, w = z if b_hh is None else z + b_hh, w_hh.mT
        gates = gates.clone() if b_hh is None else gates
        c_rows, tanh_c, rows = (z.new_empty(len(z), H) for _ in range(3))
        h, c = h0, c0
        for step, n in zip(_slices(sizes), sizes, strict=True):
            gate = gates[step].addmm_(h[:n], w)
            gate[:, : 2 * H].sigmoid_()
            gate[:, 2 * H : 3 * H].tanh_()
            gate[:, 3 * H :].sigmoid_()
            i, f, g, o = gate.chunk(4, 1)
            c = torch.mul(f, c[:n], out=c_rows[step]).addcmul_(i, g)
            h = torch.mul(o, torch.tanh(c, out=tanh_c[step]), out=rows[step])
        before_c, last_c = states(c0, c_rows, sizes)
        before_h, last_h = states(h0, rows, sizes)
        ctx.save_for_backward(gates, tanh_c, before_c, before_h, w_hh)
        ctx.sizes = sizes
        return rows, last_h, last_c

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_rows: Tensor, g_h: Tensor, g_c: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gates, tanh_c, before_c, before_h, w_hh = ctx.saved_tensors
        H = tanh_c.shape[1]
        i, f, g, o = gates.chunk(4, 1)
        # d(gate before its nonlinearity) per d(c), for i, f and g; per d(h), for o.
        by_c = torch.stack([g * i * (1 - i), before_c * f * (1 - f), i * (1 - g * g)], 1)  # (N, 3, H)
        by_h, c_by_h = tanh_c * o * (1 - o), o * (1 - tanh_c * tanh_c)
        out = torch.empty_like(gates)
        dh, dc = g_h[:0], g_c[:0]
        for step, count in _backwards(ctx.sizes):
            n = step.stop - step.start
            dh = _joined(dh, g_h, n, count) + g_rows[step]
            dc = torch.addcmul(_joined(dc, g_c, n, count), dh, c_by_h[step])
            gate = out[step].view(n, 4, H)
            torch.mul(by_c[step], dc.unsqueeze(1), out=gate[:, :3])
            torch.mul(by_h[step], dh, out=gate[:, 3])
            dh, dc = out[step] @ w_hh, dc * f[step]
        return out, *_Scan.hidden_gradients(ctx, out, before_h), dh, dc, None


class GRU(_Scan):
    """(z, w_hh, b_hh, h0, sizes) -> (rows, last h)."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, w_hh: Tensor, b_hh: Tensor | None, h0: Tensor, sizes: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        H = h0.shape[1]
        gates, candidate, rows = z.clone(), z.new_empty(len(z), H), z.new_empty(len(z), H)
        w, h = w_hh.mT, h0
        for step, n in zip(_slices(sizes), sizes, strict=True):
            hidden = h[:n] @ w if b_hh is None else torch.addmm(b_hh, h[:n], w)
            gate = gates[step]
            gate[:, : 2 * H].add_(hidden[:, : 2 * H]).sigmoid_()
            r, u, new = gate.chunk(3, 1)
            candidate[step] = hidden[:, 2 * H :]
            new.addcmul_(r, hidden[:, 2 * H :]).tanh_()
            h = torch.lerp(new, h[:n], u, out=rows[step])
        before, last = states(h0, rows, sizes)
        ctx.save_for_backward(gates, candidate, before, w_hh)
        ctx.sizes = sizes
        return rows, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_rows: Tensor, g_h: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gates, candidate, before, w_hh = ctx.saved_tensors
        H = before.shape[1]
        r, u, new = gates.chunk(3, 1)
        by_new, by_u = (1 - u) * (1 - new * new), (before - new) * u * (1 - u)
        by_r = candidate * r * (1 - r)  # per d(candidate)
        out, hidden = torch.empty_like(gates), torch.empty_like(gates)
        dh = g_h[:0]
        for step, count in _backwards(ctx.sizes):
            n = step.stop - step.start
            dh = _joined(dh, g_h, n, count) + g_rows[step]
            gate = out[step]
            dn = torch.mul(by_new[step], dh, out=gate[:, 2 * H :])
            torch.mul(by_u[step], dh, out=gate[:, H : 2 * H])
            torch.mul(by_r[step], dn, out=gate[:, :H])
            hidden[step, : 2 * H] = gate[:, : 2 * H]
            torch.mul(dn, r[step], out=hidden[step, 2 * H :])
            dh = torch.addmm(dh * u[step], hidden[step], w_hh)
        return out, *_Scan.hidden_gradients(ctx, hidden, before), dh, None


class RNN(_Scan):
    """(z, w_hh, b_hh, h0, sizes, relu) -> (rows, last h)."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, w_hh: Tensor, b_hh: Tensor | None, h0: Tensor, sizes: tuple[int, ...], relu: bool
    ) -> tuple[Tensor, Tensor]:
        rows, w, h = z.clone() if b_hh is None else z + b_hh, w_hh.mT, h0
        for step, n in zip(_slices(sizes), sizes, strict=True):
            row = rows[step].addmm_(h[:n], w)
            h = row.relu_() if relu else row.tanh_()
        before, last = states(h0, rows, sizes)
        ctx.save_for_backward(rows, before, w_hh)
        ctx.sizes, ctx.relu = sizes, relu
        return rows, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_rows: Tensor, g_h: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, before, w_hh = ctx.saved_tensors
        local = (rows > 0).to(rows.dtype) if ctx.relu else 1 - rows * rows
        out, dh = torch.empty_like(rows), g_h[:0]
        for step, count in _backwards(ctx.sizes):
            n = step.stop - step.start
            dh = _joined(dh, g_h, n, count) + g_rows[step]
            torch.mul(local[step], dh, out=out[step])
            dh = out[step] @ w_hh
        return out, *_Scan.hidden_gradients(ctx, out, before), dh, None, None
