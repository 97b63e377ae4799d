"""PerSampleGrads: a block per parameter, and the queries over all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eachgrad.gradient import Gradient, total
from eachgrad.moments import NoiseScale, noise_scale
from eachgrad.projection import project
from eachgrad.selection import clip_factors, grouped, matching

if TYPE_CHECKING:
    from eachgrad.receipt import Receipt, Record

__all__ = ["Gradient", "PerSampleGrads"]


class PerSampleGrads(Mapping[str, Gradient]):
    """The gradients of B samples: a mapping of parameter name to Gradient, and queries over all of them."""

    def __init__(self, gradients: dict[str, Gradient], batch_size: int, record: Record):
        self._gradients = gradients
        self.batch_size = batch_size
        self._record = record

    def __getitem__(self, name: str) -> Gradient:
        return self._gradients[self._record.canonical(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._gradients)

    def __len__(self) -> int:
        return len(self._gradients)

    def __repr__(self) -> str:
        return f"PerSampleGrads(B={self.batch_size}, {len(self)} parameters)"

    def select(self, pattern: str | Iterable[str]) -> PerSampleGrads:
        """The same gradients of the parameters whose names match a glob, or one of several, such as "blocks.*.attn.*"."""
        patterns = [pattern] if isinstance(pattern, str) else list(pattern)
        wanted = {name for p in patterns for name in matching(p, self, self._record.aliases)}
        if not wanted:
            raise ValueError(f"no parameter matches {pattern!r}; there are {', '.join(self)}")
        chosen = {name: gradient for name, gradient in self.items() if name in wanted}
        return PerSampleGrads(chosen, self.batch_size, self._record)

    def dense(self) -> dict[str, Tensor]:
        """Every gradient of every sample: {name: (B, *shape)}."""
        return {name: gradient.dense() for name, gradient in self.items()}

    def norms(self, by: str | None = None) -> Tensor | dict[str, Tensor]:
        """The norm of each sample's gradient, (B,); by="parameter": {name: (B,)}; by="module": {module path: (B,)}."""
        if by is None:
            return self._squared_norms().sqrt()
        if by == "parameter":
            return {name: gradient.norms() for name, gradient in self.items()}
        if by != "module":
            raise ValueError(f'norms(by=...) is None, "parameter" or "module", not {by!r}')
        modules: dict[str, list[Tensor]] = {}
        for name, gradient in self.items():
            modules.setdefault(name.rpartition(".")[0], []).append(gradient.squared_norms())
        return {path: total(parts).sqrt() for path, parts in modules.items()}

    def topk_norms(self, k: int, largest: bool = True) -> tuple[Tensor, Tensor]:
        """The k largest (or smallest) norms, sorted, and the samples they belong to: (k,) and (k,)."""
        if not 0 <= k <= self.batch_size:
            raise ValueError(f"k is between 0 and the {self.batch_size} samples, not {k}")
        values, indices = self._squared_norms().sqrt().topk(k, largest=largest)
        return values, indices

    def weighted_sum(self, c: Tensor) -> dict[str, Tensor]:
        """sum_i c[i] g[i] for each parameter, {name: (*shape)}; K sums at once for c (K, B): {name: (K, *shape)}."""
        return {name: gradient.weighted_sum(c) for name, gradient in self.items()}

    def clipped_sum(
        self,
        max_norm: float | Mapping[str, float],
        *,
        groups: str | Mapping[str, Iterable[str]] | None = None,
        normalise: bool = False,
        gamma: float = 0.01,
        nonfinite: str = "raise",
    ) -> dict[str, Tensor]:
        """sum_i g[i] min(1, max_norm / |g[i]|), {name: (*shape)}; the norm is over all parameters.

        `groups`: {group: names or globs}, or "parameter", clips each group's part of g[i] by its own norm, to one
        `max_norm` or {group: max_norm}. `normalise` scales by max_norm / (|g[i]| + gamma) instead. `nonfinite`: a
        sample whose norm is NaN or infinite is an error ("raise"), or adds exactly zero ("zero"). In float32 and
        float64 no sample adds more than max_norm (1 + 1e-6), but for the rounding of gradients that are themselves
        sums of terms that cancel.
        """
        members = grouped(groups, self, self._record.aliases)
        kept = {name: gradient.kept() for name, gradient in self.items()}
        squares = {name: gradient.squared_norms(precise=True) for name, gradient in kept.items()}
        none = torch.zeros(self.batch_size)
        norms = {g: total([squares[n] for n in names] or [none]).sqrt() for g, names in members.items()}
        factors, index = clip_factors(norms, max_norm, gamma if normalise else None, nonfinite)
        owner = {name: group for group, names in members.items() for name in names}
        taken = {name: g if index is None else g.take(index) for name, g in kept.items()}
        return {name: gradient.weighted_sum(factors[owner[name]]) for name, gradient in taken.items()}

    def dot(self, direction: Mapping[str, Tensor]) -> Tensor:
        """<g[i], v> with v = {name: (*shape)}, (B,), or K of them at once: {name: (K, *shape)} -> (B, K).

        Names that are left out count as zero. For complex numbers it is the real part.
        """
        counts = {}
        for name, v in direction.items():
            if self._record.canonical(name) not in self._gradients:
                raise ValueError(f"the direction names {name!r}, which is none of the parameters {', '.join(self)}")
            shape = self[name].parameter.shape
            if v.shape[max(0, v.ndim - len(shape)) :] != shape or v.ndim - len(shape) > 1:
                raise ValueError(
                    f"the direction of {name!r} is {tuple(shape)} or (K, *{tuple(shape)}), not {tuple(v.shape)}"
                )
            counts[name] = len(v) if v.ndim > len(shape) else None
        if len(set(counts.values())) > 1:
            raise ValueError(f"the same number of directions for every name, not {counts}")
        parts = [self[name].dot(v) for name, v in direction.items()]
        return total(parts) if parts else torch.zeros_like(self._squared_norms())

    def gram(self, other: PerSampleGrads | None = None) -> Tensor:
        """<g[i], g[j]>, (B, B), or <g[i], h[j]> with the gradients of other samples, (B, B'); real part.

        Costs one product of (B, P) and (P, B') beside the gradients themselves, which are made a slice at a time.
        """
        other = self if other is None else other
        if set(self) != set(other):
            raise ValueError(f"gram is of the same parameters; only one side has {sorted(set(self) ^ set(other))}")
        parts = [gradient.gram(other[name]) for name, gradient in self.items()]
        return total(parts) if parts else torch.zeros(self.batch_size, other.batch_size)

    def mean(self) -> dict[str, Tensor]:
        """(1/B) sum_i g[i] for each parameter, {name: (*shape)}."""
        return {name: gradient.mean() for name, gradient in self.items()}

    def second_moment(self) -> dict[str, Tensor]:
        """(1/B) sum_i |g[i]|^2, element by element, {name: (*shape)}, in float32 or better."""
        return {name: gradient.sum_of_squares() / self.batch_size for name, gradient in self.items()}

    def variance(self, unbiased: bool = True) -> dict[str, Tensor]:
        """The variance over samples, element by element, {name: (*shape)}; divided by B - 1, or B if not unbiased."""
        if self.batch_size <= unbiased:
            raise ValueError(f"an unbiased variance needs two samples at least, not {self.batch_size}")
        count = self.batch_size - unbiased
        return {name: gradient.sum_of_squares(gradient.mean()) / count for name, gradient in self.items()}

    def noise_scale(self) -> NoiseScale:
        """The gradient noise scale tr(Sigma) / |G|^2 of these samples, with its jackknife standard error."""
        sums = self.weighted_sum(torch.ones(self.batch_size))
        return noise_scale(self._squared_norms(), self.dot(sums))

    def project(self, dim: int, seed: int = 0, kind: str = "gaussian") -> Tensor:
        """P g[i], (B, dim), for a random P with E<P g, P h> = <g, h>: the same for a seed on every machine.

        P depends on the seed, the kind, `dim` and the parameters' names and shapes alone. With n numbers a gradient:
        "gaussian" costs the n dim normal numbers and 2 B n dim; "rademacher" the same with signs, which are faster to
        make; "sjlt" 4 additions for each of the B n numbers, whatever dim is; "kronecker" splits dim = a b, as near
        a = b as it divides, and costs 2 B T (p a + d b + a b) for a weight (p, d) of a linear layer, whose gradients
        are never formed; parameters of fewer than two dimensions, and complex ones, are projected as by "gaussian".
        """
        return project(self._gradients, dim, seed, kind, torch.zeros_like(self._squared_norms()))

    def receipt(self) -> Receipt:
        """What was covered, and how far the sum over samples is from PyTorch's own derivative."""
        return self._record.receipt(self)

    def _squared_norms(self, names: Iterable[str] | None = None, precise: bool = False) -> Tensor:
        parts = [self[name].squared_norms(precise) for name in (self if names is None else names)]
        return total(parts) if parts else torch.zeros(self.batch_size)
