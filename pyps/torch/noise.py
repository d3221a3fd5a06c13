"""GradientNoise: the gradient noise scale, measured while training from what the ranks compute anyway.

    noise = GradientNoise(hook)
    ...
        loss.backward()
        noise.step()
    print(noise.scale)      # samples: a batch far below it learns as fast per sample as a smaller one
    pyps.torch.save("checkpoints", model, ..., noise=noise)     # writes checkpoints/noise.json, too

Each of K gradients is the mean g_k over b_k samples; g is that over all B. With the noise S, the trace of a
sample's covariance, and G the square norm of the true gradient, E|g_k|^2 = G + S / b_k. Each gives an
unbiased pair (Cannikin, Nie et al., MLSys 2024):

    S_k = b_k B (|g_k|^2 - |g|^2) / (B - b_k),    G_k = |g|^2 - S_k / B

Combined with the weights (B - b_k) / (B (K - 1)), S is the pooled variance sum(b_k |g_k - g|^2) / (K - 1):
what is linear in the noise cancels, whatever the batches are. A rank has one g_k; under FSDP2, where each
micro-batch may be reduced at once, one for each of those.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from pyps.errors import InputError
from pyps.formats import GradientNoiseRecord, write_json
from pyps.torch.global_mean import GlobalMean


class GradientNoise:
    """Averages of S and G over the steps.

    hook: the model's, of two ranks or more. memory: the share of the past in each new average. `steps`: how
    many were measured, `batch`: the samples of the first one. Raises InputError for something else than a
    hook, for one rank, and for a memory outside 0 to 1.
    """

    def __init__(self, hook: GlobalMean, memory: float = 0.98) -> None:
        if not isinstance(hook, GlobalMean):
            raise InputError("GradientNoise", "hook", type(hook).__name__, "GlobalMean(model, sampler)")
        ranks = dist.get_world_size(hook.group)
        if ranks < 2:
            raise InputError("GradientNoise", "ranks", str(ranks), "2 or more, to tell noise from signal")
        if not 0 <= memory < 1:
            raise InputError("GradientNoise", "memory", str(memory), "0 or more, below 1")
        self._mean, self._memory = hook, memory
        self._sums = torch.zeros(3, dtype=torch.float64)  # averaged noise, signal, and what they sum up to
        self.steps = self.batch = 0
        hook.watch_gradients()

    @property
    def scale(self) -> float | None:
        """S / G in samples; None before the first step, and while no signal stands out of the noise."""
        noise, signal, total = self._sums.tolist()
        return max(noise, 0.0) / signal if total and signal > 0 else None

    def step(self) -> None:
        """Take the gradients of this round. All ranks call it after backward(), before any clipping."""
        hook = self._mean
        amplified = hook.scaler.get_scale() ** 2 if hook.scaler is not None else 1.0
        own = hook.own_gradients()
        sums = torch.tensor([own.samples, own.squares / amplified, own.gradients], dtype=torch.float64)
        sums = sums.to(hook.device)
        dist.all_reduce(sums, group=hook.group)
        total, squares, count = sums.tolist()
        found = hook.square_norm() / amplified
        if count < 2:
            return  # one gradient alone does not tell noise from signal
        noise = (squares - total * found) / (count - 1)
        new = torch.tensor([noise, found - noise / total, 1.0], dtype=torch.float64)
        if torch.isfinite(new).all():  # else a scaler drops this step
            self._sums = self._memory * self._sums + (1 - self._memory) * new
            self.batch, self.steps = self.batch or round(total), self.steps + 1

    def save(self, path: str | os.PathLike[str]) -> bool:
        """Write what was measured, for `noise` in a cluster file's [goodput]; False while there is nothing.

        Call it on one rank. Raises InputError for a path that cannot be written.
        """
        if not (scale := self.scale):
            return False
        write_json(path, GradientNoiseRecord(noise_scale=scale, base_batch=self.batch, steps=self.steps))
        return True

    def state_dict(self) -> dict[str, Any]:
        """The averages so far, the same on all ranks."""
        return {"sums": self._sums.tolist(), "steps": self.steps, "batch": self.batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from these averages."""
        self._sums = torch.tensor(state["sums"], dtype=torch.float64)
        self.steps, self.batch = state.get("steps", 0), state.get("batch", 0)
