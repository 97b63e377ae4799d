"""Misuse is refused by name: what, why, and what to do instead."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from private_runs import WIDTH, N, by_hand, fixed, losses_of, make, network, table, train
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from eachgrad import CaptureError, EachgradError
from eachgrad.private import Adaptive, BudgetSpent, Flat, Normalised, PerGroup, PrivacyError, Spent


@dataclass(frozen=True)
class Refused:
    """Options of make_private that are refused, and what the message says."""

    name: str
    words: str
    options: dict[str, Any] = field(default_factory=dict)
    error: type[Exception] = ValueError
    model: Callable[[], nn.Module] = network

    def __str__(self) -> str:
        return self.name


class Endless(IterableDataset):
    def __iter__(self):
        yield torch.zeros(WIDTH)


def frozen() -> nn.Module:
    return network().requires_grad_(False)


def normed(kind: Callable[..., nn.Module], **options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(WIDTH, 4), kind(4, **options), nn.Linear(4, 2))


def stepped(choose: Callable[[nn.Module], Any]) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(choose(model), lr=0.1)


def loader(**options: Any) -> DataLoader:
    return DataLoader(table(), **options)


BAD = (0, -1, 2.5, True, "4")
POSITIVE = [
    Refused(f"{name}={value!r}", f"{name} is a positive integer, not {value!r}", {name: value})
    for name in ("batch_size", "steps", "max_physical_batch")
    for value in BAD
]
CASES = [
    *POSITIVE,
    Refused("more than there are", f"batch_size={N + 1} is more than the {N} samples", {"batch_size": N + 1}),
    Refused("epochs of none", "epochs is a positive number, not 0", {"epochs": 0}),
    Refused("epochs without end", "epochs is a positive number, not inf", {"epochs": math.inf}),
    Refused("epochs of no step", "epochs=1e-12 of 60 samples, 12 at a time, is not one step", {"epochs": 1e-12}),
    Refused("epochs and steps", "exactly one of epochs and steps", {"epochs": 1, "steps": 10}),
    Refused("neither epochs nor steps", "exactly one of epochs and steps", {"epochs": None, "steps": None}),
    Refused("both targets", "exactly one of target_epsilon and noise", {"target_epsilon": 1.0, "noise_multiplier": 1.0}),
    Refused("no target", "exactly one of target_epsilon and noise", {"target_epsilon": None, "noise_multiplier": None}),
    Refused("target of none", "target_epsilon is a number above 0 and up to 100, not 0", {"target_epsilon": 0}),
    Refused("target of nan", "target_epsilon is a number above 0 and up to 100, not nan", {"target_epsilon": math.nan}),
    Refused("target of 1000", "beyond it the guarantee says nothing", {"target_epsilon": 1000.0}),
    Refused("noise below 0", "noise_multiplier is a finite number, 0 or more, not -1.0", {"noise_multiplier": -1.0}),
    Refused("noise of nan", "noise_multiplier is a finite number, 0 or more, not nan", {"noise_multiplier": math.nan}),
    Refused("noise of inf", "noise_multiplier is a finite number, 0 or more, not inf", {"noise_multiplier": math.inf}),
    Refused("delta of 0", "delta is a number between 0 and 1, not 0", {"target_delta": 0.0}),
    Refused("delta of 1", "delta is a number between 0 and 1, not 1", {"target_delta": 1.0}),
    Refused("delta of nan", "delta is a number between 0 and 1, not nan", {"target_delta": math.nan}),
    Refused(
        "delta of 1/n", "target_delta=0.0166667 is not below 1/n = 0.0167 for 60 samples", {"target_delta": 1 / N},
        PrivacyError,
    ),
    Refused("bound of 0", "max_grad_norm is a positive number, not 0.0", {"max_grad_norm": 0.0}),
    Refused("bound of nan", "max_grad_norm is a positive number, not nan", {"max_grad_norm": math.nan}),
    Refused("bound without end", "max_grad_norm is a positive number, not inf", {"max_grad_norm": math.inf}),
    Refused("bound below 0", "max_grad_norm is a positive number, not -2", {"clipping": Flat(-2)}),
    Refused("two bounds", "both set the bound: pass one of them", {"clipping": Flat(1.0), "max_grad_norm": 2.0}),
    Refused("unknown clipping", "clipping is one of 'flat', 'per_group'", {"clipping": "ghost"}),
    Refused("no clipping", "clipping is a name or Flat", {"clipping": None}, TypeError),
    Refused("gamma of 0", "gamma is a positive number, not 0.0", {"clipping": Normalised(0.0)}),
    Refused("quantile of 1", "quantile=...) lies between 0 and 1, not 1.0", {"clipping": Adaptive(1.0)}),
    Refused("rate of 0", "rate=...) is a positive number, not 0.0", {"clipping": Adaptive(rate=0.0)}),
    Refused("count noise of 0", "count_noise=...) is a positive", {"clipping": Adaptive(count_noise=0.0)}),
    Refused("count noise too small", "it must be above 0.5", {"clipping": Adaptive(count_noise=0.4)}),
    Refused("a group too few", "'2.bias' is in no group", {"clipping": PerGroup({"a": ["*weight", "0.*"]})}),
    Refused("a bound too few", "and the groups are", {"clipping": PerGroup({"a": ["*"]}, {"b": 1.0})}),
    Refused("unknown sampling", "sampling is one of 'poisson', 'shuffled', not 'random'", {"sampling": "random"}),
    Refused("unknown accountant", "accountant is one of 'pld', 'rdp', not 'prv'", {"accountant": "prv"}),
    Refused("unknown nonfinite", "nonfinite is one of 'zero', 'raise', not 'skip'", {"nonfinite": "skip"}),
    Refused("unknown compile", "compile is one of None, True, False, not 'fast'", {"compile": "fast"}),
    Refused("recompute beyond a share", "recompute is a share, from 0.0 to 1.0, not 1.5", {"recompute": 1.5}),
    Refused("secure and fixed", "secure=True and a fixed generator", {"secure": True, "generator": fixed()}),
    Refused("a seed", "generator is a torch.Generator, not int", {"generator": 1}, TypeError),
    Refused("a history of numbers", "pass history=run.history", {"history": [1]}, TypeError),
    Refused("a run as history", "not a Run: pass history=run.history", {"history": lambda: make()}, TypeError),
    Refused("one Spent as history", "not a Spent: pass history", {"history": Spent(0.2, 1.0, 1)}, TypeError),
    Refused(
        "a loader", "draws its batches with RandomSampler, and the accountant counts on Poisson sampling",
        {"dataset": loader(batch_size=12, shuffle=True)}, PrivacyError,
    ),
    Refused(
        "a loader in order", "draws its batches with SequentialSampler", {"dataset": loader(batch_size=12)}, PrivacyError
    ),
    Refused(
        "a weighted loader", "draws with WeightedRandomSampler, and shuffled batches take every sample once",
        {"dataset": loader(batch_size=12, sampler=WeightedRandomSampler([1.0] * N, N)), "sampling": "shuffled"},
        PrivacyError,
    ),
    Refused(
        "a loader of another size", "has batches of 10, and batch_size=12",
        {"dataset": loader(batch_size=10), "sampling": "shuffled"},
    ),
    Refused("a stream", "Endless has no length", {"dataset": Endless()}, PrivacyError),
    Refused("an iterator", "cannot be drawn from: it has no __getitem__", {"dataset": iter([1])}, PrivacyError),
    Refused("no data", "the data set is empty", {"dataset": TensorDataset(torch.zeros(0, WIDTH))}),
    Refused("no model", "model is an nn.Module, not int", {"optimizer": 1}, TypeError, lambda: 3),
    Refused("no optimizer", "optimizer is a torch.optim.Optimizer, not int", {"optimizer": 1}, TypeError),
    Refused(
        "an optimizer with a closure", "LBFGS computes the loss again within a step, by a closure",
        {"optimizer": lambda model: torch.optim.LBFGS(model.parameters())}, PrivacyError,
    ),
    Refused("a frozen model", "no trainable parameter: every one is frozen", {}, PrivacyError, frozen),
    Refused(
        "batch norm", "module '1' (BatchNorm1d) is a batch norm in training mode", {}, PrivacyError, normed(nn.BatchNorm1d)
    ),
    Refused(
        "batch norm without statistics", "is a batch norm without running statistics", {}, PrivacyError,
        lambda: normed(nn.BatchNorm1d, track_running_stats=False)().eval(),
    ),
    Refused(
        "statistics of instances", "module '1' (InstanceNorm1d) keeps running statistics", {}, PrivacyError,
        normed(nn.InstanceNorm1d, track_running_stats=True),
    ),
    Refused(
        "a parameter not stepped", "that the optimizer does not have: '0.weight', '0.bias'",
        {"optimizer": stepped(lambda m: m[2].parameters())}, PrivacyError,
    ),
    Refused(
        "a parameter not covered", "parameter 4 (3,) of the optimizer's group 0 is none of the model's",
        {"optimizer": stepped(lambda m: [*m.parameters(), nn.Parameter(torch.zeros(3))])}, PrivacyError,
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_make_private_refuses(case: Refused):
    model, options = case.model(), dict(case.options)
    if callable(options.get("optimizer")):
        options["optimizer"] = options["optimizer"](model)
    if callable(options.get("history")):
        options["history"] = options["history"]()
    with pytest.raises(case.error) as caught:
        make(model, options.pop("dataset", None), **options)
    assert case.words in str(caught.value)
    assert isinstance(caught.value, EachgradError) == (case.error is PrivacyError)


def refused(words: str, error: type[Exception] = PrivacyError):
    return pytest.raises(error, match=words)


def test_losses_that_mix_samples():
    run = make(loss_fn=lambda out, y: losses_of(out / out.std(0), y), batch_size=N)
    with refused("mix", CaptureError):
        train(run)
    assert run.spent == 0


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        (lambda out, y: F.cross_entropy(out, y), r"the losses are a tensor \(\), and the batch has"),
        (lambda out, y: F.cross_entropy(out, y, reduction="none")[1:], "and the batch has 64 samples"),
        (lambda out, y: out, r"the losses are a tensor \(64, 2\)"),
        (lambda out, y: 3.0, "the losses are float"),
    ],
)
def test_losses_that_are_not_one_for_each_sample(losses, words):
    run = make(dataset=table(64), loss_fn=losses, batch_size=64, max_physical_batch=64)
    with refused(words):
        train(run)


class Remembers(nn.Module):
    """Keeps something of what it sees in a buffer, and counts its calls."""

    def __init__(self, kept: torch.Tensor | None):
        super().__init__()
        self.fc = nn.Linear(WIDTH, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("kept", kept)

    def forward(self, x):
        self.calls += 1
        if self.kept is not None:
            self.kept.copy_(x.detach().mean(0))
        return self.fc(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.long])
def test_a_forward_that_writes_the_samples_into_a_buffer(dtype):
    for go in (train, by_hand):
        run = make(Remembers(torch.zeros(WIDTH, dtype=dtype)), batch_size=N)
        with refused("the forward changed the buffer 'kept', which leaves with the model and has no noise on it"):
            go(run)
        assert run.spent == 0


def test_a_buffer_that_counts_is_no_leak():
    assert train(make(Remembers(None), batch_size=N)).model.calls == 10


def test_a_batch_norm_that_is_put_back_into_training():
    model = normed(nn.BatchNorm1d)().eval()
    run = train(make(model), 2)
    model.train()
    with refused(r"module '1' \(BatchNorm1d\) is a batch norm in training mode"):
        train(run)


def test_parameters_that_change_on_the_way():
    run = train(make(), 2)
    run.model[0].bias.requires_grad_(False)
    with refused("'0.bias' came, went or were replaced"):
        train(run)
    run = train(make(), 2)
    run.model[0].weight = nn.Parameter(run.model[0].weight.detach().clone())
    with refused("'0.weight' came, went or were replaced"):
        train(run)


def test_steps_beyond_the_plan():
    run = make(steps=2)
    batches = run.loader.take(3)
    for _ in range(2):
        run.step(next(batches))
    spent = run.epsilon()
    with refused(r"all 2 steps are spent, epsilon .* stop here, or plan more steps", BudgetSpent):
        run.step(next(batches))
    assert list(run.loader) == []
    assert (run.spent, run.epsilon()) == (2, spent)


def test_a_batch_that_is_none_of_the_loader():
    run = make()
    for batch in (table().tensors, next(iter(make().loader)), None):
        with refused("this is no batch of the loop over run.loader that is running"):
            run.step(batch)


def test_a_step_without_a_loss():
    run = make(loss_fn=None, batch_size=N)
    with refused("pass loss_fn to make_private, or go by hand", ValueError):
        train(run)
    assert by_hand(make(loss_fn=None)).spent == 10


def test_a_batch_used_twice():
    run = make()
    batches = iter(run.loader)
    batch = next(batches)
    run.step(batch)
    with refused("this batch has been used"):
        run.step(batch)
    with refused("this batch has been used"):
        list(batch)
    assert run.spent == 1


def test_a_batch_that_is_left_out():
    run = make()
    batches = iter(run.loader)
    next(batches)
    with refused("was drawn and not used: the accounting is for steps that use every batch they draw"):
        next(batches)


def test_a_loop_that_another_has_replaced():
    run = make()
    first, second = iter(run.loader), iter(run.loader)
    old = next(first)
    run.step(next(second))
    with refused("no batch of the loop over run.loader that is running"):
        run.step(old)
    with refused("run.loader was begun anew"):
        next(first)


def test_pieces_that_are_left_out_or_used_twice():
    run = make(batch_size=N, max_physical_batch=40)
    pieces = iter(next(iter(run.loader)))
    with refused("run.record: no piece of a batch waits for it"):
        run.record()
    with refused("run.backward: no piece of a batch waits for it"):
        run.backward(torch.zeros(40))
    x, y = next(pieces)
    with refused("run.backward without run.record"):
        run.backward(torch.zeros(40))
    with run.record():
        losses = losses_of(run.model(x), y)
    with refused(r"the losses are a tensor \(39,\), and the batch has 40 samples"):
        run.backward(losses[1:])
    run.backward(losses)
    with refused("run.backward: no piece of a batch waits for it. It goes once with each piece"):
        run.backward(losses)
    assert all(p.grad is None for p in run.model.parameters())  # a step of the optimizer would do nothing
    next(pieces)
    with refused("a piece of 20 samples had no run.backward"):
        next(pieces)
    assert run.spent == 0


def test_an_optimizer_that_steps_again_is_not_counted_again():
    run = make()
    run.step(next(iter(run.loader)))
    run.optimizer.step()
    assert run.spent == 1


def test_a_second_run_that_would_forget_the_first():
    first = train(make())
    with refused("has been trained by a private run of 10 steps, which a new one would forget"):
        make(first.model)
    second = train(make(first.model, history=first.history))
    assert second.history == (Spent(0.2, 1.0, 10), Spent(0.2, 1.0, 10))
    assert second.epsilon() > first.epsilon()
    assert train(make(first.model, history=())).epsilon() == first.epsilon()
    assert make(network()).epsilon() == 0.0  # another model


def test_several_processes(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    with refused("torch.distributed runs 4 processes, and the accounting is for one"):
        make()


@pytest.mark.parametrize("delta", [0, 1, math.nan, "1e-5"])
def test_epsilon_at_a_delta_that_is_none(delta):
    with refused("delta is a number between 0 and 1", ValueError):
        make().epsilon(delta)


def test_secure_without_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with refused("secure=True needs the package cryptography", ImportError):
        make(secure=True)


def test_the_accountant_is_missing():
    code = "import sys; sys.modules['dp_accounting'] = None; import eachgrad.private"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "eachgrad.private needs dp-accounting and tqdm: pip install 'eachgrad[private]'" in done.stderr


def test_the_library_does_not_import_the_private_part():
    names = "eachgrad.private", "dp_accounting", "cryptography", "scipy"
    code = f"import eachgrad, sys; print([n for n in {names} if n in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.parametrize("compile", [False, True])
def test_a_batch_that_grows_on_the_way_is_refused_at_every_step(compile):
    calls = []

    def collate(items):
        calls.append(len(items))
        x, y = (torch.stack(column) for column in zip(*items, strict=True))
        return (x, y) if len(calls) < 2 else (torch.cat([x, x[:1]]), torch.cat([y, y[:1]]))

    run = make(collate_fn=collate, compile=compile, max_physical_batch=40)
    with pytest.raises(PrivacyError, match="return one loss for each sample"):
        train(run)


def test_a_forward_that_writes_to_a_frozen_parameter_is_refused():
    class Codebook(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(WIDTH, 2)
            self.mean = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

        def forward(self, x):
            with torch.no_grad():
                self.mean.copy_(x.mean(0))
            return self.fc(x)

    run = make(Codebook())
    with pytest.raises(PrivacyError, match="changed the frozen parameter 'mean'"):
        train(run)


def test_a_gradient_that_was_left_on_a_frozen_layer_is_not_applied():
    model = network()
    losses_of(model(table().tensors[0]), table().tensors[1]).sum().backward()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    run = make(model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), steps=2)
    for batch in run.loader:
        run.step(batch)
    assert torch.equal(model[0].weight, before)
