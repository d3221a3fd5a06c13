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
from typing import Any, ClassVar
from weakref import WeakSet, ref

import torch
from torch.nn.parallel import DistributedDataParallel

_engine: Any = torch.autograd.Variable._execution_engine


class Waiting:
    """The waits of a process on a device, and the ends of its passes; all of its models share one.

    timers: those that hear of them. device: which it is.
    """

    _on: ClassVar[dict[torch.device, Waiting]] = {}

    def __init__(self, device: torch.device) -> None:
        self.timers: WeakSet[Any] = WeakSet()
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
