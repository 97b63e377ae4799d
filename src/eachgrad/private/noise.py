"""Where randomness comes from: a generator seeded by the operating system, a fixed one for tests, or a keystream.

`torch.manual_seed` has no part in it.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Mapping
from typing import Any

import torch
from torch import Generator, Tensor, nn


class Source:
    """Random numbers from torch's generators, one for each device, all seeded by the operating system."""

    label = "torch's generator, seeded by the operating system"

    def __init__(self) -> None:
        self._generators: dict[torch.device, Generator] = {}

    def uniform(self, n: int) -> Tensor:
        """(n,) numbers in [0, 1) in float64: in float32 a rate of 1e-6 would be off by a percent."""
        return torch.rand(n, dtype=torch.float64, generator=self._on(torch.device("cpu")))

    def normal(self, like: Tensor, deviation: float) -> Tensor:
        """Gaussian numbers with this standard deviation, in the real tensor's shape, dtype and device."""
        return torch.empty_like(like).normal_(0.0, deviation, generator=self._on(like.device))

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

    label = "a fixed generator, for tests: no privacy"

    def __init__(self, generator: Generator):
        super().__init__()
        self._root = Generator().manual_seed(_drawn(generator))

    def _seed(self) -> int:
        return _drawn(self._root)

    def state(self) -> dict[str, Any]:
        each = {str(device): generator.get_state() for device, generator in self._generators.items()}
        return {"root": self._root.get_state(), "each": each}

    def restore(self, state: dict[str, Any] | None) -> None:
        assert state is not None
        self._root.set_state(state["root"])
        for device, value in state["each"].items():
            self._on(torch.device(device)).set_state(value)


class Secure(Source):
    """ChaCha20's keystream, with a key from the operating system, turned into Gaussians in float64."""

    label = "ChaCha20, with a key from the operating system"

    def __init__(self) -> None:
        super().__init__()
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
        except ImportError as error:
            raise ImportError("secure=True needs the package cryptography: pip install 'eachgrad[private]'") from error
        self._new = lambda: Cipher(algorithms.ChaCha20(os.urandom(32), os.urandom(16)), mode=None).encryptor()
        self._stream, self._left = self._new(), 0

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


def write_gradients(
    parameters: Mapping[str, nn.Parameter], sums: Mapping[str, Tensor], unit: float, deviation: float, divisor: float,
    source: Source,
) -> None:  # fmt: skip
    """Set each `p.grad` to (unit * sum + noise) / divisor, with noise of this standard deviation; no sums are zeros."""
    for name, p in parameters.items():
        # Sixteen bits come last: rounding what has its noise already gives nothing away.
        wide = torch.float32 if p.dtype in (torch.float16, torch.bfloat16) else p.dtype
        noisy = torch.empty(p.shape, dtype=wide, device=p.device)
        part = torch.view_as_real(noisy) if wide.is_complex else noisy
        part.copy_(source.normal(part, deviation))
        if name in sums:
            noisy.add_(sums[name], alpha=unit)
        p.grad = noisy.div_(divisor).to(p.dtype)


def _drawn(generator: Generator) -> int:
    return int(torch.randint(1 << 62, (1,), generator=generator, device=generator.device))
