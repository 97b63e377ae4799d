"""One sample by the graph that is compiled for any number: to a compiler, one is a special case.

A graph with its size left open has guards against one sample, for which torch's ops are sometimes others (what has one entry
is broadcast). Ours is known to be the same ops for every size, and the code compiled from it has a number of samples in it
wherever there is one. So the graph that was entered for two samples is entered for one, beside its guards. Its first answers
are compared with the eager ones, as is the first of every size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

COMPARED = 2  # answers about one sample, until they are taken for right: of one alone, much may be zero
MISSES = 3  # comparisons that fail, or say nothing, until one is filled up to two for good


class Entries:
    """A backend of `torch.compile`, and what its graph for two samples is entered with."""

    def __init__(self, options: dict[str, Any], dims: Mapping[int, int]):
        """`options` are those of `torch.compile`; `dims`: which arguments have samples, and along which dimension."""
        self.options, self.dims = options, dims
        self.right = self.missed = 0
        self._entered: tuple[Callable[..., Any], tuple] | None = None
        self._run: Callable[..., Any] | None = None
        # What that is given, by its places among the arguments; None for the number of samples.
        self._places: list[int | None] = []

    def __call__(self, gm: GraphModule, example: list[Any]) -> Callable[..., Any]:
        run = self._compiled(gm, example)

        def enter(*given: Any) -> Any:
            if self._run is None:
                self._entered = run, given
            return run(*given)

        return enter

    def _compiled(self, gm: GraphModule, example: list[Any]) -> Callable[..., Any]:
        backend, mode = self.options["backend"], self.options.get("mode")
        if backend != "inductor":
            return torch._dynamo.lookup_backend(backend)(gm, example)
        from torch._inductor import compile, list_mode_options

        modes = {} if mode is None else list_mode_options(mode)
        run: Any = compile(gm, example, options=modes | self.options.get("options", {}))
        return run

    def remember(self, args: Sequence[Any], size: int) -> None:
        """Note how the graph was entered that has just run with these arguments.

        One that is not given the number of samples is for two alone: a size of two elsewhere was taken for theirs.
        """
        entered, self._entered = self._entered, None
        if size != 2 or self._run is not None or entered is None:
            return
        run, given = entered
        places = {id(a): k for k, a in enumerate(args) if isinstance(a, Tensor)}
        found = [None if type(a) is int else places.get(id(a), -1) for a in given]
        if None in found and -1 not in found and all(a == size for a in given if type(a) is int):
            self._run, self._places = run, found

    @property
    def takes_one(self) -> bool:
        """Whether one sample may be given to the graph as one."""
        return self._run is not None and self.missed < MISSES

    def one_of(self, args: Sequence[Any]) -> tuple:
        """The arguments for the first sample; a number among them is that of the samples."""
        found = [1 if type(a) is int else a for a in args]
        for k, dim in self.dims.items():
            found[k] = args[k].narrow(dim, 0, 1).contiguous()
        return tuple(found)

    def alone(self, args: Sequence[Any]) -> tuple[Tensor, ...]:
        """What the graph returns for one sample."""
        assert self._run is not None
        return self._run(*[1 if k is None else args[k] for k in self._places])

    def refuse(self) -> None:
        """Have one filled up to two from now on."""
        self.missed = MISSES

    def note(self, far: str | None) -> bool:
        """Whether answers about one are right, after one more was compared: it is `far` off, or None says nothing."""
        self.right, self.missed = self.right + (far == ""), self.missed + (far != "")
        return self.right >= COMPARED
