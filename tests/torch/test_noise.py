"""The noise scale measured from unlike ranks is the exact one, where that can be computed."""

from __future__ import annotations

import noise_jobs as jobs
import pytest
import torch
from ranks import Ranks

NEAR = 0.2

torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("batches", "kind", "parts", "scaled", "sums"),
    [
        ([60, 36], "ddp", 1, False, True),
        ([12, 27, 90], "views", 1, True, False),
        ([65, 65, 15, 35], "ddp", 2, False, False),
        ([60, 36], "fsdp", 1, False, False),
        ([60, 36], "complex", 1, False, False),
    ],
)
def test_the_scale_is_the_exact_one(
    ranks: Ranks, batches: list[int], kind: str, parts: int, scaled: bool, sums: bool
) -> None:
    found = ranks.run(len(batches), jobs.noise_scales, batches, kind, parts, scaled, sums)
    assert len({measured for measured, _ in found}) == 1
    measured, exact = found[0]
    print(f"{batches}: measured {measured:.2f}, exact {exact:.2f}")
    assert measured == pytest.approx(exact, rel=NEAR)


def test_one_rank_has_no_noise(ranks: Ranks) -> None:
    with pytest.raises(RuntimeError, match="2 or more, to tell noise from signal"):
        ranks.run(1, jobs.noise_scales, [5], "ddp", 1, False, False)
