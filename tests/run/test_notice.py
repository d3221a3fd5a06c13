"""SIGTERM is a notice: workers finish their steps, push them and leave; nothing that was computed is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from run_scripts import PYPS, options_for, pyps_run, until
from run_tools import make_plan

from pyps.checkpoint.folder import checkpoints
from pyps.formats import write_json
from pyps.formats.events import read_events
from pyps.formats.records import StepRecord, read_run
from pyps.remote.server import Server
from pyps.report.report import read_report
from pyps.store.store import Store
from pyps.worker.run.notice import LEFT, Notice, Signals

BATCHES = (5, 3, 4)
B = sum(BATCHES)
# Each worker writes down the samples whose gradient it has computed, before it pushes them.
SCRIPT = """
import os, sys, time
import torch, pyps

torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
with pyps.join() as worker:
    worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
    noted = open(worker.settings.run_dir / f"computed-{worker.rank}-{os.getpid()}", "a", buffering=1)
    rows = [(torch.zeros(4), torch.zeros(1))] * 600
    loaders = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    data = rows if loaders else (torch.zeros(600, 4), torch.zeros(600, 1))
    for x, y in worker.batches(data, loaders):
        time.sleep(float(sys.argv[1]))
        torch.nn.functional.mse_loss(model(x), y).backward()
        print(len(x), file=noted)
        worker.step()
