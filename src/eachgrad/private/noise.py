"""Where randomness comes from: generators seeded by the operating system, a fixed one for tests, or a keystream.

`torch.manual_seed` has no part in it.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Generator, Tensor, nn

from eachgrad.dtypes import accumulation_dtype
from eachgrad.kernels.noise import noisy


class Source:
    """Random numbers from torch's generators, one for each device, or from a counter; all seeded by the operating system."""

    def __init__(self) -> None:
        self._generators: dict[torch.device, Generator] = {}
        self._counter: tuple[int, int] | None = None  # the seed and the next offset, once there was a turn

    @property
    def label(self) -> str:
        which = "torch's generator" if self._counter is None else "Philox4x32-10"
        return f"{which}, seeded by the operating system"

    def uniform(self, n: int) -> Tensor:
        """(n,) numbers in [0, 1) in float64: in float32 a rate of 1e-6 would be off by a percent."""
        return torch.rand(n, dtype=torch.float64, generator=self._on(torch.device("cpu")))

    def normal(self, like: Tensor, deviation: float) -> Tensor:
        """Gaussian numbers with this standard deviation, in the real tensor's shape, dtype and device."""
        return torch.empty_like(like).normal_(0.0, deviation, generator=self._on(like.device))

    def turn(self) -> tuple[int, int] | None:
        """A seed and an offset for one call of `noisy`, and for no other; None where noise is no such generator's."""
        seed, offset = self._counter or (self._seed(), 0)
        self._counter = seed, offset + 1
        return seed, offset

    def state(self) -> dict[str, Any] | None:
        """What brings the same numbers again; None where nothing may, since the noise could be taken off with it."""
        return None

    def restore(self, state: dict[str, Any] | None) -> None:
        """Go on where `state` was taken; without one, with other numbers."""

    def _seed(self) -> int:
        return secrets.randbits(63)

    def _on(self, device: torch.device) -> Generator:
        if device not in self._generators:
            self._generators[device] = Generator(device).manual_seed(self._seed())
        return self._generators[device]


class Fixed(Source):
    """The same numbers for the same generator: for tests, since who knows the seed can take the noise off."""

    def __init__(self, generator: Generator):
        super().__init__()
        self._root = Generator().manual_seed(_drawn(generator))

    @property
    def label(self) -> str:
        return "a fixed generator, for tests: no privacy"

    def _seed(self) -> int:
        return _drawn(self._root)

    def state(self) -> dict[str, Any]:
        each = {str(device): generator.get_state() for device, generator in self._generators.items()}
        return {"root": self._root.get_state(), "each": each, "counter": self._counter}

    def restore(self, state: dict[str, Any] | None) -> None:
        assert state is not None
        self._generators = {}
        for device, value in state["each"].items():
            self._on(torch.device(device)).set_state(value)
        self._counter = state.get("counter")  # older states have none: then there was no turn
        self._root.set_state(state["root"])  # last: new generators have drawn their seeds from it


class Secure(Source):
    """ChaCha20's keystream, with a key from the operating system, turned into Gaussians in float64."""

    def __init__(self) -> None:
        super().__init__()
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
        except ImportError as error:
            raise ImportError("secure=True needs the package cryptography: pip install 'eachgrad[private]'") from error
        self._new = lambda: Cipher(algorithms.ChaCha20(os.urandom(32), os.urandom(16)), mode=None).encryptor()
        self._stream, self._left = self._new(), 0

    @property
    def label(self) -> str:
        return "ChaCha20, with a key from the operating system"

    def turn(self) -> None:
        return None

    def uniform(self, n: int) -> Tensor:
        return self._integers(n).to(torch.float64) * 2.0**-53

    def normal(self, like: Tensor, deviation: float) -> Tensor:
        half = -(-like.numel() // 2)
        radius = torch.sqrt(-2.0 * torch.log(1.0 - self.uniform(half)))  # 1 - u lies in (0, 1]
        angle = 2.0 * math.pi * self.uniform(half)
        both = torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)])[: like.numel()]
        return (both * deviation).to(device=like.device, dtype=like.dtype).reshape(like.shape)

    def _integers(self, n: int) -> Tensor:
        """(n,) integers of 53 bits."""
        if not n:
            return torch.empty(0, dtype=torch.int64)
        # A key's counter of blocks has 32 bits: long before it is used up there is another key.
        if self._left < 8 * n:
            self._stream, self._left = self._new(), 1 << 36
        self._left -= 8 * n
        keystream = bytearray(self._stream.update(bytes(8 * n)))
        return torch.frombuffer(keystream, dtype=torch.int64) & ((1 << 53) - 1)


