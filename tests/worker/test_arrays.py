"""Trainers that are not torch's: equal gradients give the bits of a torch module, whatever the mode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from worker_tools import X, Y, backward, run_threads

from pyps.checkpoint.state import save
from pyps.errors import InputError
from pyps.store.policies import Policy
from pyps.worker.arrays import ArrayModel
from pyps.worker.step.loop import Worker, join

SAMPLES = 60
INPUT, OUTPUT = X.shape[1], Y.shape[1]
Step = Callable[[Any, torch.Tensor, torch.Tensor], None]


class Linear(nn.Module):
    """Its parameters have the names and values of `zeros`."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(INPUT, OUTPUT))
        self.bias = nn.Parameter(torch.zeros(OUTPUT))


def zeros() -> dict[str, np.ndarray]:
    return {"weights": np.zeros((INPUT, OUTPUT)), "bias": np.zeros(OUTPUT, np.float32)}


def gradients(weights: np.ndarray, bias: np.ndarray, x: np.ndarray, y: np.ndarray) -> dict[str, np.ndarray]:
    """Return those of half the mean squared error."""
    error = (x @ weights + bias - y) / np.float32(len(x))
    return {"weights": x.T @ error, "bias": error.sum(0)}


def numpy_step(model: ArrayModel, x: torch.Tensor, y: torch.Tensor) -> None:
    model.backward(gradients(**model.arrays(), x=x.numpy(), y=y.numpy()))


def torch_step(model: Linear, x: torch.Tensor, y: torch.Tensor) -> None:
    """The same numbers through torch's own backward: the gradient of sum(p * c) is c."""
    now = {name: p.detach().numpy() for name, p in model.named_parameters()}
    given = gradients(**now, x=x.numpy(), y=y.numpy())
    backward(sum((p * torch.from_numpy(given[name])).sum() for name, p in model.named_parameters()))


def trained(make: Callable[[], nn.Module], step: Step, name: str, **options: Any) -> bytes:
    """The parameters at the end of a run of one worker."""
    model, resume = make(), options.pop("resume", None)
    with join(name, 0, batches=[10], samples=3 * SAMPLES, seed=5, **options) as worker:
        worker.attach(model, torch.optim.AdamW(model.parameters(), lr=0.01), resume=resume)
        for x, y in worker.batches((X, Y)):
            step(model, x, y)
            worker.step()
        return worker.store.snapshot().parameters.tobytes()


def both(**options: Any) -> tuple[bytes, bytes]:
    arrays = trained(lambda: ArrayModel(zeros()), numpy_step, "arrays", **options)
    return arrays, trained(Linear, torch_step, "module", **options)


@pytest.mark.parametrize("policy", [p if p != "saps" else "saps:threshold=fixed" for p in Policy.known])
def test_every_policy_has_the_bits_of_a_torch_worker(shm: Path, policy: str) -> None:
    arrays, module = both(policy=policy)
    assert arrays == module
    assert np.frombuffer(arrays, np.float32).any()


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4", "nf4"])
@pytest.mark.parametrize("options", [{}, {"micro_batch": 4}, {"policy": "asp", "depth": 2}], ids=str)
def test_every_codec_has_the_bits_of_a_torch_worker(shm: Path, codec: str, options: dict[str, Any]) -> None:
    arrays, module = both(codec=codec, **options)
    if "pipeline" not in options:  # whose parameters' age depends on the clock
        assert arrays == module
    assert np.frombuffer(arrays, np.float32).any()


def test_two_workers_resume_with_the_same_bits(shm: Path, tmp_path: Path) -> None:
    """One half of the run, a checkpoint, the other half in a new store: as without."""

    def part(name: str, rounds: int, resume: Path | None, keep: Path | None) -> bytes:
        workers = [join(name, rank, batches=[6, 4], samples=80, seed=5) for rank in range(2)]
        models = [ArrayModel(zeros()) for _ in workers]

        def body(rank: int) -> None:
            half(workers[rank], models[rank], rounds, resume)

        run_threads(2, body)
        if keep is not None:
            save(workers[0].store.state(), keep, seed=5)
        found = workers[0].store.snapshot().parameters.tobytes()
        for worker in workers:
            worker.close()
        return found

    whole = part("whole", 8, None, None)
    part("half", 4, None, tmp_path)
    assert part("again", 4, tmp_path, None) == whole


def half(worker: Worker, model: ArrayModel, rounds: int, resume: Path | None) -> None:
    worker.attach(model, torch.optim.AdamW(model.parameters(), lr=0.01), resume=resume)
    for x, y in worker.batches((X, Y)):
        numpy_step(model, x, y)
        worker.step()
        if worker.steps == rounds:
            break
    worker.refresh()


def test_what_is_wrong_is_named(shm: Path) -> None:
    for values, words in (
        ({"layer.weights": np.zeros(3)}, "layer.weights"),
        ({"count": np.zeros(3, np.int64)}, "count: found dtype int64"),
        ({"forward": np.zeros(3)}, "forward"),
    ):
        with pytest.raises(InputError, match=words):
            ArrayModel(values)
    model = ArrayModel(zeros())
    right = {"weights": np.zeros((INPUT, OUTPUT)), "bias": np.zeros(OUTPUT)}
    with pytest.raises(InputError, match=r"found weights; expected one for each of weights, bias"):
        model.backward({"weights": right["weights"]})
    with pytest.raises(InputError, match=r"bias: found shape \[3\]; expected \[2\]"):
        model.backward({**right, "bias": np.zeros(3)})


def test_arrays_are_copies(shm: Path) -> None:
    model = ArrayModel(zeros())
    model.arrays()["bias"][:] = 1.0
    assert not model.arrays()["bias"].any()


def test_a_step_without_backward_is_refused(shm: Path) -> None:
    model = ArrayModel(zeros())
    with join("store", 0, batches=[10], samples=10, seed=5) as worker:
        worker.attach(model)
        next(iter(worker.batches((X, Y))))
        with pytest.raises(InputError, match="backward"):
            worker.step()


def test_a_pytree_of_jax_has_the_bits_of_a_torch_worker(shm: Path) -> None:
    pytest.importorskip("jax")
    from pyps.worker.jax import Pytree

    def tree_step(model: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        now = model.tree()
        given = gradients(np.asarray(now["weights"]), np.asarray(now["bias"][0]), x.numpy(), y.numpy())
        model.backward({"weights": given["weights"], "bias": [given["bias"]]})

    def make() -> Any:
        return Pytree({"weights": zeros()["weights"], "bias": [zeros()["bias"]]})

    class Sorted(Linear):
        """JAX sorts a dict's keys."""

        def __init__(self) -> None:
            super().__init__()
            del self.weights
            self.weights = nn.Parameter(torch.zeros(INPUT, OUTPUT))

    for options in ({}, {"codec": "int8"}, {"policy": "hps"}):
        tree = trained(make, tree_step, "tree", **options)
        assert tree == trained(Sorted, torch_step, "module", **options)
    with pytest.raises(InputError, match="gradient"):
        make().backward({"weights": zeros()["weights"]})
