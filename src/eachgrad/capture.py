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

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch._C._autograd import _top_saved_tensors_default_hooks  # pyright: ignore[reportAttributeAccessIssue]
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode

from eachgrad import eager_entropy, foreign, recording, refusals
from eachgrad.exposed import EXPOSING, tell
from eachgrad.functions import EXPANDING, PASSIVE, TEMPLATED, Place, call_site, can_be_opened, op_name, opened, plainer
from eachgrad.graph import Carried, Node, depends
from eachgrad.rules import BROADCAST, COMPOSITES, RULES
from eachgrad.rules.broadcast import IN_PLACE
from eachgrad.rules.registry import NoRule, as_called
from eachgrad.signature import Signature, looked_at
from eachgrad.tensors import Tensors, names_of
from eachgrad.use import Use

if TYPE_CHECKING:
    from eachgrad.familiar import Reader
    from eachgrad.script import Writer

_Packet = torch._ops.OpOverloadPacket
# What a function may be in beside the tables of rules, which users add to: most are in none, and are asked for once.
_SPECIAL = {*PASSIVE, *TEMPLATED, *recording.OWN, *refusals.CHECKED, F.cross_entropy}


class Recorder(TorchFunctionMode):
    """Records every use of `parameters` while it is active, and leaves the results as they are."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        constants: Sequence[Tensor] = (),
        batch_size: int | None = None,
        attach: bool = False,
        create_graph: bool = False,
        root: nn.Module | None = None,
        fallback: str = "refuse",
    ):
        super().__init__()
        self.root: Callable[[], nn.Module | None] = (lambda: None) if root is None else ref(root)
        self.fallback = fallback
        self.tensors = Tensors(parameters, constants)
        self.tensors.on_function = partial(_function_met, ref(self))
        self.tensors.place = partial(call_site, self.root)
        self.leaves = list(parameters.values())
        self.batch_size = batch_size
        self.attach = attach or create_graph  # keep strong uses attached too, so that a plain gradient can be taken
        self.create_graph = create_graph  # the answers are to be differentiated
        self.by_kernels = not create_graph  # a cross entropy may go by the library's own
        self.uses: list[Use] = []
        self.passes = 0  # backward passes run so far
        self.replaying = False  # a checkpoint runs its forward again: do the same, record nothing
        self.unseen = False  # the backward of an autograd.Function is running
        self.rerun = False  # a checkpoint has run a use again
        self.may_rerun = False  # a use, or an op of the library's own, may be run again by a checkpoint
        self.on_recompute: Callable[[Use], None] | None = None  # a reentrant one: hand each use over
        self.without_rule: dict[str, str] = {}  # parameter -> op it met that has no rule
        self.loose: dict[int, Tensor] = {}
        self.signature = Signature(self.tensors.is_strong)
        self.follower: Reader | Writer | None = None  # who sees each op first, if this forward has come before
        self.differentiated = False  # a derivative through the recorded forward was taken, to be differentiated again
        self._ops: list[str] = []
        # A weak reference: autograd would keep a strong one, and everything recorded, alive.
        self.passed_by = partial(_seen_in_a_derivative, ref(self))

    # The mode

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return (self.follower or self.seen)(func, types, args, kwargs or {})

    def seen(self, func: Callable, types: Any, args: tuple, kwargs: dict) -> Any:
        """An op's result, with what there is to record of it recorded."""
        if func in EXPOSING:
            tell(args[0])
        if self.unseen and not _recomputes():
            if func in refusals.CHECKED:
                refusals.CHECKED[func](self, func, args, kwargs)
            return func(*args, **kwargs)
        special = func in _SPECIAL
        if special and func in PASSIVE:
            if func is torch.Tensor.register_hook:  # it may change gradients: a forward with it is another one
                self.signature.note(func, getattr(args[-1], "__code__", type(args[-1])))
            return func(*args, **kwargs)
        for own in types:
            # Something that stands for a tensor (quantised weights): what it makes of the op is seen.
            if not issubclass(own, Tensor):
                with self:
                    return own.__torch_function__(func, types, args, kwargs)
        if isinstance(func, _Packet):
            func = as_called(func)
        elif special and func in TEMPLATED:
            func, args = plainer(func, args)
        if func is torch.autograd.backward and self.on_recompute is not None:  # a reentrant checkpoint's own
            with self:
                return opened(func)(*args, **kwargs)
        found, call = looked_at(args, kwargs)
        if not found:
            return func(*args, **kwargs)
        tensors = self.tensors
        if not torch.is_grad_enabled():
            strong = any(tensors.is_strong(t) for t in found)
            if strong:
                self.signature.add(func, args, kwargs, found, tuple(map(tensors.number, found)), call)
            return self._passed(func, args, kwargs, found, strong, call)
        if foreign.is_inside_transform():
            self.signature.value = None
            return foreign.record_inside(self, func, args, kwargs, found)
        carriers, strong, numbers = tensors.told_apart(found, self.on_recompute is not None)
        if strong or carriers:
            self.signature.add(func, args, kwargs, found, numbers, call)
        if special and func in recording.OWN:
            return recording.OWN[func](self, args, bool(carriers))
        if special and func in refusals.CHECKED:
            refusals.CHECKED[func](self, func, args, kwargs)
        if not carriers and strong:
            losses = None
            if special and func is F.cross_entropy and self.by_kernels:
                losses = eager_entropy.row_losses(*args, **kwargs)
                self.may_rerun = self.may_rerun or (losses is not None and _has_hooks())
            return self._passed(func, args, kwargs, found, strong, call, losses)
        with tensors.watched():
            return self._carried(func, args, kwargs, found, carriers, strong, call)

    def _carried(
        self, func: Callable, args: tuple, kwargs: dict, found: list[Tensor], carriers: list[tuple[Tensor, str]],
        strong: bool, call: Hashable,
    ) -> Any:  # fmt: skip
        """An op with parameters, or with what is derived from some, among its arguments."""
        weak = False
        if not strong:
            pure = {id(t) for t, kind in carriers if kind == "pure"}
            impure = any(kind == "impure" for _, kind in carriers)
            weak = impure or any(id(t) not in pure and self.tensors.may_have_samples(t) for t in found)
            if func in EXPANDING:
                weak = True
            else:  # where samples may begin, whatever a tensor was derived by
                carriers = [
                    (t, kind)
                    for t, kind in carriers
                    if kind == "pure" or recording.may_be_spread(func, args, kwargs, t)
                ]
        if not carriers or not (strong or weak):
            return self._passed(func, args, kwargs, found, strong, call)
        sources = [t for t, _ in carriers]
        out = self._met(func, args, kwargs, found, sources, strong)
        if out is NotImplemented and self.fallback != "refuse":
            out = foreign.record_span(self, func, args, kwargs, sources, strong)
        if out is not NotImplemented:
            if strong:
                self.tensors.mark_strong(out)
            self.tensors.follow(func, args, kwargs, out, found, call)
            return out
        out = self._passed(func, args, kwargs, found, strong, call)
        refused = [t for t, kind in carriers if kind == "pure"]
        if strong and refused and depends(out, refused):
            refusals.refuse_op(self, func, refused[0])
        for t in sources:
            self.without_rule.update(dict.fromkeys(self.tensors.names_of(t), f"{op_name(func)} at {self.place()}"))
        return out

    def _passed(
        self, func: Callable, args: tuple, kwargs: dict, found: list[Tensor], strong: bool, call: Hashable,
        out: Any = None,
    ) -> Any:  # fmt: skip
        """`out`: the op's result, if it is known already."""
        if out is None:
            out = func(*args, **kwargs)
        if func is torch.Tensor.__iter__:
            out = list(out)
            if strong:
                self.tensors.mark_strong(out)
            return iter(out)
        self.tensors.follow(func, args, kwargs, out, found, call)
        if strong:
            self.note_op(getattr(func, "__name__", ""))
            self.tensors.mark_strong(out)
            if func is torch.Tensor.__setitem__ or "out" in kwargs:
                self.tensors.mark_strong((args[0], kwargs.get("out")))
        return out

    def _met(
        self, func: Callable, args: tuple, kwargs: dict, found: list[Tensor], sources: list[Tensor], strong: bool
    ) -> Any:
        """The op's result with its uses recorded, or NotImplemented where nothing is known about it."""
        if any(t.is_nested for t in found):
            refusals.check_nested(self, func, found, sources)
        changed = args[0] if func in IN_PLACE or func is torch.Tensor.masked_fill_ else None
        if not strong and any(changed is t for t in sources):
            return NotImplemented  # a carrier that is changed in place by constants, most likely
        if func in COMPOSITES:
            opaque = self.tensors.opaque
            with self, self.signature.trusting():
                try:
                    out = COMPOSITES[func](*args, **kwargs)
                except NoRule as error:
                    refusals.refuse_call(self, func, sources[0], error)
            self.tensors.opaque = opaque  # what a composite hides is known
            if out is not NotImplemented:
                return out
        if func in BROADCAST:
            return recording.broadcast(self, func, args, kwargs, sources, strong)
        if func is torch.Tensor.__setitem__:
            target, index, value = args
            with torch.no_grad():
                shape = target[index].shape
            value = value.reshape(value.shape[max(0, value.ndim - len(shape)) :])
            func(target, index, recording.expanded(self, value, shape, strong))
            if strong:
                self.tensors.mark_strong(target)
            return None
        if func in RULES:
            return recording.record(self, func, args, kwargs, sources, strong)
        if not can_be_opened(func):
            return NotImplemented
        with self:
            return opened(func)(*args, **kwargs)

    def apart(self, follower: Reader | Writer, func: Callable, types: Any, args: tuple, kwargs: dict) -> Any:
        """The same with nobody who sees the ops inside it first; not even later, if it fails."""
        self.follower = None
        out = self.seen(func, types, args, kwargs)
        self.follower = follower
        return out

    def returned(self, func: Callable, args: tuple, kwargs: dict, out: Any, met: bool) -> Any:
        """An op's result, with all that there is to say of it; `met`: but its use, which was recorded."""
        found, call = looked_at(args, kwargs)
        numbers = tuple(map(self.tensors.number, found))
        if any(numbers):
            self.signature.add(func, args, kwargs, found, numbers, call)
        if not met:
            return self._passed(func, args, kwargs, found, any(numbers), call, out)
        self.tensors.mark_strong(out)
        self.tensors.follow(func, args, kwargs, out, found, call)
        return out

    def away(self) -> _Away:
        """A context: not active for a while, where it is the innermost mode. Nothing is seen, at no cost."""
        return _Away(self)

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Active during a backward: what a checkpoint runs again must run as it did the first time."""
        before, self.replaying = self.replaying, True
        try:
            with self, self.kernels():
                yield
        finally:
            self.replaying = before

    def kernels(self) -> AbstractContextManager[Any]:
        """Kernels that have second derivatives, if these are asked for: of attention's only one has."""
        return sdpa_kernel(SDPBackend.MATH) if self.create_graph else nullcontext()

    def add(self, use: Use) -> None:
        self.may_rerun = self.may_rerun or _has_hooks()
        if use.strong:
            self.tensors.tap_nodes.add(use.tap.node)
        for alias in use.aliases:
            self.tensors.alias_nodes.setdefault(alias.grad_fn, []).append(use)
        if use.ways is not None and not use.strong:
            self.tensors.alias_nodes.setdefault(use.tap.node, []).append(use)
        if self.on_recompute is not None:
            self.on_recompute(use)
        elif not self.replaying:
            self.uses.append(use)
            self._ops.clear()

    def note_op(self, name: str) -> None:
        """An op of the batch, for messages."""
        self._ops.append(name)

    def place(self) -> Place:
        """Where the user's code is now."""
        return call_site(self.root)

    def naming(self, sources: Sequence[Tensor | Carried]) -> Callable[[], list[str]]:
        """The names of the parameters behind these, once somebody asks."""
        # By their table alone: a use that knew its recorder would be kept, with all that was recorded, until Python looks
        # for cycles. That took 4 of 48 ms for the twelve layers of a GPT-2 of width 32, on one core.
        return partial(_names_of, self.tensors.parameters, sources)

    @property
    def is_new(self) -> bool:
        """Whether no op was seen so far."""
        return not self.uses and self.signature.value == 0 and not self.tensors.count and self.fallback == "refuse"

    @property
    def ops_so_far(self) -> tuple[str, ...]:
        return tuple(self._ops[-40:])


