"""What several test files share."""

import pytest
import torch


@pytest.fixture
def double():
    """Float64 by default, and a fixed seed."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)
