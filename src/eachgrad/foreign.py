"""What a recording cannot look into: autograd.Functions, ops under vmap, scripted modules, ops without a rule.

Each becomes a use that is differentiated as it stands (pieces.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules import module as module_hooks
from torch.nn.modules._functions import BackwardHookFunction
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import CheckpointFunction

from eachgrad.errors import CaptureError, UnsupportedOp
from eachgrad.functions import Place, op_name
from eachgrad.graph import Node, own_history, replace, source_at, tensors_in
from eachgrad.pieces import FunctionNode, Scripted, Span
from eachgrad.rules import RULES
from eachgrad.rules.registry import DenseRule, Rule
from eachgrad.use import Tap, Use, autocast_of, version_of

if TYPE_CHECKING:
    from eachgrad.capture import Recorder

_functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
_NONE: Any = DenseRule()
_RULE = Rule(_NONE, (), lambda g, arguments: 0)  # asked by nobody: the piece answers
_TRANSPARENT = {
    BackwardHookFunction,
    CheckpointFunction,
}  # known: they pass the batch on, or are followed inside


# autograd.Function: not seen by a mode, but its node says all


def is_function(node: Node) -> bool:
    """Whether this node is the call of an autograd.Function."""
    if not isinstance(node, BackwardCFunction):
        return False
    function: Any = getattr(node, "_forward_cls", None)
    return function not in _TRANSPARENT and not function.__module__.startswith("eachgrad.")


def record_function(recorder: Recorder, node: Node) -> None:
    """A use for each output of this call, if parameters are among its arguments.

    Whether the batch is among them too can only be told where it has a gradient. If not, the gradients decide: the use
    counts if its output has samples of its own.
    """
    arguments = [k for k, needed in enumerate(node.needs_input_grad) if needed]
    edges = [(below, output) for below, output in node.next_functions if below is not None]
    kinds = [recorder.tensors.kind(below) for below, _ in edges]
    sources = tuple(source_at(*edge) for edge, kind in zip(edges, kinds, strict=True) if kind is not None)
    if not sources:
        return
    places = tuple(k for k, kind in zip(arguments, kinds, strict=True) if kind is not None)
    shapes = tuple((source.shape, source.dtype) for source in sources)
    ways = tuple(below for (below, _), kind in zip(edges, kinds, strict=True) if kind is None)
    strong = bool(ways) or node in recorder.tensors.certain
    function: Any = node._forward_cls
    code, here = function.forward.__code__, recorder.place()
    # Nobody sees the call. Where its result is met in a forward, that module is named too.
    where = Place(f"{code.co_filename}:{code.co_firstlineno}", here.module, here.root)
    outputs = tuple((torch.Size(m.shape), m.dtype, m.device) for m in node._input_metadata)
    # What its backward computes again is its own business: there parameters stay attached.
    node.register_prehook(partial(_begins, ref(recorder)))
    node.register_hook(partial(_ends, ref(recorder)))
    for output, like in enumerate(outputs):
        tap = Tap(GradientEdge(node, output), *like)
        recorder.add(
            Use(
                function, _RULE, (), {}, sources, tap, strong, where,
                recorder.ops_so_far, ways=ways,
                piece=FunctionNode(node, output, places, shapes, outputs, partial(_unseen, ref(recorder))),
                parameters=recorder.naming(sources),
            )
        )  # fmt: skip
    recorder.tensors.opaque = True


@contextmanager
def _unseen(recorder: ref[Recorder]) -> Iterator[None]:
    """The backward of a Function runs: its ops are not recorded."""
    found = recorder()
    if found is None:
        yield
        return
    before, found.unseen = found.unseen, True
    try:
        yield
    finally:
        found.unseen = before


def _begins(recorder: ref[Recorder], gradients: Any) -> None:
    if (found := recorder()) is not None:
        found.unseen = True


def _ends(recorder: ref[Recorder], inputs: Any, gradients: Any) -> None:
    if (found := recorder()) is not None:
        found.unseen = False


# An op by its part of the graph


def record_span(
    recorder: Recorder, func: Callable, args: tuple, kwargs: dict, sources: list[Tensor], strong: bool
) -> Any:
    """Run an op that has no rule, with a use for each of its outputs; NotImplemented where nothing comes of it."""
    aliases = {id(t): torch.ops.aten.alias(t) for t in sources}
    call_args, call_kwargs = replace((args, kwargs), aliases)
    out = func(*call_args, **call_kwargs)
    loops = recorder.fallback == "loop"
    if isinstance(out, Tensor):
        return _tapped(recorder, func, out, sources, aliases, strong, loops)
    if isinstance(out, (tuple, list)):
        parts = [
            _tapped(recorder, func, t, sources, aliases, strong, loops) if isinstance(t, Tensor) else t for t in out
        ]
        return type(out)(parts) if type(out) in (tuple, list) else tuple(parts)
    return out


def _tapped(
    recorder: Recorder, func: Callable, out: Tensor, sources: list[Tensor], aliases: dict[int, Tensor], strong: bool,
    loops: bool,
) -> Tensor:  # fmt: skip
    if not out.requires_grad:
        return out
    _add_span(recorder, func, out, sources, aliases, strong, loops)
    return own_history(out)


def _add_span(
    recorder: Recorder, func: Callable, out: Tensor, sources: list[Tensor], aliases: dict[int, Tensor], strong: bool,
    loops: bool,
) -> None:  # fmt: skip
    ends = tuple(aliases[id(t)] for t in sources)
    recorder.add(
        Use(
            func, _RULE, (), {}, tuple(sources), Tap.at(out), strong, recorder.place(), recorder.ops_so_far, ends,
            piece=Span(get_gradient_edge(out), ends, loops), parameters=recorder.naming(sources),
        )
    )  # fmt: skip
    recorder.tensors.opaque = True


# vmap inside the model


def is_inside_transform() -> bool:
    return _functorch.peek_interpreter_stack() is not None


def record_inside(recorder: Recorder, func: Callable, args: tuple, kwargs: dict, found: list[Tensor]) -> Any:
    """An op under torch.vmap: it is run as it is, and its use is tapped in the tensor that holds all samples."""
    physical = {id(t): _physical(t) for t in found}
    strong = any(recorder.tensors.is_strong(t) for t in physical.values())
    carriers = {key: t for key, t in physical.items() if recorder.tensors.carrier(t) is not None}
    others = [t for key, t in physical.items() if key not in carriers]
    strong = strong or any(recorder.tensors.is_strong(t) for t in others)
    aliases: dict[int, Tensor] = {}
    if carriers and (strong or any(recorder.tensors.may_have_samples(t) for t in others)):
        _check_transforms(recorder, next(iter(carriers.values())))
        if func in RULES and RULES[func].bind(args, kwargs).get("scale_grad_by_freq"):
            raise UnsupportedOp(
                f"parameter {recorder.tensors.names_of(next(iter(carriers.values())))[0]!r} is used by {op_name(func)} with "
                f"scale_grad_by_freq under torch.vmap at {recorder.place()}: its counts are those of the whole batch there. "
                "Call it outside of vmap."
            )
        aliases = {id(t): torch.ops.aten.alias(t) for t in carriers.values()}
        new = {id(t): _wrapped_like(t, aliases[id(carriers[id(t)])]) for t in found if id(t) in carriers}
        args, kwargs = replace((args, kwargs), new)
    with recorder.tensors.watched():  # also a Function in it: what it is made of is part of this op
        out = func(*args, **kwargs)
    sources = list({id(t): t for t in carriers.values()}.values())
    for t in map(_physical, tensors_in(out)):
        if aliases and t.requires_grad:
            _add_span(recorder, func, t, sources, aliases, strong, True)
        if strong:
            recorder.tensors.mark_strong(t)
    return out


def _check_transforms(recorder: Recorder, carrier: Tensor) -> None:
    stack = _functorch.get_interpreter_stack() or []
    if any(level.key() != _functorch.TransformType.Vmap for level in stack):
        raise UnsupportedOp(
            f"parameter {recorder.tensors.names_of(carrier)[0]!r} is used inside torch.func.grad, vjp or jvp at "
            f"{recorder.place()}, where it cannot be followed: leave derivatives out of the model, or freeze it"
        )


def _physical(t: Tensor) -> Tensor:
    while _functorch.is_functorch_wrapped_tensor(t):
        t = _functorch.get_unwrapped(t)
    return t


def _wrapped_like(t: Tensor, value: Tensor) -> Tensor:
    """`value` in the wrappers of `t`."""
    if not _functorch.is_batchedtensor(t):
        return value
    inner = _wrapped_like(_functorch.get_unwrapped(t), value)
    return _functorch._add_batch_dim(inner, _functorch.maybe_get_bdim(t), _functorch.maybe_get_level(t))


# Modules that need care as such


@contextmanager
def modules_watched(recorder: Recorder, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """While this lasts, a call of a scripted one among a model's modules becomes a use of its parameters."""
    hooks, scripts = [], {}
    for path, module in modules.items():
        if isinstance(module, nn.TransformerEncoder):
            hooks.append(module.register_forward_pre_hook(partial(_check_encoder, path), with_kwargs=True))
        elif isinstance(module, torch.jit.ScriptModule):  # its parts are called by itself, unseen
            scripts[id(module)] = path
    if scripts:
        hooks.append(register_module_forward_hook(partial(_script_called, recorder, scripts), with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
            module_hooks._global_forward_hooks_with_kwargs.pop(hook.id, None)  # torch leaves it behind


def _check_encoder(path: str, module: nn.TransformerEncoder, args: tuple, kwargs: dict) -> None:
    """Raise where PyTorch would take its path of nested tensors, which it does not take while a mode watches."""
    given = inspect.signature(nn.TransformerEncoder.forward).bind(module, *args, **kwargs).arguments
    pad, first = given.get("src_key_padding_mask"), module.layers[0]
    if (
        pad is None
        or given.get("mask") is not None
        or first.training
        or not getattr(module, "use_nested_tensor", False)
    ):
        return
    learns = given["src"].requires_grad or any(p.requires_grad for p in first.parameters())
    if (torch.is_grad_enabled() and learns) or not torch.backends.mha.get_fastpath_enabled() or not bool(pad.any()):
        return
    raise CaptureError(
        f"TransformerEncoder {path!r} without gradients, in eval mode and with src_key_padding_mask, takes a fast path of "
        "nested "
        "tensors that sets padded positions to zero, and cannot take it while it is recorded. Build it with "
        "enable_nested_tensor=False, or call torch.backends.mha.set_fastpath_enabled(False)."
    )


def _script_called(
    recorder: Recorder, scripts: dict[int, str], module: nn.Module, args: tuple, kwargs: dict, out: Any
) -> Any:
    if id(module) not in scripts or not torch.is_grad_enabled():
        return None
    path = scripts[id(module)]
    sources = tuple(p for p in module.parameters() if id(p) in recorder.tensors.parameters)
    if not sources:
        return None
    if recorder.follower is not None:  # it is no op, and no script has it
        recorder.follower.leave()
    given = tensors_in((args, kwargs))
    for t in given:
        if recorder.tensors.carrier(t) is not None:
            raise CaptureError(
                f"the scripted module {path!r} is given something computed from parameter "
                f"{recorder.tensors.names_of(t)[0]!r} at {recorder.place()}, and its ops cannot be seen: record the "
                "nn.Module it was made from"
            )
    ways = tuple(t.grad_fn for t in given if t.grad_fn is not None)
    # It is run again on the same values.
    versions = tuple(version_of(t) for t in (*given, *module.parameters(), *module.buffers()))
    single = isinstance(out, Tensor)
    if not single and type(out) not in (tuple, list):
        raise CaptureError(
            f"the scripted module {path!r}, which uses parameter {recorder.tensors.names_of(sources[0])[0]!r} at "
            f"{recorder.place()}, returns a {type(out).__name__}: return tensors, or record the nn.Module it was made from"
        )
    parts = []
    for k, t in enumerate([out] if single else out):
        if isinstance(t, Tensor) and t.requires_grad:
            autocast = autocast_of(t.device.type)
            piece = Scripted(module, path, args, kwargs, None if single else k, sources, autocast)
            recorder.add(
                Use(
                    type(module),
                    _RULE,
                    (),
                    {},
                    sources,
                    Tap.at(t),
                    True,
                    recorder.place(),
                    recorder.ops_so_far,
                    versions=versions,
                    piece=piece,
                    ways=ways,
                    parameters=recorder.naming(sources),
                )
            )
            t = own_history(t)
            recorder.tensors.mark_strong(t)
        parts.append(t)
    recorder.tensors.opaque = True
    return parts[0] if single else type(out)(parts)
