"""Matrix products: linear, matmul and its relatives, einsum, bilinear."""

from __future__ import annotations

import math
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eachgrad.blocks import Block, Dense, Outer, Summed, can_wait
from eachgrad.blocks.arithmetic import cast, over_positions
from eachgrad.rules.registry import Arguments, NeedsLoop, composite, rule


def positions(t: Tensor) -> Tensor:
    """(B, ..., d) -> (B, T, d)."""
    return t if t.ndim == 3 else t.reshape(len(t), -1, t.shape[-1])


def all_but_last(g: Tensor, arguments: Arguments) -> int:
    """The lead of an op that maps vectors to vectors."""
    return g.ndim - 1


def _in_order(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """linear of a view such as (T, B, d) as one product: with a weight that asks for no gradient torch takes T of them.

    In a transformer on two cores four such calls took 22.4 ms instead of 18.2, and their backward as well.
    """
    return F.linear(input.contiguous(), weight, bias)


@rule(F.linear, lead=all_but_last, values=False, run=_in_order)
def _linear(g: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> dict[str, Block]:
    g, x = positions(g), positions(cast(input, g.dtype))
    x = x.conj() if x.is_complex() else x
    if weight.ndim == 1:  # one output, which has no dimension of its own
        raise NeedsLoop
    found: dict[str, Block] = {"weight": Outer(g, x)}
    if bias is not None:  # nobody else asks for its sum, which reads all of g
        found["bias"] = Summed(g) if can_wait(g) else Dense(over_positions(g)[0])
    return found


if hasattr(F, "linear_cross_entropy"):  # not in every version of torch

    @composite(F.linear_cross_entropy)
    def _linear_cross_entropy(*args: Any, options: Any = None, **kwargs: Any) -> Tensor:
        """With options it runs in chunks, in an op of its own; without, as linear and cross_entropy."""
        return NotImplemented if options is None else F.linear_cross_entropy(*args, **kwargs)


@rule(torch.addmm, torch.Tensor.addmm, samples=("mat1",), values=False)
def _addmm(
    g: Tensor, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> dict[str, Block]:
    if input.shape != g.shape[1:]:  # a bias of shape (1, p), (1,) or ()
        raise NeedsLoop
    x = mat1.to(g.dtype).conj() * alpha
    return {"input": Dense(g * beta), "mat2": Outer(x.unsqueeze(1), g.unsqueeze(1))}


@rule(F.bilinear, samples=("input1", "input2"), lead=all_but_last, values=False)
def _bilinear(
    g: Tensor, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None
) -> dict[str, Block]:
    g, x, y = positions(g), positions(input1.to(g.dtype)), positions(input2.to(g.dtype))
    weights = torch.einsum("btp,bti,btj->bpij", g, x.conj(), y.conj())
    return {"weight": Dense(weights), "bias": Dense(over_positions(g)[0])}


@rule(
    torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm, torch.bmm,
    torch.Tensor.bmm, torch.mv, torch.Tensor.mv, torch.linalg.matmul, values=False,
)  # fmt: skip
def _matmul(g: Tensor, input: Tensor, other: Tensor, *, batch_dim: int) -> dict[str, Block]:
    left, right, out = _matmul_letters(input.ndim, other.ndim)
    found = contract([input, other], [left, right], g, out, batch_dim)
    return {"input": found[0], "other": found[1]}


@composite(torch.Tensor.__rmatmul__)
def _rmatmul(other: Tensor, input: Tensor) -> Tensor:
    return torch.matmul(input, other)


def _matmul_letters(a: int, b: int) -> tuple[str, str, str]:
    """matmul's operands and result as einsum subscripts: 'x' rows, 'y' contracted, 'z' columns."""
    batch = ascii_letters[: max(a, b, 2) - 2]
    left = "y" if a == 1 else batch[len(batch) - (a - 2) :] + "xy"
    right = "y" if b == 1 else batch[len(batch) - (b - 2) :] + "yz"
    return left, right, batch + ("x" if a > 1 else "") + ("z" if b > 1 else "")


@rule(torch.einsum, values=False)
def _einsum(g: Tensor, equation: str, *operands: Tensor, batch_dim: int) -> dict[str, Block]:
    subscripts, _, out = equation.replace(" ", "").partition("->")
    letters = subscripts.split(",")
    if "..." in equation or "->" not in equation or any(len(set(s)) < len(s) for s in [*letters, out]):
        raise NeedsLoop
    found = contract(list(operands), letters, g, out, batch_dim)
    return {f"operands.{k}": block for k, block in enumerate(found)}


@composite(torch.einsum)
def _einsum_of_a_list(equation: str, *operands: Any) -> Tensor:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        return torch.einsum(equation, *operands[0])
    return NotImplemented


@composite(torch.tensordot)
def _tensordot(a: Tensor, b: Tensor, dims: Any = 2, out: None = None) -> Tensor:
    """The contracted dimensions last in `a` and first in `b`, then one matrix product."""
    if isinstance(dims, Tensor):
        dims = dims.tolist()
    over_a = list(range(a.ndim - dims, a.ndim)) if isinstance(dims, int) else [d % a.ndim for d in dims[0]]
    over_b = list(range(dims)) if isinstance(dims, int) else [d % b.ndim for d in dims[1]]
    free_a = [d for d in range(a.ndim) if d not in over_a]
    free_b = [d for d in range(b.ndim) if d not in over_b]
    letters_a = dict(zip([*free_a, *over_a], ascii_letters, strict=False))
    letters_b = {d: letters_a[e] for d, e in zip(over_b, over_a, strict=True)}
    letters_b |= dict(zip(free_b, ascii_letters[a.ndim :], strict=False))
    left, right = "".join(letters_a[d] for d in range(a.ndim)), "".join(letters_b[d] for d in range(b.ndim))
    result = "".join([letters_a[d] for d in free_a] + [letters_b[d] for d in free_b])
    return torch.einsum(f"{left},{right}->{result}", a, b)


class Unanswered(Block):
    """Stands for an operand of a contraction whose gradient this rule cannot give."""


def contract(operands: list[Tensor], letters: list[str], g: Tensor, out: str, batch_dim: int) -> list[Block]:
    """A block for each operand of an einsum whose output's dimension `batch_dim` counts the samples."""
    sizes = dict(zip(out, g.shape, strict=True))
    for t, s in zip(operands, letters, strict=True):
        sizes |= {k: max(n, sizes.get(k, 1)) for k, n in zip(s, t.shape, strict=True)}
    # A dimension of size 1 that is broadcast takes no part in the sum.
    kept = [
        "".join(k for k, n in zip(s, t.shape, strict=True) if n == sizes[k])
        for t, s in zip(operands, letters, strict=True)
    ]
    slim = [t.to(g.dtype).conj().reshape([sizes[k] for k in s]) for t, s in zip(operands, kept, strict=True)]
    return [_operand(k, slim, kept, g, out, out[batch_dim], tuple(operands[k].shape)) for k in range(len(operands))]


def _operand(
    k: int,
    operands: list[Tensor],
    letters: list[str],
    g: Tensor,
    out: str,
    sample: str,
    shape: tuple[int, ...],
) -> Block:
    wanted = letters[k]
    others = [(t, s) for j, (t, s) in enumerate(zip(operands, letters, strict=True)) if j != k]
    known = set(out).union(*(s for _, s in others))
    if sample in wanted or not set(wanted) <= known:
        return Unanswered()
    if len(others) == 1:
        outer = _as_outer(wanted, *others[0], g, out, sample, shape)
        if outer is not None:
            return outer
    equation = ",".join([out, *(s for _, s in others)]) + "->" + sample + wanted
    value = torch.einsum(equation, g, *(t for t, _ in others))
    return Dense(value.reshape(len(value), *shape))


def _as_outer(
    wanted: str, x: Tensor, x_letters: str, g: Tensor, out: str, sample: str, shape: tuple[int, ...]
) -> Outer | None:
    """The factors of a plain matrix product: part of `wanted` comes from g, the rest from x."""
    from_g = [k for k in wanted if k in out and k not in x_letters]
    from_x = [k for k in wanted if k in x_letters and k not in out]
    if len(from_g) + len(from_x) != len(wanted) or not from_g or not from_x:
        return None
    shared = [k for k in out if k not in wanted and k != sample]
    if sample not in x_letters or any(k not in x_letters for k in shared):
        return None
    g = torch.einsum(f"{out}->{sample}{''.join(shared + from_g)}", g)
    x = torch.einsum(f"{x_letters}->{sample}{''.join(shared + from_x)}", x)
    g, x = (
        t.reshape(len(t), math.prod(t.shape[1 : 1 + len(shared)]), math.prod(t.shape[1 + len(shared) :]))
        for t in (g, x)
    )
    if wanted == "".join(from_g + from_x):
        return Outer(g, x, shape)
    return Outer(x, g, shape) if wanted == "".join(from_x + from_g) else None
