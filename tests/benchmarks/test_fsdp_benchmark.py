"""benchmarks/fsdp.py runs, untimed: two steps of emulated devices in two dimensions."""

from __future__ import annotations

import argparse

import fsdp
import pytest


@pytest.mark.thorough
def test_two_steps() -> None:
    options = argparse.Namespace(scale=0.01, steps=2)
    found = fsdp.run(options, [1.0, 2.0], rebalance=True, replicas=2)
    assert len(found["seconds"]) == 2
    assert found["batches"] == [128, 128]
    assert fsdp.row("two", found, 0.2, 0.1)[:5] == ["two", "128 128", "200.0", "100.0", "+100.0%"]
