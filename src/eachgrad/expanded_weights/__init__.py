"""PyTorch's per-sample-gradient API, name for name, on eachgrad's rules."""

from eachgrad.call import call_for_per_sample_grads
from eachgrad.expanded_weights.helpers import (
    forward_helper,
    is_batch_first,
    maybe_scale_by_batch_size,
    set_grad_sample_if_exists,
    standard_kwargs,
    sum_over_all_but_batch_and_last_n,
    unpack_expanded_weight_or_tensor,
)
from eachgrad.expanded_weights.ops import (
    ConvPerSampleGrad,
    EmbeddingPerSampleGrad,
    GroupNormPerSampleGrad,
    InstanceNormPerSampleGrad,
    LayerNormPerSampleGrad,
    LinearPerSampleGrad,
)
from eachgrad.expanded_weights.recurrent import expanded_weights_rnn_decomps
from eachgrad.expanded_weights.tensor import (
    HANDLED_FUNCTIONS,
    ExpandedWeight,
    allow_smaller_batches,
    batch_second,
    implements_per_sample_grads,
    setup_rnn,
)

__all__ = [
    "HANDLED_FUNCTIONS",
    "ConvPerSampleGrad",
    "EmbeddingPerSampleGrad",
    "ExpandedWeight",
    "GroupNormPerSampleGrad",
    "InstanceNormPerSampleGrad",
    "LayerNormPerSampleGrad",
    "LinearPerSampleGrad",
    "allow_smaller_batches",
    "batch_second",
    "call_for_per_sample_grads",
    "expanded_weights_rnn_decomps",
    "forward_helper",
    "implements_per_sample_grads",
    "is_batch_first",
    "maybe_scale_by_batch_size",
    "set_grad_sample_if_exists",
    "setup_rnn",
    "standard_kwargs",
    "sum_over_all_but_batch_and_last_n",
    "unpack_expanded_weight_or_tensor",
]
