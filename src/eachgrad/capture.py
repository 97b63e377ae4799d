"""The mode that watches a forward: which parameter meets the batch, in which op, with which arguments.

A tensor is one of four things here:
- a parameter, or derived from parameters and constants alone (a *carrier*: weight norm, W.T, a table of
  positions): ops on carriers run as they are and keep their graph to the parameters;
- certainly of the batch (*strong*): computed from the model's first input;
- possibly of the batch (*weak*): everything else of a size that B samples could have;
- a constant.

Where a carrier meets a strong tensor, it is detached, the op is recorded as a *use*, and the use's output
is tapped: its gradient is asked for later. Where a carrier meets only weak tensors, the op is recorded as
a candidate and stays attached; the gradients decide afterwards whether its output has samples of its own.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_map

from eachgrad import mixing
from eachgrad.errors import CaptureError, UnsupportedOp
from eachgrad.rules import BROADCAST, COMPOSITES, RULES, Rule
from eachgrad.rules.broadcast import IN_PLACE
from eachgrad.rules.recurrent import bare, meet, use_at
from eachgrad.rules.registry import as_called

Node = Any  # torch.autograd.graph.Node


@dataclass(eq=False)
class Use:
    """One op in which parameters, or tensors derived from them, meet the batch."""

    op: Callable
    rule: Rule
    args: tuple
    kwargs: dict
    sources: tuple[Tensor, ...]
    tap: Tensor  # the op's output: its gradient decides everything
    strong: bool
    where: str
    ops_since: tuple[str, ...]  # what ran between the use before this one and this one
    aliases: tuple[Tensor, ...] = ()  # the sources as the op saw them, where it stayed attached
    samples: frozenset[int] = frozenset()  # ids of the arguments that are, or may be, of the batch
    versions: tuple[tuple[Tensor, int], ...] = field(default=(), repr=False)
    source_versions: tuple[tuple[Tensor, int], ...] = field(default=(), repr=False)
    autocast: tuple[str, torch.dtype] | None = None

    @property
    def name(self) -> str:
        return op_name(self.op)

    def check_sources(self) -> None:
        """To be called where the values of the parameters are used, and not their shapes alone."""
        for source, version in self.source_versions:
            if source._version != version:
                raise CaptureError(
                    f"a parameter used by {self.name} at {self.where} was changed in place between the forward and "
                    "the backward; update parameters after the gradients have been computed"
                )

    def check_versions(self) -> None:
        for tensor, version in self.versions:
            if not tensor.is_inference() and tensor._version != version:
                raise CaptureError(
                    f"an input of {self.name} at {self.where} was changed in place after it had been recorded; "
                    "use the out-of-place form of that op, or clone the tensor first"
                )


class Recorder(TorchFunctionMode):
    """Records every use of `parameters` while it is active, and leaves the results as they are."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        constants: Sequence[Tensor] = (),
        batch_size: int | None = None,
        attach: bool = False,
    ):
        super().__init__()
        self.tensors = list(parameters.values())
        self.parameters = {id(p): name for name, p in parameters.items()}
        self.constants = {id(t) for t in constants}
        self.batch_size = batch_size
        self.attach = attach  # keep strong uses attached too, so that a plain gradient can be taken
        self.uses: list[Use] = []
        self.paused = False  # let everything pass: the library itself is at work
        self.replaying = False  # a checkpoint runs its forward again: do the same, record nothing
        self.on_recompute: Callable[[Use], None] | None = None  # a reentrant one: hand each use over
        self.alias_nodes: dict[Node, Use] = {}
        self.tap_nodes: set[Node] = set()
        self.without_rule: dict[str, str] = {}  # parameter -> op it met that has no rule
        self._strong: dict[int, ref] = {}
        self._tags: dict[int, tuple[ref, mixing.Tag]] = {}
        self._carriers: dict[int, tuple[ref, int, str | None]] = {}
        self._loose: dict[int, Tensor] = {}
        self._ops: list[str] = []

    # What a tensor is

    def mark_strong(self, value: Any) -> None:
        for t in tensors_in(value):
            key = id(t)
            self._strong[key] = ref(t, lambda _, key=key, table=self._strong: table.pop(key, None))

    def tag(self, t: Tensor) -> mixing.Tag:
        """The dimension along which the samples of `t` lie, "mixed", or None where it is not known."""
        found = self._tags.get(id(t))
        return found[1] if found is not None and found[0]() is t else None

    def set_tag(self, value: Any, tag: mixing.Tag) -> None:
        for t in tensors_in(value):
            self._tags[id(t)] = (ref(t), tag)

    def _follow(self, func: Callable, args: tuple, kwargs: dict, out: Any) -> None:
        tagged = [(t, tag) for t in tensors_in((args, kwargs)) if (tag := self.tag(t)) is not None]
        if tagged:
            self.set_tag(out, mixing.follow(func, args, kwargs, out, tagged))
            if func is torch.Tensor.__setitem__ and any(tag == "mixed" for _, tag in tagged):
                self.set_tag(args[0], "mixed")

    def is_strong(self, t: Tensor) -> bool:
        found = self._strong.get(id(t))
        return found is not None and found() is t

    def may_have_samples(self, t: Tensor) -> bool:
        """Whether `t`, of which nothing is known, may hold samples: it is no number and no buffer."""
        return t.ndim > 0 and id(t) not in self.constants

    def carrier(self, t: Tensor) -> str | None:
        """'pure' or 'impure' for a tensor that carries parameters, None for any other.

        An impure one has passed a candidate use, which may already account for it.
        """
        if not t.requires_grad:
            return None
        if id(t) in self.parameters:
            return "pure"
        if t.grad_fn is None:
            return None
        known = self._carriers.get(id(t))
        if known is not None and known[0]() is t and known[1] == t._version:
            return known[2]
        found = self._trace(t)
        self._carriers[id(t)] = (ref(t), t._version, found)
        return found

    def _trace(self, t: Tensor) -> str | None:
        kind = None
        for node in graph_nodes([t.grad_fn]):
            if node in self.tap_nodes:
                self.mark_strong(t)
                return None
            if node in self.alias_nodes:
                kind = "impure"
            elif kind is None and id(getattr(node, "variable", None)) in self.parameters:
                kind = "pure"
        return kind

    # The mode

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverloadPacket):
            func = as_called(func)
        found = [] if self.paused else tensors_in((args, kwargs))
        if not found or func in _PASSIVE:
            return func(*args, **kwargs)
        if not torch.is_grad_enabled():
            return self._passed(func, args, kwargs, any(self.is_strong(t) for t in found))
        carriers: list[tuple[Tensor, str]] = []
        strong = False
        for t in found:
            if self.is_strong(t):
                strong = True
            elif (kind := self.carrier(t)) is not None:
                carriers.append((t, kind))
            elif self.is_strong(t) or (self.on_recompute is not None and t.requires_grad):
                strong = True
        if func in _DERIVATIVES:
            self._refuse_derivative(func, args, kwargs)
        if func is use_at:
            return self._use_at(*args)
        if func is bare:
            return self._bare(args[0]) if carriers else args[0]
        if func is meet:
            return self._expanded(args[0], args[0].shape, True) if carriers else args[0]
        self._refuse_mixing(func, args, kwargs)
        if not carriers:
            return self._passed(func, args, kwargs, strong)
        pure = {id(t) for t, kind in carriers if kind == "pure"}
        impure = any(kind == "impure" for _, kind in carriers)
        weak = not strong and (impure or any(id(t) not in pure and self.may_have_samples(t) for t in found))
        if func in _EXPANDING:
            weak = weak or not strong
        if not strong:
            carriers = [(t, kind) for t, kind in carriers if kind == "pure"]
        if not carriers or not (strong or weak):
            return self._passed(func, args, kwargs, strong)
        out = self._met(func, args, kwargs, [t for t, _ in carriers], strong)
        if out is not NotImplemented:
            if strong:
                self.mark_strong(out)
            self._follow(func, args, kwargs, out)
            return out
        out = self._passed(func, args, kwargs, strong)
        refused = [t for t, kind in carriers if kind == "pure"]
        if strong and refused and _depends(out, refused):
            self._refuse(func, refused[0])
        for t, _ in carriers:
            self.without_rule.update(dict.fromkeys(self.names_of(t), f"{op_name(func)} at {call_site()}"))
        return out

    def _passed(self, func: Callable, args: tuple, kwargs: dict, strong: bool) -> Any:
        out = func(*args, **kwargs)
        if func is torch.Tensor.__iter__:
            out = list(out)
            if strong:
                self.mark_strong(out)
            return iter(out)
        self._follow(func, args, kwargs, out)
        if strong:
            self._ops.append(getattr(func, "__name__", ""))
            self.mark_strong(out)
            if func is torch.Tensor.__setitem__ or "out" in kwargs:
                self.mark_strong((args[0], kwargs.get("out")))
        return out

    def _met(self, func: Callable, args: tuple, kwargs: dict, sources: list[Tensor], strong: bool) -> Any:
        """The op's result with its uses recorded, or NotImplemented where nothing is known about it."""
        changed = args[0] if func in IN_PLACE or func is torch.Tensor.masked_fill_ else None
        if not strong and any(changed is t for t in sources):
            return NotImplemented  # a carrier that is changed in place by constants, most likely
        if func in COMPOSITES:
            with self:
                out = COMPOSITES[func](*args, **kwargs)
            if out is not NotImplemented:
                return out
        if func in BROADCAST:
            return self._broadcast(func, args, kwargs, sources, strong)
        if func is torch.Tensor.__setitem__:
            target, index, value = args
            with torch.no_grad():
                shape = target[index].shape
            value = value.reshape(value.shape[max(0, value.ndim - len(shape)) :])
            func(target, index, self._expanded(value, shape, strong))
            if strong:
                self.mark_strong(target)
            return None
        if func in RULES:
            return self._record(func, args, kwargs, sources, strong)
        if not _can_be_opened(func):
            return NotImplemented
        with self:
            return opened(func)(*args, **kwargs)

    def _broadcast(self, func: Callable, args: tuple, kwargs: dict, sources: list[Tensor], strong: bool) -> Any:
        """The op with each source expanded to the output's shape, where its gradient can be taken."""
        shape = _broadcast_shape(func, args, kwargs)
        target = args[0] if func in IN_PLACE else None
        if func is torch.Tensor.copy_:
            sources = [t for t in sources if t is not target]
        spread = {id(t): self._expanded(t, shape, strong) for t in sources}
        new_args, new_kwargs = _replace((args, kwargs), spread)
        if target is None or id(target) not in spread:
            return func(*new_args, **new_kwargs)
        # A carrier is changed in place: compute apart, then overwrite it.
        plain = IN_PLACE[func]
        return NotImplemented if plain is None else target.copy_(plain(*new_args, **new_kwargs))

    def _expanded(self, t: Tensor, shape: torch.Size, strong: bool) -> Tensor:
        return self._record(torch.Tensor.expand, (t, tuple(shape)), {}, [t], strong)

    def _record(self, func: Callable, args: tuple, kwargs: dict, sources: list[Tensor], strong: bool) -> Tensor:
        if torch._C._functorch.peek_interpreter_stack() is not None:  # pyright: ignore[reportAttributeAccessIssue]
            raise UnsupportedOp(
                f"parameter {self.names_of(sources[0])[0]!r} is used inside vmap, grad or jvp at {call_site()}: call "
                "the module on the whole batch instead"
            )
        originals = {id(t): t for t in sources}
        seen, aliases, stable = {}, [], {}
        for key, t in originals.items():
            if strong and not self.attach and self.carrier(t) == "pure":
                seen[key] = t.detach()
            else:
                # A view is fine for a leaf, which no op may change, and lets sparse gradients through.
                seen[key] = torch.ops.aten.alias(t) if key in self.parameters else _same(t)
                aliases.append(seen[key])
            # A derived tensor may be changed in place later: keep it as it is derived now.
            stable[key] = t if key in self.parameters else _same(t)
        call_args, call_kwargs = _replace((args, kwargs), seen)
        out = func(*call_args, **call_kwargs)
        if not out.requires_grad:
            out.requires_grad_()
        args, kwargs = _replace((args, kwargs), stable)
        use = self._use(func, args, kwargs, list(stable.values()), out, strong, aliases)
        use.source_versions += tuple(_version(t) for t in originals.values())
        self._add(use)
        return _own_history(out)

    def _use(
        self, func: Callable, args: tuple, kwargs: dict, sources: list[Tensor], tap: Tensor, strong: bool,
        aliases: list[Tensor],
    ) -> Use:  # fmt: skip
        own = {id(t) for t in sources}
        others = [t for t in tensors_in((args, kwargs)) if id(t) not in own]
        return Use(
            op=func,
            rule=RULES[func],
            args=args,
            kwargs=kwargs,
            sources=tuple(sources),
            tap=tap,
            strong=strong,
            where=call_site(),
            ops_since=self.ops_so_far,
            aliases=tuple(aliases),
            samples=frozenset(id(t) for t in others if self.is_strong(t) or not strong),
            versions=tuple(_version(t) for t in others if not isinstance(t, nn.Parameter)),
            source_versions=tuple(_version(t) for t in tensors_in((args, kwargs)) if isinstance(t, nn.Parameter)),
            autocast=_autocast(tap.device.type),
        )

    def _bare(self, weight: Tensor) -> Tensor:
        """A parameter as an op sees it whose use is recorded by `use_at` afterwards."""
        if not self.attach:
            return weight.detach()
        alias = torch.ops.aten.alias(weight)
        self._loose[id(weight)] = alias
        return alias

    def _use_at(self, z: Tensor, op: Callable, *args: Tensor | None) -> None:
        sources = {id(t): t for t in args if t is not None and self.carrier(t) is not None}
        if sources:
            aliases = [self._loose.pop(key) for key in sources if key in self._loose]
            self._add(self._use(op, args, {}, list(sources.values()), z, True, aliases))

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Active during a backward: what a checkpoint runs again must run as it did the first time."""
        before, self.replaying = self.replaying, True
        try:
            with self:
                yield
        finally:
            self.replaying = before

    def _add(self, use: Use) -> None:
        if use.strong:
            self.tap_nodes.add(node_of(use.tap))
        for alias in use.aliases:
            self.alias_nodes[alias.grad_fn] = use
        if self.on_recompute is not None:
            self.on_recompute(use)
        elif not self.replaying:
            self.uses.append(use)
            self._ops.clear()

    @property
    def ops_so_far(self) -> tuple[str, ...]:
        return tuple(self._ops[-40:])

    # Refusals

    def names_of(self, t: Tensor) -> list[str]:
        """The parameters that `t` is, or is derived from."""
        if id(t) in self.parameters:
            return [self.parameters[id(t)]]
        variables = (getattr(node, "variable", None) for node in graph_nodes([node_of(t)]))
        return [self.parameters[id(v)] for v in variables if id(v) in self.parameters]

    def _refuse(self, func: Callable, t: Tensor) -> None:
        names, op = self.names_of(t), op_name(func)
        raise UnsupportedOp(
            f"parameter {names[0]!r} {tuple(t.shape)} is used by {op} at {call_site()}, which has no rule. Write one "
            f"with @eachgrad.rule (docs/add_a_rule.md), or allow the dense route for it with "
            f"eachgrad.rule({op})(eachgrad.via_vmap({op}))."
        )

    def _refuse_derivative(self, func: Callable, args: tuple, kwargs: dict) -> None:
        if kwargs.get("create_graph") or any(args[4:5]) or func is not torch.autograd.grad:
            raise CaptureError(
                f"{op_name(func)} at {call_site()} takes a derivative inside the record block, of which the loss may "
                "depend: parameters are used in its backward, where they cannot be followed. Compute it outside the "
                "block if the loss does not depend on it."
            )

    def _refuse_mixing(self, func: Callable, args: tuple, kwargs: dict) -> None:
        if func not in (F.batch_norm, torch.batch_norm) or self.batch_size == 1:
            return
        training = args[5] if func is torch.batch_norm else RULES[func].bind(args, kwargs)["training"]
        if training:
            raise UnsupportedOp(
                f"batch_norm at {call_site()} is in training mode: it mixes the samples of a batch, so that no "
                "sample has a gradient of its own. Call eval() on it, or use GroupNorm, LayerNorm or InstanceNorm."
            )


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in nested tuples, lists and dicts."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _collect(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, found)


def graph_nodes(roots: list[Node]) -> Iterator[Node]:
    """Every node of the autograd graph below `roots`."""
    seen: set[Node] = set()
    stack = [root for root in roots if root is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        stack.extend(below for below, _ in node.next_functions if below is not None)


def node_of(t: Tensor) -> Node:
    """The node that delivers the gradient of `t`: its own, or its accumulator if it is a leaf."""
    return torch.autograd.graph.get_gradient_edge(t).node


def op_name(func: Callable) -> str:
    return resolve_name(func) or getattr(func, "__qualname__", repr(func))


def call_site() -> str:
    """file:line of the innermost frame that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("torch.", "eachgrad.")):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown place"


