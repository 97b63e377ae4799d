"""Every model the tests run, as data: what it is, what is hazardous about it, its batch, its losses."""

from __future__ import annotations

from .attention import ATTENTION
from .base import (
    B,
    Case,
    Net,
    Refused,
    T,
    batch,
    cut_first,
    cut_second,
    d,
    ids,
    net,
    reals,
    score,
    scored,
    scored_second,
    weight,
)
from .convolution import CONVOLUTION
from .derived import DERIVED
from .embedding import EMBEDDING
from .in_place import IN_PLACE
from .layouts import SAMPLES
from .linear import LINEAR
from .modes import MODES
from .norm import NORM
from .random import RANDOM
from .raw import RAW
from .recurrent import RECURRENT
from .refused import REFUSED
from .several import TWICE

CASES = (
    LINEAR + EMBEDDING + CONVOLUTION + NORM + RECURRENT + ATTENTION + RAW + DERIVED + TWICE + IN_PLACE + SAMPLES + MODES
)

__all__ = [
    "CASES",
    "RANDOM",
    "REFUSED",
    "B",
    "Case",
    "Net",
    "Refused",
    "T",
    "batch",
    "cut_first",
    "cut_second",
    "d",
    "ids",
    "net",
    "reals",
    "score",
    "scored",
    "scored_second",
    "weight",
]
