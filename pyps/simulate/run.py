"""`simulate` one policy, or `compare` several: same scenario, seeds, samples and learning-rate rule."""

from __future__ import annotations

import math
from collections.abc import Iterable

from pyps.errors import InputError
from pyps.simulate.engine import Engine
from pyps.simulate.metrics import Result, Tally, rank_results
from pyps.simulate.problem import Learning, Model
from pyps.simulate.scenario import Scenario
from pyps.store.policies import Policy, check_pipeline, policy_named

CURVE_POINTS = 200


def simulate(
    scenario: Scenario,
    policy: Policy | str = "bsp",
    *,
    iterations: int = 100,
    seed: int = 0,
    learning: Learning | None = None,
    lr: float = 0.1,
    target_loss: float | None = None,
    seconds: float = math.inf,
    slices: bool = False,
    pipeline: bool = False,
) -> Result:
    """Train `iterations` global batches in virtual time, or until a loss is reached, or for so many seconds.

    learning: real gradients, None: times alone. slices: keep what each worker did when, for a picture.
    pipeline: workers compute a step while the gradient of the one before travels. The same arguments give the
    same result to the bit. Raises InputError, Stuck.
    """
    if iterations < 1:
        raise InputError("simulate", "iterations", str(iterations), "at least 1")
    if target_loss is not None and learning is None:
        raise InputError("simulate", "target_loss", str(target_loss), "learning beside it")
    rules = policy_named(policy) if isinstance(policy, str) else policy
    if pipeline:
        check_pipeline(rules)
    model = Model(learning, lr, scenario.global_batch, rules.params().lambda_)
    tally = Tally((1 + pipeline) * len(scenario.workers), slices)
    engine = Engine(scenario, rules, model, tally, iterations * scenario.global_batch, seed, pipeline)
    if learning is not None:
        every = max(1, iterations // CURVE_POINTS) * scenario.global_batch
        engine.measure(every, target_loss)
    engine.work(seconds)
    return _result(engine, rules, seed)


def compare(scenario: Scenario, policies: Iterable[Policy | str], **arguments: object) -> list[Result]:
    """`simulate` for each policy with the same arguments."""
    return [simulate(scenario, policy, **arguments) for policy in policies]  # type: ignore[arg-type]


def _result(engine: Engine, policy: Policy, seed: int) -> Result:
    tally, scenario = engine.tally, engine.scenario
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
        ranks=rank_results(scenario, tally, counters),
        staleness=dict(sorted(tally.staleness.items())),
        curve=tuple(tally.curve),
        loss=engine.model.loss(),
        rejected=tally.rejected,
        aborted=tally.aborted,
        fenced=tally.fenced,
        moved_bytes=tally.moved_bytes,
        peak_transfers=max(n.peak for n in engine.clock.networks),
        events=tally.events,
        slices=tuple(tally.slices),
        pushed_at=tuple(tally.pushed_at),
    )
