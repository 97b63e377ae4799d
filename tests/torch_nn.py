"""Every class of torch.nn that has parameters, as data, and the table of docs/coverage.md that is made from it.

`python tests/torch_nn.py --write` writes the table; the test says when it is stale.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Generator, Tensor, nn

from cases import B, Case, Net, T, batch, cut_first, cut_second, d, ids, net, reals, score, scored, scored_second
from cases.base import SEQUENCE, Batch, Maker, fixed, image, linear, made
from cases.norm import running
from cases.recurrent import SORTED, UNSORTED, outputs, packed, stepped

PAGE = Path(__file__).resolve().parents[1] / "docs" / "coverage.md"
BEGIN, END = "<!-- torch.nn: begin -->", "<!-- torch.nn: end -->"
VERSION = torch.__version__.split("+")[0]
TRAIN, EVAL = "train", "eval"
S, E, HEADS = 5, 6, 2  # a second sequence's length; the width and the heads of attention
ONE_NUMBER = "a loss that is one number is followed from the model's outputs"
MIXES = "mixes the samples of a batch"


@dataclass(frozen=True)
class Entry:
    """A class of torch.nn with some of its options, and what comes of it in each mode."""

    kind: str
    options: str
    make: Callable[[], nn.Module]
    data: Callable[[Generator], Batch]
    losses: Callable[..., Tensor] = scored
    batch_dim: int = 0
    random: bool = False  # draws random numbers in training mode
    refused: tuple[str, ...] = ()  # the modes in which it is refused
    reason: str = ""  # what the refusal says, word for word
    reduction: str | None = None  # where the loss is one number

    def verdict(self, mode: str) -> str:
        if mode in self.refused:
            return f"refused: {self.reason}"
        return "exact, same draws" if self.random and mode == TRAIN else "exact"


@dataclass(frozen=True)
class Trial:
    """An entry in one mode."""

    entry: Entry
    mode: str

    def case(self) -> Case:
        e = self.entry
        cut = cut_second if e.batch_dim else cut_first
        make = lambda: e.make().train(self.mode == TRAIN)  # noqa: E731
        return Case(str(self), (), make, e.data, e.losses, e.batch_dim, cut)

    def __str__(self) -> str:
        return f"{self.entry.kind}: {self.entry.options}, {self.mode}".replace(" ", "_").replace("`", "")


SIMPLE = (int, float, str, tuple, type(None))


def described(options: dict[str, object], note: str = "") -> str:
    """Options as they are written in a call, then the note."""
    words = [f"`{name}={value!r}`" if isinstance(value, SIMPLE) else f"`{name}=...`" for name, value in options.items()]
    return " ".join([*words, note]).strip() or "defaults"


def prepared(module: nn.Module) -> nn.Module:
    """Running statistics other than those a norm starts with."""
    for norm in module.modules():
        if getattr(norm, "running_mean", None) is not None:
            running(norm)
    return module


def entry(
    kind: str, *args: object, data: Callable[[Generator], Batch], note: str = "", hidden: dict[str, object] | None = None,
    body: Callable[..., object] | None = None, losses: Callable[..., Tensor] = scored, batch_dim: int = 0,
    refused: tuple[str, ...] = (), reason: str = "", **options: object,
) -> Entry:  # fmt: skip
    """`torch.nn.kind(*args, **options)`, called by `body(module, *batch)` if there is one; `hidden` are options too."""

    def make() -> nn.Module:
        module = prepared(getattr(nn, kind)(*args, **((hidden or {}) | options)))
        return module if body is None else Net(lambda m, *inputs: body(m.module, *inputs), module=module)

    random, reduction = bool(options.get("dropout")), options.get("reduction")
    return Entry(kind, described(options, note), make, data, losses, batch_dim, random, refused, reason, reduction)


def lazy(kind: str, *args: object, data: Callable[[Generator], Batch], **rest) -> Entry:
    """A lazy class after its first forward, which has made its parameters."""

    def make() -> nn.Module:
        module = getattr(nn, kind)(*args)
        module(data(Generator())[0].float())
        return prepared(module)

    return Entry(kind, "once initialised", make, data, **rest)


def flat(*outs: Tensor) -> Tensor:
    """Several outputs (B, ...) as one, (B, n)."""
    return torch.cat([out.flatten(1) for out in outs], 1)


# fmt: off
LINEAR = [
    *(
        entry("Linear", d, 2, data=batch(reals(*shape)), note=f"input of rank {len(shape)}")
        for shape in ((B, d), (B, T, d), (B, 2, T, d))
    ),
    entry("Linear", d, 2, data=SEQUENCE, bias=False),
    entry("Linear", d, 2, data=batch(reals(T, B, d)), note="time first", batch_dim=1, losses=scored_second),
    entry("Bilinear", d, 4, 3, data=batch(reals(B, d), reals(B, 4))),
    entry("Bilinear", d, 4, 3, data=batch(reals(B, T, d), reals(B, T, 4)), note="input of rank 3"),
    entry("Bilinear", d, 4, 3, data=batch(reals(B, d), reals(B, 4)), bias=False),
    entry("Bilinear", d, d, 3, data=batch(reals(B, d)), body=lambda m, x: m(x, x), note="of one input twice"),
    entry("PReLU", data=batch(reals(B, T, d))),
    entry("PReLU", 4, data=image(3, 2), note="a number per channel"),
    entry("PReLU", d, data=batch(reals(B, d)), note="a number per channel, input of rank 2"),
]

CONTAINERS = [
    Entry("Sequential", "three layers", lambda: nn.Sequential(nn.Linear(d, 4), nn.Tanh(), nn.Linear(4, 2)), SEQUENCE),
    Entry("Sequential", "one layer twice", lambda: nn.Sequential(*[nn.Linear(d, d)] * 2), SEQUENCE),
    Entry(
        "ModuleList", "called in a loop",
        net(
            lambda m, x: sum(layer(x).tanh() for layer in m.layers),
            layers=lambda: nn.ModuleList(nn.Linear(d, 2) for _ in range(3)),
        ),
        SEQUENCE,
    ),
    Entry(
        "ModuleDict", "called by name",
        net(
            lambda m, x: m.layers["b"](m.layers["a"](x).tanh()),
            layers=lambda: nn.ModuleDict({"a": nn.Linear(d, 4), "b": nn.Linear(4, 2), "unused": nn.Linear(2, 2)}),
        ),
        SEQUENCE,
    ),
    Entry(
        "ParameterList", "product and sum",
        net(
            lambda m, x: (x * m.ws[0] + m.ws[1]) @ m.ws[2],
            ws=lambda: nn.ParameterList([torch.randn(d), torch.randn(T, d), torch.randn(d, 2)]),
        ),
        SEQUENCE,
    ),
    Entry(
        "ParameterDict", "product and sum",
        net(
            lambda m, x: x @ m.ws["w"] + m.ws["b"],
            ws=lambda: nn.ParameterDict({"w": torch.randn(d, 2), "b": torch.randn(2)}),
        ),
        SEQUENCE,
    ),
    Entry("DataParallel", "on the CPU", lambda: nn.DataParallel(nn.Linear(d, 2)), SEQUENCE),
]

SPACE = {1: (6,), 2: (5, 4), 3: (3, 4, 3)}
UNEVEN = {
    1: {"stride": 2, "padding": 2, "dilation": 2}, 2: {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2)},
    3: {"stride": (1, 2, 1), "padding": (1, 0, 2), "dilation": (2, 1, 1)},
}
OUTPUT_PADDING = {1: 1, 2: (1, 0), 3: (0, 1, 1)}

CONVOLUTION = [
    e for n, space in SPACE.items() for e in [
        entry(f"Conv{n}d", 4, 3, 2, data=image(*space)),
        entry(f"Conv{n}d", 4, 3, 2, data=image(*space), bias=False),
        entry(f"Conv{n}d", 4, 3, 2, data=image(*space), **UNEVEN[n]),
        entry(f"Conv{n}d", 4, 6, 2, data=image(*space), groups=2),
        entry(f"Conv{n}d", 4, 8, 2, data=image(*space), groups=4, note="depthwise"),
        entry(f"Conv{n}d", 4, 3, 3, data=image(*space), padding="same", dilation=2),
        entry(f"Conv{n}d", 4, 3, 3, data=image(*space), padding="valid"),
        *(
            entry(f"Conv{n}d", 4, 4, 3, data=image(*space), padding=1, groups=2, padding_mode=mode)
            for mode in ("reflect", "replicate", "circular")
        ),
        entry(f"ConvTranspose{n}d", 4, 3, 2, data=image(*space)),
        entry(f"ConvTranspose{n}d", 4, 3, 2, data=image(*space), bias=False),
        entry(f"ConvTranspose{n}d", 4, 3, 3, data=image(*space), stride=2, padding=1, output_padding=OUTPUT_PADDING[n]),
        entry(f"ConvTranspose{n}d", 4, 6, 2, data=image(*space), groups=2, dilation=2),
        entry(
            f"ConvTranspose{n}d", 4, 3, 2, data=image(*space), stride=2, note="with `output_size`",
            body=lambda m, x: m(x, output_size=[2 * size + 1 for size in x.shape[2:]]),
        ),
        lazy(f"LazyConv{n}d", 3, 2, data=image(*space)),
        lazy(f"LazyConvTranspose{n}d", 3, 2, data=image(*space)),
    ]
] + [lazy("LazyLinear", 2, data=SEQUENCE)]


def bags(m: nn.Module, i: Tensor, n: Tensor, *weights: Tensor) -> Tensor:
    """Bags of the first n ids of each row, told apart by offsets."""
    keep = torch.arange(i.shape[1]) < n[:, None]
    ends = nn.functional.pad(n.cumsum(0), (1, 0))
    return m(i[keep], ends if m.include_last_offset else ends[:-1], *(w[keep] for w in weights))


def weighted_bags(m: nn.Module, i: Tensor, w: Tensor) -> Tensor:
    return m(i, per_sample_weights=w)


REPEATED = batch(ids(3, B, T))  # few ids: every row has one twice
EMBEDDING = [
    entry("Embedding", 7, d, data=batch(ids(7, B)), note="ids (B,)"),
    entry("Embedding", 3, d, data=REPEATED, note="repeated ids (B, T)"),
    entry("Embedding", 3, d, data=batch(ids(3, B, T, 2)), note="ids of rank 3"),
    entry("Embedding", 3, d, data=REPEATED, padding_idx=1),
    entry("Embedding", 3, d, data=REPEATED, padding_idx=-1),
    entry("Embedding", 3, d, data=REPEATED, max_norm=0.7),
    entry("Embedding", 3, d, data=REPEATED, max_norm=0.7, norm_type=1.0),
    entry("Embedding", 3, d, data=REPEATED, scale_grad_by_freq=True),
    entry("Embedding", 3, d, data=REPEATED, sparse=True),
    Entry(
        "Embedding", "`from_pretrained(freeze=False)`",
        lambda: nn.Embedding.from_pretrained(torch.randn(3, d), freeze=False), REPEATED,
    ),
    *(
        e for mode in ("sum", "mean", "max") for e in [
            entry("EmbeddingBag", 3, d, data=REPEATED, mode=mode, note="repeated ids (B, T)"),
            entry("EmbeddingBag", 3, d, data=REPEATED, mode=mode, padding_idx=1),
            entry("EmbeddingBag", 3, d, data=batch(ids(3, B, T), fixed(2, 4, 1)), body=bags, mode=mode, note="offsets"),
            entry(
                "EmbeddingBag", 3, d, data=batch(ids(3, B, T), fixed(2, 0, 3)), body=bags, mode=mode,
                note="offsets, an empty bag",
            ),
            entry(
                "EmbeddingBag", 3, d, data=batch(ids(3, B, T), fixed(2, 4, 1)), body=bags, mode=mode,
                include_last_offset=True, padding_idx=0, note="offsets",
            ),
            entry("EmbeddingBag", 3, d, data=REPEATED, mode=mode, max_norm=0.7, norm_type=1.0),
        ]
    ),
    # On the CPU PyTorch divides by the counts of other ids: ids 0, 0, 1 give row 1 half its gradient.
    *(
        entry(
            "EmbeddingBag", 3, d, data=REPEATED, mode=mode, scale_grad_by_freq=True, refused=(TRAIN, EVAL),
            reason="scale_grad_by_freq",
        )
        for mode in ("sum", "mean")
    ),
    *(entry("EmbeddingBag", 3, d, data=REPEATED, mode=mode, sparse=True) for mode in ("sum", "mean")),
    entry(
        "EmbeddingBag", 3, d, data=batch(ids(3, B, T), reals(B, T)), body=weighted_bags, mode="sum",
        note="`per_sample_weights`",
    ),
    entry(
        "EmbeddingBag", 3, d, data=batch(ids(3, B, T), reals(B, T)), body=weighted_bags, mode="sum", padding_idx=1,
        note="`per_sample_weights`",
    ),
    entry(
        "EmbeddingBag", 3, d, data=batch(ids(3, B, T), fixed(2, 4, 1), reals(B, T)), body=bags, mode="sum",
        include_last_offset=True, note="offsets, `per_sample_weights`",
    ),
    Entry(
        "EmbeddingBag", "`per_sample_weights` that are learned",
        net(
            lambda m, i: m.bag(i, per_sample_weights=m.scale(i).squeeze(-1)), scale=made(nn.Embedding, 3, 1),
            bag=made(nn.EmbeddingBag, 3, d, mode="sum"),
        ),
        REPEATED,
    ),
]


def sequence(m: nn.Module, x: Tensor, *state: Tensor) -> Tensor:
    """The output and the final state, from a state (B, layers, H) if there is one."""
    first = tuple(s.transpose(0, 1).contiguous() for s in state)
    return outputs(m, x, *([first if len(first) > 1 else first[0]] if first else []))


def by_lengths(is_sorted: bool) -> Callable[..., Tensor]:
    return lambda m, x, n: packed(m, x, n, is_sorted)


def cell(m: nn.Module, x: Tensor) -> Tensor:
    return stepped(Net(lambda: None, cell=m), x)


def cell_state(m: nn.Module, x: Tensor, *state: Tensor) -> Tensor:
    """One step from a given state; from none, the cell makes zeros of its own."""
    out = m(x, *([state if len(state) > 1 else state[0]] if state else []))
    return torch.cat(out, 1) if isinstance(out, tuple) else out


def recurrent(kind: str, size: int, **rest) -> Entry:
    return entry(kind, d, size, hidden={"batch_first": True}, **rest)


RECURRENT_KINDS = [("RNN", {}), ("RNN", {"nonlinearity": "relu"}), ("LSTM", {}), ("GRU", {})]
RECURRENT = [
    e for kind, kw in RECURRENT_KINDS for e in [
        recurrent(kind, 2, data=SEQUENCE, body=sequence, **kw),
        recurrent(
            kind, 2, data=batch(reals(T, B, d)), body=sequence, **kw, batch_first=False, note="time first", batch_dim=1,
            losses=scored_second,
        ),
        recurrent(kind, 2, data=SEQUENCE, body=sequence, **kw, bias=False),
        recurrent(kind, 2, data=SEQUENCE, body=sequence, **kw, num_layers=2, bidirectional=True),
        recurrent(
            kind, 2, data=SEQUENCE, body=sequence, **kw, num_layers=2, bidirectional=True, dropout=0.4,
        ),
        recurrent(
            kind, 2, data=batch(reals(B, T, d), *[reals(B, 4, 2)] * (1 + (kind == "LSTM"))), body=sequence, **kw,
            num_layers=2, bidirectional=True, note="initial state",
        ),
        recurrent(kind, 2, data=batch(reals(B, T, d), SORTED), losses=by_lengths(True), **kw, note="packed, sorted"),
        recurrent(
            kind, 2, data=batch(reals(B, T, d), UNSORTED), losses=by_lengths(False), **kw, num_layers=2,
            bidirectional=True, note="packed, unsorted",
        ),
        entry(f"{kind}Cell", d, 2, data=SEQUENCE, body=cell, **kw, note="once per step"),
        entry(f"{kind}Cell", d, 2, data=batch(reals(B, d)), body=cell_state, **kw, note="no state"),
        entry(
            f"{kind}Cell", d, 2, data=batch(reals(B, d), *[reals(B, 2)] * (1 + (kind == "LSTM"))), body=cell_state,
            **kw, bias=False, note="initial state",
        ),
    ]
] + [
    recurrent("LSTM", 4, data=SEQUENCE, body=sequence, proj_size=2),
    recurrent(
        "LSTM", 4, data=SEQUENCE, body=sequence, proj_size=2, num_layers=2, bidirectional=True, dropout=0.4,
    ),
    recurrent(
        "LSTM", 4, data=batch(reals(B, T, d), UNSORTED), losses=by_lengths(False), proj_size=2, note="packed, unsorted",
    ),
]

CAUSAL = nn.Transformer.generate_square_subsequent_mask(T)
FLOAT_MASK = torch.tensor([[0.3, -torch.inf, 0.0, 1.0, 0.5], [-1.0, 0.2, 0.1, 0.0, -torch.inf]] * 2).double()  # (T, S)
BOOL_MASK = FLOAT_MASK.isinf()
QUERIES, KEYS = reals(B, T, E), reals(B, S, E)


def padding(size: int) -> Maker:
    """(B, size): what is padded, nothing of the first sample."""
    return lambda g: torch.arange(size) >= torch.tensor([size, 2, 3])[:, None]


def head_mask(g: Generator) -> Tensor:
    """(B, heads, T, S): what is left out; the first key never is."""
    return (torch.rand(B, HEADS, T, S, generator=g) < 0.3) & (torch.arange(S) > 0)


def attended(**call: object) -> Callable[..., Tensor]:
    """Self- or cross-attention, with the attention weights in the output where there are any."""

    def body(m: nn.Module, x: Tensor, y: Tensor | None = None, z: Tensor | None = None) -> Tensor:
        y = x if y is None else y
        out, weights = m(x, y, y if z is None else z, **call)
        out = out if m.batch_first else out.transpose(0, 1)
        return out if weights is None else flat(out, weights)

    return body


def attention(*inputs: Maker, note: str, call: dict[str, object] | None = None, **options) -> Entry:
    call = call or {}
    words = described(call, note)
    return entry(
        "MultiheadAttention", E, HEADS, data=batch(*inputs), body=attended(**call), note=words,
        hidden={"batch_first": True}, **options,
    )


def padded(m: nn.Module, x: Tensor, y: Tensor, pad: Tensor) -> Tensor:
    """The keys' padding (B, S), or (S, B) where the samples come second."""
    out, weights = m(x, y, y, key_padding_mask=pad if m.batch_first else pad.T)
    return flat(out if m.batch_first else out.transpose(0, 1), weights)


