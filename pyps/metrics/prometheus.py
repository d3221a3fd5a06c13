"""Prometheus: gauges named pyps_loss, pyps_rank_batch{rank="0"}, on a port of this machine alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pyps.errors import InputError
from pyps.metrics.sink import Reading, Sink, needed

HOST = "127.0.0.1"
RANK = "rank_"


class PrometheusSink(Sink):
    """Serves the latest readings at http://127.0.0.1:port/metrics; 0: a free port.

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
            self._server, self._thread = self._client.start_http_server(port, HOST, self._registry)
        except OSError as error:
            found = f"port {port} of {HOST}: {error.strerror or error}"
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
