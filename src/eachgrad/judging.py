"""A compiled step in sixteen bits beside the eager code, with float32 as the judge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eachgrad.agreement import ENOUGH, farther, speaks
from eachgrad.forward import Forward
from eachgrad.padding import Sizes
from eachgrad.precise import all_bits, in_float32, widened
from eachgrad.queries import Answer
from eachgrad.recall import Plan
from eachgrad.sizes import resized
from eachgrad.step import Step

STRIKES = 3  # comparisons with float32, all of which must fail: with few samples one may by chance


@dataclass(frozen=True)
class Judge:
    """Judges the steps of one graph."""

    forward: Forward
    plan: Plan
    sizes: Sizes | None  # that its batches are filled up to, where it is for any
    told: Callable[[Sequence[Tensor]], Answer]  # what a step returns, as an answer

    def far(self, step: Step, args: tuple, size: int) -> str:
        """How a step in sixteen bits differs from one in float32, where the eager code is nearer; nothing if nobody knows."""
        # With few samples, if it is for any number: float32 takes more memory. That may be another graph, which is not made.
        tried = (size,) if self.sizes is None else self._tried(size, self.sizes)
        far, judged = None, False
        for n in tried:
            try:
                some = args if self.sizes is None else resized(args, self.forward.sampled, n)
                far = self.farther(step, some, n)
                judged = far == ""  # or with other samples, next time
            except Exception:  # too little memory, or an op that takes no float32
                judged = True
            if far is not None:
                break
        step.tries, step.strikes = step.tries + 1, step.strikes + 1 if far else 0
        step.judged = judged or step.tries >= 2 * STRIKES
        return far or ""

    @staticmethod
    def _tried(size: int, sizes: Sizes) -> list[int]:
        return list(dict.fromkeys((min(size, sizes.fit(ENOUGH)), size, sizes.fit(1))))

    def is_right_alone(self, step: Step, wanted: Answer, args: tuple, far: str, rough: bool) -> bool:
        """Whether a step for two samples and more is right about one, which is so `far` from what is wanted.

        If it is not, one is filled up to two again.
        """
        assert step.entries is not None
        said: str | None = far
        if far:
            step.refuse_one()
        elif rough:
            said = self._far_alone(step, args)
        elif not speaks(wanted):
            said = None
        if step.entries.note(said):
            step.checked.add((1, False))
        return said == ""

    def _far_alone(self, step: Step, args: tuple) -> str | None:
        try:
            return self.farther(step, args, 1)
        except Exception:  # too little memory, or an op that takes no float32
            return None

    def farther(self, step: Step, args: tuple, size: int) -> str | None:
        """The same for these arguments; None where it cannot be told."""
        plan = self.plan if self.sizes is None else self.plan.of_size(size)
        precise = replace(self.forward, gm=in_float32(self.forward.gm))
        with torch._dynamo.config.patch(error_on_recompile=True):
            found = [t.clone() for t in step.run(args)]
        if step.has_doubt():
            return None
        eager = self.forward.answered(args, plan)
        with all_bits():
            exact = precise.answered(widened(args), plan)
        return farther(self.told(found), self.told(eager), self.told(exact))
