"""`simulate` one policy, or `compare` several under equal conditions."""

from __future__ import annotations

import math
from collections.abc import Iterable

from pyps.errors import InputError
from pyps.formats.options import MAX_DEPTH
from pyps.native.values import Hyper, Optimizer
from pyps.simulate.engine import Engine
from pyps.simulate.metrics import Metrics, Result, SimulatedReplan, rank_results
from pyps.simulate.problem import LocalOptimizer, Model, Objective
from pyps.simulate.rebalance import Rebalancing
from pyps.simulate.scenario import Scenario
from pyps.store.policies import Policy, check_pipeline, policy_named

CURVE_POINTS = 200


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
    pipeline: bool | int = False,
    measure_every: int = 0,
    local: LocalOptimizer | None = None,
    rebalance: bool = False,
) -> Result:
    """Train in virtual time. The same arguments give the same result to the bit.

    scenario: the cluster. policy: a policy or its text. iterations: global batches to train. seed: of jitter.
    objective: real gradients; None: only times. lr: learning rate of a global batch, or all of an optimizer's
    constants. optimizer: "sgd", "momentum", "adamw", "adam" or "adagrad". target_loss: stop once the loss is
    that low; needs an objective. seconds: stop after so much virtual time. timeline: record what each worker
    did and when, for pictures. pipeline: workers overlap transfers with the next steps' compute, with this
    number of steps under way; True: as the scenario says of each worker, or 2. measure_every: samples between
    two measurements of the loss; 0: a global batch, or more so that there are at most about 200. local: the
    workers' own optimizer, in a scenario of local steps; `lr` and `optimizer` are then the store's, for the
    difference that local steps make. rebalance: move samples between workers as `pyps run --rebalance` does;
    the result's `replans` tell what that changed.

    Raises InputError, and Deadlock where the workers would wait for ever.
    """
    if iterations < 1:
        raise InputError("simulate", "iterations", str(iterations), "at least 1")
    if measure_every < 0:
        raise InputError("simulate", "measure_every", str(measure_every), "at least 0")
    if target_loss is not None and objective is None:
        raise InputError("simulate", "target_loss", str(target_loss), "an objective to go with it")
    chosen = policy_named(policy) if isinstance(policy, str) else policy
    depths = _depths(scenario, pipeline)
    if max(depths) > 1:
        check_pipeline(chosen)
    hyper = lr if isinstance(lr, Hyper) else Hyper(lr)
    if objective is not None and scenario.local != (local is not None):
        found = "nothing" if local is None else "an optimizer"
        expected = "one in a scenario of local steps, nothing in others"
        raise InputError("simulate", "local", found, expected)
    model = Model(objective, Optimizer.of(optimizer), hyper, chosen.params().correction, local)
    metrics = Metrics(max(depths) * len(scenario.workers), timeline)
    engine = Engine(scenario, chosen, model, metrics, iterations * scenario.global_batch, seed, depths)
    if objective is not None:
        every = max(1, iterations // CURVE_POINTS) * scenario.global_batch
        engine.measure(measure_every or every, target_loss)
    balancing = Rebalancing(engine) if rebalance else None
    engine.work(seconds)
    return _result(engine, chosen, seed, balancing.replans() if balancing is not None else None)


def _depths(scenario: Scenario, pipeline: bool | int) -> list[int]:
    """Steps under way, of each worker."""
    if pipeline is True:
        return [w.depth or 2 for w in scenario.workers]
    if not 0 <= pipeline <= MAX_DEPTH:
        raise InputError("simulate", "pipeline", str(pipeline), f"True, or 1 (no pipeline) to {MAX_DEPTH}")
    return [int(pipeline) or 1] * len(scenario.workers)


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
    )
