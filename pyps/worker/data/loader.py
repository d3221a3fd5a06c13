"""Loads batches with torch's DataLoader: in this process, or in loader processes while a step is computed.

The DataLoader's sampler is a queue that never ends: an index is put there for each batch that is wanted, as
claims are made. A batch is taken only for the positions it was loaded for; batches of claims that went back
are dropped when they arrive. A batch whose successors are not known yet is divided among the loader processes
and joined here, unless a collate_fn makes batches.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from multiprocessing import current_process
from typing import Any, Self

import numpy as np
from torch.utils.data import DataLoader

from pyps.errors import InputError
from pyps.native.values import DataSet
from pyps.worker.data.samples import Source, Task, join_batches
from pyps.worker.data.sampling import indices

OWN_OPTIONS = (
    "batch_size",
    "shuffle",
    "sampler",
    "batch_sampler",
    "drop_last",
    "persistent_workers",
    "in_order",
)
PR_SET_PDEATHSIG = 1
TERM_SECONDS = 30  # that a loader process outlives SIGTERM by, unless its parent ends first
NO_BATCH = (-1, 0)  # the positions of what is no batch: the data set's fingerprint
Positions = tuple[int, int]  # first position, samples
TOLERANCE = 1e-3  # of the mean size of the values: a JPEG decoder's rounding is a tenth of this
WEIGHT = 0.6180339887498949  # each further value counts this much less, so that two cannot change places


@dataclass(frozen=True)
class LoaderOptions:
    """How to load.

    workers: loader processes; 0: the training process loads.
    prefetch: batches that each of them loads in advance.
    more: further options of torch's DataLoader.
    """

    workers: int = 0
    prefetch: int = 2
    more: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.workers < 0 or isinstance(self.workers, bool):
            raise InputError("batches", "num_workers", repr(self.workers), "0 or more loader processes")
        if self.prefetch < 1:
            raise InputError("batches", "prefetch", repr(self.prefetch), "at least 1 batch for each process")
        if taken := [name for name in OWN_OPTIONS if name in self.more]:
            raise InputError("batches", taken[0], "given", "nothing: the plan and the store decide it")


@dataclass(slots=True)
class BatchPart:
    """A part of a wanted batch.

    last: no part follows. valid: False once it is not wanted any more. early: it was asked for while the one
    before it was loaded or computed, and behind nothing that is dropped.
    """

    wanted: Positions
    task: Task | None
    last: bool = True
    valid: bool = True
    early: bool = False


@dataclass(frozen=True)
class LoadedBatch:
    """A batch. seconds: for which it kept the loader busy. early: as of its parts, or there is no loader
    process: a wait for it is what loading costs.
    """

    data: Any
    seconds: float
    early: bool


class IndexQueue:
    """The DataLoader's sampler: the tasks that wait. When none does, the DataLoader asks again later."""

    def __init__(self) -> None:
        self.waiting: deque[BatchPart] = deque()
        self.sent: deque[BatchPart] = deque()  # in the order in which their data comes

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Task | None:
        if not self.waiting:
            raise StopIteration
        piece = self.waiting.popleft()
        self.sent.append(piece)
        return piece.task


