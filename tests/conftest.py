"""What several test files share."""

import sys

import pytest
import torch

from eachgrad import mixing, stream


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
