"""Define what of a cell's run is not as it must be."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from cells import Cell, Verdict, expected, is_weighed, may_lag, policy_of
from numpy.typing import NDArray
from running import Outcome
from trained import BATCHES, GLOBAL_BATCH, LENGTH, SAMPLES, SEED

from pyps.native.status import PushCounts
from pyps.simulate import Result
from pyps.worker.data.sampling import indices

OFF = {
    "f32": 1e-5,
    "bf16": 0.02,
    "f16": 0.01,
    "int8": 0.03,
    "int4": 0.4,
    "nf4": 0.4,
}  # of the way that state went
Vector = NDArray[np.float64]
MODES = 2  # that a worker has, one after the other and back
ROUNDED = 0.01  # parameters kept as bf16 are right on average
ONCE = 0.25  # of a sample's weight, with what a codec has not yet sent


def faults(cell: Cell, outcome: Outcome, twin: Outcome | None = None) -> list[str]:
    """Return what is not as it must be, in words; nothing: the cell is right. twin: what it has the same
    bits as.
    """
    wanted = expected(cell)
    if wanted.verdict is Verdict.REFUSED:
        return list(_refused(outcome, wanted.refusals))
    if outcome.refusal:
        return [f"{'failed' if outcome.late else 'refused'}: {outcome.refusal}"]
    found = [*_counted(cell, outcome), *_replayed(outcome)]
    if cell.modes and len({record.mode for record in outcome.records}) < MODES:
        found.append("no worker's mode has changed")
    if outcome.simulated is not None:
        found += _simulated(cell, outcome)
    if twin is not None:
        found += _same_bits(outcome, twin)
    return found


def _refused(outcome: Outcome, words: tuple[str, ...]) -> Iterator[str]:
    if not outcome.refusal:
        yield f"it ran; it should be refused for its {' or '.join(words)}"
    elif outcome.late:
        yield f"refused when it trained: {outcome.refusal}"
    elif not any(word in outcome.refusal for word in words) or "\n" in outcome.refusal:
        yield f"refused, but not in one line with {' or '.join(words)}: {outcome.refusal}"


def _replayed(outcome: Outcome) -> Iterator[str]:
    for again in outcome.journals:
        if again.differences or again.missing_events:
            yield f"replay: {again.differences} differences, {again.missing_events} missing: {again.first}"


def _counted(cell: Cell, outcome: Outcome) -> Iterator[str]:
    """Every sample counts once: by what was admitted, by the store's counters, and by the parameters."""
    if (total := sum(rank.samples for rank in outcome.ranks)) != SAMPLES:
        yield f"{total} samples trained of {SAMPLES}"
    if cell.fault == "none":
        times = np.zeros(SAMPLES, int)
        for record in outcome.records:
            if record.pushes and not record.rejected and not record.skipped:
                times[record.first : record.first + record.samples] += 1
        if (wrong := np.flatnonzero(times != 1)).size:
            yield f"by the records, sample {wrong[0]} was trained {times[wrong[0]]} times; {wrong.size} such"
    if (
        cell.optimizer == "sgd"
        and not cell.clip
        and not is_weighed(cell)
        and _takes_whole_steps(cell, outcome)
    ):
        counted = -outcome.parameters[LENGTH : LENGTH + SAMPLES]
        off = np.minimum(*(np.abs(counted / weights - 1.0) for weights in _in_their_rounds(cell, outcome)))
        if (wrong := np.flatnonzero(off > ONCE)).size:
            yield f"sample {wrong[0]} counts {counted[wrong[0]]:.3f} times; {wrong.size} such"


def _in_their_rounds(cell: Cell, outcome: Outcome) -> tuple[Vector, Vector]:
    """Return what each sample may count for, either of two: 1; in the mean of a round with fewer or more
    samples than planned by as much more or less. Where a worker is late, backup and quorum have such
    rounds. At the run's end a round may be a rest, which is no whole step, so that each of its samples
    counts 1.
    """
    weights, at_end = np.ones(SAMPLES), np.ones(SAMPLES)
    if not policy_of(cell).needs.waits_for_rounds:
        return weights, at_end
    taken = [record for record in outcome.records if record.pushes and not record.rejected]
    last_opened = max(record.round for record in taken)
    for record in taken:
        in_round = sum(other.samples for other in taken if other.version == record.version)
        chosen = indices(record.first, record.samples, SAMPLES, SEED)
        weights[chosen] = GLOBAL_BATCH * max(1, cell.local_steps) / in_round
        at_end[chosen] = 1.0 if record.version > last_opened else weights[chosen]
    return weights, at_end


def _takes_whole_steps(cell: Cell, outcome: Outcome) -> bool:
    """Return whether each push has all the local steps of its rank: a push of fewer counts for less of
    each.
    """
    steps = max(1, cell.local_steps)
    return steps == 1 or all(record.samples == steps * BATCHES[record.rank] for record in outcome.records)


def _simulated(cell: Cell, outcome: Outcome) -> Iterator[str]:
    """Yield whether the run was where the simulation was."""
    assert outcome.simulated is not None
    if outcome.fault:
        yield f"left its simulation: {outcome.fault}"
    if outcome.there is None:
        return
    ranks, parameters = outcome.there
    yield from _same_counters(ranks, outcome.simulated.result, may_lag(cell))
    if cell.clip or may_lag(cell):
        return  # simulations do not clip
    there, here = outcome.simulated.parameters[:LENGTH], parameters[:LENGTH]
    way = float(np.abs(there - np.linspace(-1.0, 3.0, LENGTH)).max())
    away = np.abs(there - here)
    off, most = float(away.max() if cell.codec == "f32" else away.mean()), OFF[cell.codec] * way
    if cell.master == "bf16":
        off, most = abs(float((there - here).mean())), most + ROUNDED
    if not off <= most:
        yield f"the parameters are {off:.2g} off the simulation's, of a way of {way:.2g}"


def _same_counters(ranks: list[PushCounts], result: Result, lags: bool) -> Iterator[str]:
    for number, (here, there) in enumerate(zip(ranks, result.ranks, strict=True)):
        staleness = round(there.staleness_mean * there.pushes)
        pairs = {
            "pushes": (here.pushes, there.pushes),
            "samples": (here.samples, there.samples),
            "samples returned": (here.returned, there.returned),
        }
        if not lags:
            pairs["staleness in all"] = here.staleness_sum, staleness
            pairs["greatest staleness"] = here.staleness_max, there.staleness_max
        for name, (found, wanted) in pairs.items():
            if found != wanted:
                yield f"rank {number}: {name} {found}, in the simulation {wanted}"


def _same_bits(outcome: Outcome, twin: Outcome) -> Iterator[str]:
    """Where both followed the simulation, or at the end of both runs."""
    if twin.refusal or twin.fault:
        yield f"its twin: {twin.refusal or twin.fault}"
        return
    if outcome.there is not None and twin.there is not None:
        here, there = outcome.there[1][:LENGTH], twin.there[1][:LENGTH]
    elif outcome.simulated is None:
        here, there = outcome.parameters, twin.parameters
    else:
        return
    if (wrong := np.flatnonzero(here != there)).size:
        worst = float(np.abs(here - there).max())
        yield f"{wrong.size} parameters are not those of its twin, up to {worst:.2g} off"
