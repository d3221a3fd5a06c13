"""Plans of small random clusters against every split of theirs, valued by what the plan reports.

    python benchmarks/brute_force.py [--family NAME] [--count 5000] [--first 0]

    shared        workers on a [[shared]] link: each split's transfers are followed (bsp, ssp, asp; limits)
    asp           workers that wait for none, with limits, prices of samples, ties, minima and multiples
    accumulation  micro-batches, of devices whose profiles tell the optimizer's seconds
    jobs          deadlines and budgets with preemptions, also on a shared link: every set and split
    shares        a model's state by each card's memory: every split, and what it leaves free for the state
    remedies      refusals: each change that one proposes is tried

A plan is wrong if another split is better, if it is refused though a split exists, if its lower bound is
above a split, or if a proposed change does not help.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
from record import table

from pyps.errors import Infeasible
from pyps.formats import Cluster, Device, Fit, Memory, ModelInfo, Parts, Plan, Point, Profile, WorkerGroup
from pyps.solver.constrained import ConstrainedProblem, ConstrainedSolution, allowed, observed
from pyps.solver.costs import Ints
from pyps.solver.jobs.spot import HOUR, lost_to_preemptions
from pyps.solver.plan import make_plan
from pyps.solver.problem import planning_problem
from pyps.solver.ranks import planned_ranks
from pyps.store.policies import policy_named

CLOSE = 1 + 1e-9  # relative: rounding
PRICE_STEP = 1 + 2e-4  # of a job's price
PARAMETERS = 100_000
MOST_SPLITS = 20_000

Luck = np.random.Generator
Value = Callable[[Ints, ConstrainedSolution], float]


@dataclass
class Found:
    """The clusters of a family that were tried, and what was wrong."""

    tried: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    unproven: int = 0
    helped: int = 0


def device(luck: Luck, most: int) -> Profile:
    fit = Fit(
        kind="affine",
        fixed_seconds=float(luck.uniform(1e-3, 8e-2)),
        per_sample_seconds=float(luck.uniform(1e-3, 2e-2)),
        trusted_min_batch=1,
        trusted_max_batch=512,
    )
    model = ModelInfo(name="m", parameters=PARAMETERS)
    return Profile(
        device=Device(name="d"), model=model, points=[Point(batch=1, seconds=1.0)], fit=fit, max_batch=most
    )


def group(luck: Luck, k: int, count: int, odd: float) -> dict[str, Any]:
    """A group's table. odd: the probability of each unusual key."""
    price = float(luck.choice([0.5, 1.0, 2.0, 3.3]))
    found: dict[str, Any] = {"name": f"g{k}", "profile": f"p{k}", "count": count, "price_per_hour": price}
    found["watts"] = float(luck.integers(50, 300))
    if luck.random() < odd:
        found["together"] = str(luck.choice(["x", "y"]))
    if luck.random() < odd / 2:
        found["required"] = True
    if luck.random() < odd:
        found["min_batch"] = int(luck.integers(1, 4))
    if luck.random() < odd:
        found["batch_multiple"] = int(luck.integers(1, 3))
    return found


def limits(luck: Luck, groups: Sequence[dict[str, Any]], share: float) -> dict[str, float]:
    hourly, found = sum(one["count"] * one["price_per_hour"] for one in groups), dict[str, float]()
    if luck.random() < share:
        found["price_per_hour"] = hourly * float(luck.uniform(0.3, 1.2))
    if luck.random() < share:
        found["watts"] = float(luck.uniform(100, 900))
    if luck.random() < share / 2:
        found["price_per_million_samples"] = float(luck.uniform(2, 40))
    return found


def asp_case(luck: Luck) -> tuple[Cluster, list[Profile]]:
    count = int(luck.integers(2, 4))
    groups = [group(luck, k, int(luck.integers(1, 3)), 0.2) for k in range(count)]
    tables = {"job": {"global_batch": int(luck.integers(3, 14))}, "worker": groups}
    tables |= {"run": {"policy": "asp"}, "limits": limits(luck, groups, 0.4)}
    return msgspec.convert(tables, Cluster), [device(luck, int(luck.integers(3, 12))) for _ in groups]


