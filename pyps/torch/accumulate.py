"""Micro-batches: a rank's batch, or a loader's, in the passes of a round, under DDP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import chain, islice
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from pyps.errors import InputError
from pyps.torch.passes import Passes
from pyps.torch.schedule import micro_batches
from pyps.torch.weighting import rows_of


class MicroBatches:
    """The loops over a round's passes, whose losses are plain means."""

    def __init__(self, ddp: DistributedDataParallel, passes: Passes) -> None:
        self._ddp, self._passes = ddp, passes

    def cut(self, batch: Any, parts: int) -> Iterator[Any]:
        """Tensors of a batch in `parts` micro-batches, each ready for a forward and a backward pass."""
        rows = rows_of(batch)
        cuts = cuts_of(rows, parts)
        parted = (rows_between(batch, rows, low, high) for low, high in cuts)
        return self.passes(parted, len(cuts), of_one=True)

    def passes(self, source: Iterator[Any], count: int, of_one: bool = False) -> Iterator[Any]:
        """`count` micro-batches out of a source, of one batch or of several; only the last backward pass
        reduces.
        """
        number, is_over, begun, before = 0, False, self._passes.number, self._passes.managed
        self._passes.managed = self._passes.in_round = True
        self._passes.of_one = of_one
        try:
            for number, micro in enumerate(islice(source, count), 1):
                with nullcontext() if number == count else self._ddp.no_sync():
                    yield micro
            is_over = number == count and not self._passes.is_pending
        finally:
            self._passes.managed, self._passes.of_one, self._passes.in_round = before, False, False
            if not is_over and self._passes.number == begun:  # nothing was reduced
                self._passes.forget()
        check_round(number, count, is_over)

    def rounds(self, loader: Any, count: int) -> Iterator[Iterator[Any]]:
        """The passes of each round of a loader that gives `count` micro-batches a round."""
        source = iter(loader)
        for first in source:
            passes = self.passes(chain([first], source), count)
            yield passes
            if next(passes, None) is not None:
                expected = "a loop over all of them"
                raise InputError("rounds", "micro-batches of a round", "some that are left", expected)


def check_round(number: int, count: int, is_over: bool) -> None:
    """Raise InputError for a round of so many micro-batches, out of `count`, that was not reduced."""
    if number < count:
        raise InputError("accumulate", "micro-batches", f"{number}", f"{count} in this round")
    if not is_over:
        found = "a last one without backward(), which reduces the gradients of all"
        raise InputError("accumulate", "micro-batches", found, "backward() for each")


def cuts_of(rows: int, parts: int, most: int | None = None) -> list[tuple[int, int]]:
    """Rows in `parts` ranges, or as many as there are rows, at least one: other ranks wait for a gradient.
    Raises InputError for fewer parts than one.
    """
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
        raise InputError("accumulate", "parts", repr(parts), "a whole number from 1")
    return micro_batches(0, rows, max(1, min(parts, rows if most is None else most)))


def rows_between(batch: Any, rows: int, low: int, high: int) -> Any:
    """Some rows of all tensors that have as many as the batch; anything else as it is."""

    def cut(leaf: Any) -> Any:
        whole = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows
        return leaf[low:high] if whole else leaf

    return tree_map(cut, batch)
