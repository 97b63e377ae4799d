"""Model by model: eachgrad and the other ways to a gradient per sample, each right, refused or wrong.

`python benchmarks/coverage.py --write` runs every contender on every model of zoo.py, writes results/coverage.json and
the table of docs/coverage.md. Every cell runs in a process of its own with a time limit, so that one that crashes
or hangs stops no other; the processes are forked, which needs Linux or macOS.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import fnmatch
import importlib.metadata
import importlib.util
import itertools
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import platform
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from contenders import Grads, _for_opacus, _joined, norms
from torch import Tensor, nn
from zoo import BATCH_NORM, ROOT, Batch, Row, missing, rows

import eachgrad
from oracle import SHARE, error, loop

PAGE, RESULTS = ROOT / "docs" / "coverage.md", Path(__file__).parent / "results" / "coverage.json"
BEGIN, END = "<!-- model by model: begin -->", "<!-- model by model: end -->"
RIGHT, LOOP, REFUSED, OTHER, WARNED = "right", "right (loop)", "refused", "other model", "warned"
ORDER, WRONG, NOT_JUDGED = "WRONG (order)", "WRONG", "-"
PEERS = {torch.float64: 1e-6, torch.float32: 1e-4}  # relative error allowed to the others
LIMIT = 60.0  # seconds for a cell
CAVEAT = "may not be meaningful"  # BackPACK's warning of batch norm in training


class Unanswered(Exception):
    """There is no per-sample gradient where there should be one, or not one for each sample."""


class OtherModel(Exception):
    """The layers that a contender puts in the place of torch's compute something else."""


# A contender's answer: gradients {name: (B, *shape)}, None where it has none, or norms (B,).
Answer = dict[str, "Tensor | None"]
Ask = Callable[[Row, nn.Module, Batch, int], "Answer | Tensor"]


@dataclass(frozen=True)
class Way:
    """One way to call a contender; the first that is right counts, else the first."""

    call: str  # in words, for the JSON
    ask: Ask
    dtype: torch.dtype = torch.float64


@dataclass(frozen=True)
class Contender:
    name: str
    ways: tuple[Way, ...]
    package: str = "torch"


@dataclass(frozen=True)
class Cell:
    """What came of a contender on a model."""

    model: str
    group: str
    contender: str
    verdict: str
    call: str = ""
    error: float | None = None  # relative, the largest over parameters
    message: str = ""  # the first line of the error, or the parameter that is most wrong


# eachgrad


def by_eachgrad(fallback: str) -> Ask:
    def ask(row: Row, model: nn.Module, batch: Batch, B: int) -> Answer:
        with eachgrad.record(model, batch_size=row.batch_size, batch_dim=row.batch_dim, fallback=fallback) as tape:
            losses = row.losses(model, *batch)
        return dict(tape.backward(losses).dense())

    return ask


# The others


def kept(model: nn.Module, attribute: str) -> Answer:
    """What a contender left on the parameters; several pieces are joined as Opacus' optimizer joins them."""
    found: Answer = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if p.requires_grad:
            value = getattr(p, attribute, None)
            found[name] = torch.cat(value) if isinstance(value, list) else value
    return found


def opacus_model(model: nn.Module) -> nn.Module:
    """The model with Opacus' own recurrent layers and attention; batch norm has none that computes the same."""
    from opacus.validators import ModuleValidator, module_validator

    kinds = {type(module) for module in model.modules()}
    if any(issubclass(kind, BATCH_NORM) for kind in kinds):
        ModuleValidator.validate(model, strict=True)
    if nn.RNN not in kinds and ModuleValidator.is_valid(model):
        return model
    torch.set_default_dtype(torch.float64)
    # It copies by pickling, which the tests' models cannot, their forward being a function inside another.
    with (
        mock.patch.object(module_validator, "clone_module", copy.deepcopy),
        mock.patch.dict(ModuleValidator.FIXERS, {nn.RNN: opacus_rnn}),
    ):
        return _for_opacus(model)


def opacus_rnn(module: nn.RNN) -> nn.Module:
    """Opacus has a replacement for RNN, and leaves it to its user to put it in."""
    from opacus.layers import DPRNN

    names = (
        "input_size",
        "hidden_size",
        "num_layers",
        "nonlinearity",
        "bias",
        "batch_first",
        "dropout",
        "bidirectional",
    )
    found = DPRNN(**{name: getattr(module, name) for name in names})
    found.load_state_dict(module.state_dict())
    return found


