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


class Turned(torch.autograd.Function):
    """Changes the gradient that it is given in place."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g.neg_()


class TwoWays(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.a, self.b, self.how = nn.Linear(6, 6), nn.Linear(6, 6), how

    def forward(self, x):
        first = self.a(x)
        if self.how == "hook":
            first.register_hook(lambda g: g.mul_(100))
        elif self.how == "function":
            first = Turned.apply(first)
        elif self.how == "a new tensor":
            first.register_hook(lambda g: g * 100)
        return first + self.b(x)


@pytest.mark.parametrize("ask", ["backward", "ask"])
@pytest.mark.parametrize("how", ["hook", "function", "a new tensor"])
def test_a_gradient_that_is_changed_in_place_on_another_way(how, ask):
    """The sum gives both layers the same tensor: what one way's hook writes there is not the other's gradient."""
    torch.manual_seed(0)
    model, x = TwoWays("none"), torch.randn(5, 3, 6)
    for call in range(6):  # measured, and streamed
        model.how = how if call > 3 else "a new tensor" if how == "a new tensor" else "none"
        with eachgrad.record(model) as tape:
            losses = model(x).square().sum((1, 2))
        if how != "a new tensor" and call > 3:
            with pytest.raises(eachgrad.CaptureError, match="changed in place while the backward went on"):
                tape.backward(losses) if ask == "backward" else tape.ask(losses, grad=eachgrad.clipped_sum(1.0))
            continue
        found = tape.backward(losses).norms() if ask == "backward" else tape.ask(losses, n=eachgrad.norms()).n
        rows = []
        for one in x.split(1):
            want = torch.autograd.grad(model(one).square().sum(), list(model.parameters()))
            rows.append(torch.sqrt(sum(g.square().sum() for g in want)))
        torch.testing.assert_close(found, torch.stack(rows))
