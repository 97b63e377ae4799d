"""Saving and loading: whole files, a journal of every step, and nothing that was spent is forgotten."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import killed_run
import pytest
import torch
from private_runs import N, fixed, make, network, parameters_of, table
from torch import nn

from eachgrad.private import Adaptive, PrivacyError, checkpoint
from eachgrad.private.accounting import Spent, epsilon
from oracle import assert_same

KILLS = 20


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


def fresh(**options):
    model = network()
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return make(model, optimizer=optimizer, scheduler=scheduler, **options)


def refused(words: str):
    return pytest.raises(PrivacyError, match=words)


def on(run, steps: int):
    """Some steps, each followed by the scheduler's."""
    for batch in run.loader.take(steps):
        run.step(batch)
        run.scheduler.step()
    return run


@pytest.mark.parametrize("clipping", ["flat", "adaptive", "per_group"])
@pytest.mark.parametrize("where", ["file", "memory"])
def test_a_loaded_run_goes_on_as_if_nothing_had_happened(tmp_path, where, clipping):
    options = {"clipping": clipping, "max_physical_batch": 5}
    run = on(fresh(generator=fixed(), **options), 4)
    again = fresh(generator=fixed(99), **options)
    if where == "file":
        run.save(tmp_path / "run.pt")
        run.close()
        again.load(tmp_path / "run.pt")
        run = on(fresh(generator=fixed(), **options), 4)
    else:
        parts = run, run.model, run.optimizer, run.scheduler
        states = copy.deepcopy([part.state_dict() for part in parts])
        for part, state in zip((again, again.model, again.optimizer, again.scheduler), states, strict=True):
            part.load_state_dict(state)
    assert again.spent == 4
    on(run, 6), on(again, 6)
    assert again.epsilon() == run.epsilon()
    assert again.receipt() == run.receipt()
    assert again.rule.bounds == run.rule.bounds
    assert again.scheduler.state_dict() == run.scheduler.state_dict()
    assert_same(parameters_of(again), parameters_of(run), 1e-6)


def test_a_file_holds_tensors_and_plain_values_alone(tmp_path):
    run = on(fresh(clipping=Adaptive()), 2)
    run.save(tmp_path / "run.pt")
    parts = torch.load(tmp_path / "run.pt", weights_only=True)
    assert set(parts) == {"run", "model", "optimizer", "scheduler", "journal"}
    assert parts["journal"] == "run.pt.journal"
    assert json.loads(json.dumps(parts["run"])) == parts["run"] == run.state_dict()


def test_steps_after_the_last_save_are_counted(tmp_path):
    run = on(fresh(checkpoint=tmp_path / "run.pt"), 3)
    run.save()
    saved = parameters_of(run)
    on(run, 4)
    want = run.epsilon()
    run.close()  # as a kill does
    again = fresh(checkpoint=tmp_path / "run.pt", resume=True)
    assert (again.spent, again.lost, again.remaining) == (7, 4, 3)
    assert again.epsilon() == want
    assert "7 of 10 steps, 4 of them lost in a crash" in str(again.receipt())
    assert_same(parameters_of(again), saved, 0.0)
    on(again, 1)
    again.close()
    third = fresh(checkpoint=tmp_path / "run.pt", resume=True)
    assert (third.spent, third.lost) == (8, 5)
    third.save()
    third.close()
    assert (fresh(checkpoint=tmp_path / "run.pt", resume=True).spent, third.lost) == (8, 5)


def test_a_run_killed_before_its_first_save_is_counted(tmp_path):
    run = on(fresh(checkpoint=tmp_path / "run.pt", resume=True), 3)
    run.close()
    assert not (tmp_path / "run.pt").exists()
    again = fresh(checkpoint=tmp_path / "run.pt", resume=True, generator=None)
    assert (again.spent, again.lost) == (3, 3)
    assert_same(parameters_of(again), parameters_of(fresh()), 0.0)


