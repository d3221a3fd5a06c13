"""pyps.Worker against torch on one process: the same parameters, and each special case handled or refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pyps
from pyps.attach import inspect, load_parameters
from pyps.errors import InputError, SegmentNotFound
from pyps.metrics import RecordWriter, read_records, read_run, record_path
from pyps.sampling import indices
from pyps.settings import read_settings
from pyps.store import Store
from pyps.worker import Worker, join

RELATIVE = 1e-6
SAMPLES = 60
torch.set_num_threads(1)

X = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randn(SAMPLES, 2, generator=torch.Generator().manual_seed(1))
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.SGD(
        [{"params": weights, "weight_decay": 0.01}, {"params": biases, "lr": 0.02}], lr=0.1, momentum=0.9
    )


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "nesterov": lambda m: torch.optim.SGD(
        m.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, weight_decay=0.01),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.01, lr_decay=0.1),
    "groups": two_groups,
}


@pytest.fixture
def worker(shm: Path) -> Iterator[Worker]:
    """The only worker of a run of 3 epochs in batches of 10."""
    with join("run", 0, batches=[10], samples=3 * SAMPLES, seed=5) as alone:
        yield alone


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y)


def backward(loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def train(worker: Worker, model: nn.Module, after: Callable[[], Any] = lambda: None) -> int:
    steps = 0
    for x, y in worker.batches((X, Y)):
        loss = loss_of(model, x, y)
        backward(loss)
        worker.step(loss)
        after()
        steps += 1
    return steps


def train_alone(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: int, after: Callable[[], Any] = lambda: None
) -> None:
    for first in range(0, 3 * SAMPLES, batch):
        index = torch.from_numpy(indices(first, min(batch, 3 * SAMPLES - first), SAMPLES, 5))
        optimizer.zero_grad()
        backward(loss_of(model, X[index], Y[index]))
        optimizer.step()
        after()


def distance(one: nn.Module, two: nn.Module) -> float:
    a = torch.cat([p.detach().double().flatten() for p in one.parameters()])
    b = torch.cat([p.detach().double().flatten() for p in two.parameters()])
    return float((a - b).norm() / b.norm())


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


def run_threads(names: int, body: Callable[[int], None]) -> None:
    failures: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            body(rank)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,), daemon=True) for rank in range(names)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "a worker hangs"
    if failures:
        raise failures[0]


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


def plan_with(batches: list[int]) -> dict[str, Any]:
    total = sum(batches)
    workers = [
        {
            "rank": rank, "name": f"w{rank}", "batch": b, "micro_batch": b, "accumulation": int(b > 0),
            "weight": b / total, "predicted_seconds": 0.1, "fit_error": None,
        }
        for rank, b in enumerate(batches)
    ]  # fmt: skip
    return {
        "schema": "pyps.plan/1", "global_batch": total, "iteration_seconds": 0.1, "lower_bound_seconds": 0.1,
        "even_split": {"feasible": True, "seconds": 0.1}, "speedup_over_even": 1.0, "workers": workers,
        "r2sp": {"feasible": None, "period_seconds": 0.1, "gap_seconds": 0.05,
                 "order": list(range(len(batches))),
                 "offsets_seconds": [0.05 * k for k in range(len(batches))]},
        "hps": {}, "warnings": [],
    }  # fmt: skip


@pytest.mark.parametrize("codec", ["int8", "int4", "bf16"])
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


def test_a_gradient_that_cannot_be_encoded_skips_the_step(shm: Path) -> None:
    model = make_model()
    before = [p.detach().clone() for p in model.parameters()]
    with join("run", 0, batches=[10], samples=20, seed=5, codec="int8") as worker:
        worker.attach(model)
        for x, y in worker.batches((X, Y)):
            backward(loss_of(model, x * float("nan"), y))
            assert worker.step() is None
        assert (worker.steps, worker.skipped) == (0, 2)
        assert worker.store.ranks()[0].skipped == 20
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
    assert sizes == [min(micro_batch, b - at) for b in (10, 10, 5) for at in range(0, b, micro_batch)]
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


@pytest.mark.parametrize("policy", ["bsp", "asp"])
def test_processes_under_a_launcher(shm: Path, tmp_path: Path, policy: str) -> None:
    plan = tmp_path / "plan.json"
    drawn = plan_with([7, 0, 4])  # the second is left out: store ranks 0 and 1
    drawn["workers"][2] |= {"micro_batch": 2, "accumulation": 2}
    plan.write_text(json.dumps(drawn))
    common = {
        "PYPS_STORE": "launched", "PYPS_PLAN": str(plan), "PYPS_POLICY": policy, "PYPS_SEED": "3",
        "PYPS_RUN_DIR": str(tmp_path / "run"), "PYPS_SAMPLES": "120", "PYPS_ROUND_TIMEOUT": "30",
        "PYPS_THROTTLE": '{"factor": 1.5}',
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, **common, "PYPS_RANK": str(rank)},
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
        assert {"wait", "pull", "compute", "push"} >= set(kinds) >= {"pull", "compute", "push"}
        times = [t for _, begin, end in record.spans for t in (begin, end)]
        assert times == sorted(times)
        assert record.loss is not None
        assert record.sources in ((1,) if policy == "asp" else (1, 2))
    with Store.open("launched") as store:
        assert store.status().handed_out == 120
    from pyps.segments import collect_garbage

    assert [s.name for s in collect_garbage()[0]] == ["launched"]


# Special parameters and gradients.


class Odd(nn.Module):
    """Frozen, tied, unused and sparse parameters in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4, sparse=True)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.unused = nn.Parameter(torch.full((3,), 2.0))
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 4)
        self.outer.weight = self.inner.weight

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.outer(self.inner(self.table(index) * self.frozen)))


