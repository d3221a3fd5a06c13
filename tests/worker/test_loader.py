"""Batches loaded in advance: the claimed samples and no others, the same bits however they are loaded."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from sampled import sampled
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from worker_tools import backward, run_threads

from pyps import native
from pyps.errors import InputError, InvalidArgument
from pyps.formats.records import StepRecord, read_run
from pyps.native.values import Claim
from pyps.store import Store
from pyps.store.policies import Policy
from pyps.worker.data.loader import Loader, LoaderOptions, fingerprint_of
from pyps.worker.data.samples import make_source
from pyps.worker.data.sampling import indices
from pyps.worker.step.feed import RoundForecast, Waits
from pyps.worker.step.loop import Worker, join

LENGTH, SEED = 60, 5


class Numbered(Dataset[Any]):
    """Sample i is (i, its random augmentation)."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return index, torch.rand(3) + float(np.random.rand()) + random.random()


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))


def make_loader(workers: int, collate_fn: Any = None) -> Loader:
    source = make_source(Numbered(), collate_fn, SEED, 0, 1)
    return Loader(source, LoaderOptions(workers))


def test_tensors_in_memory_keep_no_loader_busy() -> None:
    """Processes would not load them, so nothing advises these."""
    for data, busy in ((Numbered(), True), ((torch.arange(LENGTH),), False)):
        with closing(Loader(make_source(data, None, SEED, 0, 1), LoaderOptions(0))) as loader:
            loader.align([(0, 8)])
            assert (loader.take((0, 8)).seconds > 0) == busy


@pytest.mark.slow
@pytest.mark.parametrize("collate_fn", sampled([None, list]))
def test_a_batch_is_of_the_positions_it_is_taken_for(collate_fn: Any) -> None:
    """Whatever was wanted before, whatever was given back, whatever was appended."""
    luck = random.Random(0)
    at = 0
    ahead: list[tuple[int, int]] = []
    with closing(make_loader(3, collate_fn)) as loader:
        for _ in range(150):
            if luck.random() < 0.3:  # other claims than were expected
                ahead, at = [], luck.randrange(500)
            if not ahead:
                ahead, at = [(at, count := luck.randint(1, 9))], at + count
            while len(ahead) < luck.randint(1, 6):
                ahead.append((at, count := luck.randint(1, 9)))
                at += count
            loader.align(ahead)
            for _ in range(luck.randint(0, 2)):
                loader.append([(at, count := luck.randint(1, 9))])
                ahead.append((at, count))
                at += count
            first, count = ahead.pop(0)
            batch = loader.take((first, count)).data
            found = [i for i, _ in batch] if collate_fn else batch[0].tolist()
            assert found == indices(first, count, LENGTH, SEED).tolist()


@pytest.mark.slow
def test_a_batch_is_early_that_was_asked_for_in_advance_and_behind_nothing_dropped() -> None:
    with closing(make_loader(2, list)) as loader:
        loader.align([(0, 5), (5, 5)])
        assert not loader.take((0, 5)).early, "nothing was being loaded"
        loader.append([(10, 5)])
        loader.take((5, 5))
        assert loader.take((10, 5)).early
        loader.append([(15, 5), (20, 5)])
        loader.align([(15, 2), (17, 2)])  # a re-plan: both larger batches are dropped
        loader.append([(19, 2)])
        assert [loader.take((first, 2)).early for first in (15, 17, 19)] == [False] * 3
        loader.append([(21, 2)])
        assert loader.take((21, 2)).early
    with closing(make_loader(0)) as alone:
        alone.align([(0, 5)])
        assert alone.take((0, 5)).early, "all of the wait is this batch's"


def test_waits_for_groups_of_batches_are_shared_and_those_of_a_re_plan_do_not_count() -> None:
    waits = Waits(2)
    steady = [waits.cost(seconds, True) for seconds in (0.2, 0.0, 0.2, 0.0, 0.2)]
    assert steady[1:] == pytest.approx([0.1] * 4)
    assert [waits.cost(0.9, False), waits.cost(0.0, True), waits.cost(0.0, True)] == [0.0, 0.0, 0.0]
    alone = Waits(0)
    assert [alone.cost(seconds, True) for seconds in (0.3, 0.1)] == [0.3, 0.1]


def claim(first: int, count: int, number: int, batch: int | None = None) -> Claim:
    return Claim(first, count, batch or count, number, 0, 0.0, 0)


def test_a_forecast_follows_rounds_and_stops_when_it_is_wrong() -> None:
    forecast = RoundForecast(10, 65)
    assert forecast.after(2) == []
    forecast.observe(claim(4, 3, 0))
    assert forecast.after(3) == [(14, 3), (24, 3), (34, 3)]
    forecast.observe(claim(14, 3, 1))
    assert forecast.after(9)[-2:] == [(54, 3), (64, 1)], "the run ends at 65"
    forecast.observe(claim(20, 3, 2))
    assert forecast.after(1) == []
    forecast.observe(claim(26, 3, 3))
    assert forecast.after(1) == [(32, 3)], "rounds of 6 now"
    forecast.observe(claim(32, 5, 4, batch=5))
    assert forecast.after(1) == [], "the plan changed"
    forecast.observe(claim(38, 5, 5))
    assert forecast.after(1) == [(44, 5)]


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x).square().mean()
        return out


