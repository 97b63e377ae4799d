"""eachgrad: answers about each sample's gradient, from one ordinary batched backward."""

from eachgrad import expanded_weights, testing
from eachgrad.blocks import Block, Dense, Outer, Patches, Rows, Sum
from eachgrad.call import call_for_per_sample_grads
from eachgrad.errors import CaptureError, EachgradError, UnsupportedOp
from eachgrad.grads import Gradient, PerSampleGrads
from eachgrad.moments import NoiseScale
from eachgrad.queries import (
    Accumulator, clipped_sum, dense, dot, gram, mean, noise_scale, norms, project, second_moment, topk_norms, variance,
    weighted_sum,
)  # fmt: skip
from eachgrad.receipt import Receipt, Verification, verify
from eachgrad.rules import rule, via_vmap
from eachgrad.tape import Tape, record

__version__ = "0.1.0"
__all__ = [
    "Block", "CaptureError", "Dense", "EachgradError", "Gradient", "NoiseScale", "Outer", "Patches", "PerSampleGrads",
    "Receipt", "Rows", "Sum", "Tape", "UnsupportedOp", "Verification", "call_for_per_sample_grads", "expanded_weights",
    "record", "rule", "testing", "verify", "via_vmap",
]  # fmt: skip
