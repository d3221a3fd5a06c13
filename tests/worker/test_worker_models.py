"""pyps.Worker and models of every kind: odd parameters, half precision, restarts; what is refused."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device import DEVICE
from torch import nn
from worker_tools import (
    OPTIMIZERS,
    RELATIVE,
    SAMPLES,
    MakeOptimizer,
    X,
    Y,
    backward,
    distance,
    loss_of,
    make_model,
    train,
)

import pyps
from pyps.errors import InputError, SegmentNotFound
from pyps.formats.records import RecordWriter, read_records, record_path
from pyps.formats.setup import VARIABLE
from pyps.store import Store
from pyps.store.policies import BSP
from pyps.worker.device.attach import inspect, load_parameters
from pyps.worker.run.settings import Settings
from pyps.worker.step.loop import Worker, join


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
    model = nn.Linear(6, 2).to(DEVICE, torch.bfloat16)
    worker.attach(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    before = worker.store.snapshot().tensors["weight"].copy()
    for x, y in worker.batches((X.bfloat16(), Y.bfloat16())):
        backward(loss_of(model, x, y))
        worker.step()
    after = worker.store.snapshot().tensors["weight"]
    assert 0.0 < float(np.abs(after - before).max()) < 0.01
    assert torch.equal(model.weight.detach().cpu(), torch.from_numpy(after).bfloat16())


def test_a_scaler_unscales_and_skips(worker: Worker) -> None:
    model, rival = make_model(), make_model()
    optimizer, rival_optimizer = OPTIMIZERS["nesterov"](model), OPTIMIZERS["nesterov"](rival)
    worker.attach(model, optimizer)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0)
    rival_scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0)
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


@pytest.mark.parametrize("scaled", [False, True])
def test_the_optimizers_step_carries_no_gradient(worker: Worker, scaled: bool) -> None:
    """Schedulers see one call a step, of an optimizer that has nothing to apply and keeps no state."""
    model = make_model()
    optimizer = OPTIMIZERS["adamw"](model)
    worker.attach(model, optimizer)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=8.0, enabled=scaled)
    given: list[int] = []
    optimizer.register_step_pre_hook(
        lambda *_: given.append(sum(p.grad is not None for p in model.parameters()))
    )
    for steps, (x, y) in enumerate(worker.batches((X, Y)), 1):
        backward(scaler.scale(loss_of(model, x, y)))
        assert worker.step(scaler=scaler) is not None
        scaler.update()
        assert given == [0] * steps
    assert not optimizer.state
    with pytest.raises(InputError, match="the store steps"):
        optimizer.step()


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
    with join("absent", 1) as worker, pytest.raises(SegmentNotFound):
        worker.attach(make_model(), timeout=0.05)


@pytest.mark.parametrize(("reduction", "said"), [("sum", 18), ("mean", 0)])
def test_a_sum_in_the_place_of_a_mean_is_said(worker: Worker, reduction: str, said: int) -> None:
    model = torch.nn.Linear(6, 2).to(DEVICE)
    worker.attach(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for x, y in worker.batches((X, Y)):
            loss = torch.nn.functional.mse_loss(model(x), y, reduction=reduction)
            backward(loss)
            worker.step(loss)
    sums = [one for one in found if "is a sum over the batch" in str(one.message)]
    assert [one.filename for one in sums] == [__file__] * said


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
    with pytest.raises(InputError, match=r"PYPS_RUN: found nothing; expected a run: start .* `pyps run`"):
        pyps.join()
    with pytest.raises(InputError, match="join: rank: found nothing"):
        pyps.join("name")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": "x"}, r"PYPS_RUN: found .*Expected `int`, got `str` - at `\$\.rank`"),
        ({"policy": {"name": "spp", "round_timeout": 1.0}}, "policy: found 'spp'; expected one of bsp, asp"),
        ({"policy": {"name": "bsp", "round_timeout": -1.0}}, "round_timeout_seconds: found -1.0"),
        ({"throttle": {}}, "not one of factor and fit"),
        ({"dept": 2}, "PYPS_RUN: found .*an unknown key 'dept'"),
        ({"version": 2}, "of another version of pyps.*expected a worker that has its launcher's version"),
    ],
)
def test_what_no_launcher_wrote_is_named(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    values = json.loads(Settings("x", 0, BSP()).to_env()[VARIABLE])
    monkeypatch.setenv(VARIABLE, json.dumps(values | changes))
    with pytest.raises(InputError, match=message):
        join()


@pytest.mark.parametrize("text", ["{", "3", '{"version": 1}', "name=x"])
def test_what_is_not_the_launcher_s_json_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(InputError, match=r"environment: PYPS_RUN: found .*; expected JSON as the launcher"):
        join()


def test_records_survive_a_kill(worker: Worker, tmp_path: Path) -> None:
    from pyps.formats.records import StepRecord

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


@pytest.mark.parametrize("local_steps", [0, 2])
@pytest.mark.parametrize("late", ["unfrozen", "added"])
def test_a_parameter_that_comes_late_is_refused(worker: Worker, late: str, local_steps: int) -> None:
    """The torch optimizer would step it in this process alone."""
    model = make_model()
    first = list(model[0].parameters())
    optimizer = torch.optim.SGD(model.parameters() if late == "unfrozen" else model[2].parameters(), lr=0.1)
    for p in first:
        p.requires_grad_(False)
    worker.attach(model, optimizer, local_steps=local_steps or "plan")
    steps: list[int] = []

    def come() -> None:
        steps.append(worker.steps)
        if len(steps) == 3:
            for p in first:
                p.requires_grad_(True)
            if late == "added":
                optimizer.add_param_group({"params": first})

    said = r"param_groups\[\d\]: found a gradient of a parameter of shape \[8, 6\]"
    with pytest.raises(InputError, match=said):
        train(worker, model, come)
    assert len(steps) == 3
