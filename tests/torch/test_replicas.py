"""Replicas die, the others go on with the whole batch and right weights, and they come back; all is as in one
process over the samples that were trained.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import replica_jobs as jobs
import torch
from device import DEVICE
from ranks import Ranks
from torch.utils._python_dispatch import TorchDispatchMode

from pyps.torch.replica_mean import ReplicaMean

EXACT = 1e-12
ALL, PAIR = (0, 1, 2), (0, 1)

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="the manager of these tests sums on the CPU")


def check(found: list[dict[str, Any]], last: tuple[int, ...]) -> list[Any]:
    """The committed steps, in order: each sample counts once an epoch, and the parameters are right."""
    steps: dict[tuple[int, int], Any] = {}
    for rank in found:
        for step in rank["steps"]:
            same = steps.setdefault((step[0], step[1]), step)
            assert same[:4] == step[:4]
    ordered = [steps[key] for key in sorted(steps)]
    position = epoch = 0
    for step in ordered:
        assert step[:2] == [epoch, position]
        assert sum(step[2]) == jobs.B
        position += step[3]
        epoch, position = (epoch + 1, 0) if position == jobs.SAMPLES else (epoch, position)
    right = torch.cat([p.flatten() for p in jobs.alone(ordered)])
    for rank in last:
        own = torch.cat([p.flatten() for p in found[rank]["parameters"]])
        assert float((own - right).norm() / right.norm()) < EXACT
    return ordered


def test_a_replica_dies_and_comes_back_and_samples_follow_speed(ranks: Ranks) -> None:
    attempts: list[jobs.Attempt] = [(ALL, None)] * 8
    # It dies before they agree, as weights or gradients are summed, or after the step; then a sum fails.
    for fails, again in ((1, None), (2, 2), (3, 3), (99, 4)):
        attempts += [(ALL, fails), (PAIR, again), (PAIR, None), (ALL, None)]
    attempts += [(ALL, None)] * 14
    found = ranks.run(3, jobs.trained, attempts, [1.0, 1.0, 3.0], None)
    steps = check(found, ALL)
    assert {len(step[2]) for step in steps} == {2, 3}
    assert steps[0][2] == [8, 8, 8]
    assert sorted(steps[7][2]) == sorted(steps[-1][2]) == [3, 10, 11]
    assert len(steps) == len(attempts) - 6
    assert found[0]["history"] == found[1]["history"]


def test_a_batch_that_does_not_fit_comes_in_parts(ranks: Ranks) -> None:
    found = ranks.run(2, jobs.trained, [(PAIR, None), (PAIR, 3), ((0,), None), ((0,), None)], [1.0, 1.0], 12)
    steps = check(found, (0,))
    assert [step[2] for step in steps] == [[12, 12], [24], [24]]


class NoHostRead(TorchDispatchMode):
    """Fail where the host reads a tensor's value, for which it would wait for a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "local_scalar_dense" not in str(func), "the host reads a device's number"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("gone", [False, True])
def test_what_is_on_a_device_stays_there(gone: bool) -> None:
    manager = mock.Mock(participating_rank=lambda: 1, num_participants=lambda: 3)
    own = torch.tensor([0.5, 7.0], dtype=torch.float64)
    mean = mock.Mock(_manager=manager, sum=lambda tensor: not gone, device=own.device)
    mean.rows_of = partial(ReplicaMean.rows_of, mean)
    with NoHostRead():
        found = ReplicaMean.gathered(mean, own)
    rows = [own] * 3 if gone else [0 * own, own, 0 * own]
    assert torch.equal(found, torch.stack(rows))
