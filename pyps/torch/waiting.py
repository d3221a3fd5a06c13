"""The time that a rank's steps take itself, without that in which it waits for other ranks.

A rank waits where GlobalMean's rows meet, and at the end of each backward pass until its gradients are
reduced; a step may have several (a GAN's). It waits within forward passes: DDP sends the first rank's buffers
there, FSDP2 gathers parameters, UnevenSyncBatchNorm statistics. And it waits where the script's own
collectives are between passes, in a sum of losses, say: such a stretch counts from the next fetch of data on.
On a CPU the time of a wait is a clock's; on CUDA it lies between two events on the stream that waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pyps.errors import InputError

if TYPE_CHECKING:
    from pyps.torch.global_mean import GlobalMean

TIMED = ("cpu", "cuda")  # elsewhere a clock would time the launch of work, not the work
_engine: Any = torch.autograd.Variable._execution_engine


class Waiting:
    """The waits of a process on a device, and the ends of its passes; all of its models share one.

    timers: those that hear of them. device: which it is.
    """

    _on: ClassVar[dict[torch.device, Waiting]] = {}

    def __init__(self, device: torch.device) -> None:
        self.timers: WeakSet[ComputeTimer] = WeakSet()
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
        """Count what happens within as a wait."""
        began = self.mark() if self.timers and self._sent is None else None
        try:
            yield
        finally:
            if began is not None:
                self.waited(began)

    @contextmanager
    def backward(self, root: Any) -> Iterator[None]:
        """A backward pass from that node happens within; what follows its last gradient is a wait."""
        if not self.timers:
            yield
            return
        self._sent = None
        # What is queued runs when all gradients are there, in this order: DDP queues its wait later.
        handle = root.register_prehook(lambda _: _engine.queue_callback(self._ready))
        try:
            yield
        finally:
            handle.remove()
            sent, self._sent = self._sent, None
            if sent is not None:
                self.waited(sent)
            for timer in self.timers:
                timer.open()

    def _ready(self) -> None:
        self._sent = self.mark()
        for timer in self.timers:
            timer.ready(self._sent)

    def waited(self, began: Any) -> None:
        """A wait since then is over."""
        ended = self.mark()
        for timer in self.timers:
            timer.waited(began, ended)

    def computes(self) -> None:
        """A pass begins: the stretch between two passes is over."""
        for timer in self.timers:
            timer.close()

    def leaves(self) -> None:
        """A forward pass is over."""
        for timer in self.timers:
            timer.open()


def watch_fetches(iterator: Any) -> None:
    """Note when the iterator of a DataLoader begins to fetch each batch, for the timers of all devices."""
    fetch, known = type(iterator)._next_data, ref(iterator)  # by a strong one it would outlive its loop

    def fetched() -> Any:
        for waiting in Waiting._on.values():
            for timer in waiting.timers:
                timer.fetches()
        return fetch(known())

    iterator._next_data = fetched


def watch_passes(model: torch.nn.Module, waiting: Waiting) -> None:
    """Note where forward passes with gradients begin and end, and DDP's wait for the first rank's buffers."""
    entered: list[Any] = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enters(*_: Any) -> None:
        entered.clear()
        if torch.is_grad_enabled() and waiting.timers:
            waiting.computes()
            entered.append(waiting.mark())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def has_buffers(*_: Any) -> None:
        if entered:
            waiting.waited(entered.pop())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def leaves(*_: Any) -> None:
        if torch.is_grad_enabled():
            waiting.leaves()

    model.register_forward_pre_hook(enters, prepend=True)
    model.register_forward_hook(leaves)
    if (
        isinstance(model, DistributedDataParallel)
        and model.broadcast_buffers
        and any(True for _ in model.buffers())
    ):
        model.module.register_forward_pre_hook(has_buffers, prepend=True)


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
        while self._pending and self._pending[0][1].known:
            label, own = self._pending.pop(0)
            known.append((label, own.seconds))
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
            self._ended = OwnTime(self._began, mark, list(self._waits))

    def waited(self, began: Any, ended: Any) -> None:
        """A wait of this rank."""
        if self._began is not None:
            self._waits.append((began, ended))


def meetings_of(*groups: dist.ProcessGroup | None) -> int:
    """How often the ranks of these groups have met."""
    every: Any = groups  # torch's types lack the method
    return sum(group._get_sequence_number_for_group() for group in every if group is not None)
