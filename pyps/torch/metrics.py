"""Figures of a Rebalancer's ranks for TensorBoard, Prometheus and OpenTelemetry (pyps.metrics).

    balance.observers.append(to_sink(open_sink("tensorboard:logs"), noise))      # on one rank

An observer is called with the Rebalancer whenever a window's result is known on this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pyps.metrics import Reading, Sink

if TYPE_CHECKING:
    from pyps.torch.noise import GradientNoise
    from pyps.torch.rebalance import Rebalancer

Observer = Callable[["Rebalancer"], None]


def to_sink(sink: Sink, noise: GradientNoise | None = None) -> Observer:
    """Writes the Rebalancer's scalars at the training step, and changes of the split as notes.

    noise: if given, its scale too, as noise_scale.
    """
    written = 0

    def observe(balance: Rebalancer) -> None:
        nonlocal written
        found = balance.scalars()
        if noise is not None and (scale := noise.scale) is not None:
            found["noise_scale"] = scale
        sink.write(balance.steps, [_reading(name, value) for name, value in found.items()])
        for change in balance.history[written:]:
            sink.note(change.step, str(change))
        written = len(balance.history)

    return observe


def _reading(name: str, value: float) -> Reading:
    rank, _, field = name.rpartition("/")
    return Reading(field, value, int(rank.removeprefix("rank")) if rank else None)