def masked_by_head(m: nn.Module, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """A mask of each sample and head, (B, heads, T, S), as PyTorch wants it: (B * heads, T, S)."""
    return flat(*m(x, y, y, attn_mask=mask.flatten(0, 1)))


def everything(m: nn.Module, x: Tensor, y: Tensor, mask: Tensor, pad: Tensor) -> Tensor:
    return m(x, y, y, attn_mask=mask.flatten(0, 1), key_padding_mask=pad, need_weights=False)[0]


ATTENTION = [
    attention(QUERIES, note="self"),
    attention(QUERIES, KEYS, note="cross"),
    attention(QUERIES, KEYS, KEYS, note="values of their own"),
    attention(reals(T, B, E), batch_first=False, note="self", batch_dim=1),
    attention(reals(T, B, E), reals(S, B, E), batch_first=False, note="cross", batch_dim=1),
    attention(QUERIES, KEYS, bias=False, note="cross"),
    attention(QUERIES, KEYS, call={"need_weights": False}, note="cross"),
    attention(QUERIES, KEYS, call={"average_attn_weights": False}, note="cross"),
    attention(QUERIES, reals(B, S, 3), reals(B, S, 2), kdim=3, vdim=2, note="cross"),
    attention(QUERIES, KEYS, add_bias_kv=True, note="cross"),
    attention(QUERIES, add_bias_kv=True, call={"need_weights": False}, note="self"),
    attention(QUERIES, KEYS, add_zero_attn=True, note="cross"),
    attention(QUERIES, reals(B, S, 3), reals(B, S, 2), kdim=3, vdim=2, add_bias_kv=True, add_zero_attn=True, note="cross"),
    attention(QUERIES, KEYS, call={"attn_mask": FLOAT_MASK}, note="float (T, S)"),
    attention(QUERIES, KEYS, call={"attn_mask": FLOAT_MASK, "need_weights": False}, note="float (T, S)"),
    attention(QUERIES, KEYS, call={"attn_mask": BOOL_MASK}, note="bool (T, S)"),
    attention(QUERIES, KEYS, call={"attn_mask": BOOL_MASK}, add_bias_kv=True, add_zero_attn=True, note="bool (T, S)"),
    attention(QUERIES, call={"attn_mask": CAUSAL.double(), "is_causal": True, "need_weights": False}, note="self"),
    attention(QUERIES, call={"attn_mask": CAUSAL.double(), "is_causal": True}, note="self"),
    *(
        entry(
            "MultiheadAttention", E, HEADS, data=batch(*inputs), body=padded, batch_first=first, batch_dim=1 - first,
            note="`key_padding_mask`, cross", **kw,
        )
        for first, inputs, kw in [
            (True, (QUERIES, KEYS, padding(S)), {}),
            (True, (QUERIES, KEYS, padding(S)), {"add_bias_kv": True, "add_zero_attn": True}),
            (False, (reals(T, B, E), reals(S, B, E), lambda g: padding(S)(g).T), {}),
        ]
    ),
    entry(
        "MultiheadAttention", E, HEADS, data=batch(QUERIES, KEYS, reals(B, HEADS, T, S)), body=masked_by_head,
        batch_first=True, note="float mask (B * heads, T, S)",
    ),
    entry(
        "MultiheadAttention", E, HEADS, data=batch(QUERIES, KEYS, head_mask), body=masked_by_head, batch_first=True,
        note="bool mask (B * heads, T, S)",
    ),
    entry(
        "MultiheadAttention", E, HEADS, data=batch(QUERIES, KEYS, head_mask, padding(S)), body=everything,
        batch_first=True, add_bias_kv=True,
        note="bool mask (B * heads, T, S), `key_padding_mask`, `need_weights=False`",
    ),
    *(
        attention(QUERIES, KEYS, dropout=0.4, call={"need_weights": weights}, note="cross")
        for weights in (True, False)
    ),
    attention(QUERIES, dropout=0.4, add_bias_kv=True, note="self"),
]


def layer(kind: str, *inputs: Maker, **options) -> Entry:
    """A transformer's layer: width 6, two heads, 8 units, without dropout unless it is asked for."""
    sizes = (E, HEADS, 1, 1, 8) if kind == "Transformer" else (E, HEADS, 8)
    return entry(kind, *sizes, data=batch(*inputs), hidden={"dropout": 0.0, "batch_first": True}, **options)


def stack(kind: str, *inputs: Maker, note: str = "", body: Callable[..., object] | None = None, **options) -> Entry:
    """TransformerEncoder or TransformerDecoder, of two layers, with a norm at the end unless `norm` is None."""
    of_stack = {k: v for k, v in options.items() if k in ("norm", "enable_nested_tensor")}
    of_layer = {"dropout": 0.0, "batch_first": True} | {k: v for k, v in options.items() if k not in of_stack}

    def make() -> nn.Module:
        one = getattr(nn, f"{kind}Layer")(E, HEADS, 8, **of_layer)
        module = getattr(nn, kind)(one, 2, **({"norm": nn.LayerNorm(E)} | of_stack))
        return module if body is None else Net(lambda m, *i: body(m.module, *i), module=module)

    return Entry(kind, described(options, note), make, batch(*inputs), random=bool(of_layer["dropout"]))


def padded_source(m: nn.Module, x: Tensor, pad: Tensor) -> Tensor:
    return m(x, src_key_padding_mask=pad)


TRANSFORMER = [
    layer("TransformerEncoderLayer", QUERIES),
    layer("TransformerEncoderLayer", QUERIES, norm_first=True),
    layer("TransformerEncoderLayer", QUERIES, activation="gelu"),
    layer("TransformerEncoderLayer", QUERIES, bias=False, layer_norm_eps=0.1),
    layer("TransformerEncoderLayer", QUERIES, dropout=0.4),
    layer("TransformerEncoderLayer", QUERIES, dropout=0.4, norm_first=True),
    layer(
        "TransformerEncoderLayer", reals(T, B, E), batch_first=False, losses=scored_second, batch_dim=1, note="time first",
    ),
    layer("TransformerEncoderLayer", QUERIES, padding(T), body=padded_source, note="`src_key_padding_mask`"),
    layer(
        "TransformerEncoderLayer", QUERIES, body=lambda m, x: m(x, src_mask=CAUSAL.double(), is_causal=True),
        note="`src_mask`, `is_causal=True`",
    ),
    layer(
        "TransformerEncoderLayer", QUERIES, body=lambda m, x: m(x, src_mask=CAUSAL.isinf()), norm_first=True,
        note="bool `src_mask`",
    ),
    Entry(
        "TransformerEncoderLayer", "an activation that is a module with parameters",
        lambda: nn.TransformerEncoderLayer(E, HEADS, 8, 0.0, activation=nn.PReLU(), batch_first=True), batch(QUERIES),
    ),
    stack("TransformerEncoder", QUERIES),
    stack("TransformerEncoder", QUERIES, norm_first=True, norm=None, enable_nested_tensor=False),
    stack("TransformerEncoder", QUERIES, dropout=0.4),
    stack("TransformerEncoder", QUERIES, padding(T), body=padded_source, note="`src_key_padding_mask`"),
    stack(
        "TransformerEncoder", QUERIES, padding(T), body=padded_source, enable_nested_tensor=False,
        note="`src_key_padding_mask`",
    ),
    stack("TransformerEncoder", QUERIES, body=lambda m, x: m(x, mask=CAUSAL.double(), is_causal=True), note="`mask`, causal"),
    Entry(
        "TransformerEncoder", "frozen, under a trainable layer",
        net(
            lambda m, x: m.head(m.encoder(x)), head=linear(E, 2),
            encoder=lambda: stack("TransformerEncoder", QUERIES).make().requires_grad_(False),
        ),
        batch(QUERIES),
    ),
    layer("TransformerDecoderLayer", QUERIES, KEYS),
    layer("TransformerDecoderLayer", QUERIES, KEYS, norm_first=True, activation="gelu"),
    layer("TransformerDecoderLayer", QUERIES, KEYS, bias=False, layer_norm_eps=0.1),
    layer("TransformerDecoderLayer", QUERIES, KEYS, dropout=0.4),
    layer(
        "TransformerDecoderLayer", reals(T, B, E), reals(S, B, E), batch_first=False, losses=scored_second, batch_dim=1,
        note="time first",
    ),
    layer(
        "TransformerDecoderLayer", QUERIES, KEYS, padding(T), padding(S), note="all masks",
        body=lambda m, x, y, p, q: m(
            x, y, tgt_mask=CAUSAL.isinf(), memory_mask=BOOL_MASK, tgt_key_padding_mask=p,
            memory_key_padding_mask=q & ~BOOL_MASK.any(0),
        ),
    ),
    stack("TransformerDecoder", QUERIES, KEYS),
    stack("TransformerDecoder", QUERIES, KEYS, norm_first=True, norm=None),
    stack("TransformerDecoder", QUERIES, KEYS, dropout=0.4),
    stack(
        "TransformerDecoder", QUERIES, KEYS, padding(S), note="`tgt_mask`, causal, `memory_key_padding_mask`",
        body=lambda m, x, y, q: m(
            x, y, tgt_mask=CAUSAL.double(), tgt_is_causal=True,
            memory_key_padding_mask=x.new_zeros(q.shape).masked_fill(q, -torch.inf),
        ),
    ),
    layer("Transformer", KEYS, QUERIES),
    layer("Transformer", KEYS, QUERIES, norm_first=True, activation="gelu"),
    layer("Transformer", KEYS, QUERIES, bias=False, layer_norm_eps=0.1),
    layer("Transformer", KEYS, QUERIES, dropout=0.4),
    layer(
        "Transformer", reals(S, B, E), reals(T, B, E), batch_first=False, losses=scored_second, batch_dim=1,
        note="time first",
    ),
    layer(
        "Transformer", KEYS, QUERIES, padding(S), padding(T), note="all masks",
        body=lambda m, x, y, p, q: m(
            x, y, tgt_mask=CAUSAL.isinf(), src_key_padding_mask=p, memory_key_padding_mask=p, tgt_key_padding_mask=q,
        ),
    ),
]


# The norms of an older PyTorch have no such option.
WITHOUT_BIAS = [{"bias": False}] if "bias" in inspect.signature(nn.GroupNorm).parameters else []
BATCHED = {"refused": (TRAIN,), "reason": MIXES}
WITHOUT_STATISTICS = {"refused": (TRAIN, EVAL), "reason": MIXES}
NORM = [
    entry("LayerNorm", d, data=SEQUENCE),
    entry("LayerNorm", (T, d), data=SEQUENCE, note="over two dimensions"),
    entry("LayerNorm", d, data=batch(reals(B, d)), eps=0.1, note="input of rank 2"),
    entry("LayerNorm", d, data=SEQUENCE, bias=False),
    Entry(
        "LayerNorm", "`elementwise_affine=False`, between layers",
        lambda: nn.Sequential(nn.Linear(d, 4), nn.LayerNorm(4, elementwise_affine=False), nn.Linear(4, 2)), SEQUENCE,
    ),
    entry("RMSNorm", d, data=SEQUENCE),
    entry("RMSNorm", (T, d), data=SEQUENCE, eps=0.1, note="over two dimensions"),
    Entry(
        "RMSNorm", "`elementwise_affine=False`, between layers",
        lambda: nn.Sequential(nn.Linear(d, 4), nn.RMSNorm(4, elementwise_affine=False), nn.Linear(4, 2)), SEQUENCE,
    ),
    *(entry("GroupNorm", groups, 4, data=image(3, 2), note=f"{groups} of 4") for groups in (1, 2, 4)),
    entry("GroupNorm", 2, 4, data=batch(reals(B, 4)), eps=0.1, note="input of rank 2"),
    *(entry("GroupNorm", 2, 4, data=image(3, 2), **kw) for kw in WITHOUT_BIAS),
    Entry(
        "GroupNorm", "`affine=False`, between layers",
        lambda: nn.Sequential(nn.Conv1d(4, 4, 2), nn.GroupNorm(2, 4, affine=False), nn.Conv1d(4, 2, 2)), image(5),
    ),
    *(
        e for n, space in SPACE.items() for e in [
            entry(f"InstanceNorm{n}d", 4, data=image(*space), affine=True),
            entry(f"InstanceNorm{n}d", 4, data=image(*space), affine=True, track_running_stats=True, eps=0.1),
            *(entry(f"InstanceNorm{n}d", 4, data=image(*space), affine=True, **kw) for kw in WITHOUT_BIAS),
            Entry(
                f"InstanceNorm{n}d", "defaults, after a layer",
                lambda n=n: nn.Sequential(getattr(nn, f"Conv{n}d")(4, 3, 2), getattr(nn, f"InstanceNorm{n}d")(3)),
                image(*space),
            ),
            Entry(
                f"InstanceNorm{n}d", "`track_running_stats=True`, after a layer",
                lambda n=n: prepared(nn.Sequential(
                    getattr(nn, f"Conv{n}d")(4, 3, 2), getattr(nn, f"InstanceNorm{n}d")(3, track_running_stats=True),
                )),
                image(*space),
            ),
            lazy(f"LazyInstanceNorm{n}d", data=image(*space)),
            entry(f"BatchNorm{n}d", 4, data=image(*space), **BATCHED),
            entry(f"BatchNorm{n}d", 4, data=image(*space), momentum=None, eps=0.1, **BATCHED),
            *(entry(f"BatchNorm{n}d", 4, data=image(*space), **kw, **BATCHED) for kw in WITHOUT_BIAS),
            entry(f"BatchNorm{n}d", 4, data=image(*space), track_running_stats=False, **WITHOUT_STATISTICS),
            Entry(
                f"BatchNorm{n}d", "`affine=False`, between layers",
                lambda n=n: prepared(nn.Sequential(
                    getattr(nn, f"Conv{n}d")(4, 3, 2), getattr(nn, f"BatchNorm{n}d")(3, affine=False), nn.Tanh(),
                    getattr(nn, f"Conv{n}d")(3, 2, 1),
                )),
                image(*space), **BATCHED,
            ),
            lazy(f"LazyBatchNorm{n}d", data=image(*space), **BATCHED),
        ]
    ),
    entry("BatchNorm1d", d, data=batch(reals(B, d)), note="input of rank 2", **BATCHED),
    entry("SyncBatchNorm", 4, data=image(3, 2), **BATCHED),
    entry("SyncBatchNorm", 4, data=image(3, 2), momentum=None, eps=0.1, **BATCHED),
    *(entry("SyncBatchNorm", 4, data=image(3, 2), **kw, **BATCHED) for kw in WITHOUT_BIAS),
    entry("SyncBatchNorm", 4, data=image(3, 2), track_running_stats=False, **WITHOUT_STATISTICS),
    Entry(
        "SyncBatchNorm", "`affine=False` after a layer",
        lambda: prepared(nn.Sequential(nn.Conv2d(4, 3, 2), nn.SyncBatchNorm(3, affine=False))), image(3, 3), **BATCHED,
    ),
    Entry(
        "SyncBatchNorm", "converted from `BatchNorm2d`, after a layer",
        lambda: prepared(nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Conv2d(4, 3, 2), nn.BatchNorm2d(3)))),
        image(3, 3), **BATCHED,
    ),
]


