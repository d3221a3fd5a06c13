"""`pyps run --connect`: the ranks of one plan started on two machines, here two folders, over the link."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from run_scripts import KILLED_ONCE, PYPS, SAMPLES, B, script
from run_tools import make_plan
from safetensors.numpy import load_file

from pyps.checkpoint.folder import checkpoints
from pyps.errors import InputError, LinkLost
from pyps.formats import write_json
from pyps.formats.events import read_events
from pyps.remote import create_store
from pyps.remote.server import Server
from pyps.run import RunOptions, run
from pyps.run.spec import prepare, write_setup
from pyps.store.policies import policy_named
from pyps.worker.run.settings import Settings, agreement_of


def started(folder: Path, address: str, rank: int) -> subprocess.Popen[str]:
    """`pyps run` with one rank of the plan, in a folder of its own."""
    folder.mkdir()
    write_json(folder / "plan.json", make_plan())
    command = [
        PYPS, "run", "--connect", address, "--ranks", str(rank), "--plan", folder / "plan.json",
        "--samples", str(SAMPLES), "--seed", "7", "--run-dir", folder / "out", "--json",
        script(folder, within=KILLED_ONCE),
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.thorough
def test_a_plan_on_two_machines_with_a_worker_killed_on_one(shm: Path, tmp_path: Path) -> None:
    with Server("model", client_timeout_seconds=1.0) as server:
        launchers = [started(tmp_path / f"host-{rank}", server.address, rank) for rank in range(2)]
        outputs = [launcher.communicate(timeout=100) for launcher in launchers]
        assert [launcher.returncode for launcher in launchers] == [0, 0], [err for _, err in outputs]
    reports = [json.loads(out) for out, _ in outputs]
    assert sum(report["samples"]["trained"] for report in reports) == SAMPLES
    assert [[rank["rank"] for rank in report["ranks"]] for report in reports] == [[0], [1]]
    assert [report["restarts"] for report in reports] == [0, 1]
    saved = [load_file(tmp_path / f"host-{rank}" / "out" / "model.safetensors") for rank in range(2)]
    assert saved[0].keys() == saved[1].keys() == {"weight", "bias"}
    assert checkpoints(tmp_path / "host-0" / "out" / "checkpoints")  # rank 0's launcher writes them
    assert not (tmp_path / "host-1" / "out" / "checkpoints").exists()
    for name, values in saved[0].items():
        assert np.array_equal(values, saved[1][name])
    kinds = [event.kind for event in read_events(tmp_path / "host-1" / "out" / "run.jsonl")]
    kinds = [kind for kind in kinds if kind != "joined"]
    assert kinds == ["started", "died", "restarted", "finished", "ended"]


@pytest.mark.parametrize("ranks", [[], [2], [0, 0], [-1]])
def test_ranks_that_there_are_not_are_refused(tmp_path: Path, ranks: list[int]) -> None:
    write_json(tmp_path / "plan.json", make_plan())
    options = RunOptions(samples=B, ranks=ranks, run_dir=tmp_path / "out")
    with pytest.raises(InputError, match="ranks"):
        run(tmp_path / "plan.json", script(tmp_path), options)


def test_some_ranks_without_a_server_are_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "plan.json", make_plan())
    options = RunOptions(samples=B, ranks=[0], run_dir=tmp_path / "out")
    with pytest.raises(InputError, match=r"ranks: found 0; nothing would start 1; expected .*--connect"):
        run(tmp_path / "plan.json", script(tmp_path), options)


def test_a_run_without_a_server_is_an_error(
    shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyps.remote.client.CONNECT_SECONDS", 0.3)
    write_json(tmp_path / "plan.json", make_plan())
    options = RunOptions(samples=B, run_dir=tmp_path / "out", connect="tcp://127.0.0.1:9/model?insecure=1")
    with pytest.raises(LinkLost):
        run(tmp_path / "plan.json", script(tmp_path), options)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_ends_in_order_on_a_signal(shm: Path, number: signal.Signals) -> None:
    command = [PYPS, "serve", "model", "--json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert json.loads(server.stdout.readline())["address"].endswith("/model")
    server.send_signal(number)
    _, said = server.communicate(timeout=60)
    assert (server.returncode, said) == (128 + number, "")


@pytest.mark.parametrize("name", ["", "bad name/x", "../x"])
def test_a_name_that_no_worker_could_use_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="letters, digits"):
        Server(name)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("plan", {}),
        ("seed", {"seed": 9}),
        ("samples", {"samples": SAMPLES + B}),
        ("policy", {"policy": "asp"}),
        ("policy", {"policy": "ssp:bound=5"}),
    ],
)
def test_a_second_host_with_other_options_is_refused(
    shm: Path, tmp_path: Path, field: str, changes: dict[str, object]
) -> None:
    """It starts nothing, and says what differs: what it trained otherwise would be other samples. The folder
    that it would go on in stays as it is.
    """
    batches, policy = (5, 3), "ssp:bound=4" if "ssp" in str(changes.get("policy")) else "bsp"
    here = Settings("", 0, policy_named(policy), SAMPLES, 7, batches=batches)
    with Server("model") as server:
        tensors = {"weight": np.zeros((1, 4)), "bias": np.zeros(1)}
        agreement = agreement_of(here)
        with create_store(
            server.address, tensors, batches=batches, policy=policy, samples=SAMPLES, agreement=agreement
        ):
            given = {"samples": SAMPLES, "seed": 7, "policy": policy}
            out, more = tmp_path / "out", {"ranks": [1], "connect": server.address}
            write_json(tmp_path / "plan.json", make_plan(batches))
            write_setup(
                prepare(tmp_path / "plan.json", script(tmp_path), RunOptions(**given, run_dir=out, **more))
            )
            before = {path: path.read_bytes() for path in out.iterdir()}
            write_json(tmp_path / "plan.json", make_plan((3, 5) if field == "plan" else batches))
            options = RunOptions(**(given | changes), resume=out, **more)
            with pytest.raises(InputError, match=f"{field}: found .*give all hosts"):
                run(tmp_path / "plan.json", script(tmp_path), options)
    assert {path: path.read_bytes() for path in out.iterdir()} == before
