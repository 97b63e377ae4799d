"""The scripts that make the figures run: small models, one round, every path that a machine without a GPU has."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]


def ran(*command: str) -> str:
    found = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout


def test_gpu_benchmark_in_small():
    contenders = ["plain", "plain_compiled", "eachgrad", "eachgrad_compiled", "vmap"]
    for work in ("private", "norms"):
        text = ran(
            "benchmarks/gpu.py", "--tiny", "--rounds", "1", "--dtype", "fp32", "--work", work, "--models", "gpt2",
            "--contenders", *contenders,
        )  # fmt: skip
        rows = [line for line in text.splitlines() if line.startswith("gpt2 ")]
        assert [line.split()[1] for line in rows] == contenders
        assert all(" ms " in line and "WRONG" not in line for line in rows), text


def test_private_gpu_benchmark_in_small():
    contenders = ["private", "private_half", "private_shuffled"]
    text = ran(
        "benchmarks/private_gpu.py", "--tiny", "--rounds", "1", "--steps", "2", "--dtype", "fp32", "--models", "gpt2",
        "--contenders", *contenders,
    )  # fmt: skip
    rows = [line.partition("] ")[2] for line in text.splitlines() if " a sample | " in line]
    assert [line.split()[1] for line in rows] == [*contenders, "plain_compiled"], text
    # Nothing was answered eagerly, which a reason at the end would say, and the clipped sums are right.
    assert all(" 1 graphs, " in line and "WRONG" not in line and ";" not in line for line in rows[:-1]), text


def test_kernels_benchmark_in_small(tmp_path):
    text = ran("benchmarks/kernels.py", "--tiny", "--rounds", "1", "--json", str(tmp_path / "kernels.json"))
    cases = ("grams B=2 all 8", "entropies and gradient 16 x 257", "squares_of_many B=2", "conv_sum B=2 8 at 4 x 4")
    assert all(case in text for case in cases), text
    assert (tmp_path / "kernels.json").exists()


def test_a_private_example():
    assert "accuracy" in ran("examples/private_breast_cancer.py")


@pytest.mark.parametrize("drawn", [(2, 3, 9, 12), (1, 6)])
def test_a_step_is_expected_to_take_what_its_draws_take(drawn, monkeypatch):
    """Times that grow with the samples have the mean of those: by chance the steps that were timed drew more."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from private_gpu import expected

    training = SimpleNamespace(data=range(64 * 4), batch_size=4)
    found = expected([(1e-3 * n, n) for n in (0, *drawn)], training)
    assert math.isclose(found, 4e-3, rel_tol=1e-9)
    few = expected([(2.0, 0), (2.0, 8)], training)
    assert 2.0 < few < 2.01, "more than were ever drawn take so much a sample as the most"
    assert expected([(3.0, 4), (3.2, 4)], training) == 3.1
