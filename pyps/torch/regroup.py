"""The buckets of an earlier process, for the first step of a run that goes on.

DDP cuts other buckets in its first step than later. int8 and int4 scale blocks of a bucket, so a run that
goes on would round its first step otherwise than the run that did not stop. The gradients of that step are
therefore put together as before, once the last bucket is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.futures import Future

Names = tuple[str, ...]
Exchange = Callable[[Names, torch.Tensor], None]  # sums a bucket of these parameters over the ranks, in place


class Regrouped:
    """Collects the buckets of one step.

    layout: the parameters of each bucket before, by name. sizes: elements of each parameter. exchange: what
    is done with each bucket.
    """

    def __init__(self, layout: Sequence[Names], sizes: Mapping[str, int], exchange: Exchange) -> None:
        self._layout, self._sizes, self._exchange = list(layout), sizes, exchange
        self._waiting: list[tuple[Names, torch.Tensor, Future[torch.Tensor]]] = []

    def add(self, names: Names, buffer: torch.Tensor, done: Future[torch.Tensor]) -> None:
        """A bucket that is there; `done` gets its sum in flush()."""
        self._waiting.append((names, buffer, done))

    def flush(self) -> None:
        """Reduce the remaining buckets in last step's order; if their parameters changed, as they arrived."""
        parts: dict[str, torch.Tensor] = {}
        for names, buffer, _ in self._waiting:
            parts |= self._parts(names, buffer)
        if sorted(parts) == sorted(name for names in self._layout for name in names):
            for names in self._layout:
                whole = torch.cat([parts[name] for name in names])
                self._exchange(names, whole)
                for name, total in self._parts(names, whole).items():
                    parts[name].copy_(total)
        else:
            for names, buffer, _ in self._waiting:
                self._exchange(names, buffer)
        for _, buffer, done in self._waiting:
            done.set_result(buffer)
        self._waiting.clear()

    def _parts(self, names: Names, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of a bucket, by parameter."""
        sizes = [self._sizes[name] for name in names]
        return dict(zip(names, torch.split(whole, sizes), strict=True))
