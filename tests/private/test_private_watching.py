"""What is looked at in every step: whatever changes between two steps, or in a forward, is seen."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from private_runs import WIDTH, by_hand, fixed, make, network, train
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

from eachgrad.private import PrivacyError, checks
from eachgrad.private.watching import Buffers, Watch, walk

# What a walk sees


class Shared(nn.Module):
    """Modules, parameters and buffers under several names, empty places, and modules that have nothing."""

    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(nn.Linear(3, 3), nn.Identity(), nn.Linear(3, 3, bias=False))
        self.b = self.a
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.a[0].weight
        self.norms = nn.ModuleList([nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False)])
        self.register_module("none", None)
        self.register_buffer("kept", torch.zeros(3))
        self.register_buffer("empty", None)
        self.deep = nn.ModuleDict({"x": nn.ModuleDict({"y": self.a[0]})})
        self.around = nn.ModuleList([self.norms])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "shared": Shared,
    "a leaf": lambda: nn.Linear(3, 3),
    "nothing": nn.Module,
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "scripted inside": lambda: nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Sequential(nn.Linear(3, 3)))),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("name", MODELS)
def test_a_walk_sees_what_torch_lists(name):
    model = MODELS[name]()
    tree = walk(model)
    assert {id(m) for m in tree.modules} == {id(m) for m in model.modules()}
    assert len(tree.modules) == len(list(model.modules()))
    assert tree.kinds == [type(m) for m in tree.modules]
    every = [p for _, p in model.named_parameters(remove_duplicate=False)]
    assert {id(p) for p in tree.parameters} == {id(p) for p in every}
    assert {id(b) for b in tree.buffers.values()} == {id(b) for b in model.buffers()}
    assert tree.is_same(walk(model))


class Other(nn.Linear):
    """Another class of the same look."""


def moved(model: nn.Module) -> None:
    """A parameter goes to the next module under the same name, and one that is empty takes its place."""
    model.a[2].bias = model.a[0].bias
    model.a[0].bias = None


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "a module comes": lambda m: m.a.append(nn.Identity()),
    "a module goes": lambda m: delattr(m, "deep"),
    "a module is replaced": lambda m: setattr(m, "tied", nn.Linear(3, 3)),
    "a module is replaced by another that is there": lambda m: setattr(m, "b", m.tied),
    "a module has another name": lambda m: m._modules.update(c=m._modules.pop("b")),
    "a module has another class": lambda m: setattr(m.tied, "__class__", Other),
    "a parameter comes": lambda m: m.register_parameter("new", nn.Parameter(torch.zeros(2))),
    "a parameter goes": lambda m: setattr(m.tied, "bias", None),
    "a parameter is replaced": lambda m: setattr(m.tied, "bias", nn.Parameter(torch.zeros(3))),
    "a parameter is tied no more": lambda m: setattr(m.tied, "weight", nn.Parameter(torch.zeros(3, 3))),
    "a parameter has another name": lambda m: m.tied._parameters.update(c=m.tied._parameters.pop("bias")),
    "a parameter is elsewhere": moved,
    "two change places": lambda m: m.around._modules.update({"0": m.norms[0]}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_no_change_looks_the_same(name):
    model = Shared()
    before = walk(model)
    CHANGES[name](model)
    assert not walk(model).is_same(before)
    assert walk(model).is_same(walk(model))


def fill(model: nn.Sequential, places: dict[str, object]) -> None:
    """Children, parameters and buffers at places such as m0_w, and nothing else; None is a parameter that is not there."""
    for module in model:
        module._modules.clear(), module._parameters.clear(), module._buffers.clear()
    for place, value in places.items():
        module, name = model[int(place[1])], place[3:]
        if isinstance(value, nn.Module):
            module.add_module(name, value)
        elif value is None or isinstance(value, nn.Parameter):
            module.register_parameter(name, value)
        else:
            module.register_buffer(name, value)


P, X, Y, B = nn.Parameter(torch.zeros(2)), nn.Identity(), nn.Tanh(), torch.zeros(2)
# Of each pair, the names of all modules, the modules and the parameters are the same when they are put one after another.
ALIKE = {
    "in the next module": ({"m0_w": P}, {"m1_w": P}),
    "for a buffer of the next": ({"m0_w": P, "m0_b": B, "m1_c": B, "m1_d": B}, {"m0_w": B, "m0_b": B, "m1_c": P, "m1_d": B}),
    "a child of the next": (
        {"m0_a": X, "m0_b": Y, "m0_p": None, "m1_c": None, "m1_q": None},
        {"m0_a": X, "m0_b": None, "m0_p": None, "m1_c": Y, "m1_q": None},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ALIKE)
def test_what_has_the_same_names_and_parameters_in_other_places_is_another(name):
    model, trees = nn.Sequential(nn.Module(), nn.Module()), []
    for places in ALIKE[name]:
        fill(model, places)
        trees.append(walk(model))
    assert not trees[0].is_same(trees[1])


def test_other_buffers_are_no_other_model():
    model = Shared()
    before = walk(model)
    model.kept = torch.ones(3)
    assert walk(model).is_same(before)


# What a step refuses


def grown(run) -> None:
    run.model.append(nn.Linear(2, 2))


def frozen(run) -> None:
    run.model[0].bias.requires_grad_(False)


def swapped(run) -> None:
    run.model[0].weight = nn.Parameter(run.model[0].weight.detach().clone())


def renamed(run) -> None:
    run.model._modules["other"] = run.model._modules.pop("2")


def untied(run) -> None:
    run.optimizer.param_groups[0]["params"].pop()


def added(run) -> None:
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


def exchanged(run) -> None:
    run.optimizer.param_groups[0]["params"][1] = nn.Parameter(torch.zeros(4))


def another(run) -> None:
    run.optimizer = torch.optim.SGD(run.model[0].parameters(), lr=0.1)


def normed(run) -> None:
    run.model.insert(1, nn.BatchNorm1d(4, affine=False))


def turned(run) -> None:
    run.model[1].__class__ = nn.BatchNorm1d
    run.model[1].track_running_stats = False


REFUSED = {
    grown: "'3.weight', '3.bias' came, went or were replaced",
    frozen: "'0.bias' came, went or were replaced",
    swapped: "'0.weight' came, went or were replaced",
    renamed: "'2.weight', '2.bias', 'other.weight' and 1 more came, went",
    untied: "trainable parameters of the model that the optimizer does not have: '2.bias'",
    added: r"parameter 0 \(3,\) of the optimizer's group 1 is none of the model's",
    exchanged: r"parameter 1 \(4,\) of the optimizer's group 0 is none of the model's",
    another: "that the optimizer does not have: '2.weight', '2.bias'",
    normed: r"'2.weight', '2.bias', '3.weight' and 1 more came, went",
    turned: r"module '1' \(BatchNorm1d\) is a batch norm in training mode",
}


@pytest.mark.parametrize("go", [train, by_hand])
@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_what_changes_between_two_steps_is_refused_every_time(change, go):
    run = train(make(), 2)
    change(run)
    for _ in range(2):
        with pytest.raises(PrivacyError, match=REFUSED[change]):
            go(run)
    assert run.spent == 2


def test_what_was_refused_and_is_put_back_goes_on():
    run = train(make(), 2)
    weight = run.model[0].weight
    swapped(run)
    with pytest.raises(PrivacyError, match=REFUSED[swapped]):
        train(run)
    run.model[0].weight = weight
    assert train(run).spent == 10


def test_a_norm_that_came_with_a_refused_model_is_not_looked_at_in_the_one_before():
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4, affine=False).eval(), nn.Linear(4, 2))
    run = train(make(model), 2)
    norm, model[1] = model[1], nn.BatchNorm1d(4, affine=False)
    with pytest.raises(PrivacyError, match="in training mode"):
        train(run)
    model[1] = norm
    train(run, 2)
    norm.train()
    with pytest.raises(PrivacyError, match="in training mode"):
        train(run)
    assert run.spent == 4


def test_a_module_without_parameters_may_come_and_go():
    run = train(make(), 2)
    run.model.append(nn.Identity())
    train(run, 2)
    del run.model[3]
    assert train(run).spent == 10


def test_what_is_passed_once_is_not_looked_into_again(monkeypatch):
    calls = []
    original = checks.check_unchanged
    monkeypatch.setattr(checks, "check_unchanged", lambda *args: (calls.append(args), original(*args)))
    run = train(make(), 5)
    assert len(calls) == 1
    run.model.append(nn.Identity())
    train(run)
    assert len(calls) == 2


class Listed(nn.Module):
    """Says itself what parameters it has."""

    def __init__(self):
        super().__init__()
        self.inner, self.rest = network(), nn.Linear(2, 2)
        self.register_buffer("kept", torch.zeros(2))
        self.hidden = True

    def named_parameters(self, *args, **kwargs):
        every = super().named_parameters(*args, **kwargs)
        return ((name, p) for name, p in every if not (self.hidden and name.startswith("rest")))

    def parameters(self, recurse=True):
        return (p for _, p in self.named_parameters())

    def forward(self, x):
        return self.inner(x)


def test_a_model_that_lists_its_parameters_itself():
    model = Listed()
    model.inner[0].weight.grad = torch.ones(4, WIDTH)
    run = train(make(model), 3)
    assert len(run.parameters) == 4
    assert not torch.equal(model.inner[0].weight.grad, torch.ones(4, WIDTH))
    model.hidden = False
    with pytest.raises(PrivacyError, match=r"'rest\.weight', 'rest\.bias' came, went"):
        train(run)
    model.hidden = True
    assert train(run).spent == 10


def test_the_gradients_of_all_parameters_are_gone_when_a_step_begins():
    """Those of tied and frozen ones too: an optimizer that is stepped in between does nothing."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))
    model[2].weight = model[0].weight
    model[4].bias.requires_grad_(False)
    run = make(model, batch_size=30)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    next(iter(next(iter(run.loader))))
    assert all(p.grad is None for p in model.parameters())


