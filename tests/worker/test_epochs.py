"""A validation for each epoch: once, by one rank, also after resumes, restarts and deaths."""

from __future__ import annotations

import fcntl
import json
import resource
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from run_scripts import PYPS, options_for, pyps_run, until
from run_tools import make_plan

from pyps.errors import InputError
from pyps.formats import write_json
from pyps.native.status import MemberState
from pyps.native.values import Role
from pyps.worker.data import epochs as module
from pyps.worker.data.epochs import EPOCHS, Epochs, drop_undone_epochs

LENGTH, B = 40, 8


@dataclass
class Member:
    rank: int
    state: MemberState = MemberState.ACTIVE
    role: Role = Role.WORKER


@dataclass
class FakeStore:
    """Give what is read of a store."""

    present: list[Member] = field(default_factory=list)
    version: int = 0

    @property
    def layout(self) -> Any:
        return type("Layout", (), {"samples": 3 * LENGTH})

    def members(self) -> list[Member]:
        return self.present


class Rank:
    """One process of a rank."""

    def __init__(self, store: FakeStore, rank: int, run_dir: Path | None) -> None:
        self.seen: list[int] = []
        store.present.append(Member(rank))
        self.epochs = Epochs(self.seen.append, lambda: store.version, cast(Any, store), rank, run_dir)

    def at(self, samples: int) -> list[int]:
        """A step at this position: the epochs validated so far."""
        self.epochs.follow(samples, LENGTH, B)
        return self.seen


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)


def test_the_lowest_rank_does_it_once(tmp_path: Path) -> None:
    store = FakeStore()
    ranks = [Rank(store, rank, tmp_path) for rank in (0, 1)]
    for samples in range(0, 3 * LENGTH, B):
        for rank in reversed(ranks):
            rank.at(samples)
    for rank in ranks:
        rank.epochs.end(LENGTH)
    assert [rank.seen for rank in ranks] == [[1, 2, 3], []]
    assert [json.loads(line)["epoch"] for line in (tmp_path / EPOCHS).read_text().splitlines()] == [1, 2, 3]


def test_the_next_rank_takes_over_from_a_dead_one(tmp_path: Path) -> None:
    """Also one that dies while it validates, with its lock; never two at once."""
    store = FakeStore()
    first, second = (Rank(store, rank, tmp_path) for rank in (0, 1))
    first.at(0), second.at(0)
    assert second.at(LENGTH) == []  # rank 0 lives, and will do it
    with (tmp_path / EPOCHS).open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        store.present[0].state = MemberState.DEAD
        assert second.at(LENGTH + B) == []
    assert second.at(LENGTH + 2 * B) == [1]
    restarted = Rank(store, 0, tmp_path)
    assert restarted.at(LENGTH + 3 * B) == []
    assert restarted.at(2 * LENGTH) == [2]
    assert second.at(2 * LENGTH + B) == [1]


def test_a_line_that_a_kill_has_cut_is_not_continued(tmp_path: Path) -> None:
    (tmp_path / EPOCHS).write_text('{"epoch":1,"rank":1,"version":1}\n{"epoch":')
    rank = Rank(FakeStore(), 0, tmp_path)
    for samples in (0, 2 * LENGTH, 3 * LENGTH):
        rank.at(samples)
    assert rank.seen == [2, 3]


def test_a_resumed_run_waits_for_the_end_of_its_epoch(tmp_path: Path) -> None:
    resumed = Rank(FakeStore(), 0, tmp_path)
    assert resumed.at(LENGTH + 3 * B) == []
    assert resumed.at(2 * LENGTH) == [2]
    at_the_end = Rank(FakeStore(), 0, tmp_path / "none")
    (tmp_path / "none").mkdir()
    assert at_the_end.at(LENGTH) == [1]  # killed before it was validated
    again = Rank(FakeStore(), 0, tmp_path)
    assert again.at(2 * LENGTH) == []
    drop_undone_epochs(tmp_path, -1)  # the run goes back further: its end comes again
    assert Rank(FakeStore(), 0, tmp_path).at(2 * LENGTH) == [2]


def test_undone_epochs_are_dropped_without_room_on_the_disk(tmp_path: Path) -> None:
    lines = [f'{{"epoch":{k},"rank":0,"version":{10 * k}}}\n' for k in (1, 2, 3)]
    (tmp_path / EPOCHS).write_text("".join(lines))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        drop_undone_epochs(tmp_path, 25)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / EPOCHS).read_text() == "".join(lines[:2])


def test_without_a_folder_and_without_a_length() -> None:
    alone = Rank(FakeStore(), 0, None)
    assert alone.at(0) == []
    assert alone.at(LENGTH) == [1]
    with pytest.raises(InputError, match="on_epoch"):
        alone.epochs.follow(0, 0, B)


TRAIN = """
import sys, time
import torch
import pyps

torch.set_num_threads(1)
draws = torch.Generator().manual_seed(0)
inputs, targets = torch.randn(40, 4, generator=draws), torch.randn(40, 1, generator=draws)
torch.manual_seed(1)
model = torch.nn.Linear(4, 1)
with pyps.join() as worker:
    worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.05))

    def validate(epoch):
        loss = torch.nn.functional.mse_loss(model(inputs), targets).item()
        with open(worker.settings.run_dir / "seen", "a") as file:
            print(epoch, worker.position.samples, f"{loss:.6f}", file=file)

    for x, y in worker.batches((inputs, targets), on_epoch=validate):
        torch.nn.functional.mse_loss(model(x), y).backward()
        time.sleep(float(sys.argv[1]))
        worker.step()
"""


@pytest.mark.thorough
def test_a_run_that_is_killed_and_resumed_validates_each_epoch_once(shm: Path, tmp_path: Path) -> None:
    write_json(tmp_path / "plan.json", make_plan())
    (tmp_path / "train.py").write_text(TRAIN)
    whole, out = tmp_path / "whole", tmp_path / "out"
    options = [*options_for(tmp_path / "plan.json", 4 * LENGTH, tmp_path), "--checkpoint-every", "1"]
    whole_options = [*options[:-3], whole, *options[-2:]]
    done = pyps_run(*whole_options, tmp_path / "train.py", "0")
    assert done.returncode == 0, done.stderr
    command = [PYPS, "run", *map(str, options), str(tmp_path / "train.py"), "0.1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: (out / "seen").exists() and len((out / "seen").read_text().splitlines()) == 2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = pyps_run("--resume", out, tmp_path / "train.py", "0")
    assert done.returncode == 0, done.stderr
    seen, expected = ((folder / "seen").read_text().splitlines() for folder in (out, whole))
    assert [line.split()[0] for line in expected] == ["1", "2", "3", "4"]
    assert list(dict.fromkeys(seen)) == expected  # the same losses; none in the middle of an epoch
