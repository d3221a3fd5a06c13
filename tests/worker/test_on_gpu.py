"""A worker whose model is on a GPU: the run of a worker on the CPU, by what a GPU has of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device import needs_cuda
from torch import nn
from torch.utils.data import TensorDataset
from worker_tools import OPTIMIZERS, SAMPLES, backward, distance, loss_of, run_threads

from pyps.checkpoint.state import save
from pyps.worker.data.sampling import indices
from pyps.worker.device import binding
from pyps.worker.step.loop import Worker, join

pytestmark = [needs_cuda, pytest.mark.usefixtures("shm")]

GPU = "cuda"
NEAR = 1e-5  # a GPU sums in another order
HALF = 0.02  # an fp16 or bf16 gradient, over a few steps
DRAWS = torch.Generator().manual_seed(0)
X, Y = torch.randn(SAMPLES, 6, generator=DRAWS), torch.randn(SAMPLES, 2, generator=DRAWS)
Data = tuple[torch.Tensor, ...]


def model_of(*more: nn.Module, width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), *more, nn.Tanh(), nn.Linear(width, 2))


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def train(worker: Worker, model: nn.Module, data: Any = None, **options: Any) -> None:
    """Each batch goes to the model's device, if it is not there."""
    for x, y in worker.batches((X, Y) if data is None else data, **options):
        backward(loss_of(model, x.to(GPU, non_blocking=True), y.to(GPU, non_blocking=True)))
        worker.step()


def run(model: nn.Module, data: Any = None, loads: dict[str, Any] | None = None, **options: Any) -> Any:
    """The parameters after a run of one worker, flat."""
    chosen: dict[str, Any] = {"batches": [10], "samples": 3 * SAMPLES, "seed": 5} | options
    with join("run", 0, **chosen) as worker:
        worker.attach(model, sgd(model))
        train(worker, model, data, **(loads or {}))
        return worker.store.pull()[0]


