"""Peak memory of a call on a CPU, counted from the allocator's own events.

python benchmarks/memory.py     # checks itself on calls whose peak is known
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile


def peak(function: Callable[[], object]) -> int:
    """The most bytes of tensors alive at once during one call, above those alive at its start.

    What the call returns is held to the end, so that an answer counts with the call that made it. Tensors alone are
    counted: buffers that oneDNN or the BLAS keep for themselves do not pass torch's allocator.
    """
    # The profiler does not see older memory go: rubbish that is collected inside would be a matter of chance.
    gc.collect()
    with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        answer = function()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    del answer
    events.sort(key=lambda e: e.start_ns())
    return max(itertools.accumulate((e.nbytes() for e in events), initial=0))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the profiler's library writes to the error stream at each start and stop."""
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


def _known() -> torch.Tensor:
    first, second = torch.ones(1000, 1000), torch.ones(500, 1000)
    total = first.sum() + second.sum()
    del first, second
    return torch.ones(250, 1000) * total  # 1 MB and its double, less than the 6 MB before


def main() -> None:
    outside = torch.ones(1000, 1000)
    leaf = torch.ones(1000, 1000, requires_grad=True)
    cases = {
        "4 MB and 2 MB, then 2 MB": (_known, 6_000_000),
        "an answer of 4 MB beside a tensor from outside": (lambda: outside + 1, 4_000_000),
        # exp keeps its result, and backward makes a gradient of the sum's input, expanded, and the leaf's.
        "a backward": (lambda: leaf.exp().sum().backward(), 8_000_000),
    }
    for name, (function, expected) in cases.items():
        leaf.grad = None
        found = peak(function)
        print(f"{name}: {found} bytes, expected {expected}")
        if abs(found - expected) > 1000:
            raise SystemExit("the count is off")


if __name__ == "__main__":
    main()
