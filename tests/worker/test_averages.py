"""Buffers that training changes are averaged by the store: BatchNorm's running statistics above all."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from device import DEVICE
from torch import nn
from worker_tools import SAMPLES, X, Y, backward, loss_of, run_threads, train

import pyps
from pyps.errors import InputError
from pyps.worker.data.sampling import indices
from pyps.worker.device.attach import load_parameters
from pyps.worker.device.averages import find_buffers
from pyps.worker.step.loop import Worker

pytestmark = [
    pytest.mark.usefixtures("shm"),
    pytest.mark.filterwarnings("ignore:the model's BatchNorm takes:UserWarning"),
]


def normed(momentum: float | None = 0.1) -> nn.Sequential:
    """Four values a channel, so that batches of one sample have a variance."""
    torch.manual_seed(3)
    norm = nn.BatchNorm1d(2, momentum=momentum)
    return nn.Sequential(
        nn.Linear(6, 8), nn.Unflatten(1, (2, 4)), norm, nn.Flatten(), nn.Tanh(), nn.Linear(8, 2)
    ).to(DEVICE)


def before_norm(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return what the layer normalises: [values, 2]."""
    assert isinstance(model, nn.Sequential)
    out: torch.Tensor = model[:2](x)
    return out.detach().transpose(1, 2).reshape(-1, 2)


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def statistics(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.named_buffers()}


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