print("the end")
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    write_json(tmp_path / "plan.json", make_plan(BATCHES))
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "plan.json"


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [PYPS, "run", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def computed(out: Path) -> int:
    """Samples whose gradients were computed by any process."""
    return sum(int(line) for path in out.glob("computed-*") for line in path.read_text().split())


def pushed(out: Path) -> list[StepRecord]:
    return [record for record in read_run(out) if not record.rejected]


def all_train(out: Path, ranks: int = len(BATCHES)) -> bool:
    return len({r.rank for r in read_run(out)}) == ranks if (out / "run.jsonl").exists() else False


@pytest.mark.thorough  # tests/run/test_resume.py stops one as well
@pytest.mark.parametrize(
    ("options", "loaders"),
    [("--policy bsp", 0), ("--policy asp --depth 3", 0), ("--policy hps", 0), ("--policy asp", 1)],
    ids=["bsp", "asp in a pipeline", "hps", "loader processes"],
)
def test_a_run_that_is_stopped_keeps_all_that_was_computed(
    shm: Path, plan: Path, tmp_path: Path, options: str, loaders: int
) -> None:
    """And goes on from there, with every sample trained once."""
    out = tmp_path / "out"
    process = start(
        *options_for(plan, 100_000, tmp_path), *options.split(), tmp_path / "train.py", 0.05, loaders
    )
    until(lambda: all_train(out))
    process.terminate()
    _, said = process.communicate(timeout=60)
    assert process.returncode == LEFT, said
    assert "interrupted by SIGTERM: workers finish their steps, then a checkpoint is written" in said
    kinds = [event.kind for event in read_events(out / "run.jsonl")]
    assert kinds.count("left") == len(BATCHES)
    assert not {"died", "restarted", "replanned"} & set(kinds)
    trained = sum(record.samples for record in pushed(out))
    assert computed(out) == trained
    (last,) = checkpoints(out / "checkpoints")
    kept = sum(record.samples for record in pushed(out) if record.version <= int(last.name))
    alone = B if "bsp" in options else 1  # pushed for a round that the others did not begin
    assert trained - kept < alone
    assert "the end" not in "".join(path.read_text() for path in out.glob("worker-*.log"))

    done = pyps_run("--resume", out, "--samples", trained + 10 * B, tmp_path / "train.py", 0, loaders)
    assert done.returncode == 0, done.stderr
    assert read_report(out / "report.json").samples.trained == trained + 10 * B


def test_a_worker_that_is_asked_to_leave_is_not_started_again(shm: Path, plan: Path, tmp_path: Path) -> None:
    write_json(plan, make_plan(BATCHES[:2]))
    out, samples = tmp_path / "out", 80 * B
    process = start(*options_for(plan, samples, tmp_path), tmp_path / "train.py", 0.02)
    until(lambda: all_train(out, ranks=2))
    asked = next(e.pid for e in read_events(out / "run.jsonl") if e.kind == "started" and e.rank == 1)
    assert asked is not None
    os.kill(asked, signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "rank 1 (device-1) left on SIGTERM" in said
    events = read_events(out / "run.jsonl")
    assert [(e.rank, e.pid) for e in events if e.kind == "left"] == [(1, asked)]
    assert sum(e.kind == "started" for e in events) == 2
    assert not [e for e in events if e.kind in ("restarted", "died")]
    report = read_report(out / "report.json")
    assert report.samples.trained == samples == computed(out)
    assert "rank 1 is away" in report.replans[0]


@pytest.mark.thorough
def test_micro_batches_that_are_begun_are_pushed(shm: Path, tmp_path: Path) -> None:
    """The rest of a long step goes back to be assigned to others."""
    write_json(tmp_path / "plan.json", make_plan((40, 40)))
    (tmp_path / "train.py").write_text(SCRIPT)
    out = tmp_path / "out"
    options = [*options_for(tmp_path / "plan.json", 4000, tmp_path), "--micro-batch", 4]
    process = start(*options, tmp_path / "train.py", 0.05)
    until(lambda: all_train(out, ranks=2))
    process.terminate()
    _, said = process.communicate(timeout=60)
    assert process.returncode == LEFT, said
    assert computed(out) == sum(record.samples for record in pushed(out))
    assert any(0 < record.samples < 40 for record in pushed(out))


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_a_host_that_is_taken_away_leaves_at_once(shm: Path, plan: Path, tmp_path: Path) -> None:
    """Over a link: not after the client timeout. The other host trains the rest."""
    samples = 60 * B
    with Server("model") as server:
        hosts = {}
        for name, ranks in (("a", "0,1"), ("b", "2")):
            given = ["--connect", server.address, "--ranks", ranks, "--plan", plan, "--samples", samples]
            hosts[name] = start(*given, "--run-dir", tmp_path / name, tmp_path / "train.py", 0.03)
        until(lambda: all_train(tmp_path / "b", ranks=1))
        with Store.open("model") as store:
            hosts["b"].terminate()
            _, said = hosts["b"].communicate(timeout=60)
            left = time.monotonic()
            assert hosts["b"].returncode == LEFT, said
            assert "checkpoint" not in said
            until(lambda: store.ranks()[2].batch == 0)
            assert time.monotonic() - left < 5.0
        _, said = hosts["a"].communicate(timeout=100)
        assert hosts["a"].returncode == 0, said
    trained = {name: pushed(tmp_path / name) for name in hosts}
    assert sum(r.samples for one in trained.values() for r in one) == samples
    assert sum(computed(tmp_path / name) for name in hosts) == samples


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_a_scheduler_that_signals_everything_twice_loses_nothing(
    shm: Path, plan: Path, tmp_path: Path
) -> None:
    """The server too, which ends last: Slurm signals each process, and its srun passes its own signal on."""
    with Server("free", "tcp://127.0.0.1:*", insecure=True) as free:
        address = free.address.partition("/free")[0]
    keys = tmp_path / "keys"
    serve = subprocess.Popen([PYPS, "serve", "model", "--bind", address, "--keys", keys])
    until(lambda: (keys / "client.key").exists())
    store = f"{address}/model?keys={keys}/client.key"
    given = ["--connect", store, "--plan", plan, "--samples", 60 * B, "--policy", "asp"]
    hosts = [
        start(*given, "--ranks", ranks, "--run-dir", tmp_path / name, tmp_path / "train.py", 0.05)
        for name, ranks in (("a", "0,1"), ("b", "2"))
    ]
    until(lambda: all_train(tmp_path / "a", ranks=2) and all_train(tmp_path / "b", ranks=1))
    those = [psutil.Process(host.pid) for host in (serve, *hosts)]
    those += [child for host in those for child in host.children(recursive=True)]
    for _ in range(2):
        for process in those:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    said = [host.communicate(timeout=60)[1] for host in hosts]
    ends = [host.returncode for host in hosts] + [serve.wait(60)]
    # Python that has ended all but itself takes no signal: it ends by it, which a shell calls LEFT too.
    assert {128 - code if code < 0 else code for code in ends} == {LEFT}, said
    (last,) = checkpoints(tmp_path / "a" / "checkpoints")
    records = [record for name in "ab" for record in pushed(tmp_path / name)]
    assert int(last.name) == max(record.version for record in records)
    assert sum(record.samples for record in records) == sum(computed(tmp_path / name) for name in "ab")


def test_copies_of_a_notice_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    asked = Signals()
    assert asked.note(signal.SIGTERM)
    now[0] += 0.9
    assert not asked.note(signal.SIGTERM)
    assert (asked.first, asked.count) == (signal.SIGTERM, 1)
    now[0] += 0.2
    assert asked.note(signal.SIGTERM), "a second one of a person"
    by_hand = Signals()
    assert by_hand.note(signal.SIGINT)
    assert by_hand.note(signal.SIGINT)
    assert (by_hand.first, by_hand.count) == (signal.SIGINT, 2)


ASKED = """
import os, signal, sys, time
from pyps.worker.run.notice import Notice
notice = Notice()
notice.listen()
notice.busy = {busy}
os.kill(os.getpid(), signal.SIGTERM)
print("still here", notice.received, flush=True)
if {again}:
    time.sleep(1.1)
    os.kill(os.getpid(), signal.SIGTERM)
    print("here again")
{then}
print("after")
"""


@pytest.mark.parametrize(
    ("busy", "again", "then", "printed"),
    [
        (False, False, "", ""),
        (True, False, "notice.leave_if_asked()", "still here True\n"),
        (True, False, "notice.idle(print)", "still here True\n"),
        (True, True, "", "still here True\n"),
    ],
)
def test_when_a_process_leaves(busy: bool, again: bool, then: str, printed: str) -> None:
    code = ASKED.format(busy=busy, again=again, then=then)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (LEFT, printed, "")


def test_a_handler_of_the_script_stays() -> None:
    own = lambda *_: None  # noqa: E731
    before = signal.signal(signal.SIGTERM, own)
    try:
        notice = Notice()
        notice.listen()
        assert signal.getsignal(signal.SIGTERM) is own
        notice.close()
        assert signal.getsignal(signal.SIGTERM) is own
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        elsewhere = threading.Thread(target=notice.listen)
        elsewhere.start()
        elsewhere.join()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "only the main thread can"
        notice.listen()
        notice.close()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
