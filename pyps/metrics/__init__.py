"""Figures of a run for other tools: one protocol, and a sink for TensorBoard, Prometheus and OpenTelemetry.

    with open_sink("tensorboard:logs") as sink:
        sink.write(step, [Reading("loss", 0.25), Reading("batch", 64, rank=0)])

A sink's package is imported when the sink is opened.
"""

from __future__ import annotations

from pyps.errors import InputError
from pyps.metrics.sink import OpenTelemetrySink, PrometheusSink, Reading, Sink, TensorBoardSink

__all__ = ["SINKS", "Reading", "Sink", "open_sink"]

SINKS = {
    "tensorboard": "tensorboard[:DIR]",
    "prometheus": "prometheus:PORT",
    "otel": "otel[:ENDPOINT]",
}


def open_sink(text: str, default_folder: str = "tensorboard") -> Sink:
    """The sink that a text names: one of the values of SINKS.

    default_folder: of TensorBoard's files, where the text has none. Raises InputError for an unknown sink, a
    port that is taken, a folder that cannot be written, and a package that is missing.
    """
    name, _, rest = text.partition(":")
    if name == "tensorboard":
        return TensorBoardSink(rest or default_folder)
    if name == "prometheus":
        return PrometheusSink(_port(text, rest))
    if name == "otel":
        return OpenTelemetrySink(rest or None)
    raise InputError("metrics", "", repr(text), f"one of {', '.join(SINKS.values())}")


def _port(text: str, port: str) -> int:
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise InputError("metrics", "", repr(text), "prometheus:PORT, 0 to 65535; 0: a free one")
    return int(port)
