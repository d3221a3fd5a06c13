"""agreed_split: the batches of whoever is here now, agreed when training starts or starts again.

    split = agreed_split(768, profile="v100.json")      # on every rank, with its own device's profile
    sampler = UnevenBatchSampler(dataset, split)

When ranks were lost or came, torchrun starts the script anew with those that are here: the same line gives
them a split of the same B.
"""

from __future__ import annotations

import os

import msgspec
import torch.distributed as dist

from pyps.errors import Infeasible, InputError
from pyps.formats import MAX_BATCH, Profile
from pyps.solver.online.decide import best_split
from pyps.solver.online.prior import prior_of
from pyps.torch.consensus import CostMessage, Meeting
from pyps.torch.schedule import Split, share


class _Here(msgspec.Struct, frozen=True):
    """A rank and its device; without a cost nothing is known of its speed."""

    global_batch: int
    low: int
    cap: int
    cost: CostMessage | None


class _Agreed(msgspec.Struct, frozen=True):
    """The batches by rank, or why there are none; a wrong argument or no solution."""

    split: list[int] = []
    wrong: tuple[str, str, str, str] | None = None
    infeasible: str = ""


def agreed_split(
    global_batch: int,
    profile: Profile | str | os.PathLike[str] | None = None,
    *,
    max_batch: int | None = None,
    accumulate: int = 1,
    group: dist.ProcessGroup | None = None,
) -> Split:
    """The split of B with the shortest round, by all ranks' profiles; all ranks of the group call this.

    Without any profile the batches are equal, for a Rebalancer to improve. max_batch: the most that fits
    this rank. accumulate: its micro-batches, each of at least one sample. Raises on all ranks InputError if
    only some have a profile or they disagree on B, Infeasible if B does not fit or does not go round.
    """
    prior, cap = prior_of(profile)
    meeting = Meeting("members", group)
    cost = CostMessage.of(prior) if prior else None
    meeting.post(0, _Here(global_batch, accumulate, min(cap, max_batch or MAX_BATCH), cost))
    if meeting.rank == 0:
        meeting.answer(0, _agree(meeting.posted(0, _Here)))
    agreed = meeting.answered(0, _Agreed)
    if agreed.wrong:
        raise InputError(*agreed.wrong)
    if agreed.infeasible:
        raise Infeasible(agreed.infeasible)
    return tuple(agreed.split)


def _agree(here: list[_Here]) -> _Agreed:
    said = sorted({one.global_batch for one in here})
    if len(said) > 1 or said[0] < 1:
        return _Agreed(wrong=("agreed_split", "global_batch", f"{said}", "one number from 1, on all ranks"))
    unknown = [rank for rank, one in enumerate(here) if one.cost is None]
    if 0 < len(unknown) < len(here):
        expected = "a profile on every rank, or on none"
        return _Agreed(wrong=("agreed_split", "profile", f"none on ranks {unknown}", expected))
    costs = [one.cost.cost() for one in here if one.cost]
    low, caps = [one.low for one in here], [one.cap for one in here]
    try:
        if costs:
            return _Agreed(list(best_split(said[0], costs, low, caps)))
        return _Agreed(list(_equal(said[0], low, caps)))
    except Infeasible as error:
        return _Agreed(infeasible=str(error))


def _equal(total: int, low: list[int], caps: list[int]) -> Split:
    """As equal as bounds and whole samples allow."""
    if not sum(low) <= total <= sum(caps):
        takes, way = f"{sum(low)} to {sum(caps)}", f"at least {sum(low)}"
        if total > sum(caps):
            way = f"at most {sum(caps)}"
        raise Infeasible(f"global_batch {total}: the ranks take {takes}", f"a global batch of {way}")
    split = list(share(total, (1,) * len(low), tuple(low)))
    while over := [k for k, batch in enumerate(split) if batch > caps[k]]:
        split[over[0]] -= 1
        split[min((k for k in range(len(split)) if split[k] < caps[k]), key=lambda k: split[k])] += 1
    return tuple(split)
