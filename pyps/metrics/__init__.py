"""Figures of a run for other tools: one protocol, and a sink for TensorBoard, Prometheus and OpenTelemetry.

    with open_sink("tensorboard:logs") as sink:
        sink.write(step, [Reading("loss", 0.25), Reading("batch", 64, rank=0)])

A sink's package is imported when the sink is opened.
"""

from pyps.metrics.sink import SINKS, Reading, Sink, open_sink

__all__ = ["SINKS", "Reading", "Sink", "open_sink"]