def test_a_step_is_in_the_journal_before_its_noise_is_drawn(tmp_path, monkeypatch):
    run = on(fresh(checkpoint=tmp_path / "run.pt"), 2)
    before = parameters_of(run)

    def fails(*args):
        raise MemoryError

    monkeypatch.setattr("eachgrad.private.stepping.noisy_gradients", fails)
    with pytest.raises(MemoryError):
        on(run, 1)
    assert run.spent == 3
    assert checkpoint.read_journal(tmp_path / "run.pt.journal")[1] == 3
    assert_same(parameters_of(run), before, 0.0)


def test_a_journal_that_cannot_be_written_stops_the_step(tmp_path, monkeypatch):
    run = on(fresh(checkpoint=tmp_path / "run.pt"), 2)
    before = parameters_of(run)
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:1]))
    with pytest.raises(OSError, match="cannot be written: the step is not taken"):
        on(run, 1)
    monkeypatch.setattr(os, "write", write)
    assert_same(parameters_of(run), before, 0.0)
    on(run, 1)
    assert checkpoint.read_journal(tmp_path / "run.pt.journal")[1] >= run.spent == 3


@pytest.mark.parametrize(("tail", "steps"), [(b"", 4), (b"\n", 4), (b"\n5", 5), (b"\n5\n", 5), (b"\n\x00\x00", 5)])
def test_a_line_that_was_cut_short_is_a_step(tmp_path, tail, steps):
    run = on(fresh(checkpoint=tmp_path / "run.pt"), 4)
    run.close()
    with open(tmp_path / "run.pt.journal", "ab") as file:
        file.write(tail)
    assert fresh(checkpoint=tmp_path / "run.pt", resume=True).spent == steps


def test_a_file_that_is_older_than_another_forgets_nothing(tmp_path):
    """Files of several moments have one journal: whoever goes back to an early one has still taken the later steps."""
    run = on(fresh(), 2)
    run.save(tmp_path / "early.pt")
    on(run, 3)
    run.save(tmp_path / "late.pt")
    on(run, 1)
    run.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["early.pt", "early.pt.journal", "late.pt"]
    for name in ("early.pt", "late.pt"):
        again = fresh()
        again.load(tmp_path / name)
        assert again.spent == 6
        again.close()


def test_going_back_in_one_process_forgets_nothing():
    run = on(fresh(), 2)
    state = copy.deepcopy(run.state_dict())
    on(run, 3)
    want = run.epsilon()
    run.load_state_dict(state)
    assert (run.spent, run.epsilon()) == (5, want)


def test_an_early_state_in_a_run_that_knows_more_from_its_journal_forgets_nothing(tmp_path):
    run = on(fresh(checkpoint=tmp_path / "run.pt"), 2)
    state = copy.deepcopy(run.state_dict())
    on(run, 3)
    run.close()
    again = fresh(checkpoint=tmp_path / "run.pt", resume=True)
    again.load_state_dict(state)
    assert again.spent == 5


def test_branches_of_one_run_do_not_forget_each_other():
    run = on(fresh(), 2)
    branch = fresh()
    branch.load_state_dict(run.state_dict())
    on(run, 2), on(branch, 3)
    with refused("this run has taken 4 steps of its own, which loading another run's state would forget"):
        run.load_state_dict(branch.state_dict())
    with refused("this run has taken 3 steps of its own"):
        branch.load_state_dict(run.state_dict())
    assert (run.spent, branch.spent) == (4, 5)


def test_shuffled_batches_begin_a_new_pass_after_a_load():
    run = on(fresh(sampling="shuffled"), 3)  # 5 steps a pass
    again = fresh(sampling="shuffled")
    again.load_state_dict(run.state_dict())
    on(again, 3)
    assert again.history == (Spent(0.2, 1.0, 3, "shuffled"), Spent(0.2, 1.0, 3, "shuffled"))
    assert again.epsilon() > on(fresh(sampling="shuffled"), 5).epsilon()