# What a forward writes


class Writes(nn.Module):
    def __init__(self, write: Callable[[nn.Module, torch.Tensor], object]):
        super().__init__()
        self.fc, self.inner, self.write = nn.Linear(WIDTH, 2), nn.Module(), write
        self.inner.register_buffer("kept", torch.zeros(WIDTH))
        self.inner.register_buffer("later", None)
        self.inner.mean = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        self.inner.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        out = self.fc(x + self.inner.shift)
        with torch.no_grad():
            self.write(self.inner, x.mean(0))
        return out


def frozen_of(value: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(value.detach().clone(), requires_grad=False)


def with_child(module: nn.Module, value: torch.Tensor) -> None:
    module.child = nn.Module()
    module.child.register_buffer("b", value)


WRITTEN: dict[str, tuple[Callable[[nn.Module, torch.Tensor], object], str]] = {
    "in place": (lambda m, value: m.kept.copy_(value), "the buffer 'inner.kept'"),
    "another tensor": (lambda m, value: setattr(m, "kept", value), "the buffer 'inner.kept'"),
    "where there was none": (lambda m, value: setattr(m, "later", value), "the buffer 'inner.later'"),
    "a new buffer": (lambda m, value: m.register_buffer("new", value), "the buffer 'inner.new'"),
    "of a new module": (with_child, "the buffer 'inner.child.b'"),
    "frozen, in place": (lambda m, value: m.mean.copy_(value), "the frozen parameter 'inner.mean'"),
    "frozen, another": (lambda m, value: setattr(m, "mean", frozen_of(value)), "the frozen parameter 'inner.mean'"),
    "frozen, a new one": (lambda m, value: setattr(m, "new", frozen_of(value)), "the frozen parameter 'inner.new'"),
    "trained, in place": (lambda m, value: m.shift.copy_(value), "the parameter 'inner.shift' itself"),
    "trained, other memory": (lambda m, value: m.shift.set_(value.clone()), "the parameter 'inner.shift' itself"),
    "its data, another": (lambda m, value: setattr(m.kept, "data", value), "the buffer 'inner.kept'"),
    "frozen, its data": (lambda m, value: setattr(m.mean, "data", value), "the frozen parameter 'inner.mean'"),
    "trained, its data": (lambda m, value: setattr(m.shift, "data", value), "the parameter 'inner.shift' itself"),
    "data, in place": (lambda m, value: m.kept.data.copy_(value), "the buffer 'inner.kept'"),
    "frozen, data in place": (lambda m, value: m.mean.data[1:].add_(value[1:]), "the frozen parameter 'inner.mean'"),
    "trained, data in place": (lambda m, value: m.shift.data.data.add_(value), "the parameter 'inner.shift' itself"),
    "detached, in place": (lambda m, value: m.shift.detach().add_(value), "the parameter 'inner.shift' itself"),
}  # fmt: skip


UNCHANGED: dict[str, Callable[[nn.Module, torch.Tensor], object]] = {
    "read": lambda m, value: m.shift.data + m.kept.data + m.mean.data,
    "the same in other memory": lambda m, value: [setattr(t, "data", t.data.clone()) for t in (m.shift, m.mean, m.kept)],
    "part of a larger one": lambda m, value: m.shift.set_(torch.stack([m.shift.data, value])[0]),
    "a copy": lambda m, value: m.shift.data.clone().add_(value),
}  # fmt: skip


@pytest.mark.parametrize("go", [train, by_hand])
@pytest.mark.parametrize("name", UNCHANGED)
def test_a_forward_that_leaves_all_numbers_as_they_are_is_no_leak(name, go):
    run = make(Writes(UNCHANGED[name]))
    go(run)
    assert run.spent == 10


@pytest.mark.parametrize("go", [train, by_hand])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_forward_that_keeps_the_samples_is_refused(name, go):
    write, words = WRITTEN[name]
    run = make(Writes(write), batch_size=30)
    with pytest.raises(PrivacyError, match=words):
        go(run)
    assert run.spent == 0
    run.model.write = lambda m, value: None
    with pytest.raises(PrivacyError, match="make the model anew"):  # what was written is still there
        go(run)


@pytest.mark.parametrize("norm", [spectral_norm, parametrizations.spectral_norm], ids=["old", "new"])
def test_a_spectral_norm_that_is_used_in_two_places_is_no_leak(norm):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.near = norm(nn.Linear(WIDTH, WIDTH))
            self.far = nn.ModuleList([nn.ModuleList([self.near])])
            self.out = nn.Linear(WIDTH, 2)

        def forward(self, x):
            return self.out(self.far[0][0](x))

    model = Twice()
    before = [b.clone() for b in model.buffers()]
    assert train(make(model)).spent == 10
    assert any(not torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))


