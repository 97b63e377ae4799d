"""Triton's interpreter, which runs kernels where there is no GPU, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def assert_as_in_float64(code: str) -> None:
    """Run the code, which raises if a kernel is wrong, where the interpreter is on."""
    pytest.importorskip("triton", reason="Triton is there on Linux alone")
    path = os.pathsep.join([os.path.dirname(os.path.abspath(__file__)), *sys.path])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-c", f"{code}\nprint('as in float64')"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert found.stdout.strip() == "as in float64", found.stderr
