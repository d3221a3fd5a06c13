"""The protocol of sinks, and the figures that they take."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Self

from pyps.errors import InputError


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


def needed(module: str, sink: str) -> ModuleType:
    """Import a sink's package. Raises InputError, naming what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = error.name or module
        raise InputError("metrics", sink, f"no {missing}", f"pip install 'pyps-train[{sink}]'") from None
