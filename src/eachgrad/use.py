"""Use: one op in which a parameter meets the batch, as it was recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from eachgrad.errors import CaptureError
from eachgrad.functions import Place, op_name
from eachgrad.graph import Carried, Node, edge_at
from eachgrad.pieces import Piece
from eachgrad.rules import Rule


class Post:
    """The one hook at a tap: `passed` hears of every backward that comes by, `arrived` of the gradient while it is set."""

    __slots__ = ("arrived", "output", "passed", "version")

    def __init__(self, output: int, passed: Callable[[], object]):
        self.output, self.passed = output, passed
        self.arrived: Callable[[Tensor], object] | None = None
        self.version: int | None = None  # of the gradient, when it came by last

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        self.passed()
        g = gradients[self.output]
        if g is not None:
            self.version = g._version
            if self.arrived is not None:
                self.arrived(g)

    def remove(self) -> None:
        """Nobody waits here any more."""
        self.arrived = None


@dataclass(eq=False, slots=True)  # not frozen, which takes twice as long to make: each use has one
class Tap:
    """Where the gradient of an op's output arrives; the output itself is not held."""

    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    post: Post | None = None

    @classmethod
    def at(cls, out: Tensor, passed: Callable[[], object] | None = None) -> Tap:
        """The tap of an op's output; `passed` is called by every backward that comes to it."""
        edge, post = edge_at(out), None
        if passed is not None:
            post = Post(edge.output_nr, passed)
            edge.node.register_prehook(post)
        return cls(edge, out.shape, out.dtype, out.device, post)

    @property
    def node(self) -> Any:
        return self.edge.node

    def watch(self, arrived: Callable[[Tensor], object]) -> Any:
        """Call `arrived` with the gradient when a backward gets here; returns the handle that ends it."""
        if self.post is not None and self.post.arrived is None:  # one at a time: another waits by a hook of its own
            self.post.arrived = arrived
            return self.post

        def seen(gradients: tuple[Tensor | None, ...]) -> None:
            g = gradients[self.edge.output_nr]
            if g is not None:
                arrived(g)

        return self.node.register_prehook(seen)


class Begin(torch.autograd.Function):
    """Gives a tensor without a history one, so that its gradient can be asked for; nothing flows on."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, value: Tensor) -> Tensor:
        return torch.ops.aten._unsafe_view(value, value.shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, None]:  # type: ignore[override]
        return None, None


@dataclass(eq=False, slots=True)
class Use:
    """One op in which parameters, or tensors derived from them, meet the batch."""

    lasts = True  # as a guard: see `Arrived`

    op: Callable
    rule: Rule
    args: tuple
    kwargs: dict
    sources: tuple[Tensor | Carried, ...]
    tap: Tap  # the op's output: its gradient decides everything
    strong: bool
    where: Place
    ops_since: tuple[str, ...]  # what ran between the use before this one and this one
    aliases: tuple[Tensor, ...] = ()  # the sources as the op saw them, where it stayed attached
    samples: frozenset[int] = frozenset()  # ids of the arguments that are, or may be, of the batch
    versions: tuple[tuple[Tensor, int], ...] = field(default=(), repr=False)
    source_versions: tuple[tuple[Tensor, int], ...] = field(default=(), repr=False)
    autocast: tuple[str, torch.dtype] | None = None
    piece: Piece | None = None  # differentiated as it stands, by no rule
    parameters: Callable[[], list[str]] = field(default=list, repr=False)  # the names of those it is about
    saved: tuple[Tensor, ...] | None = None  # results that the op's node keeps, if its rule asks for them
    ways: tuple[Node, ...] | None = None  # where the batch goes on below a piece that stays attached as a whole

    @property
    def name(self) -> str:
        return op_name(self.op)

    def __str__(self) -> str:
        """For messages: which parameters, which op, where."""
        names = ", ".join(map(repr, dict.fromkeys(self.parameters()))) or "a parameter"
        return f"{names}, used by {self.name} at {self.where}"

    def release(self) -> None:
        """Let go of the tensors: the use has been answered, and is not asked again."""
        self.args, self.kwargs, self.sources, self.aliases = (), {}, (), ()
        self.versions, self.source_versions = (), ()
        self.piece = self.saved = None

    def check_sources(self) -> None:
        """To be called where the values of the parameters are used, and not their shapes alone."""
        for source, version in self.source_versions:
            if source._version != version:
                raise CaptureError(
                    f"{self}: a parameter was changed in place between the forward and the backward. Update parameters "
                    "after the gradients have been computed."
                )

    def check_versions(self) -> None:
        for tensor, version in self.versions:
            if not tensor.is_inference() and tensor._version != version:
                raise CaptureError(
                    f"{self}: an input of the op was changed in place after it had been recorded. Use the out-of-place "
                    "form of what changed it, or clone the tensor first."
                )


class Arrived:
    """The tensors of a block when its use's gradient arrived, with their versions.

    An op may give one gradient to two others, and what a hook writes into it on the way of one is the other's, too.
    """

    __slots__ = ("tensors", "use")
    lasts = False  # a copy of what has arrived does not depend on it

    def __init__(self, use: Use, tensors: list[Tensor]):
        # What the block lets go of, because its sum is formed, is not held here.
        self.use, self.tensors = use, [(ref(t), t._version) for t in tensors]

    def check_versions(self) -> None:
        for found, version in self.tensors:
            t = found()
            if t is not None and t._version != version:
                refuse_written(self.use)


def refuse_written(use: Use) -> None:
    raise CaptureError(
        f"{use}: its gradient was changed in place while the backward went on, by a hook or by the backward of an "
        "autograd.Function. Have that return a new tensor instead."
    )


def version_of(t: Tensor) -> tuple[Tensor, int]:
    try:
        return t, t._version
    except RuntimeError:  # a tensor of inference mode has none
        return t, 0


def autocast_of(device: str) -> tuple[str, torch.dtype] | None:
    """What is set for a kind of device, if autocast is on for it."""
    return (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
