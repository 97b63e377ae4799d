"""The receipt of a run: what was done, and what it has spent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eachgrad.private.run import Run


@dataclass(frozen=True)
class Receipt:
    """What a private run has done so far. The counts of samples have no noise on them and are not for publication."""

    trained: int  # numbers of the parameters that are clipped, noised and stepped
    frozen: int
    clipping: str
    noise_multiplier: float
    generator: str
    sampling: str
    n: int
    batch_size: int
    steps: int  # counted
    lost: int  # of them, taken before a crash and not in the parameters
    planned: int
    accountant: str
    epsilon: float
    delta: float
    samples: int  # drawn, in all steps
    clipped: int
    nonfinite: int

    def __str__(self) -> str:
        lost = f", {self.lost} of them lost in a crash" if self.lost else ""
        frozen = f", {self.frozen:,} frozen" if self.frozen else ""
        return "\n".join(
            [
                f"epsilon {self.epsilon:.4g} at delta {self.delta:g}, by the {self.accountant} accountant",
                f"{self.steps} of {self.planned} steps{lost}; {self.sampling}",
                f"n = {self.n}, batch_size {self.batch_size}; {self.trained:,} numbers trained{frozen}",
                f"clipping: {self.clipping}; noise multiplier {self.noise_multiplier:.4g} from {self.generator}",
                f"{self.samples} samples drawn, {self.clipped} clipped, {self.nonfinite} not finite and left out (counts "
                "without noise)",
            ]
        )


SAMPLINGS = {
    "poisson": "Poisson sampling, neighbours differ by one sample more or less",
    "shuffled": "shuffled batches, no amplification, neighbours differ by one sample that contributes nothing",
}


def receipt_of(run: Run) -> Receipt:
    settings, trained = run.settings, sum(p.numel() for p in run.parameters.values())
    return Receipt(
        trained=trained,
        frozen=sum(p.numel() for p in run.model.parameters()) - trained,
        clipping=str(run.rule),
        noise_multiplier=settings.noise_multiplier,
        generator=run.source.label,
        sampling=SAMPLINGS[settings.sampling],
        n=settings.n,
        batch_size=settings.batch_size,
        steps=run.spent,
        lost=run.lost,
        planned=settings.steps,
        accountant=settings.accountant.upper(),
        epsilon=run.epsilon(),
        delta=settings.target_delta,
        **run.totals(),
    )
