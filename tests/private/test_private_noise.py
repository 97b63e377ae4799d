"""Randomness: the noise that reaches the parameters, where it comes from, and the samples that are drawn.

Every statistical test gives a false alarm once in a million runs; an error of 1% in a standard deviation fails it.
"""

from __future__ import annotations

import math

import pytest
import torch
from private_runs import WIDTH, N, fixed, make, parameters_of, table, train
from scipy import stats
from torch import Tensor, nn

from eachgrad.kernels import noise as kernel
from eachgrad.private import noise
from eachgrad.private.noise import Fixed, Secure, Source, noisy_gradients
from eachgrad.private.sampling import Poisson, Shuffled

FALSE_ALARM = 1e-6
LOUD = 1000.0  # beside this noise multiplier the samples' share in the gradient is nothing


def assert_deviation(values: Tensor, deviation: float) -> None:
    """The values are centred Gaussians of this standard deviation, by their sum and by their sum of squares."""
    k = values.numel()
    assert k >= 400_000, "too few to see an error of 1%"
    unit = values.double() / deviation
    squares = float(unit.square().sum())
    assert stats.chi2.ppf(FALSE_ALARM / 2, k) <= squares <= stats.chi2.isf(FALSE_ALARM / 2, k)
    assert abs(float(unit.sum())) <= math.sqrt(k) * stats.norm.isf(FALSE_ALARM / 2)


def wide(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4000), nn.Tanh(), nn.Linear(4000, 2)).to(dtype)


def drawn(steps: int = 15, empty: bool = False, **options) -> tuple[Tensor, float]:
    """The gradients of all steps (those that drew nobody, if `empty`), and batch_size."""
    model = options.pop("model", None) or wide()
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    run = make(model, optimizer=still, noise_multiplier=LOUD, steps=steps, **options)
    found = []
    for batch in run.loader:
        run.step(batch)
        if empty == (len(batch) == 0):
            found.append(torch.cat([p.grad.double().flatten() for p in model.parameters()]))
    return torch.cat(found), run.settings.batch_size


WAYS = {
    "at once": {},
    "in pieces of one": {"max_physical_batch": 1, "batch_size": 3, "steps": 40},  # of which one in twenty draws nobody
    "in pieces of five": {"max_physical_batch": 5},
    "nobody drawn": {"batch_size": 1, "empty": True, "steps": 100},
    "shuffled": {"sampling": "shuffled"},
    "secure": {"secure": True},
    "groups": {"clipping": "per_group"},
    "normalised": {"clipping": "normalised"},
    "sixteen bits": {"model": wide(torch.bfloat16), "loss_fn": lambda out, y: out.float().sum(1), "history": ()},
}


@pytest.fixture
def together(monkeypatch):
    """What CUDA parameters go through, on a CPU: by the code that says what the kernel computes."""
    monkeypatch.setattr(noise, "goes_together", lambda p: noise._wide(p.dtype) == torch.float32)


@pytest.mark.parametrize("name", WAYS)
def test_the_noise_in_the_gradient_has_the_right_deviation(name):
    deviates_rightly(name)


@pytest.mark.usefixtures("together")
@pytest.mark.parametrize("name", ["at once", "in pieces of five", "nobody drawn", "secure", "sixteen bits"])
def test_the_noise_of_all_parameters_together_has_the_right_deviation(name):
    deviates_rightly(name)


def deviates_rightly(name: str) -> None:
    dataset = table()
    if name == "sixteen bits":
        dataset = torch.utils.data.TensorDataset(dataset.tensors[0].bfloat16(), dataset.tensors[1])
    values, batch_size = drawn(max_grad_norm=0.25, dataset=dataset, **WAYS[name])
    assert_deviation(values, LOUD * 0.25 / batch_size)


def test_the_sum_has_a_little_more_noise_beside_an_adaptive_count():
    model = wide()
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    run = make(model, optimizer=still, noise_multiplier=LOUD, clipping="adaptive", steps=15)
    found = []
    for batch in run.loader:
        bound = run.rule.bounds
        run.step(batch)
        found.append(torch.cat([p.grad.double().flatten() for p in model.parameters()]) / bound)
    of_sum = (LOUD**-2 - (2 * run.rule.adaptive.count_noise) ** -2) ** -0.5
    assert of_sum > 1.03 * LOUD
    assert_deviation(torch.cat(found), of_sum / run.settings.batch_size)


def test_the_noise_of_a_complex_parameter_is_in_both_parts():
    class Spectrum(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(WIDTH, 4000, dtype=torch.complex64))

        def forward(self, x):
            return (x.to(torch.complex64) @ self.w).abs()

    model = Spectrum()
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    run = make(model, optimizer=still, noise_multiplier=LOUD, steps=21, loss_fn=lambda out, y: out.sum(1))
    found = []
    for batch in run.loader:
        run.step(batch)
        found.append(torch.view_as_real(model.w.grad).clone())
    for part in torch.stack(found).unbind(-1):
        assert_deviation(part, LOUD / 12)


