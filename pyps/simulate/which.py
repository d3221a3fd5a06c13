"""Ranks the ways to train on a cluster: DDP on fewer devices, planned DDP or FSDP2, and the store.

A way's pace, in seconds a sample, is simulated with its own planned batches, codecs and depths; ranks of DDP
add the time of their ring to the simulated compute. How many samples a way needs for the loss that
synchronous steps reach is a range: what it was on convex problems, at the learning rate that is best for
synchronous steps (benchmarks/which.py), and nobody knows it for another model. With a known gradient noise it
ends at what batches as much larger as the gradients are late would need. The ways are ranked by pace times
the middle of the range. A pilot, in which the few that may win train for the same time, tells the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

import msgspec
import numpy as np

from pyps.errors import InputError, PypsError
from pyps.formats import Cluster, Jitter, Plan, Profile, RunTable, Sharding, SyncCost
from pyps.formats.mode import ROUND
from pyps.formats.options import AUTO
from pyps.profiler.fit import point_seconds
from pyps.profiler.statistics import spread
from pyps.simulate.run import simulate
from pyps.simulate.scenario import Scenario, planned_scenario
from pyps.solver.constrained import ConstrainedProblem, evaluate, even_batches
from pyps.solver.plan import make_plan
from pyps.solver.problem import planning_problem
from pyps.solver.ranks import planned_ranks
from pyps.store.policies import policy_named

PLAIN = RunTable()
ROUNDS = 60  # simulated global batches
LEVEL = 0.03  # relative: paces that differ by less are the same
PILOT_ROUNDS = 100
PILOT_WAYS = 4  # ways in a pilot, at most
WORTH = 0.1  # of a loss: by which another way has to be ahead after a pilot, as early leads fade


class Samples(msgspec.Struct, frozen=True):
    """The samples to a loss over those of synchronous steps: from `low` to `high`, `middle` to rank by.

    over: the share of problems in which a way needs more than `high`, or never arrives.
    """

    low: float
    middle: float
    high: float
    source: str
    over: float = 0.0


class TrainingWay(msgspec.Struct, frozen=True):
    """A way to train.

    kind: ranks of DDP or FSDP2 that reduce around a ring, workers of a store that wait for rounds ("store"),
    whose gradients are late ("late"), or that take local steps ("local"). run: of the store. lateness: global
    batches by which its gradients are late, or that a worker's round has. needs: what the script has to have.
    """

    name: str
    kind: str
    samples: Samples
    needs: str
    run: RunTable = PLAIN
    lateness: float = 0.0
    sharding: Sharding | None = None


class Ranked(msgspec.Struct, frozen=True):
    """A way and what it takes. seconds_per_sample: its pace. to_loss: the seconds of each sample's worth of a
    synchronous one, low, middle and high. workers: that have a batch. run: its [run] table; None: a ring.
    """

    name: str
    kind: str
    seconds_per_sample: float
    to_loss: tuple[float, float, float]
    samples: Samples
    workers: int
    needs: str
    why: str
    run: RunTable | None = None


class Ranking(msgspec.Struct, frozen=True):
    """All ways, the best first. level: the names of those that may be as fast as the first. measure: what
    would tell them apart. pilot: the ways to try, by name, each with its samples in the same time. left_out:
    ways that do not work here, and why.
    """

    ways: list[Ranked]
    level: list[str]
    measure: list[str]
    pilot: dict[str, int]
    left_out: dict[str, str]


EXACT = Samples(1.0, 1.0, 1.0, "the gradient of one process")
NEARLY = Samples(1.0, 1.02, 1.1, "errors are fed back")
ON_CONVEX = "nine in ten convex problems, at the rate that is best for synchronous steps"
LATE = Samples(0.8, 1.03, 1.4, ON_CONVEX)
PIPED = Samples(0.8, 1.01, 2.3, f"{ON_CONVEX}; one in twenty may not arrive", 0.05)
# Of 50 problems, 20 of them half networks and 30 convex; what needs over 4 counts as 8 in the middle.
SELDOM = "{} in ten problems, at the rate that is best for synchronous steps; the others may not arrive at it"
RING = "torchrun, ranks that reach each other, pyps.torch.uneven"
STORE = "pyps run, worker.batches() and worker.step(); any network"

INT8 = RunTable(codec="int8", pull_codec="int8")
RINGS = (
    TrainingWay("ddp, planned", "ring", EXACT, RING),
    TrainingWay("ddp, planned, int8", "ring", NEARLY, f"{RING}(wire='int8')", INT8),
    TrainingWay("fsdp2, planned", "ring", EXACT, f"{RING}, fully_shard", sharding=Sharding(stage=3)),
)
BY_MEMORY = (
    TrainingWay(
        "optimizer by memory, planned",
        "ring",
        EXACT,
        f"{RING}, shard_optimizer",
        sharding=Sharding(stage=1, shares="memory"),
    ),
    TrainingWay(
        "shards by memory, planned",
        "ring",
        EXACT,
        f"{RING}, shard",
        sharding=Sharding(stage=3, shares="memory"),
    ),
)
STORES = (
    TrainingWay("bsp", "store", EXACT, STORE, RunTable(policy="bsp", codec="plan")),
    TrainingWay(
        "quorum",
        "store",
        Samples(0.9, 1.03, 1.3, ON_CONVEX),
        STORE,
        RunTable(policy="quorum", codec="plan"),
        0.1,
    ),
    TrainingWay("hps", "late", PIPED, STORE, RunTable(policy="hps", codec="plan", depth=AUTO), 1.0),
    TrainingWay("asp", "late", LATE, STORE, RunTable(policy="asp", codec="plan"), 1.0),
    TrainingWay("saps", "late", LATE, STORE, RunTable(policy="saps", codec="plan"), 1.0),
    TrainingWay("r2sp", "late", LATE, STORE, RunTable(policy="r2sp", codec="plan"), 1.0),
    *(
        TrainingWay(
            f"local steps {count}, {codec}",
            "local",
            Samples(low, middle, 4.0, SELDOM.format(arrive), over),
            STORE,
            RunTable(policy="bsp", codec=codec, pull_codec=codec, local_steps=count),
            count - 1.0,
        )
        for count, low, middle, arrive, over in ((8, 0.75, 4.5, "five", 0.5), (32, 1.2, 5.6, "four", 0.6))
        for codec in ("int8", "int4")
    ),
)


def ranked_ways(cluster: Cluster, profiles: Sequence[Profile], pilot: int = PILOT_ROUNDS) -> Ranking:
    """Rank the ways to train on a cluster.

    profiles: one with a fit for each group. pilot: global batches of the slowest way in a pilot.

    Raises InputError for a cluster in tokens, of which a simulation knows nothing, or where no way works.
    """
    if cluster.job.unit != "samples":
        raise InputError("which", "job.unit", repr(cluster.job.unit), '"samples": it simulates those')
    found, left_out = list[Ranked](), dict[str, str]()
    linked = _linked(cluster, profiles)
    if linked:
        found += _on_fewer(cluster, profiles, left_out)
    rings = [*RINGS, *(BY_MEMORY if all(profile.memory for profile in profiles) else ())]
    for way in (*(rings if linked else ()), *STORES):
        try:
            paced = _ring if way.kind == "ring" else _store
            pace, workers = paced(cluster, profiles, way)
        except PypsError as error:
            left_out[way.name] = str(error)
            continue
        found.append(_ranked(cluster, way, pace, workers))
    if not found:
        raise InputError("which", "cluster", "; ".join(left_out.values()), "one on which some way works")
    found.sort(key=lambda one: one.to_loss[1])
    level = [one.name for one in found[1:] if one.to_loss[0] < found[0].to_loss[1] * (1 + LEVEL)]
    finalists = _finalists(found)
    return Ranking(
        found, level, _to_measure(cluster, linked, level), _pilot(cluster, finalists, pilot), left_out
    )


def after_pilot(ranking: Ranking, losses: Mapping[str, float]) -> Ranked:
    """The way to go on with: the first of the ranking without local steps, unless another one's loss after
    the same time is clearly below; then local steps, if theirs is clearly below that.

    losses: by names of the ranking's ways; not finite where a way has diverged. Raises InputError for a name
    that is none, or where no way without local steps is among them.
    """
    ways = {one.name: one for one in ranking.ways}
    for name in losses:
        if name not in ways:
            raise InputError("--loss", "", repr(name), f"one of {', '.join(ways)}")
    finite = {name: loss for name, loss in losses.items() if math.isfinite(loss)}
    safe = [one.name for one in ranking.ways if one.name in finite and one.kind != "local"]
    if not safe:
        raise InputError(
            "--loss", "", ", ".join(losses) or "none", "a finite one of a way without local steps"
        )
    chosen = safe[0]
    for names in (safe, finite):
        best = min(names, key=lambda name: finite[name])
        if finite[chosen] - finite[best] > WORTH * abs(finite[chosen]):
            chosen = best
    return ways[chosen]


def way_scenario(cluster: Cluster, profiles: Sequence[Profile], run: RunTable) -> Scenario:
    """The scenario of a cluster in this mode, planned for it; steps scatter as the profiles' do, where the
    cluster file states no jitter.
    """
    cluster = _of_store(cluster, profiles, run)
    plan = make_plan(cluster, profiles, policy_named(run.policy or "bsp").pace)
    return _scenario(cluster, profiles, plan)


def _scenario(cluster: Cluster, profiles: Sequence[Profile], plan: Plan) -> Scenario:
    by_name = {group.name: profile for group, profile in zip(cluster.worker, profiles, strict=True)}
    return planned_scenario(cluster, by_name, plan)


def _of_store(cluster: Cluster, profiles: Sequence[Profile], run: RunTable) -> Cluster:
    simulation = cluster.simulation
    if simulation.jitter == Jitter():
        spreads = [spread(s) for p in profiles for q in p.points if len(s := point_seconds(q)) > 2]
        jitter = Jitter(sigma=median(spreads) if spreads else 0.0)
        simulation = msgspec.structs.replace(simulation, jitter=jitter)
    return msgspec.structs.replace(cluster, run=run, sync=None, sharding=None, simulation=simulation)


def _store(cluster: Cluster, profiles: Sequence[Profile], way: TrainingWay) -> tuple[float, int]:
    """Seconds a sample of a way over the store, and its workers."""
    scenario = way_scenario(cluster, profiles, way.run)
    rounds = max(4, ROUNDS // (way.run.local_steps or 1))
    assert way.run.policy is not None
    done = simulate(scenario, way.run.policy, iterations=rounds, depth=way.run.depth or 1)
    return done.seconds / done.samples, len(scenario.workers)


def _of_ring(cluster: Cluster, sharding: Sharding | None = None, run: RunTable = PLAIN) -> Cluster:
    """The cluster whose ranks reduce around a ring, over the slowest of what their transfers cross."""
    shared = [one.bandwidth for one in cluster.shared if one.bandwidth is not None]
    least = min(shared, default=None)
    groups = [
        msgspec.structs.replace(g, bandwidth=least if g.bandwidth is None else min(least, g.bandwidth))
        if least is not None and g.shares
        else g
        for g in cluster.worker
    ]
    sync = cluster.sync if cluster.sync is not None and cluster.sync.kind == "ring" else SyncCost(kind="ring")
    if sharding is not None and (given := cluster.sharding) is not None:
        stage = sharding.stage if sharding.shares == "memory" else given.stage
        sharding = msgspec.structs.replace(given, stage=stage, shares=sharding.shares)
    return msgspec.structs.replace(cluster, worker=groups, run=run, sync=sync, sharding=sharding)


def _ring(cluster: Cluster, profiles: Sequence[Profile], way: TrainingWay) -> tuple[float, int]:
    """Seconds a sample of ranks with planned batches, and how many they are."""
    plan = make_plan(_of_ring(cluster, way.sharding, way.run), profiles, ROUND)
    used = [worker for worker in plan.workers if worker.batch]
    sync = plan.sync.seconds if plan.sync is not None else 0.0
    slower = _slowed_by_noise(cluster, profiles, plan)
    return ((plan.iteration_seconds - sync) * slower + sync) / plan.global_batch, len(used)


def _slowed_by_noise(cluster: Cluster, profiles: Sequence[Profile], plan: Plan) -> float:
    """Return how much longer rounds take than the slowest step without noise, as simulated."""
    scenario = _scenario(_of_store(cluster, profiles, PLAIN), profiles, plan)
    alone = tuple(replace(w, bandwidth=math.inf, latency=0.0, host="") for w in scenario.workers)
    scenario = replace(scenario, workers=alone, server_bandwidth=math.inf, schedule=None)
    slowest = max(worker.cost(worker.batch) for worker in alone)
    return max(1.0, simulate(scenario, "bsp", iterations=ROUNDS).iteration_seconds / slowest)


def _on_fewer(cluster: Cluster, profiles: Sequence[Profile], left_out: dict[str, str]) -> list[Ranked]:
    """Plain DDP, with equal batches, on the fastest devices: as many as are best."""
    name = "ddp, equal batches"
    try:
        ring = _of_ring(cluster)
        ranks = planned_ranks(ring, profiles)
        problem = planning_problem(ring, ranks)
        pace, count = _best_equal(problem, cluster.job.global_batch)
        plan = make_plan(ring, profiles)
    except PypsError as error:
        left_out[name] = str(error)
        return []
    pace *= _slowed_by_noise(cluster, profiles, plan)
    way = TrainingWay(f"ddp, equal batches on {count} of {len(ranks)}", "ring", EXACT, "torch's DDP as it is")
    return [_ranked(cluster, way, pace, count)]


def _best_equal(constrained: ConstrainedProblem, total: int) -> tuple[float, int]:
    """The least seconds a sample of equal batches on the fastest workers, and how many these are."""
    problem = constrained.problem
    count = len(problem.costs)
    each = [
        problem.costs.take(np.array([k])).compute(np.array([max(1, total // count)])) for k in range(count)
    ]
    order = np.argsort([float(seconds[0]) for seconds in each], kind="stable")
    found = []
    for k in range(1, count + 1):
        batches = np.zeros(count, np.int64)
        batches[order[:k]] = even_batches(total, k)
        if (batches <= problem.max_batch).all():
            found.append((evaluate(constrained, batches).iteration_seconds / total, k))
    if not found:
        raise InputError("which", "job.global_batch", str(total), "one whose equal shares fit the devices")
    return min(found)


def _ranked(cluster: Cluster, way: TrainingWay, pace: float, workers: int) -> Ranked:
    samples = way.samples
    noise = cluster.goodput.noise_scale if cluster.goodput is not None else None
    if noise is not None and way.lateness:
        batch = cluster.job.global_batch
        most = (noise + (1 + way.lateness) * batch) / (noise + batch)
        source = f"{samples.source}; at most {most:.2f} by the gradient noise of {noise:.4g} samples"
        low, middle, high = (min(x, most) for x in (samples.low, samples.middle, samples.high))
        over = samples.over if high < most else 0.0  # the rate is then far below what curvature bears
        samples = Samples(low, middle, high, source, over)
    to_loss = (pace * samples.low, pace * samples.middle, pace * samples.high)
    run = None if way.kind == "ring" else way.run
    why = _why(way)
    if samples.over:
        much = f"over {samples.high:g} times the samples"
        why += f"; in {samples.over:.0%} of problems it needs {much} or never arrives"
    return Ranked(way.name, way.kind, pace, to_loss, samples, workers, way.needs, why, run)


def _why(way: TrainingWay) -> str:
    if way.run.depths[1] > 1:
        return "transfers overlap with the next step's compute, and gradients are a step late"
    if way.run.policy == "r2sp":
        return "transfers take turns on the link, and gradients are a global batch late"
    return {
        "ring": "each rank sends its gradient around a ring, and waits for the slowest",
        "store": "each worker sends one gradient and waits for the slowest",
        "late": "no worker waits for another, and gradients are a global batch late",
        "local": f"{way.run.local_steps} steps share a transfer",
    }[way.kind]


def _linked(cluster: Cluster, profiles: Sequence[Profile]) -> bool:
    """Return whether every worker's link is known."""
    pairs = zip(cluster.worker, profiles, strict=True)
    return all(g.bandwidth is not None or g.shares or p.link is not None for g, p in pairs)


