"""explain: which route an answer takes for each use of a parameter, what it costs, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from eachgrad import footprint, plan
from eachgrad import uses as use_blocks
from eachgrad.blocks import Dense, Outer
from eachgrad.blocks.base import place_of
from eachgrad.gradient import costs_of
from eachgrad.receipt import call_loss

if TYPE_CHECKING:
    from eachgrad.grads import PerSampleGrads
    from eachgrad.use import Use

QUERIES = ("norms", "weighted_sum", "clipped_sum", "dense")


@dataclass(frozen=True)
class Row:
    """One use of one parameter."""

    parameter: str
    op: str
    where: str
    B: int
    T: int
    d: int
    p: int
    representation: str
    route: str
    flops: int
    bytes: int  # held until the answer is known
    reason: str


@dataclass(frozen=True)
class Explanation:
    """What an answer does, use by use, and in all."""

    query: str
    rows: tuple[Row, ...]
    weights: int  # FLOPs of the weights' gradients in a plain backward, which the answer replaces
    passes: int | None = None  # FLOPs of the recorded forward and backward, counted
    second: int = 0  # FLOPs of a second backward, where the memory allowed asks for one
    formed: int = 0  # FLOPs of gradients that no rule knows, by vmap or a loop; part of the rows
    peak: int | None = None  # bytes at the highest point of forward, backward and answer, above the model, predicted

    @property
    def flops(self) -> int:
        """Of the answer alone, beside forward and backward."""
        return sum(row.flops for row in self.rows)

    @property
    def total(self) -> int | None:
        """Of forward, backward and answer together."""
        return None if self.passes is None else self.passes + self.second + self.flops

    @property
    def plain(self) -> int | None:
        """Of a plain forward and backward."""
        return None if self.passes is None else self.passes + self.weights

    def __str__(self) -> str:
        head = ("parameter", "op", "B", "T", "d", "p", "held as", "route", "MFLOP", "KiB", "reason")
        lines = [
            (
                row.parameter, row.op.rpartition(".")[2], *map(str, (row.B, row.T, row.d, row.p)), row.representation,
                row.route, f"{row.flops / 1e6:,.1f}", f"{row.bytes / 1024:,.0f}", row.reason,
            )
            for row in self.rows
        ]  # fmt: skip
        widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
        numeric = {2, 3, 4, 5, 8, 9}
        text = [
            "  ".join(
                c.rjust(w) if k in numeric else c.ljust(w) for k, (c, w) in enumerate(zip(line, widths, strict=True))
            )
            for line in (head, *lines)
        ]
        return "\n".join([*(line.rstrip() for line in text), *self._totals()])

    def _totals(self) -> list[str]:
        found = [
            f"{self.query}: {self.flops / 1e6:,.1f} MFLOP, where a plain backward spends {self.weights / 1e6:,.1f} on "
            "the same weights"
        ]
        if self.total is not None and self.plain:
            found.append(
                f"forward, backward and answer: {self.total / 1e6:,.1f} MFLOP, {self.total / self.plain:.2f} times a plain "
                f"forward and backward ({self.plain / 1e6:,.1f})"
            )
        if self.peak is not None:
            found.append(f"peak memory above the model: {self.peak / 2**20:,.1f} MiB")
        return found


def _check(query: str) -> None:
    if query not in QUERIES:
        raise ValueError(f"explain knows {', '.join(QUERIES)}, not {query!r}")


def of_grads(grads: PerSampleGrads, query: str) -> Explanation:
    """The explanation of a question about gradients that are there."""
    _check(query)
    costs = costs_of(grads)
    held = plan.schedule(costs, grads._budget)
    if query in ("norms", "clipped_sum"):
        costs |= _sharing(grads, {name for name in grads if query == "norms" or held[name] != "gradients"}, costs)
    parts = _by_use(grads)
    rows: list[Row] = []
    for name, cost in costs.items():
        some = parts.get(name, [])
        if not some:
            unused = Row(
                name, "none", "", cost.B, 0, cost.d, cost.p, "nothing", "zero", 0, 0, "the loss does not use it"
            )
            rows.append(unused)
            continue
        route = plan.answer(cost, query, held[name])
        whole = sum(part.cost.factors for part in some)
        for part in some:
            cost, share = part.cost, part.cost.factors / whole if whole else 1 / len(some)
            reason = route.reason if len(some) == 1 else f"{len(some)} uses together; {route.reason}"
            reason = reason if not part.how else f"one derivative of the op for each sample, {part.how}: it has no rule"
            rows.append(
                Row(
                    name, part.use.name, str(part.use.where), cost.B, cost.T, cost.d, cost.p, part.kind, route.name,
                    round(route.flops * share) + part.flops, round(route.bytes * share), reason,
                )
            )  # fmt: skip
    formed = sum(part.flops for some in parts.values() for part in some)
    return Explanation(query, tuple(rows), sum(cost.weight for cost in costs.values()), formed=formed)


def _sharing(grads: PerSampleGrads, names: set[str], costs: dict[str, plan.Cost]) -> dict[str, plan.Cost]:
    """The costs of those whose Gram has a side in common with one that was formed before."""
    found: dict[str, plan.Cost] = {}
    seen: set[tuple] = set()
    for name, gradient in grads.items():
        block, cost = gradient.block, costs[name]
        if name not in names or not isinstance(block, Outer) or cost.norms.name != "Gram":
            continue
        device = block.left.device.type
        if plan.gram_samples(cost.B, cost.T, device) < cost.B:  # a few samples at a time: nothing is left to share
            continue
        sides = {place_of(t): t.shape[2] for t in (block.left, block.right)}
        spared = sum(plan.gram_flops(cost.B, cost.T, width, device) for key, width in sides.items() if key in seen)
        seen |= set(sides)
        if spared:
            norms = replace(cost.norms, flops=cost.norms.flops - spared, reason="a Gram shared with another parameter")
            found[name] = replace(cost, norms=norms)
    return found


@dataclass(frozen=True)
class _Part:
    """One use of one parameter, with the cost of its block."""

    use: Use
    cost: plan.Cost
    derived: bool
    how: str  # "by vmap", "by a loop", or by a rule: ""
    flops: int  # of forming it, where no rule does

    @property
    def kind(self) -> str:
        return ", ".join(filter(None, (self.cost.kind, self.how, "derived" if self.derived else "")))


def _by_use(grads: PerSampleGrads) -> dict[str, list[_Part]]:
    tensors = grads._record.recorder.tensors
    found: dict[str, list[_Part]] = {}
    for item, wanted in grads._record.accepted:
        if not wanted or item.layout is None:
            continue
        with FlopCounterMode(display=False) as counter:
            blocks = use_blocks.blocks(item.use, item.g, item.layout, grads.batch_size)
        flops = counter.get_total_flops()
        for source, block in zip(item.use.sources, blocks, strict=True):
            if id(source) not in wanted:
                continue
            how = block.how if isinstance(block, Dense) else ""
            derived = id(source) not in tensors.parameters
            for name in tensors.names_of(source):
                if name in grads:
                    found.setdefault(name, []).append(_Part(item.use, block.cost(), derived, how, flops if how else 0))
                    flops = 0  # the sources of one use are formed together
    return found


def explain(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    *batch: Any,
    query: str = "clipped_sum",
    memory: int | str | None = None,
    batch_dim: int = 0,
    loss_reduction: str | None = None,
    fallback: str = "refuse",
) -> Explanation:
    """What `query` costs for this model and batch: one row per use of a parameter, and totals. Print it.

    Runs the forward and the backward once, and counts them; the answer itself is predicted. `loss_fn` is as for
    `verify`. The peak memory is that of `tape.ask`, once the layouts are known.
    """
    from eachgrad.tape import record

    _check(query)  # before any work
    forward, backward = FlopCounterMode(display=False), FlopCounterMode(display=False)
    tape = record(model, batch_dim=batch_dim, memory=memory, fallback=fallback)
    with tape, footprint.Saved(tape.recorder) as saved, forward:
        losses = call_loss(model, loss_fn, batch)
    with backward:
        grads = tape.backward(losses, loss_reduction)
    found = of_grads(grads, query)
    once = (backward.get_total_flops() - found.formed) // max(1, tape.recorder.passes)
    held = plan.schedule(costs_of(grads), tape.budget)
    twice = query == "clipped_sum" and "again" in held.values()
    peak = footprint.peak(saved, grads, query, held, [t for t in batch if isinstance(t, torch.Tensor)])
    return replace(found, passes=forward.get_total_flops() + once, second=once if twice else 0, peak=peak)
