"""A cross entropy over many classes: torch's own ops against float64, the kernels against both, and graphs rewritten so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from eachgrad.kernels import entropy as kernel
from interpreter import assert_as_in_float64

SIZES = [(1, 1), (3, 5), (5, 4096), (4, 4097), (3, 8200), (0, 5)]  # rows, classes
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LAYOUTS = ("contiguous", "apart", "aligned", "transposed")
IGNORED = -100
TARGETS = [3, IGNORED, 2, 5000, -1, 1]  # of `not_finite`


def laid(kind: str, t: Tensor) -> Tensor:
    """The same numbers with other strides, between others that nobody may read."""
    rows, n = t.shape
    nan = float("nan")
    if kind == "apart":
        return t.new_full((rows + 2, n + 3), nan)[1:-1, 1 : n + 1].copy_(t)
    if kind == "aligned":
        return t.new_full((rows + 1, -(-n // 8) * 8), nan)[:rows, :n].copy_(t)
    if kind == "transposed":
        return t.new_full((n + 1, rows + 1), nan)[:n, :rows].copy_(t.mT).mT
    return t.contiguous()


def problem(size: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(sum(size))
    rows, n = size
    logits = (3 * torch.randn(size)).to(dtype)
    target = torch.randint(n, (rows,))
    target[1:2] = IGNORED
    logits[2:3, : n // 2] = -float("inf")  # classes that are ruled out: the first block has no others
    target[2:3] = n - 1
    logits[3:4] += 40.0
    return logits, torch.rand(rows) + 0.5, target


def check(logits: Tensor, g: Tensor, target: Tensor, sums: Tensor, found: Tensor, bfloat16: float = 2**-8) -> None:
    exact = logits.double().requires_grad_()
    losses = F.cross_entropy(exact, target, reduction="none", ignore_index=IGNORED)
    (want,) = torch.autograd.grad(losses, exact, g.double())
    torch.testing.assert_close(sums[2].double(), losses.detach(), rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(sums[:2].sum(0).double(), exact.detach().logsumexp(1), rtol=1e-6, atol=2e-6)
    assert found.dtype == logits.dtype
    assert found.shape == (len(logits), -(-logits.shape[1] // 8) * 8)
    assert not found[:, logits.shape[1] :].any()
    rounding = {torch.bfloat16: bfloat16, torch.float16: 2**-10, torch.float32: 2e-6}[logits.dtype]
    least = 2**-23 if logits.dtype == torch.float16 else 1e-9  # float16 has no smaller numbers
    torch.testing.assert_close(found.double()[:, : logits.shape[1]], want, rtol=rounding, atol=least)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_torchs_own_ops(size, dtype):
    logits, g, target = problem(size, dtype)
    for kind in LAYOUTS:
        given = laid(kind, logits)
        sums = torch.ops.eachgrad.entropies(given, target, IGNORED)
        found = torch.ops.eachgrad.entropy_gradient(given, sums, g, target, IGNORED)
        check(logits, g, target, sums, found)
    check(logits, g, target, sums, over(torch.ops.eachgrad.entropy_gradient_, logits, sums, g, target))


def over(write, logits: Tensor, sums: Tensor, g: Tensor, target: Tensor) -> Tensor:
    """The gradient that `write` puts where the logits are."""
    rows, n = logits.shape
    room = logits.new_full((rows, -(-n // 8) * 8), 7.0)
    room[:, :n] = logits
    write(room, sums, g, target, IGNORED, n)
    return room


def not_finite() -> Tensor:
    """A NaN, an infinite class, all ruled out, targets that are none; and a row that is none of these."""
    logits = torch.randn(6, 5000)
    logits[0, 4500], logits[1, 7] = float("nan"), float("inf")
    logits[2] = -float("inf")
    return logits


def check_not_finite(sums: Tensor, found: Tensor) -> None:
    """Whoever is ignored, too: torch's own derivative multiplies by zero."""
    assert found[:5].isnan().any(1).all()
    assert sums[2].isnan().tolist() == [True, False, True, True, True, False]  # the second is ignored
    assert found[5].isfinite().all()


