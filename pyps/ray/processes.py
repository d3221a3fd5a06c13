"""A rank's actor as the launcher sees it: a process on some node, that is started, looked at and ended.

Ray prints what it prints. An actor that has died is not started again by Ray but by the launcher, which
counts restarts and knows errors that would come again.
"""

from __future__ import annotations

import importlib
import signal
from typing import Any

from pyps.ray.actors import Work
from pyps.run.process import RankProcess


class RayProcess(RankProcess):
    """The process of a rank's actor."""

    is_here = False

    def __init__(self, actor: Any, work: Work, script: str) -> None:
        """actor: a handle of a new RankActor. work: what it is to do. script: the file that errors name."""
        super().__init__(work.rank, script)
        self._ray = importlib.import_module("ray")
        self._actor, self._death = actor, ""
        self._pid, self._result = actor.pid.remote(), actor.train.remote(work)

    def poll(self) -> int | None:
        if self.exit_code is not None:
            return self.exit_code
        try:
            if not self.pid and self._is_there(self._pid):
                self.pid = self._ray.get(self._pid)
            if self._is_there(self._result):
                self.exit_code, text = self._ray.get(self._result)
                self.stderr_tail.extend(text.splitlines())
        except self._ray.exceptions.RayError as error:
            self._ray.kill(self._actor)  # it may only be out of reach
            self.exit_code, self._death, self.is_lost = -signal.SIGKILL, _reason(error), True
        return self.exit_code

    def _is_there(self, reference: Any) -> bool:
        return bool(self._ray.wait([reference], timeout=0)[0])

    def signal(self, number: int) -> None:
        """An actor takes one signal: it is killed."""
        if self.poll() is None and number != signal.SIGCONT:
            self._ray.kill(self._actor)

    def close(self) -> None:
        self._actor = None  # the last handle: Ray ends the actor in order

    def exit_reason(self) -> str:
        return f"its actor died ({self._death})" if self._death else super().exit_reason()


def _reason(error: BaseException) -> str:
    """What Ray says first, such as: The actor died unexpectedly before finishing this task."""
    return str(error).strip().partition("\n")[0].partition(":")[0].rstrip(".") or type(error).__name__
