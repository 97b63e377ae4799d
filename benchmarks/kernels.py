"""Our kernels on a GPU, each beside what torch does for the same numbers.

    python benchmarks/kernels.py [--only grams entropies many convolutions] [--rounds 20] [--json FILE.json] [--tiny]

Each way is a CUDA graph, so that the host does not count; every round runs each of them once, between two events, and a
figure is a median over rounds. Bytes are those that must be read and written at least, FLOPs those that must be spent (of a
Gram, one half); their shares are of what an H200 can do at best. `--tiny` runs the plain implementations on a CPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timing import about, seconds, write
from torch import Tensor
from torch.nn import functional as F

from eachgrad.blocks.arithmetic import products
from eachgrad.kernels import convolution, entropy, gram, many  # noqa: F401  (their ops)

ops = torch.ops.eachgrad

BYTES, FLOPS = 4.8e12, 990e12  # a second: of an H200's memory, and of its tensor cores in sixteen bits
WARM = 0.5  # seconds of work before the first figure: the clock is low until then
DTYPE = torch.bfloat16
# Outputs and inputs of a block of ViT-B/16 or GPT-2 small, in the order of the backward.
LAYERS = {"down": (768, 3072), "up": (3072, 768), "output": (768, 768), "inputs": (2304, 768)}

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One task, and the ways to do it: ours first, torch's last."""

    name: str
    ways: dict[str, Call]
    bytes: float
    flops: float = 0.0


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device=device(), dtype=DTYPE)


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def compiled(function: Callable[..., Any], tiny: bool) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False, backend="aot_eager" if tiny else "inductor")


