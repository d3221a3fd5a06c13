"""GradientNoise: the gradient noise scale, measured while training from what the ranks compute anyway.

    noise = GradientNoise(hook)
    ...
        loss.backward()
        noise.step()
    print(noise.scale)      # samples: a batch far below it learns as fast per sample as a smaller one

Rank i has the mean gradient g_i of b_i samples; g is that of all B. With the noise S, the trace of a sample's
covariance, and G the square norm of the true gradient, E|g_i|^2 = G + S / b_i. Each rank gives an unbiased
pair (Cannikin, Nie et al., MLSys 2024):

    S_i = b_i B (|g_i|^2 - |g|^2) / (B - b_i),    G_i = |g|^2 - S_i / B

Combined with the weights (B - b_i) / (B (N - 1)), S is the pooled variance sum(b_i |g_i - g|^2) / (N - 1):
what is linear in the noise cancels, whatever the batches are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from pyps.errors import InputError
from pyps.torch.ddp_hook import DDPHook
from pyps.torch.weighted import WeightedHook


class GradientNoise:
    """Averages of S and G over the steps.

    hook: a DDP model's hook, of two ranks or more. memory: the share of the past in each new average.
    Raises InputError for another hook, for one rank, and for a memory outside 0 to 1.
    """

    def __init__(self, hook: WeightedHook, memory: float = 0.98) -> None:
        if not isinstance(hook, DDPHook):
            raise InputError(
                "GradientNoise", "hook", type(hook).__name__, "that of a DistributedDataParallel"
            )
        self._ranks, self._rank = dist.get_world_size(hook.group), dist.get_rank(hook.group)
        if self._ranks < 2:
            raise InputError(
                "GradientNoise", "ranks", str(self._ranks), "2 or more, to tell noise from signal"
            )
        if not 0 <= memory < 1:
            raise InputError("GradientNoise", "memory", str(memory), "0 or more, below 1")
        self._hook, self._memory = hook, memory
        self._square: Any = 0.0  # of this rank's gradient, in the hook's unit
        self._sums = torch.zeros(3, dtype=torch.float64)  # averaged noise, signal, and what they sum up to
        hook.on_bucket.append(self._bucket)

    @property
    def scale(self) -> float | None:
        """S / G in samples; None before the first step, and while no signal stands out of the noise."""
        noise, signal, total = self._sums.tolist()
        return max(noise, 0.0) / signal if total and signal > 0 else None

    def step(self) -> None:
        """Take the gradients of this round. All ranks call it after backward(), before any clipping."""
        own, unit = (float(x) for x in self._hook.round_weights)
        amplified = self._hook.scaler.get_scale() if self._hook.scaler is not None else 1.0
        ratio = (unit / own if own else 0.0) / amplified
        table = torch.zeros(self._ranks, 2, dtype=torch.float64)
        table[self._rank] = torch.tensor([own, float(self._square) * ratio**2], dtype=torch.float64)
        self._square = 0.0
        table = table.to(self._hook.device)
        dist.all_reduce(table, group=self._hook.group)
        batches, squares = table.cpu().unbind(1)
        gradients = [p.grad for p in self._hook.parameters() if p.grad is not None]
        found = float(sum(g.double().square().sum() for g in gradients)) / amplified**2
        total = batches.sum()
        noise = float(((batches * squares).sum() - total * found) / (self._ranks - 1))
        new = torch.tensor([noise, found - noise / float(total), 1.0], dtype=torch.float64)
        if torch.isfinite(new).all():  # else a scaler drops this step
            self._sums = self._memory * self._sums + (1 - self._memory) * new

    def state_dict(self) -> dict[str, Any]:
        """The averages so far, the same on all ranks."""
        return {"sums": self._sums.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from these averages."""
        self._sums = torch.tensor(state["sums"], dtype=torch.float64)

    def _bucket(self, buffer: torch.Tensor) -> None:
        self._square = self._square + buffer.double().square().sum()
