"""A step: the clipped sum over the samples drawn, by hand or not, in pieces or not, compiled or not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from private_runs import (
    WIDTH,
    N,
    by_hand,
    clipped_sum,
    fixed,
    losses_of,
    make,
    network,
    parameters_of,
    size,
    table,
    train,
)
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, Dataset, TensorDataset

from eachgrad import CaptureError
from eachgrad.compiled import Compiled
from eachgrad.private import Adaptive, Batch, Flat, Normalised, PerGroup
from eachgrad.private.gathering import Engine
from oracle import assert_same

BOUND = 1.2  # among the norms of the samples


def gradients(run) -> dict[str, torch.Tensor]:
    return {name: p.grad.detach().clone() for name, p in run.model.named_parameters() if p.grad is not None}


def one_step(**options):
    """A run after a step that takes every sample and adds no noise, and the parameters it was taken at."""
    run = make(batch_size=N, noise_multiplier=0.0, **options)
    before = parameters_of(run)
    run.step(next(iter(run.loader)))
    return run, before


def truth(before: dict[str, torch.Tensor], gamma: float | None = None) -> dict[str, torch.Tensor]:
    model = network()
    model.load_state_dict(before)
    found = clipped_sum(model, *table().tensors, BOUND, gamma)
    return {name: value / N for name, value in found.items()}


@pytest.mark.parametrize("pieces", [None, 7, 1])
@pytest.mark.parametrize("clipping", [Flat(), Normalised(0.3), Adaptive()], ids=lambda c: type(c).__name__)
def test_the_gradient_is_the_clipped_sum_over_the_expected_size(pieces, clipping):
    run, before = one_step(max_grad_norm=BOUND, clipping=clipping, max_physical_batch=pieces)
    gamma = clipping.gamma if isinstance(clipping, Normalised) else None
    assert_same(gradients(run), truth(before, gamma), 1e-5)
    after = {name: before[name] - 0.1 * g for name, g in gradients(run).items()}
    assert_same(parameters_of(run), after, 1e-6)


def test_groups_are_clipped_by_themselves():
    groups = {"first": ["0.*"], "rest": ["2.weight", "2.bias"]}
    run, before = one_step(clipping=PerGroup(groups, {"first": 0.2, "rest": 0.4}))
    assert run.rule.sensitivity == pytest.approx((0.2**2 + 0.4**2) ** 0.5)
    model = network()
    model.load_state_dict(before)
    x, y = table().tensors
    want = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in range(N):
        each = torch.autograd.grad(losses_of(model(x[i : i + 1]), y[i : i + 1]).sum(), list(model.parameters()))
        g = dict(zip(want, each, strict=True))
        for names, C in ((["0.weight", "0.bias"], 0.2), (["2.weight", "2.bias"], 0.4)):
            factor = C / max(C, size({name: g[name] for name in names}))
            for name in names:
                want[name] += factor * g[name] / N
    assert_same(gradients(run), want, 1e-5)


def test_one_bound_is_shared_by_all_parameters():
    run, _ = one_step(clipping="per_group", max_grad_norm=0.6)
    assert run.rule.bounds == pytest.approx(dict.fromkeys(["0.weight", "0.bias", "2.weight", "2.bias"], 0.3))
    assert run.rule.sensitivity == pytest.approx(0.6)


def drawn_sizes(run) -> set[int]:
    return {len(run.loader.sampler.draw()) for _ in range(run.settings.steps)}


def test_by_hand_in_pieces_and_at_once_are_the_same():
    """Draws of 0 to 12 samples, in pieces of 3: one generator gives the same run each way."""
    options = {"batch_size": 3, "steps": 30, "max_grad_norm": BOUND}
    runs = [
        train(make(generator=fixed(), **options)),
        train(make(generator=fixed(), max_physical_batch=3, **options)),
        by_hand(make(generator=fixed(), max_physical_batch=3, **options)),
    ]
    assert len(drawn_sizes(make(generator=fixed(), **options))) > 4
    assert 0 in drawn_sizes(make(generator=fixed(), **options))
    for run in runs[1:]:
        assert run.totals() == runs[0].totals()
        assert_same(parameters_of(run), parameters_of(runs[0]), 1e-5)


@pytest.mark.parametrize("pieces", [None, 40, 7])
def test_the_loss_is_the_mean_over_all_pieces(pieces):
    run, before = one_step(max_physical_batch=pieces)
    model = network()
    model.load_state_dict(before)
    x, y = table().tensors
    assert run.last.samples == N
    assert run.last.loss == pytest.approx(losses_of(model(x), y).double().mean().item(), rel=1e-5)


def test_samples_that_fill_a_piece_up_add_nothing():
    """Sizes are rounded up with copies of a sample, so that few sizes occur."""
    runs = [make(generator=fixed(), max_physical_batch=20) for _ in range(2)]
    runs[1].loader.divided = replace(runs[1].loader.divided, width=8)
    for run in runs:
        train(run)
    assert runs[0].totals() == runs[1].totals()
    assert_same(parameters_of(runs[1]), parameters_of(runs[0]), 1e-5)


@pytest.mark.parametrize("clipping", ["flat", "adaptive", "per_group"])
@pytest.mark.filterwarnings("ignore:.*is_fx_tracing will return true:UserWarning")
def test_compiled_and_eager_are_the_same_and_nothing_is_compiled_twice(clipping):
    """With steps that draw less, and more, than a physical batch."""
    torch._dynamo.reset()
    options = {"clipping": clipping, "max_physical_batch": 10}
    runs = []
    for way in (False, True):
        torch.manual_seed(0)
        runs.append(train(make(nn.Linear(WIDTH, 2), generator=fixed(), compile=way, **options)))
    assert len(runs[1].engine.ask.graphs) == 1
    assert runs[1].engine.ask.reasons() == []
    assert runs[0].totals() == runs[1].totals()
    assert_same(parameters_of(runs[1]), parameters_of(runs[0]), 1e-5)


class Lending(Engine):
    """Hands out the same memory every time, as a CUDA graph does."""

    def answer(self, batch, samples, filled):
        found, losses = super().answer(batch, samples, filled)
        self.memory = getattr(self, "memory", {name: torch.empty_like(g) for name, g in found.grad.items()})
        for name, g in found.grad.items():
            self.memory[name].copy_(g)
        found.grad = self.memory
        return found, losses


@pytest.mark.parametrize("pieces", [4, None])
def test_answers_may_be_overwritten_by_those_of_the_next_piece(pieces, monkeypatch):
    runs = [make(generator=fixed(), max_physical_batch=pieces)]
    monkeypatch.setattr("eachgrad.private.make.Engine", Lending)
    runs.append(make(generator=fixed(), max_physical_batch=pieces))
    for run in runs:
        train(run)
    assert isinstance(runs[1].engine, Lending)
    assert_same(parameters_of(runs[1]), parameters_of(runs[0]), 1e-6)


class Sequences(Dataset):
    """Samples of lengths 1 to 5, as dicts."""

    def __init__(self, n: int = 40):
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int):
        return {"ids": torch.arange(1 + i % 5) + 1 + i % 7, "y": torch.tensor(i % 2)}


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(13, 3), nn.Linear(3, 2)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, ids):
        # Noise moves every row of the table, that of the padding too: without the mask its length would count.
        return self.head((self.tokens(ids) * (ids > 0)[..., None]).sum(1))


def padded(samples):
    ids = nn.utils.rnn.pad_sequence([s["ids"] for s in samples], batch_first=True)
    return {"ids": ids, "y": torch.stack([s["y"] for s in samples])}


@pytest.mark.parametrize("workers", [0, 2])
def test_any_data_set_with_its_own_collate_function(workers):
    def losses(model, batch):
        return losses_of(model(batch["ids"]), batch["y"])

    runs = []
    for pieces in (None, 4):
        torch.manual_seed(0)
        run = make(
            Pooled(), Sequences(), loss_fn=losses, collate_fn=padded, generator=fixed(), num_workers=workers,
            max_physical_batch=pieces, steps=6,
        )  # fmt: skip
        runs.append(train(run))
    assert_same(parameters_of(runs[0]), parameters_of(runs[1]), 1e-5)
    assert not torch.equal(runs[0].model.unused, torch.ones(2))  # a sample moves it by 0, and its noise is there


def test_shuffled_batches_take_data_and_collate_function_from_a_loader():
    seen = []

    def collate(samples):
        seen.append(len(samples))
        return torch.utils.data.default_collate(samples)

    loader = DataLoader(table(), batch_size=12, shuffle=True, collate_fn=collate)
    run = train(make(dataset=loader, sampling="shuffled"))
    assert seen == [12] * 10
    assert run.totals()["samples"] == 120
    assert run.receipt().sampling.startswith("shuffled batches, no amplification")


def test_several_groups_frozen_and_tied_parameters_and_a_scheduler():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
            self.b.weight = self.a.weight
            self.b.bias.requires_grad_(False)

        def forward(self, x):
            return self.out(torch.tanh(self.b(torch.tanh(self.a(x)))))

    model = Tied()
    optimizer = torch.optim.AdamW([{"params": model.a.parameters()}, {"params": model.out.parameters(), "lr": 0.01}])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    run = make(model, optimizer=optimizer, scheduler=scheduler)
    bias, names = model.b.bias.detach().clone(), list(model.state_dict())
    for batch in run.loader:
        run.step(batch)
        scheduler.step()
    assert torch.equal(model.b.bias, bias)
    assert optimizer.param_groups[1]["lr"] == pytest.approx(0.01 / 32)
    assert list(model.state_dict()) == names
    assert run.receipt().trained == sum(p.numel() for p in (*model.a.parameters(), *model.out.parameters()))
    assert run.receipt().frozen == WIDTH


def test_nothing_is_left_on_model_and_optimizer():
    run = make()
    before = set(vars(run.model)), set(vars(run.optimizer)), type(run.model), type(run.optimizer)
    train(run)
    assert (set(vars(run.model)), set(vars(run.optimizer)), type(run.model), type(run.optimizer)) == before
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    assert not any(getattr(module, name) for module in run.model.modules() for name in hooks)
    assert not run.optimizer._optimizer_step_pre_hooks
    assert not run.optimizer._optimizer_step_post_hooks
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in run.model.parameters())


def spoilt(value: float) -> TensorDataset:
    x, y = table().tensors
    x = x.clone()
    x[7] = value
    return TensorDataset(x, y)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("pieces", [None, 16])
def test_a_sample_that_is_not_finite_adds_nothing_and_is_counted(value, pieces):
    def squares(out, y):
        return (out - y[:, None]).square().sum(1)

    model = nn.Linear(WIDTH, 1)
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    run = make(model, spoilt(value), loss_fn=squares, batch_size=N, noise_multiplier=0.0, max_physical_batch=pieces)
    result = run.step(next(iter(run.loader)))
    assert (result.nonfinite, run.receipt().nonfinite, result.samples) == (1, 1, N)
    x, y = table().tensors
    keep = torch.arange(N) != 7
    other = nn.Linear(WIDTH, 1)
    other.load_state_dict(state)
    whole = make(other, TensorDataset(x[keep], y[keep]), loss_fn=squares, batch_size=N - 1, noise_multiplier=0.0)
    rest = whole.step(next(iter(whole.loader)))
    assert result.counts.tolist() == [int(rest.clipped_sum), 1]  # clipped is what was longer, and not left out
    assert_same(gradients(run), {n: g * (N - 1) / N for n, g in gradients(whole).items()}, 1e-5)


class Counted(Dataset):
    """The samples of a table, and how often each was fetched."""

    def __init__(self, data: TensorDataset):
        self.data, self.fetched = data, torch.zeros(len(data))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int):
        self.fetched[i] += 1
        return self.data[i]


@pytest.mark.parametrize("graphs", [1, 2])
def test_a_piece_in_doubt_is_answered_again_and_no_sample_is_fetched_twice(graphs, monkeypatch):
    """Or a sample that is not finite would draw the others' augmentation again, and decide over who else is left out."""
    again, answer = [], Compiled.again
    monkeypatch.setattr(Compiled, "again", lambda self, *batch: (again.append(len(batch[0])), answer(self, *batch))[1])
    runs = []
    for more in ({}, {"compile": True, "graphs": graphs, "max_physical_batch": 9}):
        data = Counted(spoilt(float("nan")))
        run = make(nn.Linear(WIDTH, 2), data, generator=fixed(), steps=14, **more)
        with torch.no_grad():
            for p in run.model.parameters():
                p.copy_(torch.arange(p.numel()).view(p.shape) / 10)
        seen, drawn = [], 0
        for batch in run.loader:
            drawn += len(batch)
            seen.append(run.step(batch).nonfinite)
        assert data.fetched.sum() == drawn
        runs.append((run, seen))
    (eager, want), (compiled, got) = runs
    assert got == want
    assert 0 < sum(got) < len(got)
    assert_same(dict(compiled.model.named_parameters()), dict(eager.model.named_parameters()), 1e-5)
    assert compiled.totals() == eager.totals()
    assert 0 < len(again) <= sum(got)  # that piece alone; where the samples lie was measured, it was eager anyway


