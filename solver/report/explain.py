"""Explains a plan: which workers and bounds determine its time, what a change would save, and a verdict in
words.

The savings are the dual values of the relaxation over the workers in use (pyps.solver.milp.checks). They hold
for small changes, as long as the same workers stay in use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pyps.formats import Plan, PlanWorker
from pyps.solver.constrained import ConstrainedProblem
from pyps.solver.exact.minmax import Problem, rounded
from pyps.solver.milp.checks import ShadowPrices, shadow_prices
from pyps.solver.ranks import PlannedRank
from pyps.solver.report.warnings import barred
from pyps.solver.shards import with_shares
from pyps.solver.ways import GIB

NEGLIGIBLE = 1e-3  # of the iteration: smaller prices and waits are rounding errors
NAMED_AT_MOST = 4
PRICED_AT_MOST = 5000  # workers; beyond, a linear program of this size takes minutes


@dataclass(frozen=True)
class GroupExplanation:
    """Workers of one group with the same batch: what binds them, and what a change would save, in seconds.

    binds: "holds the others up", "at its maximum", "at its minimum", "waits", "left out" or "no batch fits".
    waits_seconds: how long each worker waits for the slowest, every iteration. share: how much the workers
    determine the iteration time, from 0 to 1. seconds_saved_per_sample: what a bound that is looser by one
    sample would save.
    """

    name: str
    workers: int
    batch: int
    binds: str
    waits_seconds: float
    share: float
    seconds_saved_per_sample: float


@dataclass(frozen=True)
class Explanation:
    """Groups in rank order; the seconds that one more sample in the global batch costs; the verdict.

    seconds_saved_per_gib: of memory, on each card of a group, by its name; "": for all cards together.
    """

    groups: list[GroupExplanation]
    seconds_per_sample: float
    verdict: str
    seconds_saved_per_gib: dict[str, float]


def explain(
    plan: Plan,
    ranks: Sequence[PlannedRank],
    constrained: ConstrainedProblem,
    worth: Mapping[str, float] | None = None,
) -> Explanation:
    """Explain a plan of these ranks and this problem. Raises PypsError if the relaxation has no optimum.

    worth: of memory, as pyps.solver.ways.worth_of_memory says; None: the model is not sharded.
    """
    batches = [worker.batch for worker in plan.workers]
    n = len(batches)
    if n <= PRICED_AT_MOST:
        priced = shadow_prices(constrained.problem, batches)
    else:
        priced = ShadowPrices(plan.iteration_seconds, 0.0, np.zeros(n), np.zeros(n), np.zeros(n))
    groups = _groups(plan, ranks, constrained.problem, priced)
    verdict = _verdict(plan, groups, priced, constrained)
    if worth is not None:
        cards = with_shares(plan.workers, [rank.card for rank in ranks])
        verdict += _memory_sentence(plan, worth, cards)
    return Explanation(groups, priced.per_sample, verdict, dict(worth or {}))


def _groups(
    plan: Plan, ranks: Sequence[PlannedRank], problem: Problem, priced: ShadowPrices
) -> list[GroupExplanation]:
    slowest = max(worker.predicted_seconds for worker in plan.workers)
    found: dict[tuple[str, int], list[int]] = {}
    for k, (rank, worker) in enumerate(zip(ranks, plan.workers, strict=True)):
        found.setdefault((rank.group.name, worker.batch), []).append(k)
    groups, bounds = [], rounded(problem)
    for (name, batch), places in found.items():
        first = places[0]
        waits = slowest - plan.workers[first].predicted_seconds
        delays = waits <= NEGLIGIBLE * slowest
        groups.append(
            GroupExplanation(
                name=name,
                workers=len(places),
                batch=batch,
                binds=_binds(problem, bounds, first, batch, delays),
                waits_seconds=waits if batch else 0.0,
                share=float(priced.share[places].sum()),
                seconds_saved_per_sample=float(max(priced.max_batch[first], priced.min_batch[first])),
            )
        )
    return groups


def _binds(problem: Problem, bounds: Problem, k: int, batch: int, delays: bool) -> str:
    """Return what binds worker k at this batch. bounds: the rounded problem. delays: others wait for it."""
    most = problem.costs.take(np.array([k])).last_batch(problem.max_batch[[k]])[0]
    step, least = int(problem.batch_multiple[k]), max(int(problem.min_batch[k]), 1)
    if not batch:
        return "no batch fits" if barred(problem, bounds, k) else "left out"
    if batch + step > most:
        return "at its maximum"
    if batch - step < least and least > step:
        return "at its minimum"
    return "holds the others up" if delays else "waits"


def _verdict(
    plan: Plan, groups: Sequence[GroupExplanation], priced: ShadowPrices, constrained: ConstrainedProblem
) -> str:
    """The explanation in one paragraph."""
    one = plan.unit.removesuffix("s")
    sentences = [_time_sentence(plan)]
    # Those that wait for whole samples alone set the pace too: more of the batch would be theirs as well.
    paced = [g for g in groups if g.binds == "waits" and g.share > NEGLIGIBLE]
    holders = [group for group in groups if group.binds == "holds the others up" or group in paced]
    if holders:
        several = len(holders) > 1 or holders[0].workers > 1
        sentences.append(f"{_names(holders)} {'set' if several else 'sets'} the pace.")
    sentences += _bound_sentences(groups, plan.unit)
    out = [group for group in groups if group.binds == "left out"]
    if out:
        why = (
            "the limits or ties require it" if constrained.may_forbid else "the others finish sooner without"
        )
        sentences.append(f"{_names(out)} should stay out: {why}.")
    if unfit := [group for group in groups if group.binds == "no batch fits"]:
        sentences.append(f"{_names(unfit)} cannot take part: no batch fits.")
    for limit in constrained.limits:
        used = float(limit.need[[worker.batch > 0 for worker in plan.workers]].sum())
        sentences.append(f"Of {limit.field.removeprefix('limits.')} {limit.at_most:g}, {used:g} is used.")
    if priced.per_sample > 0:
        sentences.append(f"One more {one} in the global batch costs {_ms(priced.per_sample)}.")
    searched = constrained.may_meet or not constrained.minimises_iteration
    if constrained.problem.pool is not None:
        return " ".join([*sentences, "No split computes faster; the ring carries what the shares say."])
    sentences.append(_bound_sentence(plan, searched))
    return " ".join(sentences)


def _memory_sentence(plan: Plan, worth: Mapping[str, float], workers: Sequence[PlanWorker]) -> str:
    """Say whose memory binds, and what one more GiB is worth. worth: by group; "": for all together."""
    free = sum(w.bytes.memory - w.bytes.total for w in workers if w.bytes is not None) / GIB
    saves = {name: x for name, x in worth.items() if x > NEGLIGIBLE * plan.iteration_seconds}
    if not saves:
        return f" More memory would save no time: {free:.3g} GiB are free."
    binds = "All memory together" if "" in saves else "The memory of " + " and of ".join(saves)
    most = sorted((name for name in saves if name), key=lambda name: -saves[name])[:NAMED_AT_MOST]
    gains = ", ".join(f"{_ms(saves[name])} on each card of {name}" for name in most)
    return f" {binds} binds: one more GiB saves {gains or _ms(saves[''])}."


def _bound_sentences(groups: Sequence[GroupExplanation], unit: str) -> list[str]:
    """Which groups are at a bound; one sentence a group, or one for many."""
    full = [group for group in groups if group.binds == "at its maximum"]
    least = [group for group in groups if group.binds == "at its minimum"]
    sentences = []
    if len(full) > NAMED_AT_MOST:
        saved = max(group.seconds_saved_per_sample for group in full)
        gain = f"; one more {unit.removesuffix('s')} of room would save at most {_ms(saved)}" if saved else ""
        sentences.append(f"{_names(full)} cannot take more {unit}{gain}.")
    else:
        for group in full:
            saved = group.seconds_saved_per_sample
            gain = f"; one more {unit.removesuffix('s')} of room would save {_ms(saved)}" if saved else ""
            sentences.append(f"{_names([group])} cannot take more than {group.batch} {unit}{gain}.")
    if len(least) > NAMED_AT_MOST:
        sentences.append(f"{_names(least)} may not take fewer {unit}.")
    else:
        sentences += [f"{_names([one])} may not take fewer than {one.batch} {unit}." for one in least]
    return sentences


def _time_sentence(plan: Plan) -> str:
    sync = f", {_ms(plan.sync.seconds)} of it to synchronise" if plan.sync and plan.sync.seconds else ""
    text = f"An iteration of {plan.global_batch} {plan.unit} takes {_ms(plan.iteration_seconds)}{sync}"
    if plan.speedup_over_even is None:
        return f"{text}; an even split would break a bound."
    return f"{text}, {plan.speedup_over_even:.2f} times as fast as an even split."


def _bound_sentence(plan: Plan, searched: bool) -> str:
    """Say what is proven of other splits. searched: the bound is a search's, of whole samples."""
    if not plan.lower_bound_seconds:
        return f"Workers do not wait for the slowest, so a split with longer steps may pass more {plan.unit}."
    gain = 1 - plan.lower_bound_seconds / plan.iteration_seconds
    if plan.sync:
        return "No choice of workers and batches within the bounds is faster."
    if searched:
        more = "" if gain < NEGLIGIBLE else f" that was tried, and none can be by more than {gain:.1%}"
        return f"No split is faster{more}."
    if gain < NEGLIGIBLE:
        return f"No split can be faster, even if {plan.unit} could be divided."
    return (
        f"No split is faster; with divisible {plan.unit} and no minima, the gain would be at most {gain:.1%}."
    )


def _names(groups: Sequence[GroupExplanation]) -> str:
    counts: dict[str, int] = {}
    for group in groups:
        counts[group.name] = counts.get(group.name, 0) + group.workers
    parts = [f"{name} ({count} workers)" if count > 1 else name for name, count in counts.items()]
    if len(parts) > NAMED_AT_MOST:
        parts = [*parts[: NAMED_AT_MOST - 1], f"{len(parts) - NAMED_AT_MOST + 1} more groups"]
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
