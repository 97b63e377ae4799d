"""The stream tap: gradients handed over parameter by parameter while the backward runs, and let go at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from eachgrad.blocks import Block, add
from eachgrad.gradient import Gradient
from eachgrad.passes import Passes, grads_untouched
from eachgrad.recall import Plan
from eachgrad.solve import parts_of
from eachgrad.use import Arrived


def visit(
    passes: Passes,
    losses: Tensor,
    plan: Plan,
    parameters: Mapping[str, Tensor],
    arrived: Callable[[Gradient], None],
    names: set[str] | None = None,
    last: bool = True,
) -> None:
    """One backward; `arrived` gets each parameter's gradients once the last of its uses has been reached.

    `plan`: where the samples of each use lie, and which sources it counts for.
    `names`: of these parameters alone. `last`: the graph, and the arguments of each use, are freed on the way.
    """
    recorder, B = passes.recorder, len(losses)
    counted = plan.counted(recorder.uses)
    reached = [[] if some is None else _parameters_of(passes, n, some[1]) for n, some in enumerate(counted)]
    wanted = parameters.keys() if names is None else names
    asked = [[name for name in some if name in wanted] for some in reached]
    waiting = Counter(name for some in asked for name in some)
    single = {name for name, uses in waiting.items() if uses == 1}  # those of one use: there is nothing to add up
    parts: dict[str, list[Block]] = {}
    guards: dict[str, list[Arrived]] = {}

    def complete(name: str) -> None:
        found, before = parts.pop(name, None), guards.pop(name, [])
        block = add(found) if found else None
        if block is not None and len(before) > 1:
            for guard in before:
                guard.check_versions()
            before = [Arrived(before[-1].use, block.tensors())]  # the parts, or a copy, which holds none of them
        arrived(Gradient(name, parameters[name], block, B, tuple(before)))

    def use_arrived(n: int, g: Tensor) -> None:
        use, some = recorder.uses[n], counted[n]
        if some is None or not asked[n]:
            return
        found = parts_of(recorder, use, g, *some, B, plan.recipe(n, use, g, B)) if g.numel() else []
        if last:
            use.release()
        if len(found) == len(asked[n]) and single.issuperset([name for name, _ in found]):  # as most
            for name, block in found:
                waiting[name] = 0
                arrived(Gradient(name, parameters[name], block, B, (Arrived(use, block.tensors()),)))
            return
        for name, block in found:
            if name in wanted:
                parts.setdefault(name, []).append(block)
                guards.setdefault(name, []).append(Arrived(use, block.tensors()))
        for name in asked[n]:
            waiting[name] -= 1
            if not waiting[name]:
                complete(name)

    with grads_untouched(passes.leaves):
        passes.stream([losses], [torch.ones_like(losses)], use_arrived, keep=not last)
    # What no gradient came to: parameters without a use, and uses behind something that gives none.
    used = set().union(*reached)
    for name in parameters:
        if name in wanted and (waiting[name] or name not in used):
            complete(name)


def _parameters_of(passes: Passes, n: int, sources: set[int]) -> list[str]:
    """Each once, and in the order of the sources: sums over parameters, and their rounding, are the same in every run."""
    tensors, use = passes.recorder.tensors, passes.recorder.uses[n]
    return list(dict.fromkeys(name for s in use.sources if id(s) in sources for name in tensors.names_of(s)))