def _same(t: Tensor) -> Tensor:
    """`t` by another name, with a node of its own; not a view, so that what happens to `t` later is apart."""
    return torch.ops.aten._unsafe_view(t, t.shape)


def _version(t: Tensor) -> tuple[Tensor, int]:
    return t, 0 if t.is_inference() else t._version


def _depends(out: Any, sources: list[Tensor]) -> bool:
    """Whether a gradient would flow from the output of an op to one of these tensors."""
    wanted = {node_of(t) for t in sources}
    return any(node in wanted for t in tensors_in(out) if t.requires_grad for node in graph_nodes([t.grad_fn]))


def _autocast(device: str) -> tuple[str, torch.dtype] | None:
    return (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None


def _own_history(out: Tensor) -> Tensor:
    """`out` again, as a tensor that may be changed in place without moving the tap."""
    if _saves_its_result(type(out.grad_fn)):
        return out.clone()  # its own op needs the values for its backward
    return _same(out)


@cache
def _saves_its_result(node: type) -> bool:
    return any(name.startswith("_saved_result") for name in dir(node))


def _replace(value: Any, new: dict[int, Tensor]) -> Any:
    return tree_map(lambda t: new.get(id(t), t) if isinstance(t, Tensor) else t, value)


def _broadcast_shape(func: Callable, args: tuple, kwargs: dict) -> torch.Size:
    if func in IN_PLACE:
        return args[0].shape
    return torch.broadcast_shapes(*(t.shape for t in tensors_in((args, kwargs))))


def opened(func: Callable) -> Callable:
    """A Python function of torch that runs its own body, so that the ops inside it are seen one by one.

    Such a function hands itself to the active mode as a whole before anything else; the copy is told that
    there is none.
    """
    assert isinstance(func, types.FunctionType)
    blind = {n: _never for n in func.__globals__ if n.startswith("has_torch_function")}
    scope = func.__globals__ | blind
    copy = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _can_be_opened(func: Callable) -> bool:
    if not isinstance(func, types.FunctionType) or not func.__module__.startswith("torch"):
        return False
    return any(name.startswith("has_torch_function") for name in func.__code__.co_names)


def _never(*_: Any) -> bool:
    return False


# Functions that read something about a tensor, or move no numbers of the batch.
_PASSIVE = {
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.stride, torch.Tensor.is_contiguous,
    torch.Tensor.is_floating_point, torch.is_floating_point, torch.Tensor.__len__, torch.Tensor.get_device,
    torch.Tensor.data_ptr, torch.Tensor.element_size, torch.Tensor.requires_grad_, torch.Tensor.retain_grad,
    torch.Tensor.register_hook, torch.Tensor.__hash__, torch.Tensor.__format__, torch.Tensor.__repr__,
}  # fmt: skip
_ATTRIBUTES = """
shape dtype device layout is_cuda is_nested is_sparse is_quantized is_leaf grad_fn requires_grad ndim names grad is_meta
is_mkldnn is_mps is_xpu itemsize nbytes output_nr _version is_cpu _backward_hooks
""".split()
_PASSIVE |= {getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES if hasattr(torch.Tensor, name)}
_DERIVATIVES = {torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward}
_EXPANDING = {
    torch.Tensor.expand, torch.Tensor.expand_as, torch.broadcast_to, torch.Tensor.broadcast_to, torch.Tensor.repeat,
    torch.tile, torch.Tensor.tile,
}  # fmt: skip


def named_trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
