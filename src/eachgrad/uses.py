"""From a recorded use and its output gradient to a block for each of its sources."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from eachgrad import layout as lay
from eachgrad.blocks import Block, Dense, add
from eachgrad.capture import Use
from eachgrad.rules.linear import Unanswered
from eachgrad.rules.registry import NeedsLoop


def blocks(use: Use, g: Tensor, layout: lay.Layout, B: int) -> tuple[Block, ...]:
    """A block of B gradients for each source of `use`; each has the shape of its source."""
    use.check_versions()
    found = _by_rule(use, g, layout, B)
    if found is None:
        return _by_loop(use, g, layout, B)
    missing = any(block is None for block in found)
    rest = _by_loop(use, g, layout, B) if missing else found
    return tuple(a if a is not None else b for a, b in zip(found, rest, strict=True))


def _by_rule(use: Use, g: Tensor, layout: lay.Layout, B: int) -> tuple[Block | None, ...] | None:
    """What the rule says, None where it has nothing to say."""
    rule = use.rule
    arguments = rule.bind(use.args, use.kwargs)
    args, kwargs = use.args, use.kwargs
    extra: dict[str, Any] = {}
    fold = layout.fold if isinstance(layout, lay.Along) else None
    if rule.takes_batch_dim:
        if isinstance(layout, lay.Scattered):
            return None
        extra = {"batch_dim": layout.dim}
    else:
        lead = rule.lead(g, arguments)
        names = [n for n in rule.samples if isinstance(arguments.get(n), Tensor)]
        if isinstance(layout, lay.Scattered):
            fold = lay.rows(layout, lead, B) if lead else None
            if fold is None or rule.is_dense:
                return None
            flat = lambda t: t.flatten(0, lead - 1)  # noqa: E731
        elif layout.dim >= lead or (layout.dim and rule.is_dense):
            return None
        else:
            flat = lambda t: t.movedim(layout.dim, 0)  # noqa: E731
        g = flat(g)
        arguments |= {n: flat(arguments[n]) for n in names}
    try:
        if rule.is_dense:
            answer = rule.function(g, args, kwargs, use.sources)
        else:
            detached = {n: _detached(v) for n, v in arguments.items()}
            answer = _by_source(use, arguments, _call(rule, g.detach(), detached, extra))
    except NeedsLoop:
        return None
    return tuple(b if b is None or fold is None else b.fold(fold) for b in answer)


def _call(rule: Any, g: Tensor, arguments: dict[str, Any], extra: dict[str, Any]) -> dict[str, Block]:
    """Call the rule's function, spreading what it declares as *args."""
    positional, named = [], {}
    for name, parameter in list(rule.signature.parameters.items())[1:]:
        if name not in arguments:
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional.extend(arguments[name])
        elif parameter.kind is parameter.KEYWORD_ONLY:
            named[name] = arguments[name]
        else:
            positional.append(arguments[name])
    with torch.no_grad():
        return rule.function(g, *positional, **named, **extra)


def _by_source(use: Use, arguments: dict[str, Any], answer: dict[str, Block]) -> tuple[Block | None, ...]:
    """The rule's answer by argument name -> one block per source tensor."""
    names: dict[int, list[str]] = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            names.setdefault(id(value), []).append(name)
        elif isinstance(value, (tuple, list)):
            for k, item in enumerate(value):
                names.setdefault(id(item), []).append(f"{name}.{k}")
    found: list[Block | None] = []
    for source in use.sources:
        parts = [answer.get(name) for name in names.get(id(source), [])]
        known = [p for p in parts if p is not None and not isinstance(p, Unanswered)]
        found.append(add(known) if known and len(known) == len(parts) else None)
    return tuple(found)


def _by_loop(use: Use, g: Tensor, layout: lay.Layout, B: int) -> tuple[Block, ...]:
    """PyTorch's own derivative of the op, once per sample, with every other sample's gradient zeroed."""
    owner = lay.owners(layout, g.shape, g.device)
    out, leaves = replay(use)
    rows = []
    for i in range(B):
        own = torch.where(owner == i, g, torch.zeros_like(g))
        rows.append(torch.autograd.grad(out, leaves, own.to(out.dtype), retain_graph=True, allow_unused=True))
    return tuple(
        Dense(torch.stack([torch.zeros_like(leaf) if row[k] is None else _plain(row[k]) for row in rows]))
        for k, leaf in enumerate(leaves)
    )


def replay(use: Use) -> tuple[Tensor, list[Tensor]]:
    """The op once more, on its recorded arguments: its output, and the fresh leaves for its sources."""
    leaves = {id(s): s.detach().clone().requires_grad_() for s in use.sources}
    fresh = lambda t: leaves.get(id(t), t.detach()) if isinstance(t, Tensor) else t  # noqa: E731
    with torch.enable_grad():
        args, kwargs = tree_map(fresh, (use.args, use.kwargs))
        out = use.op(*args, **kwargs)
    return out, list(leaves.values())


def _plain(t: Tensor) -> Tensor:
    return t.to_dense() if t.is_sparse else t


def _detached(value: Any) -> Any:
    return tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, value)
