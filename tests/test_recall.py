"""Plans: a layout is used again only where it must hold again."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import eachgrad
from eachgrad import passes, recall
from oracle import assert_same, loop

B, T, D = 4, 4, 4  # every size is B


pytestmark = pytest.mark.usefixtures("double")


class Net(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.a, self.b, self.run = nn.Linear(D, D), nn.Linear(D, D), forward

    def forward(self, *batch):
        return self.run(self, *batch)


def squares(model, *batch):
    return model(*batch).pow(2).flatten(1).sum(1)


def answer(model, *batch):
    with eachgrad.record(model) as tape:
        losses = squares(model, *batch)
    return tape.backward(losses).dense()


def truth(model, *batch):
    return loop(model, squares, [tuple(t[i : i + 1] for t in batch) for i in range(B)])


@pytest.fixture
def measured(monkeypatch):
    """How many marked passes have been run so far."""
    runs = []
    original = passes.marked
    monkeypatch.setattr("eachgrad.tape.marked", lambda *args: runs.append(1) or original(*args))
    return runs


def test_the_layouts_are_measured_at_calls_that_are_powers_of_two(measured):
    model = Net(lambda m, x: m.b(m.a(x).tanh()))
    counts = []
    for _ in range(9):
        x = torch.randn(B, T, D)
        assert_same(answer(model, x), truth(model, x), 1e-10)
        counts.append(len(measured))
    assert counts == [1, 2, 2, 3, 3, 3, 3, 4, 4]


def test_another_forward_is_measured_anew(measured):
    flip = [False]
    model = Net(lambda m, x: m.b(m.a(x.transpose(0, 1)).tanh()).transpose(0, 1) if flip[0] else m.b(m.a(x).tanh()))
    x = torch.randn(B, T, D)
    for flip[0] in (False, False, False, True, False, True):
        assert_same(answer(model, x), truth(model, x), 1e-10)


def test_a_gradient_of_zeros_leaves_no_plan():
    model = Net(lambda m, x: (m.b(m.a(x.transpose(0, 1)).tanh()) * m.gate).transpose(0, 1))
    model.register_buffer("gate", torch.zeros(()))
    x = torch.randn(B, T, D)
    for gate in (0.0, 0.0, 0.0, 1.0, 1.0, 1.0):
        model.gate.fill_(gate)
        assert_same(answer(model, x), truth(model, x), 1e-10)


def test_rows_moved_by_an_index_leave_no_plan(measured):
    order = [torch.arange(B)]
    model = Net(lambda m, x: m.b(m.a(x[order[0]])[order[0].argsort()]))
    x = torch.randn(B, D)
    for permutation in ([0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3], [3, 0, 2, 1], [1, 0, 3, 2]):
        order[0] = torch.tensor(permutation)
        got = answer(model, x)
        want = loop(nn.Sequential(model.a, model.b), squares, [(x[i : i + 1],) for i in range(B)])
        assert_same(dict(zip(want, got.values(), strict=True)), want, 1e-10)
    assert len(measured) == 5


def test_rows_looked_up_like_an_embedding_leave_no_plan(measured):
    order = [torch.arange(B)]

    def forward(m, x):
        moved = F.embedding(order[0], m.a(x))
        return F.embedding(order[0].argsort(), m.b(moved))

    model, x = Net(forward), torch.randn(B, D)
    want = loop(nn.Sequential(model.a, model.b), squares, [(x[i : i + 1],) for i in range(B)])
    for permutation in ([0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3], [3, 0, 2, 1]):
        order[0] = torch.tensor(permutation)
        assert_same(dict(zip(want, answer(model, x).values(), strict=True)), want, 1e-10)


def test_what_is_not_seen_leaves_no_plan(measured):
    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h):
            return torch.from_numpy(h.numpy() * 2)

        @staticmethod
        def backward(ctx, g):
            return g * 2

    model = Net(lambda m, x: m.b(Hidden.apply(m.a(x))))
    for _ in range(4):
        x = torch.randn(B, D)
        assert_same(answer(model, x), truth(model, x), 1e-10)
    assert len(measured) == 4


def test_a_model_in_training_and_in_eval_has_two_plans(measured):
    model = Net(lambda m, x: m.b(F.dropout(m.a(x), 0.5, m.training)))
    x = torch.randn(B, D)
    for training in (True, False, True, False):
        answer(model.train(training), x)
    assert len(measured) == 4  # first and second call of each
    assert len(recall._plans[model]) == 2


def test_a_plan_that_is_due_is_not_used_before_it_has_been_measured_again():
    """A measurement that ended in a refusal must not leave the old layouts behind."""
    model = Net(lambda m, x: m.b(m.a(x).tanh()))
    for _ in range(3):
        answer(model, torch.randn(B, T, D))
    ((key, plan),) = recall._plans[model].items()
    assert plan.calls == 3
    assert recall.find(model, key) is None  # the fourth: due
    assert recall.find(model, key) is None  # the fifth: nothing has been measured since
    answer(model, torch.randn(B, T, D))
    assert recall.find(model, key) is not None


ORDERS = [[0, 1, 2, 3], [0, 1, 2, 3], [1, 0, 2, 3], [3, 2, 1, 0], [1, 0, 2, 3], [0, 1, 2, 3], [2, 3, 0, 1]]
TAKEN_APART = {
    "unbind": lambda h: h.unbind(0),
    "iterate": list,
    "split": lambda h: [t[0] for t in h.split(1)],
    "chunk": lambda h: [t[0] for t in h.chunk(len(h))],
    "index": lambda h: [h[i] for i in range(len(h))],
    "select": lambda h: [h.select(0, i) for i in range(len(h))],
    "narrow": lambda h: [h.narrow(0, i, 1)[0] for i in range(len(h))],
}


@pytest.mark.parametrize("apart", TAKEN_APART.values(), ids=TAKEN_APART)
def test_rows_that_python_puts_in_another_order(apart):
    """Sorted by length, say: the ops are the same, their arguments are not."""

    def forward(m, x, order=None):
        order = order or list(range(len(x)))
        rows = apart(m.a(x).tanh())
        back = apart(m.b(torch.stack([rows[i] for i in order])))
        return torch.stack([back[order.index(i)] for i in range(len(x))])

    model = Net(forward)
    for order in ORDERS:
        x = torch.randn(B, T, D)
        assert_same(answer(model, x, order), truth(model, x), 1e-10)


def test_losses_that_python_puts_in_another_order():
    """The same ops on the same shapes, and sample i has no longer loss i."""
    model = Net(lambda m, x: m.b(m.a(x).tanh()))
    for order in ORDERS:
        x = torch.randn(B, T, D)
        with eachgrad.record(model) as tape:
            out = model(x)
        losses = out.pow(2).flatten(1).sum(1).unbind(0)
        losses = torch.stack([losses[i] for i in order])
        if order == sorted(order):
            assert_same(tape.backward(losses).dense(), truth(model, x), 1e-10)
        else:
            with pytest.raises(eachgrad.CaptureError, match="depends on the input of another one"):
                tape.backward(losses)