def alone(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> nn.Module:
    """Return what plain torch makes of the same batches on the CPU."""
    for first in range(0, 3 * SAMPLES, batch):
        rows = torch.from_numpy(indices(first, min(batch, 3 * SAMPLES - first), SAMPLES, 5))
        optimizer.zero_grad()
        backward(loss_of(model, X[rows], Y[rows]))
        optimizer.step()
    return model


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_it_is_plain_torch(worker: Worker, case: str) -> None:
    model, rival = model_of().to(GPU), model_of()
    worker.attach(model, OPTIMIZERS[case](model))
    train(worker, model)
    assert distance(model.cpu(), alone(rival, OPTIMIZERS[case](rival), 10)) < NEAR


def test_unequal_workers_on_one_gpu_are_one_process_with_the_whole_batch() -> None:
    split = [11, 2, 5]
    models = [model_of().to(GPU) for _ in split]
    workers = [join("uneven", k, batches=split, samples=3 * SAMPLES, seed=5) for k in range(3)]

    def body(rank: int) -> None:
        workers[rank].attach(models[rank], OPTIMIZERS["nesterov"](models[rank]))
        train(workers[rank], models[rank])

    run_threads(len(split), body)
    rival = model_of()
    alone(rival, OPTIMIZERS["nesterov"](rival), sum(split))
    for model, member in zip(models, workers, strict=True):
        member.close()
        assert distance(model.cpu(), rival) < NEAR
        assert distance(model, models[0]) == 0.0, "all end with the same parameters"


def test_data_on_the_gpu_and_from_the_host_are_the_same_run() -> None:
    """Also loaded by processes into pinned memory."""
    expected = run(model_of().to(GPU))
    there = (X.to(GPU), Y.to(GPU))
    for data, loads in (
        (there, {}),
        (TensorDataset(X, Y), {"pin_memory": True, "num_workers": 2}),
        ((X, Y), {"pin_memory": True}),
        ([(x, y) for x, y in zip(X, Y, strict=True)], {"pin_memory": True, "num_workers": 2}),
        ([(x, y) for x, y in zip(X, Y, strict=True)], {"pin_memory": True}),
    ):
        np.testing.assert_array_equal(run(model_of().to(GPU), data, loads), expected)


def test_batches_in_pinned_memory(worker: Worker) -> None:
    model = model_of().to(GPU)
    worker.attach(model, sgd(model))
    pairs = [(x, y) for x, y in zip(X, Y, strict=True)]
    for x, y in worker.batches(pairs, num_workers=1, pin_memory=True):
        assert x.is_pinned()
        assert y.is_pinned()
        backward(loss_of(model, x.to(GPU, non_blocking=True), y.to(GPU, non_blocking=True)))
        worker.step()


@pytest.mark.parametrize("micro_batch", [None, 4])
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_codes_made_on_the_gpu_are_the_c_codecs(
    monkeypatch: pytest.MonkeyPatch, codec: str, micro_batch: int | None
) -> None:
    """Bit for bit over a run, with error feedback."""
    found = []
    for where in (("cuda",), ()):
        monkeypatch.setattr(binding, "ENCODES_ON", where)
        found.append(run(model_of(width=300).to(GPU), codec=codec, micro_batch=micro_batch))
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("codec", ["f32", "int8"])
def test_clipped_gradients_are_what_is_pushed(codec: str) -> None:
    found = []
    for device in ("cpu", GPU):
        model = model_of(width=100).to(device)
        with join("run", 0, batches=[10], samples=SAMPLES, seed=5, codec=codec) as worker:
            worker.attach(model, sgd(model))
            for x, y in worker.batches((X, Y)):
                backward(loss_of(model, x.to(device), y.to(device)) * 100)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                worker.step()
            found.append(worker.store.pull()[0].copy())
    assert np.linalg.norm(found[1] - found[0]) < (NEAR if codec == "f32" else 1e-3) * np.linalg.norm(found[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", ["f32", "int8"])
def test_half_precision_keeps_fp32_masters(dtype: torch.dtype, codec: str) -> None:
    whole = run(model_of().to(GPU))
    half = run(model_of().to(GPU, dtype), (X.to(dtype), Y.to(dtype)), codec=codec)
    assert 0 < np.linalg.norm(half - whole) < HALF * np.linalg.norm(whole)


def scaled_run(
    model: nn.Module, step: Callable[[Any], Any], batches: Iterator[Any], scaler: Any
) -> list[bool]:
    """fp16 by autocast; the third loss is infinite. Whether each step was taken."""
    taken = []
    for k, (x, y) in enumerate(batches):
        with torch.autocast(GPU, torch.float16):
            loss = nn.functional.mse_loss(model(x.to(GPU)).float(), y.to(GPU))
        backward(scaler.scale(loss * (float("inf") if k == 2 else 1.0)))
        taken.append(step(scaler))
        scaler.update()
    return taken


@pytest.mark.parametrize("codec", ["f32", "int8"])
def test_autocast_and_a_grad_scaler(worker: Worker, codec: str) -> None:
    worker.close()
    model, rival = model_of().to(GPU), model_of().to(GPU)
    optimizer = sgd(rival)
    scalers = [torch.amp.GradScaler(GPU, init_scale=1024.0) for _ in range(2)]
    with join("scaled", 0, batches=[10], samples=3 * SAMPLES, seed=5, codec=codec) as scaled:
        scaled.attach(model, sgd(model))
        taken = scaled_run(
            model, lambda scaler: scaled.step(scaler=scaler) is not None, scaled.batches((X, Y)), scalers[0]
        )
        assert (scaled.steps, scaled.skipped) == (17, 1)
    assert taken == [k != 2 for k in range(18)]
    rows = [torch.from_numpy(indices(first, 10, SAMPLES, 5)) for first in range(0, 3 * SAMPLES, 10)]

    def plain(scaler: Any) -> None:
        scaler.step(optimizer)
        optimizer.zero_grad()

    scaled_run(rival, plain, iter([(X[r], Y[r]) for r in rows]), scalers[1])
    assert scalers[0].get_scale() == scalers[1].get_scale() == 512.0
    assert distance(model, rival) < (NEAR if codec == "f32" else HALF)


def test_batch_norms_averages_are_plain_torchs() -> None:
    model, rival = model_of(nn.BatchNorm1d(8)).to(GPU), model_of(nn.BatchNorm1d(8))
    with join("run", 0, batches=[10], samples=3 * SAMPLES, seed=5) as worker:
        worker.attach(model, sgd(model))
        train(worker, model)
    alone(rival, sgd(rival), 10)
    expected = dict(rival.named_buffers())
    for name, value in model.named_buffers():
        torch.testing.assert_close(value.cpu(), expected[name], rtol=1e-4, atol=1e-5)
    assert distance(model.cpu(), rival) < 10 * NEAR


def test_a_compiled_model() -> None:
    model: Any = model_of().to(GPU)
    compiled: Any = torch.compile(model)
    with join("run", 0, batches=[10], samples=SAMPLES, seed=5) as worker:
        worker.attach(compiled, sgd(compiled))
        train(worker, compiled)
        found = worker.store.pull()[0].copy()
    np.testing.assert_allclose(found, run(model_of().to(GPU), samples=SAMPLES), rtol=1e-3, atol=1e-4)


class Divided(nn.Module):
    """The first layer on the CPU, the others on the GPU."""

    def __init__(self) -> None:
        super().__init__()
        whole = model_of()
        self.first, self.rest = whole[0], whole[1:].to(GPU)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.rest(self.first(x.cpu()).to(GPU))
        return out


@pytest.mark.parametrize("codec", ["f32", "int8"])
def test_a_model_on_two_devices(codec: str) -> None:
    model, rival = Divided(), model_of()
    with join("run", 0, batches=[10], samples=3 * SAMPLES, seed=5, codec=codec) as worker:
        worker.attach(model, sgd(model))
        train(worker, model)
    model.cpu()
    assert distance(model, alone(rival, sgd(rival), 10)) < (NEAR if codec == "f32" else HALF)


@pytest.mark.parametrize("codec", ["f32", "bf16"])
def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path: Path, codec: str) -> None:
    """With dropout, whose numbers are the GPU's own."""

    def dropping() -> nn.Module:
        return model_of(nn.Dropout(0.5), width=64).to(GPU)

    whole = run(dropping(), codec=codec)
    np.testing.assert_array_equal(run(dropping(), codec=codec), whole)
    model = dropping()
    with join("first", 0, batches=[10], samples=3 * SAMPLES, seed=5, codec=codec) as worker:
        worker.attach(model, sgd(model))
        for x, y in worker.batches((X, Y)):
            if worker.steps == 7:
                break
            backward(loss_of(model, x.to(GPU), y.to(GPU)))
            worker.step()
        save(worker.store.state(), tmp_path, policy="bsp", seed=5)
    torch.manual_seed(99)
    model = dropping()
    with join("second", 0, batches=[10], samples=3 * SAMPLES, seed=5, codec=codec) as worker:
        worker.attach(model, sgd(model), resume=tmp_path)
        train(worker, model)
        np.testing.assert_array_equal(worker.store.pull()[0], whole)


@pytest.mark.parametrize("depth", [1, 3])
def test_memory_is_pinned_while_the_worker_trains(depth: int) -> None:
    model = model_of().to(GPU)
    with join("run", 0, batches=[10], samples=SAMPLES, seed=5, policy="asp", depth=depth) as worker:
        worker.attach(model, sgd(model))
        flat = torch.from_numpy(worker._require().binding.flat)
        for x, y in worker.batches((X, Y)):
            assert flat.is_pinned()
            assert worker._step is not None
            assert worker._step.staging.torch().is_pinned()
            backward(loss_of(model, x.to(GPU), y.to(GPU)))
            worker.step()
    assert not flat.is_pinned()


def test_a_worker_by_free_gpu_memory(worker: Worker) -> None:
    """hps: the batch is what fits, by the profile's memory model."""
    from pyps.formats import Memory
    from pyps.store.policies import HPS
    from pyps.worker.run.settings import Settings

    worker.close()
    free, _ = torch.cuda.mem_get_info()
    fits = 4
    memory = Memory(fixed_bytes=0, bytes_per_sample=0.9 * free / (fits + 0.5), budget_bytes=free)
    settings = Settings("hps", 0, HPS(), SAMPLES, 5, batches=(10,), memory=memory)
    sizes = []
    model = model_of().to(GPU)
    with Worker(settings) as trained:
        trained.attach(model, sgd(model))
        for x, y in trained.batches((X, Y)):
            sizes.append(len(x))
            backward(loss_of(model, x.to(GPU), y.to(GPU)))
            trained.step()
    assert sum(sizes) == SAMPLES
    assert max(sizes) in (fits, fits - 1), "other processes may use the GPU, too"


INNER: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
}


def outer(model: nn.Module) -> torch.optim.Optimizer:
    """Takes a pseudo-gradient as it is."""
    return sgd(model, 1.0)


@pytest.mark.parametrize("kind", INNER)
def test_local_steps_are_plain_torchs(kind: str) -> None:
    model, rival = model_of().to(GPU), model_of()
    with join("run", 0, batches=[10], samples=3 * SAMPLES, seed=5) as worker:
        worker.attach(model, INNER[kind](model), local_steps=3, outer=outer(model))
        train(worker, model)
        assert worker.steps == 6, "pushes"
    alone(rival, INNER[kind](rival), 10)
    assert distance(model.cpu(), rival) < 10 * NEAR


@pytest.mark.parametrize("codec", ["f32", "int8"])
@pytest.mark.parametrize("depth", [1, 2])
def test_local_steps_of_all_policies_kinds(codec: str, depth: int) -> None:
    """Local steps do what they do on the CPU: codes, a pipeline, clipping, BatchNorm's averages."""
    found = []
    for device in ("cpu", GPU):
        model = model_of(nn.BatchNorm1d(100), width=100).to(device)
        options: dict[str, Any] = {"codec": codec, "depth": depth, "policy": "asp"}
        with join("run", 0, batches=[10], samples=3 * SAMPLES, seed=5, **options) as worker:
            worker.attach(model, INNER["momentum"](model), local_steps=3, clip_norm=0.5)
            for x, y in worker.batches((X.to(device), Y.to(device))):
                backward(loss_of(model, x, y))
                worker.step()
            found.append(worker.store.pull()[0].copy())
    error = np.linalg.norm(found[1] - found[0]) / np.linalg.norm(found[0])
    assert error < (1e-4 if codec == "f32" else HALF)


@pytest.mark.parametrize("kind", INNER)
def test_a_worker_with_local_steps_goes_on_bit_for_bit(tmp_path: Path, kind: str) -> None:
    """The inner optimizer's state lies on the GPU and is kept in the run's folder."""
    ends = []
    for stop in (None, 7):
        folder, dropping = tmp_path / str(stop), nn.Dropout(0.5)
        folder.mkdir()
        kept = {"batches": [10], "samples": 3 * SAMPLES, "seed": 5, "run_dir": folder}
        model = model_of(dropping).to(GPU)
        with join("first", 0, **kept) as worker:
            worker.attach(model, INNER[kind](model), local_steps=2, outer=outer(model))
            for number, (x, y) in enumerate(worker.batches((X, Y))):
                if number == stop:
                    break
                backward(loss_of(model, x.to(GPU), y.to(GPU)))
                worker.step()
            if stop is None:
                ends.append(worker.store.pull()[0].copy())
                continue
            save(worker.store.state(), folder / "checkpoint", policy="bsp", seed=5)
        model = model_of(dropping).to(GPU)
        with join("second", 0, **kept) as worker:
            worker.attach(
                model, INNER[kind](model), local_steps=2, outer=outer(model), resume=folder / "checkpoint"
            )
            train(worker, model)
            ends.append(worker.store.pull()[0].copy())
    np.testing.assert_array_equal(*ends)


@pytest.mark.parametrize("policy", ["asp", "saps", "r2sp", "ssp:bound=2", "dynsgd", "asp:lookahead=false"])
@pytest.mark.parametrize("kind", ["nesterov", "adamw"])
def test_policies_that_do_not_wait(policy: str, kind: str) -> None:
    """One worker, serial and then pipelined: as on the CPU, with what it looks ahead by its last gradient."""
    for depth in (1, 2):
        if depth > 1 and policy in ("ssp:bound=2", "r2sp"):
            continue
        found = []
        for device in ("cpu", GPU):
            model = model_of(width=50).to(device)
            options: dict[str, Any] = {"depth": depth, "policy": policy}
            with join("run", 0, batches=[10], samples=3 * SAMPLES, seed=5, **options) as worker:
                worker.attach(model, OPTIMIZERS[kind](model))
                for x, y in worker.batches((X.to(device), Y.to(device))):
                    backward(loss_of(model, x, y))
                    worker.step()
                found.append(worker.store.pull()[0].copy())
        assert np.linalg.norm(found[1] - found[0]) < 1e-3 * np.linalg.norm(found[0])
