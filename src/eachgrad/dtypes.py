"""Numbers of sixteen bits, and what is computed of them."""

import torch

SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of squares of `dtype` numbers are formed: never less than float32."""
    return torch.float32 if dtype in SIXTEEN_BITS else dtype
