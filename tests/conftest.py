"""What several test files share."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eachgrad import mixing, stream


def pytest_configure() -> None:
    """Some virtual machines announce AMX and kill whoever uses it, as products of bfloat16 do: these are told not to."""
    cpu = Path("/proc/cpuinfo")
    if "ONEDNN_MAX_CPU_ISA" in os.environ or not (cpu.exists() and "amx_bf16" in cpu.read_text()):
        return
    product = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"
    if subprocess.run([sys.executable, "-c", product]).returncode == -signal.SIGILL:
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"  # read at the first product, and by the workers


@pytest.fixture(autouse=True)
def _no_rule_of_tags_fails_unseen(monkeypatch):
    monkeypatch.setattr(mixing, "UNFORESEEN", ())


@pytest.fixture
def double():
    """Float64 by default, and a fixed seed."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def fresh_compiler():
    """No graph of another test, before and after."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def visits(monkeypatch) -> list[bool]:
    """Whether each backward so far that was streamed freed what it passed."""
    found: list[bool] = []
    original = stream.visit

    def visit(*args, **kwargs):
        found.append(kwargs["last"])
        return original(*args, **kwargs)

    monkeypatch.setattr(stream, "visit", visit)
    return found


@pytest.fixture(autouse=True)
def _the_compiler_stays_on():
    """A block that is never left would leave the compiler off for every test that follows."""
    yield
    if "torch._dynamo" in sys.modules:
        from torch._dynamo import eval_frame

        assert eval_frame._stance.stance == "default"
