"""Kernels in a graph for any number of samples: none of their ops ties it to the number that it was traced with."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from eachgrad.kernels import (
    channel_sums,
    convolution,
    entropy,
    gram,
    joined,
    many,
    many_positions,
    norm_sums,
    positions,
    signals,
    squares_and_mean,
)

MODULES = (
    channel_sums, convolution, entropy, gram, joined, many, many_positions, norm_sums, positions, signals, squares_and_mean,
)  # fmt: skip
B, T, n = 17, 40, 24
WINDOW = ([3, 3], [1, 1], [1, 1], [1, 1])
half = torch.bfloat16


def maps():
    return [torch.empty(B, 16, 40, 40, dtype=half) for _ in range(2)]


def rows(count, dtype=half):
    return [torch.empty(B, T, n, dtype=dtype) for _ in range(count)]


ops = torch.ops.eachgrad
ASKED = {
    "channel_sums": (
        ops.channel_sums,
        lambda: [*(torch.empty(B, 16, 40) for _ in range(2)), *(torch.empty(B, 4) for _ in range(2))],
    ),
    "conv_squares": (lambda x, g: ops.conv_squares(x, g, *WINDOW), maps),
    "conv_gradients": (lambda x, g: ops.conv_gradients(x, g, *WINDOW), maps),
    "conv_sum": (lambda x, g: ops.conv_sum(x, g, *WINDOW), maps),
    "entropy_gradient": (
        lambda logits, g, target: ops.entropy_gradient(logits, ops.entropies(logits, target, -100), g, target, -100),
        lambda: [torch.empty(B, 13), torch.empty(B), torch.empty(B, dtype=torch.int64)],
    ),
    "entropy_gradient_": (
        lambda rows, g, target: ops.entropy_gradient_(
            rows, ops.entropies(rows[:, :13], target, -100), g, target, -100, 13
        ),
        lambda: [torch.empty(B, 16), torch.empty(B), torch.empty(B, dtype=torch.int64)],
    ),
    "gram_norms": (ops.gram_norms, lambda: rows(2)),
    "gram_norms_of_many": (lambda a, b, c, d: ops.gram_norms_of_many([a, b], [c, d]), lambda: rows(4)),
    "joined": (lambda *parts: ops.joined([*parts]), lambda: [torch.empty(B, k) for k in (3, 5)]),
    "entropies": (
        lambda logits, target: ops.entropies(logits, target, -100),
        lambda: [torch.empty(B, 13), torch.empty(B, dtype=torch.int64)],
    ),
    "norm_sums": (
        lambda g, x, mean, scale: ops.norm_sums(g, [x], mean, scale, 2),
        lambda: [*rows(2), torch.empty(B, T, 1), torch.empty(B, T, 1)],
    ),
    "position_sums": (lambda *values: ops.position_sums([*values], 2), lambda: rows(2)),
    "position_sums_of_many": (lambda *values: ops.position_sums_of_many([*values]), lambda: rows(3)),
    "signal": (
        lambda value: ops.signal(value.new_empty((), dtype=torch.bool), [value], 0)[1],
        lambda: [torch.empty(B, n)],
    ),
    "squares_and_mean": (lambda value: ops.squares_and_mean(value, 16), lambda: rows(1)),
    "squares_of_many": (lambda *values: ops.squares_of_many([*values]), lambda: rows(2)),
    "weighted_of_many": (lambda c, value: ops.weighted_of_many(c, [value]), lambda: [torch.empty(B), *rows(1)]),
}


@pytest.mark.parametrize("name", ASKED)
def test_no_number_of_samples_is_compiled_in(name):
    ask, given = ASKED[name]
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env) as mode:
        open_ = [_opened(mode, t) for t in given()]
        ask(*open_)
    found = [guard.expr for guard in env.guards]
    assert not [e for e in found if isinstance(e, sympy.Eq) and e.rhs.is_number], found


def _opened(mode, t):
    sizes = [DimDynamic.DYNAMIC] + [DimDynamic.STATIC] * (t.ndim - 1)
    return mode.from_tensor(
        t, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes), source=ConstantSource("given")
    )


def test_every_op_is_asked():
    defined = {
        name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name.startswith("eachgrad::")
    }
    # Noise comes after the graph; recurrent layers of many sizes have one graph in test_sizes.py.
    assert defined - {"noisy", "recurrence", "recurrence_backward"} == set(ASKED)