def opacus_ready(row: Row, model: nn.Module, batch: Batch) -> nn.Module:
    """The model as Opacus asks for it, if that has the same losses."""
    ready = opacus_model(model)
    if ready is not model:
        was, now = (row.losses(copy.deepcopy(m), *batch).detach() for m in (model, ready))
        if error(now, was) > PEERS[torch.float64]:
            raise OtherModel(f"with Opacus' layers the losses are {now.tolist()}, not {was.tolist()}")
    return ready


def opacus_hooks(flip: bool) -> Ask:
    def ask(row: Row, model: nn.Module, batch: Batch, B: int) -> Answer:
        from opacus.grad_sample import GradSampleModule

        batch_first = (row.batch_dim == 0) != flip
        wrapped = GradSampleModule(opacus_ready(row, model, batch), batch_first=batch_first, loss_reduction="sum")
        row.losses(wrapped, *batch).sum().backward()
        found = {name.removeprefix("_module."): g for name, g in kept(wrapped, "grad_sample").items()}
        if any(".qlinear." in f".{name}" for name in found):
            present: Grads = {name: g for name, g in found.items() if g is not None}
            return {name.removeprefix("."): g for name, g in _joined(present, 1).items()}
        return found

    return ask


def opacus_ghost(flip: bool) -> Ask:
    def ask(row: Row, model: nn.Module, batch: Batch, B: int) -> Tensor:
        from opacus.grad_sample import GradSampleModuleFastGradientClipping

        batch_first = (row.batch_dim == 0) != flip
        wrapped = GradSampleModuleFastGradientClipping(
            opacus_ready(row, model, batch), batch_first=batch_first, loss_reduction="sum", use_ghost_clipping=True
        )
        row.losses(wrapped, *batch).sum().backward()
        return wrapped.get_norm_sample()

    return ask


def by_backpack(use_converter: bool) -> Ask:
    def ask(row: Row, model: nn.Module, batch: Batch, B: int) -> Answer:
        from backpack import backpack, extend
        from backpack.extensions import BatchGrad

        extended = extend(model, use_converter=use_converter)
        with backpack(BatchGrad()):
            row.losses(extended, *batch).sum().backward()
        return kept(model, "grad_batch")

    return ask


class Called(nn.Module):
    """A model whose calls go through PyTorch's call_for_per_sample_grads; the rest of it is as it was."""

    def __init__(self, model: nn.Module, **options: Any):
        super().__init__()
        self.model, self.options = model, options

    def forward(self, *inputs: Any, **named: Any) -> Any:
        from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

        return call_for_per_sample_grads(self.model, **self.options)(*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.model, name)


def expanded_weights(flip: bool) -> Ask:
    def ask(row: Row, model: nn.Module, batch: Batch, B: int) -> Answer:
        batch_first = (row.batch_dim == 0) != flip
        called = Called(model, batch_size=B, loss_reduction="sum", batch_first=batch_first)
        row.losses(called, *batch).sum().backward()
        return kept(model, "grad_sample")

    return ask


class Losses(nn.Module):
    """The losses as a module, so that functional_call can exchange every parameter they use."""

    def __init__(self, row: Row, model: nn.Module):
        super().__init__()
        self.row, self.model = row, model

    def forward(self, *batch: Tensor) -> Tensor:
        return self.row.losses(self.model, *batch)


def by_vmap(row: Row, model: nn.Module, batch: Batch, B: int) -> Answer:
    samples = row.samples(batch)
    dims = [sample_dim(whole, [sample[k] for sample in samples]) for k, whole in enumerate(batch)]
    named = {f"model.{name}": p.detach() for name, p in model.named_parameters() if p.requires_grad}
    losses = Losses(row, model)

    def one_loss(parameters: Grads, *sample: Tensor) -> Tensor:
        single = (t if dim is None else t.unsqueeze(dim) for t, dim in zip(sample, dims, strict=True))
        return torch.func.functional_call(losses, parameters, tuple(single)).sum()

    per_sample = torch.func.vmap(torch.func.grad(one_loss), (None, *dims), randomness="different")
    return {name.removeprefix("model."): g for name, g in per_sample(named, *(t.detach() for t in batch)).items()}


def sample_dim(whole: Tensor, pieces: list[Tensor]) -> int | None:
    """The dimension of a batch tensor that counts the samples; None for one that is the same for all."""
    if all(piece.shape == whole.shape and torch.equal(piece, whole) for piece in pieces):
        return None
    for dim in range(whole.ndim):
        if whole.shape[dim] == len(pieces) and all(piece.ndim == whole.ndim for piece in pieces):
            joined = torch.cat(pieces, dim) if all(piece.shape[dim] == 1 for piece in pieces) else None
            if joined is not None and joined.shape == whole.shape and torch.equal(joined, whole):
                return dim
    raise Unanswered("the samples are no dimension of the inputs, which vmap needs")


