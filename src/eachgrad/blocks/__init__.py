"""Structured per-sample gradients: one file per representation, all of its queries in it."""

from eachgrad.blocks.base import Block, Dense, Fold
from eachgrad.blocks.outer import Outer
from eachgrad.blocks.patches import Geometry, Patches
from eachgrad.blocks.rows import Rows
from eachgrad.blocks.sum import Sum, add
from eachgrad.blocks.summed import Summed, can_wait, form

__all__ = [
    "Block",
    "Dense",
    "Fold",
    "Geometry",
    "Outer",
    "Patches",
    "Rows",
    "Sum",
    "Summed",
    "add",
    "can_wait",
    "form",
]
