"""Ranks are killed, lost and new: torchrun goes on with sum b = B, and each sample counts once."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import elastic_train
import psutil
import pytest

DEADLINE_SECONDS = 300.0
STEPS_BEFORE = 6  # of each start: the event comes after them and after a checkpoint
LAST_CALL_SECONDS = 2  # for more nodes: a node asks once a second whether a round is open
SCRIPT = Path(elastic_train.__file__)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


# torchrun that says when it has imported what it needs, and joins at a line of input.
AGENT = """
import sys
from torch.distributed.run import main
print("ready", flush=True)
sys.stdin.readline()
main(sys.argv[1:])
"""


def agent(folder: Path, port: int, number: int) -> subprocess.Popen[bytes]:
    """torchrun for one of two or three nodes, not joined yet; the first one keeps the rendezvous."""
    last_call = f"last_call_timeout={LAST_CALL_SECONDS}"
    conf = f"{last_call},keep_alive_interval=1,keep_alive_max_attempt=8,join_timeout=60"
    command = [
        sys.executable,
        "-c",
        AGENT,
        "--nnodes=2:3",
        "--nproc-per-node=1",
        "--max-restarts=5",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        f"--rdzv-conf={conf},is_host={number == 0}",
        "--rdzv-id=test",
        "--monitor-interval=0.1",
        str(SCRIPT),
        str(folder),
    ]
    log = (folder / f"agent-{number}.log").open("wb")
    # A store that agents share keeps the addresses of ranks that are gone (torch 2.13).
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
    )


def join(agents: list[subprocess.Popen[bytes]]) -> None:
    """The agents join the rendezvous."""
    for one in agents:
        assert one.stdin is not None
        one.stdin.write(b"\n")
        one.stdin.close()


def notes(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for f in sorted(folder.glob("notes-*.jsonl")) for line in f.read_text().splitlines()
    ]


def end(process: subprocess.Popen[bytes]) -> None:
    """The agent with its worker, at once: as a node that loses its power."""
    try:
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    except psutil.NoSuchProcess:
        return
    for one in family:
        try:
            one.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    process.wait(10)


def worker_of(agent: subprocess.Popen[bytes]) -> psutil.Process:
    """The rank that an agent runs."""
    (found,) = (p for p in psutil.Process(agent.pid).children() if str(SCRIPT) in p.cmdline())
    return found


def steps_of_last_start(folder: Path, ranks: int, after: float) -> tuple[float, int]:
    """When the last start began and how many steps all its ranks noted: 0 before one of so many ranks."""
    later = [note for note in notes(folder) if note["started"] > after and note["ranks"] == ranks]
    started = max((note["started"] for note in later), default=after)
    steps = Counter(note["step"] for note in later if note["started"] == started)
    return started, sum(count == ranks for count in steps.values())


@pytest.mark.thorough
@pytest.mark.timed
@pytest.mark.timeout(180)
def test_ranks_leave_and_come(tmp_path: Path) -> None:
    """A rank is killed, a node comes, a node is lost: two ranks, two, three, and two at the end."""
    port, deadline = free_port(), time.monotonic() + DEADLINE_SECONDS
    agents = [agent(tmp_path, port, number) for number in range(3)]
    started = 0.0

    def said() -> str:
        return "\n".join(log.read_text() for log in sorted(tmp_path.glob("agent-*.log")))

    def wait_until(done: Callable[[], bool]) -> None:
        while not done():
            assert time.monotonic() < deadline, said()
            time.sleep(0.05)

    def wait_for_steps(ranks: int) -> None:
        nonlocal started
        wait_until(lambda: steps_of_last_start(tmp_path, ranks, started)[1] >= STEPS_BEFORE)
        started, _ = steps_of_last_start(tmp_path, ranks, started)

    try:
        wait_until(lambda: all(f.stat().st_size for f in tmp_path.glob("agent-*.log")))
        join(agents[:2])
        wait_for_steps(2)
        worker_of(agents[1]).send_signal(signal.SIGKILL)
        wait_for_steps(2)
        join(agents[2:])
        wait_for_steps(3)
        (tmp_path / "last").touch()
        end(agents[1])
        left = [agents[0], agents[2]]
        wait_until(lambda: all(one.poll() is not None for one in left))
        assert [one.returncode for one in left] == [0, 0], said()
    finally:
        for one in agents:
            end(one)
    check_samples(notes(tmp_path))


def check_samples(reported: list[dict[str, Any]]) -> None:
    """Each once in what the parameters saw; those after a checkpoint once more for each restart, no other.

    torchrun may start the ranks more than once again: when a rank fails for its lost peer, and when the
    rendezvous notices the node.
    """
    starts = sorted({(note["started"], note["from"], note["ranks"]) for note in reported})
    restarts = len(starts) - 1
    assert restarts >= 3
    ranks = [ranks for _, _, ranks in starts]
    assert ranks[:2] == [2, 2]
    assert 3 in ranks
    assert ranks[-1] == 2
    rounds: dict[tuple[float, int], list[int]] = {}
    for note in reported:
        rounds.setdefault((note["started"], note["step"]), []).extend(note["rows"])
    kept = {
        (started, step): rows
        for (started, step), rows in rounds.items()
        if all(step < begin for later, begin, _ in starts if later > started)
    }
    assert sorted(k for rows in kept.values() for k in rows) == list(range(elastic_train.SAMPLES))
    full = [rows for (_, step), rows in kept.items() if step < elastic_train.SAMPLES // elastic_train.B]
    assert all(len(rows) == elastic_train.B for rows in full)
    lost = Counter(k for key, rows in rounds.items() if key not in kept for k in rows)
    assert all(count <= restarts for count in lost.values())
    assert len(lost) <= restarts * (elastic_train.EVERY + 1) * elastic_train.B
