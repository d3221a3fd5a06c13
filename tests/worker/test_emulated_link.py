"""Emulated links: bytes follow one another each way, also on a shared link, and latencies overlap."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from run_tools import make_plan
from threads import in_threads

from pyps.formats import Fit, write_json
from pyps.formats.records import read_run, split_spans
from pyps.run.ranks import throttles
from pyps.solver.links import LinkSpec
from pyps.store.policies import ASP, BSP
from pyps.worker.run.emulated_link import Direction, EmulatedLinks, RoundTrips, SharedLane
from pyps.worker.run.settings import Settings, ThrottleSpec
from pyps.worker.step.loop import Worker

PROFILE = {
    "schema": "pyps.profile/1",
    "device": {"name": "d"},
    "model": {"name": "m", "parameters": 1000},
    "points": [{"batch": 1, "seconds": 0.01}, {"batch": 9, "seconds": 0.02}],
}
CLUSTER = """
[job]
global_batch = 8
[[shared]]
name = "rack/1"
bandwidth = 1e6
latency = 0.01
[[worker]]
name = "device-0"
profile = "p.json"
bandwidth = 5e6
latency = 0.02
[[worker]]
name = "device-1"
profile = "p.json"
shares = ["rack/1"]
bandwidth = 5e6
"""


class Clock:
    """The clock of emulated links, in nanoseconds; sleeping passes its time at once."""

    def __init__(self) -> None:
        self.at = 0

    def sleep(self, seconds: float) -> None:
        self.at += round(1e9 * seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(time, "monotonic_ns", lambda: made.at)
    monkeypatch.setattr(time, "sleep", made.sleep)
    yield made
    monkeypatch.undo()


def arrival(links: EmulatedLinks, direction: Direction, size: int, leaves: float = 0.0) -> float:
    return links.send(direction, size, round(1e9 * leaves)) * 1e-9


def test_a_message_takes_its_bytes_and_its_latency_on_each_link(clock: Clock) -> None:
    links = EmulatedLinks((LinkSpec(0.02, 1e6), LinkSpec(0.0, 2e6)))
    assert arrival(links, Direction.TO_STORE, 20_000) == pytest.approx(0.02 + 0.02 + 0.01)
    assert arrival(links, Direction.FROM_STORE, 20_000) == pytest.approx(0.01 + 0.02 + 0.02)
    assert arrival(EmulatedLinks(), Direction.TO_STORE, 10**12) == 0.0


def test_bytes_follow_one_another_each_way_and_latencies_overlap(clock: Clock) -> None:
    links = EmulatedLinks((LinkSpec(0.5, 1e6),))
    assert [arrival(links, Direction.TO_STORE, 100_000) for _ in range(3)] == pytest.approx([0.6, 0.7, 0.8])
    assert arrival(links, Direction.FROM_STORE, 100_000) == pytest.approx(0.6), "the other way is free"
    assert arrival(links, Direction.TO_STORE, 100_000, 0.25) == pytest.approx(0.9), "50 ms are left"
    assert arrival(links, Direction.TO_STORE, 100_000, 2.0) == pytest.approx(2.6)


def test_a_shared_link_alone_is_a_link(clock: Clock, tmp_path: Path) -> None:
    links = EmulatedLinks((LinkSpec(0.5, 1e6, "rack/1"),), tmp_path)
    assert [arrival(links, Direction.TO_STORE, 100_000) for _ in range(3)] == pytest.approx([0.6, 0.7, 0.8])
    (tmp_path / "link-other-up").write_bytes(b"half")  # a writer was killed there
    began = clock.at
    assert SharedLane(1e9, tmp_path / "link-other-up").carry(5, began) == began + 5


@pytest.mark.timed
def test_processes_divide_a_shared_link(tmp_path: Path) -> None:
    """Three messages of 0.1 s that come together end together; one that comes then is alone."""
    ends: list[float] = []
    began = time.monotonic_ns()

    def use() -> None:
        way = SharedLane(1e6, tmp_path / "wire")
        ends.append((way.carry(100_000, began) - began) * 1e-9)

    in_threads(*(use for _ in range(3)))
    assert ends == pytest.approx([0.3] * 3, abs=0.05)
    last = time.monotonic_ns()
    assert (SharedLane(1e6, tmp_path / "wire").carry(100_000, last) - last) * 1e-9 == pytest.approx(
        0.1, abs=1e-6
    )


def test_round_trips_are_under_way_at_once_and_answered_in_order() -> None:
    """The second leaves before the first is answered; an error comes back as an answer does."""
    links = EmulatedLinks((LinkSpec(0.05, 1e9),))
    trips: RoundTrips[int] = RoundTrips(links, "link-test")
    both_sent = threading.Event()

    def first() -> tuple[int, int]:
        assert both_sent.wait(30.0)
        return 1, 1000

    def second() -> tuple[int, int]:
        raise ValueError("refused")

    began = time.monotonic()
    takes = [trips.begin(1000, first), trips.begin(1000, second)]
    both_sent.set()
    assert takes[0]() == 1
    assert time.monotonic() - began >= 0.1
    with pytest.raises(ValueError, match="refused"):
        takes[1]()
    closed = threading.Event()
    trips.close(closed.set, 30.0)
    assert closed.is_set()


def test_a_cluster_file_says_which_links_to_emulate(tmp_path: Path) -> None:
    write_json(tmp_path / "p.json", PROFILE)
    (tmp_path / "c.toml").write_text(CLUSTER)
    own, shared = throttles(make_plan(), "plan.json", tmp_path / "c.toml")
    assert own is not None
    assert shared is not None
    assert own.links == (LinkSpec(0.02, 5e6),)
    assert shared.links == (LinkSpec(0.01, 1e6, "rack/1"),)


def test_the_worker_learns_of_its_links(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = Fit(kind="affine", per_sample_seconds=0.001, trusted_min_batch=1, trusted_max_batch=9)
    spec = ThrottleSpec(fit=fit, links=(LinkSpec(0.02, 5e6, "rack"),))
    settings = Settings(store="s", rank=0, policy=BSP(), throttle=spec, launched=True)
    for name, value in settings.to_env().items():
        monkeypatch.setenv(name, value)
    assert Settings.from_env() == settings


def test_transfers_of_a_deep_pipeline_overlap_on_it(shm: Path, tmp_path: Path) -> None:
    """Each transfer takes a latency there and one back; three are under way while the next step computes."""
    depth, steps, latency = 4, 12, 0.1
    settings = Settings(
        store="run",
        rank=0,
        policy=ASP(),
        samples=4 * steps,
        batches=(4,),
        throttle=ThrottleSpec(factor=1.0, links=(LinkSpec(latency, 1e12),)),
        depth=depth,
        staging_buffers=depth,
        run_dir=tmp_path,
    )
    model = torch.nn.Linear(10, 1, bias=False)
    with Worker(settings) as worker:
        worker.attach(model)
        for x, y in worker.batches((torch.randn(8, 10), torch.randn(8, 1))):
            torch.nn.functional.mse_loss(model(x), y).backward()
            worker.step()
    records = read_run(tmp_path)
    assert len(records) == steps
    assert max(r.staleness for r in records) == depth - 1
    transfers = [split_spans(r)[1] for r in records]
    assert all(spans[-1][2] - spans[0][1] >= 2 * latency for spans in transfers)
    begins, ends = [spans[0][1] for spans in transfers], [spans[-1][2] for spans in transfers]
    under_way = [sum(b <= begin < e for b, e in zip(begins, ends, strict=True)) for begin in begins]
    assert max(under_way) == depth - 1
    assert all(a <= b for spans in transfers for (_, _, a), (_, b, _) in pairwise(spans))


@pytest.mark.parametrize(("depth", "transfers"), [(1, 2), (2, 1)])
def test_pushes_and_pulls_cross_it(shm: Path, depth: int, transfers: int) -> None:
    """A step takes a push and a pull; in a pipeline they overlap with the emulated compute."""
    one_way, steps = 0.03, 6
    model = torch.nn.Linear(10, 1, bias=False)
    fit = Fit(kind="affine", fixed_seconds=2 * one_way, trusted_min_batch=1, trusted_max_batch=99)
    link = LinkSpec(0.0, 4 * 10 / one_way)
    settings = Settings(
        store="run",
        rank=0,
        policy=BSP() if depth == 1 else ASP(),
        samples=4 * steps,
        batches=(4,),
        throttle=ThrottleSpec(fit=fit, links=(link,)),
        depth=depth,
    )
    with Worker(settings) as worker:
        worker.attach(model)
        began = time.monotonic()
        for x, y in worker.batches((torch.randn(8, 10), torch.randn(8, 1))):
            torch.nn.functional.mse_loss(model(x), y).backward()
            worker.step()
        lasted = time.monotonic() - began
    assert lasted >= steps * one_way * 2 * transfers
    assert worker.steps == steps
