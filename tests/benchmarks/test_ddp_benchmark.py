"""benchmarks/ddp.py runs, untimed: rounds of plain DDP and GlobalMean; f32 and int8 between two hosts."""

from __future__ import annotations

import os
from pathlib import Path

import ddp
import pytest
import shaped

WHY_NOT = shaped.missing()
pytestmark = pytest.mark.usefixtures("quick_start")


@pytest.mark.thorough
def test_the_mean(capfd: pytest.CaptureFixture[str]) -> None:
    ddp.main(["mean", "--pairs", "1", "--size", "0.03"])
    said = capfd.readouterr().out
    assert "GlobalMean" in said
    assert "1 rounds of each" in said


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "there are namespaces")
@pytest.mark.thorough
def test_the_link(capfd: pytest.CaptureFixture[str]) -> None:
    ddp.main(["link", "--mbit", "2000", "--seeds", "1", "--steps", "2"])
    said = capfd.readouterr().out
    assert "2000 Mbit/s between two hosts" in said
    assert float(said.partition("sends ")[2].split()[0]) < ddp.WIRE_BYTES
    assert not list(Path("/var/run/netns").glob(f"pyps-?-{os.getpid()}-*"))
