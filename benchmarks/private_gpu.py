"""A private training run on a GPU, step by step: its time, memory and host work beside plain, compiled training.

    python benchmarks/private_gpu.py [--models gpt2 vit] [--contenders private private_half] [--optimizer adamw]
                                     [--dtype fp32] [--rounds 5] [--steps 20] [--warm 80] [--turns FILE] [--budget SECONDS]
                                     [--json FILE.json] [--tiny]

A step is everything from the draw of its samples to the updated parameters: for `plain_compiled` B of them, for the
private ones what `run.loader` draws, B on average. Both gather them from a data set on the device. Plain training takes
turns with each private run; a step's time is that between two events, with no wait in between. Steps that measure where
the samples lie, and the one after, are not among them. See README.md for what a row says.
"""

from __future__ import annotations

import argparse
import bisect
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

# Wheels that were unpacked where nothing can be installed: eachgrad.private needs dp-accounting and tqdm.
sys.path.append(str(Path(__file__).resolve().parents[1] / ".peers"))

from gpu import about, late, prepare, quartiles, reason
from gpu_contenders import Task
from gpu_entrant import Row, Turns, clean, on_gpu
from gpu_models import MODELS
from private_runner import Runner, Steps
from private_steps import OPTIMIZERS, Drawn, Plain, Private, Trainer, Training, data_for
from timing import ratio, write

import eachgrad

BASE = "plain_compiled"
CONTENDERS: dict[str, Callable[[Training], Trainer]] = {
    BASE: Plain,
    "plain_drawn": Drawn,
    "private": Private,
    "private_two": partial(Private, graphs=2),
    "private_whole": partial(Private, pieces=1),
    "private_half": partial(Private, pieces=2),
    "private_quarter": partial(Private, pieces=4),
    "private_shuffled": partial(Private, pieces=1, sampling="shuffled"),
}


def figures(runner: Runner, base: Runner) -> Row:
    """The row of a contender, beside the rounds of plain training that were run in turns with its own."""
    every = [step for some in runner.rounds for step in some]
    low, middle, high = quartiles([1e3 * t for t, _ in every])
    row = runner.row | {"milliseconds": middle, "low": low, "high": high}
    row["mean_milliseconds"] = 1e3 * statistics.mean(t for t, _ in every)
    row["microseconds_a_sample"] = 1e6 * sum(t for t, _ in every) / max(1, sum(n for _, n in every))
    row["measuring_milliseconds"] = [1e3 * t for t in runner.unusual]
    row["each"] = [(n, round(1e3 * t, 3)) for t, n in every]  # samples and milliseconds
    row |= {"rounds": len(runner.rounds), "steps_a_round": runner.options.steps}
    if runner is not base:
        theirs = base.rounds[-len(runner.rounds) :]
        row["against_plain"] = {
            "step": ratio(by_step(runner.rounds), by_step(theirs)),
            "sample": ratio(by_sample(runner.rounds), by_sample(theirs)),
            "expected": expected(every, runner.training) / statistics.mean(by_step(theirs)),
        } | ({"memory": row["bytes"] / base.row["bytes"]} if "bytes" in row else {})
    return row


def expected(steps: Steps, training: Training) -> float:
    """Seconds of a step, over all that may be drawn: the steps that were timed may have drawn more or fewer samples.

    A number that was not drawn has a time between its neighbours', or so much a sample as the largest one.
    """
    sizes = sorted({n for _, n in steps})
    times = [statistics.mean(t for t, n in steps if n == size) for size in sizes]
    if len(sizes) == 1:
        return times[0]
    n, found = len(training.data), 0.0
    chance = training.batch_size / n
    for drawn in range(n + 1):
        weight = math.lgamma(n + 1) - math.lgamma(drawn + 1) - math.lgamma(n - drawn + 1)
        weight = math.exp(weight + drawn * math.log(chance) + (n - drawn) * math.log1p(-chance))
        found += weight * between(drawn, sizes, times)
    return found


def between(n: int, sizes: list[int], times: list[float]) -> float:
    """The time of n samples, by those of the sizes, which ascend."""
    k = bisect.bisect_left(sizes, n)
    if k == 0:
        return times[0]
    if k == len(sizes):
        return times[-1] * n / sizes[-1]
    share = (n - sizes[k - 1]) / (sizes[k] - sizes[k - 1])
    return times[k - 1] + share * (times[k] - times[k - 1])


def by_step(rounds: list[Steps]) -> list[float]:
    """Seconds of a step on average, round by round."""
    return [statistics.mean(t for t, _ in steps) for steps in rounds]


def by_sample(rounds: list[Steps]) -> list[float]:
    return [sum(t for t, _ in steps) / max(1, sum(n for _, n in steps)) for steps in rounds]


