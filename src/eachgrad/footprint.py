"""The memory of a step, predicted: what the forward saves, what the backward lets go, what an answer holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eachgrad import plan
from eachgrad.capture import Recorder
from eachgrad.graph import tensors_in
from eachgrad.use import Use

if TYPE_CHECKING:
    from eachgrad.grads import PerSampleGrads


@dataclass
class Saved:
    """While active, notes what autograd saves in a recorded forward, and between which uses."""

    recorder: Recorder
    first: dict[int, int] = field(default_factory=dict)  # storage -> how many uses came before it was saved
    sizes: dict[int, int] = field(default_factory=dict)  # storage -> bytes
    _alive: list[Any] = field(default_factory=list)  # so that no two storages have the same address

    def __enter__(self) -> Saved:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, t: Tensor) -> Tensor:
        self.first.setdefault(self.note(t), len(self.recorder.uses))
        return t

    def note(self, t: Tensor) -> int:
        """The storage of a tensor, by its address."""
        storage = t.untyped_storage()
        self._alive.append(storage)
        self.sizes[storage.data_ptr()] = storage.nbytes()
        return storage.data_ptr()


def peak(saved: Saved, grads: PerSampleGrads, query: str, held: Mapping[str, str], given: Iterable[Tensor]) -> int:
    """Bytes at the highest point of a streamed step, above the model and the batch.

    The backward passes the uses from the last to the first. Behind it, what was saved is free, but for what the
    answer holds; before it, all that the forward saved is there.
    """
    record = grads._record
    before = {saved.note(t) for t in (*record.model.parameters(), *record.model.buffers(), *given)}
    uses = saved.recorder.uses
    inputs = [{saved.note(t) for t in tensors_in((use.args, use.kwargs))} - before for use in uses]
    # Two uses may share an output: it counts once, where the backward meets it first.
    last = set({(use.tap.node, use.tap.edge.output_nr): n for n, use in enumerate(uses)}.values())
    sizes = [use.tap.shape.numel() * use.tap.dtype.itemsize for use in uses]
    outputs = [size if n in last else 0 for n, size in enumerate(sizes)]
    names = [_names(saved.recorder, use, grads) for use in uses]
    costs = {name: gradient.cost() for name, gradient in grads.items()}
    held = held if query == "clipped_sum" else dict.fromkeys(grads, "nothing")

    def size(storages: Iterable[int]) -> int:
        return sum(saved.sizes[s] for s in set(storages) - before)

    highest, gathered = 0, 0
    kept: dict[int, set[int]] = {}  # uses whose factors are held -> the storages of their inputs
    for n in reversed(range(len(uses))):
        ahead = {s for s, k in saved.first.items() if k <= n + 1}.union(*inputs[: n + 1], *kept.values())
        work = max((_work(costs[name], query, held[name]) for name in names[n]), default=0)
        # The gradient that arrived, and the one that goes on to the inputs.
        flowing = outputs[n] + size(inputs[n])
        highest = max(highest, size(ahead) + gathered + flowing + work)
        if any(held[name] == "factors" for name in names[n]):
            kept[n] = inputs[n]
            gathered += outputs[n]
        gathered += sum(_kept(costs[name], query, held[name], grads[name].parameter) for name in names[n])
    if query != "clipped_sum":
        return highest
    # The sums, in the order in which the gradients came; each lets go of what was held for it.
    for n in reversed(range(len(uses))):
        for name in names[n]:
            gathered += grads[name].parameter.nbytes
            work = costs[name].total.bytes if held[name] == "factors" else 0
            highest = max(highest, size(set().union(*kept.values())) + gathered + work)
            gathered -= _kept(costs[name], query, held[name], grads[name].parameter)
        if kept.pop(n, None) is not None:
            gathered -= outputs[n]
    return highest


def _work(cost: plan.Cost, query: str, held: str) -> int:
    """What is made on the way while the gradients of a parameter are at hand."""
    if query == "norms" or held in ("factors", "again"):
        return cost.norms.bytes
    return cost.total.bytes if query == "weighted_sum" else 0


def _names(recorder: Recorder, use: Use, grads: PerSampleGrads) -> list[str]:
    return [name for source in use.sources for name in recorder.tensors.names_of(source) if name in grads]


def _kept(cost: plan.Cost, query: str, held: str, parameter: Tensor) -> int:
    """What a parameter's gradients leave behind once they have been used."""
    if query == "dense":
        return cost.dense
    if held == "gradients":
        return cost.kept
    return parameter.nbytes if query == "weighted_sum" else 0
