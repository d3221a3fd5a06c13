"""The adapters of training libraries: the gradient, samples, learning rates and resume of one process."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from device import DEVICE
from ranks import run_script
from torch.utils.data import RandomSampler, SequentialSampler

from pyps.torch.adapter import is_shuffled

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
EXACT = 1e-12  # relative, in fp64
SAMPLES, ROUND, EVALUATED = 160, 72, 50
GENERATES = "found 3 with a trainer that generates; expected stage=1, or"


def check(found: dict[str, Any], rate: float) -> None:
    """Check what holds under every trainer."""
    assert max(found["errors"]) < EXACT
    epochs = [found["rounds"][k : k + 3] for k in range(0, len(found["rounds"]), 3)]
    orders = [[number for numbers in epoch for number in numbers] for epoch in epochs]
    assert all(sorted(order) == list(range(SAMPLES)) for order in orders)
    assert all(a != b for a, b in pairwise(orders))
    assert [len(numbers) for numbers in epochs[0]] == [ROUND, ROUND, SAMPLES - 2 * ROUND]
    steps = len(found["rounds"])
    assert steps == found["steps"]
    expected = [rate * (1 + math.cos(math.pi * step / steps)) / 2 for step in range(steps)]
    assert found["rates"] == pytest.approx(expected)
    assert len(found["changes"]) == 1
    assert found["even_seconds"][-2] / found["seconds"][-2] >= 1.5
    assert sorted(found["evaluated"]) == list(range(EVALUATED))
    assert found["resumed"]
    assert found["resumed_rounds"]


def trained(script: str, tmp_path: Path, *imported: str, **more: str) -> Any:
    seen = {} if DEVICE.type == "cpu" else {"CUDA_VISIBLE_DEVICES": "0"}
    more |= seen | {"FOLDER": str(tmp_path), "OMP_NUM_THREADS": "1"}
    said = run_script(HELPERS / script, 2, imported=imported, **more)
    return json.loads(said.splitlines()[-1])


def test_a_sampler_that_repeats_samples_or_leaves_some_out_is_not_replaced() -> None:
    assert is_shuffled(RandomSampler(range(8)))
    assert not is_shuffled(RandomSampler(range(8), num_samples=4))
    assert not is_shuffled(RandomSampler(range(8), replacement=True))
    assert not is_shuffled(SequentialSampler(range(8)))


@pytest.mark.promise("runs no code of its own")
def test_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    found = trained("accelerate_train.py", tmp_path)
    check(found, 0.1)
    assert "custom checkpoints" in found["planted"][0]
    assert "InputError" in found["planted"][1]


@pytest.mark.thorough
def test_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    found = trained("transformers_train.py", tmp_path)
    check(found["Mean"], 0.1)
    check(found["ByTargets"], 0.1)
    assert "InputError" in found["planted"][0]
    assert found["planted"][1] == "it resumed"  # another file is not read


def test_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    found = trained("lightning_train.py", tmp_path)
    check(found, 0.1)
    assert "weights_only" in found["planted"][0]
    assert max(found["fabric_errors"]) < EXACT
    assert found["fabric_resumed"]
    assert found["fabric_resumed_rounds"]
    rounds = found["fabric_rounds"]
    first, second = ([number for numbers in rounds[k : k + 3] for number in numbers] for k in (0, 3))
    assert sorted(first) == sorted(second) == list(range(SAMPLES))
    assert first != second


@pytest.mark.parametrize(
    ("library", "stage"),
    [
        pytest.param("accelerate", 1, marks=pytest.mark.thorough),
        ("accelerate", 3),
        pytest.param("lightning", 1, marks=pytest.mark.thorough),
        pytest.param("transformers", 1, marks=pytest.mark.thorough),
        ("transformers", 3),
    ],
)
def test_shares(tmp_path: Path, library: str, stage: int) -> None:
    """A run is that without shares, and goes on with other shares from the library's own checkpoint."""
    pytest.importorskip(library)
    ranks = trained("shares_train.py", tmp_path, f"pyps.torch.{library}", LIBRARY=library, STAGE=str(stage))
    for k, found in enumerate(ranks):
        assert max(found["off"], found["resumed"]) < EXACT
        assert (library, stage) != ("transformers", 3) or GENERATES in found["refused"]
        assert found["held"] == pytest.approx([(0.75, 0.25)[k], (0.1, 0.9)[k]], abs=0.01)
