"""How the cost of norms and clipped sums grows with the batch B and the length T, beside two forced routes.

    python benchmarks/scaling.py [--rounds 7] [--out benchmarks/results/scaling.json]

Three layers Linear(512, 512) on inputs (B, T, 512). The forced routes compute the same from the layers' factors, by
hand: "gram" from the (T, T) products of positions, "direct" from each sample's weight gradient. All times are of
forward, backward and answer, in milliseconds. Writes the numbers, and a plot beside them (.png).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from timing import WARM_UP, Call, about, interleaved, milliseconds, ratio, write
from torch import Tensor, nn

import eachgrad

D, LAYERS, MAX_NORM = 512, 3, 1.0
CHUNK = 1 << 23  # numbers of weight gradients at a time, as in eachgrad's direct route
FIXED_T, FIXED_B = 64, 16
SIZES_B, SIZES_T = [8, 16, 32, 64, 128, 256], [16, 32, 64, 128, 256, 512, 1024]

Factors = list[tuple[Tensor, Tensor]]  # inputs (B, T, d) and output gradients (B, T, p) of each layer


def stack() -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(D, D), nn.Tanh())))


def losses_of(out: Tensor) -> Tensor:
    return out.square().sum((1, 2))


def factors(model: nn.Sequential, x: Tensor) -> Factors:
    """By one backward that forms no weight gradient."""
    inputs, outputs, h = [], [], x
    for layer in model:
        if isinstance(layer, nn.Linear):
            inputs.append(h.detach())
            h = nn.functional.linear(h, layer.weight.detach(), layer.bias.detach())
            h = h if h.requires_grad else h.requires_grad_()
            outputs.append(h)
        else:
            h = layer(h)
    return list(zip(inputs, torch.autograd.grad(losses_of(h).sum(), outputs), strict=True))


def gram_norms(found: Factors) -> Tensor:
    # The 1 is the bias: an input that is always 1.
    return sum(((a @ a.mT + 1) * (g @ g.mT)).sum((1, 2)) for a, g in found).sqrt()  # type: ignore[union-attr]


def direct_norms(found: Factors) -> Tensor:
    step, squares = max(1, CHUNK // D**2), []
    for a, g in found:
        parts = zip(a.split(step), g.split(step), strict=True)
        weight = torch.cat([(gs.mT @ xs).flatten(1).norm(dim=1).square() for xs, gs in parts])
        squares.append(weight + g.sum(1).norm(dim=1).square())
    return sum(squares).sqrt()  # type: ignore[union-attr]


def clip_factors(norms: Tensor) -> Tensor:
    return (MAX_NORM / norms).clamp(max=1.0)


def gram_clipped(found: Factors) -> list[Tensor]:
    c = clip_factors(gram_norms(found))[:, None, None]
    scaled = [(a, g * c) for a, g in found]
    return [t for a, g in scaled for t in (g.flatten(0, 1).mT @ a.flatten(0, 1), g.sum((0, 1)))]


def direct_clipped(found: Factors) -> list[Tensor]:
    kept = [t for a, g in found for t in (g.mT @ a, g.sum(1))]
    c = clip_factors(torch.stack([t.flatten(1).norm(dim=1) for t in kept]).norm(dim=0))
    return [torch.tensordot(c, t, dims=1) for t in kept]


def calls(B: int, T: int) -> dict[str, Call]:
    """What is timed at one size; eachgrad has a model of its own for each answer."""
    torch.manual_seed(0)
    x, plain_model = torch.randn(B, T, D), stack()
    models = [stack() for _ in range(2)]
    for model in models:
        model.load_state_dict(plain_model.state_dict())

    def plain() -> None:
        plain_model.zero_grad()
        losses_of(plain_model(x)).sum().backward()

    def recorded(model: nn.Module) -> tuple[eachgrad.Tape, Tensor]:
        with eachgrad.record(model) as tape:
            losses = losses_of(model(x))
        return tape, losses

    def norms() -> Any:
        tape, losses = recorded(models[0])
        return tape.ask(losses, norms=eachgrad.norms()).norms

    def clipped() -> Any:
        tape, losses = recorded(models[1])
        return tape.ask(losses, grad=eachgrad.clipped_sum(MAX_NORM)).grad

    return {
        "plain": plain,
        "norms eachgrad": norms,
        "norms gram": lambda: gram_norms(factors(plain_model, x)),
        "norms direct": lambda: direct_norms(factors(plain_model, x)),
        "clipped sum eachgrad": clipped,
        "clipped sum gram": lambda: gram_clipped(factors(plain_model, x)),
        "clipped sum direct": lambda: direct_clipped(factors(plain_model, x)),
    }


def check(functions: dict[str, Call]) -> None:
    """The three ways give one answer."""
    for what in ("norms", "clipped sum"):
        answers = [functions[f"{what} {way}"]() for way in ("eachgrad", "gram", "direct")]
        ours, *others = [list(a.values()) if isinstance(a, dict) else a for a in answers]
        for other in others:
            torch.testing.assert_close(ours, other, rtol=1e-3, atol=1e-5)


def measure(B: int, T: int, rounds: int) -> dict[str, Any]:
    functions = calls(B, T)
    check(functions)
    for _ in range(WARM_UP - 1):
        for function in functions.values():
            function()
    times = interleaved(functions, rounds)
    row: dict[str, Any] = {"B": B, "T": T, "milliseconds": {name: milliseconds(t) for name, t in times.items()}}
    for what in ("norms", "clipped sum"):
        cheaper = min((times[f"{what} gram"], times[f"{what} direct"]), key=milliseconds)
        row[f"{what} over the cheaper route"] = ratio(times[f"{what} eachgrad"], cheaper)
    return row


def slope(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Of log(value) against log(size), least squares: 1 is linear growth."""
    x, y = [math.log(s) for s in sizes], [math.log(v) for v in values]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def plot(rows: dict[str, list[dict[str, Any]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(10, 8), sharey="row")
    titles = {"B": f"T = {FIXED_T}", "T": f"B = {FIXED_B}"}
    for across, (size, title) in enumerate(titles.items()):
        for down, what in enumerate(("norms", "clipped sum")):
            axis, xs = axes[down][across], [row[size] for row in rows[size]]
            for name, style in (
                ("plain", "k:"),
                (f"{what} gram", "C0--"),
                (f"{what} direct", "C1--"),
                (f"{what} eachgrad", "C2-o"),
            ):
                axis.loglog(xs, [row["milliseconds"][name] for row in rows[size]], style, label=name, base=2)
            axis.set(xlabel=size, ylabel="milliseconds", title=f"{what}, {title}")
            axis.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--B", type=int, nargs="*", default=SIZES_B)
    parser.add_argument("--T", type=int, nargs="*", default=SIZES_T)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "scaling.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sizes = {"B": [(B, FIXED_T) for B in options.B], "T": [(FIXED_B, T) for T in options.T]}
    rows: dict[str, list[dict[str, Any]]] = {}
    for across, points in sizes.items():
        rows[across] = []
        for B, T in points:
            row = measure(B, T, options.rounds)
            rows[across].append(row)
            ms = "  ".join(f"{name} {value:.1f}" for name, value in row["milliseconds"].items())
            over = "  ".join(
                f"{what} {row[f'{what} over the cheaper route']['ratio']:.2f}" for what in ("norms", "clipped sum")
            )
            print(f"B={B} T={T}: {ms}\n    over the cheaper route: {over}", flush=True)
    slopes = {
        name: slope(options.B, [row["milliseconds"][name] for row in rows["B"]])
        for name in ("plain", "norms eachgrad", "clipped sum eachgrad")
        if len(options.B) > 1
    }
    print("slope in B:", ", ".join(f"{name} {value:.2f}" for name, value in slopes.items()))
    write(options.out, about(layers=LAYERS, d=D, rounds=options.rounds, slope_in_B=slopes, results=rows))
    plot(rows, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