def both(ask: Callable[[bool], Ask]) -> tuple[Way, ...]:
    """batch_first as the model's inputs have it, then the other, which may be what the layers inside see."""
    return (
        Way("batch_first as the model's inputs", ask(False)),
        Way("batch_first the other way round", ask(True)),
    )


CONTENDERS = [
    Contender("eachgrad", (Way("record(model)", by_eachgrad("refuse")),)),
    Contender("eachgrad, loop", (Way('record(model, fallback="loop")', by_eachgrad("loop")),)),
    Contender("Opacus hooks", both(opacus_hooks), "opacus"),
    Contender("Opacus ghost", both(opacus_ghost), "opacus"),
    Contender(
        "BackPACK",
        (
            Way("extend(model)", by_backpack(False)),
            Way("extend(model, use_converter=True)", by_backpack(True)),
            Way("extend(model), in float32", by_backpack(False), torch.float32),
        ),
        "backpack-for-pytorch",
    ),
    Contender("ExpandedWeights", both(expanded_weights)),
    Contender("vmap", (Way("vmap(grad(functional_call))", by_vmap),)),
]
OURS = ("eachgrad", "eachgrad, loop")
COLUMNS = [c.name for c in CONTENDERS if c.name != "eachgrad, loop"]


# The verdict


def judged(answer: Answer | Tensor, want: Grads, B: int) -> tuple[float, str]:
    """(the largest relative error, the parameter that has it); Unanswered where something is missing.

    A missing gradient or one of another shape is no silent error: it is counted as a refusal. Where the true gradient
    is zero none is needed.
    """
    if isinstance(answer, Tensor):
        if answer.shape != (B,):
            raise Unanswered(f"norms of shape {tuple(answer.shape)} for {B} samples")
        return error(answer, norms(want)), "norms"
    floor = SHARE * max(float(g.abs().max()) for g in want.values() if g.numel())
    worst = (0.0, "")
    for name, g in want.items():
        got = answer.get(name)
        if got is None:
            if g.any():
                raise Unanswered(f"no gradient for {name}")
        elif got.shape != g.shape:
            raise Unanswered(f"the gradients of {name} are {tuple(got.shape)}, not {tuple(g.shape)}")
        else:
            worst = max(worst, (error(got, g, floor), name))
    return worst


def reordered(answer: Answer | Tensor, want: Grads, B: int, tolerance: float) -> bool:
    """Whether the gradients are those of the samples in another order, the same for all parameters."""

    def of(order: tuple[int, ...]) -> Answer | Tensor:
        index = torch.tensor(order)
        if isinstance(answer, Tensor):
            return answer[index]
        return {name: None if g is None else g[index] for name, g in answer.items()}

    return any(judged(of(order), want, B)[0] <= tolerance for order in itertools.permutations(range(B)))


def cast(model: nn.Module, batch: Batch, dtype: torch.dtype) -> tuple[nn.Module, Batch]:
    def to(t: Tensor) -> Tensor:
        return t.to(dtype) if t.dtype == torch.float64 else t

    return (model, batch) if dtype == torch.float64 else (model._apply(to), tuple(to(t) for t in batch))


def tried(row: Row, contender: Contender, way: Way) -> Cell:
    """One contender on one model, called in one way."""
    cell = (row.name, row.group, contender.name)
    want: Grads = {}
    if not row.mixes:
        model, batch = row.build()
        want = loop(model, row.losses, row.samples(batch))
    model, batch = cast(*row.build(), way.dtype)
    B = len(row.samples(batch))
    # Where a model computes in float32 inside, so do all.
    tolerance = row.tolerance if contender.name in OURS else max(PEERS[way.dtype], 10 * row.tolerance)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            answer = way.ask(row, model, batch, B)
            if row.mixes:
                _complete(answer, B)
                size, name = math.inf, "numbers for samples that have no gradient of their own"
            else:
                size, name = judged(answer, want, B)
        except Exception as refusal:
            first = _without_folders(next(iter(str(refusal).strip().splitlines()), ""))
            verdict = OTHER if isinstance(refusal, OtherModel) else REFUSED
            return Cell(*cell, verdict, way.call, None, f"{type(refusal).__name__}: {first}"[:300])
    if size <= tolerance:
        return Cell(*cell, RIGHT, way.call, size)
    caveats = [str(w.message) for w in said if CAVEAT in str(w.message)]
    if caveats:
        return Cell(*cell, WARNED, way.call, None, caveats[0][:300])
    verdict = ORDER if not row.mixes and reordered(answer, want, B, tolerance) else WRONG
    return Cell(*cell, verdict, way.call, size if math.isfinite(size) else None, name)


