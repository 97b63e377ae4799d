"""Cross entropies over many classes in a traced graph, by kernels of their own.

Torch has the logarithms of all chances in float32, and their gradient, and the logits' as often again. Here a row of logits
has two numbers, its largest and the logarithm of its sum, and the gradient is computed from these in the logits' dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

from eachgrad.alignment import FILLED
from eachgrad.alive import GIVEN, memory_of
from eachgrad.kernels.entropy import is_large
from eachgrad.kernels.library import DTYPES
from eachgrad.tidy import call, narrower

aten, ops = torch.ops.aten, torch.ops.eachgrad

_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
_LOSS, _SEED, _GRADIENT = (
    aten.nll_loss_forward.default, aten.nll_loss_backward.default, aten._log_softmax_backward_data.default,
)  # fmt: skip
_LOSSES = ops.entropies.default


@dataclass(frozen=True)
class _Loss:
    """The nodes of one cross entropy, with a loss for each row."""

    logs: Node  # log_softmax of the logits
    losses: Node
    target: Node
    ignored: int
    gradients: list[tuple[Node, Node]]  # of the losses and, for these, of the logits


def entropies(graph: Graph, large: Callable[[Tensor], bool] = is_large) -> int:
    """Rewrite the cross entropies of a graph that does not write into tensors; how many there were."""
    found = [_loss_of(node, large) for node in graph.nodes if node.target is aten._log_softmax.default]
    losses = [loss for loss in found if loss is not None]
    for loss in losses:
        _rewrite(graph, loss)
    if losses:
        graph.eliminate_dead_code()
    return len(losses)


def write_over(graph: Graph) -> int:
    """Let gradients be written over logits that nobody reads any more; how many.

    Nothing may be moved in the graph after this: at that place are the logits before it, and the gradient after it.
    """
    made = [node for node in graph.nodes if node.target is ops.entropy_gradient.default]
    return sum(_written_over(graph, node) for node in made)


def _written_over(graph: Graph, made: Node) -> bool:
    logits, *others = cast(tuple[Node, ...], made.args)
    memory, like = memory_of(graph), made.meta["val"]
    mine = [node for node in graph.nodes if memory[node] is memory[logits]]
    readers = {user for node in mine for user in node.users if memory[user] is not memory[logits]}
    # A compiler may put off whatever it fuses, and read then what is there by then. It does not put these two off.
    if memory[logits].op in GIVEN or any(r is not made and (r.target is not _LOSSES or r > made) for r in readers):
        return False
    rows = next((n for n in mine if n < made and _is_whole(n.meta.get("val"), logits.meta["val"], like)), None)
    if rows is None or any(node > made for node in mine):
        return False
    with graph.inserting_before(made):
        graph.call_function(ops.entropy_gradient_.default, (rows, *others, logits.meta["val"].shape[1]))
    made.replace_all_uses_with(rows)
    graph.erase_node(made)
    return True


def _is_whole(value: Any, logits: Tensor, like: Tensor) -> bool:
    """Whether a tensor is the logits with what comes after the end of each row, as the gradient has it."""
    if not isinstance(value, Tensor) or value.dtype != like.dtype or value.shape != like.shape:
        return False
    same = value.untyped_storage()._cdata == logits.untyped_storage()._cdata
    return (
        same
        and value.is_contiguous()
        and value.storage_offset() == logits.storage_offset()
        and (logits.stride() == value.stride())
    )


def _loss_of(logs: Node, large: Callable[[Tensor], bool]) -> _Loss | None:
    """The cross entropy that a log_softmax is for, and nothing else; None if there is none."""
    value = cast(Node, logs.args[0]).meta["val"]
    if value.ndim != 2 or logs.args[1] not in (1, -1) or value.dtype not in DTYPES or not large(value):
        return None
    # Autocast has them in sixteen bits, or in float32, or casts them in between.
    casts = [user for user in logs.users if user.target is aten._to_copy.default]
    every = dict.fromkeys(user for node in (logs, *casts) for user in node.users if user not in casts)  # in order
    forward, seeds, gradients = ([u for u in every if u.target is op] for op in (_LOSS, _SEED, _GRADIENT))
    if len(forward) != 1 or not gradients or len(every) != 1 + len(seeds) + len(gradients):
        return None
    _, target, weight, reduction, ignored = cast(Any, forward[0].args)
    losses = [user for user in forward[0].users if user.args[1] == 0]
    read = {user for other in forward[0].users if other.args[1] != 0 for user in other.users}  # the total weight
    if weight is not None or reduction != 0 or target.meta["val"].dtype != torch.int64 or not read <= set(seeds):
        return None
    pairs = []
    for gradient in gradients:
        seed = cast(Node, gradient.args[0])
        while seed.target is aten._to_copy.default and len(seed.users) == 1:
            seed = cast(Node, seed.args[0])
        same = seed in seeds and seed.args[2:6] == (target, None, 0, ignored) and len(seed.users) == 1
        if not same or gradient.args[1] is not logs or gradient.args[2] not in (1, -1):
            return None
        pairs.append((cast(Node, seed.args[0]), gradient))
    if len(losses) != 1 or len(pairs) != len(seeds):
        return None
    return _Loss(logs, losses[0], target, ignored, pairs)


def _rewrite(graph: Graph, loss: _Loss) -> None:
    wide = cast(Node, loss.logs.args[0])
    logits = narrower(graph, wide)
    # Sixteen bits that were made float32 for it have a gradient of as many, unless that is added to others first.
    if logits is None or not all(_is_cast(gradient, logits) for _, gradient in loss.gradients):
        logits = wide
    at = _Calls(graph, loss.losses)
    sums = at(ops.entropies.default, logits, loss.target, loss.ignored)
    losses = at.cast(at(aten.select.int, sums, 0, 2), loss.losses.meta["val"].dtype)
    loss.losses.replace_all_uses_with(losses)
    for g, gradient in loss.gradients:
        at = _Calls(graph, gradient)
        made = at(ops.entropy_gradient.default, logits, sums, g, loss.target, loss.ignored)
        if made.meta["val"].shape != gradient.meta["val"].shape:
            made = at(aten.slice.Tensor, made, 1, 0, gradient.meta["val"].shape[1])
            made.meta[FILLED] = True
        made.meta["stride"] = gradient.meta["val"].stride()  # as it lay
        _replace(at, gradient, made)


def _is_cast(wide: Node, like: Node) -> bool:
    """Whether nobody reads a gradient but to cast it to this dtype."""
    dtype = like.meta["val"].dtype
    read = [c for user in wide.users for c in (user.users if user.target in _VIEWS else [user])]
    return all(c.target is aten._to_copy.default and c.meta["val"].dtype == dtype for c in read)


def _replace(at: _Calls, wide: Node, made: Node) -> None:
    """Let `made` be read for a gradient, or for what that is cast to."""
    if made.meta["val"].dtype == wide.meta["val"].dtype:
        wide.replace_all_uses_with(made)
        return
    for user in list(wide.users):
        is_view = user.target in _VIEWS
        narrow = at(aten.reshape.default, made, user.args[1]) if is_view else made
        for c in list(user.users) if is_view else [user]:
            c.replace_all_uses_with(narrow)


class _Calls:
    """New nodes, one after another, before a place."""

    def __init__(self, graph: Graph, before: Node):
        self.graph, self.before = graph, before

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self.graph.inserting_before(self.before):
            return call(self.graph, target, *args, **kwargs)

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        return node if node.meta["val"].dtype == dtype else self(aten._to_copy.default, node, dtype=dtype)
