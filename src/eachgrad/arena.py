"""Where the tensors of a compiled graph lie: in one piece of memory, by when each of them is there.

Torch's allocator puts a tensor into the smallest gap that fits, and cannot know how long it stays: gaps are left that fit
nothing. A CUDA graph does the same every time, so it is watched once, and every tensor has its place before the next time.

Whatever a plan says, memory is given only where nothing lies.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from eachgrad.kernels import library

UNIT = 512  # bytes that places are multiples of, as torch's own are
POWERS = (0.0, 0.25, 1.0)  # of a tensor's life, in what decides which is placed first

Make = Callable[[Sequence[int], Sequence[int], torch.dtype], Tensor]  # of a shape, strides and a dtype


class Life(NamedTuple):
    """The bytes of a tensor, and from which to which moment it is there; a tensor is made at each of them."""

    size: int
    first: int
    last: int  # the first at which it is gone


def size_of(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    """The bytes of a tensor."""
    if not all(shape):
        return 0
    return dtype.itemsize * (1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)))


def placed(
    pointer: int, size: int, like: Tensor, shape: Sequence[int], stride: Sequence[int], offset: int = 0
) -> Tensor:
    """A tensor of the dtype and device of `like`, at a place in memory that is kept by someone else."""
    storage = torch._C._construct_storage_from_data_pointer(pointer, like.device, size)  # pyright: ignore
    return torch.empty(0, dtype=like.dtype, device=like.device).set_(storage, offset, shape, stride)


@contextmanager
def made_by(wrap: Callable[[Make], Make], device: str) -> Iterator[None]:
    """Within it, compiled code for a device, and ops, have the tensors of this thread made by `wrap(torch's own)`."""
    name = f"empty_strided_{device}"
    own: Make = getattr(torch._C._dynamo.guards, f"_{name}")  # type: ignore[attr-defined]
    new, mine = wrap(own), threading.get_ident()

    def make(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        return (new if threading.get_ident() == mine else own)(shape, stride, dtype)

    places = [vars(module) for module in _modules() if vars(module).get(name) is own]
    for names in places:
        names[name] = make
    try:
        yield
    finally:
        for names in places:
            names[name] = own


def _modules() -> list[Any]:
    """What torch's compiler has written, as far as it is loaded; and our own ops."""
    codecache = sys.modules.get("torch._inductor.codecache")
    return [library, *([] if codecache is None else codecache.PyCodeCache.modules)]


@dataclass(frozen=True)
class Room:
    """Torch's allocator, which is given some bytes in one piece first; none: as it is."""

    size: int = 0
    lasts = False  # what others have given back to the same memory is no piece any more

    @contextmanager
    def within(self) -> Iterator[None]:
        if self.size:
            torch.empty(self.size, dtype=torch.uint8, device="cuda")
        yield


@dataclass
class Watch:
    """Torch's allocator, and notes of which tensors are made, and when they go."""

    device: str = "cuda"
    sizes: list[int] = field(default_factory=list)
    gone: dict[int, int] = field(default_factory=dict)
    _alive: dict[int, StorageWeakRef] = field(default_factory=dict)

    @contextmanager
    def within(self) -> Iterator[None]:
        with made_by(self._noting, self.device):
            yield
        self._look()
        self._alive.clear()  # what is still there is not asked for

    def _noting(self, own: Make) -> Make:
        def make(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
            self._look()
            found = own(shape, stride, dtype)
            self._alive[len(self.sizes)] = StorageWeakRef(found.untyped_storage())
            self.sizes.append(size_of(shape, stride, dtype))
            return found

        return make

    def _look(self) -> None:
        for k in [k for k, t in self._alive.items() if t.expired()]:
            self.gone[k] = len(self.sizes)
            del self._alive[k]

    def lives(self) -> list[Life]:
        """Of all tensors; one that stays is there at the end, and after it."""
        return [Life(size, k, self.gone.get(k, len(self.sizes) + 1)) for k, size in enumerate(self.sizes)]


@dataclass(frozen=True)
class Plan:
    """A place for each tensor that is made, in the order in which they are."""

    lives: list[Life]
    places: list[int | None]  # None: anywhere
    size: int  # of the memory they are in
    device: str = "cuda"
    lasts = True

    @contextmanager
    def within(self, base: Tensor | None = None) -> Iterator[None]:
        """Within it tensors have their places, in `base` or in memory that is taken now."""
        base = torch.empty(self.size, dtype=torch.uint8, device=self.device) if base is None else base
        with made_by(_Giving(self, base).wrapped, self.device):
            yield


def planned(lives: Sequence[Life], answers: bool = True, device: str = "cuda") -> Plan:
    """Places that take little memory together. Without `answers`, what stays is put elsewhere.

    One tensor after another is put as far to the front as it can be, the largest first; a longer life counts as well, as much
    as turns out best.
    """
    chosen = [k for k, life in enumerate(lives) if life.size and (answers or life.last <= len(lives))]

    def by(power: float) -> dict[int, int]:
        weight = {k: lives[k].size * (lives[k].last - lives[k].first) ** power for k in chosen}
        return _placed(lives, sorted(chosen, key=lambda k: -weight[k]))

    places = min(map(by, POWERS), key=lambda places: _end(lives, places))
    return Plan(list(lives), [places.get(k) for k in range(len(lives))], _end(lives, places), device)


def _placed(lives: Sequence[Life], order: Sequence[int]) -> dict[int, int]:
    """Where each of these tensors lies."""
    places: dict[int, int] = {}
    for k in order:
        taken = [(place, _room(lives[j])) for j, place in places.items() if _meet(lives[j], lives[k])]
        places[k] = _gap(_room(lives[k]), taken)
    return places


def _end(lives: Sequence[Life], places: Mapping[int, int]) -> int:
    return max((place + _room(lives[k]) for k, place in places.items()), default=0)


def _meet(a: Life, b: Life) -> bool:
    return a.first < b.last and b.first < a.last


def _room(life: Life) -> int:
    return -(-life.size // UNIT) * UNIT


def _gap(size: int, taken: list[tuple[int, int]]) -> int:
    """The first place with so much room beside what is taken, (place, size) each."""
    place = 0
    for start, other in sorted(taken):
        if start - place >= size:
            break
        place = max(place, start + other)
    return place


class _Giving:
    """Gives out the places of a plan while nothing lies there; other memory, where something does or none is planned."""

    def __init__(self, plan: Plan, base: Tensor):
        self.plan, self.base, self.count = plan, base, 0
        self.alive: list[tuple[int, int, StorageWeakRef]] = []  # from where to where, and what

    def wrapped(self, own: Make) -> Make:
        def make(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
            size, k = size_of(shape, stride, dtype), self.count
            self.count += 1
            place = self.plan.places[k] if k < len(self.plan.places) and 0 < size <= self.plan.lives[k].size else None
            if place is None or not self._is_here() or not self._is_free(place, place + size):
                return own(shape, stride, dtype)
            like = torch.empty(0, dtype=dtype, device=self.base.device)
            found = placed(self.base.data_ptr() + place, size, like, shape, stride)
            self.alive.append((place, place + size, StorageWeakRef(found.untyped_storage())))
            return found

        return make

    def _is_here(self) -> bool:
        """Whether a tensor would be made on the device that the memory is on."""
        return not self.base.is_cuda or torch.cuda.current_device() == self.base.device.index

    def _is_free(self, start: int, end: int) -> bool:
        self.alive = [some for some in self.alive if not some[2].expired()]
        return all(end <= a or b <= start for a, b, _ in self.alive)
