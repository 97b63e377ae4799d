"""Epsilon of eachgrad.private beside dp-accounting called directly and Opacus' PRV accountant, on 20 settings.

    python benchmarks/private_accounting.py

The last two columns bound epsilon by Opacus' PRV accountant, whose stated error is 0.01. Ends with an error if eachgrad
differs from dp-accounting at all, or lies outside Opacus' bounds. Needs opacus, of the extra "bench".
"""

from __future__ import annotations

import warnings

import dp_accounting
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from opacus.accountants import PRVAccountant

from eachgrad.private.accounting import Spent, epsilon

ERROR = 0.01
SETTINGS = [  # rate, noise multiplier, steps, delta
    (0.001, 0.6, 10_000, 1e-6), (0.001, 0.8, 100_000, 1e-6), (0.001, 1.1, 50_000, 1e-5), (0.004, 0.7, 5_000, 1e-5),
    (0.004, 1.0, 20_000, 1e-5), (0.01, 0.5, 500, 1e-5), (0.01, 0.8, 3_000, 1e-5), (0.01, 1.0, 10_000, 1e-5),
    (0.01, 2.0, 10_000, 1e-6), (0.02, 1.1, 2_500, 1e-5), (0.05, 0.9, 400, 1e-4), (0.05, 1.5, 1_000, 1e-5),
    (0.1, 0.7, 50, 1e-4), (0.1, 1.0, 200, 1e-4), (0.1, 2.5, 500, 1e-4), (0.1781, 2.86, 300, 1e-4),
    (0.25, 2.0, 100, 1e-3), (0.25, 5.0, 800, 1e-5), (0.5, 3.0, 60, 1e-3), (0.5, 8.0, 500, 1e-5),
]  # fmt: skip


def direct(accountant: type, rate: float, noise: float, steps: int, delta: float) -> float:
    """Epsilon by dp-accounting itself."""
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    return accountant().compose(event, steps).get_epsilon(delta)


def opacus(rate: float, noise: float, steps: int, delta: float) -> tuple[float, float]:
    """The bounds that Opacus' PRV accountant gives for epsilon."""
    accountant = PRVAccountant()
    accountant.history = [(noise, rate, steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its RDP accountant, which sizes the grid
        found = accountant._get_dprv(eps_error=ERROR, delta_error=delta / 1000)
        lower, _, upper = found.compute_epsilon(delta, delta / 1000, ERROR)
    return float(lower), float(upper)


def main() -> None:
    print("| rate | noise | steps | delta | PLD | RDP | Opacus PRV from | to |\n" + "|---" * 8 + "|")
    wrong = []
    for setting in SETTINGS:
        rate, noise, steps, delta = setting
        history = (Spent(rate, noise, steps),)
        ours = {name: epsilon(history, delta, name) for name in ("pld", "rdp")}
        theirs = {"pld": direct(PLDAccountant, *setting), "rdp": direct(RdpAccountant, *setting)}
        lower, upper = opacus(*setting)
        cells = [rate, noise, steps, f"{delta:g}", *(f"{e:.5f}" for e in (ours["pld"], ours["rdp"], lower, upper))]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
        if ours != theirs or not lower <= ours["pld"] <= upper:
            wrong.append(setting)
    if wrong:
        raise SystemExit(f"they differ: {wrong}")
    print(f"{len(SETTINGS)} settings: the same as dp-accounting to the last digit, and within Opacus' bounds")


if __name__ == "__main__":
    main()
