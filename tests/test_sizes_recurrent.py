"""Recurrent layers in one graph for any size, as a GPU has them: with an op that alone knows how much it keeps."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from eachgrad.rules import recurrence
from test_sizes import asked, assert_right

pytestmark = [
    pytest.mark.usefixtures("double", "fresh_compiler"),
    pytest.mark.filterwarnings("ignore:.*is_fx_tracing will return true:UserWarning"),
]
d, H, T = 6, 5, 9
DRAWN = (9, 9, 9, 13, 12, 3, 9, 27, 1, 8, 10, 13)  # T among them; the 1st, 2nd, 4th and 8th are measured
LAYERS = {
    "LSTM": lambda: nn.LSTM(d, H, num_layers=2, batch_first=True),
    "GRU": lambda: nn.GRU(d, H, batch_first=True, bidirectional=True),
    "RNN": lambda: nn.RNN(d, H, batch_first=True, bias=False),
}


class Tagger(nn.Module):
    def __init__(self, layer: nn.RNNBase):
        super().__init__()
        self.rnn, self.head = layer, nn.Linear(H * (2 if layer.bidirectional else 1), 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


def reserved(B: int) -> int:
    """Bytes that are kept beside what is needed: no line."""
    return B * B // 3 + (7 if B % 4 == 0 else 0)


@pytest.fixture
def like_cudnn(monkeypatch):
    """The op of a CPU as that of a GPU: what it keeps for its backward is bytes, and it alone knows how many."""

    def forward(z, w_hh, b_hh, state, kind, steps):
        found = recurrence._forward_cpu(z, w_hh, b_hh, state, kind, steps)
        count = 1 + len(state)
        widths = [t.shape[1] for t in found[count:]]
        rows = torch.cat(found[count:], 1).flatten().view(torch.uint8)
        reserve = torch.cat([rows, rows.new_zeros(reserved(len(state[0])))])
        return [*found[:count], reserve, z.new_tensor([0.0, *widths])]

    def backward(grads, z, w_hh, b_hh, state, kind, steps, found):
        *own, reserve, packed = found
        widths = [int(n) for n in packed[1:]]
        extra = reserved(len(state[0]))
        assert len(reserve) == len(z) * sum(widths) * z.element_size() + extra
        rows = reserve[: len(reserve) - extra].view(z.dtype).view(len(z), -1)
        kept = [t.contiguous() for t in rows.split(widths, 1)]
        return recurrence._backward_cpu(grads, z, w_hh, b_hh, state, kind, steps, [*own, *kept])

    def kept(kind, steps, B, H, dtype, biased):
        widths = {"lstm": (1, 4, 1, 1), "gru": (1, 3, 1)}.get(kind, (1, 1))
        return steps * B * H * sum(widths) * dtype.itemsize + reserved(B), 1 + len(widths)

    monkeypatch.setattr(recurrence, "_by_cudnn", lambda z: True)
    monkeypatch.setattr(recurrence, "_reserved", kept)
    library = torch.library.Library("eachgrad", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        library.impl("recurrence", forward, "CPU", allow_override=True)
        library.impl("recurrence_backward", backward, "CPU", allow_override=True)
    yield
    library._destroy()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", LAYERS)
def test_what_a_gpu_keeps_is_of_no_known_size(name, backend, like_cudnn):
    torch.manual_seed(0)
    ask = asked(Tagger(LAYERS[name]()), backend=backend)
    for n in DRAWN:
        assert_right(ask, torch.randn(n, T, d))
    assert not ask.reasons()
    (graph,) = ask.graphs
    (step,) = graph.step.values()
    assert {size for size, _ in step.checked} == {9, 12, 8, 10, 13}


@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
@pytest.mark.parametrize("biased", [True, False])
def test_any_number_of_samples_on_a_gpu_that_is_not_there(kind, biased):
    gates, states = recurrence._GATES[kind], 2 if kind == "lstm" else 1
    known = ShapeEnv()
    mode = FakeTensorMode(shape_env=known)
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    B = mode.from_tensor(torch.empty(9, H), source=ConstantSource("x"), symbolic_context=context).shape[0]
    with mode:
        z, w_hh = torch.empty(T * B, gates * H, device="cuda"), torch.empty(gates * H, H, device="cuda")
        state, b_hh = [torch.empty(B, H, device="cuda")] * states, torch.empty(gates * H) if biased else None
        found = torch.ops.eachgrad.recurrence(z, w_hh, b_hh, state, kind, T)
        grads = torch.ops.eachgrad.recurrence_backward(found[: 1 + states], z, w_hh, b_hh, state, kind, T, found)
    assert isinstance(B, torch.SymInt)
    assert len(found) == 3 + states
    assert not known.guards
    assert [tuple(map(str, t.shape)) for t in grads] == [tuple(map(str, t.shape)) for t in (z, *state)]
