"""The noise scale measured from unlike ranks is the exact one, where that can be computed."""

from __future__ import annotations

import ddp_accumulate_jobs as jobs
import pytest
import torch
from ranks import Ranks
from sampled import sampled

NEAR = 0.2

torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("batches", "parts", "scaled", "sums"),
    sampled(
        [([60, 36], 1, False, True), ([12, 27, 90], 1, True, False), ([65, 65, 15, 35], 2, False, False)]
    ),
)
def test_the_scale_is_the_exact_one(
    ranks: Ranks, batches: list[int], parts: int, scaled: bool, sums: bool
) -> None:
    found = ranks.run(len(batches), jobs.noise_scales, batches, parts, scaled, sums, 100)
    assert len({measured for measured, _ in found}) == 1
    measured, exact = found[0]
    print(f"{batches}: measured {measured:.2f}, exact {exact:.2f}")
    assert measured == pytest.approx(exact, rel=NEAR)


def test_one_rank_has_no_noise(ranks: Ranks) -> None:
    with pytest.raises(RuntimeError, match="2 or more, to tell noise from signal"):
        ranks.run(1, jobs.noise_scales, [5], 1, False, False, 1)
