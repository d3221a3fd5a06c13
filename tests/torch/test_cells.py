"""Each feature under each trainer gives the gradient of one process, or is refused; none is wrong."""

from __future__ import annotations

import pytest
import trainer_table as table
from device import DEVICE

LIBRARIES = {"Accelerate": "accelerate", "Fabric": "lightning", "Lightning": "lightning"}
SAMPLE = {  # the rest is thorough
    "DDP": [
        "micro-batches",
        "two terms of unlike divisors",
        "GAN, two optimizers",
        "own accumulation, divided",
        "SAM",
    ],
    "FSDP2": [
        "a gradient penalty",
        "a penalty on weights",
        "SAM",
        "micro-batches",
        "an auxiliary loss (MoE)",
        "own accumulation",
    ],
    "Accelerate": [
        "micro-batches",
        "tokens by a gathered count",
        "a rank without items",
        "accumulate() without a model",
        "skip_first_batches() of all",
        "a scheduler made after prepare()",
        "an epoch of no rounds",
        "a second shuffled loader",
    ],
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
