"""Recurrent ops: RNN, LSTM and GRU layer by layer, their cells by linear ops.

One layer computes Z = x W_ih^T + b_ih for all steps at once, then runs the recurrence on Z: on a GPU by the
fused op with the identity in the place of W_ih, elsewhere by a scan of our own (the identity costs (4H)^2
a step; on two CPU cores a private step of an LSTM 64 -> 256 took 7.8 times a plain one with it). The
gradient of Z is the output gradient of both products of the layer: the inputs of W_ih are x, those of W_hh
the hidden states one step earlier.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from eachgrad.blocks import Block, Dense, Outer
from eachgrad.blocks.arithmetic import is_traced, over_positions
from eachgrad.rules import scan
from eachgrad.rules.linear import all_but_last, positions
from eachgrad.rules.recurrence import recurrence
from eachgrad.rules.registry import composite, rule


def use_at(z: Tensor, op: Callable, *args: Tensor | None) -> None:
    """Tell the recorder that `op(*args)` has been added into `z`, so that z's gradient is op's as well."""
    if has_torch_function((z, *args)):
        handle_torch_function(use_at, (z, *args), z, op, *args)


def meet(state: Tensor) -> Tensor:
    """Tell the recorder that `state` meets the batch in what follows; the same values come back."""
    if has_torch_function((state,)):
        return handle_torch_function(meet, (state,), state)
    return state


def bare(weight: Tensor) -> Tensor:
    """Tell the recorder that a use of `weight` follows by `use_at`; the same values come back."""
    if has_torch_function((weight,)):
        return handle_torch_function(bare, (weight,), weight)
    return weight


def twice(t: Tensor) -> bool:
    """Ask the recorder whether the gradients are to be differentiated once more."""
    return handle_torch_function(twice, (t,), t) if has_torch_function((t,)) else False


def gru_hidden(input: Tensor, weight: Tensor, bias: Tensor | None, reset: Tensor) -> Tensor:
    """What a GRU's hidden state adds to its gates; the candidate's share passes the reset gate."""
    bias = bias if bias is None else bias.to(reset.dtype)
    hidden = F.linear(input.to(reset.dtype), weight.to(reset.dtype), bias)
    H = input.shape[-1]
    return torch.cat([hidden[..., : 2 * H], hidden[..., 2 * H :] * reset], -1)


@rule(gru_hidden, samples=("input", "reset"), lead=all_but_last, values=False)
def _gru_hidden(g: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None, reset: Tensor) -> dict[str, Block]:
    H = input.shape[-1]
    g = positions(torch.cat([g[..., : 2 * H], g[..., 2 * H :] * reset.to(g.dtype)], -1))
    return {"weight": Outer(g, positions(input.to(g.dtype))), "bias": Dense(over_positions(g)[0])}


@dataclass(frozen=True)
class _Steps:
    """Which rows of a flat (N, ...) sequence each step takes: `sizes[t]` of them, in order.

    `sizes` never grow: the sequences are ordered by length, as in a PackedSequence.
    """

    sizes: tuple[int, ...]

    @property
    def uniform(self) -> bool:
        return len(set(self.sizes)) == 1

    def reversed(self, rows: Tensor) -> Tensor:
        """Each sequence from its end to its beginning, in the same places."""
        if self.uniform:
            return rows.unflatten(0, (len(self.sizes), self.sizes[0])).flip(0).flatten(0, 1)
        return rows[self._mirror().to(rows.device)]

    def _mirror(self) -> Tensor:
        counts = torch.tensor(self.sizes)
        starts = counts.cumsum(0) - counts
        step = torch.arange(len(counts)).repeat_interleave(counts)  # (N,)
        sequence = torch.arange(len(step)) - starts[step]
        lengths = (counts[:, None] > torch.arange(self.sizes[0])).sum(0)
        return starts[lengths[sequence] - 1 - step] + sequence


# Rows (N, H), final states (B, H), and what `use_at` is told: h before each row, and a GRU's reset gates.
_Run = tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]


@dataclass(frozen=True)
class _Layer:
    """One direction of one layer."""

    kind: str  # "lstm", "gru", "rnn_tanh" or "rnn_relu"
    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    w_hr: Tensor | None

    def __call__(self, x: Tensor, state: tuple[Tensor, ...], steps: _Steps) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Rows (N, d) and initial states (B, H) -> rows (N, H) and final states (B, H)."""
        state = tuple(meet(s) if s.requires_grad else s for s in state)
        if self.w_hr is not None:
            return self._loop(x, state, steps)
        z = F.linear(x, self.w_ih, self.b_ih)
        if not z.requires_grad and torch.is_grad_enabled():
            z = z.requires_grad_()
        w_hh, b_hh = bare(self.w_hh), None if self.b_hh is None else bare(self.b_hh)
        if twice(z):
            run = self._stepwise
        elif is_traced(z) and steps.uniform:
            run = self._as_one_op
        else:
            run = self._fused if z.is_cuda else self._scan
        out, final, kept = run(z, w_hh, b_hh, state, steps)
        use_at(z, gru_hidden if self.kind == "gru" else F.linear, kept[0], self.w_hh, self.b_hh, *kept[1:])
        return out, final

    def _fused(self, z: Tensor, w_hh: Tensor, b_hh: Tensor | None, state: tuple[Tensor, ...], steps: _Steps) -> _Run:
        with torch._C.DisableTorchFunction(), warnings.catch_warnings():
            # cuDNN packs the identity and the weights together at every call: known, and small.
            warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous")
            eye = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device)
            weights = [eye, w_hh.to(z.dtype)]
            biases = b_hh is not None
            if b_hh is not None:
                weights += [torch.zeros_like(eye[0]), b_hh.to(z.dtype)]
            states = [s.to(z.dtype).unsqueeze(0).contiguous() for s in state]
            hx = states if self.kind == "lstm" else states[0]
            op = getattr(torch, self.kind)
            if steps.uniform:
                z = z.view(len(steps.sizes), steps.sizes[0], -1)
                out, *final = op(z, hx, weights, biases, 1, 0.0, True, False, False)
                out = out.flatten(0, 1)
            else:
                sizes = torch.tensor(steps.sizes)
                out, *final = op(z, sizes, hx, weights, biases, 1, 0.0, True, False)
            kept = self._before(z.detach().view(len(out), -1), states[0], out.detach(), steps)
            return out, tuple(s.squeeze(0) for s in final), kept

    def _as_one_op(
        self, z: Tensor, w_hh: Tensor, b_hh: Tensor | None, state: tuple[Tensor, ...], steps: _Steps
    ) -> _Run:
        with torch._C.DisableTorchFunction(), torch.autocast(z.device.type, enabled=False):
            # On a CPU sixteen bits are too few for states that are added up over the steps.
            given, dtype = z.dtype, z.dtype if z.is_cuda else torch.promote_types(z.dtype, torch.float32)
            z, states = z.to(dtype), [s.to(dtype) for s in state]
            weights = w_hh.detach().to(dtype), None if b_hh is None else b_hh.detach().to(dtype)
            out, final = recurrence(z, *weights, states, self.kind, len(steps.sizes))
            kept = self._before(z.detach(), states[0][None], out.detach(), steps)
            return out.to(given), tuple(s.to(given) for s in final), tuple(t.to(given) for t in kept)

    def _before(self, z: Tensor, state: Tensor, out: Tensor, steps: _Steps) -> tuple[Tensor, ...]:
        """The hidden state before each row, and a GRU's reset gates."""
        previous = scan.before(state.detach().squeeze(0), out, steps.sizes)
        if self.kind != "gru":
            return (previous,)
        H = previous.shape[1]
        w_hr, b_hr = (None if t is None else t[:H].detach().to(z.dtype) for t in (self.w_hh, self.b_hh))
        assert w_hr is not None
        return previous, torch.sigmoid(z[:, :H] + F.linear(previous, w_hr, b_hr))

    def _scan(self, z: Tensor, w_hh: Tensor, b_hh: Tensor | None, state: tuple[Tensor, ...], steps: _Steps) -> _Run:
        with torch._C.DisableTorchFunction(), torch.autocast(z.device.type, enabled=False):
            # Sixteen bits are too few for states that are added up over the steps.
            given, dtype = z.dtype, torch.promote_types(z.dtype, torch.float32)
            z, states = z.to(dtype), [s.to(dtype) for s in state]
            weights = w_hh.to(dtype), None if b_hh is None else b_hh.to(dtype)
            if self.kind == "lstm":
                found = scan.LSTM.apply(z, *weights, *states, steps.sizes)
            elif self.kind == "gru":
                found = scan.GRU.apply(z, *weights, *states, steps.sizes)
            else:
                found = scan.RNN.apply(z, *weights, *states, steps.sizes, self.kind == "rnn_relu")
            out, *rest = (t.to(given) for t in found)
            return out, tuple(rest[: len(state)]), tuple(rest[len(state) :])

    def _stepwise(self, z: Tensor, w_hh: Tensor, b_hh: Tensor | None, state: tuple[Tensor, ...], steps: _Steps) -> _Run:
        """A scan by ordinary ops, whose backward can be differentiated."""
        with torch._C.DisableTorchFunction(), torch.autocast(z.device.type, enabled=False):
            given, dtype = z.dtype, torch.promote_types(z.dtype, torch.float32)
            now = tuple(s.to(dtype) for s in state)
            first = now[0]
            weights = w_hh.to(dtype), None if b_hh is None else b_hh.to(dtype)
            outs, resets, done = [], [], []
            for gates in z.to(dtype).split(steps.sizes):
                n = len(gates)
                if n < len(now[0]):
                    done.append([s[n:] for s in now])
                    now = tuple(s[:n] for s in now)
                now, reset = self._step(gates, F.linear(now[0], *weights), now)
                outs.append(now[0])
                resets.extend(reset)
            done.append(now)
            rows = torch.cat(outs)
            kept = [scan.before(first, rows, steps.sizes), *([torch.cat(resets)] if resets else [])]
            final = (torch.cat(ended) for ended in zip(*reversed(done), strict=True))
            return rows.to(given), tuple(s.to(given) for s in final), tuple(t.to(given) for t in kept)

    def _step(
        self, gates: Tensor, hidden: Tensor, state: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The next states, and a GRU's reset gates."""
        if self.kind == "lstm":
            return _lstm_gates(gates + hidden, state[1]), ()
        if self.kind == "gru":
            h, reset = _gru_gates(gates, hidden, state[0])
            return (h,), (reset,)
        return ((gates + hidden).relu() if self.kind == "rnn_relu" else (gates + hidden).tanh(),), ()

    def _loop(self, x: Tensor, state: tuple[Tensor, ...], steps: _Steps) -> tuple[Tensor, tuple[Tensor, ...]]:
        """A step at a time, for an LSTM with projections."""
        assert self.w_hr is not None
        z = F.linear(x, self.w_ih, self.b_ih)
        h, c = state
        outs, done = [], []
        start = 0
        for n in steps.sizes:
            if n < len(h):
                done.append((h[n:], c[n:]))
                h, c = h[:n], c[:n]
            gates = z[start : start + n] + F.linear(h, self.w_hh, self.b_hh)
            raw, c = _lstm_gates(gates, c)
            h = F.linear(raw, self.w_hr)
            outs.append(h)
            start += n
        done.append((h, c))
        hs, cs = zip(*reversed(done), strict=True)
        return torch.cat(outs), (torch.cat(hs), torch.cat(cs))


def _lstm_gates(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = gates.chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru_gates(x: Tensor, hidden: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """The next state, and the reset gates."""
    a, b = x.chunk(3, -1), hidden.chunk(3, -1)
    reset, update = (a[0] + b[0]).sigmoid(), (a[1] + b[1]).sigmoid()
    candidate = (a[2] + reset * b[2]).tanh()
    return candidate + update * (h - candidate), reset


def _run(kind: str, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Any of the four recurrent ops, in its padded or its packed form."""
    names = ["hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional"]
    packed = (len(args) > 3 and isinstance(args[3], (list, tuple))) or "batch_sizes" in kwargs
    names = ["data", "batch_sizes", *names] if packed else ["input", *names, "batch_first"]
    call: dict[str, Any] = dict(zip(names, args, strict=False)) | kwargs
    if packed:
        x, sizes = call["data"], call["batch_sizes"].tolist()
        out, final = _layers(kind, call, x, _Steps(tuple(sizes)))
        return out, *final
    x = call["input"].transpose(0, 1) if call["batch_first"] else call["input"]
    T, B = x.shape[:2]
    out, final = _layers(kind, call, x.flatten(0, 1), _Steps((B,) * T))
    out = out.view(T, B, out.shape[-1])
    return out.transpose(0, 1) if call["batch_first"] else out, *final


def _layers(kind: str, call: dict, x: Tensor, steps: _Steps) -> tuple[Tensor, tuple[Tensor, ...]]:
    hx = call["hx"] if kind == "lstm" else (call["hx"],)
    directions = 2 if call["bidirectional"] else 1
    params = list(call["params"])
    per = len(params) // (call["num_layers"] * directions)
    finals: list[tuple[Tensor, ...]] = []
    for layer in range(call["num_layers"]):
        outs = []
        for direction in range(directions):
            k = layer * directions + direction
            one = _layer(kind, params[k * per : (k + 1) * per], call["has_biases"])
            state = tuple(s[k] for s in hx)
            out, final = one(steps.reversed(x) if direction else x, state, steps)
            outs.append(steps.reversed(out) if direction else out)
            finals.append(final)
        x = torch.cat(outs, -1) if directions == 2 else outs[0]
        if call["dropout"] and call["train"] and layer + 1 < call["num_layers"]:
            shape = (len(steps.sizes), steps.sizes[0], -1) if steps.uniform else x.shape
            x = F.dropout(x.view(shape), call["dropout"], True).view(x.shape)
    return x, tuple(torch.stack(states) for states in zip(*finals, strict=True))


def _layer(kind: str, params: list[Tensor], has_biases: bool) -> _Layer:
    w_ih, w_hh, *rest = params
    b_ih, b_hh = (rest.pop(0), rest.pop(0)) if has_biases else (None, None)
    return _Layer(kind, w_ih, w_hh, b_ih, b_hh, rest[0] if rest else None)


def _register(kind: str) -> None:
    @composite(getattr(torch, kind))
    def recurrent(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        return _run(kind, *args, **kwargs)


for _kind in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    _register(_kind)


@composite(torch.lstm_cell)
def _lstm_cell(
    input: Tensor, hx: Sequence[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    h, c = hx
    return _lstm_gates(F.linear(input, w_ih, b_ih) + F.linear(h, w_hh, b_hh), c)


@composite(torch.gru_cell)
def _gru_cell(
    input: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    return _gru_gates(F.linear(input, w_ih, b_ih), F.linear(hx, w_hh, b_hh), hx)[0]


def _register_cell(op: Callable, nonlinearity: Callable[[Tensor], Tensor]) -> None:
    @composite(op)
    def cell(
        input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return nonlinearity(F.linear(input, w_ih, b_ih) + F.linear(hx, w_hh, b_hh))


_register_cell(torch.rnn_tanh_cell, torch.tanh)
_register_cell(torch.rnn_relu_cell, torch.relu)
