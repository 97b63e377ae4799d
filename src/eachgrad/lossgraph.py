"""What the autograd graph of a scalar loss shows: how it reduced the samples, and whether it mixed them.

The graph is read from the model's outputs up to the loss. Each node is in one of these states: the samples
lie along a dimension, or they have been summed, or they have been mixed, or nothing is known. The graph may
have been freed: sizes and dimensions are still there then, saved tensors are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eachgrad.errors import CaptureError

Node = Any  # torch.autograd.graph.Node
Edge = tuple[Node, int]
State = int | str | None  # a dimension, "summed", "mixed", "unknown", or None: not computed from the outputs

# Ops that are linear, so that a sum over samples stays one.
_LINEAR = (
    "Add", "Sub", "Rsub", "Neg", "Sum", "Mean", "View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze", "Select",
    "Stack", "Cat", "ToCopy", "Alias", "Clone", "Expand", "Unbind", "Slice", "Copy", "T", "Transpose", "Permute",
)  # fmt: skip
_SCALED = ("Mul", "Div")  # linear in one operand
_ALONG_A_DIMENSION = (
    "Softmax",
    "LogSoftmax",
    "Logsumexp",
    "Cumsum",
    "Cumprod",
    "Sort",
    "Flip",
    "Max",
    "Min",
    "Topk",
)
_PRODUCTS = ("Mm", "Bmm", "Matmul", "Addmm", "Cdist", "Baddbmm")
_MIXING = ("NativeBatchNorm", "CudnnBatchNorm", "Roll")


@dataclass
class _Reading:
    """The states of a graph's nodes, and what reduced the samples."""

    starts: Mapping[Edge, State]  # the outputs
    states: dict[Node, State] = field(default_factory=dict)
    mean: bool = False
    divided: bool = False
    weighted: bool = False  # a mean over targets with class weights
    averages_targets: bool = False  # a mean over targets, some of which may be ignored

    def edge(self, edge: Edge) -> State:
        return self.starts[edge] if edge in self.starts else self.states.get(edge[0])

    def read(self, root: Node) -> State:
        stack = [root]
        begun = set()
        while stack:
            node = stack[-1]
            below = [e for e in node.next_functions if e[0] is not None]
            todo = [n for n, k in below if (n, k) not in self.starts and n not in self.states and n not in begun]
            begun.add(node)
            if todo:
                stack.extend(todo)
                continue
            stack.pop()
            if node not in self.states:
                self.states[node] = self._state(node, [self.edge(e) for e in below])
        return self.states[root]

    def _state(self, node: Node, below: list[State]) -> State:
        name, known = (
            node.name().removesuffix("Backward0").removesuffix("Backward1"),
            [s for s in below if s is not None],
        )
        if not known:
            return None
        if "mixed" in known:
            return "mixed"
        if name in _SCALED:
            self.divided = True
        if "summed" in known:
            linear = name in _LINEAR or (name in _SCALED and len(known) == 1)
            return "summed" if linear and set(known) == {"summed"} else "mixed"
        if "unknown" in known:
            return "unknown"
        if name in _MIXING or (name in _PRODUCTS and len(known) > 1):
            return "mixed"
        return self._along(node, name, known)

    def _along(self, node: Node, name: str, known: list[Any]) -> State:
        dim, out = known[0], tuple(node._input_metadata[0].shape)
        if len(set(known)) > 1:
            # Broadcasting aligns at the right; anything else that meets on different dimensions pairs samples.
            return "unknown" if len({tuple(out)}) == 1 and name in ("Cat", "Stack") else "mixed"
        reduction = getattr(node, "_saved_reduction", None)
        if reduction is not None:
            return self._loss(node, name, reduction, dim)
        if name in ("Sum", "Mean"):
            return self._reduced(node, name, dim)
        if name in _ALONG_A_DIMENSION and hasattr(node, "_saved_dim"):
            rank = len(out) if "sum" not in name and name not in ("Max", "Min") else max(len(out), dim) + 1
            return "mixed" if _signed(node._saved_dim) % max(rank, 1) == dim else dim
        if name == "T" or (name == "Transpose" and len(out) == 2):
            return 1 - dim
        if name == "Transpose":
            a, b = (_signed(d) % len(out) for d in (node._saved_dim0, node._saved_dim1))
            return {a: b, b: a}.get(dim, dim)
        if name == "Permute":
            return [_signed(d) % len(out) for d in node._saved_dims].index(dim)
        if name == "Unsqueeze":
            return dim + (_signed(node._saved_dim) % len(out) <= dim)
        if name == "Select":
            at = _signed(node._saved_dim)
            at = at % (len(out) + 1)
            return "unknown" if at == dim else dim - (at < dim)
        if name in (
            "View",
            "UnsafeView",
            "Reshape",
            "Squeeze",
            "Expand",
            "Index",
            "Gather",
            "Slice",
            "Unbind",
        ):
            return dim if dim == 0 and out else "unknown"
        if name in _PRODUCTS:
            return dim if dim == 0 else "unknown"
        return dim if dim < len(out) else "unknown"

    def _loss(self, node: Node, name: str, reduction: int, dim: int) -> State:
        if reduction == 0:
            return dim
        if reduction == 1:
            self.mean = True
            if name.startswith("NllLoss"):
                self.averages_targets = True
                self.weighted = self.weighted or _has_class_weights(node)
        return "summed"

    def _reduced(self, node: Node, name: str, dim: int) -> State:
        rank = len(node._saved_self_sym_sizes)
        dims = getattr(node, "_saved_dim", None)
        over = {_signed(d) % rank for d in dims} if dims else set(range(rank))
        if dim in over:
            self.mean = self.mean or name == "Mean"
            return "summed"
        kept = getattr(node, "_saved_keepdim", False)
        return dim if kept else dim - sum(d < dim for d in over)