class Loader:
    """Batches of one data set for a worker; close() ends the loader processes.

    align() and take() belong to the training thread; any thread may call append().
    """

    def __init__(self, source: Source, options: LoaderOptions) -> None:
        self._source, self._options = source, options
        self.workers = 0 if source.in_process else options.workers
        self._queue = IndexQueue()
        self._lock = threading.Lock()
        self._divides = source.divisible
        self._queue.waiting.append(BatchPart(NO_BATCH, None))
        more = dict(options.more)
        if self.workers:
            user_init = more.pop("worker_init_fn", None)
            bound = threading.current_thread() is threading.main_thread()
            more |= {
                "prefetch_factor": options.prefetch,
                "worker_init_fn": partial(_begin_process, user_init, os.getpid() if bound else 0),
            }
        else:
            for name in ("timeout", "worker_init_fn", "multiprocessing_context"):
                more.pop(name, None)
        timed = _TimedSource(source)
        loader: DataLoader[Any] = DataLoader(
            timed,  # type: ignore[arg-type]
            batch_size=None,
            sampler=self._queue,
            num_workers=self.workers,
            collate_fn=_unchanged,
            **more,
        )
        # With nothing for it to do, the DataLoader takes longer than a small batch.
        plain = not self.workers and not any(more.values())
        self._iterator: Any = map(timed.__getitem__, self._queue) if plain else iter(loader)
        self._fingerprint: DataSet | None = None

    @property
    def room(self) -> int:
        """Batches that may be loaded in advance."""
        return self.workers * self._options.prefetch

    def fingerprint(self) -> DataSet:
        """The data set's fingerprint, read by the process that reads the data set."""
        if self._fingerprint is None:
            with self._lock:
                self._fingerprint = self._next()[1]
        return self._fingerprint

    def align(self, wanted: Sequence[Positions]) -> None:
        """Take what is wanted now, in order. All else that is being loaded is dropped, but after the last."""
        with self._lock:
            if not self._queue.sent and not self._queue.waiting:
                self._request(wanted, divided=len(wanted) < self.workers, early=False)
                return
            live = [piece for piece in self._pieces() if piece.valid and piece.task is not None]
            known = list(dict.fromkeys(piece.wanted for piece in live))
            start = known.index(wanted[0]) if wanted and wanted[0] in known else len(known)
            same = 0
            while same < len(wanted) and start + same < len(known) and known[start + same] == wanted[same]:
                same += 1
            kept = known[start : start + same] if same < len(wanted) else known[start:]
            self._drop({*known} - {*kept})
            self._request(wanted[same:], divided=len(wanted) < self.workers, early=same > 0)

    def append(self, wanted: Sequence[Positions]) -> None:
        """Load these after all that is wanted already."""
        with self._lock:
            self._request(wanted, divided=len(wanted) < self.workers, early=True)

    def take(self, wanted: Positions) -> LoadedBatch:
        """A batch that align() asked for."""
        self.fingerprint()
        parts, spent, early = [], 0.0, True
        while True:
            with self._lock:
                piece, data, seconds = self._next()
            if not piece.valid:
                continue
            if piece.wanted != wanted:
                raise RuntimeError(f"the loader gave positions {piece.wanted}, not {wanted}")
            parts.append(data)
            spent += seconds
            early = early and piece.early
            if piece.last:
                seconds = 0.0 if self._source.in_process else spent / max(1, self.workers)
                return LoadedBatch(join_batches(parts), seconds, early or not self.workers)

    def close(self) -> None:
        """End the loader processes. Idempotent."""
        with self._lock:
            iterator, self._iterator = self._iterator, None
            self._queue.waiting.clear()
            if iterator is not None and self.workers:
                iterator._shutdown_workers()  # an exception's traceback may keep the iterator alive

    def _pieces(self) -> list[BatchPart]:
        return [*self._queue.sent, *self._queue.waiting]

    def _drop(self, unwanted: set[Positions]) -> None:
        for piece in self._queue.sent:
            piece.valid &= piece.wanted not in unwanted
        self._queue.waiting = deque(p for p in self._queue.waiting if p.wanted not in unwanted)

    def _request(self, wanted: Sequence[Positions], *, divided: bool, early: bool) -> None:
        """Put the tasks for these into the queue, and send as many as there is room for."""
        early = early and all(piece.valid for piece in self._queue.sent)
        for first, count in wanted:
            parts = min(count, self.workers) if divided and self._divides else 1
            cuts = [count * k // parts for k in range(parts + 1)]
            for begin, end in pairwise(cuts):
                task = self._task(first + begin, end - begin)
                self._queue.waiting.append(BatchPart((first, count), task, last=end == count, early=early))
        if self._iterator is None or not self.workers:
            return
        # The DataLoader asks for an index when it gives out a batch, and stops asking once there was none. It
        # has no public call to ask again.
        while self._queue.waiting and len(self._queue.sent) < self.room:
            self._iterator._try_put_index()

    def _task(self, first: int, count: int) -> Task:
        if not self._source.length:
            return Task(first, count, None)
        return Task(first, count, indices(first, count, self._source.length, self._source.seed))

    def _next(self) -> tuple[BatchPart, Any, float]:
        """Return what comes next: its piece, the data, and the seconds that loading it took."""
        data, seconds = next(self._iterator)
        return self._queue.sent.popleft(), data, seconds


class _TimedSource:
    """The data set in a loader process: (batch, seconds that it took); for no task, the fingerprint."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getitem__(self, task: Task | None) -> tuple[Any, float]:
        began = time.perf_counter()
        data = fingerprint_of(self._source) if task is None else self._source[task]
        return data, time.perf_counter() - began


def _unchanged(batch: Any) -> Any:
    return batch


def _begin_process(user_init: Callable[[int], None] | None, bound: int, number: int) -> None:
    """In a new loader process. bound: the process whose main thread started it, and with which it ends, or 0.

    torch too ends loader processes whose parent is gone, but only between two batches. SIGTERM reaches the
    whole group: the parent leaves on it, and torch raises there if a loader process ends first.
    """
    signal.signal(signal.SIGTERM, _end_later if bound else signal.SIG_DFL)
    if bound and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        from multiprocessing.context import ForkServerProcess  # Windows has none

        is_child = not isinstance(current_process(), ForkServerProcess)
        if is_child and os.getppid() != bound:  # it died before the line above
            os.kill(os.getpid(), signal.SIGKILL)
    if user_init is not None:
        user_init(number)


def _end_later(_: int, __: object) -> None:
    signal.alarm(TERM_SECONDS)


def fingerprint_of(source: Source) -> DataSet:
    """Say what ranks compare of their data sets: length, type, and either the data set's own `fingerprint` (a
    string) or its first and last sample.

    Unlike machines decode and round a little differently. So texts and single whole numbers are compared
    exactly, arrays by their shape and, within a tolerance, their mean. Samples that come out differently when
    they are read twice are left out.
    """
    digest = hashlib.blake2b(digest_size=7)
    digest.update(_name(type(source.dataset)).encode())
    own = getattr(source.dataset, "fingerprint", None)
    if isinstance(own, str):
        digest.update(own.encode())
        return _made(source, digest, [])
    values: list[tuple[float, float]] = []
    if source.length:
        example = list(_features(source.example(last=False)))
        if example == list(_features(source.example(last=False))):
            for feature in (*example, *_features(source.example(last=True))):
                if isinstance(feature, str):
                    digest.update(feature.encode())
                else:
                    values.append(feature)
    return _made(source, digest, values)


def _made(source: Source, digest: Any, values: list[tuple[float, float]]) -> DataSet:
    mean = sum(WEIGHT**k * value for k, (value, _) in enumerate(values))
    tolerance = TOLERANCE * sum(WEIGHT**k * size for k, (_, size) in enumerate(values))
    finite = math.isfinite(mean) and math.isfinite(tolerance)
    number = int.from_bytes(digest.digest())
    return DataSet(source.length, number, mean if finite else 0.0, tolerance if finite else 0.0)


def _features(sample: Any) -> Iterator[str | tuple[float, float]]:
    """Return what is compared of a sample: texts exactly; (mean, mean size) of an array or a float nearly."""
    if isinstance(sample, Mapping):
        for key in sorted(sample, key=str):
            yield f"key {key}"
            yield from _features(sample[key])
    elif isinstance(sample, tuple | list) and not all(isinstance(v, int | float) for v in sample):
        yield f"{len(sample)} values"
        for value in sample:
            yield from _features(value)
    elif isinstance(sample, str):
        yield sample.rpartition("/")[2]  # of a path only the file: folders differ between machines
    elif isinstance(sample, bytes | bool | int | None):
        yield repr(sample)
    else:
        yield from _of_array(sample)


def _of_array(sample: Any) -> Iterator[str | tuple[float, float]]:
    """An array, a tensor, a list of numbers, or a float; of anything else, only its type."""
    yield _name(type(sample))
    if hasattr(sample, "detach"):
        sample = sample.detach().cpu().double().numpy() if not sample.is_complex() else None
    try:
        array = np.asarray(sample)
    except (TypeError, ValueError):
        return
    yield f"shape {list(array.shape)}"
    if array.dtype.kind not in "biuf" or not array.size:
        return
    if not array.ndim and array.dtype.kind in "biu":
        yield repr(array.item())
        return
    numbers = array.astype(np.float64)
    yield float(numbers.mean()), float(np.abs(numbers).mean())


def _name(kind: type) -> str:
    return kind.__qualname__
