"""The position of a run follows the ends of its steps, whatever reads the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import position_jobs as jobs
import pytest
from ranks import Ranks

EVERY = list(range(jobs.SAMPLES))


@pytest.mark.parametrize("peeks", [False, True])
@pytest.mark.parametrize(("workers", "backwards"), [(0, 1), (2, 1), (2, 2)])
def test_saved_and_resumed_each_sample_comes_once(
    ranks: Ranks, tmp_path: Path, workers: int, backwards: int, peeks: bool
) -> None:
    for found in ranks.run(2, jobs.resumed, str(tmp_path), workers, backwards, peeks):
        assert found == EVERY


@pytest.mark.parametrize("workers", [0, 2])
def test_other_loops_move_nothing(ranks: Ranks, workers: int) -> None:
    for found in ranks.run(2, jobs.readers, workers):
        assert found == {"first": EVERY, "evaluated": EVERY, "second": EVERY, "epoch": 4}


@pytest.mark.parametrize("job", [jobs.gan, jobs.lbfgs])
def test_many_backward_passes_are_one_step(ranks: Ranks, job: Any) -> None:
    for found in ranks.run(2, job):
        assert found == EVERY


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("a batch", "position in the epoch: found 32 on rank 0, 24 on rank 1"),
        ("set_epoch", "epoch: found 3 on rank 0, 0 on rank 1"),
        ("seed", "seed: found (7, True) on rank 0, (0, True) on rank 1"),
        ("replan", "split: found (4, 4) on rank 0, (5, 3) on rank 1"),
        ("load", "position in the epoch: found 40 on rank 0, 24 on rank 1"),
        ("end_step", "rounds whose steps have ended: found 3 on rank 0, 2 on rank 1"),
        ("save", "call: found 'pyps.torch.save()' on rank 0, 'backward()' on rank 1"),
    ],
)
def test_what_one_rank_does_alone_is_refused_on_all(
    ranks: Ranks, tmp_path: Path, what: str, said: str
) -> None:
    for found in ranks.run(2, jobs.odd, what, str(tmp_path)):
        assert said in found


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream(ranks: Ranks, workers: int) -> None:
    right = [(epoch, 8 * k) for epoch in range(2) for k in range(1, 6)]
    for found in ranks.run(2, jobs.stream, workers, False):
        assert found == right


def test_a_stream_that_is_shorter_on_a_rank(ranks: Ranks) -> None:
    for found in ranks.run(2, jobs.stream, 0, True):
        assert "samples of the round: found 8 on rank 0, 5 on rank 1; expected the same on all ranks" in found
