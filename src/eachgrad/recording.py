"""How an op that a parameter takes part in becomes a use: what the op is given instead, and what is remembered of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C import _is_any_autocast_enabled
from torch._C._autograd import _top_saved_tensors_default_hooks  # pyright: ignore[reportAttributeAccessIssue]
from torch.nn import functional as F

from eachgrad.functions import Place, call_site
from eachgrad.graph import own_history, replace, same, tensors_of
from eachgrad.rules import BROADCAST, COMPOSITES, RULES
from eachgrad.rules.broadcast import IN_PLACE
from eachgrad.rules.recurrent import bare, meet, twice, use_at
from eachgrad.use import Begin, Tap, Use, autocast_of, version_of

if TYPE_CHECKING:
    from eachgrad.capture import Recorder
    from eachgrad.script import Meeting


def broadcast(
    recorder: Recorder, func: Callable, args: tuple, kwargs: dict, sources: list[Tensor], strong: bool
) -> Any:
    """The op with each source expanded to the output's shape, where its gradient can be taken."""
    shape = broadcast_shape(func, args, kwargs)
    target = args[0] if func in IN_PLACE else None
    if func is torch.Tensor.copy_:
        sources = [t for t in sources if t is not target]
    # What is overwritten below must not be what the op has kept for its backward.
    spread = {id(t): expanded(recorder, t.clone() if t is target else t, shape, strong) for t in sources}
    new_args, new_kwargs = replace((args, kwargs), spread)
    if target is None or id(target) not in spread:
        return func(*new_args, **new_kwargs)
    # A carrier is changed in place: compute apart, then overwrite it.
    plain = IN_PLACE[func]
    return NotImplemented if plain is None else target.copy_(plain(*new_args, **new_kwargs))


def expanded(recorder: Recorder, t: Tensor, shape: torch.Size, strong: bool) -> Tensor:
    return record(recorder, torch.Tensor.expand, (t, tuple(shape)), {}, [t], strong)


def record(
    recorder: Recorder, func: Callable, args: tuple, kwargs: dict, sources: list[Tensor], strong: bool
) -> Tensor:
    recorder.rerun = recorder.rerun or recorder.replaying
    originals = dict(zip(map(id, sources), sources, strict=True))
    seen, aliases, stable, others = {}, [], {}, []
    detached, parameters = strong and not recorder.attach, recorder.tensors.parameters
    for key, t in originals.items():
        is_parameter = key in parameters
        if detached and recorder.tensors.carrier(t) == "pure":
            seen[key] = t.detach()
        else:
            # A view is fine for a leaf, which no op may change, and lets sparse gradients through.
            seen[key] = torch.ops.aten.alias(t) if is_parameter else same(t)
            aliases.append(seen[key])
        # A derived tensor may be changed in place later: keep it as it is derived now.
        if not is_parameter:
            stable[key] = same(t)
        if not is_parameter or type(t) is not nn.Parameter:  # `_use` may not take it for one
            others.append(t)
    out = (RULES[func].run or func)(*replace(args, seen), **(replace(kwargs, seen) if kwargs else kwargs))
    if not out.requires_grad:
        out = Begin.apply(torch.zeros((), requires_grad=True), out)
    if stable:
        args, kwargs = replace((args, kwargs), stable)
    use = _use(recorder, func, args, kwargs, [stable.get(key, t) for key, t in originals.items()], out, strong, aliases)
    if others:
        use.source_versions += tuple([version_of(t) for t in others])
    if use.rule.saved:
        use.saved = _saved(use.rule.saved, out)
    recorder.add(use)
    return own_history(out)


def _use(
    recorder: Recorder, func: Callable, args: tuple, kwargs: dict, sources: list[Tensor], tap: Tensor, strong: bool,
    aliases: list[Tensor],
) -> Use:  # fmt: skip
    own = set(map(id, sources))
    if func is F.instance_norm and RULES[func].bind(args, kwargs)["use_input_stats"]:
        own |= {id(t) for t in args[1:3]}  # running statistics, which are updated and not read
    versions, source_versions, samples = [], [], []
    for t in tensors_of(args, kwargs):
        kind, key = type(t), id(t)
        # Of a plain tensor it takes long to hear that it is no parameter.
        is_parameter = kind is nn.Parameter or (kind is not Tensor and isinstance(t, nn.Parameter))
        if is_parameter:
            source_versions.append(version_of(t))
        if key in own:
            continue
        if not is_parameter:
            versions.append(version_of(t))
        if not strong or recorder.tensors.is_strong(t):
            samples.append(key)
    # By position, for half the price: see the fields of `Use`.
    return Use(
        func, RULES[func], args, kwargs, tuple(sources), Tap.at(tap, recorder.passed_by), strong, call_site(recorder.root, 4),
        recorder.ops_so_far, tuple(aliases), frozenset(samples), tuple(versions), tuple(source_versions),
        autocast_of(tap.device.type) if _is_any_autocast_enabled() else None, None, recorder.naming(sources),
    )  # fmt: skip


