"""Several questions asked together: over one batch, or over micro-batches as if they were one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace

from eachgrad import plan
from eachgrad.functions import precise
from eachgrad.gradient import Gradient
from eachgrad.queries.base import Over, Query, Running
from eachgrad.queries.packing import Holders


class Answer(SimpleNamespace):
    """The answers, by the names under which they were asked."""


class Accumulator:
    """Questions whose answers are gathered over several backward passes as if they had been one.

    total = eachgrad.Accumulator(norms=eachgrad.norms(), grad=eachgrad.clipped_sum(1.0))
    for x, y in micro_batches:
        with eachgrad.record(model) as tape:
            losses = loss_fn(model(x), y)
        tape.ask(losses, into=total)
    total.answer().norms
    """

    def __init__(self, **queries: Query):
        if not queries:
            raise ValueError("nothing is asked: pass queries by name, such as norms=eachgrad.norms()")
        for name, query in queries.items():
            if not isinstance(query, Query):
                raise TypeError(f"{name} is a query such as eachgrad.norms(), not {type(query).__name__}")
        self.queries = queries
        self.batch_sizes: list[int] = []
        self._running: dict[str, Running] | None = None
        self._names: list[str] = []

    def answer(self) -> Answer:
        """What has been found so far."""
        if self._running is None or not self.batch_sizes:
            raise ValueError("nothing has been gathered yet: pass this to tape.ask(losses, into=...)")
        return Answer(**{name: running.answer() for name, running in self._running.items()})

    @precise
    def run(
        self,
        over: Over,
        batch_size: int,
        costs: Mapping[str, plan.Cost],
        visit: Callable[[Callable[[Gradient], None], set[str] | None], object],
    ) -> None:
        """Answer for one batch. `visit(add, names)` hands over the gradients of these parameters (None: of all)."""
        if self._running is None:
            self._running = {name: self._start(query, over) for name, query in self.queries.items()}
            self._names = list(over.parameters)
        elif self._names != list(over.parameters):
            raise ValueError(
                "the micro-batches are of models with other parameters: gather each model's in an Accumulator of its own"
            )
        # Who holds gradients until all are there takes them first: others find their norms in its packs.
        order = sorted(self.queries, key=lambda name: not self.queries[name].holds)
        every, holders = [self._running[name] for name in order], Holders()
        for running in every:
            running.holders = holders
            running.begin(batch_size, costs)
        visit(lambda gradient: _add(gradient, every), None)
        wanted = {id(running): running.again() for running in every}
        names = set().union(*wanted.values())
        if names:
            visit(lambda gradient: _add(gradient, [r for r in every if gradient.name in wanted[id(r)]]), names)
        for running in every:
            running.end()
            running.holders = Holders()
        self.batch_sizes.append(batch_size)

    def needs_again(self, over: Over, costs: Mapping[str, plan.Cost]) -> bool:
        """Whether some gradients will be asked for twice: the memory allowed is too small to hold them."""
        return over.budget is not None and any(
            "again" in plan.schedule({n: costs[n] for n in self._over(q, over).parameters}, over.budget).values()
            for q in self.queries.values()
            if q.holds
        )

    def _start(self, query: Query, over: Over) -> Running:
        return query.start(self._over(query, over))

    def _over(self, query: Query, over: Over) -> Over:
        return over if query.patterns is None else over.select(query.patterns)


def _add(gradient: Gradient, every: Iterable[Running]) -> None:
    name = gradient.name
    asking = [running for running in every if name in running.over.parameters]
    if not gradient.has_norms:
        if any(running.keeps(name) for running in asking):
            gradient = gradient.kept()
        elif len(asking) > 1:
            reads = [running.reads for running in asking]
            if "norms" in reads and reads.count("mean") == 1:  # two would be given one tensor
                gradient = gradient.read_once()
    for running in asking:
        running.add(gradient)
