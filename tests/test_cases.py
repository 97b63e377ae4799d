"""Every case against the loop over samples, by every query."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from cases import CASES, Case
from oracle import assert_same, loop
from torch import Tensor

import eachgrad


@cache
def truth(case: Case, dtype: torch.dtype | None = None, seed: int = 0) -> dict[str, Tensor]:
    """The loop's answer; computed in the dtype given, for the values the case has in its own."""
    model, batch = case.build(seed, dtype)
    return loop(model, case.losses, case.samples(batch))


def answer(case: Case, check: bool = False, dtype: torch.dtype | None = None, seed: int = 0):
    model, batch = case.build(seed, dtype)
    with eachgrad.record(model, batch_dim=case.batch_dim, check=check) as tape:
        losses = case.losses(model, *batch)
    return tape.backward(losses)


def squared_norms(dense: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: g.abs().double().pow(2).flatten(1).sum(1) for name, g in dense.items()}


def norms(dense: dict[str, Tensor]) -> Tensor:
    return torch.stack(list(squared_norms(dense).values())).sum(0).sqrt()


def weighted(dense: dict[str, Tensor], c: Tensor) -> dict[str, Tensor]:
    return {name: torch.einsum("b,b...->...", c.to(g.dtype), g) for name, g in dense.items()}


def ask_dense(grads, want, tolerance):
    assert_same(grads.dense(), want, tolerance)


def ask_one_by_one(grads, want, tolerance):
    assert_same({name: grads[name].dense() for name in grads}, want, tolerance)


def ask_norms(grads, want, tolerance):
    assert_same({"norms": grads.norms()}, {"norms": norms(want)}, tolerance)


def ask_norms_by_parameter(grads, want, tolerance):
    wanted = {name: n.sqrt() for name, n in squared_norms(want).items()}
    assert_same(grads.norms(by="parameter"), wanted, tolerance)


def ask_weighted_sum(grads, want, tolerance):
    c = torch.randn(grads.batch_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert_same(grads.weighted_sum(c), weighted(want, c), tolerance)


def ask_clipped_sum(grads, want, tolerance):
    size = norms(want)
    bound = float(size.median())
    factors = (bound / size).clamp(max=1.0)
    assert_same(grads.clipped_sum(bound), weighted(want, factors), tolerance)


QUERIES = [
    ask_dense, ask_one_by_one, ask_norms, ask_norms_by_parameter, ask_weighted_sum, ask_clipped_sum,
]  # fmt: skip


@pytest.mark.parametrize("query", QUERIES, ids=lambda q: q.__name__[4:])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_query(case, query):
    query(answer(case), truth(case), case.tolerance)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_checked(case):
    assert_same(answer(case, check=True).dense(), truth(case), case.tolerance)
