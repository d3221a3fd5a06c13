"""Trainers as trainer_cells tries them: what each makes of the model, optimizer and loader of a script."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from trainer_checks import Model, fsdp_model, whole_gradient

from pyps.torch import GlobalMean, UnevenBatchSampler

SPLIT, SAMPLES = [8, 4], 30
Loss = Callable[..., torch.Tensor]  # of (model, its own module, inputs, targets)


def dataset(samples: int = SAMPLES) -> TensorDataset:
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 6, generator=draws, dtype=torch.float64)
    y = torch.randn(samples, 3, generator=draws, dtype=torch.float64)
    return TensorDataset(x, y + torch.linspace(-2, 2, samples)[:, None])


class Plain:
    """A hand-written loop on DDP. parts: the micro-batches of a round."""

    def __init__(self, parts: int = 1, reduction: Any = "mean", plan: Any = SPLIT) -> None:
        self.parts, self._reduction, self._plan = parts, reduction, plan
        self.models: list[Any] = []
        self.sampler: Any = None
        self._mean: GlobalMean | None = None

    @property
    def mean(self) -> GlobalMean:
        if self._mean is None:
            self._mean = GlobalMean(self.models, self.sampler, reduction=self._reduction)
        return self._mean

    def wrap(self, model: nn.Module) -> Any:
        return DistributedDataParallel(model)

    def prepare(self, *models: nn.Module) -> list[Any]:
        self.models += [self.wrap(model) for model in models]
        return self.models[-len(models) :]

    def optimizer(self, optimizer: Any) -> Any:
        return optimizer

    def loader(self, **options: Any) -> Any:
        data = options.get("dataset", dataset())
        if sampler := options.get("sampler"):
            return DataLoader(data, batch_size=options["batch_size"] // 2, sampler=sampler)
        last, plan = options.get("drop_last", False), [self.parts * n for n in self._plan]
        self.sampler = UnevenBatchSampler(data, plan, accumulate=self.parts, drop_last=last)
        return DataLoader(data, batch_sampler=self.sampler)

    def backward(self, loss: torch.Tensor) -> None:
        self.mean.backward(loss)

    def ended(self) -> None:
        self.mean.end_step()

    def micro_batch(self, model: Any, number: int) -> AbstractContextManager[Any]:
        return nullcontext() if number % self.parts == 0 else self.no_sync(model)

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        return model.no_sync()  # type: ignore[no-any-return]

    def clip(self, model: Any, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


class Sharded(Plain):
    """The same on FSDP2."""

    def wrap(self, model: nn.Module) -> Any:
        return fsdp_model(model)

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)


class Accelerated:
    """A script for Accelerate; parts: gradient_accumulation_steps."""

    def __init__(self, parts: int = 1, **options: Any) -> None:
        from accelerate.state import AcceleratorState, GradientState

        from pyps.torch.accelerate import UnevenAccelerator

        AcceleratorState._reset_state()
        GradientState._reset_state()
        options = {"plan": [parts * n for n in SPLIT], "rebalance": False, **options}
        self.parts = parts
        self.accelerator = UnevenAccelerator(cpu=True, gradient_accumulation_steps=parts, **options)
        self.run = self.accelerator.run
        self.backward = self.accelerator.backward

    @property
    def sampler(self) -> Any:
        return self.run.sampler

    @property
    def mean(self) -> Any:
        return self.run.mean

    def ended(self) -> None:
        """The optimizer has told."""

    def prepare(self, *models: nn.Module) -> list[Any]:
        return [self.accelerator.prepare(model) for model in models]

    def optimizer(self, optimizer: Any) -> Any:
        return self.accelerator.prepare(optimizer)

    def loader(self, **options: Any) -> Any:
        options = {"batch_size": sum(SPLIT), "shuffle": True, **options}
        return self.accelerator.prepare(DataLoader(options.pop("dataset", dataset()), **options))

    def micro_batch(self, model: Any, number: int) -> AbstractContextManager[Any]:
        found: AbstractContextManager[Any] = self.accelerator.accumulate(model)
        return found

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        found: AbstractContextManager[Any] = self.accelerator.no_sync(model)
        return found

    def clip(self, model: Any, optimizer: Any) -> None:
        self.accelerator.clip_grad_norm_(model.parameters(), 0.1)


class Fabric:
    """A script for Fabric."""

    def __init__(self, parts: int = 1, **options: Any) -> None:
        import lightning

        from pyps.torch.lightning import UnevenFabricStrategy

        options = {"plan": [parts * n for n in SPLIT], "rebalance": False, **options}
        self.parts = parts
        strategy = UnevenFabricStrategy(process_group_backend="gloo", accumulate=parts, **options)
        self.fabric = lightning.Fabric(strategy=strategy, accelerator="cpu", devices=2)
        self.fabric.launch()
        self.run, self.backward = strategy.run, self.fabric.backward

    sampler, mean, ended = Accelerated.sampler, Accelerated.mean, Accelerated.ended

    def prepare(self, *models: nn.Module) -> list[Any]:
        return [self.fabric.setup(model) for model in models]

    def optimizer(self, optimizer: Any) -> Any:
        return self.fabric.setup_optimizers(optimizer)

    def loader(self, **options: Any) -> Any:
        options = {"batch_size": sum(SPLIT) // 2, "shuffle": True, **options}
        return self.fabric.setup_dataloaders(DataLoader(options.pop("dataset", dataset()), **options))

    def micro_batch(self, model: Any, number: int) -> AbstractContextManager[Any]:
        found: AbstractContextManager[Any] = (
            nullcontext() if number % self.parts == 0 else self.no_sync(model)
        )
        return found

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        found: AbstractContextManager[Any] = self.fabric.no_backward_sync(model)
        return found

    def clip(self, model: Any, optimizer: Any) -> None:
        self.fabric.clip_gradients(model, optimizer, max_norm=0.1)


Kit = Callable[..., Any]  # one of these


class Script:
    """A model alone, and under the library with its optimizer and loader."""

    def __init__(self, kit: Any, model: Callable[[], nn.Module] = Model, **loading: Any) -> None:
        torch.manual_seed(0)
        self.kit, self.alone = kit, model()
        inner = copy.deepcopy(self.alone)
        (self.model,) = kit.prepare(inner)
        self.inner: Any = inner
        self.optimizer = kit.optimizer(torch.optim.SGD(inner.parameters(), lr=0.01))
        self.loader = kit.loader(**loading)
        if isinstance(kit, Plain):
            assert kit.mean is not None  # made before the loop, as in scripts
        self.worst = 0.0

    def rounds(self) -> Iterator[tuple[list[Any], list[torch.Tensor]]]:
        """Each round's micro-batches, and the samples of all ranks."""
        batches: list[Any] = []
        for number, batch in enumerate(self.loader, 1):
            batches.append(batch)
            if number % self.kit.parts == 0:
                yield batches, whole(batches)
                batches = []

    def step(self) -> None:
        """The end of a round."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.kit.ended()

    def follow(self) -> None:
        """The model alone gets the parameters of the trained one."""
        follow(self.alone, self.inner)

    def compare(self, loss: Loss, samples: list[torch.Tensor]) -> None:
        self.follow()
        loss(self.alone, self.alone, *samples).backward()  # type: ignore[no-untyped-call]
        self.worst = max(self.worst, error_of([self.inner], [self.alone]))


def follow(alone: nn.Module, trained: nn.Module) -> None:
    """Parameters go over, whole ones from shards; gradients are zeroed."""
    for mine, other in zip(alone.parameters(), trained.parameters(), strict=True):
        mine.data.copy_(getattr(other, "full_tensor", lambda other=other: other)().detach())
    alone.zero_grad()


def whole(batches: list[Any]) -> list[torch.Tensor]:
    """The samples of these micro-batches, of all ranks."""
    every: list[Any] = [None, None]
    dist.all_gather_object(every, [list(batch) for batch in batches])
    return [torch.cat(one) for one in zip(*(batch for own in every for batch in own), strict=True)]


def error_of(found: list[Any], right: list[Any]) -> float:
    ends = [torch.cat([whole_gradient(model) for model in models]) for models in (found, right)]
    return float((ends[0] - ends[1]).norm() / ends[1].norm())
