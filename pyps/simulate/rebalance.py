"""Re-plans a simulated run as a launcher does a real one: it shows a Balancer what the core shows.

The core's re-plan event makes the changes that the Balancer decides.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from pyps.formats import MAX_BATCH
from pyps.simulate.engine import Engine
from pyps.simulate.metrics import SimulatedReplan
from pyps.simulate.scenario import SimWorker
from pyps.solver.costs import Table
from pyps.solver.online.balancer import Balancer, Rules
from pyps.solver.online.device import BalancedDevice, Bounds, planned_device
from pyps.solver.online.members import Ranks

LOOK_NANOSECONDS = 50_000_000  # between two looks, as a launcher's
KNOTS = 64  # of a cost that is a function


class Rebalancing:
    """Looks at an engine's core while it works, and re-plans its run."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        workers = list(zip(engine.workers, engine.depths, strict=True))
        devices = [_device(worker, depth, engine.scenario.global_batch) for worker, depth in workers]
        rules = Rules(rests=engine.needs.lets_ranks_rest)
        self._balancer = Balancer(devices, engine.scenario.batches, rules)
        self._ids: dict[int, int] = {}  # of the present ranks' workers
        self._joined = 0
        self._marks = [(0, 0)]  # time and samples trained, at the start and at each change
        engine.clock.call(LOOK_NANOSECONDS, self._look)

    def _look(self) -> None:
        engine = self._engine
        counters = engine.core.ranks()
        split = tuple(counter.batch for counter in counters)
        for device, batch, cost in zip(self._balancer.devices, split, engine.core.costs(), strict=True):
            device.see(batch, cost.steps, cost.seconds)
        if engine.ending:
            return
        change = self._balancer.look(self._ranks(split), engine.rounds, max(c.pushes for c in counters))
        if change is not None:
            engine.replan(change.after)
            self._balancer.adopt(change)
            self._marks.append((engine.clock.now, engine.trained))
        engine.clock.call(engine.clock.now + LOOK_NANOSECONDS, self._look)

    def _ranks(self, split: tuple[int, ...]) -> Ranks:
        ids = {}
        for rank in sorted(self._engine.present):
            self._joined += rank not in self._ids
            ids[rank] = self._ids.get(rank, self._joined)
        self._ids = ids
        return Ranks(ids, split)

    def replans(self) -> tuple[SimulatedReplan, ...]:
        """The changes that were made, once the run has ended."""
        engine = self._engine
        marks = [*self._marks, (engine.finished_at, engine.trained)]
        batch = engine.scenario.global_batch
        pace = [
            (now - then) * 1e-9 * batch / (trained - before) if trained > before else 0.0
            for (then, before), (now, trained) in pairwise(marks)
        ]
        return tuple(
            SimulatedReplan(
                at=marks[k + 1][0] * 1e-9,
                before=change.before,
                after=change.after,
                reasons=change.reasons,
                expected_seconds=(change.seconds_before, change.seconds_after),
                iteration_seconds=(pace[k], pace[k + 1]),
            )
            for k, change in enumerate(self._balancer.history)
        )


def _device(worker: SimWorker, depth: int, global_batch: int) -> BalancedDevice:
    """What a run knows of a worker before it has timed its steps."""
    if worker.planned is not None:
        return planned_device(worker.planned, depth)
    most = min(worker.max_samples or MAX_BATCH, MAX_BATCH)
    sizes = sorted({max(1, round(global_batch * (k + 1) / KNOTS)) for k in range(KNOTS)} | {worker.batch})
    seconds = accumulate((worker.cost(size) for size in sizes), max)  # a Table never falls
    return BalancedDevice(Table(tuple(zip(sizes, seconds, strict=True))), Bounds(most=min(most, sizes[-1])))
