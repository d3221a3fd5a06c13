"""Figures of a run for other tools: one protocol, and a sink for TensorBoard, Prometheus and OpenTelemetry.

    with open_sink("tensorboard:logs") as sink:
        sink.write(step, [Reading("loss", 0.25), Reading("batch", 64, rank=0)])

A sink's package is imported when the sink is opened.
"""

from __future__ import annotations

from pyps.errors import InputError
from pyps.metrics.sink import OpenTelemetrySink, PrometheusSink, Reading, Sink, TensorBoardSink, needed

__all__ = ["SINKS", "Reading", "Sink", "check_sink", "open_sink"]

SINKS = {
    "tensorboard": "tensorboard[:DIR]",
    "prometheus": "prometheus:PORT",
    "otel": "otel[:ENDPOINT]",
}
PACKAGES = {"tensorboard": "tensorboard", "prometheus": "prometheus_client", "otel": "opentelemetry"}


def check_sink(text: str) -> None:
    """Raise InputError for an unknown sink, a port that is none, and a package that is missing."""
    name, _, rest = text.partition(":")
    if name not in SINKS:
        raise InputError("metrics", "", repr(text), f"one of {', '.join(SINKS.values())}")
    if name == "prometheus":
        _port(text, rest)
    needed(PACKAGES[name], name)


def open_sink(text: str, default_folder: str = "tensorboard") -> Sink:
    """The sink that a text names: one of the values of SINKS.

    default_folder: of TensorBoard's files, where the text has none. Raises InputError as check_sink does, and
    for a port that is taken, and a folder that cannot be written.
    """
    check_sink(text)
    name, _, rest = text.partition(":")
    if name == "tensorboard":
        return TensorBoardSink(rest or default_folder)
    if name == "prometheus":
        return PrometheusSink(_port(text, rest))
    return OpenTelemetrySink(rest or None)


def _port(text: str, port: str) -> int:
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise InputError("metrics", "", repr(text), "prometheus:PORT, 0 to 65535; 0: a free one")
    return int(port)