def noisy_gradients(
    parameters: Mapping[str, nn.Parameter], sums: Mapping[str, Tensor], unit: float, deviation: float, divisor: float,
    source: Source, own: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """For each parameter (unit * sum + noise) / divisor, with noise of this standard deviation; no sums are zeros.

    They are new tensors: two sums may be one, and those of a CUDA graph are written over by the next step. `own`: the sums
    are neither, and what can be is written over them.
    """
    found: dict[str, Tensor] = {}
    for some in _together(parameters):
        turn = source.turn()
        if turn is not None:
            found |= _written_together(some, sums, unit, deviation, divisor, turn, own)
    for name, p in parameters.items() if len(found) < len(parameters) else ():
        if name in found:
            continue
        wide = _wide(p.dtype)
        noise = torch.empty(p.shape, dtype=wide, device=p.device)
        part = torch.view_as_real(noise) if wide.is_complex else noise
        part.copy_(source.normal(part, deviation))
        if name in sums:
            noise.add_(sums[name], alpha=unit)
        found[name] = noise.div_(divisor).to(p.dtype)
    return found


def _together(parameters: Mapping[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    """The parameters that one kernel can write, with the others of their device."""
    kinds = [(p.dtype, p.device, type(p)) for p in parameters.values()]
    good = {kind: goes_together(p) for kind, p in dict(zip(kinds, parameters.values(), strict=True)).items()}
    if not any(good.values()):
        return []
    found: dict[torch.device, dict[str, nn.Parameter]] = {}
    for kind, (name, p) in zip(kinds, parameters.items(), strict=True):
        if good[kind]:
            found.setdefault(kind[1], {})[name] = p
    return [*found.values()]


def goes_together(p: Tensor) -> bool:
    """Whether one kernel can write this gradient with those of others, as far as its dtype, device and class decide."""
    return p.is_cuda and type(p) is nn.Parameter and _wide(p.dtype) == torch.float32 and _has_triton()


def _written_together(
    parameters: Mapping[str, nn.Parameter], sums: Mapping[str, Tensor], unit: float, deviation: float, divisor: float,
    turn: tuple[int, int], own: bool,
) -> dict[str, Tensor]:  # fmt: skip
    given = [sums.get(name) for name in parameters]
    values = [value if value is None or value.dtype == torch.float32 else value.float() for value in given]
    narrow = [name for name, p in parameters.items() if p.dtype != torch.float32]
    # To say how the numbers lie, where the parameter says it as well, takes the host 164 us instead of 113 for 148 of them.
    usual = not narrow and all(map(Tensor.is_contiguous, parameters.values()))
    out = [value for value in values if value is not None and value.is_contiguous()] if own else []
    if len(out) < len(values):  # all of them or none
        out = [*map(torch.empty_like if usual else _empty, parameters.values())]
    noisy(values, out, unit, deviation, divisor, *turn)
    found = dict(zip(parameters, out, strict=True))
    if narrow:
        rounded = [_empty(parameters[name], parameters[name].dtype) for name in narrow]
        torch._foreach_copy_(rounded, [found[name] for name in narrow])  # pyright: ignore[reportPrivateImportUsage]
        found |= zip(narrow, rounded, strict=True)
    return found


def _empty(p: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty_like(p, dtype=dtype, memory_format=torch.contiguous_format)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In which a gradient gets its noise. Sixteen bits come last: rounding what has its noise gives nothing away."""
    return accumulation_dtype(dtype)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _drawn(generator: Generator) -> int:
    return int(torch.randint(1 << 62, (1,), generator=generator, device=generator.device))
