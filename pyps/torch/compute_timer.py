"""ComputeTimer: how long a rank's steps take itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from pyps.errors import InputError
from pyps.torch.waiting import Waiting

if TYPE_CHECKING:
    from pyps.torch.global_mean import GlobalMean

TIMED = ("cpu", "cuda")  # elsewhere a clock would time the launch of work, not the work
OwnTime = tuple[Any, Any, list[tuple[Any, Any]]]  # a step's begin and end, and its waits


def _is_over(mark: Any) -> bool:
    return isinstance(mark, float) or bool(mark.query())


def _between(began: Any, ended: Any) -> float:
    return float(ended - began) if isinstance(ended, float) else float(began.elapsed_time(ended)) / 1000


class ComputeTimer:
    """How long each step takes this rank, without the time that it waits for other ranks.

    From the end of one step to the last gradient of the next: fetching data, forward and backward passes of
    all models of a GlobalMean, all micro-batches. Waits in between are left out. On CUDA times lie between
    events, and are read when these are over, so that no thread waits for the device. Raises InputError on
    other devices.
    """

    def __init__(self, mean: GlobalMean) -> None:
        if mean.device.type not in TIMED:
            expected = f"{' or '.join(TIMED)}: pyps cannot time the steps of other devices"
            raise InputError("Rebalancer", "device", str(mean.device), expected)
        self._waiting = Waiting.on(mean.device)
        self._groups = list(dict.fromkeys(mean.meeting_groups()))
        self._began: Any = None
        self._waits: list[tuple[Any, Any]] = []
        self._between: list[tuple[Any, int]] = []  # passes: when, and how often ranks had met then
        self._pending: list[tuple[Any, OwnTime]] = []  # with a step's label
        self._ended: OwnTime | None = None
        for one in mean.models:
            one.time_passes(self._waiting)
        self._waiting.timers.add(self)

    def start(self) -> None:
        """A step begins now."""
        self._began, self._ended, self._waits, self._between = self._waiting.mark(), None, [], []
        self.open()

    def finish(self, label: Any) -> None:
        """The step is done. Its time gets the label, if it had a beginning and gradients."""
        if self._ended is not None:
            self._pending.append((label, self._ended))
        self._began = None

    def finished(self) -> list[tuple[Any, float]]:
        """(label, seconds) of the steps whose time is known by now, each once."""
        known = []
        while self._pending and _is_over(self._pending[0][1][1]):
            label, (began, ended, waits) = self._pending.pop(0)
            known.append((label, _between(began, ended) - sum(_between(*wait) for wait in waits)))
        return known

    def open(self) -> None:
        """A stretch between passes begins, in which the script may let ranks meet."""
        if self._began is not None:
            self._between = [(self._waiting.mark(), meetings_of(*self._groups))]

    def fetches(self) -> None:
        """A loader begins to fetch a batch: from here on a stretch is own time, if no ranks meet in it."""
        if self._between:
            self._between.append((self._waiting.mark(), meetings_of(*self._groups)))

    def close(self) -> None:
        """The stretch is over. Where ranks have met in it, what came before their last meeting is a wait."""
        between, self._between = self._between, []
        if not between:
            return
        met = meetings_of(*self._groups)
        if met != between[0][1]:
            own = next((mark for mark, then in between if then == met), None)
            self.waited(between[0][0], self._waiting.mark() if own is None else own)

    def ready(self, mark: Any) -> None:
        """This rank has all gradients of a pass; the step's last one counts."""
        if self._began is not None:
            self._ended = self._began, mark, list(self._waits)

    def waited(self, began: Any, ended: Any) -> None:
        """A wait of this rank."""
        if self._began is not None:
            self._waits.append((began, ended))


def meetings_of(*groups: dist.ProcessGroup | None) -> int:
    """How often the ranks of these groups have met."""
    every: Any = groups  # torch's types lack the method
    return sum(group._get_sequence_number_for_group() for group in every if group is not None)
