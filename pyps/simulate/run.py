"""`simulate` one policy, or `compare` several under equal conditions."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Literal

from msgspec.structs import replace

from pyps import native
from pyps.errors import InputError
from pyps.formats import MAX_BATCH
from pyps.formats.mode import FROM_PLAN
from pyps.formats.options import AUTO, as_depth
from pyps.native.decisions import TIMES_ALONE, unmet
from pyps.native.values import Hyper, Optimizer, Replay
from pyps.simulate.engine import Engine
from pyps.simulate.metrics import Metrics, Result, SimulatedReplan, rank_results
from pyps.simulate.problem import LocalOptimizer, Model, Objective
from pyps.simulate.scenario import Scenario, SimWorker
from pyps.simulate.step import Pipelines
from pyps.simulate.worker import worker_process
from pyps.solver.costs import Table
from pyps.solver.mode import ModeChoices, choices_while_running
from pyps.solver.online.balancer import Balancer, Rules
from pyps.solver.online.decide import Bounds
from pyps.solver.online.device import BalancedDevice, planned_device
from pyps.solver.online.members import Ranks
from pyps.solver.online.mode import may_change
from pyps.store.policies import DEFAULT_POLICY, Policy, check_pipeline, policy_named, register_policy

CURVE_POINTS = 200
LOOK_NANOSECONDS = 50_000_000  # between two looks, as a launcher's
KNOTS = 64  # of a cost that is a function


def simulate(
    scenario: Scenario,
    policy: Policy | str = "bsp",
    *,
    iterations: int = 100,
    seed: int = 0,
    objective: Objective | None = None,
    lr: float | Hyper = 0.1,
    optimizer: Optimizer | str = "sgd",
    target_loss: float | None = None,
    seconds: float = math.inf,
    timeline: bool = False,
    depth: int | Literal["auto"] = 1,
    measure_every: int = 0,
    local: LocalOptimizer | None = None,
    rebalance: bool = False,
    codec: Literal["plan"] | None = None,
) -> Result:
    """Train in virtual time. The same arguments give the same result to the bit.

    scenario: the cluster. policy: a policy or its text. iterations: global batches to train. seed: of jitter.
    objective: real gradients; None: only times. lr: learning rate of a global batch, or all of an optimizer's
    constants. optimizer: "sgd", "momentum", "adamw", "adam" or "adagrad". target_loss: stop once the loss is
    that low; needs an objective. seconds: stop after so much virtual time. timeline: record what each worker
    did and when, for pictures. depth: each worker's steps under way, so that transfers overlap with the next
    steps' compute; "auto": as the scenario says of each worker, or 2. measure_every: samples between
    two measurements of the loss; 0: a global batch, or more so that there are at most about 200. local: the
    workers' own optimizer, in a scenario of local steps; `lr` and `optimizer` are then the store's, for the
    difference that local steps make. rebalance: move samples between workers as `pyps run --rebalance` does;
    the result's `replans` tell what that changed. codec: "plan": with `rebalance`, codecs and depths follow
    the links and devices, too, as with `pyps run --codec plan --rebalance`: see `mode_changes`.

    Raises InputError, and Deadlock where the workers would wait for ever.
    """
    chosen = _policy_of(scenario, policy) if isinstance(policy, str) else policy
    _check_objective(scenario, chosen, objective, target_loss, local)
    for name, value, least in (("iterations", iterations, 1), ("measure_every", measure_every, 0)):
        if value < least:
            raise InputError("simulate", name, str(value), f"at least {least}")
    depths = _depths(scenario, depth)
    if max(depths) > 1:
        check_pipeline(chosen)
    hyper = lr if isinstance(lr, Hyper) else Hyper(lr)
    model = Model(objective, Optimizer.of(optimizer), hyper, local)
    samples = iterations * scenario.global_batch
    choices = _choices(scenario, chosen, depths) if rebalance and codec == FROM_PLAN else None
    pipelines = Pipelines(depths, choices)
    metrics = Metrics(pipelines.deepest * len(scenario.workers), timeline)
    engine = Engine(scenario, chosen, model, metrics, samples, seed, worker_process, pipelines)
    if objective is not None:
        every = max(1, iterations // CURVE_POINTS) * scenario.global_batch
        engine.measure(measure_every or every, target_loss)
    balancing = Rebalancing(engine) if rebalance else None
    engine.work(seconds)
    return _result(engine, chosen, seed, balancing.replans() if balancing is not None else None)


def _check_objective(
    scenario: Scenario,
    policy: Policy,
    objective: Objective | None,
    target_loss: float | None,
    local: LocalOptimizer | None,
) -> None:
    """Raise InputError where an objective is missing, or the workers' optimizer does not go with it."""
    if objective is None:
        if target_loss is not None:
            raise InputError("simulate", "target_loss", str(target_loss), "an objective to go with it")
        if why := unmet(policy.needs, TIMES_ALONE):
            expected = "one that looks at times alone, or an objective (--learn)"
            raise InputError("simulate", "policy", f"{policy}, which {why}", expected)
    elif scenario.local != (local is not None):
        found = "nothing" if local is None else "an optimizer"
        expected = "one in a scenario of local steps, nothing in others"
        raise InputError("simulate", "local", found, expected)