def meet_again(recorder: Recorder, func: Callable, args: tuple, kwargs: dict, meeting: Meeting) -> Tensor:
    """`record` for an op of parameters and the batch, of which all is known that is not of this forward alone."""
    rule, given, options = meeting.rule, [*args], kwargs
    versions, sources, source_versions = [], [], []
    for k in meeting.sources:
        if isinstance(k, int):
            t = args[k]
            given[k] = t.detach()
        else:
            t, options = kwargs[k], {**options, k: kwargs[k].detach()}
        sources.append(t)
        source_versions.append((t, t._version))
    with recorder.tensors.watched():
        out = (rule.run or func)(*given, **options)
        if not out.requires_grad:
            out = Begin.apply(torch.zeros((), requires_grad=True), out)
    for t in (*args, *kwargs.values()) if kwargs else args:
        if type(t) is Tensor:
            versions.append(version_of(t))
        elif type(t) is nn.Parameter and not any(t is s for s in sources):  # one that is not trained
            source_versions.append(version_of(t))
    use = Use(
        func, rule, args, kwargs, tuple(sources), Tap.at(out, recorder.passed_by), True,
        Place(meeting.line, meeting.module(), recorder.root), meeting.ops_since, (),
        frozenset([id(args[k]) for k in meeting.samples]), tuple(versions), tuple(source_versions),
        autocast_of(out.device.type) if _is_any_autocast_enabled() else None, None, recorder.naming(sources),
    )  # fmt: skip
    if rule.saved:
        use.saved = _saved(rule.saved, out)
    recorder.add(use)
    return own_history(out)


def _saved(names: tuple[str, ...], out: Tensor) -> tuple[Tensor, ...] | None:
    """What the node of this name keeps of its results; None where another made `out`, or a compiler looks on."""
    node: Any = out.grad_fn
    # Of what hooks keep, as a checkpoint does, each tensor may be asked for once.
    if type(out) is not Tensor or node.name() != names[0] or _top_saved_tensors_default_hooks(False) is not None:
        return None
    # Detached, or they would keep the graph below them as long as an answer is kept.
    found = tuple([getattr(node, f"_saved_{name}").detach() for name in names[1:]])
    # A mean that is rounded to sixteen bits, and far from zero, is far from the one that the samples have.
    return None if any(t.dtype.itemsize < 4 for t in found) else found


def _bare(recorder: Recorder, weight: Tensor) -> Tensor:
    """A parameter as an op sees it whose use is recorded by `use_at` afterwards."""
    if not recorder.attach:
        return weight.detach()
    alias = torch.ops.aten.alias(weight)
    recorder.loose[id(weight)] = alias
    return alias


def _use_at(recorder: Recorder, z: Tensor, op: Callable, *args: Tensor | None) -> None:
    # The weight and the bias; hidden states are computed from them, and are none.
    sources = {id(t): t for t in args[1:3] if t is not None and recorder.tensors.carrier(t) is not None}
    if sources:
        aliases = [recorder.loose.pop(key) for key in sources if key in recorder.loose]
        recorder.add(_use(recorder, op, args, {}, list(sources.values()), z, True, aliases))


def may_be_spread(func: Callable, args: tuple, kwargs: dict, t: Tensor) -> bool:
    """Whether samples may begin here for `t`, which a candidate has seen: a table that is broadcast, or a weight."""
    if func in BROADCAST:
        return func not in IN_PLACE and t.shape != broadcast_shape(func, args, kwargs)
    if func not in RULES or RULES[func].is_dense or func in COMPOSITES:
        return False
    rule = RULES[func]
    return not any(value is t for name, value in rule.bind(args, kwargs).items() if name in rule.samples)


def broadcast_shape(func: Callable, args: tuple, kwargs: dict) -> torch.Size:
    if func in IN_PLACE:
        return args[0].shape
    return torch.broadcast_shapes(*(t.shape for t in tensors_of(args, kwargs)))


# What the library's own recurrent layers ask of an active recorder.
OWN: dict[Callable, Callable[[Recorder, tuple, bool], Any]] = {
    twice: lambda recorder, args, carried: recorder.create_graph,
    use_at: lambda recorder, args, carried: _use_at(recorder, *args),
    bare: lambda recorder, args, carried: _bare(recorder, args[0]) if carried else args[0],
    meet: lambda recorder, args, carried: expanded(recorder, args[0], args[0].shape, True) if carried else args[0],
}
