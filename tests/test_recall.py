"""Plans: a layout is used again only where it must hold again."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import eachgrad
from eachgrad import passes, recall
from oracle import assert_same, loop, rows

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


def reordered_by_a_matrix(h, order):
    return torch.eye(B)[order] @ h.flatten(1)


MOVED_BY_DATA = {
    "slices by tensors": lambda h, order: torch.cat([h[i : i + 1] for i in torch.tensor(order)]).flatten(1),
    "select by tensors": lambda h, order: torch.stack([h.select(0, int(i)) for i in torch.tensor(order)]).flatten(1),
    "a matrix": reordered_by_a_matrix,
    "a matrix from the right": lambda h, order: (h.flatten(1).mT @ torch.eye(B)[order].mT).mT,
    "a batch of matrices": lambda h, order: torch.bmm(torch.eye(B)[order][None], h.flatten(1)[None])[0],
    "scatter_reduce_": lambda h, order: torch.zeros(B, T * D).scatter_reduce_(
        0, torch.tensor(order)[:, None].expand(B, T * D), h.flatten(1), "sum"
    ),
    "aten.index": lambda h, order: torch.ops.aten.index(h.flatten(1), [torch.tensor(order)]),
}


@pytest.mark.parametrize("move", MOVED_BY_DATA.values(), ids=MOVED_BY_DATA)
def test_rows_that_data_moves_there_and_back(move):
    """In order at first, and not later on: a plan of the first calls would be wrong."""

    def forward(m, x, order=None):
        if order is None:
            return m.b(m.a(x).tanh()).flatten(1)
        back = [order.index(i) for i in range(B)]
        return move(m.b(move(m.a(x).tanh(), order).view(B, T, D)), back)

    model = Net(forward)
    for order in [[0, 1, 2, 3]] * 4 + [[1, 0, 3, 2], [2, 3, 0, 1], [3, 2, 1, 0]]:
        x = torch.randn(B, T, D)
        try:
            found = answer(model, x, order)
        except eachgrad.CaptureError:  # a refusal is no wrong number
            continue
        assert_same(found, truth(model, x), 1e-10)


def test_minus_one_and_minus_two_are_two_numbers():
    """They have the same hash in Python."""
    model = Net(lambda m, x, k: (m.a(x).transpose(0, k) * m.b.bias).transpose(0, k))
    for k in (-1, -1, -1, -1, -2, -2, -1):
        x = torch.randn(B, T, D)
        found = answer(model, x, k)
        assert_same(found, rows(model, squares, (x, k)), 1e-10)