def test_a_step_that_failed_leaves_no_doubt_behind():
    data = spoilt(float("nan"))
    run = make(nn.Linear(WIDTH, 2), data, compile=True, graphs=1, steps=40, nonfinite="raise", generator=fixed())
    failed = 0
    for _ in range(20):
        batch = next(iter(run.loader))
        drawn = [i for piece in batch._pieces for i in piece]
        if 7 in drawn:
            with pytest.raises(CaptureError, match="NaN or infinite"):
                run.step(batch)
            failed += 1
            assert run.model.weight.grad is None
        else:
            run.step(batch)
            assert not run.engine.ask.doubted()
    assert 0 < failed < 20
    assert 20 - failed <= run.spent <= 20  # one that failed is counted where it was heard of after the count


def test_a_sample_that_is_not_finite_can_be_an_error():
    run = make(nn.Linear(WIDTH, 2), spoilt(float("nan")), batch_size=N, nonfinite="raise")
    with pytest.raises(CaptureError, match=r"samples \[7\] have a NaN or infinite norm"):
        train(run)
    assert run.spent == 0
    assert run.model.weight.grad is None


def test_clipped_samples_are_counted():
    run, before = one_step(max_grad_norm=BOUND)
    model = network()
    model.load_state_dict(before)
    x, y = table().tensors
    over = 0
    for i in range(N):
        g = torch.autograd.grad(losses_of(model(x[i : i + 1]), y[i : i + 1]).sum(), list(model.parameters()))
        over += size(dict(enumerate(g))) > BOUND
    assert 0 < over < N
    assert run.last.clipped == pytest.approx(over / N)
    assert run.receipt().clipped == over
    assert run.last.loss == pytest.approx(losses_of(model(x), y).mean().item(), rel=1e-5)


