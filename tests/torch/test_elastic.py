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

DEADLINE_SECONDS = 90.0
STEPS_BEFORE = 6  # the event comes after them and after a checkpoint
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


def agent(
    folder: Path, port: int, number: int, nodes: str, last_call: int, last_ranks: int
) -> subprocess.Popen[bytes]:
    """torchrun for one node of one rank, not joined yet; the first one keeps the rendezvous.

    folder: where the agent's log and the ranks' notes go
    port: of the rendezvous
    number: of this agent, from 0
    nodes: the fewest and the most nodes that may train, as least:most
    last_call: seconds to wait for more nodes than the fewest
    last_ranks: how many ranks may finish the run
    """
    conf = f"last_call_timeout={last_call},keep_alive_interval=1,keep_alive_max_attempt=8,join_timeout=60"
    command = [
        sys.executable,
        "-c",
        AGENT,
        f"--nnodes={nodes}",
        "--nproc-per-node=1",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        f"--rdzv-conf={conf},is_host={number == 0}",
        "--rdzv-id=test",
        "--monitor-interval=0.1",
        str(SCRIPT),
        str(folder),
        str(last_ranks),
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


@pytest.mark.timed
@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("event", "before", "after"), [("a lost node", 3, 2), ("a killed rank", 2, 2), ("a new node", 2, 3)]
)
def test_ranks_leave_and_come(tmp_path: Path, event: str, before: int, after: int) -> None:
    port, deadline = free_port(), time.monotonic() + DEADLINE_SECONDS
    nodes = f"{min(before, after)}:{max(before, after)}"
    # A node asks once a second whether a round is open: a last call of one second may miss it.
    last_call = 1 if after == before else 2
    agents = [agent(tmp_path, port, number, nodes, last_call, after) for number in range(max(before, after))]
    left = agents

    def said() -> str:
        return "\n".join(log.read_text() for log in sorted(tmp_path.glob("agent-*.log")))

    def wait_until(done: Callable[[], bool]) -> None:
        while not done():
            assert time.monotonic() < deadline, said()
            time.sleep(0.05)

    try:
        wait_until(lambda: all(f.stat().st_size for f in tmp_path.glob("agent-*.log")))
        join(agents[:before])
        wait_until(lambda: len(notes(tmp_path)) >= before * STEPS_BEFORE)
        if event == "a lost node":
            end(agents[-1])
            left = agents[:-1]
        elif event == "a killed rank":
            worker_of(agents[-1]).send_signal(signal.SIGKILL)
        else:
            join(agents[-1:])
        wait_until(lambda: all(one.poll() is not None for one in left))
        assert [one.returncode for one in left] == [0] * len(left), said()
    finally:
        for one in agents:
            end(one)
    check_samples(notes(tmp_path), before, after)


def check_samples(reported: list[dict[str, Any]], before: int, after: int) -> None:
    """Each once in what the parameters saw; those after a checkpoint once more for each restart, no other.

    torchrun may start the ranks more than once again: when a rank fails for its lost peer, and when the
    rendezvous notices the node.
    """
    starts = sorted({(note["started"], note["from"], note["ranks"]) for note in reported})
    restarts = len(starts) - 1
    assert restarts >= 1
    assert (starts[0][2], starts[-1][2]) == (before, after)
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
