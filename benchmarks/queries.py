"""Time of eachgrad's other queries on the transformer, against the same from dense vmap gradients.

    python benchmarks/queries.py [--rounds 5] [--slow-rounds 1] [--only dot "project*"] [--out FILE.json]

Every time is of forward, backward and query. `vmap / eachgrad` is how many times faster eachgrad is; vmap's
projections are of the same kind, with torch's own random numbers, made in chunks. `of backward` is eachgrad's
backward and query over a plain backward, both without their forward; `of step` is all of eachgrad's over a plain
forward and backward. The matrices of "gaussian" and "rademacher" have 15 billion numbers: --slow-rounds is theirs.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from contenders import Grads, vmap_dense
from models import transformer
from timing import WARM_UP, about, milliseconds, ratio, write
from torch import Tensor, nn
from torch.nn import functional as F

import eachgrad

KINDS = ("kronecker", "sjlt", "gaussian", "rademacher")
SLOW = ("project gaussian", "project rademacher")
CHUNK = 1 << 22  # random numbers at a time: 16 MiB in float32
BUCKETS = 4  # as many as eachgrad's "sjlt" has

HEAD = "| query | vmap / eachgrad | of backward | of step | eachgrad ms | vmap ms | plain ms |\n" + "|---" * 7 + "|"

Parts = dict[str, float]  # seconds by part: forward, rest


def flat(grads: Grads) -> list[Tensor]:
    return [g.flatten(1) for g in grads.values()]


def dense_dot(grads: Grads, direction: Grads) -> Tensor:
    return sum((g.flatten(1) @ direction[name].flatten() for name, g in grads.items()), torch.zeros(()))


def dense_gram(grads: Grads) -> Tensor:
    return sum((g @ g.mT for g in flat(grads)), torch.zeros(()))


def dense_variance(grads: Grads) -> Grads:
    return {name: g.var(0) for name, g in grads.items()}


def dense_matrix(grads: Grads, dim: int, numbers: Callable[[int, int], Tensor]) -> Tensor:
    step = max(1, CHUNK // dim)
    out = torch.zeros(len(next(iter(grads.values()))), dim)
    for g in flat(grads):
        for part in g.split(step, 1):
            out.addmm_(part, numbers(part.shape[1], dim))
    return out / math.sqrt(dim)


def _signs(n: int, dim: int) -> Tensor:
    return torch.empty(n, dim).bernoulli_(0.5).mul_(2).sub_(1)


def dense_buckets(grads: Grads, dim: int) -> Tensor:
    out = torch.zeros(len(next(iter(grads.values()))), dim)
    for g in flat(grads):
        for part in g.split(CHUNK // BUCKETS, 1):
            for _ in range(BUCKETS):
                sign = torch.randint(0, 2, (part.shape[1],)).mul_(2).sub_(1).float()
                out.index_add_(1, torch.randint(0, dim, (part.shape[1],)), part * sign)
    return out / math.sqrt(BUCKETS)


def dense_factors(grads: Grads, dim: int) -> Tensor:
    a = max(n for n in range(1, math.isqrt(dim) + 1) if dim % n == 0)
    out = torch.zeros(len(next(iter(grads.values()))), dim)
    for name, g in grads.items():
        if g.ndim < 3:
            out += dense_matrix({name: g}, dim, torch.randn)
        else:
            g = g.flatten(2)
            left, right = torch.randn(a, g.shape[1]) / math.sqrt(a), torch.randn(dim // a, g.shape[2])
            out += (left @ g @ right.mT / math.sqrt(dim // a)).flatten(1)
    return out


def queries(direction: Grads, dim: int) -> dict[str, tuple[eachgrad.queries.Query, Callable[[Grads], object]]]:
    """{query: (asked of eachgrad, of dense gradients)}."""
    dense = {
        "kronecker": lambda g: dense_factors(g, dim),
        "sjlt": lambda g: dense_buckets(g, dim),
        "gaussian": lambda g: dense_matrix(g, dim, torch.randn),
        "rademacher": lambda g: dense_matrix(g, dim, _signs),
    }
    return {
        "dot": (eachgrad.dot(direction), lambda g: dense_dot(g, direction)),
        "gram": (eachgrad.gram(), dense_gram),
        "variance": (eachgrad.variance(), dense_variance),
        **{f"project {kind}": (eachgrad.project(dim, kind=kind), dense[kind]) for kind in KINDS},
    }


def timed(forward: Callable[[], Any], rest: Callable[[Any], object]) -> Parts:
    start = time.perf_counter()
    state = forward()
    middle = time.perf_counter()
    answer = rest(state)
    end = time.perf_counter()
    del answer
    return {"forward": middle - start, "rest": end - middle, "all": end - start}


def contenders(
    model: nn.Module, x: Tensor, y: Tensor, ours: eachgrad.queries.Query, theirs: Callable[[Grads], object]
) -> dict[str, Callable[[], Parts]]:
    plain, own = copy.deepcopy(model), copy.deepcopy(model)
    dense = vmap_dense(copy.deepcopy(model), x, y)

    def run_plain() -> Parts:
        plain.zero_grad()
        return timed(lambda: F.cross_entropy(plain(x), y, reduction="sum"), lambda loss: loss.backward())

    def record() -> tuple[eachgrad.Tape, Tensor]:
        with eachgrad.record(own) as tape:
            losses = F.cross_entropy(own(x), y, reduction="none")
        return tape, losses

    def run_eachgrad() -> Parts:
        return timed(record, lambda recorded: recorded[0].ask(recorded[1], answer=ours).answer)

    def settle() -> None:
        tape, losses = record()
        tape.ask(losses, answer=eachgrad.weighted_sum(torch.ones(len(x))))

    # The query itself has nothing to learn, and some take minutes.
    for _ in range(WARM_UP):
        settle()
        run_plain()
    return {"plain": run_plain, "eachgrad": run_eachgrad, "vmap": lambda: timed(dense, theirs)}  # type: ignore[arg-type]


def agree(model: nn.Module, x: Tensor, y: Tensor, direction: Grads, dim: int) -> dict[str, float]:
    """How far the two ways are apart, in units of the answer: of a projection, by the norms that it keeps."""
    dense = vmap_dense(model, x, y)()
    gram = dense_gram(dense)  # type: ignore[arg-type]
    found = {}
    for name, (ours, theirs) in queries(direction, dim).items():
        if name in SLOW:
            continue
        with eachgrad.record(model) as tape:
            losses = F.cross_entropy(model(x), y, reduction="none")
        a, b = tape.ask(losses, answer=ours).answer, theirs(dense)  # type: ignore[arg-type]
        if name.startswith("project"):
            # Random, so only near: E <P g, P h> = <g, h>, and of the order of sqrt(B / dim) off for near-orthogonal g.
            a, b = a @ a.mT, gram  # type: ignore[operator]
        pairs = [(a[n], b[n]) for n in b] if isinstance(b, dict) else [(a, b)]  # type: ignore[index]
        found[name] = math.sqrt(sum(float((p - q).norm()) ** 2 for p, q in pairs))
        found[name] /= math.sqrt(sum(float(q.norm()) ** 2 for _, q in pairs))
    return found


def measure(calls: dict[str, Callable[[], Parts]], rounds: int) -> dict[str, Any]:
    runs: dict[str, list[Parts]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            runs[name].append(call())
    take = {name: {part: [r[part] for r in rows] for part in rows[0]} for name, rows in runs.items()}
    return {
        "vmap over eachgrad": ratio(take["vmap"]["all"], take["eachgrad"]["all"]),
        "backward and query over plain backward": ratio(take["eachgrad"]["rest"], take["plain"]["rest"]),
        "all over plain backward": ratio(take["eachgrad"]["all"], take["plain"]["rest"]),
        "all over plain forward and backward": ratio(take["eachgrad"]["all"], take["plain"]["all"]),
        "milliseconds": {name: milliseconds(parts["all"]) for name, parts in take.items()},
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slow-rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--only", nargs="*", default=["*"], help="globs of queries, such as 'project*'")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model, x, y = transformer(options.samples)
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    apart = agree(copy.deepcopy(model), x, y, direction, options.dim)
    print("apart:", ", ".join(f"{name} {value:.1e}" for name, value in apart.items()), flush=True)
    print(HEAD)
    results = {}
    for name, (ours, theirs) in queries(direction, options.dim).items():
        if not any(fnmatch(name, pattern) for pattern in options.only):
            continue
        rounds = options.slow_rounds if name in SLOW else options.rounds
        row = results[name] = measure(contenders(model, x, y, ours, theirs), rounds)
        ratios = [
            row[key]["ratio"]
            for key in (
                "vmap over eachgrad",
                "backward and query over plain backward",
                "all over plain forward and backward",
            )
        ]
        ms = row["milliseconds"]
        print(
            f"| {name} | {ratios[0]:.2f} | {ratios[1]:.2f} | {ratios[2]:.2f} | {ms['eachgrad']:.0f} | {ms['vmap']:.0f} "
            f"| {ms['plain']:.0f} |",
            flush=True,
        )
    sizes = {"samples": options.samples, "dim": options.dim}
    write(options.out, about(**sizes, apart=apart, results=results))


if __name__ == "__main__":
    main()
