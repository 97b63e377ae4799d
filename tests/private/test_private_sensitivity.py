"""What one sample can do: taken out of the batch, it changes the sum without noise by its bound at most, and 0.1%."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from private_runs import size
from torch import Tensor, nn

from cases import CASES, Case, cut_second
from eachgrad.private.clipping import Adaptive, Clipping, Flat, Normalised, PerGroup, Rule, rule_for
from eachgrad.private.gathering import Engine
from eachgrad.receipt import aliases_of

SLACK = 1e-3

# Models and hazards of all kinds, from the engine's own cases.
NAMES = (
    "linear; linear T = B; linear time first T = B; linear folded (B*T, d); windows folded into the batch; bilinear; "
    "complex linear; ids repeated; ids T = B; padding_idx; embedding_bag mean; positions (T,) T = B; conv1d depthwise; "
    "conv2d; conv2d uneven everything; conv2d circular; conv2d channels_last; conv2d transposed; patch embedding; "
    "layer_norm; group_norm; instance_norm2d; rms_norm; prelu; lstm two layers bidirectional; gru; "
    "lstm packed unsorted with given state; lstm packed inside T = B; MultiheadAttention; TransformerEncoderLayer; "
    "cls token; layer scale; temperature; einsum; index by ids; selective scan; weight_norm; spectral_norm; masked weight; "
    "LoRA on a frozen layer; module used twice; tied embedding and head; tied by call and functionally; "
    "convolution used twice; unused parameter; partly frozen; relu in place; checkpoint, non-reentrant; "
    "checkpoint, reentrant; large batch; as many fixed negatives as samples"
).split("; ")
BY_NAME = {case.name: case for case in CASES}
PRECISIONS = ("float32", "bfloat16", "autocast")
# Torch's own limits: these ops take no mixture of dtypes, or have no kernel in sixteen bits.
NOT_IN = {"autocast": {"large batch"}, "float32": set(), "bfloat16": set()}
HERE = [(name, precision) for precision in PRECISIONS for name in NAMES if name not in NOT_IN[precision]]


@cache
def built(name: str, precision: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return BY_NAME[name].build(dtype=torch.bfloat16 if precision == "bfloat16" else torch.float32)


def answer(
    case: Case, model: nn.Module, batch: tuple[Tensor, ...], clipping: Clipping, autocast: bool
) -> tuple[Any, Rule]:
    """What the engine of a private run finds, and its rule; every time on the same model, whatever a forward changes."""
    model = copy.deepcopy(model)

    def losses(model: nn.Module, *given: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return case.losses(model, *given).float()

    names = [name for name, p in model.named_parameters() if p.requires_grad]
    rule = rule_for(clipping, None, names, aliases_of(model))
    options = {"batch_dim": case.batch_dim, "batch_size": case.batch_size}
    count = max(t.shape[case.batch_dim] for t in batch if t.ndim > case.batch_dim)
    engine = Engine(model, losses, rule, "raise", options)
    return engine.answer(batch, count, count)[0], rule


def without(case: Case, batch: tuple[Tensor, ...], i: int) -> tuple[Tensor, ...]:
    dim = 1 if case.cut is cut_second else 0
    return tuple(
        torch.cat([t.narrow(dim, 0, i), t.narrow(dim, i + 1, t.shape[dim] - i - 1)], dim).detach() for t in batch
    )


def moved(name: str, precision: str, clipping: Clipping) -> float:
    """By how much the sum moves with any one sample, as a multiple of what the noise is made for."""
    case, (model, batch), autocast = BY_NAME[name], built(name, precision), precision == "autocast"
    found, rule = answer(case, model, batch, clipping, autocast)
    whole, worst = found.grad, 0.0
    assert all(value.dtype.itemsize >= 4 for value in whole.values())
    count = len(case.samples(batch))
    for i in range(0, count, max(1, count // 12)):  # every one, but for the large batch
        rest = answer(case, model, without(case, batch, i), clipping, autocast)[0].grad
        wide = torch.complex128 if any(value.is_complex() for value in rest.values()) else torch.float64
        gap = {n: (whole[n].to(wide) - rest[n].to(wide)) * rule.unit for n in whole}
        worst = max(worst, size(gap) / rule.sensitivity)
    return worst


@cache
def median(name: str, precision: str) -> float:
    case, (model, batch) = BY_NAME[name], built(name, precision)
    found, _ = answer(case, model, batch, Flat(1.0), precision == "autocast")
    return float(found.norms.median())


def test_there_are_thirty_models_at_least():
    assert len(set(NAMES)) >= 30
    assert set(NAMES) <= set(BY_NAME)


@pytest.mark.parametrize(("name", "precision"), HERE)
def test_one_sample_moves_the_sum_by_its_bound_at_most(name: str, precision: str):
    for share in (0.7, 1e-3):  # some samples are clipped; all are, by far
        assert moved(name, precision, Flat(share * median(name, precision))) <= 1 + SLACK


KINDS = {
    "groups": lambda m: PerGroup("parameter", 0.3 * m),
    "normalised": lambda m: Normalised(0.01, 0.5 * m),
    "adaptive": lambda m: Adaptive(max_norm=0.7 * m),
}
FEW = [
    "linear T = B",
    "conv2d",
    "lstm two layers bidirectional",
    "tied embedding and head",
    "large batch",
    "weight_norm",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_every_kind_of_clipping_keeps_its_bound(name: str, precision: str, kind: str):
    if name.startswith("lstm") and precision == "bfloat16":
        precision = "autocast"
    assert moved(name, precision, KINDS[kind](median(name, precision))) <= 1 + SLACK


def test_samples_that_pull_the_same_way_are_not_rounded_away():
    """300 equal samples of a model in sixteen bits: a sum in sixteen bits would move by 0 or by 2 C."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    x = torch.full((300, 1), 3.0, dtype=torch.bfloat16)
    rule, sums = rule_for("flat", 1.0, ["weight"], {}), []
    for count in (300, 299):
        engine = Engine(model, lambda out: out.float().sum(1), rule, "raise", {"batch_dim": 0})
        sums.append(float(engine.answer([x[:count]], count, count)[0].grad["weight"]))
    assert sums[0] == pytest.approx(300, rel=1e-4)
    assert sums[0] - sums[1] == pytest.approx(1, rel=1e-3)
