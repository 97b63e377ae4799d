"""From a recorded use and its output gradient to a block for each of its sources."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from eachgrad import layout as lay
from eachgrad import pieces
from eachgrad.blocks import Block, Dense, Fold, add
from eachgrad.errors import CaptureError
from eachgrad.graph import mapped, tensors_in
from eachgrad.rules.linear import Unanswered
from eachgrad.rules.registry import Arguments, NeedsLoop, Rule
from eachgrad.use import Use


def blocks(
    use: Use, g: Tensor, layout: lay.Layout, B: int, create_graph: bool = False, recipe: Recipe | None = None
) -> Sequence[Block]:
    """A block of B gradients for each source of `use`; each has the shape of its source.

    With `create_graph` the blocks stay attached to `g` and to the arguments of the op. `recipe`: of a use like this one.
    """
    use.check_versions()
    if use.piece is not None:
        return pieces.blocks(
            use.piece, str(use), g if create_graph else g.detach(), layout, use.sources, B, create_graph
        )
    if use.rule.reads_parameters:
        use.check_sources()
    if create_graph and use.rule.bind(use.args, use.kwargs).get("scale_grad_by_freq"):
        raise CaptureError(
            f"create_graph=True, but {use} has scale_grad_by_freq: what torch computes for it is no derivative that could "
            "be differentiated again. Leave the option out, or ask without create_graph."
        )
    try:
        if recipe is not None and recipe.rule is use.rule and not create_graph and not torch.is_grad_enabled():
            found = recipe.blocks(use, g.detach())
        else:
            found = _by_rule(use, g if create_graph else g.detach(), layout, B, create_graph)
    except NeedsLoop:
        return _by_loop(use, g, layout, B, create_graph)
    known = [block for block in found if block is not None]
    if len(known) == len(found):
        return known
    looped = _by_loop(use, g, layout, B, create_graph)
    return tuple(b if a is None else a for a, b in zip(found, looped, strict=True))


def _by_rule(use: Use, g: Tensor, layout: lay.Layout, B: int, create_graph: bool) -> list[Block | None]:
    """What the rule says of each source, None where it says nothing; raises NeedsLoop where it cannot."""
    rule = use.rule
    if rule.is_dense:
        # vmap detaches what it is given.
        if create_graph or not isinstance(layout, lay.Along) or layout.dim:
            raise NeedsLoop
        return _folded(_by_dense_rule(use, g), layout.fold)
    arguments = rule.bind(use.args, use.kwargs)
    names = _names_of_sources(use, arguments)
    if not create_graph:
        for name, value in arguments.items():
            if isinstance(value, Tensor):
                arguments[name] = value.detach()
            elif isinstance(value, (tuple, list, dict)):
                arguments[name] = mapped(Tensor.detach, value)
    if rule.takes_batch_dim:
        if isinstance(layout, lay.Scattered):
            raise NeedsLoop
        answer = _call(rule, g, arguments | {"batch_dim": layout.dim}, create_graph)
        return _folded(_by_source(names, answer), layout.fold)
    front, fold = _to_the_front(rule, g, arguments, layout, B)
    if rule.saved and front is None and not create_graph:
        arguments["saved"] = use.saved
    if front is not None:
        arguments |= {n: front(arguments[n]) for n in rule.samples if isinstance(arguments.get(n), Tensor)}
        g = front(g)
    return _folded(_by_source(names, _call(rule, g, arguments, create_graph)), fold)


@dataclass(frozen=True)
class Recipe:
    """What `_by_rule` finds out about a call but its tensors: the same for that use of every forward like this one.

    Of uses whose samples lie along the first dimension, as most do.
    """

    rule: Rule
    arguments: tuple[tuple[str, Any], ...]  # of the rule's function: "place" or "name" in the call, or a "value"
    names: tuple[str, ...]  # by source, under which the rule answers
    fold: Fold | None

    @classmethod
    def of(cls, use: Use, g: Tensor, layout: lay.Layout, B: int) -> Recipe | None:
        """None for what is not so plain."""
        rule = use.rule
        if (
            use.piece is not None
            or rule.is_dense
            or rule.takes_batch_dim
            or not isinstance(layout, lay.Along)
            or layout.dim
        ):
            return None
        arguments = rule.bind(use.args, use.kwargs)
        names, order = _names_of_sources(use, arguments), rule.order
        if order is None or rule.lead(g, arguments) < 1 or any(len(group) != 1 for group in names):
            return None
        places: dict[str, tuple[str, Any]] = {name: ("place", k) for k, name in enumerate(order[: len(use.args)])}
        places |= {name: ("name", name) for name in use.kwargs}
        if rule.saved:
            places["saved"] = "saved", None
        nested = any(tensors_in(value) for value in arguments.values() if not isinstance(value, Tensor))
        if nested or len(use.args) > len(order) or {*order} != {*arguments} or not places.keys() <= {*order}:
            return None
        found = tuple([places.get(name) or ("value", arguments[name]) for name in order])
        return cls(rule, found, tuple([group[0] for group in names]), layout.fold)

    def blocks(self, use: Use, g: Tensor) -> list[Block | None]:
        """As `_by_rule` has them."""
        given = []
        for kind, what in self.arguments:
            if kind == "place":
                value = use.args[what]
            elif kind == "name":
                value = use.kwargs[what]
            else:
                value = use.saved if kind == "saved" else what
            given.append(value.detach() if isinstance(value, Tensor) else value)
        answer = self.rule.function(g, *given)
        return _folded([_answered(answer.get(name)) for name in self.names], self.fold)


def _answered(part: Block | None) -> Block | None:
    return None if isinstance(part, Unanswered) else part


def _by_dense_rule(use: Use, g: Tensor) -> list[Block | None]:
    """A dense rule guesses which arguments hold samples: its sum over samples must be the op's derivative."""
    whole = derivative(use, g)
    found: Any = use.rule.function(g, use.args, use.kwargs, use.sources, use.samples)
    for block, total in zip(found, whole, strict=True):
        if total is not None and not _close(block.dense().sum(0), total):
            raise NeedsLoop
    return [Dense(block.dense(), "by vmap") for block in found]


