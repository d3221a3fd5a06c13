"""The moments of a worker's own optimizers, averaged wherever its local steps meet those of others.

The store holds them as averaged tensors (pyps.worker.averages) that go the whole way: after a round each
worker has the mean of all workers' moments, weighted by samples. Adam's counts of steps are averaged with
them, for workers take unlike numbers of steps: a moment and the correction of its bias stay of one age.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import nn

from pyps.checkpoint.local_states import moment_name
from pyps.errors import InputError
from pyps.worker.attach import Attachment
from pyps.worker.averages import BufferPace
from pyps.worker.settings import Settings

STEP = "step"
KEYS: Final[dict[type[torch.optim.Optimizer], tuple[str, ...]]] = {
    torch.optim.SGD: ("momentum_buffer",),
    torch.optim.Adam: (STEP, "exp_avg", "exp_avg_sq"),
    torch.optim.AdamW: (STEP, "exp_avg", "exp_avg_sq"),
}  # all that the optimizer's state of a parameter has
if hasattr(torch.optim, "Muon"):  # torch 2.9 brought it
    KEYS[torch.optim.Muon] = ("momentum_buffer",)


@dataclass(frozen=True)
class Moment:
    """One tensor of an optimizer's state of one parameter; the optimizer may put another there."""

    name: str
    optimizer: torch.optim.Optimizer
    parameter: nn.Parameter
    key: str
    pace: BufferPace = field(default=BufferPace(1.0), init=False)
    module: Any = field(default=None, init=False)
    counts: bool = field(default=False, init=False)

    @property
    def value(self) -> torch.Tensor:
        found: torch.Tensor = self.optimizer.state[self.parameter][self.key]
        return found


def with_moments(
    attachment: Attachment, optimizers: Sequence[torch.optim.Optimizer], settings: Settings
) -> Attachment:
    """The attachment, with the moments of the optimizers of local steps behind its buffers.

    Raises InputError without local steps, in a pipeline, and for an optimizer whose state is not known.
    """
    if not settings.local_steps or settings.depth > 1:
        where = "in a pipeline" if settings.local_steps else "without local steps"
        raise InputError("attach", "average_moments", f"True {where}", "local steps, one push at a time")
    moments = tuple(_moments(attachment, optimizers))
    if not moments:
        raise InputError(
            "attach", "average_moments", "optimizers without moments", "momentum above 0, or Adam"
        )
    return replace(attachment, buffers=(*attachment.buffers, moments))


def _moments(attachment: Attachment, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Moment]:
    names = {id(entry.parameter): entry.name for entry in attachment.entries}
    for optimizer in optimizers:
        kind = type(optimizer)
        for group in optimizer.param_groups:
            if kind not in KEYS or group.get("amsgrad"):
                found = f"{kind.__name__}{' with amsgrad' * (kind in KEYS)}"
                raise InputError("attach", "average_moments", found, "SGD, Adam, AdamW or Muon")
            for p in group["params"]:
                if id(p) in names and group.get("momentum", 1.0) > 0.0:
                    _begin(optimizer, group, p)
                    for key in KEYS[kind]:
                        yield Moment(moment_name(names[id(p)], key), optimizer, p, key)


def _begin(optimizer: torch.optim.Optimizer, group: dict[str, Any], p: nn.Parameter) -> None:
    """Give the optimizer the state that it would begin its first step with."""
    state = optimizer.state[p]
    if state:
        return
    on_device = group.get("capturable") or group.get("fused")
    for key in KEYS[type(optimizer)]:
        if key == STEP:
            state[key] = torch.zeros((), dtype=torch.float32, device=p.device if on_device else None)
        else:
            state[key] = torch.zeros_like(p, memory_format=torch.preserve_format)
