"""Every policy in real processes: the run ends and trains every sample once, whichever worker dies or stops;
and the run's decisions, made again in its order, come out the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from run_scripts import script
from run_tools import make_plan
from sampled import sampled

from pyps.formats import write_json
from pyps.formats.records import read_run
from pyps.run import Report, RunOptions, run
from pyps.simulate import replay
from pyps.store.policies import Policy, policy_named

pytestmark = pytest.mark.slow

PYPS = str(Path(sys.executable).parent / "pyps")
BATCHES = (5, 3, 4)
SAMPLES = 240
ROUND_TIMEOUT = 0.5

# The loop without torch, which starts ten times as fast.
LOOP = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
import numpy as np
from pyps.errors import Ended, Fenced, PushRejected, SegmentNotFound, NotReady, TimedOut
from pyps.store.policies import policy_named
from pyps.store import Store
from pyps.native.values import Hyper

settings = json.loads(os.environ["PYPS_RUN"])
rank, name, policy = settings["rank"], settings["store"], settings["policy"]
policy = policy_named(policy["name"], policy["round_timeout"])
note = Path(settings["run_dir"]) / "befallen"
if rank == 0:
    store = Store.create(
        name, {{"w": np.zeros(2000)}}, batches={batches}, policy=policy, samples=240, chunk_params=1024,
        keep=True,
    )
else:
    while True:
        try:
            store = Store.open(name)
            break
        except (SegmentNotFound, NotReady):
            time.sleep(0.01)
store.journal(settings["journal"])
store.join(rank)
step = 0
flat = np.zeros(store.layout.flat_elements, np.float32)
while True:
    try:
        claim = store.start()
        staging = store.stage()
        store.pull(flat)
        time.sleep(0.001 * claim.count)
        {within}
        staging.flat[:] = 1.0
        store.push(staging, claim.count, Hyper(lr=1e-3))
        step += 1
        if policy.needs.uses_turns:
            store.pull(flat)
    except Ended:
        break
    except TimedOut:
        if store.status().all_joined:
            raise
    except PushRejected:
        pass
    except Fenced:
        store.rejoin()
store.close()
"""
DIES = """
        if rank == 1 and step == 3 and not note.exists():
            note.touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""
STOPS = """
        if rank == 1 and step == 3 and not note.exists():
            note.touch()
            subprocess.Popen(["sh", "-c", f"sleep 1.2; kill -CONT {os.getpid()}"], start_new_session=True)
            os.kill(os.getpid(), signal.SIGSTOP)
"""
LEAVES = """
        if rank == 1 and step == 3 and not note.exists():
            note.touch()
            store.leave()
            time.sleep(0.1)
            store.join(rank)
            ahead = None
            continue
"""
# The same with two claims in hand; what is pulled is for the step after the one that is pushed.
AHEAD_LOOP = (
    LOOP.replace("step = 0\n", "step, ahead = 0, None\n")
    .replace("        claim = store.start()\n", "        claim, ahead = ahead or store.start(), None\n")
    .replace(
        "        staging.flat[:] = 1.0\n",
        "        ahead = store.start_ahead()\n        staging.flat[:] = 1.0\n",
    )
    .replace("        store.rejoin()\n", "        store.rejoin()\n        ahead = None\n")
)
assert AHEAD_LOOP.count("ahead") == 6


def loop(tmp_path: Path, policy: str, within: str = "pass", template: str = LOOP) -> Report:
    write_json(tmp_path / "plan.json", make_plan(BATCHES))
    text = template.format(batches=list(BATCHES), within=within.strip())
    path = script(tmp_path, text=text)
    rules = policy_named(policy, ROUND_TIMEOUT)
    options = RunOptions(samples=SAMPLES, policy=rules, run_dir=tmp_path / "run", journal=True)
    report = run(tmp_path / "plan.json", path, options)
    again = replay(tmp_path / "run" / "journal")
    assert (again.differences, again.missing_events, again.first) == (0, 0, "")
    assert again.decisions >= again.events >= SAMPLES // max(BATCHES)
    return report


# The others too, in processes that are forked: tests/matrix.
@pytest.mark.parametrize(
    "name", sampled(Policy.known, *map(list(Policy.known).index, ("bsp", "saps", "quorum")))
)
def test_a_run_of_every_policy_ends(shm: Path, tmp_path: Path, name: str) -> None:
    report = loop(tmp_path, name)
    assert report.outcome == "finished"
    assert report.samples.trained == SAMPLES


@pytest.mark.parametrize(
    "name", sampled(["backup", "softsync", "ssp:bound=1", "saps", "r2sp", "hps", "quorum"], 0, 4)
)
@pytest.mark.parametrize("befalls", [DIES, STOPS], ids=["dies", "stops"])
def test_no_worker_waits_for_ever(shm: Path, tmp_path: Path, name: str, befalls: str) -> None:
    report = loop(tmp_path, name, befalls)
    assert report.outcome == "finished"
    assert report.samples.trained == SAMPLES
    assert (tmp_path / "run" / "befallen").exists()


@pytest.mark.parametrize("name", sampled(["bsp", "dssp", "softsync"], 1))
def test_a_leaving_worker_comes_back(shm: Path, tmp_path: Path, name: str) -> None:
    report = loop(tmp_path, name, LEAVES)
    assert report.outcome == "finished"
    assert report.samples.trained == SAMPLES
    assert (tmp_path / "run" / "befallen").exists()


@pytest.mark.parametrize(
    ("name", "befalls"),
    sampled(
        [
            ("asp", DIES),
            ("r2sp", DIES),
            ("hps", DIES),
            ("ssp:bound=1", LEAVES),
            ("saps", LEAVES),
            ("asp", STOPS),
        ],
        1,
        4,
        5,
    ),
    ids=["asp-dies", "r2sp-dies", "hps-dies", "ssp-leaves", "saps-leaves", "asp-stops"],
)
def test_with_two_claims_too(shm: Path, tmp_path: Path, name: str, befalls: str) -> None:
    report = loop(tmp_path, name, befalls, AHEAD_LOOP)
    assert report.outcome == "finished"
    assert report.samples.trained == SAMPLES
    assert (tmp_path / "run" / "befallen").exists()


@pytest.mark.parametrize("policy", sampled(["r2sp:slack=1.2", "saps:threshold=fixed,bound=1"]))
def test_pyps_run_trains_with_it(shm: Path, tmp_path: Path, policy: str) -> None:
    write_json(tmp_path / "plan.json", make_plan())
    command = [PYPS, "run", "--plan", str(tmp_path / "plan.json"), "--policy", policy, "--samples", "96"]
    command += ["--json", "--run-dir", str(tmp_path / "run"), str(script(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["policy"] == policy.partition(":")[0]
    assert report["samples"]["trained"] == 96
    taken = sorted((r for r in read_run(tmp_path / "run") if not r.rejected), key=lambda r: r.version)
    if policy.startswith("saps"):
        assert all(record.staleness <= 1 for record in taken)
    else:
        assert all(record.staleness == 1 for record in taken[2:-1])