def trained(
    tmp: Path, policy: str, workers: int, *, batches: int = 10, collate_fn: Any = None, **more: Any
) -> tuple[torch.Tensor, list[int], list[StepRecord]]:
    """Train two epochs alone: the parameters, the samples in the order they came, the records."""
    model, seen = Dropped(), []
    folder = tmp / f"{policy}-{workers}-{len(list(tmp.iterdir()))}"
    with join(
        "run", 0, batches=[batches], samples=2 * LENGTH, seed=SEED, policy=policy, run_dir=folder, **more
    ) as worker:
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.05))
        for index, x in worker.batches(Numbered(), workers, collate_fn=collate_fn):
            seen += index.tolist()
            loss = model(x)
            backward(loss)
            worker.step(loss)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return flat, seen, read_run(folder)


@pytest.mark.slow
def test_the_same_bits_however_batches_are_loaded(shm: Path, tmp_path: Path) -> None:
    expected, order, _ = trained(tmp_path, "bsp", 0)
    assert order == indices(0, 2 * LENGTH, LENGTH, SEED).tolist()
    for policy, workers in (("bsp", 1), ("bsp", 3), ("asp", 2), ("hps", 2)):
        torch.manual_seed(workers)
        found, seen, records = trained(tmp_path, policy, workers)
        assert seen == order
        assert torch.equal(found, expected), (policy, workers)
        assert all(r.loader_workers == workers and r.loader_seconds > 0 for r in records)


@pytest.mark.slow
def test_micro_batches_are_loaded_one_by_one(shm: Path, tmp_path: Path) -> None:
    expected, order, _ = trained(tmp_path, "bsp", 0, micro_batch=4)
    for policy in ("bsp", "ssp:bound=1"):
        found, seen, records = trained(tmp_path, policy, 2, micro_batch=4)
        assert seen == order
        assert torch.equal(found, expected)
        assert [kind for kind, _, _ in records[3].spans].count("data") == 3


WAYS = [
    (name, depth)
    for name in ("bsp", "backup", "saps", "r2sp", "hps", "softsync")
    for depth in (1, 2)
    if depth == 1 or Policy.known[name]().needs.allows_pipeline
]


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "depth"), sampled(WAYS, 0, -1))
def test_every_sample_is_trained_once(shm: Path, tmp_path: Path, policy: str, depth: int) -> None:
    split, total, taken = [6, 4, 5], 6 * LENGTH, {}
    workers = [
        join(
            "run",
            r,
            batches=split,
            samples=total,
            seed=SEED,
            policy=policy,
            run_dir=tmp_path,
            depth=depth,
        )
        for r in range(3)
    ]
    models = [Dropped() for _ in split]

    def body(rank: int) -> None:
        worker = workers[rank]
        worker.attach(models[rank], torch.optim.SGD(models[rank].parameters(), lr=0.02))
        for index, x in worker.batches(Numbered(), 2):
            claim = worker.claim
            assert claim is not None
            taken[rank, claim.first] = index.tolist()
            backward(models[rank](x))
            time.sleep(0.001 * (1 + rank))
            worker.step()

    run_threads(3, body)
    for worker in workers:
        worker.close()
    records = [r for r in read_run(tmp_path) if not r.rejected]
    positions = sorted(p for r in records for p in range(r.first, r.first + r.samples))
    assert positions == list(range(total))
    for r in records:
        expected = indices(r.first, r.samples, LENGTH, SEED).tolist()
        assert taken[r.rank, r.first][: r.samples] == expected


@pytest.mark.slow
def test_a_new_plan_changes_what_is_loaded(shm: Path) -> None:
    model, sizes = Dropped(), []
    with join("run", 0, batches=[8], samples=200, seed=SEED) as worker:
        worker.attach(model)
        for index, x in worker.batches(Numbered(), 2):
            assert worker.claim is not None
            assert index.tolist() == indices(worker.claim.first, len(index), LENGTH, SEED).tolist()
            sizes.append(len(index))
            backward(model(x))
            worker.step()
            if len(sizes) in (5, 12):
                worker.store.replan([len(sizes)])
    assert sizes == [8] * 6 + [5] * 7 + [12] * 9 + [9]


@pytest.mark.slow
def test_a_stream_is_drawn_from_by_every_loader_process(shm: Path) -> None:
    model, seen = nn.Linear(1, 1), []
    with join("run", 0, batches=[10], samples=LENGTH, seed=SEED, policy="asp") as worker:
        worker.attach(model)
        for batch in worker.batches(Stream(), 2):
            assert len(batch) == 10
            seen += batch.tolist()
            backward(model(batch[:, None].float()).mean())
            worker.step()
    assert sorted(seen) == list(range(LENGTH))


