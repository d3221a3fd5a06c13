"""TensorBoard: scalars named pyps/loss, pyps/rank0/batch, and notes as text. Needs no torch."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

from pyps.errors import InputError
from pyps.metrics.sink import Reading, Sink, needed

PREFIX = "pyps/"
PACKAGE = "tensorboard.compat.proto"


class TensorBoardSink(Sink):
    """Writes event files to a folder."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        writers = needed("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._event = needed(f"{PACKAGE}.event_pb2", "tensorboard").Event
        self._summaries = needed(f"{PACKAGE}.summary_pb2", "tensorboard")
        self._tensors = needed(f"{PACKAGE}.tensor_pb2", "tensorboard")
        self._strings = needed(f"{PACKAGE}.types_pb2", "tensorboard").DT_STRING
        try:
            self._writer: Any = writers.EventFileWriter(os.fspath(folder))
        except OSError as error:
            found = f"{os.fspath(folder)}: {error.strerror or error}"
            raise InputError("metrics", "tensorboard", found, "a folder to write to") from None

    def write(self, step: int, readings: Iterable[Reading]) -> None:
        values = [self._summaries.Summary.Value(tag=_tag(r), simple_value=r.value) for r in readings]
        self._add(step, values)

    def note(self, step: int, text: str) -> None:
        tensor = self._tensors.TensorProto(dtype=self._strings, string_val=[text.encode()])
        plugin = self._summaries.SummaryMetadata.PluginData(plugin_name="text")
        about = self._summaries.SummaryMetadata(plugin_data=plugin)
        tag = f"{PREFIX}notes/text_summary"
        self._add(step, [self._summaries.Summary.Value(tag=tag, metadata=about, tensor=tensor)])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add(self, step: int, values: list[Any]) -> None:
        summary = self._summaries.Summary(value=values)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))


def _tag(reading: Reading) -> str:
    return PREFIX + (reading.name if reading.rank is None else f"rank{reading.rank}/{reading.name}")
