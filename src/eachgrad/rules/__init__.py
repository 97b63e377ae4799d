"""What each op does to a parameter's gradient: one file per op family."""

from eachgrad.rules import attention, broadcast, convolution, embedding, linear, looped, norm, recurrent
from eachgrad.rules.registry import BROADCAST, COMPOSITES, RULES, Rule, composite, rule, via_vmap

__all__ = [
    "BROADCAST",
    "COMPOSITES",
    "RULES",
    "Rule",
    "attention",
    "broadcast",
    "composite",
    "convolution",
    "embedding",
    "linear",
    "looped",
    "norm",
    "recurrent",
    "rule",
    "via_vmap",
]
