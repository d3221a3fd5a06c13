"""OpenTelemetry: gauges named pyps.loss, pyps.rank.batch with the attribute rank, sent over OTLP/HTTP."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from typing import Any

from pyps.metrics.sink import Reading, Sink, needed

INTERVAL_SECONDS = 5.0
SHUTDOWN_SECONDS = 5.0
LOGGERS = "opentelemetry"


class OpenTelemetrySink(Sink):
    """Exports the latest readings every few seconds.

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
            print(f"pyps: metrics: otel: {record.getMessage()}", file=sys.stderr)


def _warn_once() -> None:
    logger = logging.getLogger(LOGGERS)
    if not logger.handlers:
        logger.addHandler(_OneWarning())
        logger.propagate = False