def test_a_stream_that_begins_anew_is_said(shm: Path) -> None:
    """In a worker that goes on: its first samples are trained again."""

    def joined(rank: int, model: nn.Module) -> Worker:
        worker = join("run", rank, batches=[4, 4], samples=80, seed=SEED, policy="asp")
        worker.attach(model)
        return worker

    def train() -> None:
        model = nn.Linear(1, 1)
        with joined(1, model) as worker:
            for batch in worker.batches(Stream()):
                backward(model(batch[:, None].float()).mean())
                worker.step()
                if worker.steps == 3:
                    return

    with joined(0, nn.Linear(1, 1)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train()
        with pytest.warns(UserWarning, match="rank 1 has trained 12 samples, and its stream begins anew"):
            train()


class Broken(Numbered):
    def __getitem__(self, index: int) -> Any:
        raise ValueError(f"sample {index} is broken")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_data_set_reaches_the_script(shm: Path, workers: int) -> None:
    with join("run", 0, batches=[4], samples=40) as worker:
        worker.attach(Dropped())
        with pytest.raises(ValueError, match="is broken"):
            next(worker.batches(Broken(), workers))
    assert not [child for child in psutil.Process().children() if _is_loader(child)]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"num_workers": -1}, "num_workers"),
        ({"prefetch": 0}, "prefetch"),
        ({"batch_size": 4}, "batch_size"),
        ({"shuffle": True}, "shuffle"),
    ],
)
def test_wrong_options_are_named(shm: Path, options: dict[str, Any], field: str) -> None:
    with join("run", 0, batches=[4], samples=40) as worker:
        worker.attach(Dropped())
        with pytest.raises(InputError, match=field):
            next(worker.batches(Numbered(), **options))


SCRIPT = """
import sys, time
import torch, pyps
sys.path.insert(0, {folder!r})
from test_loader import Dropped, Numbered
with pyps.join("run", 0, batches=[4, 4], samples=10**6, policy="asp") as worker:
    worker.attach(Dropped())
    for index, x in worker.batches(Numbered(float(sys.argv[1])), 2):
        print("batch", flush=True)
        worker.claim and time.sleep(100)
"""


@pytest.mark.usefixtures("quick_start")
@pytest.mark.slow
@pytest.mark.parametrize("seconds", sampled([0.0, 30.0], 1))
def test_a_killed_worker_is_gone_though_its_loader_processes_were_left(
    shm: Path, tmp_path: Path, seconds: float
) -> None:
    """Its lock is free and its rank too; they end by themselves, also in the middle of a long sample."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(folder=str(Path(__file__).parent)))
    path = os.pathsep.join([str(Path(__file__).parents[1] / "helpers"), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path}
    process = subprocess.Popen([sys.executable, script, str(seconds)], stdout=subprocess.PIPE, env=env)
    try:
        children: list[psutil.Process] = []
        deadline = time.monotonic() + 60
        while len(children) < 2 and time.monotonic() < deadline:
            children = [c for c in psutil.Process(process.pid).children() if _is_loader(c)]
            time.sleep(0.05)
        assert len(children) == 2
        for child in children:
            child.suspend()  # they cannot know yet that their parent has died
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        with Store.open("run") as store:
            assert store.reap() == 1
            assert store.join(0) == 0
        for child in children:
            child.resume()
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive
    finally:
        process.kill()
        process.wait()
        native.unlink("run", force=True)


def _is_loader(process: psutil.Process) -> bool:
    try:
        return process.name() == "pt_data_worker"
    except psutil.NoSuchProcess:
        return False


class Shorter(Numbered):
    def __len__(self) -> int:
        return LENGTH - 1


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_ranks_with_unlike_data_sets_are_refused_before_the_first_step(shm: Path, workers: int) -> None:
    one, other = (join("run", rank, batches=[2, 2], samples=40, seed=SEED) for rank in range(2))
    with one, other:
        one.attach(Dropped())
        other.attach(Dropped())
        other.store.set_data_set(fingerprint_of(make_source(Numbered(), None, SEED, 1, 2)))
        with pytest.raises(InvalidArgument, match="rank 0 has 59 samples, rank 1 has 60"):
            next(one.batches(Shorter(), workers))
        assert one.store.status().version == 0


def test_another_length_than_the_runs_epochs_have_is_refused(shm: Path) -> None:
    with join("run", 0, batches=[4], samples=40) as worker:
        worker.settings = replace(worker.settings, dataset_size=50)
        worker.attach(Dropped())
        with pytest.raises(InputError, match="found 60 samples; expected 50, as --dataset-size says"):
            next(worker.batches(Numbered()))