def _policy_of(scenario: Scenario, text: str) -> Policy:
    """The policy of a text, with the scenario's round timeout."""
    return policy_named(text, scenario.round_timeout or DEFAULT_POLICY.round_timeout_seconds)


def _depths(scenario: Scenario, depth: int | Literal["auto"]) -> list[int]:
    """Return the steps under way of each worker."""
    asked = as_depth(depth, "simulate: depth")
    return [(w.depth or 2) if asked == AUTO else asked or 1 for w in scenario.workers]


def _choices(scenario: Scenario, policy: Policy, depths: Sequence[int]) -> ModeChoices | None:
    """The modes that workers may change to; None: theirs stay."""
    if min(depths) == 1 or not may_change(policy.pace, local=scenario.local):
        return None
    modes = [replace(w.mode, depth=d) for w, d in zip(scenario.workers, depths, strict=True)]
    return choices_while_running(modes, policy.pace)


def compare(scenario: Scenario, policies: Iterable[Policy | str], **arguments: object) -> list[Result]:
    """Call `simulate` for each policy with the same arguments."""
    return [simulate(scenario, policy, **arguments) for policy in policies]  # type: ignore[arg-type]


def _result(engine: Engine, policy: Policy, seed: int, replans: tuple[SimulatedReplan, ...] | None) -> Result:
    metrics, scenario = engine.metrics, engine.scenario
    counters = engine.core.ranks()
    samples = sum(c.samples for c in counters)
    seconds = engine.finished_at * 1e-9
    return Result(
        policy=str(policy),
        seed=seed,
        seconds=seconds,
        versions=engine.version,
        rounds=engine.rounds,
        samples=samples,
        iteration_seconds=seconds * scenario.global_batch / samples if samples else math.nan,
        ranks=rank_results(scenario, metrics, counters),
        staleness=dict(sorted(metrics.staleness.items())),
        curve=tuple(metrics.curve),
        loss=engine.model.loss(),
        rejected=metrics.rejected,
        aborted=metrics.aborted,
        fenced=metrics.fenced,
        moved_bytes=metrics.moved_bytes,
        peak_transfers=max(n.peak for n in engine.clock.networks),
        events=metrics.events,
        timeline=tuple(metrics.timeline),
        pushed_at=tuple(metrics.pushed_at),
        replans=replans,
        repeated=metrics.repeated(),
        mode_changes=tuple(metrics.mode_changes),
    )


def replay(path: str | os.PathLike[str], policy: Policy | str | None = None) -> Replay:
    """Make every decision of a journal (Store.journal, `pyps run --journal`) again, in the run's order.

    policy: the run's policy, needed only if it is a custom one. Raises SegmentCorrupt if the file is not a
    journal.
    """
    if policy is not None:
        register_policy(policy_named(policy) if isinstance(policy, str) else policy)
    return native.replay(os.fspath(path))


class Rebalancing:
    """Re-plans a simulated run as a launcher does a real one: a Balancer sees what the core shows, and the
    core's re-plan event makes the changes that the Balancer decides.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        workers = list(zip(engine.workers, engine.depths, strict=True))
        devices = [_device(worker, depth, engine.scenario.global_batch) for worker, depth in workers]
        self._balancer = Balancer(devices, engine.scenario.batches, Rules(rests=engine.needs.lets_ranks_rest))
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
    """Return what a run knows of a worker before it has timed its steps."""
    if worker.planned is not None:
        return planned_device(worker.planned, depth)
    most = min(worker.max_samples or MAX_BATCH, MAX_BATCH)
    sizes = sorted({max(1, round(global_batch * (k + 1) / KNOTS)) for k in range(KNOTS)} | {worker.batch})
    seconds = accumulate((worker.cost(size) for size in sizes), max)  # a Table never falls
    return BalancedDevice(Table(tuple(zip(sizes, seconds, strict=True))), Bounds(most=min(most, sizes[-1])))