def test_the_bound_follows_a_quantile_of_the_norms():
    """Without noise, at a learning rate of 0: the bound ends at the median norm, from far above and from far below."""
    model = network()
    x, y = table().tensors
    norms = []
    for i in range(N):
        g = torch.autograd.grad(losses_of(model(x[i : i + 1]), y[i : i + 1]).sum(), list(model.parameters()))
        norms.append(size(dict(enumerate(g))))
    median = float(torch.tensor(norms).median())
    for start in (20 * median, median / 20):
        model = network()
        still = torch.optim.SGD(model.parameters(), lr=0.0)
        options = {"clipping": Adaptive(0.5, 0.5), "max_grad_norm": start, "noise_multiplier": 0.0, "steps": 60}
        run = train(make(model, optimizer=still, batch_size=N, **options))
        assert run.rule.bounds == pytest.approx(median, rel=0.1)


def test_spectral_norm_moves_its_vectors_and_is_no_leak():
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(WIDTH, 4)), nn.Linear(4, 2))
    assert train(make(model)).spent == 10


def test_a_batch_is_what_was_drawn():
    run = make(generator=fixed(), max_physical_batch=5)
    for batch in run.loader:
        assert isinstance(batch, Batch)
        assert sum(batch.sizes) == len(batch)
        assert all(k <= 5 for k in batch.sizes)
        run.step(batch)
        assert run.last.samples == len(batch)
    assert "done" in repr(batch)
    assert len(run.loader) == run.remaining == 0


def test_an_epoch_at_a_time():
    run = make(steps=12)
    sizes = []
    for _ in range(3):
        before = run.spent
        for batch in run.loader.epoch():
            run.step(batch)
        sizes.append(run.spent - before)
    assert sizes == [5, 5, 2]


def test_the_progress_bar_has_loss_epsilon_and_clipped_share(capsys):
    train(make(progress=True))
    shown = capsys.readouterr().err
    assert "10/10" in shown
    assert all(word in shown for word in ("loss=", "epsilon=", "clipped="))