def shared_case(luck: Luck) -> tuple[Cluster, list[Profile]]:
    policy = str(luck.choice(["bsp", "bsp", "bsp", "ssp:bound=2", "asp"]))
    groups = [
        group(luck, k, 1 + (k < 2 and luck.random() < 0.5), 0.1) for k in range(int(luck.integers(2, 4)))
    ]
    for one in groups:
        if luck.random() < 0.8:
            one["shares"] = ["wan"]
        else:
            one["bandwidth"] = float(luck.uniform(1e6, 3e7))
    run: dict[str, Any] = {"policy": policy}
    if luck.random() < 0.2:
        run["depth"] = int(luck.integers(2, 4))
    simple = policy == "bsp" and "depth" not in run
    link = {
        "name": "wan",
        "bandwidth": float(10 ** luck.uniform(6.3, 8)),
        "latency": 0.002 * (luck.random() < 0.5),
    }
    tables = {"job": {"global_batch": int(luck.integers(3, 13 if simple else 7))}, "worker": groups}
    tables |= {"run": run, "limits": limits(luck, groups, 0.15), "shared": [link]}
    if not any("shares" in one for one in groups):
        groups[0]["shares"] = ["wan"]
    return msgspec.convert(tables, Cluster), [device(luck, int(luck.integers(3, 12))) for _ in groups]


def accumulation_case(luck: Luck) -> tuple[Cluster, list[Profile]]:
    groups, profiles = [], []
    for k in range(int(luck.integers(2, 4))):
        groups.append({"name": f"g{k}", "profile": f"p{k}", "max_accumulation": int(luck.integers(1, 5))})
        profile = device(luck, int(luck.integers(2, 9)))
        once = float(luck.uniform(0.02, 0.9) * (profile.fit.fixed_seconds if profile.fit else 0.0))
        parts = Parts(data=0.0, forward=0.001, backward=0.002, optimizer=once)
        profiles.append(msgspec.structs.replace(profile, points=[Point(batch=1, seconds=1.0, parts=parts)]))
    tables = {"job": {"global_batch": int(luck.integers(3, 20))}, "worker": groups}
    return msgspec.convert(tables, Cluster), profiles


