"""agreed_split: batches for the ranks that are there, agreed when training starts or restarts.

    split = agreed_split(768, profile="v100.json")      # on every rank, each with the profile of its device
    sampler = UnevenBatchSampler(dataset, split)

When ranks are lost or come, torchrun restarts the script with the ranks that are there: the same line gives
them a split of the same B.
"""

from __future__ import annotations

import os

import msgspec
import torch.distributed as dist

from pyps.agreement.consensus import DEADLINE_SECONDS, Consensus
from pyps.errors import Infeasible, InputError
from pyps.formats import MAX_BATCH, Profile
from pyps.solver.costs import Cost, Line
from pyps.solver.lengths import SampleLengths
from pyps.solver.online.decide import Bounds, Split, best_split
from pyps.solver.ranks import prior_of

ALIKE = Line(0.0, 1.0)  # the cost of devices of which nothing is known: equal batches


class _Report(msgspec.Struct, frozen=True):
    """A rank and its device. cost: None if the device's speed is unknown."""

    global_batch: int
    bounds: Bounds
    cost: Cost | None


class _Decision(msgspec.Struct, frozen=True):
    """The batches by rank; or the arguments of an InputError; or the message of an Infeasible."""

    split: list[int] = []
    input_error: tuple[str, str, str, str] | None = None
    infeasible: str = ""


def agreed_split(
    global_batch: int,
    profile: Profile | str | os.PathLike[str] | None = None,
    *,
    max_batch: int | None = None,
    accumulate: int = 1,
    lengths: SampleLengths | None = None,
    group: dist.ProcessGroup | None = None,
    peers: dist.ProcessGroup | None = None,
    timeout: float = DEADLINE_SECONDS,
) -> Split:
    """The split of B with the shortest round, by all ranks' profiles; all ranks of the group call this.

    global_batch: B, the same on all ranks.
    profile: of this rank's device. If no rank has one, the batches are equal, for a Rebalancer to improve.
    max_batch: the largest batch that fits this rank.
    accumulate: this rank's micro-batches, each of at least one sample.
    lengths: with which B, max_batch and the split count tokens of average cost.
    group, peers: the ranks with different samples, by default all; and those that share this rank's, as in a
        tensor-parallel group, of which the first one's arguments count.
    timeout: seconds to wait for ranks that do not call this.
    Raises on all ranks InputError if a rank does not come, has a wrong argument or a profile that cannot be
    read, if only some have a profile or they disagree on B; Infeasible if B is too large or too small for the
    ranks.
    """
    consensus = Consensus("agreed_split", group, timeout=timeout, peers=peers)
    report, error = None, None
    try:
        report = _report(global_batch, profile, max_batch, accumulate, lengths)
    except InputError as found:
        error = found
    consensus.agree(error)
    assert report is not None
    consensus.report(0, report)
    if consensus.decides:
        consensus.decide(0, _decide(consensus.reports(0, _Report)))
    agreed = consensus.decision(0, _Decision)
    if agreed.input_error:
        raise InputError(*agreed.input_error)
    if agreed.infeasible:
        raise Infeasible(agreed.infeasible)
    return tuple(agreed.split)


def _report(
    global_batch: int,
    profile: Profile | str | os.PathLike[str] | None,
    max_batch: int | None,
    accumulate: int,
    lengths: SampleLengths | None,
) -> _Report:
    """This rank's report. Raises InputError for a wrong argument."""
    given = {"global_batch": global_batch, "max_batch": max_batch, "accumulate": accumulate}
    for name, number in given.items():
        optional = name == "max_batch" and number is None
        if not optional and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise InputError("agreed_split", name, repr(number), "a whole number from 1")
    prior, fits = prior_of(profile, lengths)
    bounds = Bounds(accumulate, min(fits, max_batch or MAX_BATCH), required=True)
    return _Report(global_batch, bounds, prior)


def _decide(reports: list[_Report]) -> _Decision:
    found = sorted({report.global_batch for report in reports})
    if len(found) > 1 or found[0] < 1:
        expected = "one number from 1, on all ranks"
        return _Decision(input_error=("agreed_split", "global_batch", f"{found}", expected))
    unknown = [rank for rank, report in enumerate(reports) if report.cost is None]
    if 0 < len(unknown) < len(reports):
        expected = "a profile on every rank, or on none"
        return _Decision(input_error=("agreed_split", "profile", f"none on ranks {unknown}", expected))
    costs = [report.cost or ALIKE for report in reports]
    try:
        return _Decision(list(best_split(found[0], costs, [report.bounds for report in reports])))
    except Infeasible as error:
        return _Decision(infeasible=str(error))
