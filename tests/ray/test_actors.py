"""A rank's actor as a plain class, without a cluster."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from pyps.ray.actors import Work, WorkerActor
from pyps.run.launcher import restore_signals


class Here:
    """A store on the actor's own node."""

    def address(self, client: str) -> str | None:
        return None


def test_a_handler_that_was_not_set_from_python_is_not_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """signal.signal gives None for it, and takes no None."""
    taken: list[Any] = []

    def outside(_: int, handler: Any) -> None:
        if handler is None:
            raise TypeError("signal handler must be signal.SIG_IGN, signal.SIG_DFL, or a callable object")
        taken.append(handler)

    trained: list[int] = []
    (tmp_path / "run.json").write_text("{}")
    work = Work(3, lambda: trained.append(1), (), "", {}, tmp_path, Here())  # type: ignore[arg-type]
    monkeypatch.setattr("pyps.ray.actors.node_id", lambda: "here")
    monkeypatch.setattr("pyps.ray.actors.NOTICE_SECONDS", 60.0)
    monkeypatch.setattr("signal.signal", outside)
    assert WorkerActor().train(work) == (0, "")
    restore_signals({signal.SIGHUP: None, signal.SIGINT: outside})
    assert (trained, taken) == ([1], [signal.SIG_DFL, signal.SIG_DFL, signal.SIG_DFL, outside])
