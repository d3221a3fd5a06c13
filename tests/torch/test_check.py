"""check_gradient names the likely cause of a wrong gradient, and changes nothing."""

from __future__ import annotations

import check_jobs
import pytest
import torch
from ranks import Ranks

FP64 = 1e-12

torch.set_num_threads(1)


def test_a_mean_that_nothing_keeps_is_refused(ranks: Ranks) -> None:
    """It would be gone whenever garbage is collected, and the check one of plain DDP."""
    for found in ranks.run(2, check_jobs.mean_dropped):
        assert "GlobalMean: found one that is gone; expected mean = GlobalMean(model)" in found


@pytest.mark.parametrize(
    ("case", "cause"),
    [
        ("plain", "EQUAL_WEIGHTS"),
        ("weighted", "NONE"),
        ("norm", "BATCH_NORM"),
        ("synced norm", "NONE"),
        ("targets", "NONE"),
        ("targets by samples", "NOT_SAMPLES"),
        ("sum", "SUM_LOSS"),
        ("sum, said", "NONE"),
        ("dropout", "RANDOM"),
    ],
)
def test_a_check_names_the_cause(ranks: Ranks, case: str, cause: str) -> None:
    for found, error, untouched in ranks.run(2, check_jobs.cause_reported, [48, 16], case):
        assert found == cause
        assert error < FP64 if cause == "NONE" else error > 0.01
        assert untouched
