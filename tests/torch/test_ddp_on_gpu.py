"""Test what DDP does on a GPU and a CPU has not: events, no wait for the device, NCCL.

Whether the gradient is right there, the other tests here say with PYPS_TEST_DEVICE=cuda.
"""

from __future__ import annotations

from pathlib import Path

import ddp_gpu_jobs as jobs
import pytest
from device import needs_cuda
from ranks import Ranks

pytestmark = needs_cuda

FP32, FP64 = 1e-6, 1e-12


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_gradient_is_the_one_of_one_process(ranks: Ranks, count: int, dtype: str) -> None:
    """gloo brings tensors of one GPU together."""
    for errors in ranks.run(count, jobs.gradient_errors, [48, 16, 3, 9][:count], dtype):
        assert max(errors) < (FP32 if dtype == "float32" else FP64)


def test_nccl_of_one_rank_does_all_that_ranks_do(ranks: Ranks, tmp_path: Path) -> None:
    """GlobalMean, agreed_split, a Rebalancer, save and load."""
    assert max(ranks.run(1, jobs.all_on_nccl, tmp_path)) < FP32


@pytest.mark.parametrize("wire", ["same", "bf16"])
def test_a_step_does_not_wait_for_the_device(ranks: Ranks, wire: str) -> None:
    """From the second round on GlobalMean, its timer and the Rebalancer only queue work."""
    assert ranks.run(1, jobs.waits, wire) == [""]


def test_divisors_stay_on_the_device(ranks: Ranks) -> None:
    for errors in ranks.run(2, jobs.on_the_device, [5, 9]):
        assert max(errors) < FP64


def test_the_timer_counts_the_devices_time(ranks: Ranks) -> None:
    for counted, least, labels in ranks.run(2, jobs.timed):
        assert labels == [0, 1, 2]
        assert all(seconds >= least for seconds in counted)


@pytest.mark.parametrize("wire", ["same", "int8"])
def test_a_grad_scaler_drops_the_step_on_all_ranks(ranks: Ranks, wire: str) -> None:
    """fp16 by autocast; one rank's loss is infinite in one step."""
    found = ranks.run(2, jobs.scaled, wire)
    assert found[0] == found[1]
    taken, scale, apart = found[0]
    assert taken == [True, True, False, True, True]
    assert scale == 512.0
    assert apart < 0.02


def test_random_numbers_of_the_models_gpu_go_on(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, jobs.dropout_goes_on, tmp_path) == [True, True]
