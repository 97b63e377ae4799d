"""One graph of the compiler's front end: where its samples lie, and forward, backward and answers as one compiled step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_map, tree_unflatten

from eachgrad.agreement import difference, is_rough, speaks
from eachgrad.choices import Choices
from eachgrad.errors import CaptureError, first_line
from eachgrad.forward import Forward, Given, NotCompiled, Traced
from eachgrad.judging import STRIKES, Judge
from eachgrad.queries import Answer
from eachgrad.recall import Plan
from eachgrad.sizes import NotAlike, of_any_size, others, resized
from eachgrad.step import Graphs, Samples, Step, compiled

if TYPE_CHECKING:
    from eachgrad.compiled import Compiled


def _generators() -> list[Tensor]:
    """The states of the generators that a forward draws from."""
    devices = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *devices]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _same(before: list[Tensor], after: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@dataclass
class Graph:
    """One graph of the front end: a forward and its loss, for one set of shapes and one way through the Python code."""

    owner: Compiled
    forward: Forward
    dynamic: bool = False  # whether it is for batches of any size
    calls: int = 0
    reason: str = ""  # why it is not compiled, if it is not
    plan: Plan | None = None  # where the samples lie, as it was measured last
    step: dict[Any, Step] = field(default_factory=dict)  # compiled, by the state of autocast
    held: list[Tensor] = field(default_factory=list)  # the parameters that are compiled into it
    kinds: list[str] = field(default_factory=list)  # of the devices that its tensors are on, once it has run
    fresh: Step | None = None  # whose answer is to be compared with the eager one
    failed: tuple[Exception, str] | None = None  # what has kept the last batch from being compiled, and at which size
    traced: dict[int, Traced] = field(
        default_factory=dict
    )  # the step by size, as it was traced; of one for any, several
    choices: Choices = field(default_factory=Choices)  # that the steps of all sizes share
    traces: bool = True  # whether forward, backward and answers could be traced, as far as it was tried

    @cached_property
    def counts(self) -> bool:
        """Whether the number of samples decides numbers."""
        return self.dynamic and self.forward.counts()

    def reasons(self) -> list[str]:
        """Why it is not compiled, or has no CUDA graph where one was asked for."""
        found = [self.reason, *(step.reason for step in self.step.values())]
        return [reason for reason in found if reason]

    def run(self, args: tuple, given: Given) -> tuple[Answer, Any]:
        """The answer for this batch, and what the graph returns."""
        self.calls += 1
        due = self.calls & (self.calls - 1) == 0
        # A loss that counts the samples is another one with more of them.
        eager = due or self.plan is None or (self.counts and given.is_filled)
        key = None if eager else self._key(args)
        entries = self.step[key].entries if given.is_pair and key in self.step else None
        if entries is not None and entries.takes_one:
            args, given = entries.one_of(args), given.cut()
        found = None if key is None else self._run_step(key, args, given)
        if found is None:
            self.owner.settle()
            failed, self.failed = self.failed, None
            answer = self.owner.with_room(lambda: self._eagerly(args, given, due))
            if failed is not None:  # and it was not the batch's fault, or the eager code would have raised
                self._give_up(*failed)
            return answer, (answer.losses,)
        answer = self._told(found if self.owner.lends else [t.clone() for t in found])
        losses = answer.losses
        if given.filled is not None:
            answer = given.filled.undo(answer, self.owner.queries)
        if self.fresh is not None:
            answer = self._checked(answer, args, given)
        return answer, (losses,)

    def _eagerly(self, args: tuple, given: Given, measure: bool) -> Answer:
        drawn = _generators()
        answer = self.owner.eager(given.batch)
        if given.filled is not None and len(answer.losses) != given.filled.samples:
            self.plan, self.traces = None, False
            self.reason = (
                f"{len(answer.losses)} losses of a batch whose first tensor has {given.filled.samples} entries along "
                f"dimension {self.owner.batch_dim}: pass what holds the samples first"
            )
        if measure:
            comparable = _same(drawn, _generators()) and not (self.counts and given.is_filled)
            fixed = answer.losses if comparable else None
            self._measure(args, given, len(answer.losses), fixed)
        return answer

    def _checked(self, answer: Answer, args: tuple, given: Given) -> Answer:
        """The first answer of a compiled step, if it is the eager one; that one, and no compiled one ever, if not."""
        assert self.fresh is not None
        step, self.fresh, drawn = self.fresh, None, _generators()
        wanted = self.owner.with_room(lambda: self.owner.eager(given.batch))
        random = not _same(drawn, _generators())
        rough = any(is_rough(args, some.gm.graph) for some in self.traced.values())
        if given.is_alone:
            answer = self._kept(answer)
            far = "there are random numbers" if random else difference(answer, wanted, rough)
            right = self._judge().is_right_alone(step, wanted, args, far, rough)
            return answer if right else wanted
        if self.dynamic and all(size != given.size for size, _ in step.checked):
            try:  # what a comparison of few bits, or of random numbers, would not see
                self._confirm(args, given.size)
            except NotAlike as error:
                self.owner.part(str(error), self.counts)
                return wanted
        far = "" if random else difference(answer, wanted, rough)
        step.judged = step.judged or not rough or random
        if not far and not step.judged:
            answer = self._kept(answer)
            far = self._judge().far(step, args, given.size)
            if far and step.strikes < STRIKES:
                return wanted
        if not far:
            step.silent += not speaks(wanted)
            if speaks(wanted) or step.silent >= 2 * STRIKES:  # or it is compared again
                step.checked.add(given.kind)
            return answer
        self.plan, self.traces = None, False
        self._forget()
        self.reason = f"compiled, its answers differ from the eager ones: {far}"
        return wanted

    def _judge(self) -> Judge:
        assert self.plan is not None
        return Judge(self.forward, self.plan, self.owner.sizes if self.dynamic else None, self._told)

    def _told(self, found: Sequence[Tensor]) -> Answer:
        """What a step returns, as an answer."""
        losses, *leaves = found
        answer = Answer(**tree_unflatten(leaves, next(iter(self.traced.values())).spec))
        answer.losses = losses
        return answer

    def _kept(self, answer: Answer) -> Answer:
        """An answer that stays while other graphs run, which may be over what this one has answered."""
        return Answer(**tree_map(_copied, vars(answer))) if self.owner.replays else answer

    def _forget(self) -> None:
        """Drop what is compiled."""
        for step in self.step.values():
            step.release()
        self.step.clear()

    def _key(self, args: tuple) -> Any:
        """What the step for these arguments is found by; one that has other parameters in it is dropped."""
        if not self.kinds:  # the front end has another graph for other devices
            self.kinds = sorted({a.device.type for a in args if isinstance(a, Tensor)})
        held = [args[k] for k in self.forward.held]
        if len(held) != len(self.held) or not all(map(is_, held, self.held)):
            self.held = held
            self._forget()  # what is compiled has other parameters in it: one was replaced
        if any(p.requires_grad != trained for some in self.traced.values() for p, trained in some.unused):
            self._forget()  # it has answers about those that were trained in it
        return tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in self.kinds)

    def _run_step(self, key: Any, args: tuple, given: Given) -> tuple[Tensor, ...] | None:
        """Losses and answers by the compiled step; None where there is none, or where it has a doubt."""
        known = key in self.step
        try:
            step = self.step[key] if known else self._compiled(args, given.size)
            self.owner.settle()  # of one that runs again the flag would be lost
            found = step.run(args)
        except torch.OutOfMemoryError:
            if known:
                raise
            return None
        except Exception as error:  # whatever the compiler says of what it cannot trace
            if known and not (self.dynamic and given.kind not in self.step[key].checked):
                raise
            if given.is_alone:
                self.step[key].refuse_one()
                return None
            self.failed = error, f"{given.size} samples" if known else ""
            return None
        self.step[key] = step
        self.fresh = None if step.judged and given.kind in step.checked else step
        self.owner.unsettled.append(step)  # also while it is waited for: what is interrupted comes late
        if self.owner.trusts and self.fresh is None:
            return found
        doubt = step.has_doubt()
        self.owner.unsettled.remove(step)
        return None if doubt else found

    def _give_up(self, error: Exception, when: str) -> None:
        """Go on without this graph: with those of single sizes where it is for any, unless they would not do either.

        `when`: at which size, if it has been compiled.
        """
        self.plan, said = None, first_line(error)
        if isinstance(error, NotAlike):
            self.owner.part(str(error), self.counts)
        elif self.dynamic and not isinstance(error, NotCompiled):
            self.owner.part(f"{when or 'one for any cannot be compiled'}: {said}", self.counts, failed=not when)
        else:
            self.traces, self.reason = False, f"it cannot be traced: {said}"
            if not isinstance(error, NotCompiled):
                self.owner.hear(self.reason)

    def _measure(self, args: tuple, given: Given, B: int, fixed: Tensor | None) -> None:
        """Find out where the samples lie in this graph, or why it cannot be compiled.

        `fixed`: the losses, where no random number was drawn for them.
        """
        if not self.traces:
            return
        B = given.size or B
        before = self.forward.sampled
        self.forward.look(args, given, B, self.owner.batch_dim)
        if self.forward.sampled != before:
            self._forget()  # what is compiled takes others for samples
        try:
            found = self.forward.found(self.forward.counting(args), B, fixed if given.size else None)
        except (CaptureError, NotCompiled) as error:
            self.plan, self.reason = None, str(error)
            return
        if self.plan is None or not (found.alike(self.plan) if self.dynamic else found.same(self.plan)):
            self._forget()  # what is compiled has the old layouts in it
        self.plan, self.reason = found, ""

    def _compiled(self, args: tuple, size: int) -> Step:
        assert self.plan is not None
        if not self.dynamic:
            self.traced = {size: self.forward.traced(args, self.plan)}
            return self._step(args, self.traced[size])
        usual = self.owner.usual or size
        if usual == size:
            return self._from_sizes(args, size)
        try:
            step = self._from_sizes(args, usual)
        except torch.OutOfMemoryError:
            return self._from_sizes(args, size)
        self._show(step, args, usual)
        return step

    def _from_sizes(self, args: tuple, size: int) -> Step:
        with suppress(NotAlike):
            return self._of_any_size(args, size)
        # With as many samples as there are positions, two numbers are one by chance: then from other sizes.
        return self._of_any_size(args, size + 5 * self.owner.unit)

    def _show(self, step: Step, args: tuple, size: int) -> None:
        """Let the compiler see so many samples first, for which it chooses; nothing else comes of it."""
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with suppress(Exception), torch.random.fork_rng(devices):  # what is wrong with it, the batch at hand will show
            step.run(resized(args, self.forward.sampled, size))
            step.has_doubt()

    def _of_any_size(self, args: tuple, size: int) -> Step:
        """A step for any number of samples, from those for so many and for others."""
        self.choices = Choices()
        traces = {n: self._traced_for(n, args) for n in (size, *others(size, self.owner.unit))}
        # What is compiled is changed.
        self.traced = {n: some._replace(gm=GraphModule(some.gm, deepcopy(some.gm.graph))) for n, some in traces.items()}
        first = traces.pop(size)
        return self._step(args, first, Samples(self.forward.sampled, size), {n: some.gm for n, some in traces.items()})

    def _step(self, args: tuple, traced: Traced, *several: Any) -> Step:
        held = {k: args[k] for k in self.forward.held}
        graphs = Graphs(self.forward.given, self.owner.memory) if self.owner.replays else None
        return compiled(traced.gm, traced.slots, held, self.owner.options, graphs, self.owner.recompute, *several)

    def _confirm(self, args: tuple, size: int) -> None:
        """Raise if the step for so many samples is none of the one for any size, where no number can tell."""
        known = {n: some.gm for n, some in self.traced.items()}
        of_any_size({**known, size: self._traced_for(size, args).gm}, next(iter(self.forward.sampled.items())))

    def _traced_for(self, n: int, args: tuple) -> Traced:
        """The step for n samples."""
        assert self.plan is not None
        with self.choices.hold():
            return self.forward.traced(resized(args, self.forward.sampled, n), self.plan.of_size(n))
