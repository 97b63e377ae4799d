"""The twenty results that other implementations get silently wrong: right here, or refused with the reason."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import eachgrad
from eachgrad import CaptureError, call_for_per_sample_grads
from oracle import assert_same
from oracle import loop as loop_over

B, T, D = 4, 4, 3  # T == B on purpose


pytestmark = pytest.mark.usefixtures("double")


def loop(model, losses, batch, batch_dim=0):
    return loop_over(model, losses, [tuple(t.narrow(batch_dim, i, 1) for t in batch) for i in range(B)])


def delivered(module):
    found = {name: p.grad_sample for name, p in module.named_parameters() if p.requires_grad}
    for p in module.parameters():
        p.grad_sample = None
    return found


def called(module, *batch, loss=lambda out: out.pow(2).sum(), **options):
    loss(call_for_per_sample_grads(module, **options)(*batch)).backward()
    assert all(p.grad is None for p in module.parameters())
    return delivered(module)


def squares(model, *batch):
    return model(*batch).pow(2).flatten(1).sum(1)


class Wrap(nn.Module):
    """A module made of a function of itself and the batch."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *batch):
        return self.run(self, *batch)


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_01_packed_sequences_with_unsorted_lengths(kind):
    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]

    model = Wrap(forward, rnn=kind(D, 2, batch_first=True))
    x, lengths = torch.randn(B, T, D), torch.tensor([2, 4, 1, 3])
    want = loop(model, squares, (x, lengths))
    assert_same(called(model, x, lengths), want, 1e-10)
    # The packed output itself: its rows are in another order than the samples.
    sequences = [x[i, : lengths[i]] for i in range(B)]
    packed = pack_sequence(sequences, enforce_sorted=False)
    model = Wrap(lambda self, p: self.rnn(p)[0], rnn=model.rnn)
    assert_same(called(model, packed, loss=lambda out: out.data.pow(2).sum()), want, 1e-10)


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_02_dropout_between_recurrent_layers_is_applied(kind):
    model = Wrap(lambda self, x: self.rnn(x)[0], rnn=kind(D, 5, num_layers=2, dropout=0.5, batch_first=True))
    x = torch.randn(B, T, D)
    torch.manual_seed(7)
    plain = torch.autograd.grad(model(x).pow(2).sum(), list(model.parameters()))
    torch.manual_seed(7)
    got = {name: value.sum(0) for name, value in called(model, x).items()}
    assert_same(got, dict(zip(got, plain, strict=True)), 1e-10)


@pytest.mark.parametrize("padding_idx", [1, -2])
def test_03_functional_embedding_with_padding_idx(padding_idx):
    model = Wrap(lambda self, ids: F.embedding(ids, self.w, padding_idx=padding_idx), w=nn.Parameter(torch.randn(5, 3)))
    ids = torch.tensor([[1, 2, 1, 3], [0, 0, 3, 3], [4, 1, 2, 2], [3, 3, 3, 3]])
    got = called(model, ids)
    assert_same(got, loop(model, squares, (ids,)), 1e-10)
    assert not got["w"][:, padding_idx].any()


def test_04_scale_grad_by_freq_counts_within_the_sample():
    model = nn.Embedding(5, 3, scale_grad_by_freq=True)
    ids = torch.tensor([[1, 2, 1, 3], [0, 0, 3, 3], [4, 1, 2, 2], [3, 3, 3, 3]])
    assert_same(called(model, ids), loop(model, squares, (ids,)), 1e-10)


def test_05_instance_norm_with_running_statistics_in_eval():
    model = nn.InstanceNorm1d(D, affine=True, track_running_stats=True)
    model(torch.randn(B, D, 5))
    model.eval()
    x = torch.randn(B, D, 5)
    assert_same(called(model, x), loop(model, squares, (x,)), 1e-10)


def test_06_batch_second_with_layers_that_are_not_recurrent():
    model = nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2))
    x = torch.randn(T, B, D)
    got = called(model, x, batch_first=False)
    losses = lambda m, x: m(x).pow(2).sum((0, 2))  # noqa: E731
    assert_same(got, loop(model, losses, (x,), batch_dim=1), 1e-10)


