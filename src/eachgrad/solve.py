"""From recorded uses to a block per parameter: gradients, layouts, candidates, derived weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from eachgrad import layout as lay
from eachgrad import uses as use_blocks
from eachgrad.blocks import Block, Dense, add, form
from eachgrad.capture import Recorder
from eachgrad.cover import Accepted, Solved
from eachgrad.dtypes import accumulation_dtype
from eachgrad.errors import CaptureError
from eachgrad.graph import Carried, Node, graph_nodes
from eachgrad.passes import Marked, Passes, grad
from eachgrad.use import Use


def solved(recorder: Recorder, plain: Sequence[Tensor | None], evidence: Marked) -> list[Solved]:
    """Every use that has a gradient, with the place of its samples."""
    found = enumerate(zip(recorder.uses, plain, strict=True))
    return [Solved(use, g, placed(evidence, n, g, use)) for n, (use, g) in found if g is not None]


def placed(evidence: Marked, n: int, g: Tensor, use: Use) -> lay.Layout | None:
    try:
        return evidence.place(n, g, use.strong)
    except lay.Unclear as error:
        raise CaptureError(f"{use}: {error}") from None


def attached(passes: Passes, uses: list[Solved], roots: list[Tensor]) -> list[Solved]:
    """The same uses, with gradients that can be differentiated.

    These are computed apart from those that are held against the marked ones: the derivatives of some ops (group_norm)
    take another way when they are to be differentiated, and round otherwise.
    """
    found = passes.run(roots, [torch.ones_like(t) for t in roots], create_graph=True)
    gradients = {id(use): g for use, g in zip(passes.recorder.uses, found, strict=True)}
    again = [Solved(item.use, g, item.layout) for item in uses if (g := gradients[id(item.use)]) is not None]
    for item in again:
        _check_zeros(passes, item)
    return again


def _check_zeros(passes: Passes, item: Solved) -> None:
    """Raise if a number of no known sample, because it is zero, has a derivative that is not."""
    g, unknown = item.g, _without_owner(item)
    if not g.requires_grad or not bool(unknown.any()):
        return
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(g.shape, generator=generator).to(g) * unknown
    found = torch.autograd.grad(g, passes.leaves, weights, retain_graph=True, allow_unused=True)
    if any(t is not None and bool((t != 0).any()) for t in found):
        raise CaptureError(
            f"create_graph=True: gradients behind {item.use}, are exactly zero, "
            "so that it cannot be seen which sample they belong to, and their derivatives are not zero. Move the "
            "parameters a little (one that starts at zero), or use a batch size that no other dimension has."
        )


def _without_owner(item: Solved) -> Tensor:
    """Which numbers of a gradient were given to a sample, or to none, only because they are zero; broadcastable."""
    place, zero = item.layout, item.g.detach() == 0
    if isinstance(place, lay.Scattered):
        return place.owner < 0
    if place is None:
        return torch.zeros((), dtype=torch.bool)
    if place.fold is not None and place.fold.kind == "ragged":
        rows = torch.ones(zero.shape[place.dim], dtype=torch.bool, device=zero.device)
        rows[place.fold.index[place.fold.index >= 0]] = False
        return rows.view([-1 if d == place.dim else 1 for d in range(zero.ndim)])
    # A regular layout in which some numbers fit, and in which no other one is possible, holds for the zeros too.
    certain = place.alone and (item.use.strong or not bool(zero.all()))
    return zero & (not certain)


def blocks_of(
    recorder: Recorder, accepted: Accepted, B: int, made: dict[str, list[Use]] | None = None
) -> dict[str, Block]:
    """A block for each parameter that the accepted uses reach; which ones each is made of is added to `made`."""
    parts: dict[str, list[Block]] = {}
    for item, wanted in accepted:
        if wanted:
            assert item.layout is not None
            for name, block in parts_of(recorder, item.use, item.g, item.layout, wanted, B):
                parts.setdefault(name, []).append(block)
                if made is not None:
                    made.setdefault(name, []).append(item.use)
    found = {name: add(pieces) for name, pieces in parts.items()}
    form(found.values())
    return found


def parts_of(
    recorder: Recorder, use: Use, g: Tensor, layout: lay.Layout, wanted: set[int], B: int,
    recipe: use_blocks.Recipe | None = None,
) -> list[tuple[str, Block]]:  # fmt: skip
    """What one use adds to the gradients of the parameters behind these sources, by their ids."""
    if use.piece is not None and use.piece.recorded and not recorder.create_graph:
        with recorder.replay():  # it may lie in a checkpoint
            found = use_blocks.blocks(use, g, layout, B)
    else:
        found = use_blocks.blocks(use, g, layout, B, recorder.create_graph, recipe)
    parts: list[tuple[str, Block]] = []
    for source, block in zip(use.sources, found, strict=True):
        if id(source) not in wanted:
            continue
        name = recorder.tensors.parameters.get(id(source))
        if name is not None:
            parts.append((name, block))
        else:
            pulled = pulled_back(recorder, use, source, block.dense())
            parts.extend((name, Dense(piece)) for name, piece in pulled.items())
    return parts


def pulled_back(recorder: Recorder, use: Use, source: Tensor | Carried, value: Tensor) -> dict[str, Tensor]:
    """Gradients of a derived tensor, (n, *shape), as gradients of the parameters it was derived from."""
    reached = {id(v): v for node in graph_nodes([source.grad_fn]) if (v := getattr(node, "variable", None)) is not None}
    parameters = [v for key, v in reached.items() if key in recorder.tensors.parameters]
    with recorder.replay():
        value = value.to(source.dtype).reshape(-1, *source.shape)
        end = source.edge if isinstance(source, Carried) else source
        try:
            found = _batched_pull(end, parameters, value, recorder.create_graph)
        except RuntimeError as error:
            if "second time" not in str(error):
                raise
            raise CaptureError(
                f"{use}: its argument is derived from the parameters inside a reentrant checkpoint, whose graph is gone. "
                "Pass use_reentrant=False to torch.utils.checkpoint."
            ) from error
    return {recorder.tensors.parameters[id(p)]: f for p, f in zip(parameters, found, strict=True) if f is not None}


def _batched_pull(
    source: Tensor | GradientEdge, parameters: list[Tensor], value: Tensor, create_graph: bool
) -> list[Tensor | None]:
    options = {"retain_graph": True, "allow_unused": True, "create_graph": create_graph}
    try:
        found = _pulled_through_rows(source, parameters, value, options)
        if found is not None:
            return [found]
        return list(grad(source, parameters, value, is_grads_batched=True, **options))
    except RuntimeError as error:
        if "second time" in str(error):
            raise
        # An op in between cannot be batched: one sample at a time.
        rows = [grad(source, parameters, v, **options) for v in value]
        columns = zip(*rows, strict=True)
        return [None if c[0] is None else torch.stack([t.to_dense() if t.is_sparse else t for t in c]) for c in columns]


def _pulled_through_rows(
    source: Tensor | GradientEdge, parameters: list[Tensor], value: Tensor, options: dict[str, bool]
) -> Tensor | None:
    """The same where a table was looked up, such as that of positions; None where it was not, or more than once.

    Torch's own way through a look-up is one op for each of many gradients: it is gone up to there, and all are added at once.
    """
    if len(parameters) != 1:
        return None
    (table,), end = parameters, source.grad_fn if isinstance(source, Tensor) else source.node
    found: Any = _only_look_up(list(graph_nodes([end])), table)
    if found is None or found._saved_scale_grad_by_freq:
        return None
    ids = found._saved_indices.reshape(-1)
    (g,) = grad(source, [GradientEdge(found, 0)], value, is_grads_batched=True, **options)
    rows = g.reshape(len(value), len(ids), table.shape[1]).to(accumulation_dtype(g.dtype))
    if 0 <= found._saved_padding_idx < len(table):  # -1, as an unsigned number, where there is none
        rows = rows.masked_fill((ids == found._saved_padding_idx)[:, None], 0.0)
    return rows.new_zeros(len(rows), *table.shape).index_add(1, ids, rows).to(g.dtype)


def _only_look_up(nodes: list[Node], table: Tensor) -> Node | None:
    """The node by which rows of the table were taken, if no other way leads to it."""
    end = next(node for node in nodes if getattr(node, "variable", None) is table)
    while True:
        above = [node for node in nodes for below, _ in node.next_functions if below is end]
        if len(above) != 1:
            return None
        end = above[0]
        if end.name() != "AliasBackward0":  # by which the recorder gives a parameter to an op
            return end if end.name() == "EmbeddingBackward0" else None
