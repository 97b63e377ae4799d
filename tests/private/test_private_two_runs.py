"""Several runs of one model, or of one file: none forgets what another has spent."""

from __future__ import annotations

import copy
import threading
from pathlib import Path

import pytest
from private_runs import WIDTH, by_hand, losses_of, make, network, parameters_of, train
from torch import nn

from eachgrad.private import PrivacyError, Run, Spent, checkpoint, resuming
from oracle import assert_same


def refused(words: str):
    return pytest.raises(PrivacyError, match=words)


def resumed(folder: Path, **options) -> Run:
    return make(checkpoint=folder / "run.pt", resume=True, **options)


def counted(folder: Path) -> int:
    """The steps that a new run of the file knows of."""
    run = resumed(folder)
    run.close()
    return run.spent


# One model


@pytest.mark.parametrize("go", [train, by_hand])
@pytest.mark.parametrize("history", ["none", "empty", "of the other"])
def test_two_runs_made_before_either_steps(go, history):
    first = make(steps=4)
    given = {"none": None, "empty": (), "of the other": first.history}[history]
    second = make(first.model, steps=4, history=given)
    train(first, 1)
    before = parameters_of(second)
    with refused("another private run of this model has counted steps that this one does not know of"):
        go(second)
    assert second.spent == 0
    assert_same(parameters_of(second), before, 0.0)  # nothing was stepped
    assert all(p.grad is None for p in second.model.parameters())
    train(first)
    assert first.history == (Spent(0.2, 1.0, 4),)
    third = train(make(first.model, history=first.history))
    assert third.history == (Spent(0.2, 1.0, 4), Spent(0.2, 1.0, 10))


def test_a_run_that_another_has_followed():
    first = train(make(), 2)
    train(make(first.model, history=first.history), 1)
    with refused("another private run of this model"):
        train(first, 1)
    assert first.spent == 2


def test_steps_of_another_run_between_a_batch_and_its_gradient():
    first = make(nn.Linear(WIDTH, 2), batch_size=60)  # its backward reads no parameter that the other has stepped
    second = make(first.model)
    x, y = next(iter(next(iter(first.loader))))
    with first.record():
        losses = losses_of(first.model(x), y)
    train(second, 1)
    with refused("another private run of this model"):
        first.backward(losses)
    assert (first.spent, second.spent) == (0, 1)


def test_another_models_runs_are_no_matter():
    first, second = make(network(0)), make(network(1))
    for _ in range(2):
        train(first, 1), train(second, 1)
    assert (first.spent, second.spent) == (2, 2)


def test_a_state_that_would_hide_another_run():
    first = make()
    second, state = make(first.model), train(make(), 3).state_dict()
    train(first, 5)
    with refused("another private run of this model"):
        second.load_state_dict(state)


# One file


def test_a_closed_run_does_not_save_over_a_later_count(tmp_path):
    first = train(resumed(tmp_path), 3)
    first.save()
    first.close()
    second = train(resumed(tmp_path), 4)
    second.save()
    second.close()
    for path in (None, tmp_path / "run.pt", tmp_path / "other.pt"):
        with refused(r"the run was closed, and another one may have gone on from .*run\.pt since"):
            first.save(path)
    assert not (tmp_path / "other.pt").exists()
    assert counted(tmp_path) == 7


@pytest.mark.parametrize("name", ["run.pt", "late.pt"])
def test_a_branch_does_not_save_over_a_later_count(tmp_path, name):
    """A state in memory carries the run's name to a run that has no file yet."""
    first = train(resumed(tmp_path), 3)
    branch = make()
    branch.load_state_dict(copy.deepcopy(first.state_dict()))
    train(first, 4)
    first.save()
    first.save(tmp_path / "late.pt")
    with refused(
        "is written by a run that is alive" if name == "run.pt" else "knows of 7 steps of this run, and this one of 3"
    ):
        branch.save(tmp_path / name)
    first.close()
    with refused("knows of 7 steps of this run, and this one of 3: the others would be forgotten"):
        branch.save(tmp_path / name)
    assert counted(tmp_path) == 7
    assert sorted(p.name for p in tmp_path.iterdir()) == ["late.pt", "run.pt", "run.pt.journal"]


