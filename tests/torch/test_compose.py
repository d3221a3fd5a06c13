"""uneven(): two lines, and the gradient, the epochs and the checkpoints of the five."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from device import DEVICE
from ranks import run_script

EXACT, RESUMED = 1e-12, 1e-9  # relative, in float64; splits follow the clock, so sums have other orders
SCRIPT = Path(__file__).resolve().parents[1] / "helpers" / "uneven_train.py"


@pytest.mark.skipif(DEVICE.type == "cuda", reason="gloo on the CPU shows the same")
def test_two_lines() -> None:
    found = json.loads(run_script(SCRIPT, 2).splitlines()[-1])
    shutil.rmtree(found["folder"])
    assert max(found["worst"]) < EXACT
    assert [sorted(epoch) for epoch in found["seen"]] == [list(range(50))] * 3
    assert len({tuple(epoch) for epoch in found["seen"]}) == 3  # each in another order, without set_epoch()
    assert found["apart"] < RESUMED
    batches, stream, foreign, plan, loader, unread = found["refused"]
    assert batches == "uneven: batch_size: found a value; expected none: global_batch is of all ranks"
    assert (
        "uneven: dataset: found Stream; expected uneven(model, dataset, ...), a dataset with a length"
        in stream
    )
    assert "uneven: optimizer: found one of other parameters" in foreign
    assert "uneven: plan: found a value; expected profile= of this rank's device; UnevenBatch" in plan
    assert "uneven: dataset: found DataLoader; expected uneven(model, dataset, ...)" in loader
    assert "uneven: loader: found a step without a batch of it; expected a loop over the loader" in unread
    twice = "optimizer: step: found a call of optimizer.step(); expected step() alone: it calls that"
    assert found["stepped"] == [twice, twice, "nothing", "nothing"]