def race(name: str, options: argparse.Namespace, say: Callable[[str], None]) -> Iterator[dict[str, Row]]:
    """{contender: its figures, or its error}, after each; one private run at a time, in turns with plain training."""
    torch.manual_seed(0)
    with torch.device("cuda" if on_gpu() else "cpu"):
        task = Task(MODELS[name](options.tiny), "private", options.dtype, options.backend)
        data = data_for(task.setup)
    turns = Turns(options.turns)
    with turns.beside_others():
        base = Runner(CONTENDERS[BASE], task, data, options)
        base.weigh()
    say(f"{name}: {BASE} ready after {base.row['cold_seconds']:.1f} s")
    rows: dict[str, Row] = {BASE: {}}
    for contender in options.contenders:
        try:
            if late(options):
                raise TimeoutError("not run: the budget was spent")
            with turns.beside_others():
                runner = Runner(CONTENDERS[contender], task, data, options)
            say(f"{name}: {contender} ready after {runner.row['cold_seconds']:.1f} s")
            with turns.alone():
                for _ in range(options.rounds):
                    base.round()
                    runner.round()
                runner.look()
                runner.check()
            rows[contender] = figures(runner, base)
        except Exception as error:  # whatever a contender raises is its result
            rows[contender] = {"error": reason(error)}
        runner = None
        clean()
        say(line(name, contender, rows[contender]))
        if base.rounds:
            yield {**rows, BASE: figures(base, base)}
    with turns.alone():
        if not base.rounds:
            base.round()
        base.look()
    rows[BASE] = figures(base, base)
    say(line(name, BASE, rows[BASE]))
    yield rows


def line(model: str, contender: str, row: Row) -> str:
    head = f"{model:8s} {contender:16s} "
    if "error" in row:
        return head + row["error"]
    text = (
        head
        + f"{row['milliseconds']:8.2f} ms ({row['low']:.2f}-{row['high']:.2f}), mean {row['mean_milliseconds']:.2f}"
    )
    text += f" | {row['microseconds_a_sample']:.1f} us a sample"
    against = row.get("against_plain")
    if against is not None:
        text += f" | x {against['step']['ratio']:.3f} a step, {against['expected']:.3f} expected"
        text += f", {against['sample']['ratio']:.3f} a sample"
    text += f" | host {row['host']['work']:.2f} ms, {len(row['waits'])} waits"
    text += f" | {row['bytes'] / 2**30:.2f} GiB" if "bytes" in row else ""
    if "pieces_a_step" in row:
        sizes = f"up to {row['sizes'][0]}" if row["multiple"] else f"of {' or '.join(map(str, row['sizes']))}"
        text += f" | {row['pieces_a_step']:.2f} pieces {sizes}, {row['graphs']} graphs"
        text += f", {row['replayed']} replayed"
        if row["deviation"] is None:
            return text + " | not compared: out of memory"
        text += f" | deviation {row['deviation']:.1e}, of an eager run {row['deviation_of_eager']:.1e}"
        text += "" if row["right"] else " WRONG"
    return "; ".join([text, *row.get("reasons", [])])


def table(results: dict[str, dict[str, Row]]) -> str:
    """Markdown: a row for each contender; for each model time by step and by sample, and memory, over plain training."""
    names = list(dict.fromkeys(name for rows in results.values() for name in rows))
    lines = ["| a step, a sample (memory) | " + " | ".join(results) + " |", "|---" * (len(results) + 1) + "|"]
    for name in names:
        lines.append(f"| {name} | " + " | ".join(cell(rows.get(name, {})) for rows in results.values()) + " |")
    return "\n".join(lines)


def cell(row: Row) -> str:
    if "milliseconds" not in row:
        return row.get("error", "")[:30]
    against = row.get("against_plain")
    if against is None:
        return f"{row['milliseconds']:.1f} ms"
    text = f"{against['step']['ratio']:.2f}, {against['sample']['ratio']:.2f}"
    text += f" ({against['memory']:.2f})" if "memory" in against else ""
    return text + ("" if row.get("right", True) else " WRONG")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    others = [name for name in CONTENDERS if name != BASE]
    parser.add_argument("--models", nargs="+", default=["gpt2", "vit", "resnet18"], choices=list(MODELS))
    parser.add_argument("--contenders", nargs="+", default=others, choices=others, help=f"beside {BASE}")
    parser.add_argument("--optimizer", default="sgd", choices=list(OPTIMIZERS))
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"], help="bf16: autocast")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="in a round")
    parser.add_argument("--warm", type=int, default=0, help="steps of a private run before the first round, at least")
    parser.add_argument("--turns", type=Path, help="a file by which several processes agree on who measures")
    parser.add_argument("--budget", type=float, help="seconds after which nothing new is begun")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true", help="small models, for a smoke test")
    parser.add_argument("--backend", help="of torch.compile; inductor, and aot_eager with --tiny")
    options = parser.parse_args()
    options.start, options.work = time.perf_counter(), "private"
    options.backend = options.backend or ("aot_eager" if options.tiny else "inductor")
    return options


def main() -> None:
    options = parsed()
    prepare(options)
    if options.backend != "inductor":  # make_private has no option for it
        eachgrad.compile = partial(eachgrad.compile, backend=options.backend)
    known, results = about(options), {}
    known["settings"] |= {"optimizer": options.optimizer, "steps": options.steps}

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - options.start:6.1f} s] {text}", flush=True)

    say(f"{known['device']}, {known['versions']}, {known['settings']}")
    for name in options.models:
        if late(options):
            break
        for rows in race(name, options, say):
            results[name] = rows
            write(options.json, known | {"results": results})
        torch._dynamo.reset()
        clean()
    print("\n" + table(results), flush=True)


if __name__ == "__main__":
    main()
