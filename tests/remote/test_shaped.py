"""The link between two network namespaces, shaped to a rate by tc tbf: keys, speed, bytes, a cut cable."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from shaped import SERVER, Shaped, missing, shaped

from pyps.remote.keys import KeyFolder
from pyps.store import Store

REASON = missing()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON or "there are namespaces here")

SIZE = 250_000  # 1 MB: 80 ms at 100 Mbit/s
RATE, BYTES_PER_SECOND = "100mbit", 100e6 / 8
ROUNDS = 4
PROTOCOL_SHARE = 0.10  # headers of TCP/IP, ZeroMQ, CURVE, and what a lossy shaper makes TCP send again

SERVE = """
import sys
from pyps.remote.server import Server
with Server("model", sys.argv[1], keys=sys.argv[2], client_timeout_seconds=float(sys.argv[3])) as server:
    print(server.address, flush=True)
    sys.stdin.readline()
"""
TRAIN = """
import sys, time
import numpy as np
from pyps.remote import open_store
from pyps.native.values import Hyper
with open_store(sys.argv[1]) as store:
    store.join()
    flat, _ = store.pull()
    for k in range(int(sys.argv[3])):
        print("ready", flush=True)
        sys.stdin.readline()
        claim = store.start()
        area = store.stage()
        area.flat[:] = 1.0
        before = store.traffic.sent, store.traffic.received
        began = time.perf_counter()
        store.push(area, claim.count, Hyper(lr=1.0), encoding=sys.argv[2])
        pushed = time.perf_counter()
        store.pull(flat)
        pulled = time.perf_counter()
        sent, received = store.traffic.sent - before[0], store.traffic.received - before[1]
        print(pushed - began, pulled - pushed, sent, received, flush=True)
    print("done", store.traffic.resent, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def store(shm: Path) -> Iterator[Store]:
    with Store.create("model", {"w": np.zeros(SIZE)}, batches=[4], policy="asp") as one:
        yield one


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


@contextmanager
def training(
    tmp_path: Path, codec: str, options: str = "", silence: float = 10.0, rounds: int = ROUNDS
) -> Iterator[tuple[Shaped, subprocess.Popen[str]]]:
    """A server in one namespace, and a client in the other that steps once for each line that it gets."""
    KeyFolder.open(tmp_path / "keys").save()
    with ExitStack() as stack:
        pair = stack.enter_context(shaped(RATE))
        python = (sys.executable, "-c")
        keys = str(tmp_path / "keys")
        serve = (*python, SERVE, f"tcp://{SERVER}:*", keys, str(silence))
        server = stack.enter_context(running(*pair.command(pair.server, *serve)))
        assert server.stdout is not None
        address = f"{server.stdout.readline().strip()}?keys={tmp_path / 'keys' / 'client.key'}{options}"
        train = (*python, TRAIN, address, codec, str(rounds))
        yield pair, stack.enter_context(running(*pair.command(pair.client, *train)))


def say(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


def hear(child: subprocess.Popen[str]) -> list[str]:
    assert child.stdout is not None
    return child.stdout.readline().split()


@pytest.mark.timed
def test_a_step_takes_what_the_link_takes(store: Store, tmp_path: Path) -> None:
    """Encrypted; the time of a transfer is its bytes over the rate, and no more bytes go than have to."""
    whole = store.layout.parameters * 4
    with training(tmp_path, "f32") as (pair, child):
        assert hear(child) == ["ready"]
        before = pair.wire_bytes()
        times = []
        for _ in range(ROUNDS):
            say(child)
            push, pull, sent, received = map(float, hear(child))
            times.append((push, pull))
            hear(child)
            assert whole < sent < 1.001 * whole
            assert whole < received < 1.001 * whole
        wire = [b - a for a, b in zip(before, pair.wire_bytes(), strict=True)]
        say(child)
    for seconds in np.median(times, axis=0):
        assert 0.8 < seconds / (whole / BYTES_PER_SECOND) < 1.6
    for count in wire:
        assert ROUNDS * whole < count < ROUNDS * whole * (1 + PROTOCOL_SHARE)
    assert store.status().version == ROUNDS


@pytest.mark.timed
def test_fewer_bits_take_less_time(store: Store, tmp_path: Path) -> None:
    with training(tmp_path, "int4", "&pull=int8", rounds=2) as (_, child):
        hear(child)
        for _ in range(2):
            say(child)
            push, pull, sent, received = map(float, hear(child))
            hear(child)
        whole = store.layout.parameters * 4
        assert sent / whole == pytest.approx(4.5 / 32, rel=0.01)
        assert received / whole == pytest.approx(8.125 / 32, rel=0.01)
        assert push + pull < 1.2 * whole / BYTES_PER_SECOND, "both ways in the time of one as fp32"
        say(child)
    assert store.status().version == 2


@pytest.mark.timed
def test_a_cut_cable_is_mended(store: Store, tmp_path: Path) -> None:
    """In the middle of a transfer; it comes to its end, and the push is one push."""
    with training(tmp_path, "f32", rounds=2) as (pair, child):
        hear(child)
        say(child)
        time.sleep(0.03)
        pair.switch(up=False)
        time.sleep(1.0)
        assert store.status().version == 0, "the gradient is on its way"
        pair.switch(up=True)
        assert len(hear(child)) == 4
        hear(child)
        say(child)
        assert len(hear(child)) == 4
        assert hear(child)[0] == "done"
        say(child)
    assert store.status().version == 2
    assert store.snapshot().tensors["w"][0] == -2.0


def test_beyond_a_cable_that_stays_cut_a_worker_is_dead(store: Store, tmp_path: Path) -> None:
    with training(tmp_path, "f32", silence=1.0) as (pair, child):
        hear(child)
        say(child)
        hear(child)
        assert store.status().active == 1
        pair.switch(up=False)
        say(child)
        deadline = time.monotonic() + 20
        while store.status().active:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert child.wait(20) == 1, "LinkLost"
