"""mean_product: a product of matrices divided by a number, in the kernel that makes the product.

The mean of a weight's gradients is one product over all samples, divided by how many they are. A compiler divides in a kernel
of its own, which reads and writes the whole answer once more; a product can have the factor for nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eachgrad.dtypes import accumulation_dtype
from eachgrad.kernels.library import library, new_empty


def plain(left: Tensor, right: Tensor, count: int) -> Tensor:
    """The same in two of torch's ops."""
    dtype = accumulation_dtype(left.dtype)
    return left.to(dtype) @ right.to(dtype) / count


def launched(left: Tensor, right: Tensor, count: int) -> Tensor:
    """The same by one."""
    out = new_empty(left, (left.shape[0], right.shape[1]), accumulation_dtype(left.dtype))
    if not left.numel() or not right.numel():
        return out.zero_()
    # What is added has the factor 0, and is not read; of any tensor that there is it may be a corner.
    nothing, factors = left[:1, :1], {"beta": 0, "alpha": 1.0 / count}
    if out.dtype == left.dtype:
        return torch.addmm(nothing, left, right, out=out, **factors)
    return torch.ops.aten.addmm.dtype_out(nothing, left, right, out.dtype, out=out, **factors)


# A graph for any number of samples has a symbol for the count.
library.define("mean_product(Tensor left, Tensor right, SymInt count) -> Tensor", tags=(torch.Tag.flexible_layout,))
library.impl("mean_product", plain, "CPU")
library.impl("mean_product", launched, "CUDA")


@torch.library.register_fake("eachgrad::mean_product", lib=library)
def _(left: Tensor, right: Tensor, count: int) -> Tensor:
    return left.new_empty((left.shape[0], right.shape[1]), dtype=accumulation_dtype(left.dtype))
