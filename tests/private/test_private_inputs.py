"""What a run is given: numbers of numpy, data that changes, batches that are dicts, optimizers of all kinds."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from private_runs import N, by_hand, fixed, losses_of, make, network, parameters_of, table, train
from torch.utils.data import Dataset

from eachgrad.private import Flat, PrivacyError
from oracle import assert_same

NUMBERS = {
    "noise_multiplier": 1.5, "max_grad_norm": 0.5, "target_delta": 2**-12, "batch_size": 12, "epochs": 2.0,
    "max_physical_batch": 5,
}  # fmt: skip


@pytest.mark.parametrize(("real", "whole"), [(np.float32, np.int64), (np.float64, np.int32), (np.float16, np.uint8)])
def test_a_number_of_numpy_is_a_number(tmp_path, real, whole):
    """Each is exact in sixteen bits, so that nothing may differ; and a file holds it as a number of Python's own."""
    theirs = {name: (whole if isinstance(value, int) else real)(value) for name, value in NUMBERS.items()}
    runs = [train(make(generator=fixed(), **options)) for options in (NUMBERS, theirs)]
    assert runs[0].spent == 10
    assert_same(parameters_of(runs[1]), parameters_of(runs[0]), 0.0)
    assert runs[0].receipt() == runs[1].receipt()
    assert runs[1].epsilon(real(2**-12)) == runs[0].epsilon(2**-12)
    runs[1].save(tmp_path / "run.pt")
    runs[1].close()
    again = make(generator=fixed(), **NUMBERS)
    again.load(tmp_path / "run.pt")
    assert again.spent == 10
    header = (tmp_path / "run.pt.journal").read_bytes().splitlines()[0]
    assert json.loads(header)["settings"]["noise_multiplier"] == 1.5
    again.close()


def test_steps_targets_and_bounds_of_numpy():
    run = make(steps=np.int64(3), target_epsilon=np.float32(4), clipping=Flat(np.float32(0.5)))
    assert run.settings == make(steps=3, target_epsilon=4.0).settings
    assert type(run.settings.steps) is int
    assert run.rule.bounds == 0.5
    for value in (np.float32("nan"), np.float64(-1)):
        with pytest.raises(ValueError, match="noise_multiplier is a finite number, 0 or more"):
            make(noise_multiplier=value)
    with pytest.raises(ValueError, match="batch_size is a positive integer"):
        make(batch_size=np.float32(12))


class Shrinking(Dataset):
    """Samples that are kept elsewhere, and may go."""

    def __init__(self, n: int = N):
        self.samples = [table(n)[i] for i in range(n)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int):
        return self.samples[i]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("left", [N - 10, N + 1, 0])
def test_a_data_set_that_changes_its_size(left, workers):
    dataset = Shrinking()
    run = make(dataset=dataset, num_workers=workers)
    dataset.samples = (dataset.samples * 2)[:left]
    with pytest.raises(PrivacyError, match=f"the data set had 60 samples when the run was made, and has {left}"):
        train(run)
    assert run.spent == 0


def test_a_data_set_that_changes_its_size_between_steps():
    dataset = table()
    run = train(make(dataset=dataset), 2)
    dataset.tensors = tuple(t[:50] for t in dataset.tensors)
    with pytest.raises(PrivacyError, match="and has 50: the accounting is for draws from 60"):
        train(run)
    assert run.spent == 2


def named(items):
    x, y = (torch.stack(column) for column in zip(*items, strict=True))
    return {"x": x, "y": y}


@pytest.mark.parametrize(
    "losses",
    [
        losses_of,
        lambda out, y: (out - y).square(),
        lambda out, batch: losses_of(out.logits, batch["y"]),
        lambda out, x, y: losses_of(out, y),
    ],
    ids=["cross-entropy", "operators", "attributes", "one argument more"],
)
def test_losses_of_an_output_for_batches_that_are_dicts(losses):
    run = make(collate_fn=named, loss_fn=losses, batch_size=N)
    with pytest.raises(
        TypeError, match=r"loss_fn\(model, batch\) has failed: .*A batch that is a dict is one argument"
    ):
        train(run)
    assert run.spent == 0


def test_losses_of_a_model_for_batches_that_are_dicts():
    wanted = train(make(generator=fixed()))
    run = make(
        collate_fn=named, generator=fixed(), loss_fn=lambda model, batch: losses_of(model(batch["x"]), batch["y"])
    )
    assert_same(parameters_of(train(run)), parameters_of(wanted), 1e-6)
    with pytest.raises(KeyError, match="z"):
        train(make(collate_fn=named, loss_fn=lambda model, batch: losses_of(model(batch["z"]), batch["y"])))


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "Rprop", "ASGD", "Adafactor"])
def test_optimizers_that_may_have_a_closure(name):
    """Each is stepped by its own rule with the noisy gradients, as by hand."""
    model = network()
    twin = copy.deepcopy(model)
    kind = getattr(torch.optim, name)
    train(make(model, optimizer=kind(model.parameters(), lr=0.1), generator=fixed()))
    by_hand(make(twin, optimizer=kind(twin.parameters(), lr=0.1), generator=fixed()))
    assert_same(dict(twin.named_parameters()), dict(model.named_parameters()), 1e-6)
    assert not torch.equal(model[0].weight, network()[0].weight)