def test_every_loop_over_shuffled_batches_is_a_pass_of_its_own():
    """What a loop has drawn and not used is drawn again by the next one: a sample may be used in each of them."""
    run = fresh(sampling="shuffled")
    for _ in range(3):
        on(run, 1)
    assert run.history == (Spent(0.2, 1.0, 1, "shuffled"),) * 3
    whole = fresh(sampling="shuffled")
    on(whole, 5)
    on(whole, 5)
    assert [some.steps for some in whole.history] == [5, 5]


def test_steps_that_a_shuffled_run_has_lost_are_a_pass_each(tmp_path):
    run = on(fresh(sampling="shuffled"), 2)
    run.save(tmp_path / "run.pt")
    on(run, 3)
    run.close()
    again = fresh(sampling="shuffled")
    again.load(tmp_path / "run.pt")
    assert [some.steps for some in again.history if some.steps] == [2, 1, 1, 1]
    again.close()


def test_another_runs_state_does_not_make_a_loaded_run_forget(tmp_path):
    run = on(fresh(), 4)
    run.save(tmp_path / "run.pt")
    run.close()
    again = fresh()
    again.load(tmp_path / "run.pt")
    with pytest.raises(PrivacyError, match="has counted 4 steps, which another run's state would forget"):
        again.load_state_dict(on(fresh(), 1).state_dict())
    assert again.spent == 4
    again.close()


def test_a_budget_that_is_spent_stays_spent(tmp_path):
    run = on(fresh(), 10)
    run.save(tmp_path / "run.pt")
    run.close()
    again = fresh()
    again.load(tmp_path / "run.pt")
    assert again.remaining == 0
    assert again.epsilon() == run.epsilon()
    assert list(again.loader) == []
    with pytest.raises(PrivacyError, match="no batch of the loop"):
        again.step(next(iter(fresh().loader)))


def test_a_target_gives_the_noise_of_the_saved_run(tmp_path):
    run = on(fresh(target_epsilon=2.0), 4)
    run.save(tmp_path / "run.pt")
    run.close()
    again = fresh(target_epsilon=2.0)
    again.load(tmp_path / "run.pt")
    assert on(again, 6).epsilon() <= 2.0


# What is refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dataset": table(N + 1)}, "the state is of a run over 60 samples, and this data set has 61"),
        ({"batch_size": 10}, "with batch_size=12, and this one has batch_size=10: make the run as it was"),
        ({"noise_multiplier": 0.5}, "with noise_multiplier=1.0, and this one has noise_multiplier=0.5"),
        ({"steps": 11}, "with steps=10, and this one has steps=11"),
        ({"max_grad_norm": 0.5}, "with max_norm=1.0, and this one has max_norm=0.5"),
        ({"clipping": "normalised"}, "with clipping=Flat, and this one has clipping=Normalised"),
        ({"sampling": "shuffled"}, "with sampling=poisson, and this one has sampling=shuffled"),
        ({"history": (Spent(0.5, 1.0, 1),)}, "the history given to make_private is not the one of the saved run"),
    ],
)
def test_a_state_of_another_run(options, words):
    state = on(fresh(), 2).state_dict()
    other = make(**options)
    with refused(words):
        other.load_state_dict(state)
    assert other.spent == 0


def test_a_state_that_is_none():
    for state in ({}, None, network().state_dict()):
        with refused("this is no state of a private run"):
            fresh().load_state_dict(state)


def test_a_state_that_would_make_a_run_forget_its_own_steps():
    state = on(fresh(), 5).state_dict()
    run = on(fresh(), 2)
    with refused("this run has taken 2 steps of its own, which loading another run's state would forget"):
        run.load_state_dict(state)
    assert run.spent == 2


def test_a_fixed_generator_and_a_state_without_one():
    state = on(fresh(), 2).state_dict()
    with pytest.raises(ValueError, match="this run has a fixed generator and the saved one had none"):
        fresh(generator=fixed()).load_state_dict(state)


