"""Kernels for a GPU, each beside the eager code that says what it computes; `torch.library` ops, so that graphs hold them."""
