"""What a rank's steps take itself, without the time in which it waits for other ranks.

A rank waits in some collectives inside its forward and backward passes: FSDP2 gathers each layer's parameters
there. It waits at the end of each backward pass, until its gradients are reduced; a step may have several (a
GAN's). And it waits where the ranks meet between passes, in a sum of their losses, say. On a CPU the time of
a wait is a clock's; on CUDA it lies between two events on the stream that waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, ClassVar, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist

from pyps.errors import InputError

TIMED = ("cpu", "cuda")  # elsewhere a clock would time the launch of work, not the work


class Meeting(Protocol):
    """A hook, as a timer sees it: the waits on its device, and how often its ranks have met."""

    @property
    def waiting(self) -> Waiting: ...

    def meetings(self) -> int: ...


class Waiting:
    """The waits of a process on a device, and the ends of its passes; all of its hooks share one.

    timers: those that hear of them; is_timed: whether there ever was one. device: which it is.
    """

    _on: ClassVar[dict[torch.device, Waiting]] = {}

    def __init__(self, device: torch.device) -> None:
        self.timers: WeakSet[ComputeTimer] = WeakSet()
        self.is_timed = False
        self.device = device
        self._sent: Any = None  # when this rank had all gradients of a pass whose reductions are not over

    @classmethod
    def on(cls, device: torch.device) -> Waiting:
        """The one of that device."""
        return cls._on.setdefault(device, cls(device))

    def mark(self) -> Any:
        """Now: seconds, or an event on the device's current stream."""
        if self.device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    @contextmanager
    def counted(self) -> Iterator[None]:
        """What happens within is a wait."""
        began = self.mark() if self.timers and self._sent is None else None
        try:
            yield
        finally:
            if began is not None:
                self._waited(began)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self) -> None:
        """A forward pass begins that counts."""
        self._sent = None  # else of a backward pass that failed
        for timer in self.timers:
            timer.forward()

    def ready(self) -> None:
        """This rank has all gradients of a pass; what follows until over() is a wait. A pass through several
        models has it several times, and the last one counts.
        """
        if self.timers:
            self._sent = self.mark()
            for timer in self.timers:
                timer.ready(self._sent)

    def over(self) -> None:
        """They are reduced."""
        sent, self._sent = self._sent, None
        if sent is not None:
            self._waited(sent)
            for timer in self.timers:
                timer.over()

    def _waited(self, began: Any) -> None:
        ended = self.mark()
        for timer in self.timers:
            timer.waited(began, ended)


class OwnTime:
    """A rank's own part of a step; on CUDA its seconds are known when the events are over."""

    def __init__(self, began: Any, ended: Any, waits: list[tuple[Any, Any]]) -> None:
        self._began, self._ended, self._waits = began, ended, waits

    @property
    def known(self) -> bool:
        return isinstance(self._ended, float) or bool(self._ended.query())

    @property
    def seconds(self) -> float:
        return _between(self._began, self._ended) - sum(_between(*wait) for wait in self._waits)


def _between(began: Any, ended: Any) -> float:
    return float(ended - began) if isinstance(ended, float) else float(began.elapsed_time(ended)) / 1000


class ComputeTimer:
    """How long each step takes this rank, without the time that it waits for other ranks.

    From the end of one step to the last gradient of the next: fetching data, forward and backward passes of
    all models with a hook, all micro-batches. Waits in between are left out. So is a stretch between passes
    in which the ranks have met. On CUDA times lie between events, and are read when these are over, so that
    no thread waits for the device. Raises InputError on other devices.
    """

    def __init__(self, hook: Meeting) -> None:
        device = hook.waiting.device
        if device.type not in TIMED:
            expected = f"{' or '.join(TIMED)}: pyps cannot time the steps of other devices"
            raise InputError("Rebalancer", "device", str(device), expected)
        self._waiting, self._hook = hook.waiting, hook
        self._began: Any = None
        self._waits: list[tuple[Any, Any]] = []
        self._between: tuple[Any, int] | None = None  # passes: since when, and how often ranks had met then
        self._pending: list[tuple[Any, OwnTime]] = []  # with a step's label
        self._ended: OwnTime | None = None
        self._waiting.timers.add(self)
        self._waiting.is_timed = True

    def start(self) -> None:
        """A step begins now."""
        self._began, self._ended, self._waits = self._waiting.mark(), None, []
        self._between = self._began, self._hook.meetings()

    def finish(self, label: Any) -> None:
        """The step is done. Its time gets the label, if it had a beginning and gradients."""
        if self._ended is not None:
            self._pending.append((label, self._ended))
        self._began = None

    def finished(self) -> list[tuple[Any, float]]:
        """(label, seconds) of the steps whose time is known by now, each once."""
        known = []
        while self._pending and self._pending[0][1].known:
            label, own = self._pending.pop(0)
            known.append((label, own.seconds))
        return known

    def forward(self) -> None:
        """As Waiting's."""
        between, self._between = self._between, None
        if between is not None and self._hook.meetings() != between[1]:
            self.waited(between[0], self._waiting.mark())

    def ready(self, mark: Any) -> None:
        """As Waiting's."""
        if self._began is not None:
            self._ended = OwnTime(self._began, mark, list(self._waits))

    def over(self) -> None:
        """As Waiting's."""
        if self._began is not None:
            self._between = self._waiting.mark(), self._hook.meetings()

    def waited(self, began: Any, ended: Any) -> None:
        """A wait of this rank."""
        if self._began is not None:
            self._waits.append((began, ended))


def meetings_of(*groups: dist.ProcessGroup | None) -> int:
    """How often the ranks of these groups have met."""
    every: Any = groups  # torch's types lack the method
    return sum(group._get_sequence_number_for_group() for group in every if group is not None)
