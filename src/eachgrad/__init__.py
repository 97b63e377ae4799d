"""eachgrad: answers about each sample's gradient, from one ordinary batched backward."""

from eachgrad import expanded_weights, testing
from eachgrad.blocks import Dense, Outer
from eachgrad.call import call_for_per_sample_grads
from eachgrad.compiled import compile
from eachgrad.errors import CaptureError, EachgradError, UnsupportedOp
from eachgrad.explanation import explain
from eachgrad.grads import PerSampleGrads
from eachgrad.queries import (
    Accumulator,
    clipped_sum,
    dense,
    dot,
    gram,
    mean,
    noise_scale,
    norms,
    project,
    second_moment,
    topk_norms,
    variance,
    weighted_sum,
)
from eachgrad.receipt import verify
from eachgrad.rules import rule, via_vmap
from eachgrad.tape import Tape, record

__version__ = "0.1.0"
# Blocks, receipts and the like are in the modules that define them; here is what a session starts from.
__all__ = [
    "Accumulator", "CaptureError", "Dense", "EachgradError", "Outer", "PerSampleGrads", "Tape", "UnsupportedOp",
    "call_for_per_sample_grads", "clipped_sum", "compile", "dense", "dot", "expanded_weights", "explain", "gram", "mean",
    "noise_scale", "norms", "project", "record", "rule", "second_moment", "testing", "topk_norms", "variance", "verify",
    "via_vmap", "weighted_sum",
]  # fmt: skip
