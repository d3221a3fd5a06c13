"""A run's figures in Ray's dashboard, and wherever Ray's own metrics go."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from pyps.metrics import Reading, Sink

PREFIX = "pyps_"


class RaySink(Sink):
    """A gauge for each figure, with the rank as its tag; "" for the whole run's."""

    def __init__(self) -> None:
        self._metrics = importlib.import_module("ray.util.metrics")
        self._gauges: dict[str, Any] = {}

    def write(self, step: int, readings: Iterable[Reading]) -> None:
        for reading in readings:
            name = PREFIX + reading.name
            if name not in self._gauges:
                self._gauges[name] = self._metrics.Gauge(name, tag_keys=("rank",))
            rank = "" if reading.rank is None else str(reading.rank)
            self._gauges[name].set(reading.value, tags={"rank": rank})

    def note(self, step: int, text: str) -> None:
        """Gauges are numbers alone."""

    def close(self) -> None:
        self._gauges.clear()
