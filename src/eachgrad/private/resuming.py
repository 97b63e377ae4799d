"""A run's state, in memory and in files."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eachgrad.private import checkpoint
from eachgrad.private.accounting import from_plain, to_plain
from eachgrad.private.checkpoint import Journal, journal_of, read_journal
from eachgrad.private.errors import PrivacyError

if TYPE_CHECKING:
    from eachgrad.private.run import Run

FORMAT = 1


def state_of(run: Run) -> dict[str, Any]:
    """The run as tensors and plain values."""
    generators = {"noise": run.source.state(), "sampling": run.generators}
    return {**_plain(run), "generators": generators}


def _plain(run: Run) -> dict[str, Any]:
    """The run as plain values alone."""
    return {
        "format": FORMAT,
        "run": run.id,
        "by": run.token,
        "settings": asdict(run.settings),
        "before": to_plain(run.before),
        "history": to_plain(run.own),
        "lost": run.lost,
        "clipping": type(run.rule.kind).__name__,
        "bounds": run.rule.bounds,
        "totals": run.totals(),
    }


def restore(run: Run, state: dict[str, Any]) -> None:
    """Bring the run to a state; what either has spent stays spent."""
    check(run, state)
    own = from_plain(state["history"])
    if (
        run.id != state["run"] or sum(some.steps for some in own) > run.spent
    ):  # otherwise it is known that more was spent
        run.before, run.own, run.lost = from_plain(state["before"]), own, state["lost"]
        run.set_totals(state["totals"])
    run.id, run.rule.bounds = state["run"], state["bounds"]
    run.settings = replace(run.settings, noise_multiplier=state["settings"]["noise_multiplier"])
    generators = state.get("generators")
    if generators is not None:
        run.source.restore(generators["noise"])
        run.loader.sampler.source.restore(generators["sampling"])
        run.generators = generators["sampling"]
    run.begin_pass()
    run.loader.forget()
    run.count(0)


def check(run: Run, state: Any) -> None:
    """Raise if the state is none of this run's."""
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise PrivacyError(
            "this is no state of a private run: load what run.state_dict() gave, or run.load a saved file"
        )
    _check_settings(run, state)
    if run.taken and state["by"] != run.token:
        raise PrivacyError(
            f"this run has taken {run.taken} steps of its own, which loading another run's state would forget: load into a "
            "new run, before its first step"
        )
    if run.before and run.before != from_plain(state["before"]):
        raise PrivacyError("the history given to make_private is not the one of the saved run: pass the same, or none")
    if run.source.state() is not None and "generators" in state and state["generators"]["noise"] is None:
        raise ValueError(
            "this run has a fixed generator and the saved one had none: pass generator=... to both, or to neither"
        )


def _check_settings(run: Run, state: dict[str, Any]) -> None:
    saved = {**state["settings"], "clipping": state["clipping"], "max_norm": state["bounds"]}
    mine = {**asdict(run.settings), "clipping": type(run.rule.kind).__name__, "max_norm": run.rule.bounds}
    other = {name for name in mine if saved[name] != mine[name]}
    if "n" in other:
        raise PrivacyError(
            f"the state is of a run over {saved['n']} samples, and this data set has {mine['n']}: the rate at which samples "
            "were drawn is another one. Load it with the same data set"
        )
    if math.isclose(saved["noise_multiplier"], mine["noise_multiplier"], rel_tol=1e-3):
        other.discard("noise_multiplier")  # a target gives the same again, but for the last digits of another machine
    if run.rule.adaptive is not None:
        other.discard("max_norm")  # it moves, and goes on from where it was
    for name in (name for name in mine if name in other):
        raise PrivacyError(
            f"the state is of a run with {name}={saved[name]}, and this one has {name}={mine[name]}: make the run as it was. "
            "To go on with other settings, pass history=run.history of the old run to make_private, which counts both"
        )


def save(run: Run, path: str | Path | None) -> None:
    """Write everything to one file, whole or not at all, and begin the journal anew."""
    target = _target(run, path)
    if run.journal is not None and not run.journal.is_open:
        raise PrivacyError(
            f"the run was closed, and another one may have gone on from {run.path} since, whose steps a save would forget: "
            "save before close(), or load the file into a new run"
        )
    if run.journal is not None:
        _check_free(run, target)
    else:  # before the file: from now on every step is counted, whatever happens
        _take(run, target)
    assert run.journal is not None
    parts = {
        "run": state_of(run),
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "journal": os.path.relpath(run.journal.path, target.parent),
    }
    if run.scheduler is not None:
        parts["scheduler"] = run.scheduler.state_dict()
    checkpoint.save(target, parts)
    run.path = target
    run.journal.begin(_plain(run), run.spent)