def _without_folders(message: str) -> str:
    """The message with files named from the repository, or from the library they are in."""
    return re.sub(r"[^\s'\"]*site-packages/", "", message).replace(f"{ROOT}/", "")


def _complete(answer: Answer | Tensor, B: int) -> None:
    missing = [n for n, g in answer.items() if g is None or len(g) != B] if isinstance(answer, dict) else []
    if missing:
        raise Unanswered(f"no gradient for {missing[0]}")


def run(row: Row, contender: Contender) -> Cell:
    """The best of the contender's ways; for samples that are mixed, refusing in every one."""
    if row.mixes and contender.name == "vmap":
        return Cell(row.name, row.group, contender.name, NOT_JUDGED, "", None, "it calls the model with one sample")
    cells = [tried(row, contender, contender.ways[0])]
    for way in contender.ways[1:]:
        if row.mixes or cells[-1].verdict == RIGHT:
            break
        cells.append(tried(row, contender, way))
    return next((cell for cell in cells if cell.verdict == RIGHT), cells[0])


# Processes


def work(row: Row, contender: Contender, pipe: multiprocessing.connection.Connection) -> None:
    """Runs in a process of its own, in silence."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pipe.send(run(row, contender))


def cells(tasks: list[tuple[Row, Contender]], jobs: int, limit: float) -> list[Cell]:
    """All cells, `jobs` at a time, in the order of the tasks."""
    context = multiprocessing.get_context("fork")
    found: dict[int, Cell] = {}
    running: dict[int, tuple[Any, Any, float]] = {}
    waiting = list(enumerate(tasks))[::-1]
    while waiting or running:
        while waiting and len(running) < jobs:
            k, task = waiting.pop()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(*task, theirs), daemon=True)
            process.start()
            theirs.close()
            running[k] = (process, ours, time.monotonic() + limit)
        multiprocessing.connection.wait([pipe for _, pipe, _ in running.values()], timeout=0.5)
        for k, (process, pipe, until) in list(running.items()):
            late = time.monotonic() > until
            if not (late or pipe.poll() or not process.is_alive()):
                continue
            row, contender = tasks[k]
            try:
                found[k] = pipe.recv() if pipe.poll() else _lost(row, contender, f"no answer in {limit:.0f} s")
            except EOFError:
                found[k] = _lost(row, contender, "the process died")
            process.kill()
            process.join()
            pipe.close()
            del running[k]
            _progress(len(found), len(tasks), found[k])
    return [found[k] for k in sorted(found)]


def _lost(row: Row, contender: Contender, message: str) -> Cell:
    return Cell(row.name, row.group, contender.name, REFUSED, "", None, message)


def _progress(done: int, total: int, cell: Cell) -> None:
    line = f"{done}/{total} {cell.contender}, {cell.model}: {cell.verdict}"
    if sys.stderr.isatty():
        print(f"\r{line[:110]:<110}", end="\n" if done == total else "", file=sys.stderr, flush=True)
    elif done % 50 == 0 or done == total:
        print(line, file=sys.stderr, flush=True)


# The table


def shown(found: dict[tuple[str, str], Cell], model: str, column: str) -> str:
    """The word of a table's cell."""
    cell = found.get((model, column))
    if cell is None:
        return NOT_JUDGED
    again = found.get((model, "eachgrad, loop"))
    if column == "eachgrad" and cell.verdict == REFUSED and again is not None and again.verdict == RIGHT:
        return LOOP
    return cell.verdict


WORDS = (RIGHT, LOOP, REFUSED, OTHER, WARNED, ORDER, WRONG)


def totals(title: str, models: list[str], found: dict[tuple[str, str], Cell]) -> list[str]:
    """A line for each word that occurs, with its count in each column."""
    counts = {column: Counter(shown(found, model, column) for model in models) for column in COLUMNS}
    lines = [f"| {title} | {' | '.join(COLUMNS)} |", _rule()]
    for word in WORDS:
        if any(count[word] for count in counts.values()):
            numbers = [NOT_JUDGED if count[NOT_JUDGED] else str(count[word]) for count in counts.values()]
            lines.append(f"| {word} | {' | '.join(numbers)} |")
    return lines


def _rule() -> str:
    return "|---" * (len(COLUMNS) + 1) + "|"


