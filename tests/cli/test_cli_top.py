"""`pyps top`: what it says of stores whose members are known, without becoming a member."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_tools import make_setup
from test_page import make_run, setup_of, steps
from threads import background
from typer.testing import CliRunner

from pyps.cli.top import app
from pyps.errors import InputError
from pyps.formats import write_json
from pyps.formats.events import EventLog
from pyps.native.status import WaitKind
from pyps.native.values import Hyper
from pyps.remote.server import Server
from pyps.store import Store
from pyps.store.policies import ASP, policy_name

runner = CliRunner()
PATIENCE_SECONDS = 30.0
LIKE_SECONDS = 0.05  # of a step: a busy machine makes no straggler of one that takes as long
HYPER = Hyper(lr=0.1)


@pytest.fixture
def pair(shm: Path) -> Iterator[tuple[Store, Store]]:
    with Store.create("pair", {"w": np.zeros(1000)}, batches=[7, 3]) as first, Store.open("pair") as second:
        first.join(0)
        second.join(1)
        yield first, second


def push(store: Store, computes_seconds: float = 0.0) -> None:
    claim, staging = store.start(), store.stage()
    staging.flat.fill(0.5)
    time.sleep(computes_seconds)
    store.push(staging, claim.count, HYPER)


def top(*arguments: object) -> dict[str, Any]:
    done = runner.invoke(app, [*map(str, arguments), "--json"], catch_exceptions=False)
    (store,) = json.loads(done.stdout)["stores"]
    found: dict[str, Any] = store
    return found


@pytest.mark.parametrize(
    ("last", "words"), [("ended", "the run has ended (finished; see pyps report"), ("joined", "no store: ")]
)
def test_a_run_whose_store_is_gone(shm: Path, tmp_path: Path, last: Any, words: str) -> None:
    """The whole message, however narrow the terminal is."""
    write_json(tmp_path / "run.json", make_setup({0: 5}))
    with EventLog(tmp_path / "run.jsonl") as log:
        log.write(last, detail="finished")
    found = top(tmp_path)
    assert found["name"] == str(tmp_path)
    assert found["error"].startswith(words)
    shown = runner.invoke(app, [str(tmp_path), "--once"], env={"COLUMNS": "40"}).stdout
    whole = f"{tmp_path}: {found['error']}"
    assert "".join(shown.split()) == "".join(whole.split())  # a line may end at a space or within a word


@pytest.mark.timed
def test_a_round_that_waits_for_one_rank(pair: tuple[Store, Store]) -> None:
    slow, fast = pair
    with background(lambda: push(fast, LIKE_SECONDS)):
        push(slow, LIKE_SECONDS)
    claim, staging = slow.start(), slow.stage()
    sequence = slow.status().sequence
    with background(lambda: push(fast, LIKE_SECONDS)):
        while fast.name and not any(m.waits_for is WaitKind.ROUND for m in slow.members()):
            time.sleep(0.005)
        time.sleep(0.6)
        store = top("pair")
        text = runner.invoke(app, ["--once"], env={"COLUMNS": "200"}).stdout
        slow.push(staging, claim.count, HYPER)
    run = store["run"]
    assert (store["policy"], run["versions"], run["samples"]) == ("bsp", 1, 13)
    first, second = run["ranks"]
    assert (first["doing"], first["straggler"], first["batch"], first["steps"]) == ("computing", True, 7, 1)
    assert first["reason"].startswith("has been computing for ")
    assert (second["doing"], second["reason"], second["straggler"]) == (
        "waiting",
        "waits for the round",
        False,
    )
    assert second["idle_share"] > 0.5 > first["idle_share"]
    assert second["bytes_pushed"] == 2 * 4 * 1000 < 4 * fast.layout.flat_elements, "no padding"
    assert "others wait for it" in text
    assert "waits for the round" in text
    assert f" {os.getpid()} " in text
    assert "dynamic straggler by time" in text
    assert (first["late_by_time"], first["late_by_version"], second["late_by_time"]) == ("dynamic", "", "")
    assert slow.status().sequence > sequence  # by the pushes alone: looking changes nothing
    assert len(slow.members()) == 2


def test_a_static_straggler_shows_by_versions(shm: Path) -> None:
    with (
        Store.create("unlike", {"w": np.zeros(10)}, batches=[3, 3], policy=ASP()) as slow,
        Store.open("unlike") as fast,
    ):
        slow.join(0)
        fast.join(1)
        for _ in range(2):
            claim, staging, _ = slow.start(), slow.stage(), slow.pull()
            for _ in range(9):
                fast.pull()
                push(fast)
            slow.push(staging, claim.count, HYPER)
        ranks = top("unlike")["run"]["ranks"]
    assert [r["staleness"] for r in ranks] == [9.0, 0.0]
    assert [r["late_by_version"] for r in ranks] == ["static", ""]


def test_what_earlier_processes_trained_is_no_rate(shm: Path) -> None:
    from pyps.report.top import StoreTop

    def rate() -> float | None:
        return watching.look().run.samples_per_second

    with (
        closing(StoreTop("again")) as watching,
        Store.create("again", {"w": np.zeros(10)}, batches=[1000], policy=ASP()) as keeper,
    ):
        with Store.open("again") as first:
            first.join(0)
            push(first)
            assert rate() is None
            first.leave()
        with Store.open("again") as second:
            second.join(0)
            assert rate() is None
            push(second)
            assert (rate() or 0.0) > 0.0
        assert keeper.ranks()[0].samples == 2000


def test_looking_is_no_event(pair: tuple[Store, Store]) -> None:
    before = pair[0].status()
    assert runner.invoke(app, ["--once"]).exit_code == 0
    assert pair[0].status() == before


def test_a_policy_that_only_its_creator_knows_is_custom() -> None:
    assert [policy_name(number) for number in (1, 12)] == ["asp", "custom"]


def test_over_a_link_and_with_every_slot_taken(shm: Path) -> None:
    with Store.create("full", {"w": np.zeros(10)}, batches=[4], max_participants=2) as store:
        store.join(0)
        with Server("full") as server:
            found = top(server.address)
            assert found["name"] == server.address
            assert [r["batch"] for r in found["run"]["ranks"]] == [4]


def test_a_runs_folder_adds_names_loss_and_data(shm: Path, tmp_path: Path) -> None:
    with Store.create("trains", {"w": np.zeros(10)}, batches=[7, 3]) as store:
        store.join(0)
        folder = make_run(tmp_path / "run", list(steps(30)), setup_of(store="trains"))
        found = top(folder)
        assert found["run_dir"] == str(folder)
        ranks = found["run"]["ranks"]
        assert [r["name"] for r in ranks] == ["fast", "slow & <old>"]
        assert ranks[0]["phases"]["data"] == pytest.approx(0.006)
        assert found["run"]["loss"] == pytest.approx(5.0 / 30)
        assert ranks[1]["doing"] == "absent"
        assert "data ms" in runner.invoke(app, [str(folder), "--once"], env={"COLUMNS": "140"}).stdout


def test_a_stopped_and_a_killed_worker(shm: Path) -> None:
    joins = """