def test_what_is_not_finite_stays_in_its_row():
    logits, target = not_finite(), torch.tensor(TARGETS)
    sums = torch.ops.eachgrad.entropies(logits, target, IGNORED)
    check_not_finite(sums, torch.ops.eachgrad.entropy_gradient(logits, sums, torch.ones(6), target, IGNORED))


def test_they_are_ops():
    logits, g, target = problem((4, 13), torch.float32)
    torch.library.opcheck(torch.ops.eachgrad.entropies.default, (logits, target, IGNORED))
    sums = torch.ops.eachgrad.entropies(logits, target, IGNORED)
    torch.library.opcheck(torch.ops.eachgrad.entropy_gradient.default, (logits, sums, g, target, IGNORED))
    torch.library.opcheck(
        torch.ops.eachgrad.entropy_gradient_.default, (torch.randn(4, 16), sums, g, target, IGNORED, 13)
    )


def test_others_are_refused():
    logits, g, target = problem((4, 13), torch.float32)
    with pytest.raises(TypeError, match=r"not torch\.float64"):
        torch.ops.eachgrad.entropies(logits.double(), target, IGNORED)
    with pytest.raises(ValueError, match=r"\(rows, classes\), not \(2, 2, 13\)"):
        torch.ops.eachgrad.entropies(logits.view(2, 2, 13), target, IGNORED)
    sums = torch.ops.eachgrad.entropies(logits, target, IGNORED)
    for wrong in ((sums[:, 1:], g, target), (sums, g[1:], target), (sums, g, target[1:])):
        with pytest.raises(ValueError, match="not one for each of 4 rows"):
            torch.ops.eachgrad.entropy_gradient(logits, *wrong, IGNORED)
    for rows in (logits, torch.randn(4, 24), torch.randn(4, 32)[:, :16]):
        with pytest.raises(ValueError, match="no rows of 13 classes and nothing else"):
            torch.ops.eachgrad.entropy_gradient_(rows, sums, g, target, IGNORED, 13)


def interpreted() -> None:
    """The kernels on all cases; to be called where Triton's interpreter is on."""
    from test_kernel_convolution import Poisoned

    for size in SIZES:
        for dtype in DTYPES:
            logits, g, target = problem(size, dtype)
            for kind in LAYOUTS:
                given = laid(kind, logits)
                with Poisoned():
                    sums = kernel.launched(given, target, IGNORED)
                    found = kernel.launched_gradient(given, sums, g, target, IGNORED)
                check(logits, g, target, sums, found, bfloat16=2**-7)  # the interpreter cuts bits off
            found = over(kernel.launched_over, logits, sums, g, target)
            check(logits, g, target, sums, found, bfloat16=2**-7)
    logits, target = not_finite(), torch.tensor(TARGETS)
    sums = kernel.launched(logits, target, IGNORED)
    check_not_finite(sums, kernel.launched_gradient(logits, sums, torch.ones(6), target, IGNORED))


def test_the_kernels_without_a_gpu():
    assert_as_in_float64("from test_kernel_entropy import interpreted; interpreted()")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [*SIZES, (7, 50257)], ids=str)
def test_the_kernels_on_a_gpu(size, dtype):
    logits, g, target = problem(size, dtype)
    for kind in LAYOUTS:
        given = laid(kind, logits.cuda())
        sums = torch.ops.eachgrad.entropies(given, target.cuda(), IGNORED)
        found = torch.ops.eachgrad.entropy_gradient(given, sums, g.cuda(), target.cuda(), IGNORED)
        check(logits, g, target, sums.cpu(), found.cpu())
    found = over(torch.ops.eachgrad.entropy_gradient_, logits.cuda(), sums, g.cuda(), target.cuda())
    check(logits, g, target, sums.cpu(), found.cpu())
    logits, target = not_finite().cuda(), torch.tensor(TARGETS).cuda()
    sums = torch.ops.eachgrad.entropies(logits, target, IGNORED)
    found = torch.ops.eachgrad.entropy_gradient(logits, sums, torch.ones(6).cuda(), target, IGNORED)
    check_not_finite(sums.cpu(), found.cpu())