def test_a_buffer_that_is_written_between_two_steps_is_no_leak():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(WIDTH, 2)
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x):
            return self.fc(x) * self.scale

    run = make(Keeps(), generator=fixed())
    for k, batch in enumerate(run.loader):
        run.step(batch)
        run.model.scale = torch.tensor(1.0 + k)
    assert run.spent == 10


def test_a_tensor_at_the_place_of_one_that_is_gone_is_another():
    """Ids are used again once their owners are gone."""
    model = nn.Module()
    model.p = nn.Parameter(torch.zeros(2), requires_grad=False)
    seen = Buffers(model)
    for _ in range(100):
        del model.p
        model.p = nn.Parameter(torch.ones(2), requires_grad=False)
        with pytest.raises(PrivacyError, match="the frozen parameter 'p'"):
            seen.check()


class Unfreezes(nn.Module):
    """Writes samples into a frozen parameter and has it look as if it were trained."""

    def __init__(self):
        super().__init__()
        self.fc, self.stat = nn.Linear(5, 3), nn.Parameter(torch.zeros(5), requires_grad=False)

    def forward(self, x):
        if not self.stat.requires_grad:
            with torch.no_grad():
                self.stat.add_(x.sum(0))
            self.stat.requires_grad_(True)
        return self.fc(x)


