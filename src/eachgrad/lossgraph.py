"""What the autograd graph of a scalar loss shows: how it reduced the samples, and whether it mixed them.

The graph is read from the model's outputs up to the loss. The samples of a node's output lie along a
dimension, in some order; or they have been summed, or mixed, or nothing is known. The graph may have been
freed: sizes and dimensions are still there then, saved tensors are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from eachgrad.eager_entropy import RowEntropies
from eachgrad.errors import CaptureError

Node = Any  # torch.autograd.graph.Node
Edge = tuple[Node, int]


@dataclass(frozen=True)
class Rows:
    """Samples along dimension `dim`; two tensors in the same `order` have them in the same places."""

    dim: int
    order: object = None


State = Rows | str | None  # "summed", "mixed", "unknown", or None: not computed from the outputs

# Linear ops: a sum over samples stays one.
_LINEAR = set(
    """
    Add Sub Rsub Neg Sum Mean View UnsafeView Reshape ReshapeAlias Squeeze Unsqueeze Select Stack Cat ToCopy Alias
    Clone  Expand Unbind Slice Copy T Transpose Permute Detach
    """.split()
)
_SCALED = {"Mul", "Div"}  # linear in one operand
_ELEMENTWISE = _SCALED | set(
    """
    Add Sub Rsub Neg ToCopy Alias Clone Copy Relu Sigmoid Tanh Exp Exp2 Expm1 Log Log2 Log10 Log1P Pow Sqrt Rsqrt
    Square  Abs Sin Cos Tan Asin Acos Atan Sinh Cosh Atan2 Softplus LogSigmoid Gelu Silu Mish Elu Celu Selu
    LeakyRelu Hardtanh  Hardsigmoid Hardswish Hardshrink Softshrink Threshold Clamp ClampMin ClampMax Where
    MaskedFill Reciprocal Erf Erfc  Erfinv Lgamma Digamma Maximum Minimum Fmax Fmin Lerp Xlogy Logaddexp Logaddexp2
    Addcmul Addcdiv Fmod Remainder NanToNum  Real Imag Conj Angle Complex Polar Sgn Sign Floor Round Ceil Trunc Frac
    Dropout NativeDropout FusedDropout Prelu Rrelu  MseLoss L1Loss SmoothL1Loss HuberLoss BinaryCrossEntropy
    BinaryCrossEntropyWithLogits KlDiv SoftMarginLoss Logit  Hypot
    """.split()
)
# Ops along the dimension, or dimensions, that they saved.
_ALONG = set(
    """
    Softmax LogSoftmax Logsumexp Cumsum Cumprod Logcumsumexp Sort Topk Kthvalue Mode Median Nanmedian Max Min Amax
    Amin Aminmax  Prod Std Var StdMean VarMean Norm LinalgVectorNorm Renorm Glu Diff
    """.split()
)
_VIEWS = {"View", "UnsafeView", "Reshape", "ReshapeAlias", "Squeeze", "Expand"}
_MOVING = {
    "Slice",
    "Flip",
    "Roll",
    "IndexSelect",
    "Gather",
    "Narrow",
    "Index",
    "Split",
    "Unbind",
    "Unfold",
    "ConstantPadNd",
}
_TRAILING = {"NativeLayerNorm", "FusedRmsNorm", "NativeGroupNorm"}  # normalise what comes after the first dimension


@dataclass
class _Reading:
    """The states of a graph's nodes, and what reduced the samples."""

    starts: Mapping[Edge, State]  # the outputs
    B: int
    states: dict[Node, State] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    mean: bool = False
    divided: bool = False
    weighted: bool = False  # a mean over targets with class weights
    averages: list[tuple[Node, State]] = field(default_factory=list)  # means over targets, some of which may be ignored

    def read(self, root: Node) -> State:
        stack, begun = [root], set()
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
                edges = [self.starts[e] if e in self.starts else self.states.get(e[0]) for e in below]
                self.states[node] = self._state(node, [s for s in edges if s is not None])
        return self.states[root]

    def _state(self, node: Node, below: list[Any]) -> State:
        name = node.name().rstrip("0123456789").removesuffix("Backward")
        if not below or "mixed" in below:
            return "mixed" if below else None
        if name in _SCALED:
            self.divided = self.divided or _may_divide(node, name, self.B)
        if "summed" in below:
            linear = name in _LINEAR or (name in _SCALED and len(below) == 1)
            return "summed" if linear and set(below) == {"summed"} else "mixed"
        if "unknown" in below:
            if name.startswith("NllLoss") and node._saved_reduction == 1:
                self._average(node, "unknown")
            return "unknown"
        if name in ("Cat", "Stack"):
            return self._joined(node, name, below)
        if len(set(below)) > 1:  # samples in different places, or in another order, meet
            return "mixed"
        found = self._rows(node, name, below)
        if found == "unknown":
            self.unknown.add(name)
        return found

    def _rows(self, node: Node, name: str, below: list[Rows]) -> State:
        rows, out = below[0], tuple(node._input_metadata[0].shape)
        reduction = getattr(node, "_saved_reduction", None)
        if reduction is not None:
            return self._loss(node, name, reduction, rows)
        if getattr(node, "_forward_cls", None) is RowEntropies:  # (N, classes, ...) -> (N, ...)
            return "mixed" if rows.dim == 1 else Rows(rows.dim - (rows.dim > 1), rows.order)
        if name in ("Sum", "Mean"):
            return self._reduced(node, name, rows)
        if name in _ELEMENTWISE:
            return rows if rows.dim < len(out) else "unknown"
        if name in _ALONG:
            return self._along(node, rows, out)
        if name in _VIEWS:
            return rows if rows.dim == 0 and out else self._view(node, rows, out)
        if name in _MOVING:
            return self._moved(node, name, rows, out)
        if name in ("Mm", "Matmul", "Cdist", "Addmm") and len(below) == 1:
            return rows if rows.dim == 0 else "unknown"
        if name in ("Bmm", "Baddbmm") and rows.dim == 0:
            return rows  # a product per sample
        if name in (
            "Mm",
            "Matmul",
            "Bmm",
            "Baddbmm",
            "Addmm",
            "Cdist",
            "Pdist",
            "Dot",
            "NativeBatchNorm",
            "CudnnBatchNorm",
        ):
            return "mixed"
        if name in _TRAILING and rows.dim == 0:
            shape = getattr(node, "_saved_normalized_shape", None)
            return "mixed" if shape is not None and len(shape) == len(out) else rows
        return self._permuted(node, name, rows, out)

    def _joined(self, node: Node, name: str, below: list[Rows]) -> State:
        """Tensors put side by side: in a new order if that is along the samples."""
        if len({rows.dim for rows in below}) > 1:
            return "unknown"
        rows, rank = below[0], len(node._input_metadata[0].shape)
        at = _signed(node._saved_dim) % rank
        if name == "Stack":
            dim = rows.dim + (at <= rows.dim)
        elif at == rows.dim:
            return Rows(at, node)
        else:
            dim = rows.dim
        return Rows(dim, rows.order) if len(set(below)) == 1 else "mixed"

    def _permuted(self, node: Node, name: str, rows: Rows, out: tuple[int, ...]) -> State:
        rank = len(out)
        if name == "T" or (name == "Transpose" and rank == 2):
            return Rows(1 - rows.dim, rows.order)
        if name == "Transpose":
            a, b = (_signed(d) % rank for d in (node._saved_dim0, node._saved_dim1))
            return Rows({a: b, b: a}.get(rows.dim, rows.dim), rows.order)
        if name == "Permute":
            return Rows([_signed(d) % rank for d in node._saved_dims].index(rows.dim), rows.order)
        if name == "Unsqueeze":
            return Rows(rows.dim + (_signed(node._saved_dim) % rank <= rows.dim), rows.order)
        if name == "Select":
            at = _signed(node._saved_dim) % (rank + 1)
            return Rows(0, node) if at == rows.dim else Rows(rows.dim - (at < rows.dim), rows.order)
        return "unknown"

    def _view(self, node: Node, rows: Rows, out: tuple[int, ...]) -> State:
        """A view keeps a dimension whose size, and whose predecessors' sizes, it leaves alone."""
        before = tuple(getattr(node, "_saved_self_sym_sizes", ()))
        upto = rows.dim + 1
        return rows if before[:upto] == out[:upto] and len(out) >= upto else "unknown"

    def _along(self, node: Node, rows: Rows, out: tuple[int, ...]) -> State:
        dims = getattr(node, "_saved_dim", None)
        if dims is None or dims == ():
            return "mixed"  # over everything
        dims = dims if isinstance(dims, (tuple, list)) else (dims,)
        sizes = getattr(node, "_saved_self_sym_sizes", None)
        keeps = bool(getattr(node, "_saved_keepdim", False))
        rank = len(sizes) if sizes is not None else len(out)
        # An op that drops its dimensions has more of them before than after.
        reduces = sizes is None and not keeps and hasattr(node, "_saved_keepdim")
        rank += len(dims) if reduces else 0
        over = {_signed(d) % max(rank, 1) for d in dims}
        if rows.dim in over:
            return "mixed"
        gone = 0 if keeps or rank == len(out) else sum(d < rows.dim for d in over)
        return Rows(rows.dim - gone, rows.order)

    def _moved(self, node: Node, name: str, rows: Rows, out: tuple[int, ...]) -> State:
        dim = getattr(node, "_saved_dim", None)
        if (
            name in ("Slice", "IndexSelect", "Gather", "Narrow", "Split")
            and dim is not None
            and _signed(dim) % len(out) != rows.dim
        ):
            return rows
        if name in ("Flip", "Roll"):
            dims = getattr(node, "_saved_dims", ())
            return rows if dims and rows.dim not in {_signed(d) % len(out) for d in dims} else Rows(rows.dim, node)
        if name == "Index" and rows.dim == 0 and out:
            return Rows(0, node)
        return Rows(rows.dim, node) if rows.dim < len(out) else "unknown"

    def _loss(self, node: Node, name: str, reduction: int, rows: Rows) -> State:
        if reduction == 1:
            self.mean = True
            if name.startswith("NllLoss"):
                self._average(node, rows)
        return "summed" if reduction else rows

    def _average(self, node: Node, state: State) -> None:
        self.averages.append((node, state))
        self.weighted = self.weighted or _has_class_weights(node)

    def _reduced(self, node: Node, name: str, rows: Rows) -> State:
        rank = len(node._saved_self_sym_sizes)
        dims = getattr(node, "_saved_dim", None)
        over = {_signed(d) % rank for d in dims} if dims else set(range(rank))
        if rows.dim in over:
            self.mean = self.mean or name == "Mean"
            return "summed"
        kept = getattr(node, "_saved_keepdim", False)
        return rows if kept else Rows(rows.dim - sum(d < rows.dim for d in over), rows.order)