def test_07_a_tensor_whose_first_size_is_B_by_chance():
    def forward(self, x):
        positions = self.table(torch.arange(x.shape[1]))  # (T, D) with T == B
        return (x + positions).transpose(0, 1).matmul(self.w).transpose(0, 1)

    model = Wrap(forward, table=nn.Embedding(T, D), w=nn.Parameter(torch.randn(D, B)))
    x = torch.randn(B, T, D)
    assert_same(called(model, x), loop(model, squares, (x,)), 1e-10)


@pytest.mark.parametrize("reentrant", [False, True], ids=["08_non_reentrant", "09_reentrant"])
def test_checkpointing(reentrant):
    def forward(self, x):
        return self.out(checkpoint(lambda h: self.mid(h).tanh(), self.first(x), use_reentrant=reentrant))

    model = Wrap(forward, first=nn.Linear(D, D), mid=nn.Linear(D, D), out=nn.Linear(D, D))
    plain = nn.Sequential(model.first, model.mid, nn.Tanh(), model.out)
    x = torch.randn(B, D)
    want = dict(zip(dict(model.named_parameters()), loop(plain, squares, (x,)).values(), strict=True))
    assert_same(called(model, x), want, 1e-10)
    with eachgrad.record(model) as tape:
        losses = squares(model, x)
    assert_same(tape.backward(losses).dense(), want, 1e-10)


def test_10_a_wrapper_called_for_two_batches():
    model = nn.Linear(D, 2)
    run = call_for_per_sample_grads(model)
    run(torch.randn(B, D)).sum().backward()
    with pytest.raises(RuntimeError, match="incorrect for multiple calls"):
        run(torch.randn(B, D))
    model.weight.grad_sample = model.bias.grad_sample = None
    first, second = run(torch.randn(B, D)).sum(), run(torch.randn(B, D)).sum()
    first.backward()
    with pytest.raises(RuntimeError, match="incorrect for multiple calls"):
        second.backward()


def test_11_complex_parameters():
    model = nn.Linear(D, 2, dtype=torch.complex128)
    x = torch.randn(B, T, D, dtype=torch.complex128)
    losses = lambda m, x: m(x).abs().pow(2).flatten(1).sum(1)  # noqa: E731
    got = called(model, x, loss=lambda out: out.abs().pow(2).sum())
    assert_same(got, loop(model, losses, (x,)), 1e-10)


def test_12_an_input_changed_in_place_between_forward_and_backward():
    model, x = nn.Linear(D, 2), torch.randn(B, D)
    loss = call_for_per_sample_grads(model)(x).sum()
    x.add_(1)
    with pytest.raises(CaptureError, match=r"linear.*changed in place"):
        loss.backward()


def test_13_a_second_backward_on_a_freed_graph():
    model = nn.Linear(D, 2)
    loss = call_for_per_sample_grads(model)(torch.randn(B, D)).pow(2).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    model.zero_grad()
    x = torch.randn(B, D)
    with eachgrad.record(model) as tape:
        losses = squares(model, x)
    tape.backward(losses)
    with pytest.raises(CaptureError, match="one backward"):
        tape.backward(losses)


def test_14_a_parameter_reached_through_an_alias():
    def forward(self, x):
        return F.linear(self.layer(x), self.unregistered[0])

    model = Wrap(forward, layer=nn.Linear(D, D))
    model.unregistered = [model.layer.weight]
    x = torch.randn(B, D)
    assert_same(called(model, x), loop(model, squares, (x,)), 1e-10)


def test_15_double_backward_is_refused():
    model = nn.Linear(D, 2)
    loss = call_for_per_sample_grads(model)(torch.randn(B, D)).pow(2).sum()
    with pytest.raises(RuntimeError, match="create_graph"):
        loss.backward(create_graph=True)