def test_files_of_other_runs_are_neither_written_over_nor_forgotten(tmp_path):
    run = on(fresh(checkpoint=tmp_path / "run.pt"), 2)
    run.save()
    run.close()
    with refused("run.pt is of another run, which has counted 2 steps: load it with run.load, or resume=True"):
        fresh(checkpoint=tmp_path / "run.pt")
    with refused("run.pt is of another run"):
        on(fresh(), 1).save(tmp_path / "run.pt")
    (tmp_path / "notes").write_text("something else")
    with refused("notes exists and is not of this run"):
        fresh(checkpoint=tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == "something else"


def test_a_file_without_its_journal(tmp_path):
    run = on(fresh(), 2)
    run.save(tmp_path / "run.pt")
    run.close()
    (tmp_path / "run.pt.journal").unlink()
    with refused("has no journal, run.pt.journal, so that steps after it was saved would go uncounted"):
        fresh().load(tmp_path / "run.pt")
    again = fresh()
    again.load(tmp_path / "run.pt", journal=False)
    assert again.spent == 2


def test_a_journal_of_another_run(tmp_path):
    for name in ("a.pt", "b.pt"):
        run = on(fresh(), 2)
        run.save(tmp_path / name)
        run.close()
    (tmp_path / "b.pt.journal").replace(tmp_path / "a.pt.journal")
    with refused("a.pt.journal is the journal of another run"):
        fresh().load(tmp_path / "a.pt")
    (tmp_path / "a.pt.journal").write_bytes(b"{")
    with refused("is no journal of a run, or is damaged"):
        fresh().load(tmp_path / "a.pt")


def test_two_runs_that_write_one_file(tmp_path):
    run = on(fresh(checkpoint=tmp_path / "run.pt"), 2)
    with refused("is written by a run that is alive, here or in another process"):
        fresh(checkpoint=tmp_path / "run.pt", resume=True)
    run.close()
    with refused("the run was closed"):
        on(run, 1)
    assert fresh(checkpoint=tmp_path / "run.pt", resume=True).spent == 2


def test_nothing_to_load(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing was saved there"):
        fresh().load(tmp_path / "run.pt")
    with pytest.raises(ValueError, match="no file is named"):
        fresh().save()
    with pytest.raises(ValueError, match="no file is named"):
        fresh().load()


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    run = on(fresh(checkpoint=tmp_path / "run.pt"), 2)
    run.save()
    old = (tmp_path / "run.pt").read_bytes()
    on(run, 1)

    def half(state, file):
        file.write(b"half of")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="disk full"):
        run.save()
    assert (tmp_path / "run.pt").read_bytes() == old
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.pt", "run.pt.journal"]
    run.close()
    monkeypatch.undo()
    assert fresh(checkpoint=tmp_path / "run.pt", resume=True).spent == 3


def test_killed_at_random_moments(tmp_path):
    """SIGKILL, 20 times, while it steps and saves: it always resumes, and no step it took goes uncounted."""
    here = Path(killed_run.__file__)
    command = [sys.executable, str(here), str(tmp_path), str(KILLS), str(int.from_bytes(os.urandom(4), "big"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command[-1]}: {done.stderr[-2000:]}"
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == KILLS
    for k, row in enumerate(rows, 1):
        assert row["killed"]
        assert row["taken"] <= row["counted"] <= row["taken"] + k  # a kill between journal and step counts one too many
        assert row["saved"] == row["counted"] - row["lost"]
        assert set(row["files"]) <= {"run.pt", "run.pt.tmp", "run.pt.journal", "run.pt.journal.tmp", "taken"}
    taken, counted = (rows[-1][name] for name in ("taken", "counted"))
    assert taken >= KILLS  # it did train
    assert rows[-1]["saved"] > 0
    spent = [epsilon((Spent(8 / killed_run.N, 1.0, steps),), 1e-3, "rdp") for steps in (taken, counted)]
    assert spent[0] <= spent[1] == rows[-1]["epsilon"]
