"""Each feature under each trainer gives the gradient of one process, or is refused; none is wrong."""

from __future__ import annotations

import pytest
import trainer_table as table
from device import DEVICE

LIBRARIES = {"Accelerate": "accelerate", "Fabric": "lightning", "Lightning": "lightning"}
SAMPLE = {  # the rest is thorough
    "DDP": [
        "a bypassing forward",
        "a part for other samples",
        "eval() in between",
        "two forwards, unlike batches",
        "no zero_grad()",
        "a sum, several backward()",
        "Join",
        "batches as sampler=",
        "one loss of two models, unlike batches",
        "a gradient penalty of others",
        "own accumulation, unlike numbers",
        "samples not first",
        "the same, no sampler",
        "texts padded by rank",
        "backward() twice, a micro-batch",
        "a loss over all ranks' outputs",
        "backward() again after no_sync()",
        "zero_grad() after no_sync()",
        "two forwards, each its share",
    ],
    "FSDP2": [
        "a bypassing forward",
        "an auxiliary loss (MoE)",
        "an output of its own class",
        "own accumulation",
        "the same, no sampler",
        "backward() twice, a micro-batch",
    ],
    "Accelerate": ["two models", "own accumulation", "a plan nothing uses", "a new loader each epoch"],
}

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="gloo on the CPU shows the same")


def check(trainer: str, features: list[str] | None) -> None:
    pytest.importorskip(LIBRARIES.get(trainer, "torch"))
    shown = table.shown()
    for feature, outcome in table.tried(trainer, features).items():
        print(f"{trainer}, {feature}: {outcome}")
        assert table.word_for(trainer, feature, outcome) == shown[trainer, feature], f"{feature}: {outcome}"


@pytest.mark.parametrize("trainer", SAMPLE)
def test_a_sample(trainer: str) -> None:
    check(trainer, SAMPLE[trainer])


@pytest.mark.thorough
@pytest.mark.parametrize("trainer", table.TRAINERS)
def test_all(trainer: str) -> None:
    pytest.importorskip("lightning")  # trainer_cells_of_loops
    pytest.importorskip("transformers")
    check(trainer, None)