class Makes(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 3)

    def forward(self, x):
        self.kept = nn.Parameter(x.detach().sum(0))
        return self.fc(x)


class Freezes(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 3)

    def forward(self, x):
        out = self.fc(x)
        self.fc.bias.requires_grad_(False)
        return out


@pytest.mark.parametrize(
    ("model", "what"), [(Unfreezes, "unfroze the parameter 'stat'"), (Makes, "made the parameter 'kept'"),
                        (Freezes, "froze the parameter 'fc.bias'")],
)  # fmt: skip
def test_a_forward_that_changes_what_is_trained_is_refused(model, what):
    model = model()
    buffers = Buffers(model)
    model(torch.randn(4, 5))
    with pytest.raises(PrivacyError, match=what):
        buffers.check()


class Slots(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_parameter("a", nn.Parameter(torch.randn(5)))
        self.register_parameter("b", None)

    def forward(self, x):
        return x * (self.b if self.a is None else self.a)


def passed(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = Watch(model, checks.trainable(model))
    watch.check(optimizer)
    watch.check(optimizer)
    return watch, optimizer


def test_a_parameter_that_moves_to_an_empty_place_is_noticed():
    model = Slots()
    watch, optimizer = passed(model)
    model.a, model.b = None, model.a
    with pytest.raises(PrivacyError, match="not those of make_private"):
        watch.check(optimizer)


def test_lists_that_are_replaced_later_are_noticed():
    class Net(nn.Linear):
        pass

    for owner in (lambda model: model, type):
        model = Net(3, 2)
        watch, optimizer = passed(model)
        of_torch = nn.Module.named_parameters
        owner(model).named_parameters = lambda *args, **kwargs: iter(())
        try:
            with pytest.raises(PrivacyError, match="not those of make_private"):
                watch.check(optimizer)
        finally:
            del owner(model).named_parameters
        assert type(model).named_parameters is of_torch


def test_an_optimizer_that_is_none_is_noticed():
    watch, optimizer = passed(nn.Linear(3, 2))
    with pytest.raises(TypeError, match=r"optimizer is a torch\.optim\.Optimizer"):
        watch.check(SimpleNamespace(param_groups=optimizer.param_groups))


def test_a_module_with_buffers_of_its_own_kind():
    class Computed(nn.Linear):
        @property
        def _buffers(self):
            return {"size": torch.ones(())}

        @_buffers.setter
        def _buffers(self, value):
            pass

    tree = walk(nn.Sequential(Computed(3, 2)))
    assert len(tree.parameters) == 2
    assert len(tree.buffers) == 1


class Late(nn.Module):
    """Writes when the backward comes by."""

    def __init__(self, how: str):
        super().__init__()
        self.fc, self.how = nn.Linear(WIDTH, 2), how
        self.register_buffer("kept", torch.zeros(2))

    def forward(self, x):
        out, model = self.fc(x), self
        if self.how == "hook":
            out.register_hook(lambda g: [model.kept.copy_(g.sum(0))].clear())
            return out

        class Writing(torch.autograd.Function):
            @staticmethod
            def forward(ctx, out, weight):
                return out.clone()

            @staticmethod
            def backward(ctx, g):
                model.kept.data.copy_(g.sum(0))
                return g, None

        return Writing.apply(out, self.fc.weight if self.how == "function of a parameter" else None)


@pytest.mark.parametrize("go", [train, by_hand])
@pytest.mark.parametrize("how", ["hook", "function", "function of a parameter"])
def test_a_backward_that_keeps_the_samples_is_refused(how, go):
    run = make(Late(how), batch_size=30)
    with pytest.raises(PrivacyError, match="the buffer 'kept'"):
        go(run)
    assert run.spent == 0


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("go", [train, by_hand])
@pytest.mark.parametrize("kind", ["sparse", "nested", "meta"])
def test_buffers_that_lie_in_no_order_are_no_matter(kind, go):
    model = nn.Sequential(nn.Linear(WIDTH, 2))
    made = {
        "sparse": lambda: torch.eye(3).to_sparse_csr(),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "meta": lambda: torch.empty(3, device="meta"),
    }
    model.register_buffer("odd", made[kind]())
    if kind == "meta":
        model.register_forward_pre_hook(lambda module, args: [module.odd.data].clear())
    run = make(model)
    go(run)
    assert run.spent == 10


@pytest.mark.parametrize("go", [train, by_hand])
@pytest.mark.parametrize("name", ["turned", "shorter", "another row"])
def test_other_numbers_of_the_same_memory_are_a_leak(name, go):
    writes = {
        "turned": lambda m, value: setattr(m.square, "data", m.square.detach().t()),
        "shorter": lambda m, value: setattr(m.mean, "data", m.mean.detach()[:2].clone()),
        "another row": lambda m, value: setattr(m.row, "data", m.rows[1]),
    }
    model = Writes(writes[name])
    model.inner.register_buffer("square", torch.randn(WIDTH, WIDTH))
    model.inner.rows = torch.randn(2, 3)
    model.inner.register_buffer("row", model.inner.rows[0])
    with pytest.raises(PrivacyError, match="the forward changed"):
        go(make(model, batch_size=30))