def test_steps_and_parameters_have_noise_of_their_own():
    values, _ = drawn(steps=16)
    rows = values.reshape(16, -1)
    rows = (rows - rows.mean()) / rows.std()
    limit = stats.norm.isf(FALSE_ALARM / 2) / math.sqrt(rows[1:].numel())
    assert abs(float((rows[1:] * rows[:-1]).mean())) <= limit
    assert abs(float((rows[:, 1:] * rows[:, :-1]).mean())) <= limit


@pytest.mark.parametrize("source", [Source, Secure])
def test_the_numbers_of_a_source_are_distributed_as_they_should_be(source):
    values = source().normal(torch.empty(400_001, dtype=torch.float64), 3.0)
    assert_deviation(values, 3.0)
    assert stats.kstest(values.numpy() / 3.0, "norm").pvalue > FALSE_ALARM
    assert stats.kstest(source().uniform(400_000).numpy(), "uniform").pvalue > FALSE_ALARM
    beyond = int((values.abs() > 4 * 3.0).sum())  # the tails are there
    share = 2 * stats.norm.sf(4)
    assert stats.binom.ppf(FALSE_ALARM / 2, values.numel(), share) <= beyond
    assert beyond <= stats.binom.isf(FALSE_ALARM / 2, values.numel(), share)


def test_two_keystreams_and_two_calls_differ():
    a, b = Secure(), Secure()
    draws = [
        a.uniform(50),
        a.uniform(50),
        b.uniform(50),
        a.normal(torch.empty(50), 1.0),
        a.normal(torch.empty(50), 1.0),
    ]
    assert len({tuple(d.tolist()) for d in draws}) == 5
    assert a.normal(torch.empty(0), 1.0).shape == (0,)
    assert a.normal(torch.empty(3, 5), 1.0).shape == (3, 5)


@pytest.mark.parametrize("secure", [False, True])
def test_manual_seed_does_not_repeat_a_run(secure):
    ends = []
    for _ in range(2):
        torch.manual_seed(0)
        run = train(make(secure=secure))
        ends.append((parameters_of(run)["0.weight"], run.totals()["samples"]))
    assert not torch.allclose(ends[0][0], ends[1][0])


def test_a_run_leaves_the_random_state_of_the_user_alone():
    torch.manual_seed(0)
    want = torch.rand(3)
    torch.manual_seed(0)
    train(make())
    assert torch.equal(torch.rand(3), want)


def test_a_fixed_generator_repeats_a_run_and_says_so():
    runs = [train(make(generator=fixed(seed))) for seed in (1, 1, 2)]
    same, again, other = map(parameters_of, runs)
    assert all(torch.equal(same[name], again[name]) for name in same)
    assert not torch.allclose(same["0.weight"], other["0.weight"])
    assert runs[0].receipt().generator == "a fixed generator, for tests: no privacy"
    assert "for tests: no privacy" in str(runs[0].receipt())


def test_only_a_fixed_generator_is_saved():
    """Whoever has the generator's state can take the noise off."""
    assert make(generator=fixed()).state_dict()["generators"]["noise"] is not None
    for secure in (False, True):
        assert make(secure=secure).state_dict()["generators"] == {"noise": None, "sampling": None}


# All parameters together

FACTORS = (0.7, 3.0, 12.0)  # unit, deviation, divisor


def several() -> dict[str, nn.Parameter]:
    """Parameters of all kinds: some go together, those in float64 and complex ones go by themselves."""
    dtypes = {
        "a": torch.float32, "half": torch.bfloat16, "double": torch.float64, "b": torch.float32, "turned": torch.float32,
        "half too": torch.float16, "complex": torch.complex64, "unused": torch.float32, "empty": torch.float32,
    }  # fmt: skip
    shapes = {"turned": (5, 7), "empty": (0, 3)}
    found = {name: nn.Parameter(torch.zeros(shapes.get(name, (7, 5)), dtype=dtype)) for name, dtype in dtypes.items()}
    found["turned"] = nn.Parameter(torch.zeros(7, 5).T)
    return found