class _Away:
    """Written out, and no generator: it runs for every use that a backward comes to."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder

    def __enter__(self) -> None:
        self.left = _get_current_function_mode() is self.recorder
        if self.left:
            _pop_mode()

    def __exit__(self, *error: object) -> None:
        if self.left:
            _push_mode(self.recorder)


def _names_of(parameters: Mapping[int, str], sources: Sequence[Tensor | Carried]) -> list[str]:
    return [name for source in sources for name in names_of(parameters, source)]


def _function_met(recorder: ref[Recorder], node: Node) -> None:
    found = recorder()
    if found is not None:
        foreign.record_function(found, node)


def _seen_in_a_derivative(recorder: ref[Recorder]) -> None:
    found = recorder()
    # A backward that is itself to be differentiated, and not the library's own.
    if found is not None and torch.is_grad_enabled() and not found.replaying:
        found.differentiated = True


def _has_hooks() -> bool:
    """Whether hooks decide what an op keeps for its backward, as a checkpoint's do."""
    return _top_saved_tensors_default_hooks(False) is not None


def _recomputes() -> bool:
    """Whether a checkpoint is running its forward again: its hooks for saved tensors are the innermost."""
    hooks = _top_saved_tensors_default_hooks(False)
    return hooks is not None and getattr(hooks[0], "__qualname__", "").startswith("_recomputation_hook")
