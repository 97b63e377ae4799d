"""The stream executor: every case through call_for_per_sample_grads, with a backward that the caller runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import eachgrad
from cases import CASES, Case, scored, scored_second
from oracle import assert_same, loop

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")

# Cases whose losses come from one call of the model and from nothing else of it.
# An ensemble by vmap hides from a loss that is one number where its samples are (NEEDS_LOSSES in test_cases).
ONE_CALL = [case for case in CASES if case.losses in (scored, scored_second) and case.name != "an ensemble by vmap"]


def called(case: Case, model: nn.Module, batch: tuple[torch.Tensor, ...], reduction: str) -> dict[str, torch.Tensor]:
    count = len(case.samples(batch))
    run = eachgrad.call_for_per_sample_grads(
        model, batch_size=count, loss_reduction=reduction, batch_first=case.batch_dim == 0
    )
    losses = case.losses(run, *batch)
    getattr(losses, reduction)().backward()
    assert all(p.grad is None for p in model.parameters())
    return {name: p.grad_sample for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("case", ONE_CALL, ids=str)
def test_every_case_by_a_backward_of_the_caller(case: Case, reduction: str):
    model, batch = case.build()
    want = loop(*case.build()[:1], case.losses, case.samples(batch))
    assert_same(
        called(case, model, batch, reduction),
        want,
        case.tolerance if case.dtype == torch.float64 and case.tolerance <= 1e-10 else 3 * case.tolerance,
    )