def in_parts(profile: Profile, batch: int, repeats: int) -> float:
    """The least seconds of a batch over all sizes of its micro-batches; the optimizer steps once."""
    fit, parts, found = profile.fit, profile.points[0].parts, np.inf
    assert fit is not None
    assert parts is not None
    for size in range(1, min(batch, profile.max_batch or batch) + 1):
        count = -(-batch // size)
        if count <= repeats:
            alone = [
                fit.fixed_seconds + fit.per_sample_seconds * b for b in (size, batch - (count - 1) * size)
            ]
            found = min(found, (count - 1) * (alone[0] - parts.optimizer) + alone[1])
    return found


def fastest_in_parts(cluster: Cluster, profiles: list[Profile]) -> tuple[float, float] | None:
    """The least iteration of every split in every size of micro-batches; None if there is none."""
    total, best = cluster.job.global_batch, np.inf
    seconds = [
        [0.0, *(in_parts(one, b, group.max_accumulation) for b in range(1, total + 1))]
        for group, one in zip(cluster.worker, profiles, strict=True)
    ]
    for split in itertools.product(*(range(total + 1) for _ in profiles)):
        if sum(split) == total:
            best = min(best, max(own[b] for own, b in zip(seconds, split, strict=True)))
    return None if np.isinf(best) else (best, best)


def job_case(luck: Luck) -> tuple[Cluster, list[Profile]]:
    groups = [group(luck, k, int(luck.integers(1, 3)), 0.08) for k in range(int(luck.integers(2, 4)))]
    for one in groups:
        one["preemptions_per_hour"] = float(luck.choice([0.0, 0.05, 0.6]))
    tables: dict[str, Any] = {"worker": groups, "limits": {}}
    if luck.random() < 0.3:
        tables["limits"] = {"watts": float(luck.uniform(200, 900))}
    if luck.random() < 0.3:
        tables["shared"] = [{"name": "wan", "bandwidth": float(10 ** luck.uniform(6.3, 8))}]
        for one in groups:
            one["shares"] = ["wan"]
    job = {"global_batch": int(luck.integers(3, 12)), "target": 1e6}
    hours = float(10 ** luck.uniform(0.3, 2.3))
    chosen = luck.random()
    if chosen < 0.7:
        job["deadline_hours"] = hours
    if chosen > 0.4:
        job["budget"] = hours * float(luck.uniform(0.5, 6))
    tables |= {"job": job, "spot": {"checkpoint_seconds": 60.0, "restart_seconds": 600.0}}
    return msgspec.convert(tables, Cluster), [device(luck, int(luck.integers(3, 12))) for _ in groups]


def shares_case(luck: Luck) -> tuple[Cluster, list[Profile]]:
    """Two to four cards of unlike memory; samples that take like or unlike memory, mostly one multiple."""
    count, alike = int(luck.integers(2, 5)), luck.random() < 0.4
    step, unlike, in_parts = int(luck.choice([1, 1, 2])), luck.random() < 0.15, luck.random() < 0.3
    sample, context = int(luck.integers(1, 6)), int(luck.integers(0, 8))
    stage, whole = int(luck.choice([1, 2, 3, 3])), float(luck.choice([0.0, 0.125]))
    kept = {1: 8, 2: 4, 3: 8 * whole}[stage]  # of a parameter's 16 bytes, on every rank
    groups, profiles = [], []
    for k in range(count):
        one = group(luck, k, int(luck.integers(1, 3)) if count < 4 else 1, 0.0)
        one |= {"bandwidth": 1e8, "batch_multiple": int(luck.integers(1, 4)) if unlike else step}
        if luck.random() < 0.3:
            one["min_batch"] = int(luck.integers(1, 4))
        if in_parts:
            one["max_accumulation"] = int(luck.integers(1, 5))
        groups.append(one)
        each = sample if alike else int(luck.integers(1, 6))
        room = each * int(luck.integers(1, 7)) + int(luck.integers(0, 7))  # for samples and a share
        memory = Memory(
            fixed_bytes=PARAMETERS * (16 + context),
            bytes_per_sample=PARAMETERS * each,
            budget_bytes=int(PARAMETERS * (room + context + kept)),
        )
        profile = device(luck, int(luck.integers(3, 12)))
        model = msgspec.structs.replace(profile.model, optimizer="AdamW")
        profiles.append(msgspec.structs.replace(profile, memory=memory, max_batch=None, model=model))
    tables: dict[str, Any] = {"job": {"global_batch": 2 * int(luck.integers(2, 7))}}
    tables |= {"worker": groups, "sync": {"kind": "ring" if luck.random() < 0.5 else "none"}}
    tables["sharding"] = {"stage": stage, "shares": "memory", "whole": whole}
    if luck.random() < 0.1:
        tables["limits"] = {"watts": float(luck.uniform(200, 900))}
    return msgspec.convert(tables, Cluster), profiles


def splits_in_shares(cluster: Cluster, profiles: list[Profile]) -> Iterator[tuple[float, float]]:
    """The compute and the least share of every split for which the cards can divide the state, by its bytes.

    In micro-batches: of the smallest ones with which it takes no longer.
    """
    given, cards = cluster.sharding, []
    assert given is not None
    kept = {1: 8 * PARAMETERS, 2: 4 * PARAMETERS, 3: 8 * given.whole * PARAMETERS}[given.stage]
    state, total = 16 * PARAMETERS - kept, cluster.job.global_batch
    for one, profile in zip(cluster.worker, profiles, strict=True):
        assert profile.memory is not None
        room = profile.memory.budget_bytes - (profile.memory.fixed_bytes - 16 * PARAMETERS) - kept
        cards += [(room, profile.memory.bytes_per_sample, one, profile)] * one.count
    ways = [
        {
            b: sizes_of(one, profile, b)
            for b in range(one.min_batch or 1, total + 1)
            if not b % one.batch_multiple
        }
        for _, _, one, profile in cards
    ]
    for split in itertools.product(*ways):
        if sum(split) != total:
            continue
        sizes = [own[b] for own, b in zip(ways, split, strict=True)]
        for t in sorted({seconds for own in sizes for _, seconds in own}):
            least = [min((size for size, seconds in own if seconds <= t), default=None) for own in sizes]
            if None in least:
                continue
            free = [room - each * m for (room, each, _, _), m in zip(cards, least, strict=True) if m]
            if min(free) >= 0 and sum(free) >= state:
                yield t, min(free) / sum(free)
                break


def sizes_of(one: WorkerGroup, profile: Profile, batch: int) -> list[tuple[int, float]]:
    """The sizes of micro-batches of a batch, each with the batch's seconds."""
    fit, repeats = profile.fit, one.max_accumulation
    assert fit is not None
    found = []
    for size in range(1, batch + 1):
        parts = -(-batch // size)
        if parts <= repeats:
            found.append((size, parts * fit.fixed_seconds + batch * fit.per_sample_seconds))
    return found


def fastest_in_shares(
    cluster: Cluster, profiles: list[Profile], constrained: ConstrainedProblem
) -> tuple[float, float] | None:
    """The shortest compute of those splits, and the shortest iteration; None: there is none in the limits."""
    if any(one.need.sum() > one.at_most for one in constrained.limits):
        return None
    found = list(splits_in_shares(cluster, profiles))
    used = np.ones(len(constrained.problem.costs))
    ring = [t + replace(constrained.sync, least_share=least).seconds(used) for t, least in found]
    return (min(t for t, _ in found), min(ring)) if found else None


def splits(constrained: ConstrainedProblem) -> Iterator[Ints]:
    """Every split that keeps the bounds, the limits and the ties."""
    problem = constrained.problem
    choices = []
    for k in range(len(problem.costs)):
        most, step = int(min(problem.max_batch[k], problem.global_batch)), int(problem.batch_multiple[k])
        batches = [b for b in range(step, most + 1, step) if b >= problem.min_batch[k]]
        choices.append(batches if problem.required[k] else [0, *batches])
    for split in itertools.product(*choices):
        if sum(split) == problem.global_batch:
            batches = np.array(split, np.int64)
            if allowed(constrained, batches):
                yield batches


def best_of_all(
    cluster: Cluster, constrained: ConstrainedProblem, price: Any, rates: Any
) -> tuple[float, float] | None:
    """The best value by what the file minimises, and the shortest iteration; None: no split is allowed."""
    most, job = cluster.limits.price_per_million_samples, cluster.job
    best, soonest = np.inf, np.inf
    for batches in splits(constrained):
        seconds, used = observed(constrained, batches).iteration_seconds, batches > 0
        hourly, value = float(price[used].sum()), seconds
        if most is not None and hourly * seconds / HOUR * 1e6 / job.global_batch > most * CLOSE:
            continue
        if job.is_bounded and job.target is not None:
            lost, _ = lost_to_preemptions(float(rates[used].sum()), cluster.spot)
            whole = seconds * job.target / job.global_batch * lost
            paid = whole / HOUR * hourly
            if job.deadline_hours is not None and whole > job.deadline_hours * HOUR * CLOSE:
                continue
            if job.budget is not None and paid > job.budget * CLOSE:
                continue
            value = paid if job.deadline_hours is not None else whole
        best, soonest = min(best, value), min(soonest, seconds)
    return None if np.isinf(best) else (float(best), float(soonest))


def value_of(cluster: Cluster, plan: Plan) -> float:
    if cluster.sharding is not None and plan.sync is not None:
        return plan.iteration_seconds - plan.sync.seconds  # the ring follows the shares
    if not cluster.job.is_bounded or plan.target is None:
        return plan.iteration_seconds
    return (plan.target.price or 0.0) if cluster.job.deadline_hours is not None else plan.target.seconds


def tried(case: Callable[[Luck], tuple[Cluster, list[Profile]]], seed: int, found: Found) -> None:
    """Plan one cluster, and compare it with every split."""
    cluster, profiles = case(np.random.default_rng(seed))
    policy = cluster.run.policy or "bsp"
    pace, ranks = policy_named(policy).pace, planned_ranks(cluster, profiles)
    try:
        constrained = planning_problem(cluster, ranks, pace)
    except Infeasible:  # a required worker has no batch
        if case is shares_case and any(True for _ in splits_in_shares(cluster, profiles)):
            found.wrong.append(f"{seed}: refused, though there is a split")
        return
    price = np.array([rank.group.price_per_hour or 0.0 for rank in ranks])
    rates = np.array([rank.group.preemptions_per_hour for rank in ranks])
    if case is accumulation_case:
        best = fastest_in_parts(cluster, profiles)
    elif case is shares_case:
        best = fastest_in_shares(cluster, profiles, constrained)
    else:
        best = best_of_all(cluster, constrained, price, rates)
    found.tried += 1
    try:
        plan = make_plan(cluster, profiles, pace)
    except Infeasible as refusal:
        found.refused += 1
        if best is not None:
            found.wrong.append(f"{seed}: refused ({refusal}), of {best[0]:.6g}")
        return
    step = PRICE_STEP if cluster.job.is_bounded else CLOSE
    if best is None or value_of(cluster, plan) > best[0] * step:
        found.wrong.append(
            f"{seed}: {value_of(cluster, plan):.6g} by {[w.batch for w in plan.workers]}, of {best}"
        )
    elif not cluster.job.is_bounded and plan.lower_bound_seconds > best[1] * CLOSE:
        found.wrong.append(f"{seed}: no split below {plan.lower_bound_seconds:.6g}, one takes {best[1]:.6g}")
    found.unproven += plan.lower_bound_seconds < plan.iteration_seconds / CLOSE


def refused_case(luck: Luck) -> tuple[Cluster, list[Profile]]:
    """A cluster of tight bounds: limits, ties, alternatives of the same devices, required workers, jobs."""
    if luck.random() < 0.25:
        return job_case(luck)
    groups = [group(luck, k, int(luck.integers(1, 3)), 0.3) for k in range(int(luck.integers(2, 4)))]
    for one in groups:
        if luck.random() < 0.4:
            one["max_accumulation"] = int(luck.integers(1, 3))
    tables: dict[str, Any] = {"worker": groups, "job": {"global_batch": int(luck.integers(4, 60))}}
    tables["run"] = {"policy": str(luck.choice(["bsp", "asp"]))}
    tables["limits"] = {key: value * 0.6 for key, value in limits(luck, groups, 0.6).items()}
    if luck.random() < 0.4:
        tables["shared"] = [{"name": "box", "devices": int(luck.integers(1, 4))}]
        for one in groups[:2]:
            one |= {"shares": ["box"], "devices": int(luck.integers(1, 3))}
    return msgspec.convert(tables, Cluster), [device(luck, int(luck.integers(3, 12))) for _ in groups]


def changed(cluster: Cluster, way: str) -> list[Cluster]:
    """The clusters with what a refusal proposes; one for each of several batches."""
    plain = msgspec.to_builtins(cluster)
    if found := re.fullmatch(r"raise (\w+)\.(.+?) from \S+ to (\S+)", way):
        table_, key, value = found.groups()
        if table_ == "shared":
            name, _, key = key.rpartition(".")
            next(one for one in plain["shared"] if one["name"] == name)[key] = int(float(value))
        else:
            plain[table_][key] = float(value)
    elif found := re.fullmatch(r"raise max_accumulation of '(.+)' to (\d+)", way):
        next(one for one in plain["worker"] if one["name"] == found[1])["max_accumulation"] = int(found[2])
    elif found := re.fullmatch(r"do not require '(.+)'", way):
        next(one for one in plain["worker"] if one["name"] == found[1])["required"] = False
    elif found := re.fullmatch(r"allow every worker max_accumulation = (\d+)", way):
        for one in plain["worker"]:
            one["max_accumulation"] = max(one["max_accumulation"], int(found[1]))
    elif way.startswith("set job."):
        for key, value in re.findall(r"job\.(\w+) to (\S+)", way):
            plain["job"][key] = float(value)
    elif batches := re.findall(r"\d+", way):
        return [
            msgspec.structs.replace(cluster, job=msgspec.structs.replace(cluster.job, global_batch=int(b)))
            for b in batches
        ]
    return [msgspec.convert(plain, Cluster)]


def remedies(seed: int, found: Found) -> None:
    """Make each change that a refusal proposes, and plan again."""
    cluster, profiles = refused_case(np.random.default_rng(seed))
    pace = policy_named(cluster.run.policy or "bsp").pace
    found.tried += 1
    try:
        make_plan(cluster, profiles, pace)
    except Infeasible as refusal:
        found.refused += 1
        ways = re.split(r",? or (?=raise|set|do not|allow)", refusal.nearest) if refusal.nearest else []
        for way in ways:
            for other in changed(cluster, way):
                try:
                    make_plan(other, profiles, pace)
                    found.helped += 1
                except Infeasible as error:
                    found.wrong.append(f"{seed}: {refusal} : {way} : {error}")


FAMILIES = {"shared": shared_case, "asp": asp_case, "accumulation": accumulation_case, "jobs": job_case}
FAMILIES["shares"] = shares_case
NAMES = (*FAMILIES, "remedies")


def run_family(name: str, first: int, count: int) -> Found:
    found = Found()
    for seed in range(first, first + count):
        if name == "remedies":
            remedies(seed, found)
        else:
            tried(FAMILIES[name], seed, found)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", choices=NAMES)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args(arguments)
    rows, wrong = [], 0
    for name in [options.family] if options.family else NAMES:
        began = time.process_time()
        found = run_family(name, options.first, options.count)
        wrong += len(found.wrong)
        seconds = f"{time.process_time() - began:.0f}"
        figures = found.tried, found.refused, found.unproven, found.helped, len(found.wrong)
        rows.append([name, *map(str, figures), seconds])
        for line in found.wrong:
            print(f"{name} {line}", file=sys.stderr)
    print(table([["family", "clusters", "refused", "gap left", "remedies", "wrong", "CPU seconds"], *rows]))
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