class Odd(nn.Module):
    """One buffer of every sort."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 2)
        self.norm = nn.BatchNorm1d(2)
        self.twin = self.norm
        sorts = {
            "mean": torch.zeros(2),
            "halved": torch.full((2,), 0.1, dtype=torch.float16),
            "doubled": torch.zeros(2, dtype=torch.float64),
            "mask": torch.full((2,), -torch.inf),
            "table": torch.arange(3),
            "empty": torch.zeros(0),
        }
        for name, value in sorts.items():
            self.register_buffer(name, value)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x: torch.Tensor) -> Any:
        out: torch.Tensor = self.norm(self.line(x))
        self.mean = 0.5 * self.mean + out.detach().mean(0)  # another tensor each time
        self.doubled += 1
        return out


def test_which_buffers_the_store_has(worker: Worker) -> None:
    model = Odd().to(DEVICE)
    before = statistics(model)
    worker.attach(model, sgd(model))
    averaged = [t.name for t in worker.store.tensors if t.averaged]
    norm = [f"norm.{key}" for key in ("running_mean", "running_var", "num_batches_tracked")]
    assert averaged == ["mean", "halved", *norm]
    train(worker, model)
    after = statistics(model)
    for name in ("halved", "mask", "table", "empty", "scratch"):
        assert torch.equal(before[name], after[name])
    assert after["mean"].abs().sum() > 0
    assert after["doubled"].tolist() == [18.0, 18.0]


def test_sync_batch_norm_is_refused() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(normed())
    with pytest.raises(InputError, match=r"2: found SyncBatchNorm; expected BatchNorm: each worker"):
        find_buffers(model)


@pytest.mark.parametrize(
    ("layer", "trains", "said"),
    [(nn.BatchNorm1d(2), True, 1), (nn.BatchNorm1d(2), False, 0), (nn.GroupNorm(1, 2), True, 0)],
)
def test_batches_of_their_own_are_told_once(layer: nn.Module, trains: bool, said: int) -> None:
    models = [nn.Sequential(nn.Linear(6, 2), layer.train(trains)).to(DEVICE) for _ in range(2)]
    workers = [pyps.join("run", rank, batches=[3, 7], samples=10) for rank in range(2)]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run_threads(2, lambda rank: workers[rank].attach(models[rank], sgd(models[rank])))
    for worker in reversed(workers):
        worker.close()
    about = [one for one in found if "statistics from each rank's own batch" in str(one.message)]
    assert [one.filename for one in about] == [__file__] * said


@pytest.mark.parametrize("momentum", [0.1, None])
def test_one_worker_has_the_statistics_of_plain_torch(worker: Worker, momentum: float | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = normed(momentum)
        worker.attach(model, sgd(model))
        train(worker, model)
    alone = normed(momentum)
    optimizer = sgd(alone)
    for first in range(0, 3 * SAMPLES, 10):
        index = torch.from_numpy(indices(first, 10, SAMPLES, 5))
        optimizer.zero_grad()
        backward(loss_of(alone, X[index], Y[index]))
        optimizer.step()
    found, expected = statistics(model), statistics(alone)
    assert found.pop("2.num_batches_tracked") == expected.pop("2.num_batches_tracked") == 18
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def test_micro_batches_weigh_as_one_global_batch() -> None:
    """A cumulative average (momentum=None) counts a step in k micro-batches once, in equal parts."""
    with pyps.join("run", 0, batches=[10], samples=60, seed=5, micro_batch=2) as worker:
        model = normed(None)
        worker.attach(model, sgd(model, lr=0.0))
        train(worker, model)
        state = worker.state_dict()
    parts = [before_norm(model, X[indices(k, 2, SAMPLES, 5)]) for k in range(0, 60, 2)]
    mean = torch.stack([part.mean(0) for part in parts]).mean(0)
    torch.testing.assert_close(state["2.running_mean"], mean)
    assert state["2.num_batches_tracked"] == 6


def test_a_frozen_layer_keeps_its_statistics(worker: Worker) -> None:
    model = normed()
    with torch.no_grad():
        model[2].running_mean.uniform_()  # type: ignore[operator, union-attr]
        model[2].num_batches_tracked.fill_(77)  # type: ignore[operator, union-attr]
    model[2].eval()
    before = statistics(model)
    worker.attach(model, sgd(model))
    train(worker, model)
    assert same(before, statistics(model))


def parts_of(policy: str, models: list[nn.Module], **options: Any) -> dict[str, np.ndarray[Any, Any]]:
    """A run of two workers in threads, 3 + 7 samples; what the store holds in the end."""
    workers = [
        pyps.join("run", rank, batches=[3, 7], policy=policy, samples=120, seed=5, **options)
        for rank in range(2)
    ]
    found: dict[str, np.ndarray[Any, Any]] = {}
    done = threading.Barrier(2)

    def body(rank: int) -> None:
        model = models[rank]
        workers[rank].attach(model, sgd(model))
        for x, y in workers[rank].batches((X, Y)):
            backward(loss_of(model, x, y))
            workers[rank].step()
        done.wait(30)
        if rank == 0:
            found.update(workers[0].store.snapshot().tensors)
        done.wait(30)

    run_threads(2, body)
    for worker in reversed(workers):
        worker.close()
    return found


def test_a_round_of_one_step_gives_the_mean_by_samples() -> None:
    with pyps.join("run", 0, batches=[3, 7], samples=10, seed=5) as one:
        other = pyps.join("run", 1, batches=[3, 7], samples=10, seed=5)
        models = [normed(), normed()]
        start = normed()
        before = statistics(start)

        def body(rank: int) -> None:
            worker = (one, other)[rank]
            worker.attach(models[rank], sgd(models[rank]))
            for x, y in worker.batches((X, Y)):
                backward(loss_of(models[rank], x, y))
                worker.step()

        run_threads(2, body)
        other.close()
        x = X[indices(0, 10, SAMPLES, 5)]
        own = []
        for part in (x[:3], x[3:]):
            start.load_state_dict({**start.state_dict(), **before})
            start(part)
            own.append(statistics(start))
        for name in ("2.running_mean", "2.running_var"):
            expected = 0.3 * own[0][name] + 0.7 * own[1][name]
            for model in models:
                torch.testing.assert_close(statistics(model)[name], expected)
        assert statistics(models[0])["2.num_batches_tracked"] == 1


@pytest.mark.parametrize("policy", ["bsp", "asp", "ssp:bound=2", "softsync", "r2sp", "saps", "hps"])
def test_under_every_policy_workers_end_with_the_same_statistics(policy: str) -> None:
    models: list[nn.Module] = [normed(), normed()]
    found = parts_of(policy, models)
    one, two = (statistics(model) for model in models)
    assert same(one, two)
    loaded = normed()
    with torch.no_grad():
        for name, value in loaded.named_buffers():
            value.copy_(
                torch.from_numpy(found[name]).round() if "num" in name else torch.from_numpy(found[name])
            )
    assert same(one, statistics(loaded))
    assert (one["2.running_var"] > 0).all()
    expected = before_norm(models[0], X).var(0)
    assert ((one["2.running_var"] - expected).abs() < (1.0 - expected).abs()).all()  # 1: where it began


@pytest.mark.parametrize("options", [{"codec": "int8"}, {"codec": "int4", "depth": "auto"}])
def test_codecs_and_pipelines_leave_statistics_whole(options: dict[str, Any]) -> None:
    """A running variance in a million next to one of a millionth: no block of codes holds both."""
    model, alone = normed(None), normed(None)
    for one in (model, alone):
        with torch.no_grad():
            one[0].weight[:4] *= 1e3  # type: ignore[operator, index, union-attr]
            one[0].weight[4:] *= 1e-3  # type: ignore[operator, index, union-attr]
    with pyps.join("run", 0, batches=[10], policy="asp", samples=180, seed=5, **options) as worker:
        worker.attach(model, sgd(model, lr=0.0))
        train(worker, model)
        found = worker.state_dict()
    for first in range(0, 180, 10):
        alone(X[indices(first, 10, SAMPLES, 5)])
    torch.testing.assert_close(found["2.running_var"], alone[2].running_var, rtol=1e-4, atol=0.0)


def test_what_is_loaded_evaluates_as_the_worker_does(worker: Worker) -> None:
    model, fresh, plain = normed(), normed(), normed()
    worker.attach(model, sgd(model))
    train(worker, model)
    state = worker.state_dict()
    plain.load_state_dict(state)
    assert load_parameters(worker.store, fresh) == 18
    outputs = [each.eval()(X) for each in (model, fresh, plain)]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    assert same(statistics(model), statistics(fresh))


def test_a_restored_store_evaluates_as_the_worker_did(worker: Worker) -> None:
    model, fresh = normed(None), normed(None)
    worker.attach(model, sgd(model))
    train(worker, model)
    worker.refresh()
    with pyps.Store.create("restored", state=worker.store.state()) as restored:
        load_parameters(restored, fresh)
        assert restored.hyper() == worker.store.hyper()
    assert torch.equal(model.eval()(X), fresh.eval()(X))
    assert same(statistics(model), statistics(fresh))


def test_another_workers_buffers_must_be_the_same(worker: Worker) -> None:
    model = normed()
    worker.attach(model, sgd(model))
    late = pyps.join("run", 0, batches=[10], samples=180)
    other = normed()
    other[2] = nn.BatchNorm1d(2, track_running_stats=False)
    with pytest.raises(
        InputError, match=r"running_mean: found nothing in this worker's model; expected averaged"
    ):
        late.attach(other, sgd(other))
    late.close()
