"""Run a training script with batches of given sizes: python -m pyps.gain.rank SCRIPT [ARGS]...

The script is not changed. torch's BatchSampler gives it the sizes that PYPS_GAIN asks for, and begins anew
where an epoch would end: there ranks with unlike batches would wait for each other. Each batch's samples and
seconds are noted. A batch lasts from the call for it to the call for the next one: loading, copies, the
step, its collectives. What is drawn in order, or without gradients, is an evaluation's and stays as it is.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections import deque
from collections.abc import Iterator
from itertools import cycle, islice, repeat
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    dataloader,
)

from pyps.gain.notes import BLOCK, NO_LOADER, ORDERS, Note, Orders


class _Batches:
    """The indices of one BatchSampler in batches of the ordered sizes, without an end. drawn: their sizes."""

    def __init__(self, batches: BatchSampler, sizes: list[int]) -> None:
        self.drawn: deque[int] = deque()
        self._batches, self._indices = batches, iter(batches.sampler)
        found = sizes or [batches.batch_size]
        self._sizes = cycle([size for size in found for _ in repeat(None, BLOCK)])

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        size = next(self._sizes)
        batch = list(islice(self._indices, size))
        while len(batch) < size:
            self._indices = iter(self._batches.sampler)
            more = list(islice(self._indices, size - len(batch)))
            if not more:
                raise StopIteration
            batch += more
        self.drawn.append(size)
        return batch


class _Watch:
    """Hooks into torch that give a script its batches, time them, and emulate a slower device."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._notes = Path(orders.notes).open("ab", buffering=0)  # noqa: SIM115 - as long as the process
        self._loader: Any = None  # whose batch is under way
        self._samples = self._steps = 0
        self._began = self._worked = 0.0
        self._install()

    def _install(self) -> None:
        usual, draw, watch = BatchSampler.__iter__, dataloader._BaseDataLoaderIter.__next__, self

        def batches(self: BatchSampler) -> Iterator[list[int]]:
            return _Batches(self, watch._orders.sizes) if _trains(self) else usual(self)

        def next_batch(self: Any) -> Any:
            drawn = getattr(self._sampler_iter, "drawn", None)
            if drawn is None:
                return draw(self)
            watch._ended(self)
            batch = draw(self)
            watch._samples = drawn.popleft()
            return batch

        BatchSampler.__iter__ = batches  # type: ignore[method-assign]
        dataloader._BaseDataLoaderIter.__next__ = next_batch  # type: ignore[method-assign]
        register_optimizer_step_post_hook(self._stepped)
        if self._orders.pace > 1.0:
            self._emulate()

    def _stepped(self, *_: Any) -> None:
        """End a script that trains on batches that it makes itself."""
        self._steps += 1
        if self._steps >= BLOCK and self._loader is None:
            os._exit(NO_LOADER)

    def _ended(self, loader: Any) -> None:
        """Note the batch before, and begin another."""
        cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if cuda:
            torch.cuda.synchronize()
        now = time.perf_counter()
        if loader is self._loader:
            peak = torch.cuda.max_memory_allocated() if cuda else 0
            budget = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() if cuda else 0
            note = Note(self._samples, now - self._began, peak, budget)
            self._notes.write(msgspec.json.encode(note) + b"\n")
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        self._loader, self._began, self._worked = loader, now, time.process_time()

    def _emulate(self) -> None:
        """Hold back each backward pass before its last reduction, as much longer as the device is slower."""
        made = DistributedDataParallel.__init__

        def hold(_: torch.Tensor) -> None:
            time.sleep((self._orders.pace - 1.0) * (time.process_time() - self._worked))

        def make(ddp: Any, module: Any, *given: Any, **options: Any) -> None:
            made(ddp, module, *given, **options)
            next(p for p in module.parameters() if p.requires_grad).register_hook(hold)

        DistributedDataParallel.__init__ = make  # type: ignore[assignment,method-assign]


def _trains(batches: BatchSampler) -> bool:
    """Return whether the script trains on what is drawn: at random, and with gradients."""
    sampler = batches.sampler
    if isinstance(sampler, DistributedSampler):
        return sampler.shuffle and torch.is_grad_enabled()
    at_random = isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler)
    return at_random and torch.is_grad_enabled()


def main() -> None:
    """Run the script as `python SCRIPT ARGS` would."""
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    _Watch(msgspec.json.decode(os.environ.pop(ORDERS), type=Orders))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
