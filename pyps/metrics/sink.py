"""Sinks: what takes figures. A protocol, and one each for TensorBoard, Prometheus and OpenTelemetry."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import ModuleType, TracebackType
from typing import Any, Self

from pyps.errors import InputError, how_to_install, reason_of, shown

PROMETHEUS_HOST = "127.0.0.1"
RANK = "rank_"  # begins the names of Prometheus's gauges by rank
PREFIX = "pyps/"  # of TensorBoard's names
TENSORBOARD = "tensorboard.compat.proto"
INTERVAL_SECONDS = 5.0  # between two exports of OpenTelemetry
SHUTDOWN_SECONDS = 5.0
LOGGERS = "opentelemetry"


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
        raise InputError("metrics", sink, f"no {missing}", how_to_install(sink)) from None


class PrometheusSink(Sink):
    """Gauges pyps_loss, pyps_rank_batch{rank="0"} at http://127.0.0.1:port/metrics; 0: a free port.

    registry: of prometheus_client, whose owner serves it; then nothing listens here.
    """

    def __init__(self, port: int = 0, registry: Any = None) -> None:
        self._client = needed("prometheus_client", "prometheus")
        self._registry = registry if registry is not None else self._client.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        self._server: Any = None
        self.port = port
        if registry is None:
            self._serve(port)

    def _serve(self, port: int) -> None:
        try:
            self._server, self._thread = self._client.start_http_server(port, PROMETHEUS_HOST, self._registry)
        except OSError as error:
            found = f"port {port} of {PROMETHEUS_HOST}: {reason_of(error)}"
            raise InputError("metrics", "prometheus", found, "a free port") from None
        self.port = int(self._server.server_port)

    def write(self, step: int, readings: Iterable[Reading]) -> None:
        for reading in (Reading("step", step), *readings):
            if reading.rank is None:
                self._gauge(reading.name).set(reading.value)
            else:
                self._gauge(RANK + reading.name).labels(str(reading.rank)).set(reading.value)

    def note(self, step: int, text: str) -> None:
        """Prometheus takes numbers alone."""

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None

    def _gauge(self, name: str) -> Any:
        if name not in self._gauges:
            labels = ("rank",) if name.startswith(RANK) else ()
            about = f"pyps: {name.removeprefix(RANK).replace('_', ' ')}"
            gauge = self._client.Gauge(f"pyps_{name}", about, labels, registry=self._registry)
            self._gauges[name] = gauge
        return self._gauges[name]


class TensorBoardSink(Sink):
    """Event files in a folder: scalars pyps/loss, pyps/rank0/batch, and notes as text. Needs no torch."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        writers = needed("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._event = needed(f"{TENSORBOARD}.event_pb2", "tensorboard").Event
        self._summaries = needed(f"{TENSORBOARD}.summary_pb2", "tensorboard")
        self._tensors = needed(f"{TENSORBOARD}.tensor_pb2", "tensorboard")
        self._strings = needed(f"{TENSORBOARD}.types_pb2", "tensorboard").DT_STRING
        try:
            self._writer: Any = writers.EventFileWriter(os.fspath(folder))
        except OSError as error:
            found = f"{os.fspath(folder)}: {reason_of(error)}"
            raise InputError("metrics", "tensorboard", found, "a folder to write to") from None
        self._failed = False

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
        writer, self._writer = self._writer, None
        if writer is not None and not self._failed:
            self._try(writer.close)

    def _add(self, step: int, values: list[Any]) -> None:
        summary = self._summaries.Summary(value=values)
        event = self._event(wall_time=time.time(), step=step, summary=summary)
        self._try(partial(self._writer.add_event, event))

    def _try(self, call: Callable[[], object]) -> None:
        """Call the writer, whose thread ends at its first error: a full disk, say. Then it writes no more."""
        try:
            call()
        except OSError as error:
            if not self._failed:
                print(shown(f"pyps: metrics: tensorboard: no further figures: {error}"), file=sys.stderr)
            self._failed = True


def _tag(reading: Reading) -> str:
    return PREFIX + (reading.name if reading.rank is None else f"rank{reading.rank}/{reading.name}")


class OpenTelemetrySink(Sink):
    """Sends gauges pyps.loss, pyps.rank.batch with the attribute rank over OTLP/HTTP every few seconds.

    endpoint: such as http://localhost:4318/v1/metrics; None: as OTEL_EXPORTER_OTLP_ENDPOINT says.
    reader: an OpenTelemetry MetricReader in place of the exporter.
    """

    def __init__(self, endpoint: str | None = None, reader: Any = None) -> None:
        metrics = needed("opentelemetry.sdk.metrics", "otel")
        resources = needed("opentelemetry.sdk.resources", "otel")
        if reader is None:
            reader = _reader(endpoint)
        service = resources.Resource.create({"service.name": "pyps"})
        self._provider: Any = metrics.MeterProvider([reader], service, shutdown_on_exit=False)
        self._meter = self._provider.get_meter("pyps")
        self._gauges: dict[str, Any] = {}
        _warn_once()

    def write(self, step: int, readings: Iterable[Reading]) -> None:
        for reading in (Reading("step", step), *readings):
            name = f"pyps.{reading.name}" if reading.rank is None else f"pyps.rank.{reading.name}"
            if name not in self._gauges:
                self._gauges[name] = self._meter.create_gauge(name)
            self._gauges[name].set(reading.value, {} if reading.rank is None else {"rank": reading.rank})

    def note(self, step: int, text: str) -> None:
        """Metrics are numbers alone."""

    def close(self) -> None:
        if self._provider is not None:
            self._provider.shutdown(timeout_millis=SHUTDOWN_SECONDS * 1e3)
            self._provider = None


def _reader(endpoint: str | None) -> Any:
    exporters = needed("opentelemetry.exporter.otlp.proto.http.metric_exporter", "otel")
    export = needed("opentelemetry.sdk.metrics.export", "otel")
    exporter = exporters.OTLPMetricExporter(endpoint=endpoint, timeout=SHUTDOWN_SECONDS)
    return export.PeriodicExportingMetricReader(exporter, export_interval_millis=INTERVAL_SECONDS * 1e3)


class _OneWarning(logging.Handler):
    """The first warning of the exporter on stderr; the others say the same."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self._said:
            self._said = True
            print(shown(f"pyps: metrics: otel: {record.getMessage()}"), file=sys.stderr)


def _warn_once() -> None:
    logger = logging.getLogger(LOGGERS)
    if not logger.handlers:
        logger.addHandler(_OneWarning())
        logger.propagate = False
