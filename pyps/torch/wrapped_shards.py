"""WrappedShards: what GlobalMean asks of a model that went through shard()."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pyps.errors import InputError
from pyps.sharding.modules import run_of
from pyps.torch.waiting import Waiting
from pyps.torch.wrapped import Watcher, Wrapped


class WrappedShards(Wrapped):
    """A model that went through shard()."""

    is_ddp = False

    def __init__(self, model: torch.nn.Module) -> None:
        self.run = run_of(model)
        first = self.run.owned[0].piece
        super().__init__(model, self.run.group, first.device)

    def time_passes(self, waiting: Waiting) -> None:
        self.run.waits = waiting.counted
        super().time_passes(waiting)

    def watch_own(self, watcher: Watcher) -> None:
        self.run.watchers.append(watcher)

    def reduced(self) -> list[torch.nn.Parameter]:
        return [one.piece for one in self.run.owned if one.piece.requires_grad]

    def trained(self) -> str:
        listed = [(one.name, tuple(one.shape)) for one in self.run.owned if one.piece.requires_grad]
        return f"{len(listed)} ({listed})"

    def _known(self) -> set[int]:
        wholes = [one.flat.parameters[one.k] for one in self.run.owned]
        return {id(p) for p in (*self.reduced(), *wholes)}

    def reduces(self) -> bool:
        return self.run.ends_round

    def refused(self) -> InputError | None:
        return None

    def check_pass(self) -> None:
        return None

    @contextmanager
    def micro_batch(self, last: bool, whole: bool) -> Iterator[None]:
        """Each pass is reduced as it ends, and adds up on owners; ranks with unlike numbers of passes hold
        the parameters, and their gradients, until the last.
        """
        self.run.ends_round, self.run.is_last = last, last or not whole
        if whole:
            self.run.hold_all()
        try:
            yield
        finally:
            self.run.ends_round = True
            if whole and last:
                self.run.let_all_go()

    def _again(self) -> str:
        return "shard() the whole model after adding a layer"