def sums_of(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    wide = {name: noise._wide(p.dtype) for name, p in parameters.items() if name != "unused"}
    sums = {n: torch.randn(parameters[n].shape, dtype=dtype, generator=generator) for n, dtype in wide.items()}
    sums["turned"] = sums["turned"].T.contiguous().T
    sums["b"] = sums["a"]  # two answers of a compiled graph may be one tensor
    return sums


@pytest.mark.usefixtures("together")
def test_parameters_together_are_what_the_kernel_says():
    parameters, source = several(), Fixed(fixed())
    sums = sums_of(parameters)
    before = {name: value.clone() for name, value in sums.items()}
    for offset in range(2):
        found = noisy_gradients(parameters, sums, *FACTORS, source)
        seed = source.state()["counter"][0]
        names = [name for name, p in parameters.items() if noise._wide(p.dtype) == torch.float32]
        assert names == ["a", "half", "b", "turned", "half too", "unused", "empty"]
        want = [torch.full(parameters[name].shape, float("nan")) for name in names]
        kernel.plain([sums.get(name) for name in names], want, *FACTORS, seed, offset)
        for name, value in zip(names, want, strict=True):
            p = parameters[name]
            assert torch.equal(found[name], value.to(p.dtype)), name
            assert found[name].is_contiguous()
            assert found[name].dtype == p.dtype
    assert set(found) == set(parameters)
    assert not torch.equal(found["a"], found["b"])
    assert all(torch.equal(value, before[name]) for name, value in sums.items()), "a sum was written over"
    owned = {value.untyped_storage().data_ptr() for value in sums.values() if value.numel()}
    grads = [value.untyped_storage().data_ptr() for value in found.values() if value.numel()]
    assert not owned & set(grads)
    assert len(set(grads)) == len(grads)


@pytest.mark.usefixtures("together")
@pytest.mark.parametrize(
    ("names", "over"),
    [(["a"], True), (["half", "a"], True), (["a", "turned"], False), (["a", "unused"], False)],
    ids=str,
)
def test_sums_that_are_nobody_elses_are_written_over(names, over):
    """Where each has its numbers in order, and none is missing; the numbers are the same either way."""
    parameters = {name: p for name, p in several().items() if name in names}
    sums = {name: value for name, value in sums_of(several()).items() if name in names}
    want = noisy_gradients(parameters, sums, *FACTORS, Fixed(fixed()))
    copies = {name: value.clone(memory_format=torch.preserve_format) for name, value in sums.items()}
    found = noisy_gradients(parameters, copies, *FACTORS, Fixed(fixed()), own=True)
    assert all(torch.equal(found[name], want[name]) for name in names)
    assert all(value.is_contiguous() for value in found.values())
    assert (found["a"] is copies["a"]) == over
    assert all(torch.equal(copies[name], sums[name]) != over for name in sums)


@pytest.mark.usefixtures("together")
@pytest.mark.parametrize("names", [["a", "b"], ["a", "turned"], ["turned"], ["half"], ["unused", "empty"]], ids=str)
def test_gradients_lie_in_order_however_the_parameters_do(names):
    parameters = {name: p for name, p in several().items() if name in names}
    sums = {name: value for name, value in sums_of(several()).items() if name in names}
    for name, value in noisy_gradients(parameters, sums, 0.7, 0.0, 12.0, Source()).items():
        want = 0.7 * sums[name] / 12.0 if name in sums else torch.zeros(value.shape)
        assert value.is_contiguous()
        torch.testing.assert_close(value, want.to(value.dtype), rtol=1e-2 if "half" in name else 1e-6, atol=1e-7)


@pytest.mark.usefixtures("together")
def test_a_gradient_that_was_kept_is_not_written_over():
    parameters, source = several(), Source()
    kept = noisy_gradients(parameters, sums_of(parameters), *FACTORS, source)
    copies = {name: value.clone() for name, value in kept.items()}
    found = noisy_gradients(parameters, {}, *FACTORS, source)
    assert all(torch.equal(value, copies[name]) for name, value in kept.items())
    assert not any(torch.equal(found[name], kept[name]) for name, p in parameters.items() if p.numel())


@pytest.mark.usefixtures("together")
@pytest.mark.parametrize("source", [Source, Secure])
def test_every_parameter_has_its_sum_under_the_noise(source):
    """Without noise what comes back is the sum, whichever way it went."""
    parameters = several()
    sums = sums_of(parameters)
    found = noisy_gradients(parameters, sums, 0.7, 0.0, 12.0, source())
    for name, p in parameters.items():
        want = 0.7 * sums[name] / 12.0 if name in sums else torch.zeros(p.shape)
        torch.testing.assert_close(found[name], want.to(p.dtype), rtol=1e-2 if "half" in name else 1e-6, atol=1e-7)


def test_a_turn_is_taken_once():
    first, second = Source(), Source()
    turns = [source.turn() for source in (first, second) for _ in range(100)]
    assert len(set(turns)) == 200
    assert [offset for _, offset in turns[:100]] == list(range(100))
    assert len({seed for seed, _ in turns[:100]}) == 1
    assert all(0 <= seed < 1 << 64 for seed, _ in turns)
    assert Secure().turn() is None


def test_a_cpu_goes_as_before():
    source = Source()
    parameters = several()
    noisy_gradients(parameters, {}, *FACTORS, source)
    assert source.label == "torch's generator, seeded by the operating system"
    source.turn()
    assert source.label == "Philox4x32-10, seeded by the operating system"


@pytest.mark.usefixtures("together")
def test_a_fixed_generator_repeats_its_turns_from_its_state():
    source = Fixed(fixed())
    source.turn()
    state = source.state()
    want = [source.turn(), source.turn()]
    other = Fixed(fixed(1))
    other.turn()
    other.restore(state)
    assert [other.turn(), other.turn()] == want
    assert Fixed(fixed()).state()["counter"] is None
    run = train(make(generator=fixed()), 4)
    again = make(generator=fixed(1))
    again.load_state_dict(run.state_dict())
    again.model.load_state_dict(run.model.state_dict())
    ends = [parameters_of(train(one)) for one in (run, again)]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


@pytest.mark.usefixtures("together")
def test_a_state_from_before_there_were_turns_is_restored():
    """And what is drawn for the first time after it is the same as it would have been."""
    source = Fixed(fixed())
    source.normal(torch.empty(3), 1.0)
    state = source.state()
    del state["counter"]
    want = source.turn(), source.normal(torch.empty(3), 1.0)
    other = Fixed(fixed(1))
    other.turn()
    other.restore(state)
    assert other.turn() == want[0]
    assert torch.equal(other.normal(torch.empty(3), 1.0), want[1])


# Sampling

DRAWS = 4000


@pytest.mark.parametrize("source", [Source, Secure])
def test_every_sample_is_drawn_by_itself_at_the_rate(source):
    n, rate = 50, 0.1
    sampler = Poisson(n, rate, source())
    taken = torch.zeros(DRAWS, n)
    for row in taken:
        row[sampler.draw()] = 1.0
    variance = rate * (1 - rate)
    # Each sample's number of draws is binomial, and so is their total.
    counts = (taken.sum(0) - DRAWS * rate) / math.sqrt(DRAWS * variance)
    assert float(counts.square().sum()) <= stats.chi2.isf(FALSE_ALARM, n)
    assert float(counts.abs().max()) <= stats.norm.isf(FALSE_ALARM / 2 / n)
    # Sizes vary as those of independent draws do: of fixed size they would not vary at all.
    sizes = taken.sum(1)
    spread = float((sizes - n * rate).square().mean() / (n * variance))
    assert abs(spread - 1) <= stats.norm.isf(FALSE_ALARM / 2) * math.sqrt(2.2 / DRAWS)
    assert int((sizes == 0).sum()) > 0
    # No two samples, and no two draws, are drawn together more often than by chance.
    unit = (taken - rate) / math.sqrt(variance)
    together = (unit.T @ unit / math.sqrt(DRAWS)).triu(1)
    assert float(together.abs().max()) <= stats.norm.isf(FALSE_ALARM / 2 / (n * (n - 1) / 2))
    assert abs(float((unit[1:] * unit[:-1]).mean())) <= stats.norm.isf(FALSE_ALARM / 2) / math.sqrt(n * (DRAWS - 1))


@pytest.mark.parametrize("source", [Source, Secure])
def test_the_number_of_draws_is_that_of_the_rate(source):
    n, rate, draws = 20_000, 0.1, 500
    sampler = Poisson(n, rate, source())
    total = sum(len(sampler.draw()) for _ in range(draws))
    limit = stats.norm.isf(FALSE_ALARM / 2) * math.sqrt(n * draws * rate * (1 - rate))
    assert limit < 0.005 * n * draws * rate
    assert abs(total - n * draws * rate) <= limit


@pytest.mark.parametrize("source", [Source, Secure])
def test_a_tiny_rate_is_not_rounded(source):
    """Of 24 bits, as float32 has them, a rate of 1e-6 would be 17 / 2^24, 1.3% more, and many numbers would be equal."""
    values = source().uniform(200_000)
    assert values.dtype == torch.float64
    assert len(values.unique()) == len(values)
    assert 0 <= float(values.min()) < 1e-3
    assert 0.999 < float(values.max()) < 1


@pytest.mark.parametrize("at_a_time", [7, 30, 1 << 22])
def test_a_rate_of_one_takes_every_sample(at_a_time, monkeypatch):
    monkeypatch.setattr("eachgrad.private.sampling._AT_A_TIME", at_a_time)
    assert Poisson(N, 1.0, Source()).draw() == list(range(N))


def test_shuffled_batches_take_every_sample_once_in_a_pass():
    sampler = Shuffled(10, 4, Source())
    passes = [[sampler.draw() for _ in range(3)] for _ in range(20)]
    assert all([len(batch) for batch in one] == [4, 4, 2] for one in passes)
    orders = [[i for batch in one for i in batch] for one in passes]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert len(set(map(tuple, orders))) == 20