import sys, time
from pyps.store import Store
from pyps.store.policies import ASP
store = Store.open("pair"); store.join(1); print("joined", flush=True); time.sleep(600)
"""
    with Store.create("pair", {"w": np.zeros(10)}, batches=[7, 3]) as store:
        store.join(0)
        worker = subprocess.Popen([sys.executable, "-c", joins], stdout=subprocess.PIPE)
        try:
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"joined\n"
            os.kill(worker.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, worker.pid, os.WSTOPPED)
            rank = top("pair")["run"]["ranks"][1]
            assert (rank["doing"], rank["straggler"], rank["pid"]) == ("stopped", True, worker.pid)
        finally:
            worker.kill()
            worker.wait()
            if worker.stdout is not None:
                worker.stdout.close()
        store.reap()
        assert top("pair")["run"]["ranks"][1]["doing"] == "dead"


def test_damaged_segments_are_said_to_be(shm: Path) -> None:
    (shm / "pyps-bad").write_bytes(b"not a segment" * 100)
    with Store.create("good", {"w": np.zeros(10)}, batches=[4]):
        assert [s["name"] for s in json.loads(runner.invoke(app, ["--json"]).stdout)["stores"]] == ["good"]
        assert "bad" in top("bad")["error"]
        assert "bad" in runner.invoke(app, ["bad", "--once"]).stdout
    (shm / "pyps-bad").unlink()


def test_nothing_to_show_and_wrong_targets(shm: Path, tmp_path: Path) -> None:
    assert runner.invoke(app, ["--once"]).stdout == "no stores in use\n"
    assert json.loads(runner.invoke(app, ["--json"]).stdout) == {"stores": []}
    for target, words in (("nothing", "none on this machine"), (str(tmp_path), "the folder of a run")):
        with pytest.raises(InputError, match=words):
            runner.invoke(app, [target], catch_exceptions=False)
    with pytest.raises(InputError, match="--interval"):
        runner.invoke(app, ["--interval", "0"], catch_exceptions=False)


def test_a_store_that_ends_is_said_to_be_gone(shm: Path) -> None:
    from pyps.report.top import StoreTop

    store = Store.create("short", {"w": np.zeros(10)}, batches=[4])
    watching = StoreTop("short")
    assert watching.look().error == ""
    store.close()
    watching.close()
    assert "short" in watching.look().error