def _signed(d: int) -> int:
    """Negative dimensions are stored as unsigned numbers."""
    return d - 2**64 if d >= 2**63 else d


def _has_class_weights(node: Node) -> bool:
    try:
        return node._saved_weight is not None
    except RuntimeError:  # freed: an absent weight would still read as None
        return True


def check(root: Node, starts: Mapping[Edge, State], declared: str, B: int, ignores: bool | None) -> None:
    """Raise if the loss mixes samples, or reduces them in another way than the declared one.

    `ignores` says whether the loss leaves out some target; None: look at the targets it saved.
    """
    if B == 1 or root is None:
        return
    reading = _Reading(starts)
    state = reading.read(root)
    if state == "mixed":
        raise CaptureError(
            "the loss mixes samples: it compares or normalises the outputs of several samples (a contrastive or "
            "batch-normalised loss). No sample has a loss of its own here."
        )
    if declared == "sum" and reading.mean:
        raise CaptureError(
            'loss_reduction="sum", but the loss takes a mean over the batch: pass loss_reduction="mean", or one loss '
            "per sample"
        )
    if declared == "mean" and state == "summed" and not reading.mean and not reading.divided:
        raise CaptureError(
            'loss_reduction="mean", but nothing in the loss divides by the size of the batch: pass '
            'loss_reduction="sum", or one loss per sample'
        )
    if reading.averages_targets and (reading.weighted or _ignores(reading, ignores)):
        raise CaptureError(
            "the loss is a mean that leaves out ignored targets or weighs classes: it divides by the total weight of "
            'the whole batch, which is no mean over samples. Use reduction="sum" with loss_reduction="sum", or one '
            "loss per sample."
        )


def _ignores(reading: _Reading, given: bool | None) -> bool:
    if given is not None:
        return given
    nodes = [n for n in reading.states if n.name().startswith("NllLoss") and n._saved_reduction == 1]
    return any(int(n._saved_total_weight) != n._saved_target.numel() for n in nodes)
