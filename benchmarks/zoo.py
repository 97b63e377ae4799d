"""The models of benchmarks/coverage.py: rows chosen from the tests' own data, with what each needs to be judged.

Every model is tiny, in float64 and in training mode, because the hooks of some contenders do nothing in eval. So dropout
is off, and batch norm alone is in eval. `python benchmarks/zoo.py` lists the rows.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import families  # noqa: E402
import torch_nn  # noqa: E402
from cases import CASES, REFUSED, Case, Refused, net, reals  # noqa: E402
from cases import batch as batch_of  # noqa: E402
from cases.base import SEQUENCE, linear, made, weight  # noqa: E402
from cases.layouts import Hidden  # noqa: E402

Batch = tuple[Tensor, ...]
BATCH_NORM = nn.modules.batchnorm._BatchNorm


@dataclass(frozen=True)
class Row:
    """A model, its batch, and its losses (B,)."""

    group: str
    name: str
    build: Callable[[], tuple[nn.Module, Batch]]
    losses: Callable[..., Tensor]
    samples: Callable[[Batch], list[Batch]]  # each sample as a batch of one
    batch_dim: int = 0
    batch_size: int | None = None  # where no input has a dimension that counts the samples
    tolerance: float = 1e-10
    mixes: bool = False  # the loss of a sample depends on the others: there is nothing to answer


def without_chance(model: nn.Module) -> nn.Module:
    """Training mode that draws no numbers and takes no statistics of the batch."""
    model.train()
    for module in model.modules():
        if isinstance(module, BATCH_NORM) and module.running_mean is not None:
            module.eval()
        for holder in (module, getattr(module, "config", None)):
            options = {} if holder is None else vars(holder)
            for name, value in list(options.items()):
                if isinstance(value, float) and (
                    "drop" in name or (name == "p" and "Dropout" in type(module).__name__)
                ):
                    setattr(holder, name, 0.0)
    return model


def of_case(group: str, case: Case, name: str = "", mixes: bool = False) -> Row:
    def build() -> tuple[nn.Module, Batch]:
        model, batch = case.build()
        return (model if mixes else without_chance(model)), batch

    return Row(
        group,
        name or case.name,
        build,
        case.losses,
        case.samples,
        case.batch_dim,
        case.batch_size,
        case.tolerance,
        mixes,
    )


def named(group: str, names: str, mixes: bool = False) -> Iterator[Row]:
    """Rows of the cases with these names, one a line; `name: other` is shown as other."""
    found: dict[str, Case | Refused] = {case.name: case for case in (*CASES, *REFUSED)}
    for line in filter(None, map(str.strip, names.splitlines())):
        name, _, shown = line.partition(": ")
        case = found[name]
        if isinstance(case, Refused):
            case = Case(case.name, (), case.make, case.data, case.losses, case.batch_dim, batch_size=case.batch_size)
        yield of_case(group, case, shown, mixes)


def layers(choices: str) -> Iterator[Row]:
    """Rows of the entries of torch_nn.py, `kind | options` a line; `kind | options: other` is shown as other."""
    found = {(e.kind, e.options): e for e in torch_nn.ENTRIES}
    for line in filter(None, map(str.strip, choices.splitlines())):
        chosen, _, shown = line.partition(": ")
        kind, _, options = chosen.partition(" | ")
        entry = found[kind, options or "defaults"]
        shown = shown or (f"{kind}, {options}" if options else kind)
        yield of_case("torch.nn", torch_nn.Trial(entry, torch_nn.TRAIN).case(), shown)


def of_family(family: families.Family, group: str = "Hugging Face", mixes: bool = False) -> Row:
    batch = family.data()

    def build() -> tuple[nn.Module, Batch]:
        model = family.build()
        return (model.train() if mixes else without_chance(model)), tuple(batch.values())

    samples = lambda batch: family.samples(dict(enumerate(batch)))  # type: ignore[arg-type]  # noqa: E731
    return Row(group, family.name, build, family.call(batch), samples, tolerance=family.tolerance, mixes=mixes)


def missing() -> list[str]:
    """The libraries of model families that are not installed."""
    return [name for name in ("transformers",) if importlib.util.find_spec(name) is None]


def of_names(*names: str) -> list[families.Family]:
    """The families with these names, if their library is installed."""
    found = {family.name: family for family in (*families.NAMED, *families.UNNAMED)}
    return [] if missing() else [found[name] for name in names]


# What no test has as a plain model.
OWN_LAYERS = [
    Case(
        "LSTM, its outputs alone", (),
        net(lambda m, x: m.rnn(x)[0], rnn=made(nn.LSTM, 5, 2, batch_first=True)), SEQUENCE,
    ),
    Case(
        "CNN: Conv2d, ReLU, MaxPool2d, Flatten, Linear", (),
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)),
        batch_of(reals(3, 2, 6, 6)),
    ),
]  # fmt: skip
OWN_CALLS = [
    Case(
        "autograd.Function with a parameter", (),
        net(lambda m, x: m.fc(Hidden.apply(x, m.w)), w=weight(5, 4), fc=linear(4, 2)), SEQUENCE,
    ),
    Case(
        "least squares with a learned matrix", (),
        net(lambda m, x: torch.linalg.lstsq(m.w.expand(len(x), -1, -1), x.mT)[0], w=weight(5, 2)), SEQUENCE,
    ),
]  # fmt: skip

TORCH_NN = """
    Sequential | three layers
    Linear | input of rank 2
    Linear | input of rank 3
    Linear | time first
    Bilinear
    PReLU | a number per channel
    Conv1d
    Conv2d
    Conv2d | `groups=4` depthwise
    Conv2d | `padding=1` `groups=2` `padding_mode='reflect'`
    Conv3d
    ConvTranspose2d
    Embedding | repeated ids (B, T)
    Embedding | `padding_idx=1`
    Embedding | `scale_grad_by_freq=True`
    EmbeddingBag | `mode='sum'` repeated ids (B, T)
    EmbeddingBag | `mode='sum'` `scale_grad_by_freq=True`
    RNN: RNN, outputs and final state
    LSTM: LSTM, outputs and final state
    LSTM | `batch_first=False` time first: LSTM time first, outputs and final state
    LSTM | `num_layers=2` `bidirectional=True` packed, unsorted: LSTM, two layers, bidirectional, packed, unsorted
    GRU: GRU, outputs and final state
    LSTMCell | once per step
    MultiheadAttention | self
    MultiheadAttention | `batch_first=True` `key_padding_mask`, cross
    TransformerEncoderLayer
    TransformerEncoderLayer | `batch_first=False` time first
    TransformerDecoderLayer
    LayerNorm
    RMSNorm
    GroupNorm | 2 of 4
    InstanceNorm2d | `affine=True`
    BatchNorm2d
    AdaptiveLogSoftmaxWithLoss | targets in every cluster