def _finalists(found: Sequence[Ranked]) -> list[Ranked]:
    """The ways of a pilot: the best of each kind that may still win, and the best with exact gradients, on
    which a pilot can fall back.
    """
    kinds = dict[str, Ranked]()
    for one in found:
        kind = one.name.partition(",")[0] if one.kind == "local" else one.kind
        kinds.setdefault("exact" if one.samples.high == 1 else kind, one)
    safe = [one for kind, one in kinds.items() if kind == "exact"]
    most = found[0].to_loss[1] * (1 + LEVEL)
    others = [one for kind, one in kinds.items() if kind != "exact" and one.to_loss[0] < most]
    return sorted(safe + others[: PILOT_WAYS - len(safe)], key=lambda one: one.to_loss[1])


def _pilot(cluster: Cluster, finalists: Sequence[Ranked], rounds: int) -> dict[str, int]:
    """The samples of each way of a pilot: whole rounds, in the same time. rounds: of the slowest."""
    if len(finalists) < 2:
        return {}
    batch = cluster.job.global_batch
    seconds = rounds * batch * max(one.seconds_per_sample for one in finalists)
    return {
        one.name: max(1, round(seconds / one.seconds_per_sample / (size := batch * _local_steps(one)))) * size
        for one in finalists
    }


def _local_steps(one: Ranked) -> int:
    return (one.run.local_steps if one.run is not None else None) or 1


def _to_measure(cluster: Cluster, linked: bool, level: Sequence[str]) -> list[str]:
    """Return what would tell ways apart that are level."""
    said = []
    if not linked:
        said.append(
            "the links: pyps-profile link, or bandwidth in the cluster file; without them transfers are free"
        )
    if level and cluster.goodput is None:
        said.append("the gradient noise: GradientNoise in a run, then [goodput] noise in the cluster file")
    if level:
        said.append("a pilot: the ways below for the same time, and --loss NAME=LOSS for each")
    return said
