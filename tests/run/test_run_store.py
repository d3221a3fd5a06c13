"""A run's launcher and a store over several servers that is away for a while."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pyps.errors
from pyps.errors import LinkLost, PypsError, SegmentNotFound
from pyps.formats.events import Undone, append_undone, read_undone
from pyps.run.checkpoints import Checkpointer
from pyps.run.store import RunStore

SHARDED = "tcp://10.0.0.1:5555,10.0.0.2:5555/model?insecure=1"


def spec(error: PypsError, store: str = SHARDED, moves: bool = True) -> Any:
    """Make the spec of a run whose store cannot be opened."""

    def fail() -> None:
        raise error

    return SimpleNamespace(store=store, open_store=fail, where=fail if moves else None)


def test_a_store_that_moves_may_be_away() -> None:
    lost = LinkLost("open", "no server there")
    assert RunStore(spec(lost), print).open() is None
    assert RunStore(spec(SegmentNotFound("open", "not yet")), print).open() is None
    with pytest.raises(LinkLost):
        RunStore(spec(lost, moves=False), print).open()


def test_a_lost_link_is_forgiven_over_several_servers_until_the_deadline() -> None:
    closed: list[bool] = []
    store = RunStore(spec(LinkLost("open", "")), print)
    store.store = SimpleNamespace(close=lambda: closed.append(True))  # type: ignore[assignment]
    with store.may_be_lost():
        raise LinkLost("status", "gone")
    assert (store.store, closed) == (None, [True])
    with pytest.raises(LinkLost), store.may_be_lost(time.monotonic() - 1.0):
        raise LinkLost("status", "gone")
    with (
        pytest.raises(LinkLost),
        RunStore(spec(LinkLost("open", ""), "tcp://10.0.0.1:5555/m"), print).may_be_lost(),
    ):
        raise LinkLost("status", "gone")


def test_a_checkpoint_that_a_lost_link_stopped_is_due_again(tmp_path: Path) -> None:
    failed: list[PypsError] = []
    options = SimpleNamespace(checkpoint_every=100, keep_checkpoints=1)
    run = spec(LinkLost("open", "gone"))
    run.__dict__.update(
        options=options, ranks=[SimpleNamespace(rank=0)], resumed=SimpleNamespace(path=None, version=0)
    )
    checkpoints = Checkpointer(run, lambda version, path: None, failed.append)
    for times in (1, 2):
        checkpoints.update(SimpleNamespace(version=130, all_joined=True))  # type: ignore[arg-type]
        assert checkpoints.wait(30.0)
        assert len(failed) == times


def test_undone_pushes_are_added_up(tmp_path: Path) -> None:
    assert read_undone(tmp_path) == []
    for one in (Undone(100, 7), Undone(200, 3)):
        append_undone(tmp_path, one)
    assert read_undone(tmp_path) == [Undone(100, 7), Undone(200, 3)]


@pytest.mark.parametrize("name", [n for n in dir(pyps.errors) if n[0].isupper()])
def test_errors_reach_other_processes(name: str) -> None:
    kind = getattr(pyps.errors, name)
    if not (isinstance(kind, type) and issubclass(kind, PypsError)):
        return
    error = kind.__new__(kind, "its text")
    error.__dict__.update(what="push", field="lr")
    received = pickle.loads(pickle.dumps(error))
    assert (type(received), str(received), received.__dict__) == (kind, str(error), error.__dict__)
