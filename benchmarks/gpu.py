"""A training step with an answer about each sample, on a GPU: time and memory beside plain, compiled PyTorch.

    python benchmarks/gpu.py [--models gpt2 vit] [--contenders plain_compiled eachgrad_compiled] [--work norms]
                             [--dtype fp32] [--rounds 10] [--turns FILE] [--budget SECONDS] [--json FILE.json] [--tiny]

"private" is a step that clips each sample to norm 1, sums, adds noise and updates; "norms" is an ordinary step that
gives the norm of each sample as well. All contenders share one compiled update. Every round times every contender,
one after another in one process, a few steps each between two events; medians and quartiles are over rounds. Before
that, each contender's answer is compared with that of eachgrad run eagerly in float32 on the same batch: it is right if
it is no further from it than twice what an eager run in the dtype asked for is, and 1e-3.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import platform
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import torch
from gpu_contenders import CONTENDERS, Contender, Found, Task, vmap_chunked
from gpu_entrant import Entrant, Row, Truth, Turns, Update, clean, compared, on_gpu, update
from gpu_models import MODELS
from timing import ratio, write

import eachgrad

ROOT = Path(__file__).resolve().parents[1]
AGAINST = ("plain_compiled", "plain")
ENOUGH = 3  # rounds that are run even when the budget is spent
T = TypeVar("T")
SPENT = "not run: the budget was spent"


class Race:
    """All contenders on one model."""

    def __init__(self, name: str, options: argparse.Namespace, say: Callable[[str], None]):
        torch.manual_seed(0)
        with torch.device("cuda" if on_gpu() else "cpu"):
            self.task = Task(MODELS[name](options.tiny), options.work, options.dtype, options.backend)
        self.name, self.options, self.say = name, options, say
        self.update: Update = torch.compile(update, fullgraph=True, dynamic=False, backend=options.backend)
        self.ready: dict[str, Entrant] = {}
        self.failed: dict[str, str] = {}
        self.truth = self._truth()

    def _truth(self) -> Truth | None:
        """eachgrad's answer by an eager run in float32, and how far one with the dtype asked for is from it.

        The update is compiled on the way, with noise and without, as far as the contenders need it.
        """
        options = self.options
        task = dataclasses.replace(self.task, setup=copy.deepcopy(self.task.setup))
        try:
            exact, sizes = in_float32(lambda: eager(task, options.work)), in_float32(lambda: eager(task, "norms").norms)
            assert sizes is not None
            self.say(f"{self.name}: the samples have norms of {float(sizes.min()):.3g} to {float(sizes.max()):.3g}")
            usual = compared(eager(task, options.work, options.dtype), Truth(exact))
            self.say(f"{self.name}: eagerly in {options.dtype} {usual['deviation']:.1e} away from float32")
            parameters = dict(sorted(task.parameters.items()))
            noisy = [CONTENDERS[n].adds_torch_noise(options.work, on_gpu()) for n in options.contenders]
            for kind in sorted(set(noisy)):
                self.update(list(parameters.values()), [exact.grads[n] for n in parameters], kind)
            return Truth(exact, usual)
        except Exception as error:  # the contenders' rows will tell, too
            self.say(f"{self.name}: nothing to compare with: {reason(error)}")
            return None

    def enter(self, contender: Contender) -> None:
        name = contender.name
        self.failed.pop(name, None)
        if contender.missing:
            self.failed[name] = f"{contender.package} is not installed"
        else:
            try:
                self.ready[name] = Entrant(contender, self.task, self.truth, self.update)
            except Exception as error:  # whatever a contender raises is its result
                self.failed[name] = reason(error)
        clean()
        cold = f"ready after {self.ready[name].row['cold_seconds']:.1f} s" if name in self.ready else ""
        self.say(f"{self.name}: {name} {self.failed.get(name, cold)}")

    def enter_all(self) -> None:
        for name in self.options.contenders:
            if late(self.options):
                self.failed[name] = SPENT
            else:
                self.enter(CONTENDERS[name])
        if self.failed.get("vmap") == "out of memory":
            size = len(self.task.setup.x)
            while size > 1 and "vmap_chunked" not in self.ready and not late(self.options):
                size //= 2
                self.enter(vmap_chunked(size))

    def warm(self) -> None:
        """Everything before the clock."""
        self.enter_all()
        self.truth = None
        clean()

    def time(self) -> dict[str, Row]:
        """{contender: its figures, or its error}."""
        for done in range(self.options.rounds):
            if done >= ENOUGH and late(self.options):
                break
            for name in list(self.ready):
                try:
                    self.ready[name].run()
                except Exception as error:  # such as too little memory beside the others
                    self.failed[name] = reason(error)
                    del self.ready[name]
                    clean()
        self.say(f"{self.name}: timed")
        return {name: self.row(name) for name in [*self.options.contenders, "vmap_chunked"] if self.has(name)}

    def has(self, name: str) -> bool:
        return name in self.ready or name in self.failed

    def row(self, name: str) -> Row:
        if name in self.failed:
            return {"error": self.failed[name]}
        entrant = self.ready[name]
        low, middle, high = quartiles([1e3 * t for t in entrant.times])
        row = entrant.row | {"milliseconds": middle, "low": low, "high": high, "note": entrant.note()}
        row |= {"rounds": len(entrant.times), "steps_a_round": entrant.steps}
        for base in AGAINST:
            if base in self.ready:
                against: Row = dict(ratio(entrant.times, self.ready[base].times))
                row[f"against_{base}"] = against | {"memory": row["bytes"] / self.ready[base].row["bytes"]}
        return row


def eager(task: Task, work: str, dtype: str = "fp32") -> Found:
    return CONTENDERS["eachgrad"].build(dataclasses.replace(task, work=work, dtype=dtype)).call()


def in_float32(call: Callable[[], T]) -> T:
    """The call with products of float32 numbers that are not rounded first."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        return call()
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def late(options: argparse.Namespace) -> bool:
    return options.budget is not None and time.perf_counter() - options.start > options.budget