def test_a_second_run_while_the_first_reads(tmp_path, monkeypatch):
    """The journal is locked before it is read: what is read is what is written on."""
    run = train(resumed(tmp_path), 3)
    run.save()
    train(run, 2)
    run.close()
    read, seen = checkpoint.read_journal, []

    def slowly(path):
        if not seen:
            seen.append(path)
            with refused("is written by a run that is alive, here or in another process"):
                resumed(tmp_path)
        return read(path)

    monkeypatch.setattr(resuming, "read_journal", slowly)
    again = resumed(tmp_path)
    assert seen
    assert again.spent == 5
    again.close()


@pytest.mark.parametrize("saves", [True, False])
def test_a_run_that_goes_on_and_ends_while_another_reads_the_file(tmp_path, monkeypatch, saves):
    run = train(resumed(tmp_path), 3)
    run.save()
    run.close()
    load, seen = checkpoint.load, []

    def late(path):
        found = load(path)
        if not seen:  # the file is read, and its journal is not locked yet
            seen.append(path)
            other = train(resumed(tmp_path), 4)
            if saves:
                other.save()
            seen.append(parameters_of(other))
            other.close()
        return found

    monkeypatch.setattr(checkpoint, "load", late)
    again = resumed(tmp_path)
    assert (again.spent, again.lost) == ((7, 0) if saves else (7, 4))
    if saves:
        assert_same(parameters_of(again), seen[1], 0.0)
    again.close()


def test_many_that_resume_at_the_same_moment(tmp_path):
    """Of eight threads one gets the file, ten times over, and each of its steps is counted."""
    rounds, threads = 10, 8
    for k in range(rounds):
        found: list[Run | Exception] = []
        together = threading.Barrier(threads)

        def try_it(model, found=found, together=together):
            together.wait()
            try:
                found.append(resumed(tmp_path, model=model, steps=100))
            except PrivacyError as error:
                found.append(error)

        # Made here: torch's default generator, which network() seeds, may lock up when several threads use it.
        running = [threading.Thread(target=try_it, args=(network(),)) for _ in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        (run,) = (one for one in found if isinstance(one, Run))
        assert all("is written by a run that is alive" in str(one) for one in found if one is not run)
        assert run.spent == k
        train(run, 1)
        if k % 2:
            run.save()
        run.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.pt", "run.pt.journal"]


def test_a_save_keeps_the_file_locked(tmp_path):
    run = train(resumed(tmp_path), 1)
    for _ in range(3):
        run.save()
        train(run, 1)
        with refused("is written by a run that is alive"):
            resumed(tmp_path)
    run.close()
    assert counted(tmp_path) == 4


def test_what_is_refused_leaves_no_file_behind(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing was saved there"):
        make().load(tmp_path / "run.pt")
    (tmp_path / "notes").write_text("something else")
    with refused("notes exists and is not of this run"):
        make(checkpoint=tmp_path / "notes")
    assert [p.name for p in tmp_path.iterdir()] == ["notes"]


def test_a_journal_that_was_made_and_never_begun_is_none(tmp_path):
    (tmp_path / "run.pt.journal").touch()  # as a kill in that moment leaves it
    run = train(resumed(tmp_path), 2)
    run.close()
    assert counted(tmp_path) == 2


def test_a_journal_that_cannot_be_begun_anew_still_has_every_step(tmp_path, monkeypatch):
    run = train(resumed(tmp_path), 2)
    flush, calls = checkpoint._flush_folder, []

    def fails(folder):
        calls.append(folder)
        if len(calls) == 2:  # after the new journal has taken the place of the old one
            raise OSError("disk full")
        flush(folder)

    monkeypatch.setattr(checkpoint, "_flush_folder", fails)
    with pytest.raises(OSError, match="disk full"):
        run.save()
    train(run, 3)
    with refused("is written by a run that is alive"):
        resumed(tmp_path)
    run.close()
    assert counted(tmp_path) == 5
