"""Random numbers: no batch of one draws them as the batch does."""

from __future__ import annotations

from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .base import SEQUENCE, B, Case, T, batch, d, linear, made, net, reals, weight
from .recurrent import KINDS, UNSORTED, kind_options, packed, recurrent

# fmt: off
RANDOM = [
    Case("dropout", ("dropout",), lambda: nn.Sequential(nn.Linear(d, 8), nn.Dropout(0.5), nn.Linear(8, 2)), SEQUENCE),
    Case(
        "dropout of an encoder", ("dropout",), lambda: nn.TransformerEncoderLayer(4, 2, 6, 0.4, batch_first=True),
        batch(reals(B, T, 4)),
    ),
    Case(
        "dropout of a position table", ("dropout", "positions"),
        net(lambda m, x: m.fc(x + F.dropout(m.w, 0.5)), w=weight(T, d), fc=linear(d, 2)), SEQUENCE,
    ),
    Case(
        "dropout inside a checkpoint", ("dropout", "checkpointing"),
        net(
            lambda m, x: checkpoint(lambda h: m.b(F.dropout(h)), m.a(x), use_reentrant=False), a=linear(d, 8),
            b=linear(8, 2),
        ),
        SEQUENCE,
    ),
    *(
        Case(
            f"dropout between layers of {name}", ("dropout",),
            recurrent(kind, d, 4, num_layers=3, dropout=0.5, bidirectional=True, **kind_options(name)), SEQUENCE,
        )
        for name, kind in KINDS.items()
    ),
    Case(
        "dropout between layers of a packed lstm", ("dropout", "packed"),
        made(nn.LSTM, d, 4, 2, batch_first=True, dropout=0.5), batch(reals(B, T, d), UNSORTED),
        lambda m, x, n: packed(m, x, n, False),
    ),
]
# fmt: on
