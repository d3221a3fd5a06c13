"""Every sink with the real package: what is written can be read with that tool's own reader."""

from __future__ import annotations

import errno
import http.server
import os
import socket
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from remote_tools import eventually

from pyps.errors import InputError, how_to_install
from pyps.metrics import Reading, open_sink

READINGS = [Reading("loss", 0.25), Reading("batch", 64, rank=0), Reading("batch", 32, rank=1)]
NOTE = "rank 1 slowed by 2.0x"


def test_tensorboard_reads_scalars_and_notes(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_sink(f"tensorboard:{tmp_path / 'logs'}") as sink:
        sink.write(1, READINGS)
        sink.write(2, [Reading("loss", 0.125)])
        sink.note(2, NOTE)
    found = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert [(e.step, e.value) for e in found.Scalars("pyps/loss")] == [(1, 0.25), (2, 0.125)]
    assert [e.value for e in found.Scalars("pyps/rank1/batch")] == [32.0]
    (note,) = found.Tensors("pyps/notes/text_summary")
    assert (note.step, note.tensor_proto.string_val[0].decode()) == (2, NOTE)


def test_tensorboard_has_a_default_folder(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with open_sink("tensorboard", str(tmp_path / "run" / "tensorboard")) as sink:
        sink.write(1, READINGS)
    assert list((tmp_path / "run" / "tensorboard").glob("events.out.tfevents.*"))
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="a folder to write to"):
        open_sink(f"tensorboard:{tmp_path / 'file' / 'logs'}")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_is_said_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records = pytest.importorskip("tensorboard.summary.writer.record_writer")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with open_sink(f"tensorboard:{tmp_path}") as sink:
        monkeypatch.setattr(records.RecordWriter, "write", full)
        for step in range(3):
            sink.write(step, READINGS)
            eventually(lambda: not any("AsyncWriter" in type(t).__name__ for t in threading.enumerate()))
        sink.note(3, NOTE)
    said = capsys.readouterr().err
    assert said.count("pyps: metrics: tensorboard: no further figures: [Errno 28] No space left") == 1


@pytest.mark.promise("listens on loopback")
def test_prometheus_serves_gauges_on_this_machine_alone() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    with open_sink("prometheus:0") as sink:
        port = sink.port  # type: ignore[attr-defined]
        sink.write(3, READINGS)
        sink.write(4, [Reading("loss", 0.125)])
        sink.note(4, NOTE)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
            families = parser.text_string_to_metric_families(reply.read().decode())
        samples = {(s.name, s.labels.get("rank")): s.value for family in families for s in family.samples}
        assert samples == {
            ("pyps_loss", None): 0.125,
            ("pyps_step", None): 4.0,
            ("pyps_rank_batch", "0"): 64.0,
            ("pyps_rank_batch", "1"): 32.0,
        }
        with pytest.raises(InputError, match=rf"port {port} of 127.0.0.1: .*; expected a free port"):
            open_sink(f"prometheus:{port}")
    with socket.socket() as free:
        assert free.connect_ex(("127.0.0.1", port)) != 0
    sink.close()


def test_opentelemetry_gauges() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    from pyps.metrics.sink import OpenTelemetrySink

    reader = InMemoryMetricReader()
    with OpenTelemetrySink(reader=reader) as sink:
        sink.write(3, READINGS)
        data = reader.get_metrics_data()
    (resource,) = data.resource_metrics
    assert resource.resource.attributes["service.name"] == "pyps"
    (scope,) = resource.scope_metrics
    points = {
        (metric.name, point.attributes.get("rank")): point.value
        for metric in scope.metrics
        for point in metric.data.data_points
    }
    assert points == {
        ("pyps.step", None): 3,
        ("pyps.loss", None): 0.25,
        ("pyps.rank.batch", 0): 64,
        ("pyps.rank.batch", 1): 32,
    }


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """An OTLP/HTTP collector on this machine: its endpoint, and the bodies that came."""
    bodies: list[bytes] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/metrics", bodies
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_opentelemetry_sends_what_is_left_when_it_closes(collector: tuple[str, list[bytes]]) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    endpoint, bodies = collector
    with open_sink(f"otel:{endpoint}") as sink:
        sink.write(3, READINGS)
    assert any(b"pyps.rank.batch" in body for body in bodies)


def test_a_missing_package_is_said_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(InputError) as caught:
        open_sink("prometheus:0")
    found = "metrics: prometheus: found no prometheus_client; expected"
    assert str(caught.value) == f"{found} {how_to_install('prometheus')}"


@pytest.mark.parametrize(
    "text", ["statsd:1", "prometheus", "prometheus:", "prometheus:70000", "prometheus:x", ""]
)
def test_wrong_texts_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="metrics"):
        open_sink(text)
