"""A kernel's code is looked up by all that it may have been compiled for, and takes its arguments by place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eachgrad.kernels import launching
from eachgrad.kernels.launching import direct, is_unwatched, launch
from eachgrad.kernels.positions import position_sums

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="a kernel's code runs on a GPU alone")


class Code:
    def __init__(self, heard: list[tuple]):
        self.heard = heard

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *args: self.heard.append((grid, args))


class Kernel:
    """What Triton makes of a function, as far as it is asked here."""

    arg_names = ("x", "n", "sizes", "BLOCK", "EVEN")

    def __init__(self) -> None:
        self.compiled: list[tuple[tuple, dict]] = []
        self.heard: list[tuple] = []
        self.pre_run_hooks: list[Any] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        def run(*args: Any, **given: Any) -> Code:
            self.compiled.append((args, given))
            return Code(self.heard)

        return run


@pytest.fixture(autouse=True)
def _forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_known", {})


def start(kernel: Kernel, x: Tensor, n: int = 3, sizes: tuple = (1, 2), block: int = 64, even: bool = True) -> None:
    launch(kernel, 5, x, (x, n, sizes), {"EVEN": even, "BLOCK": block}, num_warps=4)


def test_a_second_launch_takes_the_code_and_its_arguments_in_order():
    kernel, x, y = Kernel(), torch.zeros(8), torch.ones(16)
    start(kernel, x)
    start(kernel, y)
    assert kernel.compiled == [((x, 3, (1, 2)), {"EVEN": True, "BLOCK": 64, "num_warps": 4})]
    ((grid, (given, *rest)),) = kernel.heard
    assert given is y
    assert (grid, rest) == ((5, 1, 1), [3, (1, 2), 64, True])


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.zeros(8, dtype=torch.bfloat16)}, {"x": torch.zeros(9)[1:]}, {"n": 16}, {"sizes": (1, 4)}, {"block": 32},
        {"even": False}, {"sizes": (torch.zeros(4), torch.zeros(4))},
    ],
)  # fmt: skip
def test_what_code_is_made_for_is_told_apart(other: dict[str, Any]):
    kernel = Kernel()
    start(kernel, torch.zeros(8))
    start(kernel, **({"x": torch.zeros(8)} | other))
    assert (len(kernel.compiled), kernel.heard) == (2, [])


def test_options_and_kernels_are_told_apart():
    kernel, x = Kernel(), torch.zeros(8)
    start(kernel, x)
    launch(kernel, 5, x, (x, 3, (1, 2)), {"EVEN": True, "BLOCK": 64}, num_warps=8)
    other = Kernel()
    start(other, x)
    assert (len(kernel.compiled), len(other.compiled), kernel.heard, other.heard) == (2, 1, [], [])


def test_hooks_hear_of_every_launch():
    kernel, x = Kernel(), torch.zeros(8)
    kernel.pre_run_hooks.append(print)
    start(kernel, x)
    start(kernel, x)
    assert len(kernel.compiled) == 2


def test_no_more_is_remembered_than_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launching, "MOST", 3)
    kernel, x = Kernel(), torch.zeros(8)
    for n in range(10):
        start(kernel, x, n)
        assert len(launching._known) <= 3
    start(kernel, x, 9)
    assert len(kernel.heard) == 1


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_without_a_gpu_an_op_is_called():
    x = torch.zeros(3)
    assert not is_unwatched(x)
    assert direct(lambda t: "op", lambda t: "kernel", x, x) == "op"


def test_what_has_a_sign_to_be_changed_yet_goes_by_its_op(monkeypatch: pytest.MonkeyPatch):
    """A kernel reads the memory as it is."""
    monkeypatch.setattr(launching, "is_unwatched", lambda t: True)
    x, negative = torch.ones(3), torch.ones(3, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    for args, way in [
        ((x,), "kernel"),
        ((x, [x]), "kernel"),
        ((negative,), "op"),
        ((x, [x, negative]), "op"),
        ((x, 1), "kernel"),
    ]:
        assert direct(lambda *args: "op", lambda *args: "kernel", x, *args) == way


@needs_gpu
def test_who_watches_sees_the_op():
    x = torch.zeros(3, device="cuda")
    assert direct(lambda t: "op", lambda t: "kernel", x, x) == "kernel"
    with Watch():
        assert not is_unwatched(x)
    assert not is_unwatched(x.clone().requires_grad_())
    seen = []
    torch.vmap(lambda t: (seen.append(is_unwatched(t)), t)[1])(x)
    assert seen == [False]
    assert is_unwatched(x)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sizes_and_addresses_that_change_from_launch_to_launch(dtype: torch.dtype):
    """Code made for even addresses and sizes must not be taken for others, nor the other way round."""
    torch.manual_seed(0)
    room = torch.randn(1 << 16, device="cuda", dtype=dtype)
    for _ in range(2):
        for start, B, T, n in [
            (0, 3, 64, 32),
            (1, 3, 64, 32),
            (8, 3, 64, 32),
            (0, 4, 17, 33),
            (3, 1, 1, 1),
            (0, 2, 16, 48),
        ]:
            value = room[start : start + B * T * n].view(B, T, n)
            found = position_sums(value)[0]
            exact = value.double().sum(1)
            assert (found - exact).norm() <= 1e-5 * exact.norm() + 1e-6
