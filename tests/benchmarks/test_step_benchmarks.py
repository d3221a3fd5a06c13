"""benchmarks/look.py and small_steps.py, small and untimed: every step is there."""

from __future__ import annotations

from pathlib import Path

import look
import pytest
import small_steps
import torch

from pyps import native


def test_each_way_of_looking(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("finite", "take"):
        monkeypatch.setattr(native, name, getattr(native, name))  # put back in the end
    found = look.measure(parameters=8 * 130**2, batch=2, rounds=1, optimizer="sgd")
    assert {name: len(times) for name, times in found.items()} == dict.fromkeys(look.LOOKS, 1)


@pytest.mark.parametrize("policy", small_steps.POLICIES)
def test_small_steps(shm: Path, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    monkeypatch.setattr(small_steps, "STEPS", 3)
    data = torch.randn(small_steps.SAMPLES, 16), torch.randn(small_steps.SAMPLES, 4)
    steps, looks = small_steps.worked(data, policy)
    assert (len(steps), len(looks), len(small_steps.plain(data))) == (3, 3, 3)
