"""Define what is trained, as one value: TrainingTask.

A task is everything that a training step needs except the device and the optimizer's state: the network, a
function that makes a batch of any size, and the loss. The profiler times it; training scripts can use the
same networks. No built-in network has BatchNorm: its statistics depend on the local batch, so uneven batches
would change what is trained. The modules of this package import torch inside functions only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyps.errors import needed

if TYPE_CHECKING:
    import torch

MakeBatch = Callable[..., tuple[Any, Any]]


@dataclass(frozen=True)
class TrainingTask:
    """One training step's ingredients.

    model: the network, on the CPU, in fp32; the caller moves it to a device.
    make_batch: batch -> (inputs, targets), each a tensor or a tuple, list or dict of tensors on the CPU
        whose first dimension is `batch`; called outside the timed step. (batch, length) for lengths.
    loss: (outputs, targets) -> a scalar tensor, the *mean* over the batch's samples.
    optimizer: parameters -> torch optimizer; SGD with momentum 0.9 by default.
    """

    model: torch.nn.Module
    make_batch: MakeBatch
    loss: Callable[[Any, Any], torch.Tensor]
    optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer] | None = None

    def make_optimizer(self) -> torch.optim.Optimizer:
        """The task's optimizer over the parameters that require a gradient."""
        import torch

        trained = [p for p in self.model.parameters() if p.requires_grad]
        if self.optimizer is not None:
            return self.optimizer(trained)
        return torch.optim.SGD(trained, lr=0.01, momentum=0.9)


def require_torch() -> None:
    """Raise PypsError, which names the package to install, if torch is missing."""
    needed("torch", "torch")


def random_images(shape: tuple[int, ...], classes: int) -> MakeBatch:
    """Makes uniform random images in [0, 1], float32 (batch, *shape), and random labels, int64 (batch,)."""
    import torch

    def make_batch(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        draws = torch.Generator().manual_seed(batch)
        images = torch.rand((batch, *shape), generator=draws)
        return images, torch.randint(classes, (batch,), generator=draws)

    return make_batch