def grams(tiny: bool) -> Iterator[Case]:
    """The norms of ViT-B/16's 48 layers, layer by layer and all of them."""
    T, blocks = (17, 2) if tiny else (197, 12)

    @torch.no_grad()
    def added(S: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
        product = S * R
        return product.sum((1, 2)), product.abs().sum((1, 2))

    added = compiled(added, tiny)

    def case(name: str, pairs: list[tuple[Tensor, Tensor]]) -> Case:
        several = [[*zip(*pairs[k : k + gram.MOST], strict=True)] for k in range(0, len(pairs), gram.MOST)]
        ways: dict[str, Call] = {
            "of many": lambda: [ops.gram_norms_of_many(lefts, rights) for lefts, rights in several],
            "one by one": lambda: [ops.gram_norms(left, right) for left, right in pairs],
            "two products": lambda: [added(products(a, a.mT), products(b, b.mT)) for a, b in pairs],
        }
        size = sum(t.numel() for pair in pairs for t in pair)
        return Case(name, ways, size * DTYPE.itemsize, size * (T + 1))

    for B in (2,) if tiny else (64, 72):
        widths = {name: tuple(n // 32 for n in pair) if tiny else pair for name, pair in LAYERS.items()}
        layers = [{name: (randn(B, T, p), randn(B, T, d)) for name, (p, d) in widths.items()} for _ in range(blocks)]
        for name, (p, d) in widths.items():
            yield case(f"grams B={B} {blocks} x ({p}, {d})", [layer[name] for layer in layers])
        yield case(f"grams B={B} all {4 * blocks}", [pair for layer in layers for pair in layer.values()])


def entropies(tiny: bool) -> Iterator[Case]:
    """The cross entropy of GPT-2's logits, its gradient written over them; torch's is of logits that stay."""
    rows, classes = (16, 257) if tiny else (16384, 50257)
    whole, target = randn(rows, classes + -classes % 8), torch.randint(classes, (rows,), device=device())
    logits, g, plain = whole[:, :classes], torch.ones(rows, device=device()), randn(rows, classes)
    loss = compiled(lambda logits: F.cross_entropy(logits.float(), target, reduction="none"), tiny)
    wanted, size = plain.clone().requires_grad_(), plain.nbytes

    def both() -> None:
        sums = ops.entropies(logits, target, -100)
        ops.entropy_gradient_(whole, sums, g, target, -100, classes)

    ways: dict[str, Call] = {"kernel": lambda: ops.entropies(logits, target, -100), "compiled": lambda: loss(plain)}
    yield Case(f"entropies {rows} x {classes}", ways, size)
    ways = {"kernels": both, "compiled": lambda: torch.autograd.grad(loss(wanted), wanted, g)}
    yield Case(f"entropies and gradient {rows} x {classes}", ways, 3 * size)


def gradients(tiny: bool) -> Iterator[Case]:
    """The norms and the weighted sums of gradients of GPT-2's 50 matrices for 16 samples."""
    B, blocks, scale = (2, 1, 32) if tiny else (16, 12, 1)
    shapes = [(50257, 768), (1024, 768), *list(LAYERS.values()) * blocks]
    values, c = [randn(B, p // scale, d // scale) for p, d in shapes], torch.rand(B, device=device())

    def norms() -> list[Tensor]:
        return [torch.linalg.vector_norm(value.flatten(1), dim=1, dtype=torch.float32) for value in values]

    def sums() -> list[Tensor]:
        return [c.to(DTYPE) @ value.flatten(1) for value in values]

    size, numbers = sum(value.nbytes for value in values), sum(value[0].numel() for value in values)
    yield Case(f"squares_of_many B={B}", {"kernel": lambda: many.squares_of_many(values), "norms": norms}, size)
    ways: dict[str, Call] = {"kernel": lambda: many.weighted_of_many(c, values), "products": sums}
    yield Case(f"weighted_of_many B={B}", ways, size + 4 * numbers)


def convolutions(tiny: bool) -> Iterator[Case]:
    """The 3 x 3 convolutions of stride 1 of ResNet-18 on 32 x 32 pixels: norms beside unfolded inputs, sums beside cuDNN."""
    B, shapes = (2, [(8, 4)]) if tiny else (512, [(64, 32), (128, 16), (256, 8), (512, 4)])
    window = ([3, 3], [1, 1], [1, 1], [1, 1])
    for n, side in shapes:
        x, g = (randn(B, n, side, side).contiguous(memory_format=torch.channels_last) for _ in range(2))
        weight = randn(n, n, 3, 3).contiguous(memory_format=torch.channels_last)
        flops, size = 2 * 9 * n * g.numel(), x.nbytes + g.nbytes
        ways: dict[str, Call] = {
            "kernel": lambda x=x, g=g: convolution.conv_squares(x, g, *window),
            "unfolded": lambda x=x, g=g: products(g.flatten(2), F.unfold(x, 3, padding=1).mT).square().sum((1, 2)),
        }
        yield Case(f"conv_squares B={B} {n} at {side} x {side}", ways, size, flops)
        ways = {
            "kernel": lambda x=x, g=g: convolution.conv_sum(x, g, *window),
            "cuDNN": lambda x=x, g=g, weight=weight: torch.ops.aten.convolution_backward(
                g, x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False]
            ),
        }
        yield Case(f"conv_sum B={B} {n} at {side} x {side}", ways, size + 4 * 9 * n * n, flops)


KERNELS = {"grams": grams, "entropies": entropies, "many": gradients, "convolutions": convolutions}


def captured(call: Call) -> Call:
    """The call as a CUDA graph; on a CPU the call."""
    if device() == "cpu":
        return call
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph.replay


def milliseconds(ways: dict[str, Call], rounds: int) -> dict[str, float]:
    """The median time of each way."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    calls = {name: captured(call) for name, call in ways.items()}
    for k in range(rounds + 3):
        for name, call in calls.items():
            took = 1e3 * seconds(call) if device() == "cpu" else on_device(call)
            if k >= 3:  # after some that do not count
                found[name].append(took)
    return {name: statistics.median(times) for name, times in found.items()}


def on_device(call: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def warm_up() -> None:
    end, matrix = time.perf_counter() + WARM, randn(4096, 4096)
    while time.perf_counter() < end:
        _ = matrix @ matrix
        torch.cuda.synchronize()


def measured(case: Case, rounds: int) -> dict[str, Any]:
    """The times of a case, and its shares of the device by the first way; prints them."""
    times = milliseconds(case.ways, rounds)
    ours = 1e-3 * next(iter(times.values()))
    memory, cores = case.bytes / ours / BYTES, case.flops / ours / FLOPS
    text = ", ".join(f"{name} {took:.3f}" for name, took in times.items())
    spent = f", {case.flops / 1e9:.1f} GFLOP {cores:.0%}" if case.flops else ""
    print(f"{case.name:40s} {text} ms | {case.bytes / 1e9:.2f} GB {memory:.0%} of memory{spent}", flush=True)
    shares = {"share_of_memory": memory, "share_of_cores": cores}
    return {"milliseconds": times, "bytes": case.bytes, "flops": case.flops, **shares}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(KERNELS), choices=list(KERNELS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if not (options.tiny or torch.cuda.is_available()):
        parser.error("there is no GPU; --tiny is a smoke test without one")
    torch.manual_seed(0)
    if torch.cuda.is_available():
        warm_up()
    results = {}
    for kernel in options.only:
        for case in KERNELS[kernel](options.tiny):
            results[case.name] = measured(case, options.rounds)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    write(options.json, about(results=results, gpu=name))


if __name__ == "__main__":
    main()
