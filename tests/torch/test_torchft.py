"""Replicas under torchft that are killed and come back: the parameters are those of one process."""

from __future__ import annotations

import pytest
import replica_kills

pytest.importorskip("torchft.coordination")


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_killed_replicas_come_back() -> None:
    found = replica_kills.killed(3, 1)
    assert len(found["kills"]) == 3
    assert found["replicas"][-1] == 3
    assert len(found["errors"]) == 3
    assert max(found["errors"]) < replica_kills.EXACT