def _close(a: Tensor, b: Tensor) -> bool:
    tolerance = max(1e-9, 100 * torch.finfo(a.dtype).eps)
    return a.shape == b.shape and bool((a - b).abs().amax() <= tolerance * b.abs().amax().clamp(min=1e-30))


def _to_the_front(
    rule: Rule, g: Tensor, arguments: Arguments, layout: lay.Layout, B: int
) -> tuple[Callable[[Tensor], Tensor] | None, Fold | None]:
    """What brings the samples to dimension 0, None where they are there, and how they are folded there."""
    lead = rule.lead(g, arguments)
    if isinstance(layout, lay.Along):
        if layout.dim >= lead:
            raise NeedsLoop
        return (lambda t: t.movedim(layout.dim, 0)) if layout.dim else None, layout.fold
    fold = lay.rows(layout, lead, B) if lead else None
    if fold is None:
        raise NeedsLoop
    return lambda t: t.flatten(0, lead - 1), fold


def _folded(found: list[Block | None], fold: Fold | None) -> list[Block | None]:
    return found if fold is None else [None if block is None else block.fold(fold) for block in found]


def _call(rule: Rule, g: Tensor, arguments: Arguments, create_graph: bool) -> dict[str, Block]:
    if torch.is_grad_enabled() is create_graph:  # as in the hooks of a backward
        return rule.answer(g, arguments)
    with torch.set_grad_enabled(create_graph):
        return rule.answer(g, arguments)


def _names_of_sources(use: Use, arguments: Arguments) -> list[list[str]]:
    """Under which argument names each source was given to the op."""
    names: dict[int, list[str]] = {id(source): [] for source in use.sources}
    for name, value in arguments.items():
        found = names.get(id(value))
        if found is not None:
            found.append(name)
        elif isinstance(value, (tuple, list)):
            for k, item in enumerate(value):
                if id(item) in names:
                    names[id(item)].append(f"{name}.{k}")
    return [names[id(source)] for source in use.sources]


def _by_source(names: list[list[str]], answer: dict[str, Block]) -> list[Block | None]:
    """The rule's answer by argument name -> one block per source, None where a part is missing."""
    found: list[Block | None] = []
    for group in names:
        if len(group) == 1:
            found.append(_answered(answer.get(group[0])))
            continue
        parts = [answer.get(name) for name in group]
        known = [p for p in parts if p is not None and not isinstance(p, Unanswered)]
        found.append(add(known) if known and len(known) == len(parts) else None)
    return found


def _by_loop(use: Use, g: Tensor, layout: lay.Layout, B: int, create_graph: bool) -> tuple[Block, ...]:
    """PyTorch's own derivative of the op, once per sample, with every other sample's gradient zeroed."""
    owner = lay.owners(layout, g.shape, g.device)
    floating = [t for t in tensors_in((use.args, use.kwargs)) if t.is_floating_point() or t.is_complex()]
    if not all(bool(t.isfinite().all()) for t in (g, *floating)):
        raise CaptureError(
            f"a sample is not finite, and {use}, is differentiated one sample after another, where NaN and inf would "
            "spread to the others: leave such samples out"
        )
    out, leaves = replay(use, create_graph)
    rows, options = [], {"retain_graph": True, "allow_unused": True, "create_graph": create_graph}
    with torch.set_grad_enabled(create_graph):
        for i in range(B):
            own = torch.where(owner == i, g, torch.zeros_like(g))
            rows.append(torch.autograd.grad(out, leaves, own.to(out.dtype), **options))
        return tuple(
            Dense(
                torch.stack([torch.zeros_like(leaf) if row[k] is None else _plain(row[k]) for row in rows]), "by a loop"
            )
            for k, leaf in enumerate(leaves)
        )


def derivative(use: Use, g: Tensor) -> Sequence[Tensor | None]:
    """PyTorch's own derivative of the op for all samples together: a gradient for each source."""
    if use.piece is not None:
        return use.piece.pull(g)
    out, leaves = replay(use)
    return torch.autograd.grad(out, leaves, g.to(out.dtype), allow_unused=True)


def replay(use: Use, attached: bool = False) -> tuple[Tensor, list[Tensor]]:
    """The op once more, on its recorded arguments: its output, and its sources anew.

    They are leaves, or copies if everything is to stay `attached`.
    """
    if use.op is not torch.Tensor.expand:  # which reads no values
        use.check_sources()
    device, dtype = use.autocast or (use.tap.device.type, None)
    with torch.enable_grad(), torch.autocast(device, dtype, enabled=dtype is not None):
        sources = [s for s in use.sources if isinstance(s, Tensor)]
        leaves = {id(s): s.clone() if attached else s.detach().clone().requires_grad_() for s in sources}

        def fresh(t: Any) -> Any:
            if not isinstance(t, Tensor) or id(t) in leaves:
                return leaves.get(id(t), t)
            t = t if attached else t.detach()
            return t.clone() if use.op in _UPDATING else t

        args, kwargs = tree_map(fresh, (use.args, use.kwargs))
        out = use.op(*args, **kwargs)
    return out, list(leaves.values())


_UPDATING = {F.instance_norm, F.batch_norm}  # ops that change running statistics when they are run again


def _plain(t: Tensor) -> Tensor:
    return t.to_dense() if t.is_sparse else t