def test_odd_parameters_are_handled(worker: Worker) -> None:
    torch.manual_seed(1)
    model = Odd()
    torch.manual_seed(1)
    rival = Odd()
    worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert [t.name for t in worker.store.tensors] == [
        "unused", "table.weight", "inner.weight", "inner.bias", "outer.bias",
    ]  # fmt: skip
    optimizer = torch.optim.SGD(rival.parameters(), lr=0.1)
    data = torch.arange(SAMPLES) % 5
    batches = worker.batches((data,))
    for k in range(4):
        (index,) = next(batches)
        for net in (model, rival):
            if net is model and k % 2:
                net.zero_grad(set_to_none=True)  # a habit that does no harm
            backward((net(index) ** 2).mean())
        worker.step()
        optimizer.step()
        optimizer.zero_grad()
    next(batches)
    assert distance(model, rival) < 10 * RELATIVE
    assert model.outer.weight is model.inner.weight
    assert model.frozen.tolist() == [1.0] * 4
    assert model.unused.tolist() == [2.0] * 3


def test_half_precision_keeps_fp32_masters(worker: Worker) -> None:
    model = nn.Linear(6, 2).to(torch.bfloat16)
    worker.attach(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    before = worker.store.snapshot().tensors["weight"].copy()
    for x, y in worker.batches((X.bfloat16(), Y.bfloat16())):
        backward(loss_of(model, x, y))
        worker.step()
    after = worker.store.snapshot().tensors["weight"]
    assert 0.0 < float(np.abs(after - before).max()) < 0.01
    assert torch.equal(model.weight.detach(), torch.from_numpy(after).bfloat16())


def test_a_scaler_unscales_and_skips(worker: Worker) -> None:
    model, rival = make_model(), make_model()
    optimizer, rival_optimizer = OPTIMIZERS["nesterov"](model), OPTIMIZERS["nesterov"](rival)
    worker.attach(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    rival_scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for k, (x, y) in enumerate(worker.batches((X, Y))):
        poison = float("inf") if k == 2 else 1.0
        for net, its_scaler in ((model, scaler), (rival, rival_scaler)):
            backward(its_scaler.scale(loss_of(net, x, y) * poison))
        if k % 2:
            scaler.unscale_(optimizer)  # as one does before clipping
        result = worker.step(scaler=scaler)
        assert (result is None) == (k == 2)
        rival_scaler.step(rival_optimizer)
        rival_optimizer.zero_grad()
        scaler.update()
        rival_scaler.update()
        if k == 4:
            break
    assert scaler.get_scale() == 512.0
    worker.refresh()
    assert distance(model, rival) < 10 * RELATIVE
    assert (worker.steps, worker.skipped) == (4, 1)
    assert worker.store.ranks()[0].skipped == 10


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def shared_storage() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    torch.nn.utils.parameters_to_vector(model.parameters())
    model[1].weight.data = model[0].weight.data
    return model


def complex_model() -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], MakeOptimizer, str]] = {
    "float64": (lambda: nn.Linear(2, 2).double(), sgd, "attach: weight: found dtype torch.float64"),
    "complex": (complex_model, sgd, "attach: weight: found dtype torch.complex64"),
    "lazy": (lambda: nn.LazyLinear(2), sgd, "weight: found a lazy"),
    "storage": (shared_storage, sgd, "1.weight: found memory shared with 0.weight"),
    "frozen": (lambda: nn.Linear(2, 2).requires_grad_(False), sgd, "no parameter to train"),
    "adadelta": (make_model, lambda m: torch.optim.Adadelta(m.parameters()), "optimizer: found Adadelta;"),
    "accumulator": (
        make_model, lambda m: torch.optim.Adagrad(m.parameters(), initial_accumulator_value=0.1),
        r"\[0\].initial_accumulator_value",
    ),
    "amsgrad": (make_model, lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True), r"\[0\].amsgrad"),
    "maximize": (make_model, lambda m: sgd(m, maximize=True), r"\[0\].maximize"),
    "foreign": (
        make_model, lambda m: torch.optim.SGD([*m.parameters(), nn.Parameter(torch.ones(2))]),
        "found a parameter of shape",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_is_refused_by_name(case: str) -> None:
    make, optimizer, message = REFUSED[case]
    model = make()
    with pytest.raises(InputError, match=message):
        inspect(model, optimizer(model))


def test_an_optimizer_with_a_past_is_refused() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    backward(loss_of(model, X, Y))
    optimizer.step()
    with pytest.raises(InputError, match="state of earlier steps"):
        inspect(model, optimizer)


def test_batch_norm_is_said_once(worker: Worker) -> None:
    model = nn.Sequential(nn.Linear(6, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    with pytest.warns(UserWarning, match="1: running statistics .* stay local") as caught:
        worker.attach(model)
    assert len(caught) == 1


# The others' models, restarts, misuse.


def test_a_different_model_is_named(worker: Worker) -> None:
    worker.attach(make_model())
    for model, message in (
        (nn.Linear(6, 8), "'weight' .* in this worker's model; expected '0.weight'"),
        (nn.Sequential(nn.Linear(6, 9)), r"0.weight: .*\[9, 6\].*expected .*\[8, 6\]"),
        (nn.Sequential(*make_model(), nn.Linear(2, 1)), "3.weight"),
        (make_model()[:1], "2.weight: found nothing"),
    ):
        with join("run", 1, batches=[10]) as other, pytest.raises(InputError, match=message):
            other.attach(model)
    model = make_model()
    adamw = torch.optim.AdamW(model.parameters())
    with join("run", 1, batches=[10]) as other, pytest.raises(InputError, match="found adamw; expected sgd"):
        other.attach(model, adamw)


def test_a_restarted_rank_0_goes_on_where_it_was(shm: Path) -> None:
    model = make_model(0)
    with (
        Store.create("again", dict(model.named_parameters()), batches=[10], samples=40),
        join("again", 0, samples=40, seed=5) as first,
    ):
        first.attach(model, OPTIMIZERS["sgd"](model))
        batches = first.batches((X, Y))
        for _ in range(2):
            x, y = next(batches)
            backward(loss_of(model, x, y))
            first.step()
        next(batches)
        first.close()  # without a step: its samples go back
        restarted = make_model(9)
        with join("again", 0, samples=40, seed=5) as second:
            second.attach(restarted, OPTIMIZERS["sgd"](restarted))
            assert train(second, restarted) == 2
            total = second.store.ranks()[0]
            assert (total.samples, total.returned) == (40, 10)


def test_others_wait_for_rank_0_but_not_for_ever(shm: Path) -> None:
    with join("nobody", 1) as worker, pytest.raises(SegmentNotFound):
        worker.attach(make_model(), timeout=0.05)


def test_misuse_is_said(worker: Worker) -> None:
    model = make_model()
    with pytest.raises(InputError, match=r"attach\(model\) first"):
        worker.step()
    optimizer = OPTIMIZERS["sgd"](model)
    worker.attach(model, optimizer)
    with pytest.raises(InputError, match="a second one"):
        worker.attach(model)
    with pytest.raises(InputError, match="no batch"):
        worker.step()
    batches = worker.batches((X, Y))
    next(batches)
    with pytest.raises(InputError, match="the store steps"):
        optimizer.step()
    with pytest.raises(InputError, match=r"no step\(\) since the last batch"):
        next(batches)


def test_momentum_cannot_begin_later(worker: Worker) -> None:
    model = make_model()
    optimizer = OPTIMIZERS["sgd"](model)
    worker.attach(model, optimizer)
    x, y = next(worker.batches((X, Y)))
    backward(loss_of(model, x, y))
    optimizer.param_groups[0]["momentum"] = 0.5
    with pytest.raises(InputError, match=r"param_groups\[0\].momentum"):
        worker.step()


def test_parameters_can_be_loaded_elsewhere(worker: Worker) -> None:
    model, elsewhere = make_model(0), make_model(1)
    worker.attach(model)
    train(worker, model)
    assert load_parameters(worker.store, elsewhere) == worker.store.status().version
    assert distance(model, elsewhere) == 0.0
    state = worker.state_dict()
    assert torch.equal(state["0.weight"], torch.as_tensor(elsewhere[0].weight).detach())
    with pytest.raises(InputError, match=r"load_parameters: 0.weight: found nothing"):
        load_parameters(worker.store.snapshot(), nn.Linear(2, 2))


# Settings and records.


def test_without_a_launcher_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("PYPS_")]:
        monkeypatch.delenv(variable)
    with pytest.raises(InputError, match=r"PYPS_STORE: found nothing; expected a run: start .* `pyps run`"):
        pyps.join()
    with pytest.raises(InputError, match="join: rank: found nothing"):
        pyps.join("name")


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("PYPS_RANK", "x", "PYPS_RANK: found 'x'; expected a whole number"),
        ("PYPS_SAMPLES", "-3", "PYPS_SAMPLES: found '-3'"),
        ("PYPS_ROUND_TIMEOUT", "soon", "PYPS_ROUND_TIMEOUT: found 'soon'"),
        ("PYPS_ROUND_TIMEOUT", "-1", "round_timeout_seconds: found -1.0"),
        ("PYPS_POLICY", "spp", "policy: found 'spp'; expected one of bsp, asp"),
        ("PYPS_THROTTLE", "{", "PYPS_THROTTLE: found"),
        ("PYPS_THROTTLE", "{}", "PYPS_THROTTLE: found"),
        ("PYPS_PLAN", "/nowhere/plan.json", "/nowhere/plan.json"),
    ],
)
def test_bad_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv("PYPS_STORE", "x")
    monkeypatch.setenv("PYPS_RANK", "0")
    monkeypatch.setenv(variable, value)
    with pytest.raises(InputError, match=message):
        read_settings(None, None, None, None, None, None, None)


def test_records_survive_a_kill(worker: Worker, tmp_path: Path) -> None:
    from pyps.metrics import StepRecord

    path = record_path(tmp_path, 2, 77)
    assert path.name == "worker-2-77.jsonl"
    record = StepRecord(2, 77, 1, 0, 0, 0, 10, 10, 1, 0, 3, 0.5, [("wait", 1.0, 2.0)], 0.25)
    with RecordWriter(path) as writer:
        writer.write(record)
        writer.write(record)
    whole = path.read_bytes()
    assert read_records(path) == [record, record]
    for cut in range(len(whole) // 2, len(whole)):
        path.write_bytes(whole[:cut])
        assert read_records(path) == [record]
    path.write_bytes(b"{}\n" + whole)
    with pytest.raises(InputError, match="line 1"):
        read_records(path)