def table(report: dict[str, Any]) -> str:
    found = {(c["model"], c["contender"]): Cell(**c) for c in report["cells"]}
    groups = {cell.model: cell.group for cell in found.values()}
    mixing = [model for model in groups if model in report["mixing"]]
    plain = [model for model in groups if model not in mixing]
    lines = [_sentences(report), "", *totals(f"{len(plain)} models", plain, found)]
    lines += ["", *totals(f"{len(mixing)} models that mix samples, where refused is right", mixing, found)]
    for group in dict.fromkeys(groups.values()):
        lines += ["", f"| {group} | {' | '.join(COLUMNS)} |", _rule()]
        for model in (m for m, g in groups.items() if g == group):
            words = [shown(found, model, column) for column in COLUMNS]
            lines.append(f"| {model} | {' | '.join(f'**{w}**' if w.startswith(WRONG) else w for w in words)} |")
    return "\n".join(lines)


def _sentences(report: dict[str, Any]) -> str:
    v = report["versions"]
    peers = f"Opacus {v['opacus']}, BackPACK {v['backpack-for-pytorch']}"
    return f"""\
Written by `python benchmarks/coverage.py --write` on {report["date"]}, {report["device"]}, with torch {v["torch"]}, {peers},
transformers {v["transformers"]}. The models are tiny, in float64 and training mode, with dropout off and
batch norm in eval; most are those of the tests.
`benchmarks/README.md` says how each library was called. `benchmarks/results/coverage.json` has every cell's error, or the
first line of its message.

| word | meaning |
|---|---|
| right | every gradient of every sample agrees with a loop over samples, to 1e-10 for eachgrad and 1e-6 for the others |
| right (loop) | refused by default, right with `record(model, fallback="loop")` |
| refused | an error, or a gradient that is missing or has another shape, which its user cannot overlook |
| other model | the library's replacement for a layer of torch computes other losses, so that nothing can be compared |
| warned | numbers, with a warning that they may mean nothing |
| WRONG (order) | the right gradients, but under other samples' places |
| WRONG | other numbers, and no word of it |
| - | not judged: vmap is given one sample at a time and never sees a batch that is mixed |

"Opacus ghost" gives norms, and is judged by them. Mamba computes in float32 inside: there 1e-6 and 1e-5 are asked for.
BackPACK's embedding takes only float32: there it is 1e-4."""


def write(report: dict[str, Any]) -> None:
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(report)}\n{END}{after}", encoding="utf-8")


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package).split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name} and the table of {PAGE.name}")
    parser.add_argument("--only", nargs="*", default=["*"], help="contenders, by pattern")
    parser.add_argument("--models", nargs="*", default=["*"], help="models, by pattern")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for a cell")
    args = parser.parse_args()

    chosen = [row for row in rows() if any(fnmatch.fnmatch(row.name, pattern) for pattern in args.models)]
    here = [c for c in CONTENDERS if version(c.package) and any(fnmatch.fnmatch(c.name, p) for p in args.only)]
    for absent in [c for c in CONTENDERS if not version(c.package)]:
        print(f"{absent.name} is left out: {absent.package} is not installed", file=sys.stderr)
    if absent := missing():
        print(f"left out: the families of {', '.join(absent)}, not installed", file=sys.stderr)
    if args.write and (args.only != ["*"] or args.models != ["*"] or len(here) < len(CONTENDERS) or absent):
        parser.error("--write takes every contender and every model")

    warnings.simplefilter("ignore")
    _import_all()
    began = time.monotonic()
    done = cells([(row, contender) for row in chosen for contender in here], args.jobs, args.limit)
    print(f"{len(done)} cells in {time.monotonic() - began:.0f} s", file=sys.stderr)
    packages = ("torch", "opacus", "backpack-for-pytorch", "transformers", "eachgrad")
    report = {
        "date": datetime.date.today().isoformat(),
        "device": f"CPU ({platform.machine()})",
        "versions": {name: version(name) for name in packages},
        "mixing": [row.name for row in chosen if row.mixes],
        "cells": [asdict(cell) for cell in done],
    }
    if args.write:
        RESULTS.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        write(report)
    else:
        print(table(report))
        for cell in done:
            if cell.verdict != RIGHT:
                print(f"{cell.contender}, {cell.model}: {cell.verdict} {cell.error or ''} {cell.message}")
    wrong = [cell.model for cell in done if cell.contender in OURS and cell.verdict.startswith(WRONG)]
    if wrong:
        sys.exit(f"eachgrad is wrong on {', '.join(wrong)}")


def _import_all() -> None:
    """Once, before the processes are forked."""
    for name in ("opacus.grad_sample", "opacus.validators", "backpack.extensions"):
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    for row in rows():
        if row.group.startswith("Hugging Face"):
            row.build()
            break


if __name__ == "__main__":
    main()