@pytest.mark.parametrize("options", [{"ignore_index": 1}, {"weight": torch.tensor([1.0, 2.0, 3.0])}])
def test_16_a_mean_with_ignored_targets_or_class_weights(options):
    model, x, y = nn.Linear(D, 3), torch.randn(B, D), torch.tensor([0, 1, 2, 1])
    options = {k: v.double() if torch.is_tensor(v) else v for k, v in options.items()}
    with pytest.raises(CaptureError, match="ignored targets or weighs classes"):
        called(model, x, loss=lambda out: F.cross_entropy(out, y, **options), loss_reduction="mean")
    with eachgrad.record(model) as tape:
        loss = F.cross_entropy(model(x), y, **options)
    with pytest.raises(CaptureError, match="ignored targets or weighs classes"):
        tape.backward(loss, "mean")


@pytest.mark.parametrize("declared", ["sum", "mean"])
def test_17_a_declared_reduction_that_is_not_the_real_one(declared):
    model, x, y = nn.Linear(D, 3), torch.randn(B, D), torch.tensor([0, 1, 2, 1])
    real = {"sum": "mean", "mean": "sum"}[declared]
    for loss in (
        lambda out: F.cross_entropy(out, y, reduction=real),
        lambda out: F.mse_loss(out, torch.zeros_like(out), reduction=real),
        lambda out: getattr(out.pow(2).sum(1), real)(),
    ):
        with pytest.raises(CaptureError, match=f'loss_reduction="{declared}"'):
            called(model, x, loss=loss, loss_reduction=declared)
        with eachgrad.record(model) as tape:
            value = loss(model(x))
        with pytest.raises(CaptureError, match=f'loss_reduction="{declared}"'):
            tape.backward(value, declared)


def test_18_ops_that_mix_samples():
    x = torch.randn(B, D)
    norm = nn.Sequential(nn.Linear(D, 5), nn.BatchNorm1d(5, affine=False), nn.Linear(5, 2))
    with pytest.raises(eachgrad.UnsupportedOp, match="batch_norm"):
        called(norm, x)
    hidden = Wrap(lambda self, x: self.b((h := self.a(x)) / h.std(0)), a=nn.Linear(D, 5), b=nn.Linear(5, 2))
    with pytest.raises(CaptureError, match=r"a\.weight.*mixes the samples"):
        called(hidden, x)
    model = nn.Linear(D, 3)
    contrast = lambda out: F.cross_entropy(out @ out.T, torch.arange(B), reduction="sum")  # noqa: E731
    with pytest.raises(CaptureError, match="mixes samples"):
        called(model, x, loss=contrast)
    with eachgrad.record(model) as tape:
        loss = contrast(model(x))
    with pytest.raises(CaptureError, match="mixes samples"):
        tape.backward(loss, "sum")
    with eachgrad.record(model) as tape:
        out = model(x)
        losses = F.cross_entropy(out @ out.T, torch.arange(B), reduction="none")
    with pytest.raises(CaptureError, match="'weight'"):
        tape.backward(losses)


def test_19_asking_autograd_grad_for_the_parameters():
    model, x = nn.Linear(D, 2), torch.randn(B, D, requires_grad=True)
    loss = call_for_per_sample_grads(model)(x).pow(2).sum()
    with pytest.raises(RuntimeError, match=r"delivered by backward\(\)"):
        torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    (got,) = torch.autograd.grad(call_for_per_sample_grads(model)(x).pow(2).sum(), x)
    (want,) = torch.autograd.grad(model(x).pow(2).sum(), x)
    torch.testing.assert_close(got, want)


def test_20_conflicting_batch_first_flags():
    # The module is batch_first; the caller says that samples lie along dimension 1. T == B hides it.
    model = Wrap(lambda self, x: self.rnn(x)[0], rnn=nn.LSTM(D, 5, batch_first=True))
    with pytest.raises(CaptureError, match=r"rnn\.weight_ih_l0|told apart"):
        called(model, torch.randn(B, T, D), batch_first=False)
    mixed = Wrap(
        lambda self, x: self.b(self.a(x)[0].transpose(0, 1))[0].transpose(0, 1),
        a=nn.LSTM(D, 5, batch_first=True),
        b=nn.LSTM(5, 2),
    )
    x = torch.randn(B, T, D)
    assert_same(called(mixed, x), loop(mixed, squares, (x,)), 1e-10)
