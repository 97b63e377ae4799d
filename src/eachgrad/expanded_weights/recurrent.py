"""RNN, LSTM and GRU written with F.linear, a step at a time.

The samples lie along the second dimension from the end of everything: a padded sequence is (T, B, d) and
takes one row a step, packed data is (N, d) and takes n_t rows. Packed data is sorted by length, so a row
of `grad_sample` belongs to the sequence of that rank; `call_for_per_sample_grads`, which sees the whole
PackedSequence, puts the rows in the order of the sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from eachgrad.expanded_weights.helpers import unpack_expanded_weight_or_tensor
from eachgrad.expanded_weights.tensor import Decomposition, ExpandedWeight, expanded_weights_rnn_decomps

State = tuple[Tensor, ...]  # (h,), or (h, c) for an LSTM


@dataclass(frozen=True)
class _Layer:
    """The weights of one direction of one layer."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    w_hr: Tensor | None

    def hidden(self, h: Tensor) -> Tensor:
        return F.linear(h, self.w_hh, self.b_hh)


Cell = Callable[[_Layer, Tensor, State], State]  # weights, what the input adds to the gates, state before


def _elman(nonlinearity: Callable[[Tensor], Tensor]) -> Cell:
    def cell(layer: _Layer, z: Tensor, state: State) -> State:
        return (nonlinearity(z + layer.hidden(state[0])),)

    return cell


def _lstm(layer: _Layer, z: Tensor, state: State) -> State:
    h, c = state
    i, f, g, o = (z + layer.hidden(h)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return (h if layer.w_hr is None else F.linear(h, layer.w_hr)), c


def _gru(layer: _Layer, z: Tensor, state: State) -> State:
    (h,) = state
    x_reset, x_update, x_new = z.chunk(3, -1)
    h_reset, h_update, h_new = layer.hidden(h).chunk(3, -1)
    new = (x_new + (x_reset + h_reset).sigmoid() * h_new).tanh()
    return (new + (x_update + h_update).sigmoid() * (h - new),)


def _direction(cell: Cell, layer: _Layer, z: Sequence[Tensor], initial: State, reverse: bool) -> tuple[Tensor, State]:
    """One direction of one layer: what the input adds at each step -> all outputs, and the final state."""
    outputs: dict[int, Tensor] = {}
    ended: list[State] = []
    state = _rows(initial, 0, 0)
    for t in reversed(range(len(z))) if reverse else range(len(z)):
        n, before = z[t].shape[-2], state[0].shape[-2]
        if n < before:  # forwards the shortest sequences end first
            ended.append(_rows(state, n, before))
            state = _rows(state, 0, n)
        elif n > before:  # backwards they begin last
            state = _join([state, _rows(initial, before, n)])
        state = cell(layer, z[t], state)
        outputs[t] = state[0]
    return torch.cat([outputs[t] for t in range(len(z))]), _join([state, *reversed(ended)])


def _rows(state: State, start: int, end: int) -> State:
    return tuple(s[..., start:end, :] for s in state)


def _join(states: Sequence[State]) -> State:
    return tuple(torch.cat(parts, -2) for parts in zip(*states, strict=True))


def _layers(
    cell: Cell,
    x: Tensor,
    hx: Sequence[Tensor],
    layers: Sequence[_Layer],
    directions: int,
    dropout: float,
    at_once: list[int],
    steps: list[int],
) -> tuple[Tensor, State]:
    """All layers; `at_once` and `steps` say how x is cut for the input's products and for the recurrence."""
    finals: list[State] = []
    for first in range(0, len(layers), directions):
        if first and dropout:
            x = F.dropout(x, dropout)
        outputs = []
        for k in range(first, first + directions):
            layer = layers[k]
            # A packed state is (B, H), a padded one (1, B, H) like the row of a step.
            state = tuple(s[k] if x.ndim == 2 else s[k : k + 1] for s in hx)
            z = torch.cat([F.linear(rows, layer.w_ih, layer.b_ih) for rows in x.split(at_once)])
            output, final = _direction(cell, layer, z.split(steps), state, reverse=k > first)
            outputs.append(output)
            finals.append(tuple(s.reshape(s.shape[-2:]) for s in final))
        x = torch.cat(outputs, -1)
    return x, tuple(torch.stack(states) for states in zip(*finals, strict=True))


def _cut(params: Sequence[Tensor], has_biases: bool, count: int) -> list[_Layer]:
    for parameter in params:  # each is a weight of its own call: a mixture would go unnoticed there
        unpack_expanded_weight_or_tensor(parameter)
    per = len(params) // count
    layers = []
    for k in range(count):
        w_ih, w_hh, *rest = params[k * per : (k + 1) * per]
        b_ih, b_hh = (rest.pop(0), rest.pop(0)) if has_biases else (None, None)
        layers.append(_Layer(w_ih, w_hh, b_ih, b_hh, rest[0] if rest else None))
    return layers


def _decompositions(cell: Cell) -> tuple[Decomposition, Decomposition]:
    def padded(
        input: Tensor, hx: Tensor | Sequence[Tensor], params: Sequence[Tensor], has_biases: bool,
        num_layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        x = input.transpose(0, 1) if batch_first else input
        directions, states = 1 + bidirectional, [hx] if isinstance(hx, Tensor) else hx
        layers = _cut(params, has_biases, num_layers * directions)
        T = len(x)
        out, final = _layers(cell, x, states, layers, directions, dropout * train, [T], [1] * T)
        return out.transpose(0, 1) if batch_first else out, *final

    def packed(
        data: Tensor, batch_sizes: Tensor, hx: Tensor | Sequence[Tensor], params: Sequence[Tensor],
        has_biases: bool, num_layers: int, dropout: float, train: bool, bidirectional: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        sizes: list[int] = batch_sizes.tolist()
        for weight in params:
            if isinstance(weight, ExpandedWeight) and weight.batch_size != sizes[0]:
                raise RuntimeError(
                    "Expected ExpandedWeights to have batch size matching input but the weight has "
                    f"{weight.batch_size}, and the packed input has {sizes[0]} sequences."
                )
        directions, states = 1 + bidirectional, [hx] if isinstance(hx, Tensor) else hx
        layers = _cut(params, has_biases, num_layers * directions)
        out, final = _layers(cell, data, states, layers, directions, dropout * train, sizes, sizes)
        return out, *final

    return padded, packed


expanded_weights_rnn_decomps.update(
    {
        torch.rnn_tanh: _decompositions(_elman(torch.tanh)),
        torch.rnn_relu: _decompositions(_elman(torch.relu)),
        torch.lstm: _decompositions(_lstm),
        torch.gru: _decompositions(_gru),
    }
)
