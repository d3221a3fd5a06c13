"""Test what memory leaves: read from trees of control groups, true and made up; H-PS's tasks follow it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from device import needs_cuda
from worker_tools import X, Y, backward, loss_of, make_model, run_threads

from pyps.formats import Memory
from pyps.formats.records import read_run
from pyps.profiler.host_memory import (
    LIBC,
    cgroup_peers,
    cpu_free_bytes,
    cpu_held_bytes,
    disable_malloc_trim,
    groups,
)
from pyps.store.policies import HPS
from pyps.worker.run.memory import SHARE, MemoryBudget, budget_bytes
from pyps.worker.run.settings import Settings
from pyps.worker.step.loop import Worker

MIB = 1 << 20
MODEL = Memory(fixed_bytes=100, bytes_per_sample=10.0, budget_bytes=1000)


STEPS = """
import resource
from pyps.profiler.host_memory import disable_malloc_trim, trim_malloc

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    before = faults()
    for bytes_ in (40 << 20, 12 << 20):
        b"x" * bytes_
    return faults() - before

first = [step() for _ in range(5)][-1]
kept = disable_malloc_trim()
then = [step() for _ in range(5)][-1]
trim_malloc()
print(first, kept, then, step())
"""


def steps(**environment: str) -> list[str]:
    """Page faults of a step that allocates and frees: before, after keeping what is freed; giving it back."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", STEPS]
    done = subprocess.run(command, env=plain | environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.skipif(not hasattr(LIBC, "mallopt"), reason="the C library is not glibc")
def test_freed_memory_is_kept_for_the_next_step_until_it_is_given_back() -> None:
    first, kept, then, after = steps()
    assert kept == "True"
    assert int(first) > 20, "each step takes its pages from the kernel: 13,312, or 26 huge ones"
    assert int(then) < int(first) / 4
    assert int(after) > int(first) / 2


def test_an_allocator_that_the_user_tuned_is_left_alone() -> None:
    for tuned in ({"MALLOC_ARENA_MAX": "1"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=100000"}):
        assert not disable_malloc_trim(tuned)


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def fake(tmp_path: Path, cgroup: str, mount: str) -> Path:
    """A /proc whose process is in `cgroup` and sees the mount; 1 GiB available."""
    proc = tmp_path / "proc"
    write(proc / "meminfo", "MemTotal: 4194304 kB\nMemAvailable:    1048576 kB")
    write(proc / "self" / "cgroup", cgroup)
    write(proc / "self" / "statm", "100 25 3")
    write(proc / "self" / "mountinfo", f"20 1 0:3 / /proc rw - proc proc rw\n{mount}")
    return proc


@pytest.fixture
def version_2(tmp_path: Path) -> tuple[Path, Path]:
    mount = tmp_path / "cg"
    proc = fake(tmp_path, "0::/a/b", f"30 20 0:25 / {mount} rw,nosuid shared:4 - cgroup2 cgroup2 rw")
    for folder, limit, used in ((mount / "a", "max", 700 * MIB), (mount / "a/b", 500 * MIB, 300 * MIB)):
        write(folder / "memory.max", limit)
        write(folder / "memory.current", used)
        write(folder / "memory.stat", f"anon 5\ninactive_file {50 * MIB}\nactive_file 7")
    return proc, mount


def test_version_2(version_2: tuple[Path, Path]) -> None:
    proc, mount = version_2
    assert [folder for folder, _ in groups(proc)] == [mount / "a" / "b", mount / "a", mount]
    assert cpu_free_bytes(proc) == 250 * MIB, "limit - (usage - what no process uses)"
    write(mount / "a" / "memory.max", 720 * MIB)
    assert cpu_free_bytes(proc) == 70 * MIB, "a group around it has less"
    write(mount / "a" / "b" / "memory.high", 260 * MIB)
    assert cpu_free_bytes(proc) == 10 * MIB, "from there on it is slowed down"
    write(mount / "a" / "b" / "memory.max", 200 * MIB)
    assert cpu_free_bytes(proc) == 0
    assert cpu_held_bytes(proc) == 25 * os.sysconf("SC_PAGE_SIZE")


def test_version_1_with_a_limit_and_without(tmp_path: Path) -> None:
    mount = tmp_path / "with a space"
    line = str(mount).replace(" ", "\\040")
    proc = fake(
        tmp_path, "5:cpu,cpuacct:/x\n4:memory:/job\n0::/", f"9 8 0:7 / {line} rw - cgroup cgroup rw,memory"
    )
    write(mount / "job" / "memory.limit_in_bytes", 0x7FFFFFFFFFFFF000)
    write(mount / "job" / "memory.usage_in_bytes", 10 * MIB)
    assert cpu_free_bytes(proc) == 1 << 30, "what the machine has"
    write(mount / "job" / "memory.limit_in_bytes", 64 * MIB)
    write(mount / "job" / "memory.stat", f"inactive_file 1\ntotal_inactive_file {2 * MIB}")
    assert cpu_free_bytes(proc) == 56 * MIB


@pytest.mark.parametrize("path", ["/docker/1234/job", "/elsewhere", "/../other"])
def test_a_container_sees_its_own_group_at_the_mount(tmp_path: Path, path: str) -> None:
    mount = tmp_path / "cg"
    proc = fake(tmp_path, f"0::{path}", f"30 20 0:25 /docker/1234 {mount} rw - cgroup2 cgroup2 rw")
    write(mount / "memory.max", 100 * MIB)
    write(mount / "memory.current", 40 * MIB)
    assert cpu_free_bytes(proc) == 60 * MIB
    write(mount / "job" / "memory.max", 50 * MIB)
    write(mount / "job" / "memory.current", 0)
    assert cpu_free_bytes(proc) == (50 if path.endswith("/job") else 60) * MIB


def test_neighbours_in_one_group_share(version_2: tuple[Path, Path]) -> None:
    proc, _ = version_2
    write(proc / "77" / "cgroup", "0::/a/b")
    write(proc / "78" / "cgroup", "0::/a")
    assert cgroup_peers([os.getpid(), 77, 78, 79], proc) == 2
    held = cpu_held_bytes(proc)
    assert budget_bytes(torch.device("cpu"), 2, proc) == held + int(SHARE * 250 * MIB) // 2


def test_this_process_has_something_left() -> None:
    assert 0 < cpu_held_bytes() < 1 << 45
    assert 0 <= cpu_free_bytes() < 1 << 45


@needs_cuda
def test_a_gpu_says_itself_what_is_free() -> None:
    device = torch.device("cuda")
    before = budget_bytes(device)
    block = torch.empty(256 * MIB, dtype=torch.uint8, device=device)
    assert abs(budget_bytes(device) - before) < 64 * MIB, "what this process holds is its own"
    assert torch.cuda.memory_reserved() >= block.nbytes


def test_an_offer_falls_at_once_and_rises_when_it_is_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    now, store, cpu = SimpleNamespace(bytes=1000), mock.Mock(), torch.device("cpu")
    monkeypatch.setattr("pyps.worker.run.memory.budget_bytes", lambda *_: int(now.bytes))
    room = MemoryBudget(store, MODEL, 0, cpu)
    found = []
    for now.bytes in (1000, 990, 1010, 1030, 1100, 50, 0, 400):
        found.append(room.look())
    assert found == [90, 89, 89, 89, 100, 1, 1, 30]
    now.bytes = 1000
    assert MemoryBudget(store, MODEL, 40, cpu).look() == 40
    assert MemoryBudget(store, None, 7, cpu).look() == 7
    assert MemoryBudget(store, None, 0, cpu).look() == 0


def test_tasks_shrink_with_memory_and_the_global_batch_stays(
    shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1's memory falls to 4 samples in the middle of the run, then rises again."""
    split, rounds = [10, 10, 10], 12
    settings = [
        replace(
            Settings("room", k, HPS(), rounds * 30, 5, batches=tuple(split), run_dir=tmp_path),
            memory=MODEL if k == 1 else None,
        )
        for k in range(3)
    ]
    workers = [Worker(s) for s in settings]
    counts: list[int] = []

    def budget(device: torch.device, neighbours: int) -> int:
        return 145 if 4 <= workers[1].steps < 9 else 400  # 4 samples, or 30

    monkeypatch.setattr("pyps.worker.run.memory.budget_bytes", budget)  # only rank 1 has a memory model

    def body(rank: int) -> None:
        model = make_model()
        workers[rank].attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for x, y in workers[rank].batches((X, Y)):
            if rank == 1:
                counts.append(len(x))
                assert len(x) <= (4 if 4 <= workers[1].steps < 9 else 30)
            backward(loss_of(model, x, y))
            workers[rank].step()

    run_threads(3, body)
    for worker in workers:
        worker.close()
    by_round: dict[int, list[int]] = {}
    for record in read_run(tmp_path):
        by_round.setdefault(record.round, [0, 0, 0])[record.rank] = record.samples
    assert [sum(samples) for samples in by_round.values()] == [30] * rounds
    small = [k for k, samples in by_round.items() if samples[1] <= 4]
    assert len(small) >= 4, "from the round after the fall on"


MEMORY = Path("/sys/fs/cgroup/memory")
MAPPED = 512  # MiB, at most, of torch's libraries: a process holds them, and another group may pay for them
WITHIN = """
import os, sys
from dataclasses import replace
from pathlib import Path
folder, run_dir = Path(sys.argv[1]), Path(sys.argv[2])
(folder / "cgroup.procs").write_text("0")
import torch
from pyps.formats import Memory
from pyps.profiler.host_memory import groups
from pyps.store.policies import HPS
from pyps.worker.run.settings import Settings
from pyps.worker.step.loop import Worker
torch.set_num_threads(1)
assert next(groups())[0].name == folder.name, list(groups())
memory = Memory(fixed_bytes=0, bytes_per_sample=1 << 20, budget_bytes=1)
settings = Settings("room", 1, HPS(), seed=5, batches=(3000, 3000), run_dir=run_dir, memory=memory)
x, model = torch.zeros(10, 1), torch.nn.Linear(1, 1)
with Worker(settings) as worker:
    worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for (batch,) in worker.batches((x,)):
        most = worker._require().budget.most_
        assert len(batch) <= most
        model(batch).sum().backward()
        worker.step(most)
        if (run_dir / "stop").exists():
            break
"""


@pytest.fixture
def group() -> Iterator[tuple[Path, str]]:
    """A new control group with a limit to write to: its folder and the limit's file."""
    for base, limit in ((MEMORY, "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max")):
        folder = base / f"pyps-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if (folder / limit).exists():
                yield folder, limit
                return
        finally:
            folder.rmdir()
    pytest.skip("no control group may be made here (needs root and a writable memory hierarchy)")


@pytest.mark.usefixtures("quick_start")
@pytest.mark.slow
def test_tasks_in_a_real_group_whose_limit_shrinks(
    shm: Path, tmp_path: Path, group: tuple[Path, str]
) -> None:
    """Rank 1, the faster one, takes what fits into its control group: 2 GiB, and 1 GiB from round 8 on."""
    folder, limit = group
    (folder / limit).write_text(str(2048 * MIB))
    settings = Settings("room", 0, HPS(), seed=5, batches=(3000, 3000), run_dir=tmp_path)
    model = torch.nn.Linear(1, 1)
    child = subprocess.Popen([sys.executable, "-c", WITHIN, str(folder), str(tmp_path)])
    deadline = threading.Timer(60.0, child.kill)
    deadline.start()
    try:
        with Worker(settings) as worker:
            worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
            for (batch,) in worker.batches((torch.zeros(10, 1),)):
                backward(model(batch).sum())
                time.sleep(0.05)
                if worker.steps == 8:
                    (folder / limit).write_text(str(1024 * MIB))
                worker.step()
                if worker.steps == 16:
                    (tmp_path / "stop").touch()
                    break
        assert child.wait(30) == 0
    finally:
        deadline.cancel()
        child.kill()
        child.wait(10)
    by_round: dict[int, list[int]] = {}
    for record in read_run(tmp_path):
        by_round.setdefault(record.round, [0, 0])[record.rank] = record.samples
    assert {sum(by_round[k]) for k in range(16)} == {6000}, "the global batch stays"
    roomy, tight = by_round[7][1], by_round[14][1]
    assert 1000 < roomy <= 2048 + MAPPED
    assert abs(roomy - tight - SHARE * 1024) < 96, "a MiB a sample"