def adaptive(options: str, losses: Callable[..., Tensor], *inputs: object, **kw: object) -> Entry:
    """A softmax over 9 classes: 3 in the head, clusters of 2 and 4."""
    data = batch(reals(B, 16), *inputs)
    return entry("AdaptiveLogSoftmaxWithLoss", 16, 9, [3, 5], data=data, losses=losses, note=options, **kw)


def of_target(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return -m(x, y).output


def tokens(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean over the tokens of a sample, folded into the batch of the loss."""
    return -m(x.flatten(0, 1), y.flatten()).output.view(len(x), -1).mean(1)


LOSSES = [
    adaptive("targets in every cluster", of_target, fixed(1, 4, 8)),
    adaptive("targets in the head alone", of_target, fixed(0, 2, 2)),
    adaptive("targets in the last cluster alone", of_target, fixed(8, 5, 8)),
    adaptive("", of_target, fixed(1, 4, 8), head_bias=True, div_value=1.5),
    adaptive("`log_prob`", lambda m, x: score(m.log_prob(x))),
    Entry(
        "AdaptiveLogSoftmaxWithLoss", "tokens folded into the batch, after a layer",
        lambda: nn.ModuleDict({"fc": nn.Linear(4, 16), "loss": nn.AdaptiveLogSoftmaxWithLoss(16, 9, [3, 5])}),
        batch(reals(B, T, 4), ids(9, B, T)), losses=lambda m, x, y: tokens(m["loss"], m["fc"](x), y),
    ),
]


def fused(target: Maker, note: str = "", **rest) -> Entry:
    """Linear and cross entropy in one; positions of a target are added up."""
    rest = {"losses": lambda m, x, y: m(x, y).view(len(x), -1).sum(1)} | rest
    data = batch(reals(B, d), target)
    return entry("LinearCrossEntropyLoss", d, 4, data=data, note=note, hidden={"reduction": "none"}, **rest)


CLASSES = fixed(1, 3, 0)
if hasattr(nn, "LinearCrossEntropyLoss"):
    LOSSES += [
        fused(CLASSES),
        fused(CLASSES, bias=True),
        fused(CLASSES, bias=True, ignore_index=3),
        fused(CLASSES, bias=True, label_smoothing=0.2),
        fused(CLASSES, weight=torch.tensor([0.5, 1.0, 2.0, 3.0])),
        fused(lambda g: reals(B, 4)(g).softmax(1), bias=True, note="targets that are probabilities"),
        fused(ids(4, B, 2), out_features=(2,), bias=True),
        fused(CLASSES, bias=True, options=nn.LinearCrossEntropyOptions(batch_chunk_size=2, chunking_method=None)),
        *(
            fused(CLASSES, losses=lambda m, x, y: m(x, y), reduction=way, refused=(TRAIN, EVAL), reason=ONE_NUMBER)
            for way in ("sum", "mean")
        ),
    ]
# fmt: on

ENTRIES = [
    e for e in [*LINEAR, *CONTAINERS, *CONVOLUTION, *EMBEDDING, *RECURRENT, *ATTENTION, *TRANSFORMER, *NORM, *LOSSES]
    if hasattr(nn, e.kind)
]  # fmt: skip
TRIALS = [Trial(e, mode) for e in ENTRIES for mode in (TRAIN, EVAL)]


def classes() -> set[str]:
    """The names of all module classes of torch.nn."""
    return {name for name, kind in vars(nn).items() if inspect.isclass(kind) and issubclass(kind, nn.Module)}


# Classes that are no layer: they have no forward of their own.
BASES = {"Module", "Container", "RNNBase", "RNNCellBase"}

# Classes without parameters, and the arguments that make one; the test makes them all, and looks.
WITHOUT_PARAMETERS: dict[str, tuple] = {
    name: args for args, names in [
        ((), """
            AlphaDropout BCELoss BCEWithLogitsLoss CELU CTCLoss CosineEmbeddingLoss CosineSimilarity CrossEntropyLoss
            Dropout Dropout1d Dropout2d Dropout3d ELU FeatureAlphaDropout Flatten GELU GLU GaussianNLLLoss Hardshrink
            Hardsigmoid Hardswish Hardtanh HingeEmbeddingLoss HuberLoss Identity KLDivLoss L1Loss LeakyReLU LogSigmoid
            LogSoftmax MSELoss MarginRankingLoss Mish MultiLabelMarginLoss MultiLabelSoftMarginLoss MultiMarginLoss
            NLLLoss NLLLoss2d PairwiseDistance PoissonNLLLoss RReLU ReLU ReLU6 SELU SiLU Sigmoid SmoothL1Loss
            SoftMarginLoss Softmax Softmax2d Softmin Softplus Softshrink Softsign Tanh Tanhshrink TripletMarginLoss
            TripletMarginWithDistanceLoss Upsample UpsamplingBilinear2d UpsamplingNearest2d
        """),
        ((2,), """
            AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d
            AvgPool1d AvgPool2d AvgPool3d ChannelShuffle CircularPad1d CircularPad2d CircularPad3d CrossMapLRN2d
            LocalResponseNorm MaxPool1d MaxPool2d MaxPool3d MaxUnpool1d MaxUnpool2d MaxUnpool3d PixelShuffle
            PixelUnshuffle ReflectionPad1d ReflectionPad2d ReflectionPad3d ReplicationPad1d ReplicationPad2d
            ReplicationPad3d Unfold ZeroPad1d ZeroPad2d ZeroPad3d
        """),
        ((2, 3), "ConstantPad1d ConstantPad2d ConstantPad3d Fold FractionalMaxPool2d FractionalMaxPool3d"),
        ((2, 3), "LPPool1d LPPool2d LPPool3d Threshold"),
        ((1, (2, 2)), "Unflatten"),
    ] for name in names.split()
}  # fmt: skip

# Options of a constructor that change no gradient, or that a class takes for form's sake.
NEUTRAL = {
    # sizes, starting values, and parts given as the first argument
    "num_parameters", "init", "d_model", "nhead", "num_encoder_layers", "num_decoder_layers", "num_layers",
    "dim_feedforward", "modules", "values", "parameters", "custom_encoder", "custom_decoder",
    # where it runs
    "device", "dtype", "device_ids", "output_device", "dim", "process_group",
    # what from_pretrained passes on; how fast statistics run; a check of the mask before the fast path
    "_weight", "_freeze", "momentum", "mask_check",
}  # fmt: skip
ZEROS_ONLY = {f"ConvTranspose{n}d": {"padding_mode"} for n in SPACE}  # the class raises for any other


def options_of(kind: str) -> set[str]:
    """The options of a class that can change a gradient; a lazy class has those of the class it becomes."""
    made = getattr(nn, kind)
    if issubclass(made, nn.modules.lazy.LazyModuleMixin):
        return set()
    source = nn.RNNBase if issubclass(made, nn.RNNBase) else made
    optional = {p.name for p in inspect.signature(source).parameters.values() if p.default is not p.empty}
    wide = {"proj_size"} if kind in ("RNN", "GRU") else set()
    return optional - NEUTRAL - ZEROS_ONLY.get(kind, set()) - wide


def table() -> str:
    """The table of the page: a row for the options of a class that have the same verdict."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for e in ENTRIES:
        rows.setdefault((e.kind, e.verdict(TRAIN), e.verdict(EVAL)), []).append(e.options)
    kinds = list(dict.fromkeys(e.kind for e in ENTRIES))
    lines = [
        f"| {kind} | {'; '.join(options)} | {train} | {evaluated} |"
        for (kind, train, evaluated), options in sorted(rows.items(), key=lambda row: kinds.index(row[0][0]))
    ]
    head = [
        f"{len(ENTRIES)} entries, PyTorch {VERSION}.",
        "",
        "| class | options tried | train | eval |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *lines])


def written() -> str:
    """What the page has between the marks."""
    return PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].strip()


def write() -> None:
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write()
    else:
        print(table())
