"""Define what the tests of the adapters train: a small fp64 model on numbered rows, checked at each step.

With PYPS_TEST_DEVICE=cuda the ranks share the first GPU, over NCCL: for that each calls itself a host.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from device import DEVICE
from torch import nn
from torch.utils.data import TensorDataset

from pyps.solver import Line

SAMPLES = 160
SPEEDS = (1.0, 3.0)  # seconds of the emulated devices, relative
ON_CPU = DEVICE.type == "cpu"
if not ON_CPU:  # before a library reads them
    rank = os.environ["RANK"]
    os.environ |= {"LOCAL_RANK": "0", "NODE_RANK": rank}
    os.environ |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo"}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def data(samples: int = SAMPLES) -> TensorDataset:
    """Inputs, targets, and each sample's number."""
    draws = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 6, generator=draws, dtype=torch.float64)
    targets = torch.randn(samples, 3, generator=draws, dtype=torch.float64)
    targets += torch.linspace(-2, 2, samples)[:, None]
    return TensorDataset(inputs, targets, torch.arange(samples))


def on_device(batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [values.to(DEVICE) for values in batch]


def loss_of(found: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(found, targets)


def pace(rank: int) -> Line:
    """The seconds of a step on an emulated device: in proportion, as is assumed without a profile."""
    return Line(0.0, 0.001 * SPEEDS[rank])


class EmulatedTimer:
    """A ComputeTimer of steps that take what this rank's device takes."""

    def __init__(self, rank: int) -> None:
        self.cost = pace(rank)
        self._finished: list[tuple[tuple[int, float] | None, float]] = []

    def start(self) -> None:
        pass

    def finish(self, trained: tuple[int, float] | None) -> None:
        self._finished.append((trained, self.cost.seconds(trained[0] if trained else 0)))

    def finished(self) -> list[tuple[tuple[int, float] | None, float]]:
        finished, self._finished = self._finished, []
        return finished


class Checks:
    """Hold what the ranks of a run did: by optimizer step the gradient's error, the samples, the learning
    rate.
    """

    def __init__(self, trained: nn.Module) -> None:
        self.model = trained
        self.alone = copy.deepcopy(trained).to(DEVICE)
        self.errors: list[float] = []
        self.rates: list[float] = []
        self.rounds: list[list[int]] = []  # samples of all ranks
        self.seconds: list[float] = []  # of the slowest rank, and
        self.even_seconds: list[float] = []  # if all had equal batches
        self.whole: Callable[..., torch.Tensor] = lambda module, inputs, targets: module(inputs)
        self._own: list[int] = []

    def saw(self, numbers: torch.Tensor) -> None:
        """A micro-batch of this rank."""
        self._own += numbers.tolist()

    def before_step(self, rate: float) -> None:
        """The gradient is complete: compare it with that of one process that has all samples of the round."""
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, self._own)
        samples = [number for own in every for number in own]
        inputs, targets, _ = on_device(data()[samples])
        self.alone.load_state_dict(self.model.state_dict())
        self.alone.zero_grad()
        loss_of(self.whole(self.alone, inputs, targets), targets).backward()
        found, right = (
            torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
            for module in (self.model, self.alone)
        )
        self.errors.append(float((found - right).norm() / right.norm()))
        self.rates.append(rate)
        self.rounds.append(samples)
        self.seconds.append(max(pace(k).seconds(len(own)) for k, own in enumerate(every)))
        even = len(samples) / len(every)
        self.even_seconds.append(
            max(pace(k).fixed_seconds + pace(k).per_sample_seconds * even for k in range(len(every)))
        )
        self._own = []


def state_of(trained: nn.Module) -> list[torch.Tensor]:
    return [value.clone() for value in trained.state_dict().values()]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


class Planted:
    """In a pickle: makes a folder when it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.makedirs, (str(self.folder), 0o777, True)


def planted_runs(file: Path, resume: Callable[[], Any]) -> str:
    """Return what a resume says that finds a pickle with code in place of a file; fails if that code ran."""
    dist.barrier()
    mark = file.parent.parent / f"{file.name}.ran"
    if dist.get_rank() == 0:
        torch.save({"state": Planted(mark)}, file)
    dist.barrier()
    said = "it resumed"
    try:
        resume()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    dist.barrier()
    assert not mark.exists(), f"{file.name}: a pickle's code ran"
    if dist.get_rank() == 0:
        file.unlink()
    return said


class Model(nn.Module):
    """Do as model() does, with ways around its forward()."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.layers[:2](x)
        self.balance = hidden.square().mean()
        return self.layers[2](hidden)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def fsdp_model(model: nn.Module) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    for layer in model.modules():
        tied = any(p is q for p in layer.parameters() for q in _shared(model))
        if isinstance(layer, nn.Linear) and layer is not model and not tied:
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _shared(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that several modules have."""
    every = [p for module in model.modules() for p in module.parameters(recurse=False)]
    return [p for k, p in enumerate(every) if any(p is q for q in every[:k])]


def whole_gradient(model: nn.Module) -> torch.Tensor:
    """The gradient, of all shards."""
    gradients: list[Any] = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([(g.full_tensor() if hasattr(g, "full_tensor") else g).flatten() for g in gradients])
