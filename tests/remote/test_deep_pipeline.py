"""Several transfers of one worker under way over a link: latency is hidden, each push counts once."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from delayed import DelayedLink
from hypothesis import given, settings
from hypothesis import strategies as st
from remote_tools import Relay
from sampled import examples
from worker_tools import SAMPLES, X, Y, backward, loss_of, make_model

from pyps.formats.records import Span, StepRecord, read_run
from pyps.native.values import Flat, PushResult
from pyps.remote.away import spans_of
from pyps.remote.server import Server
from pyps.store.codec import Residual
from pyps.worker.step.loop import join

pytestmark = pytest.mark.slow

LATENCY, COMPUTE = 0.06, 0.06  # seconds; a transfer takes two latencies


def train(
    address: str, folder: Path, depth: int, policy: str = "asp", codec: str = "f32", samples: int = 240
) -> list[StepRecord]:
    model = make_model()
    options = {"batches": [10], "samples": samples, "seed": 5, "run_dir": folder, "codec": codec}
    with join(address, 0, policy=policy, depth=depth, **options) as worker:  # type: ignore[arg-type]
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for x, y in worker.batches((X, Y)):
            until = time.monotonic() + COMPUTE
            backward(loss_of(model, x, y))
            time.sleep(max(0.0, until - time.monotonic()))
            worker.step()
        assert [rank.samples for rank in worker.store.ranks()] == [samples]
    return read_run(folder)


def period(records: list[StepRecord]) -> float:
    begins = [next(b for kind, b, _ in r.spans if kind == "compute") for r in records]
    return float(np.median(np.diff(begins)[4:]))


@pytest.mark.timed
def test_depth_three_hides_the_latency_that_depth_two_shows(shm: Path, tmp_path: Path) -> None:
    found = {}
    for depth in (2, 3):
        with (
            Server("far", "tcp://127.0.0.1:*", insecure=True) as server,
            DelayedLink(_port(server), LATENCY, 1e9) as link,
        ):
            address = f"tcp://127.0.0.1:{link.port}/far?insecure=1"
            records = train(address, tmp_path / str(depth), depth, "hps", samples=160)
        found[depth] = period(records)
        positions = [p for r in records for p in range(r.first, r.first + r.samples)]
        assert positions == list(range(160)), "each sample once, in order"
        assert {r.staleness for r in records[depth:]} == {depth - 1}
    assert 2 * LATENCY <= found[2] < 2 * LATENCY * 1.25
    assert max(COMPUTE, LATENCY) <= found[3] < COMPUTE * 1.35
    assert found[3] < 0.75 * found[2]


def _port(server: Server) -> int:
    return int(server.address.rsplit(":", 1)[1].split("/")[0])


@pytest.mark.parametrize("codec", ["f32", "int8"])
def test_a_breaking_connection_repeats_and_loses_nothing(shm: Path, tmp_path: Path, codec: str) -> None:
    with (
        Server("far", "tcp://127.0.0.1:*", insecure=True) as server,
        Relay(server.address, breaks_every=8) as relay,
    ):
        records = train(relay.address, tmp_path, 5, codec=codec, samples=4 * SAMPLES)
        assert server.counters.repeated > 0
    assert [r.first for r in records] == list(range(0, 4 * SAMPLES, 10))
    assert [r.version for r in records] == list(range(1, len(records) + 1))


@settings(max_examples=examples(15, 100), deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(["begin", "admit", "reject", "cancel"]), max_size=60), st.integers(0, 1000))
def test_what_was_admitted_and_the_residual_are_the_sum_of_what_was_given(
    deeds: list[str], seed: int
) -> None:
    draw = np.random.default_rng(seed)
    residual: Residual[Flat] = Residual(lambda: np.empty(3, np.float32))
    under_way: list[tuple[Flat, Flat]] = []
    given_, sent = np.zeros(3), np.zeros(3)
    for deed in [*deeds, *["reject", "admit"] * 30, "begin", "admit"]:
        if deed == "begin":
            old, new = residual.begin()
            gradient = draw.normal(size=3).astype(np.float32)
            total = gradient + (0 if old is None else old)
            code = np.round(total).astype(np.float32)
            new[:] = total - code
            under_way.append((gradient, code))
        elif under_way and deed == "cancel":
            under_way.pop()
            residual.cancel()
        elif under_way:
            gradient, code = under_way.pop(0)
            residual.commit(deed == "admit")
            if deed == "admit":
                given_ += gradient
                sent += code
    left, _ = residual.begin()
    np.testing.assert_allclose(sent + (0 if left is None else left), given_, atol=1e-4)


@pytest.mark.parametrize(
    ("waited", "shown"), [(0.0, []), (2.0, [("wait", 2.0, 4.0)]), (9.0, [("wait", 1.0, 4.0)])]
)
def test_a_push_over_a_link_ends_with_its_wait(waited: float, shown: list[Span]) -> None:
    result = PushResult(version=1, staleness=0, sources=1, samples=1, wait_seconds=waited)
    arrived = shown[0][1] if shown else 4.0
    assert spans_of(1.0, 4.0, 5.0, result) == (("push", 1.0, arrived), *shown, ("pull", 4.0, 5.0))
    assert spans_of(1.0, 4.0, 5.0, None) == (("push", 1.0, 4.0), ("pull", 4.0, 5.0))
