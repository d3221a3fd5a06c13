"""Why a plan is as it is: who and what holds it up, what a change is worth, and a verdict in words.

The prices are the dual values of the relaxation over the workers in use (pyps.solver.milp.checks): true for
small changes, as long as the same workers stay in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pyps.formats import Plan
from pyps.solver.milp.checks import Prices, prices
from pyps.solver.milp.constrained import Coupled
from pyps.solver.ranks import Member

WORTH_NAMING = 1e-3  # of the iteration: smaller prices and waits are rounding
NAMED_AT_MOST = 4
PRICED_AT_MOST = 5000  # workers; beyond, a linear program of this size takes minutes


@dataclass(frozen=True)
class Role:
    """One group of like workers with like batches: what binds it, and what that is worth in seconds.

    binds: "holds the others up", "at its maximum", "at its minimum", "waits" or "left out". waits_seconds:
    for the slowest, every iteration. share: how far the group holds the iteration up, of 1. bound_worth:
    saved for one more sample of room in a worker.
    """

    name: str
    workers: int
    batch: int
    binds: str
    waits_seconds: float
    share: float
    bound_worth: float


@dataclass(frozen=True)
class Explanation:
    """Roles in rank order; sample_worth: seconds that one more sample of global batch costs; the verdict."""

    roles: list[Role]
    sample_worth: float
    verdict: str


def explain(plan: Plan, members: Sequence[Member], coupled: Coupled) -> Explanation:
    """Explain the plan that was made of these. Raises PypsError if the relaxation has no optimum."""
    batches = [worker.batch for worker in plan.workers]
    n = len(batches)
    priced = (
        prices(coupled.problem, batches)
        if n <= PRICED_AT_MOST
        else Prices(plan.iteration_seconds, 0.0, np.zeros(n), np.zeros(n), np.zeros(n))
    )
    roles = _roles(plan, members, coupled, priced)
    return Explanation(roles, priced.per_sample, _verdict(plan, roles, priced, coupled))


def _roles(plan: Plan, members: Sequence[Member], coupled: Coupled, priced: Prices) -> list[Role]:
    problem = coupled.problem
    cap = problem.costs.last_batch(problem.cap)
    slowest = max(worker.predicted_seconds for worker in plan.workers)
    found: dict[tuple[str, int], list[int]] = {}
    for rank, (member, worker) in enumerate(zip(members, plan.workers, strict=True)):
        found.setdefault((member.group.name, worker.batch), []).append(rank)
    roles = []
    for (name, batch), ranks in found.items():
        first, step = ranks[0], int(problem.quantum[ranks[0]])
        waits = slowest - plan.workers[first].predicted_seconds
        low = max(int(problem.low[first]), 1)
        if not batch:
            binds = "left out"
        elif batch + step > cap[first]:
            binds = "at its maximum"
        elif batch - step < low and low > step:
            binds = "at its minimum"
        elif waits <= WORTH_NAMING * slowest or priced.share[first] > WORTH_NAMING:
            binds = "holds the others up"
        else:
            binds = "waits"
        worth = float(max(priced.cap[first], priced.low[first]))
        roles.append(
            Role(
                name,
                len(ranks),
                batch,
                binds,
                waits if batch else 0.0,
                float(priced.share[ranks].sum()),
                worth,
            )
        )
    return roles


def _verdict(plan: Plan, roles: Sequence[Role], priced: Prices, coupled: Coupled) -> str:
    """The one paragraph."""
    sentences = [_time_sentence(plan)]
    holders = [role for role in roles if role.binds == "holds the others up"]
    if holders:
        several = len(holders) > 1 or holders[0].workers > 1
        sentences.append(f"{_names(holders)} {'set' if several else 'sets'} the pace.")
    for role in roles:
        if role.binds == "at its maximum":
            room = f"; one more sample of room would save {_ms(role.bound_worth)}" if role.bound_worth else ""
            sentences.append(f"{_names([role])} cannot take more than {role.batch} samples{room}.")
        if role.binds == "at its minimum":
            sentences.append(f"{_names([role])} may not take fewer than {role.batch} samples.")
    out = [role for role in roles if role.binds == "left out"]
    if out:
        why = "the others are done sooner without" if coupled.loose else "that keeps limits and time"
        sentences.append(f"{_names(out)} should stay out: {why}.")
    for limit in coupled.limits:
        used = float(limit.need[[worker.batch > 0 for worker in plan.workers]].sum())
        sentences.append(f"Of {limit.key} {limit.at_most:g}, {used:g} is used.")
    if priced.per_sample > 0:
        sentences.append(f"One more sample in the global batch costs {_ms(priced.per_sample)}.")
    sentences.append(_bound_sentence(plan))
    return " ".join(sentences)


def _time_sentence(plan: Plan) -> str:
    sync = f", {_ms(plan.sync.seconds)} of it to synchronise" if plan.sync and plan.sync.seconds else ""
    text = f"An iteration of {plan.global_batch} samples takes {_ms(plan.iteration_seconds)}{sync}"
    if plan.speedup_over_even is None:
        return f"{text}; an even split would break a bound."
    return f"{text}, {plan.speedup_over_even:.2f} times as fast as an even split."


def _bound_sentence(plan: Plan) -> str:
    gain = 1 - plan.lower_bound_seconds / plan.iteration_seconds
    if plan.sync:
        return "No choice of workers and batches within the bounds is faster."
    if gain < WORTH_NAMING:
        return "No split can be faster, even of divisible samples."
    return f"No split is faster; were samples divisible and minima gone, at most {gain:.1%} could be gained."


def _names(roles: Sequence[Role]) -> str:
    counts: dict[str, int] = {}
    for role in roles:
        counts[role.name] = counts.get(role.name, 0) + role.workers
    parts = [f"{name} ({count} workers)" if count > 1 else name for name, count in counts.items()]
    if len(parts) > NAMED_AT_MOST:
        parts = [*parts[: NAMED_AT_MOST - 1], f"{len(parts) - NAMED_AT_MOST + 1} more groups"]
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
