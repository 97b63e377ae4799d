"""PerSampleGrads: a block per parameter, and the questions about all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from eachgrad import queries
from eachgrad.gradient import Gradient, costs_of
from eachgrad.moments import NoiseScale

if TYPE_CHECKING:
    from eachgrad.explanation import Explanation
    from eachgrad.receipt import Receipt, Record

__all__ = ["Gradient", "PerSampleGrads"]


class PerSampleGrads(Mapping[str, Gradient]):
    """The gradients of B samples: a mapping of parameter name to Gradient, and queries over all of them."""

    def __init__(self, gradients: dict[str, Gradient], batch_size: int, record: Record, budget: int | None = None):
        self._gradients = gradients
        self.batch_size = batch_size
        self._record = record
        self._budget = budget

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
        chosen = self._over.select([pattern] if isinstance(pattern, str) else pattern).parameters
        return PerSampleGrads({n: self[n] for n in chosen}, self.batch_size, self._record, self._budget)

    def dense(self) -> dict[str, Tensor]:
        """Every gradient of every sample: {name: (B, *shape)}."""
        return self._ask(queries.dense())

    def norms(self, by: str | None = None) -> Tensor | dict[str, Tensor]:
        """The norm of each sample's gradient, (B,); by="parameter": {name: (B,)}; by="module": {module path: (B,)}."""
        return self._ask(queries.norms(by))

    def topk_norms(self, k: int, largest: bool = True) -> tuple[Tensor, Tensor]:
        """The k largest (or smallest) norms, sorted, and the samples they belong to: (k,) and (k,)."""
        return self._ask(queries.topk_norms(k, largest))

    def weighted_sum(self, c: Tensor) -> dict[str, Tensor]:
        """sum_i c[i] g[i] for each parameter, {name: (*shape)}; K sums at once for c (K, B): {name: (K, *shape)}."""
        return self._ask(queries.weighted_sum(c))

    def clipped_sum(
        self,
        max_norm: float | Mapping[str, float],
        *,
        groups: str | Mapping[str, Iterable[str]] | None = None,
        normalise: bool = False,
        gamma: float = 0.01,
        nonfinite: str = "raise",
        wide: bool = False,
    ) -> dict[str, Tensor]:
        """sum_i g[i] min(1, max_norm / |g[i]|), {name: (*shape)}; the norm is over all parameters.

        `groups`: {group: names or globs}, or "parameter", clips each group's part of g[i] by its own norm, to one
        `max_norm` or {group: max_norm}. `normalise` scales by max_norm / (|g[i]| + gamma) instead. `nonfinite`: a
        sample whose norm is NaN or infinite is an error ("raise"), or adds exactly zero ("zero"). `wide` leaves the sum
        in float32 where parameters have sixteen bits: rounded to these, one sample can move it by more. In float32 and
        float64 no sample adds more than max_norm (1 + 1e-5), but for the rounding of gradients that are themselves
        sums of terms that cancel.
        """
        return self._ask(queries.clipped_sum(max_norm, groups, normalise, gamma, nonfinite, wide))

    def dot(self, direction: Mapping[str, Tensor], positions: bool = False) -> Tensor:
        """<g[i], v> with v = {name: (*shape)}, (B,), or K of them at once: {name: (K, *shape)} -> (B, K).

        Names that are left out count as zero. For complex numbers it is the real part.

        `positions` gives the share of each position (token) of a sample, (B, T) or (B, T, K), whose sum over T is the
        ordinary answer: for weights of matrix products and for embeddings, where all that are asked for have the same
        number of positions. A position is one of the op's output; a parameter that is used several times has those of
        all its uses, one after another (embeddings and products apart). Biases, norms, convolutions and derived weights
        have lost their positions: that is an error which names them, and `select` chooses the others.
        """
        return self._ask(queries.dot(direction, positions))

    def gram(self, other: PerSampleGrads | None = None) -> Tensor:
        """<g[i], g[j]>, (B, B), or <g[i], h[j]> with the gradients of other samples, (B, B'); real part.

        Costs one product of (B, P) and (P, B') beside the gradients themselves, which are made a slice at a time.
        """
        return self._ask(queries.gram(other))

    def mean(self) -> dict[str, Tensor]:
        """(1/B) sum_i g[i] for each parameter, {name: (*shape)}."""
        return self._ask(queries.mean())

    def second_moment(self) -> dict[str, Tensor]:
        """(1/B) sum_i |g[i]|^2, element by element, {name: (*shape)}, in float32 or better."""
        return self._ask(queries.second_moment())

    def variance(self, unbiased: bool = True) -> dict[str, Tensor]:
        """The variance over samples, element by element, {name: (*shape)}; divided by B - 1, or B if not unbiased."""
        return self._ask(queries.variance(unbiased))

    def noise_scale(self) -> NoiseScale:
        """The gradient noise scale tr(Sigma) / |G|^2 of these samples, with its jackknife standard error."""
        return self._ask(queries.noise_scale())

    def project(self, dim: int, seed: int = 0, kind: str = "gaussian") -> Tensor:
        """P g[i], (B, dim), for a random P with E<P g, P h> = <g, h>: the same for a seed on every machine.

        P depends on the seed, the kind, `dim` and the parameters' names and shapes alone. With n numbers a gradient:
        "gaussian" costs the n dim normal numbers and 2 B n dim; "rademacher" the same with signs, which are faster to
        make; "sjlt" 4 additions for each of the B n numbers, whatever dim is; "kronecker" splits dim = a b, as near
        a = b as it divides, and costs 2 B T (p a + d b + a b) for a weight (p, d) of a linear layer, whose gradients
        are never formed; parameters of fewer than two dimensions, and complex ones, are projected as by "sjlt".
        """
        return self._ask(queries.project(dim, seed, kind))

    def receipt(self) -> Receipt:
        """What was covered, and how far the sum over samples is from PyTorch's own derivative."""
        return self._record.receipt(self)

    def explain(self, query: str = "clipped_sum") -> Explanation:
        """One row per use of a parameter: the route that `query` takes for it, its FLOPs, its bytes, and why."""
        from eachgrad.explanation import of_grads

        return of_grads(self, query)

    def feed(self, add: Callable[[Gradient], None], names: set[str] | None) -> None:
        """Hand over the gradients of these parameters (None: of all) one by one."""
        for name, gradient in self.items():
            if names is None or name in names:
                add(gradient)

    @property
    def _over(self) -> queries.Over:
        parameters = {name: gradient.parameter for name, gradient in self.items()}
        return queries.Over(parameters, self._record.aliases, self._budget)

    def _ask(self, query: queries.Query) -> Any:
        asked = queries.Accumulator(found=query)
        asked.run(self._over, self.batch_size, costs_of(self) if query.holds else {}, self.feed)
        return asked.answer().found
