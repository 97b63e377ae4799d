"""Recurrent nets."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .base import (
    SEQUENCE,
    B,
    Case,
    T,
    batch,
    cut_second,
    d,
    fixed,
    linear,
    made,
    net,
    reals,
    score,
    scored_second,
    weight,
)


def outputs(module: nn.Module, x: Tensor, *state: Tensor) -> Tensor:
    """The output and the final state of a recurrent module side by side, (B, T + states, H), or time first."""
    out, final = module(x, *state)
    finals = final if isinstance(final, tuple) else (final,)
    flat = [f.transpose(0, 1) if module.batch_first else f for f in finals]
    dim = 1 if module.batch_first else 0
    width = max(t.shape[-1] for t in [out, *flat])
    return torch.cat([F.pad(t, (0, width - t.shape[-1])) for t in [out, *flat]], dim)


def recurrent(kind: type[nn.Module], *args: object, **options: object) -> Callable[[], nn.Module]:
    """A recurrent module, batch first, with its final state in the output."""
    return net(
        lambda m, x, *state: outputs(m.rnn, x, *state),
        rnn=lambda: kind(*args, **({"batch_first": True} | options)),
    )


def packed(model: nn.Module, x: Tensor, lengths: Tensor, is_sorted: bool, *state: object) -> Tensor:
    sequence = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=is_sorted)
    out, final = model(sequence, *state)
    finals = torch.cat(final if isinstance(final, tuple) else (final,), -1)
    padded, _ = pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])
    return score(padded) + score(finals, 1)


def packed_inside(m: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    sequence = pack_padded_sequence(m.fc(x), lengths, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(m.rnn(sequence)[0], batch_first=True, total_length=x.shape[1])[0]


def stepped(m: nn.Module, x: Tensor) -> Tensor:
    """A cell called once per step, from a state of zeros."""
    zeros = x.new_zeros(len(x), m.cell.hidden_size)
    is_lstm = isinstance(m.cell, nn.LSTMCell)
    state = (zeros, zeros) if is_lstm else zeros
    outs = []
    for step in x.unbind(1):
        state = m.cell(step, state)
        outs.append(state[0] if is_lstm else state)
    return torch.stack(outs, 1)


SORTED, UNSORTED = fixed(4, 3, 1), fixed(2, 4, 3)
KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN, "rnn_relu": nn.RNN}


def kind_options(name: str) -> dict[str, object]:
    return {"nonlinearity": name[4:]} if name.startswith("rnn") else {}


# fmt: off
RECURRENT = [
    *(Case(name, (), recurrent(kind, d, 2, **kind_options(name)), SEQUENCE) for name, kind in KINDS.items()),
    *(
        Case(
            f"{name} two layers bidirectional", ("multi-layer", "bidirectional"),
            recurrent(kind, d, 2, num_layers=2, bidirectional=True, **kind_options(name)), SEQUENCE,
        )
        for name, kind in KINDS.items()
    ),
    *(
        Case(f"{name} without bias", (), recurrent(kind, d, 2, bias=False, **kind_options(name)), SEQUENCE)
        for name, kind in KINDS.items()
    ),
    *(
        Case(
            f"{name} time first T = B", ("time first", "T = B"),
            recurrent(kind, d, 2, batch_first=False, **kind_options(name)), batch(reals(B, B, d)), scored_second, 1,
            cut_second,
        )
        for name, kind in KINDS.items()
    ),
    *(
        Case(
            f"{name} packed sorted", ("packed", "sorted lengths"),
            made(kind, d, 2, batch_first=True, **kind_options(name)), batch(reals(B, T, d), SORTED),
            lambda m, x, n: packed(m, x, n, True),
        )
        for name, kind in KINDS.items()
    ),
    *(
        Case(
            f"{name} packed unsorted two layers bidirectional", ("packed", "unsorted lengths"),
            made(kind, d, 2, 2, batch_first=True, bidirectional=True, **kind_options(name)),
            batch(reals(B, T, d), UNSORTED), lambda m, x, n: packed(m, x, n, False),
        )
        for name, kind in KINDS.items()
    ),
    Case(
        "lstm packed inside unsorted", ("packed", "unsorted lengths"),
        net(packed_inside, fc=linear(d, 4), rnn=lambda: nn.LSTM(4, 2, batch_first=True)),
        batch(reals(B, T, d), UNSORTED),
    ),
    Case(
        "lstm packed inside T = B", ("packed", "T = B"),
        net(packed_inside, fc=linear(d, 4), rnn=lambda: nn.LSTM(4, 2, batch_first=True)),
        batch(reals(B, B, d), fixed(1, 3, 2)),
    ),
    Case(
        "lstm packed unsorted with given state", ("packed", "unsorted lengths", "given state"),
        made(nn.LSTM, d, 2, batch_first=True), batch(reals(B, T, d), UNSORTED, reals(B, 2), reals(B, 2)),
        lambda m, x, n, h, c: packed(m, x, n, False, (h[None], c[None])),
    ),
    Case(
        "gru packed unsorted with learned state", ("packed", "unsorted lengths", "learned state"),
        net(lambda m, x, h: m.rnn(x, h), rnn=made(nn.GRU, d, 2, batch_first=True), h=weight(1, 1, 2)),
        batch(reals(B, T, d), UNSORTED), lambda m, x, n: packed(m, x, n, False, m.h.expand(-1, len(x), -1)),
    ),
    Case("lstm proj_size", ("proj_size",), recurrent(nn.LSTM, d, 4, proj_size=2), SEQUENCE),
    Case(
        "lstm proj_size two layers bidirectional", ("proj_size", "multi-layer", "bidirectional"),
        recurrent(nn.LSTM, d, 4, num_layers=2, bidirectional=True, proj_size=2), SEQUENCE,
    ),
    Case(
        "lstm proj_size packed unsorted", ("proj_size", "packed", "unsorted lengths"),
        lambda: nn.LSTM(d, 4, batch_first=True, proj_size=2), batch(reals(B, T, d), UNSORTED),
        lambda m, x, n: packed(m, x, n, False),
    ),
    Case("lstm T = 1", ("T = 1",), recurrent(nn.LSTM, d, 2), batch(reals(B, 1, d))),
    Case("lstm B = 1", ("B = 1",), recurrent(nn.LSTM, d, 2, num_layers=2), batch(reals(1, T, d))),
    Case("gru all sizes = B", ("T = B", "d = B"), recurrent(nn.GRU, B, B), batch(reals(B, B, B))),
    Case(
        "gru given state", ("given state", "two inputs"), recurrent(nn.GRU, d, 2),
        batch(reals(B, T, d), reals(1, B, 2)),
        cut=lambda batch, i: (batch[0].narrow(0, i, 1), batch[1].narrow(1, i, 1)),
    ),
    Case(
        "lstm given state", ("given state", "two inputs"),
        net(lambda m, x, h, c: outputs(m.rnn, x, (h, c)), rnn=lambda: nn.LSTM(d, 2, batch_first=True)),
        batch(reals(B, T, d), reals(1, B, 2), reals(1, B, 2)),
        cut=lambda batch, i: (batch[0].narrow(0, i, 1), batch[1].narrow(1, i, 1), batch[2].narrow(1, i, 1)),
    ),
    Case(
        "lstm learned state", ("learned state", "raw parameter"),
        net(
            lambda m, x: outputs(m.rnn, x, (m.h.expand(-1, len(x), -1), m.c.expand(-1, len(x), -1))),
            rnn=lambda: nn.LSTM(d, 2, num_layers=2, batch_first=True), h=weight(2, 1, 2), c=weight(2, 1, 2),
        ),
        SEQUENCE,
    ),
    Case(
        "gru state computed from the input", ("given state",),
        net(
            lambda m, x: outputs(m.rnn, x, m.first(x.mean(1))[None].tanh()),
            rnn=lambda: nn.GRU(d, 2, batch_first=True), first=linear(d, 2),
        ),
        SEQUENCE,
    ),
    Case(
        "rnn learned state repeated", ("learned state", "T = B"),
        net(
            lambda m, x: outputs(m.rnn, x, m.h.repeat(1, len(x), 1)), rnn=lambda: nn.RNN(d, 2, batch_first=True),
            h=weight(1, 1, 2),
        ),
        batch(reals(B, B, d)),
    ),
    *(
        Case(f"{kind.__name__}", ("module used twice",), net(stepped, cell=made(kind, d, 2)), SEQUENCE)
        for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell)
    ),
    Case(
        "LSTMCell without bias T = B", ("module used twice", "T = B"),
        net(stepped, cell=lambda: nn.LSTMCell(d, 2, bias=False)), batch(reals(B, B, d)),
    ),
    Case(
        "encoder and decoder lstm", ("given state", "module used twice"),
        net(
            lambda m, x: m.fc(m.decode(x.flip(1), m.encode(x)[1])[0]), encode=lambda: nn.LSTM(d, 2, batch_first=True),
            decode=lambda: nn.LSTM(d, 2, batch_first=True), fc=linear(2, d),
        ),
        SEQUENCE,
    ),
    Case(
        "lstm over folded windows", ("folded",),
        net(
            lambda m, x: m.fc(m.rnn(x.flatten(0, 1))[0][:, -1]).view(len(x), -1),
            rnn=lambda: nn.LSTM(d, 2, batch_first=True), fc=linear(2, 2),
        ),
        batch(reals(B, 2, T, d)),
    ),
]
# fmt: on
