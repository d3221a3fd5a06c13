"""The short form of `make soak`: eight workers, half over a breaking link, killed, stopped and replaced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import soak
from sampled import sampled

SECONDS = float(os.environ.get("PYPS_SOAK_SECONDS", "4"))


@pytest.mark.parametrize("policy", sampled(["saps:threshold=fixed,bound=24", "ssp:bound=4"]))
def test_every_push_counts_once_whatever_happens(policy: str, shm: Path, tmp_path: Path) -> None:
    summary = soak.soak(SECONDS, policy, 11, tmp_path)
    print(summary)


@pytest.mark.parametrize(
    ("counted", "values", "taken", "unknown", "fault"),
    [
        (10, {-10.0}, 9, 1, ""),
        (10, {-9.0}, 10, 0, "parameters"),  # admitted, and never applied
        (10, {-11.0}, 10, 0, "parameters"),  # applied twice
        (10, {-10.0, -9.0}, 10, 0, "parameters"),  # torn
        (9, {-9.0}, 10, 0, "know"),  # acknowledged, and not admitted
        (11, {-11.0}, 9, 1, "know"),  # admitted twice
    ],
)
def test_it_finds_what_is_lost_or_doubled(
    counted: int, values: set[float], taken: int, unknown: int, fault: str
) -> None:
    found = soak.miscount(counted, values, taken, unknown)
    assert fault in found
    assert bool(fault) == bool(found)


def test_it_finds_what_grows() -> None:
    flat, leaking = soak.Memory(), soak.Memory()
    for k in range(100):
        for memory, each in ((flat, 0.01), (leaking, 0.5)):
            memory.server.append(20.0 + each * k)
            for values in (memory.here, memory.segment, memory.descriptors, memory.threads):
                values.append(10.0)
    flat.check()
    with pytest.raises(soak.Failed, match="server grew"):
        leaking.check()
