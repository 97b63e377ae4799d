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


def turned(g: torch.Tensor, now: dict[str, bool]) -> torch.Tensor:
    return g.neg_() if now["in place"] else -g


class Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, now):
        ctx.now = now
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return turned(g, ctx.now), None


class TwoWays(nn.Module):
    """The sum gives one gradient to both layers, and on the way of the first it is turned, in place or not."""

    def __init__(self, how: str):
        super().__init__()
        self.a, self.b, self.how, self.now = nn.Linear(6, 6), nn.Linear(6, 6), how, {"in place": False}

    def forward(self, x):
        now, x = self.now, self.b(x) if self.how == "twice" else x  # that use's gradient comes last
        first = self.a(x)
        if self.how == "hook":
            first.register_hook(lambda g: turned(g, now))
        else:
            first = Turned.apply(first, now)
        return first + self.b(x)


ASKED = {"grad": eachgrad.clipped_sum(1.0), "norms": eachgrad.norms()}


@pytest.mark.parametrize("names", [["grad"], ["norms", "grad"]], ids=str)
@pytest.mark.parametrize("calls", [0, 2])  # before it is in place: measured, and streamed
@pytest.mark.parametrize("how", ["hook", "function", "twice"])
def test_a_gradient_that_is_changed_in_place_on_another_way(how, calls, names, visits):
    torch.manual_seed(0)
    model, x = TwoWays(how), torch.randn(5, 3, 6)
    for call in range(calls + 1):
        model.now["in place"] = call == calls
        with eachgrad.record(model) as tape:
            losses = model(x).square().sum((1, 2))
        if call == calls:
            visits.clear()
            with pytest.raises(eachgrad.CaptureError, match="changed in place while the backward went on"):
                tape.ask(losses, **{name: ASKED[name] for name in names})
            assert len(visits) == (calls > 0)
            continue
        found, rows = tape.ask(losses, norms=eachgrad.norms()).norms, []
        for one in x.split(1):
            want = torch.autograd.grad(model(one).square().sum(), list(model.parameters()))
            rows.append(torch.sqrt(sum(g.square().sum() for g in want)))
        torch.testing.assert_close(found, torch.stack(rows))
