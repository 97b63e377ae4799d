"""Time and memory of per-sample answers on a CPU, as ratios to a plain forward and backward in the same run.

    python benchmarks/cpu.py [--rounds 9] [--models mlp lstm] [--only "eachgrad*" "vmap*"] [--out FILE.json]

Every round times every contender once, one after another, so that a slow moment of the machine hits all of them;
the median over rounds is reported, with its quartiles. Memory is the peak above what is there before the call,
answer included. Each contender has a copy of the model, and its first answer is compared with a loop over samples.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from fnmatch import fnmatch
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from contenders import CONTENDERS, Call, Contender, clipped, forget, loop_dense, norms
from memory import peak
from models import MODELS
from timing import WARM_UP, about, milliseconds, ratio, seconds, write
from torch import Tensor, nn

INSTALL = "pip install -c constraints.txt -e '.[bench]'"
TOLERANCE = 1e-3
PEERS = {"opacus": "opacus", "backpack": "backpack-for-pytorch"}

Row = dict[str, Any]


class Truth:
    """The loop's answers for one model and batch, in float32 and, for a second look, in float64."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor):
        self.model, self.x, self.y = model, x, y
        self._found: dict[torch.dtype, dict[str, Any]] = {}

    def batch(self, dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
        x = self.x.to(dtype) if self.x.is_floating_point() else self.x
        return copy.deepcopy(self.model).to(dtype), x, self.y

    def answer(self, kind: str, dtype: torch.dtype) -> Any:
        if dtype not in self._found:
            dense: Any = loop_dense(*self.batch(dtype))()
            self._found[dtype] = {"norms": norms(dense), "clipped sum": clipped(dense), "dense": dense}
        return self._found[dtype][kind]

    def check(self, contender: Contender, answer: Any) -> Row:
        """Whether a float32 answer is right.

        Where it differs, float64 decides: an activation within rounding of a ReLU's corner falls to one side in a
        batch and to the other alone. On the MLP one such unit of one sample sets every contender 3e-3 apart from the
        loop; those looked at in float64 agree with it to 2e-7.
        """
        row: Row = {"deviation": deviation(answer, self.answer(contender.answer, torch.float32))}
        row["right"] = row["deviation"] <= TOLERANCE
        if not row["right"]:
            try:
                precise = contender.build(*self.batch(torch.float64))()
            # Without a second look, the first one stands.
            except Exception:
                return row
            row["deviation_float64"] = deviation(precise, self.answer(contender.answer, torch.float64))
            row["right"] = row["deviation_float64"] <= TOLERANCE
        return row


class Entrant:
    """A contender on its own copy of the model."""

    def __init__(self, contender: Contender, truth: Truth):
        """After the first call, which is compared with the loop's answer, and the others before the clock runs."""
        self._model, x, y = truth.batch(torch.float32)
        self._call: Call = contender.build(self._model, x, y)
        self.row: Row = {"answer": contender.answer}
        answer = self.fresh()()
        if contender.answer != "nothing":
            self.row |= truth.check(contender, answer)
        del answer
        for _ in range(WARM_UP - 1):
            self.fresh()()
        self.rest()

    def fresh(self) -> Call:
        """The call, with nothing of an earlier one left on the parameters."""
        self.rest()
        return self._call

    def rest(self) -> None:
        forget(self._model)


def deviation(ours: Any, truth: Any) -> float:
    """The largest |ours - truth| / |truth| of a parameter, by norms; of less than 1e-3 of the whole, to that."""
    if isinstance(truth, Tensor):
        return float((ours - truth).norm() / truth.norm())
    if ours.keys() != truth.keys():
        return float("inf")
    sizes = {name: float(t.norm()) for name, t in truth.items()}
    floor = 1e-3 * sum(s * s for s in sizes.values()) ** 0.5
    if any(ours[name] is None or ours[name].shape != t.shape for name, t in truth.items()):
        return float("inf")
    found = [float((ours[name] - t).norm()) / max(sizes[name], floor) for name, t in truth.items()]
    # A NaN is no agreement, and max() may pass over it.
    return max(found) if all(f == f for f in found) else float("inf")


def entrants(name: str, chosen: list[Contender]) -> tuple[dict[str, Entrant], dict[str, Row]]:
    """Those that run the model, warm, and the rows of those that fail."""
    torch.manual_seed(0)
    truth = Truth(*MODELS[name]())
    ready: dict[str, Entrant] = {}
    failed: dict[str, Row] = {}
    for contender in chosen:
        try:
            ready[contender.name] = Entrant(contender, truth)
        # Whatever a peer raises is its result.
        except Exception as error:
            line = (str(error).strip() or "no message").splitlines()[0][:150]
            failed[contender.name] = {"answer": contender.answer, "error": f"{type(error).__name__}: {line}"}
    return ready, failed


def measure(name: str, chosen: list[Contender], rounds: int) -> dict[str, Row]:
    """{contender: its ratios to plain in time and memory, or its error}, in the order of `chosen`."""
    ready, failed = entrants(name, chosen)
    times: dict[str, list[float]] = {contender: [] for contender in ready}
    # The 6th call gives the memory and the 7th is the first that is timed: the profiler slows its own call down.
    bytes_: dict[str, int] = {}
    for contender, entrant in ready.items():
        bytes_[contender] = peak(entrant.fresh())
        entrant.rest()
    for _ in range(rounds):
        for contender, entrant in ready.items():
            times[contender].append(seconds(entrant.fresh()))
            entrant.rest()
    rows = {}
    for contender, entrant in ready.items():
        rows[contender] = entrant.row | ratio(times[contender], times["plain"])
        rows[contender] |= {
            "milliseconds": milliseconds(times[contender]),
            "memory": bytes_[contender] / bytes_["plain"],
            "bytes": bytes_[contender],
        }
    return {c.name: (rows | failed)[c.name] for c in chosen}


def line(model: str, contender: str, row: Row) -> str:
    if "error" in row:
        return f"{model:12s} {contender:28s} fails: {row['error']}"
    spread = f"({row['low']:.2f}-{row['high']:.2f})"
    verdict = "" if row.get("right", True) else f"  WRONG by {row['deviation']:.1e}"
    if "deviation_float64" in row:
        verdict += f"  (float32 differs by {row['deviation']:.1e}, float64 by {row['deviation_float64']:.1e})"
    return (
        f"{model:12s} {contender:28s} {row['ratio']:7.2f}  {spread:15s} {row['milliseconds']:8.1f} ms"
        f"   memory {row['memory']:6.2f}  {row['bytes'] / 2**20:8.1f} MiB{verdict}"
    )


def cell(row: Row) -> str:
    if "error" in row:
        return "fails"
    wrong = "" if row.get("right", True) else " WRONG"
    return f"{row['ratio']:.3g} ({row['memory']:.3g}){wrong}"


def table(results: dict[str, dict[str, Row]]) -> str:
    """Markdown: time, and memory in brackets, as ratios to plain."""
    models = list(results)
    lines = ["| time (memory) | " + " | ".join(models) + " |", "|---" * (len(models) + 1) + "|"]
    for contender in next(iter(results.values())):
        lines.append(f"| {contender} | " + " | ".join(cell(results[m][contender]) for m in models) + " |")
    return "\n".join(lines)


def select(patterns: list[str]) -> tuple[list[Contender], list[str]]:
    """The contenders asked for whose packages are there, plain first, and what is not there."""
    wanted = [c for c in CONTENDERS if c.name == "plain" or any(fnmatch(c.name, p) for p in patterns)]
    missing = {PEERS[c.package] for c in wanted if c.missing and c.package}
    return [c for c in wanted if not c.missing], sorted(missing)


def versions() -> dict[str, str]:
    found = {}
    for package in PEERS.values():
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--only", nargs="*", default=["*"], help="globs of contenders, such as 'eachgrad*'")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    # Peers warn on every call; what matters of it is in the table.
    warnings.simplefilter("ignore")
    chosen, missing = select(options.only)
    if missing:
        print(f"not installed, left out: {', '.join(missing)}; {INSTALL}")
    results = {}
    for name in options.models:
        results[name] = measure(name, chosen, options.rounds)
        print("\n".join(map(partial(line, name), results[name], results[name].values())), flush=True)
    print("\n" + table(results))
    write(options.out, about(versions=versions(), rounds=options.rounds, missing=missing, results=results))


if __name__ == "__main__":
    main()