def reason(error: Exception) -> str:
    """One line of why a contender has no figures."""
    text = str(error).strip() or "no message"
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text:
        return "out of memory"
    return f"{type(error).__name__}: {text.splitlines()[0][:150]}"


def quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3


def line(model: str, contender: str, row: Row) -> str:
    head = f"{model:8s} {contender:17s} "
    if "error" in row:
        return head + row["error"]
    spread = f"({row['low']:.2f}-{row['high']:.2f})"
    text = head + f"{row['milliseconds']:9.2f} ms {spread:19s} {row['bytes'] / 2**30:7.2f} GiB "
    for base in AGAINST:
        against = row.get(f"against_{base}")
        if against is not None:
            text += f" | {against['ratio']:6.3f} ({against['low']:.3f}-{against['high']:.3f}) {against['memory']:6.3f}"
    text += f" | cold {row['cold_seconds']:5.1f} s"
    if "right" in row:
        worst = max(row["deviation"], row.get("deviation_of_norms", 0.0))
        text += f" | deviation {worst:.1e}" + ("" if row["right"] else " WRONG")
        # The parameters are float32.
        text += "" if row["dtypes"] == ["float32"] else f" | an answer in {', '.join(row['dtypes'])}"
    return text + (f" | {row['note']}" if row["note"] else "")


def cell(row: Row) -> str:
    """Time and memory as ratios to the first of AGAINST that ran."""
    if "error" in row:
        return {"out of memory": "out of memory", SPENT: "not run"}.get(row["error"], "fails")
    against = next((row[f"against_{base}"] for base in AGAINST if f"against_{base}" in row), None)
    text = f"{row['milliseconds']:.1f} ms" if against is None else f"{against['ratio']:.2f} ({against['memory']:.2f})"
    return text + ("" if row.get("right", True) else " WRONG")


def table(results: dict[str, dict[str, Row]]) -> str:
    """Markdown: a row for each contender, a column for each model."""
    names = list(dict.fromkeys(name for rows in results.values() for name in rows))
    lines = ["| time (memory) | " + " | ".join(results) + " |", "|---" * (len(results) + 1) + "|"]
    for name in names:
        cells = (cell(rows[name]) if name in rows else "" for rows in results.values())
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
        "eachgrad": eachgrad.__version__,
    }  # fmt: skip
    for package in ("triton", "opacus"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def about(options: argparse.Namespace) -> Row:
    """What a result depends on: the device, the versions, the code and the settings."""
    commit = None
    if shutil.which("git"):
        asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
        commit = asked.stdout.strip() or None
    device = torch.cuda.get_device_name() if on_gpu() else platform.processor() or platform.machine()
    settings = {name: getattr(options, name) for name in ("work", "dtype", "backend", "tiny", "rounds")}
    settings["float32_matmul_precision"] = torch.get_float32_matmul_precision()
    return {"device": device, "versions": versions(), "commit": commit, "settings": settings}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--work", default="private", choices=["private", "norms"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--budget", type=float, help="seconds after which nothing new is begun")
    parser.add_argument("--turns", type=Path, help="a file by which several processes agree on who measures")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true", help="small models, for a smoke test")
    parser.add_argument("--backend", help="of torch.compile; inductor, and aot_eager with --tiny")
    options = parser.parse_args()
    options.start = time.perf_counter()
    options.backend = options.backend or ("aot_eager" if options.tiny else "inductor")
    return options


def prepare(options: argparse.Namespace) -> None:
    # Peers warn on every call; what matters of it is in the table.
    warnings.simplefilter("ignore")
    # Wheels that were unpacked where nothing can be installed.
    sys.path.append(str(ROOT / ".peers"))
    torch.set_float32_matmul_precision("highest" if options.dtype == "fp32" else "high")
    torch.backends.cudnn.allow_tf32 = options.dtype != "fp32"
    # The update is one function for all contenders, whose gradients may differ in strides.
    torch._dynamo.config.recompile_limit = 64


def main() -> None:
    options = parsed()
    prepare(options)
    facts, results, turns = about(options), {}, Turns(options.turns)

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - options.start:6.1f} s] {text}", flush=True)

    print(
        "a row: ms (quartiles), peak above the model | time (quartiles), memory over plain_compiled | over plain | ..."
    )
    say(f"{facts['device']}, {facts['versions']}, {facts['settings']}")
    for name in options.models:
        if late(options):
            results[name] = {contender: {"error": SPENT} for contender in options.contenders}
            continue
        with turns.beside_others():
            race = Race(name, options, say)
            race.warm()
        with turns.alone():
            results[name] = race.time()
        del race
        print("\n".join(line(name, *item) for item in results[name].items()), flush=True)
        write(options.json, facts | {"results": results})
        torch._dynamo.reset()
        clean()
    write(options.json, facts | {"results": results})
    print("\n" + table(results), flush=True)


if __name__ == "__main__":
    main()