"""

RAW = """
    mul: scale of the channels
    layer scale
    position table
    position table T = B
    cls token
    patches, class token and positions
    temperature of logits
    mask token
    einsum
    index by ids: w[ids]
    rms_norm by hand
    memory of keys and values
    learned queries through MultiheadAttention
    selective scan
    conditional random field, as many tags as samples
"""

DERIVED = """
    weight_norm
    spectral_norm
    orthogonal
    pruned
    LoRA merge
    LoRA on a frozen layer
    straight-through quantiser
    weights generated for each sample
    tied embedding and head
    tied by call and functionally
    module used twice
    one layer under two names
    norm used twice on different shapes
"""

LAYOUTS = """
    linear T = B
    linear time first inside: time first inside, T = B
    linear folded (B*T, d): rows folded, (B*T, d)
    linear folded (T*B, d): rows folded, (T*B, d)
    windows folded into the batch
    shifted windows with a learned bias
    conv2d frames folded into the batch: frames folded into the batch, Conv2d
    lstm packed inside unsorted: packed inside, LSTM
    all samples in one row of tokens
    all sequences in one row, by offsets
    embedding_bag with offsets
    positions (T,) T = B: position ids (T,), T = B
    positions (1, T): position ids (1, T)
    attention by hand, causal mask (B, B)
    object queries from an embedding, time first
    two inputs as 2B rows, subtracted
    siamese, two calls of the model
    batch permuted and put back
    graphs, 6 nodes with a sample index
    tokens selected
    one sample at a time
    list of samples
"""

EXPERTS = """
    experts by mask
    experts by index
    experts in one product, each token's best two
    experts with room for two tokens
"""

CALLS = """
    addmm on folded rows: torch.addmm
    submodules called, never the model
    keyword arguments
    functional_call with derived weights
    partly frozen
    unused parameter
    relu in place
    masked loss
    checkpoint, reentrant
    checkpoint, non-reentrant
    custom function without parameters: autograd.Function without parameters
    an ensemble by vmap: vmap inside, over an ensemble
    samples by vmap: vmap inside, over the samples
    gradient penalty
    derivative by the input in the loss
    complex linear
"""

MIXES = """
    batch_norm in training: batch norm in training
    loss that compares samples: in-batch contrastive loss
    mean over the batch subtracted
    softmax over the batch
    attention between samples
    roll over the batch added: neighbour of the batch added
"""

FAMILIES = (
    "GPT-2", "BERT", "ALBERT", "Llama", "T5", "ViT", "Swin", "ConvNeXt", "CLIP, image head", "Mamba",
    "Mixtral", "ResNet", "Wav2Vec2", "Whisper", "DETR",
)  # fmt: skip


def rows() -> list[Row]:
    """All rows, group by group; those that mix samples last."""
    return [
        *layers(TORCH_NN),
        *(of_case("torch.nn", case) for case in OWN_LAYERS),
        *named("raw parameters", RAW),
        *named("derived and shared weights", DERIVED),
        *named("layouts", LAYOUTS),
        *named("mixtures of experts", EXPERTS),
        *named("ways to call", CALLS),
        *(of_case("ways to call", case) for case in OWN_CALLS),
        *(of_family(family) for family in of_names(*FAMILIES)),
        *named("samples mixed on purpose", MIXES, mixes=True),
        *(of_family(f, "samples mixed on purpose", mixes=True) for f in of_names("ResNet in training")),
    ]


if __name__ == "__main__":
    for row in rows():
        print(f"{row.group}: {row.name}")
