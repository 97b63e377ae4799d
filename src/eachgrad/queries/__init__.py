"""Questions about each sample's gradient, as objects: to be asked before the backward, of one batch or of several.

answer = tape.ask(losses, norms=eachgrad.norms(), grad=eachgrad.clipped_sum(1.0))
"""

from eachgrad.queries.ask import Accumulator, Answer
from eachgrad.queries.base import Over, Query
from eachgrad.queries.moments import GradientNoise as noise_scale
from eachgrad.queries.moments import Mean as mean
from eachgrad.queries.moments import SecondMoment as second_moment
from eachgrad.queries.moments import Variance as variance
from eachgrad.queries.products import AllGradients as dense
from eachgrad.queries.products import Dot as dot
from eachgrad.queries.products import Gram as gram
from eachgrad.queries.products import Project as project
from eachgrad.queries.sums import ClippedSum as clipped_sum
from eachgrad.queries.sums import Norms as norms
from eachgrad.queries.sums import TopkNorms as topk_norms
from eachgrad.queries.sums import WeightedSum as weighted_sum

__all__ = [
    "Accumulator", "Answer", "Over", "Query", "clipped_sum", "dense", "dot", "gram", "mean", "noise_scale", "norms",
    "project", "second_moment", "topk_norms", "variance", "weighted_sum",
]  # fmt: skip
