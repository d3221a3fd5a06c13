"""Rounds of BSP stay global batches while a rank is away, whose samples the others have."""

from __future__ import annotations

from policy_drive import Drive, partition

from pyps.native.decisions import EventKind
from pyps.native.status import MemberState
from pyps.store.policies import BSP

BATCHES, SAMPLES = [2, 4, 6], 240


def test_rounds_stay_global_batches_while_a_rank_is_away() -> None:
    """One round is short, in which the rank died, and a later one has what is left of its samples."""
    drive = Drive(BSP(), BATCHES, samples=SAMPLES)
    for _ in range(3):
        turns(drive, [0, 1, 2])
    drive.start(0)
    del drive.claims[0]
    drive.core.step(EventKind.LEAVE, 0, drive.now, state=int(MemberState.DEAD))
    for _ in range(10):
        turns(drive, [1, 2])
    drive.core.step(EventKind.JOIN, 0, drive.now, rank=0)
    for _ in range(10):
        turns(drive, [0, 1, 2])
    rounds = [sum(source[2] for source in sources) for sources in drive.sources]
    assert partition(drive.trained) == [(0, SAMPLES)]
    assert len(rounds) == SAMPLES // 12 + 1
    assert next(size for size in rounds if size != 12) == 10
    assert sum(size != 12 for size in rounds) <= 3, rounds


def test_all_that_are_there_have_their_planned_batches() -> None:
    drive = Drive(BSP(), [1, 5, 3], samples=45)
    for _ in range(5):
        turns(drive, [0, 1, 2])
    assert [[source[2] for source in sources] for sources in drive.sources] == [[1, 5, 3]] * 5


def turns(drive: Drive, ranks: list[int]) -> None:
    """Take a round: each starts, then each pushes."""
    there = [k for k in ranks if drive.start(k)]
    for k in there:
        drive.push(k)
    drive.waiting.clear()
