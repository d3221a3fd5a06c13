"""The protocol of sinks, and how one is opened by its text, such as "prometheus:9100"."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Self

from pyps.errors import InputError

SINKS = {
    "tensorboard": "tensorboard[:DIR]",
    "prometheus": "prometheus:PORT",
    "otel": "otel[:ENDPOINT]",
}


@dataclass(frozen=True, slots=True)
class Reading:
    """One figure: of the whole run, or of one rank. Its name says its unit, as in step_seconds."""

    name: str
    value: float
    rank: int | None = None


class Sink(ABC):
    """Takes readings; a context manager. A sink that fails once it is open warns, and training goes on."""

    @abstractmethod
    def write(self, step: int, readings: Iterable[Reading]) -> None:
        """The figures at a step, which counts global batches."""

    @abstractmethod
    def note(self, step: int, text: str) -> None:
        """Something that happened, such as a change of the split. Sinks of numbers alone leave it out."""

    @abstractmethod
    def close(self) -> None:
        """Hand over what is still here. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self.close()


def open_sink(text: str, default_folder: str = "tensorboard") -> Sink:
    """The sink that a text names: one of the values of SINKS.

    default_folder: of TensorBoard's files, where the text has none. Raises InputError for an unknown sink, a
    port that is taken, a folder that cannot be written, and a package that is missing.
    """
    name, _, rest = text.partition(":")
    if name == "tensorboard":
        from pyps.metrics.tensorboard import TensorBoardSink

        return TensorBoardSink(rest or default_folder)
    if name == "prometheus":
        from pyps.metrics.prometheus import PrometheusSink

        return PrometheusSink(_port(text, rest))
    if name == "otel":
        from pyps.metrics.otel import OpenTelemetrySink

        return OpenTelemetrySink(rest or None)
    raise InputError("metrics", "", repr(text), f"one of {', '.join(SINKS.values())}")


def needed(module: str, sink: str) -> ModuleType:
    """Import a sink's package. Raises InputError, naming what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = error.name or module
        raise InputError("metrics", sink, f"no {missing}", f"pip install 'pyps-train[{sink}]'") from None


def _port(text: str, port: str) -> int:
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise InputError("metrics", "", repr(text), "prometheus:PORT, 0 to 65535; 0: a free one")
    return int(port)
