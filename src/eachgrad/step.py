"""A traced step, compiled: what it is given, and where it says whether its answers can be trusted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from eachgrad.alone import Entries
from eachgrad.chains import spread
from eachgrad.entropy import write_over
from eachgrad.functions import without_autocast
from eachgrad.kernels.signals import Slot
from eachgrad.launches import together
from eachgrad.laying import laid_out
from eachgrad.ordering import in_order, late, soon
from eachgrad.padding import opened
from eachgrad.recompute import recompute, turn_of
from eachgrad.replay import Memory, Replay, Replays
from eachgrad.sizes import of_any_size
from eachgrad.tidy import changes, may_differ, merge, narrow, narrow_signs, write_apart


@dataclass(eq=False)
class Step:
    call: Callable[[Sequence[Any]], tuple[Tensor, ...]]  # of all arguments of the graph
    slots: list[Slot]
    entries: Entries | None = None  # of one for any number of samples
    checked: set[tuple[int, bool]] = field(default_factory=set)  # kinds of batches, once compared with the eager answer
    judged: bool = False  # whether it was compared with float32, as far as it can be
    tries: int = 0  # how often that was tried
    strikes: int = 0  # and in a row it was too far
    silent: int = 0  # how often its answers were zeros, which says nothing

    def run(self, args: tuple) -> tuple[Tensor, ...]:
        """The losses and the answers, or what will be them: `has_doubt` is to be asked next."""
        for slot in self.slots:
            slot.clear()
        try:
            # Tracing has put the casts of autocast into the graph: on top of them it would cast the answers too.
            with torch.no_grad(), without_autocast():
                _, *found = self.call(args)
        except BaseException:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # or a flag of this step would be taken for one of the next
            raise
        return tuple(found)

    def has_doubt(self) -> bool:
        raised = [slot.wait() for slot in self.slots]  # every one: what comes late is not the next step's
        return any(raised)

    def refuse_one(self) -> None:
        """Have one sample filled up to two from now on."""
        if self.entries is not None:
            self.entries.refuse()

    @property
    def reason(self) -> str:
        """Why it has no CUDA graph, where one was asked for."""
        return self.call.reason if isinstance(self.call, (Replay, Replays)) else ""

    def release(self) -> None:
        """Give memory back that is needed again only when the step runs next."""
        if isinstance(self.call, (Replay, Replays)):
            self.call.release()


class Graphs(NamedTuple):
    """What a CUDA graph is made with: the places of the arguments that are the batch, and memory."""

    given: frozenset[int]
    memory: Memory


class Samples(NamedTuple):
    """Which arguments of a graph have samples, along which dimension; and how many they are."""

    dims: dict[int, int]
    size: int

    @property
    def first(self) -> tuple[int, int]:
        """One of them, and its dimension."""
        return next(iter(self.dims.items()))


def compiled(
    traced: GraphModule, slots: list[Slot], held: dict[int, nn.Parameter], options: dict[str, Any],
    graphs: Graphs | None, share: float = 0.0, samples: Samples | None = None,
    others: Mapping[int, GraphModule] | None = None,
) -> Step:  # fmt: skip
    """The step of a traced graph, for `torch.compile` with these options.

    About this `share` of what the backward needs of the forward is computed again, where that is cheap, and not kept.
    `held` are the arguments that are parameters, by their places. With `graphs` it is a CUDA graph. With the graphs of
    `others`, for other numbers of `samples`, it is one for any.
    """
    found = _tidied(traced, options, share)
    if samples is None:
        step: Any = torch.compile(_Traced(traced, held), fullgraph=True, dynamic=False, **found)

        def call(args: Sequence[Any]) -> tuple[Tensor, ...]:
            return step([a for k, a in enumerate(args) if k not in held])

        return Step(call if graphs is None else Replay(call, graphs.given, graphs.memory), slots)
    for other in (others or {}).values():
        _tidied(other, options, share)
    traced = of_any_size({samples.size: traced, **(others or {})}, samples.first)
    entries = Entries(found, samples.dims)
    run = _with_any(_Traced(traced, held), samples, entries)
    return Step(run if graphs is None else Replays(run, graphs.given, graphs.memory, samples.first), slots, entries)


def _with_any(module: _Traced, samples: Samples, entries: Entries) -> Callable[[Sequence[Any]], tuple[Tensor, ...]]:
    """A traced step for any number of samples, compiled."""
    step: Any = torch.compile(module, fullgraph=True, dynamic=None, backend=entries)  # as far as it is marked
    held = dict(zip(module.places, module.held, strict=True))
    place, dim = samples.first

    def call(args: Sequence[Any]) -> tuple[Tensor, ...]:
        size, args = args[place].shape[dim], _open(args, samples)
        if size == 1:
            return entries.alone([held.get(k, a) for k, a in enumerate(args)])
        found = step([a for k, a in enumerate(args) if k not in held])
        entries.remember([held.get(k, a) for k, a in enumerate(args)], size)
        return found

    return call


def _open(args: Sequence[Any], samples: Samples) -> list[Any]:
    """The arguments, those with samples marked for the compiler, without the numbers that it finds by itself."""
    found = [a if isinstance(a, Tensor) else None for a in args]
    for k, dim in samples.dims.items():
        found[k] = opened(args[k], dim)
    return found


def _tidied(traced: GraphModule, options: dict[str, Any], share: float) -> dict[str, Any]:
    """Make a traced graph cheaper, without changing a number; the options to compile it with."""
    from torch._functorch.compile_utils import fx_graph_cse

    write_apart(traced.graph)
    if not any(map(changes, traced.graph.nodes)):  # two buffers that are written to are not one
        merge(traced.graph)
        narrow(traced.graph)
        spread(traced.graph)
        if not may_differ(traced.graph):
            traced.graph = fx_graph_cse(traced.graph)
        narrow_signs(traced.graph)
        if takes_any_layout(options["backend"]):
            # After equal nodes were made one, and before what is computed twice is laid out.
            recompute(traced.graph, turn_of(traced.graph), share=share)
            traced.graph = laid_out(traced)
            soon(traced.graph, turn_of(traced.graph))
            together(traced.graph)
            late(traced.graph)
            over = write_over(traced.graph)  # last: whatever moves nodes takes a graph that does not write
            options = in_order(options, whole=over > 0)
    traced.recompile()
    return options


def takes_any_layout(backend: str) -> bool:
    """Whether a backend computes the ops of torch by itself, from inputs that may lie in any way."""
    return backend == "inductor"


class _Traced(nn.Module):
    """A traced step that has its parameters, whose addresses the compiler may rely on, and is given the rest."""

    def __init__(self, traced: GraphModule, held: dict[int, nn.Parameter]):
        super().__init__()
        self.traced, self.places = traced, tuple(held)
        self.held = nn.ParameterList(held.values())

    def forward(self, rest: list[Any]) -> tuple[Tensor, ...]:
        given, held = iter(rest), dict(zip(self.places, self.held, strict=True))
        total = len(rest) + len(held)
        return self.traced(*[held[k] if k in held else next(given) for k in range(total)])