def _signed(d: int) -> int:
    """Negative dimensions are stored as unsigned numbers."""
    return d - 2**64 if d >= 2**63 else d


def _may_divide(node: Node, name: str, B: int) -> bool:
    """Whether this is a division by a multiple of B, as far as the graph still shows it."""
    try:
        other = node._saved_other
    except (RuntimeError, AttributeError):  # freed, or not saved
        return True
    if other is None or (isinstance(other, Tensor) and other.numel() != 1):
        return other is None
    value = float(other.real) if name == "Div" else 1 / float(other.real) if other != 0 else 0.0
    return value > 0 and abs(value / B - round(value / B)) < 1e-4 and round(value / B) > 0


def _has_class_weights(node: Node) -> bool:
    try:
        return node._saved_weight is not None
    except RuntimeError:  # freed: an absent weight would still read as None
        return True


def check(
    root: Node, starts: Mapping[Edge, State], declared: str, B: int, ignores: bool | None, *, measured: bool
) -> None:
    """Raise if the loss mixes samples, or reduces them in another way than the declared one.

    `ignores` says whether the loss leaves out some target; None: look at the targets it saved. `measured`
    says that mixing is measured as well, so that an op of which nothing is known may pass.
    """
    if B == 1 or root is None:
        return
    reading = _Reading(starts, B)
    state = reading.read(root)
    if state == "mixed":
        raise CaptureError(
            "the loss mixes samples: it compares or normalises the outputs of several samples (a contrastive or "
            "batch-normalised loss), so that no sample has a loss of its own. Leave that part out of the recorded loss."
        )
    if state == "unknown" and not measured:
        raise CaptureError(
            f"the loss passes {', '.join(sorted(reading.unknown)) or 'a rearrangement'} on the way from the outputs, and "
            "it cannot be seen whether that keeps samples apart: compute one loss per sample and use eachgrad.record"
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
    if reading.averages and (reading.weighted or _ignores(reading, ignores)):
        raise CaptureError(
            "the loss is a mean that leaves out ignored targets or weighs classes: it divides by the total weight of "
            'the whole batch, which is no mean over samples. Use reduction="sum" with loss_reduction="sum", or one '
            "loss per sample."
        )


def _ignores(reading: _Reading, given: bool | None) -> bool:
    """Whether targets are ignored, and not as many of each sample."""
    if given is not None:
        return given
    return any(
        int(node._saved_total_weight) != node._saved_target.numel() and not _evenly(node, state, reading.B)
        for node, state in reading.averages
    )


def _evenly(node: Node, state: State, B: int) -> bool:
    """Whether as many targets of each sample count: the samples must lie one after the other, as they were."""
    kept = node._saved_target != _signed(node._saved_ignore_index)
    if not isinstance(state, Rows) or state.dim or state.order is not None or kept.numel() % B:
        return False
    counts = kept.reshape(B, -1).sum(1)
    return bool((counts == counts[0]).all())
