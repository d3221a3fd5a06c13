"""pyps.Worker against torch on one process: the same parameters, and each special case handled or refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from sampled import sampled
from torch import nn
from worker_tools import (
    OPTIMIZERS,
    RELATIVE,
    SAMPLES,
    X,
    Y,
    backward,
    distance,
    loss_of,
    make_model,
    plan_with,
    run_threads,
    train,
    train_alone,
)

from pyps.errors import Diverged, InputError
from pyps.formats import read_plan
from pyps.formats.records import read_run
from pyps.store import Store
from pyps.store.policies import policy_named
from pyps.worker.data.sampling import indices
from pyps.worker.run.settings import Settings, ThrottleSpec
from pyps.worker.step.loop import Worker, join


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_one_worker_is_plain_torch(worker: Worker, case: str) -> None:
    model, rival = make_model(), make_model()
    rival_optimizer = OPTIMIZERS[case](rival)
    worker.attach(model, OPTIMIZERS[case](model))
    assert train(worker, model) == 18
    train_alone(rival, rival_optimizer, 10)
    assert distance(model, rival) < 10 * RELATIVE  # through 18 steps of a non-linear model
    assert worker.steps == 18


def test_schedules_are_followed(worker: Worker) -> None:
    model, rival = make_model(), make_model()
    optimizer, rival_optimizer = OPTIMIZERS["sgd"](model), OPTIMIZERS["sgd"](rival)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of a scheduler that sees no optimizer.step()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        rival_schedule = torch.optim.lr_scheduler.ExponentialLR(rival_optimizer, 0.8)
        worker.attach(model, optimizer)
        train(worker, model, schedule.step)
        train_alone(rival, rival_optimizer, 10, rival_schedule.step)
    assert distance(model, rival) < 10 * RELATIVE


@pytest.mark.parametrize(("policy", "depth"), [("bsp", 1), ("asp", 1), ("asp", 2), ("asp", 3)])
def test_a_look_at_a_batch_takes_nothing(shm: Path, policy: str, depth: int) -> None:
    """Each begins a step, which is given up when the next one begins."""
    model = make_model()
    with join("looks", 0, batches=[10], samples=2 * SAMPLES, policy=policy, depth=depth) as worker:
        worker.attach(model, OPTIMIZERS["nesterov"](model))

        def look(first: int) -> None:
            for _ in range(worker.store.layout.staging_buffers + 2):
                next(worker.batches((X, Y)))
                assert worker.claim is not None
                assert worker.claim.first == first

        look(0)
        for x, y in worker.batches((X, Y)):
            backward(loss_of(model, x, y))
            worker.step()
            break
        look(10)
        train(worker, model)
        assert worker.store.ranks()[0].samples == 2 * SAMPLES


def test_unequal_workers_are_one_process_with_the_whole_batch(shm: Path) -> None:
    split = [11, 2, 5]
    models = [make_model(0) for _ in split]
    ranks = range(len(split))
    workers = [join("uneven", rank, batches=split, samples=3 * SAMPLES, seed=5) for rank in ranks]

    def body(rank: int) -> None:
        workers[rank].attach(models[rank], OPTIMIZERS["nesterov"](models[rank]))
        train(workers[rank], models[rank])

    run_threads(len(split), body)
    rival = make_model()
    train_alone(rival, OPTIMIZERS["nesterov"](rival), sum(split))
    for model, member in zip(models, workers, strict=True):
        assert distance(model, rival) < 10 * RELATIVE
        assert distance(model, models[0]) == 0.0, "all end with the same parameters"
        member.close()


SCRIPT = """
import torch, pyps
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
x, y = torch.randn(60, 6), torch.randn(60, 2)
model = nn.Linear(6, 2)
with pyps.join() as worker:
    worker.attach(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    for a, b in worker.batches((x, y)):
        loss = nn.functional.mse_loss(model(a), b)
        loss.backward()
        worker.step(loss)
    print(sum(p.double().sum().item() for p in model.parameters()).hex())
"""


@pytest.mark.parametrize("codec", sampled(["int8", "int4", "bf16"], 1))
def test_quantized_gradients_train_as_well(shm: Path, codec: str) -> None:
    """With feedback a long run comes as near to the least loss as with fp32."""
    losses = {}
    for kind in ("f32", codec):
        model = make_model()
        with join("run", 0, batches=[SAMPLES], samples=300 * SAMPLES, seed=5, codec=kind) as worker:
            worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for x, y in worker.batches((X, Y)):
                backward(loss_of(model, x, y))
                worker.step()
            losses[kind] = float(loss_of(model, X, Y).detach())
    assert abs(losses[codec] / losses["f32"] - 1) < 0.01


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("codec", ["f32", "bf16", "int8"])
def test_a_gradient_that_is_not_finite_ends_the_run(shm: Path, codec: str, depth: int) -> None:
    """Its loss is: before it is pushed, so that the store stays as it was."""
    model = make_model()
    with join("run", 0, batches=[10], samples=60, seed=5, codec=codec, depth=depth, policy="asp") as worker:
        worker.attach(model)
        with pytest.raises(Diverged, match=r"the gradient is not finite \(samples 20 to 29"):
            train(worker, model, spoil=2)
        assert np.isfinite(worker.store.pull()[0]).all()
        assert worker.store.ranks()[0].samples == 20


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("codec", ["f32", "int8"])
def test_a_gradient_that_is_not_finite_skips_the_step_where_that_is_allowed(
    shm: Path, tmp_path: Path, codec: str, depth: int
) -> None:
    model = make_model()
    before = [p.detach().clone() for p in model.parameters()]
    with join(
        "run",
        0,
        batches=[10],
        samples=20,
        seed=5,
        codec=codec,
        depth=depth,
        policy="asp",
        allow_nonfinite=True,
        run_dir=str(tmp_path),
    ) as worker:
        worker.attach(model)
        for x, y in worker.batches((X, Y)):
            backward(loss_of(model, x * float("nan"), y))
            assert worker.step() is None
        assert (worker.steps, worker.skipped) == (0, 2)
        assert worker.store.ranks()[0].skipped == 20
    assert [(r.skipped, r.rejected, r.samples) for r in read_run(tmp_path)] == [(True, False, 10)] * 2
    for p, q in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(p, q.detach(), rtol=0, atol=0)


@pytest.mark.parametrize("micro_batch", [1, 4, 5, 9, 10, 64])
def test_micro_batches_make_the_whole_batch(shm: Path, micro_batch: int) -> None:
    model, whole = make_model(), make_model()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    sizes: list[int] = []
    with join("run", 0, batches=[10], samples=25, seed=5, micro_batch=micro_batch) as worker:
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        for x, y in worker.batches((X, Y)):
            sizes.append(len(x))
            backward(loss_of(model, x, y))
            assert (worker.step() is None) == worker.accumulating
        assert (worker.steps, worker.skipped) == (3, 0)
    parts = {1: [[1] * 10, [1] * 5], 4: [[4, 4, 2], [3, 2]], 5: [[5, 5], [5]], 9: [[8, 2], [5]]}
    whole_step, last = parts.get(micro_batch, [[10], [5]])
    assert sizes == [*whole_step, *whole_step, *last]
    for first, count in ((0, 10), (10, 10), (20, 5)):
        rows = torch.from_numpy(indices(first, count, SAMPLES, 5))
        optimizer.zero_grad()
        backward(loss_of(whole, X[rows], Y[rows]))
        optimizer.step()
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2 * RELATIVE, atol=RELATIVE)


def clear_between(worker: Worker, model: nn.Module) -> None:
    for x, y in worker.batches((X, Y)):
        model.zero_grad()
        backward(loss_of(model, x, y))
        worker.step()


def forget_a_step(worker: Worker, model: nn.Module) -> None:
    for index, (x, y) in enumerate(worker.batches((X, Y))):
        backward(loss_of(model, x, y))
        if index == 0:
            worker.step()


@pytest.mark.parametrize(
    ("loop", "said"), [(clear_between, "zero_grad"), (forget_a_step, r"no step\(\) since")]
)
def test_misuse_of_micro_batches_is_said(
    shm: Path, loop: Callable[[Worker, nn.Module], None], said: str
) -> None:
    model = make_model()
    with join("run", 0, batches=[10], samples=20, seed=5, micro_batch=5) as worker:
        worker.attach(model)
        with pytest.raises(InputError, match=said):
            loop(worker, model)
    with pytest.raises(InputError, match="micro_batch"):
        join("run", 0, batches=[10], micro_batch=0)


@pytest.mark.usefixtures("quick_start")
@pytest.mark.slow
@pytest.mark.parametrize("policy", sampled(["bsp", "asp"]))
def test_processes_under_a_launcher(shm: Path, tmp_path: Path, policy: str) -> None:
    plan = tmp_path / "plan.json"
    drawn = plan_with([7, 0, 4])  # the second is left out: store ranks 0 and 1
    drawn["workers"][2] |= {"micro_batch": 2, "accumulation": 2}
    plan.write_text(json.dumps(drawn))
    common = Settings(
        "launched", 0, policy_named(policy, 30.0), 120, 3, run_dir=tmp_path / "run",
        throttle=ThrottleSpec(factor=1.5), launched=True,
    )  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env=os.environ | replace(common, rank=rank).with_plan(read_plan(plan), plan).to_env(),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in (1, 0)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=100) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] != ""
    records = read_run(tmp_path / "run")
    assert {r.rank for r in records} == {0, 1}
    assert sum(r.samples for r in records) == 120
    covered = sorted((r.first, r.samples) for r in records)
    assert all(a + n == b for (a, n), (b, _) in pairwise(covered))
    for record in records:
        kinds = [kind for kind, _, _ in record.spans]
        assert {"wait"} | (need := {"pull", "data", "compute", "push"}) >= set(kinds) >= need
        times = [t for _, begin, end in record.spans for t in (begin, end)]
        assert times == sorted(times)
        assert record.loss is not None
        assert record.sources in ((1,) if policy == "asp" else (1, 2))
    with Store.open("launched") as store:
        assert store.status().samples_assigned == 120
    from pyps.store.segments import collect_garbage

    assert [s.name for s in collect_garbage()[0]] == ["launched"]
