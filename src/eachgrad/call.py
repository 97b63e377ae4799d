"""call_for_per_sample_grads: PyTorch's own entry point, on the same engine.

The module runs in a graph of its own. What it returns is joined to the caller's graph by one node, the
gate. When the caller's backward reaches the gate, the module's backward runs inside it, and each use's
gradient is turned into per-sample gradients and let go as it arrives.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from eachgrad import checks, lossgraph, scalar
from eachgrad import layout as lay
from eachgrad.blocks import Block
from eachgrad.cover import Solved, accept
from eachgrad.errors import CaptureError
from eachgrad.graph import graph_nodes, named_trainable
from eachgrad.passes import Passes, grads_untouched, marked
from eachgrad.solve import blocks_of, placed
from eachgrad.tape import Tape

# parameter -> the backward that gave it its grad_sample, and the call that backward was for
_delivered: Any = WeakTensorKeyDictionary()


def call_for_per_sample_grads(
    module: nn.Module, *, batch_size: int | None = None, loss_reduction: str = "sum", batch_first: bool = True
) -> Callable[..., Any]:
    """`module`'s forward; after `backward()` every trainable parameter has `grad_sample`, (B, *shape).

    `batch_size` defaults to the size that all tensors among the arguments share in dimension 0 (1 if not
    `batch_first`). With `loss_reduction="mean"` the gradients are those of the summed loss all the same.
    """
    if loss_reduction not in ("sum", "mean"):
        raise RuntimeError(f"Expected loss_reduction argument to be sum or mean, got {loss_reduction!r}")
    if not isinstance(module, nn.Module):
        raise RuntimeError(f"Module passed must be nn.Module, got {type(module).__name__}")
    if batch_size is not None and (not isinstance(batch_size, int) or isinstance(batch_size, bool)):
        raise RuntimeError(f"Batch size passed must be None or an integer, got {type(batch_size).__name__}")
    if batch_size is not None and batch_size < 1:
        raise RuntimeError(f"Batch size must be positive, got {batch_size}")
    _check_fresh(module)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        _check_fresh(module)
        batch_dim = 0 if batch_first else 1
        B = batch_size if batch_size is not None else _batch_size((args, kwargs), batch_dim)
        if not torch.is_grad_enabled():
            return module(*args, **kwargs)
        return _call(module, args, kwargs, B, batch_dim, loss_reduction)

    return wrapper


def _check_fresh(module: nn.Module) -> None:
    for name, p in named_trainable(module).items():
        if getattr(p, "_post_accumulate_grad_hooks", None):
            raise CaptureError(
                f"parameter {name!r} has a hook that runs when its gradient arrives: remove it, and apply it to grad_sample"
            )
        if getattr(p, "grad_sample", None) is not None:
            raise RuntimeError(
                f"parameter {name!r} has a grad_sample already: adding to it would be incorrect for multiple calls. "
                "Set it to None once it has been used."
            )


def _batch_size(arguments: Any, batch_dim: int) -> int:
    leaves = _leaves(arguments)
    packed = [v for v in leaves if isinstance(v, PackedSequence)]
    if packed:
        return int(packed[0].batch_sizes[0])
    sizes = [t.shape[batch_dim] for t in leaves if isinstance(t, Tensor) and t.ndim > batch_dim]
    if not sizes:
        raise RuntimeError(
            "ExpandedWeights cannot compute the batch size from the inputs: no tensor among them has a batch "
            "dimension. Pass batch_size."
        )
    for size in sizes:
        if size != sizes[0]:
            raise RuntimeError(
                "ExpandedWeights needs one batch size: found at least one input with batch size "
                f"{sizes[0]} and one with batch size {size}. Pass batch_size."
            )
    if sizes[0] == 0:
        raise RuntimeError("Batch size must be positive, but the inputs are an empty batch: skip such batches")
    return sizes[0]


def _call(module: nn.Module, args: tuple, kwargs: dict, B: int, batch_dim: int, reduction: str) -> Any:
    outer: dict[int, Tensor] = {}
    inner: dict[int, Tensor] = {}

    def enter(t: Tensor) -> Tensor:
        if not t.requires_grad:
            return t
        outer[id(t)] = t
        return inner.setdefault(id(t), t.detach().requires_grad_())

    args, kwargs = _map(enter, (args, kwargs))
    with Tape(module, B, batch_dim, False) as tape:
        output = module(*args, **kwargs)
    outputs = list({id(o.tensor): o for o in scalar.outputs_of(output, B, batch_dim)}.values())
    _check_outputs(outputs, output, B, batch_dim)
    if not outputs:
        return output
    checks.check_places(tape.recorder, outputs)
    call = _Call(tape, outputs, list(inner.values()), B, batch_dim, reduction)
    # The sentinel is asked for by a full backward alone, an alias of a parameter only by name.
    sentinel = torch.zeros((), requires_grad=True)
    parameters = [p.view_as(p) for p in named_trainable(module).values()]
    joined = _Gate.apply(call, sentinel, *outer.values(), *parameters)
    new = {id(o.tensor): t for o, t in zip(outputs, joined, strict=True)}
    return _map(lambda t: new.get(id(t), t), output)


def _check_outputs(outputs: list[scalar.Output], output: Any, B: int, batch_dim: int) -> None:
    if not outputs and any(isinstance(t, Tensor) and t.requires_grad for t in _leaves(output)):
        raise CaptureError(
            "the module returns a single number, in which samples cannot be told apart: return one loss per sample, "
            "or use eachgrad.record"
        )
    along = [{p.dim for p in o.places if isinstance(p, lay.Along)} for o in outputs]
    if outputs and not any(batch_dim in dims or 0 in dims for dims in along):
        shapes = ", ".join(str(tuple(o.tensor.shape)) for o in outputs)
        raise RuntimeError(
            f"Expected ExpandedWeights to have batch size matching input: the outputs {shapes} hold no {B} samples "
            f"along dimension {batch_dim}. Return one row per sample, or pass batch_size and batch_first as they are."
        )


class _Gate(torch.autograd.Function):
    """The module's outputs, and in the backward everything that is to be done."""

    @staticmethod
    def forward(ctx: Any, call: _Call, sentinel: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        # Copies: the module's graph may need its outputs unchanged.
        return tuple(o.tensor.detach().clone() for o in call.outputs)

    @staticmethod
    def backward(ctx: Any, *v: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        call = ctx.call
        nodes = [node for node, _ in ctx.next_functions]
        full = _is_full_backward(nodes[0])
        aliases = nodes[1 + len(call.inputs) :]
        if not full and any(torch._C._will_engine_execute_node(node) for node in aliases if node is not None):
            raise RuntimeError(
                "per-sample gradients are delivered by backward(), as grad_sample; asking torch.autograd.grad for the "
                "parameters of a module called by call_for_per_sample_grads is not supported. Call backward() on the loss."
            )
        if torch.is_grad_enabled():
            raise RuntimeError(
                "per-sample gradients by call_for_per_sample_grads cannot be differentiated again: call backward without "
                "create_graph, or use eachgrad.record(module, create_graph=True)"
            )
        if call.freed:
            raise RuntimeError("a second backward through the same call: pass retain_graph=True to the first one")
        keep = torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore[reportAttributeAccessIssue]
        _check_loss(ctx, call, v)
        grads = call.backward(v, full)
        if not keep:
            call.free()
        return None, None, *grads, *[None] * len(aliases)


def _is_full_backward(leaf: Any) -> bool:
    """Whether this is backward() without `inputs`, and not torch.autograd.grad."""
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # what the engine answers about a leaf during torch.autograd.grad
        return False


def _check_loss(gate: Any, call: _Call, v: tuple[Tensor, ...]) -> None:
    """Read the caller's loss as far as its graph can still be read."""
    starts = {(gate, n): checks.place_state(o.places) for n, o in enumerate(call.outputs)}
    zero_rows = any(bool((x.flatten(1) == 0).all(1).any()) for x in v if x.ndim > 1)
    for root in _roots_of_this_backward():
        if gate in set(graph_nodes([root.grad_fn])):
            lossgraph.check(root.grad_fn, starts, call.reduction, call.B, zero_rows, measured=False)


def _roots_of_this_backward() -> list[Tensor]:
    """The tensors whose backward is running, found on the stack of whichever thread started it."""
    stacks = [sys._getframe(), *sys._current_frames().values()]
    for frame in stacks:
        while frame is not None:
            if frame.f_code.co_name == "_engine_run_backward":
                roots = frame.f_locals.get("t_outputs", ())
                return [t for t in roots if isinstance(t, Tensor)]
            frame = frame.f_back
    return []


@dataclass
class _Call:
    """One call of the module, waiting for its backward."""

    tape: Tape
    outputs: list[scalar.Output]
    inputs: list[Tensor]  # the leaves that stand for the caller's tensors inside
    B: int
    batch_dim: int
    reduction: str
    freed: bool = False
    sums: dict[str, Tensor] = field(default_factory=dict)

    def backward(self, v: tuple[Tensor, ...], full: bool) -> list[Tensor | None]:
        """Give every parameter its grad_sample, if asked to; the caller's tensors get their gradients."""
        tensors = [o.tensor for o in self.outputs]
        self.sums.clear()
        if not full:
            return list(torch.autograd.grad(tensors, self.inputs, v, retain_graph=True, allow_unused=True))
        passes = Passes(self.tape.recorder, tensors)
        with grads_untouched([*self.inputs, *self.tape.recorder.leaves]):
            held = self._stream(passes, tensors, v)
            grads = [t.grad for t in self.inputs]
        if held is None:
            self.sums.clear()
            plain = passes.run(tensors, list(v))
            held = scalar.settle(passes, self.outputs, v, plain, self.tape.inputs, self.B, self.batch_dim)
        recorder = self.tape.recorder
        self._add(blocks_of(recorder, accept(recorder, held, tensors), self.B))
        checks.check_statistics(self.tape.recorder, self.batch_dim, tensors, self.B)
        self._deliver()
        return grads

    def free(self) -> None:
        self.freed = True
        self.outputs, self.inputs = [], []
        self.tape.recorder.uses.clear()

    def _stream(self, passes: Passes, tensors: list[Tensor], v: tuple[Tensor, ...]) -> list[Solved] | None:
        """Use by use as the gradients arrive; those that wait for others come back.

        None if the declared placement of the samples does not fit, so that others have to be tried.
        """
        recorder, held, fits = self.tape.recorder, [], True
        places = [o.places[0] for o in self.outputs if o.places]
        declared = all(
            bool(o.places) and (len(o.places) == 1 or scalar.is_declared(o.places[0], self.batch_dim))
            for o in self.outputs
        )
        if not declared:
            passes.stream(tensors, list(v), lambda n, g: None)
            return None
        evidence = marked(passes, tensors, scalar.marker(tensors, v, places), self.B)

        def arrived(n: int, g: Tensor) -> None:
            nonlocal fits
            if not g.numel():
                return
            use = recorder.uses[n]
            item = Solved(use, g, placed(evidence, n, g, use))
            evidence.forget(n)
            if not use.strong or use.aliases or use.ways is not None:
                held.append(item)
            elif not scalar.plausible([item], self.tape.inputs, self.batch_dim, self.B):
                fits = False
            elif fits:
                wanted = {id(s) for s in item.use.sources}
                self._add(blocks_of(recorder, [(item, wanted)], self.B))

        passes.stream(tensors, list(v), arrived)
        return held if fits else None

    def _add(self, blocks: dict[str, Block]) -> None:
        for name, block in blocks.items():
            value = block.dense()
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def _deliver(self) -> None:
        this = (torch._C._current_graph_task_id(), id(self))
        scale = self.B if self.reduction == "mean" else 1
        for name, p in named_trainable(self.tape.model).items():
            value = self.sums.pop(name, None)
            value = p.detach().new_zeros((self.B, *p.shape)) if value is None else (value * scale).to(p.dtype)
            old = getattr(p, "grad_sample", None)
            if old is not None:
                before = _delivered.get(p, (None, None))
                if before[0] != this[0] and before[1] != this[1]:
                    raise RuntimeError(
                        f"parameter {name!r} has the grad_sample of another backward: adding to it would be incorrect "
                        "for multiple calls. Set it to None once it has been used."
                    )
                value = old + value
            p.grad_sample = value  # type: ignore[attr-defined]
            _delivered[p] = this


def _map(f: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`f` on every tensor in nested containers, packed sequences and plain objects that hold tensors."""

    def leaf(item: Any) -> Any:
        if isinstance(item, Tensor):
            return f(item)
        if isinstance(item, PackedSequence):
            return PackedSequence(f(item.data), item.batch_sizes, item.sorted_indices, item.unsorted_indices)
        held = {k: t for k, t in getattr(item, "__dict__", {}).items() if isinstance(t, Tensor)}
        new = {k: f(t) for k, t in held.items()}
        if isinstance(item, nn.Module) or all(new[k] is held[k] for k in held):
            return item
        changed = copy.copy(item)
        changed.__dict__.update(new)
        return changed

    return tree_map(leaf, value, is_leaf=lambda item: isinstance(item, PackedSequence))


def _leaves(value: Any) -> list[Any]:
    found: list[Any] = []
    tree_map(found.append, value, is_leaf=lambda item: isinstance(item, PackedSequence))
    return found