def load(run: Run, path: str | Path | None, journal: bool) -> None:
    """Go on from a file and its journal, or from the journal alone if the run was killed before its first save."""
    target = _target(run, path)
    parts, log = _claimed(run, target)
    old = run.journal
    try:
        header, last = _read_journal(target, log, parts is None or journal)
        _go_on(run, parts, header, last, log.path)
        run.path, run.journal = target, log
        log.begin(_plain(run), run.spent)
    except BaseException:
        if log is not old:
            log.close()
        raise
    if old is not None and old is not log:
        old.close()


def _claimed(run: Run, target: Path) -> tuple[dict[str, Any] | None, Journal]:
    """What the file holds, None if it was not saved yet, and its journal: from here on no other run writes either."""
    before = _stamp(target)
    parts = checkpoint.load(target) if before else None
    log = target.parent / parts["journal"] if parts is not None else journal_of(target)
    if run.journal is not None and run.journal.is_open and run.journal.path == log:
        return parts, run.journal
    journal = Journal(log)
    if _stamp(target) == before:
        return parts, journal
    journal.close()  # the run that had it has saved once more before it ended
    return _claimed(run, target)


def _stamp(target: Path) -> tuple[int, int] | None:
    """What changes with every save."""
    if not target.exists():
        return None
    found = target.stat()
    return found.st_ino, found.st_mtime_ns


def _go_on(run: Run, parts: dict[str, Any] | None, header: dict[str, Any] | None, last: int, log: Path) -> None:
    """Bring the run to what was saved, and count the steps up to `last`."""
    state = parts["run"] if parts is not None else header
    assert state is not None
    if header is not None and header["run"] != state["run"]:
        raise PrivacyError(f"{log} is the journal of another run than the file: bring the two that belong together")
    check(run, state)
    if parts is not None:
        run.model.load_state_dict(parts["model"])
        run.optimizer.load_state_dict(parts["optimizer"])
        if run.scheduler is not None and "scheduler" in parts:
            run.scheduler.load_state_dict(parts["scheduler"])
    restore(run, state)
    missing = max(0, last - run.spent)
    run.lost += missing
    if run.settings.sampling == "shuffled":  # where passes began among them is lost as well: a pass for each
        run.own = (*run.own, *[run.settings.spent(1)] * missing, run.settings.spent(0))
        missing = 0
    run.count(missing)


def begin(run: Run, path: str | Path, resume: bool) -> None:
    """Take a file for the run: a new one, or, to resume, one that a run has left."""
    target = Path(path).absolute()
    if resume and (target.exists() or _has_begun(journal_of(target))):
        load(run, target, journal=True)
        return
    _take(run, target)
    run.path = target


def _take(run: Run, target: Path) -> None:
    """Begin a journal beside a file that is no other run's."""
    journal = Journal(journal_of(target))
    try:
        _check_free(run, target)
        journal.begin(_plain(run), run.spent)
    except BaseException:
        journal.close()
        raise
    run.journal = journal


def _target(run: Run, path: str | Path | None) -> Path:
    if path is not None:
        return Path(path).absolute()
    if run.path is None:
        raise ValueError("no file is named: pass a path, or checkpoint=... to make_private")
    return run.path


def _read_journal(target: Path, log: Journal, needed: bool) -> tuple[dict[str, Any] | None, int]:
    if not log.is_new:
        return read_journal(log.path)
    if not target.exists():
        raise FileNotFoundError(f"{target} does not exist, and has no journal: nothing was saved there")
    if needed:
        raise PrivacyError(
            f"{target} has no journal, {log.path.name}, so that steps after it was saved would go uncounted: bring it "
            "along, or pass journal=False if you know that there were none"
        )
    return None, 0


def _has_begun(log: Path) -> bool:
    return log.exists() and log.stat().st_size > 0


def _check_free(run: Run, target: Path) -> None:
    """A file of another run is not written over, nor one that knows of more: what was spent would be forgotten."""
    log = journal_of(target)
    if _has_begun(log) and not (run.journal is not None and run.journal.path == log):
        header, steps = read_journal(log)
        _check_count(run, target, header["run"], steps)
    if target.exists() and target != run.path:
        found = _count_in(target)
        if found is None:
            raise PrivacyError(f"{target} exists and is not of this run: load it with run.load, or choose another file")
        _check_count(run, target, *found)


def _check_count(run: Run, target: Path, owner: str, steps: int) -> None:
    if owner != run.id:
        raise PrivacyError(
            f"{target} is of another run, which has counted {steps} steps: load it with run.load, or resume=True; or choose "
            "another file"
        )
    if steps > run.spent:
        raise PrivacyError(
            f"{target} knows of {steps} steps of this run, and this one of {run.spent}: the others would be forgotten. Load "
            "it with run.load, or choose another file"
        )


def _count_in(target: Path) -> tuple[str, int] | None:
    """Whose file it is, and the steps that it knows of."""
    try:
        state = checkpoint.load(target)["run"]
        return state["run"], sum(some.steps for some in from_plain(state["history"]))
    except Exception:  # whatever it is, it is no file of a run
        return None
