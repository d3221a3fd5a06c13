"""GradientNoise: the gradient noise scale, measured while training from what the ranks compute anyway.

    noise = GradientNoise(mean)
    ...
        mean.backward(loss)
        noise.step()
    print(noise.scale)      # samples: a batch far below it learns as fast per sample as a smaller one
    pyps.torch.save("checkpoints", model, ..., noise=noise)     # writes checkpoints/noise.json, too

Each of K gradients is the mean g_k over b_k samples; g is that over all B. With the noise S, the trace of a
sample's covariance, and G the square norm of the true gradient, E|g_k|^2 = G + S / b_k. Each gives an
unbiased pair (Cannikin, Nie et al., MLSys 2024):

    S_k = b_k B (|g_k|^2 - |g|^2) / (B - b_k),    G_k = |g|^2 - S_k / B

Combined with the weights (B - b_k) / (B (K - 1)), S is the pooled variance sum(b_k |g_k - g|^2) / (K - 1):
what is linear in the noise cancels, whatever the batches are. b_k / B is the rank's share of what the loss is
a mean over, B the samples of the round.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from pyps.errors import InputError
from pyps.formats import GradientNoiseRecord, write_json
from pyps.torch.global_mean import GlobalMean
from pyps.torch.peers import all_copies, own_copies


class GradientNoise:
    """Averages of S and G over the steps.

    mean: the GlobalMean, of two ranks or more, with a sampler. memory: the share of the past in each new
    average. `steps`: how many were measured, `batch`: the samples of the first one. Raises InputError for
    something else than a GlobalMean, one without a sampler, one rank, and a memory outside 0 to 1.
    """

    def __init__(self, mean: GlobalMean, memory: float = 0.98) -> None:
        if not isinstance(mean, GlobalMean) or mean.sampler is None:
            found = type(mean).__name__ if not isinstance(mean, GlobalMean) else "one without a sampler"
            raise InputError("GradientNoise", "mean", found, "GlobalMean(model, sampler)")
        if mean.ranks < 2:
            expected = "2 or more, to tell noise from signal"
            raise InputError("GradientNoise", "ranks", str(mean.ranks), expected)
        if not 0 <= memory < 1:
            raise InputError("GradientNoise", "memory", str(memory), "0 or more, below 1")
        self._mean, self._sampler, self._memory = mean, mean.sampler, memory
        self._sums = torch.zeros(3, dtype=torch.float64)  # averaged noise, signal, and what they sum up to
        self.steps = self.batch = 0
        self._own = _OwnSquares(mean)

    @property
    def scale(self) -> float | None:
        """S / G in samples; None before the first step, and while no signal stands out of the noise."""
        noise, signal, total = self._sums.tolist()
        return max(noise, 0.0) / signal if total and signal > 0 else None

    def step(self) -> None:
        """Take the gradients of this round. All ranks call it after backward(), before any clipping.

        Raises InputError after several backward passes that were reduced: their gradients are added up.
        """
        mean = self._mean
        if mean.calls != 1:
            passes = f"{mean.calls} backward passes that were reduced"
            raise InputError("GradientNoise", "step", passes, "one, and step() before the training step ends")
        known = self._sampler.round_samples(self._sampler.trained)
        size, own = known or (self._sampler.global_batch, self._sampler.batch)
        share = own / size if mean.share is None else float(mean.share)
        amplified = mean.scaler.get_scale() ** 2 if mean.scaler is not None else 1.0
        # What entered was N b_k / B times this rank's gradient, before `late`.
        square = float(self._own.take()) * float(mean.late) ** 2 / amplified
        sums = torch.tensor(
            [square / (mean.ranks**2 * share), 1.0] if share else [0.0, 0.0], dtype=torch.float64
        )
        sums = sums.to(mean.device)
        dist.all_reduce(sums, group=mean.group)
        squares, count = sums.tolist()
        whole = square_norm(mean) / amplified
        if count < 2:
            return  # one gradient alone does not tell noise from signal
        noise = (squares - whole) * size / (count - 1)
        new = torch.tensor([noise, whole - noise / size, 1.0], dtype=torch.float64)
        if torch.isfinite(new).all():  # else a scaler drops this step
            self._sums = self._memory * self._sums + (1 - self._memory) * new
            self.batch, self.steps = self.batch or size, self.steps + 1

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


class _OwnSquares:
    """The square norm of this rank's gradient, by parameter, as of its latest arrival."""

    def __init__(self, mean: GlobalMean) -> None:
        self._mean = mean
        self._squares = {
            id(p): torch.zeros((), dtype=torch.float64) for one in mean.models for p in one.reduced()
        }
        for one in mean.models:
            one.watch_own(self)

    def __call__(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if id(parameter) in self._squares:
            self._squares[id(parameter)] = _square(gradient) / own_copies(parameter, self._mean.peers)

    def take(self) -> torch.Tensor:
        """The sum over all parameters, and over the ranks that have other parts of them; then 0 again."""
        total = torch.stack([square.to(self._mean.device) for square in self._squares.values()]).sum()
        if self._mean.peers is not None:
            dist.all_reduce(total, group=self._mean.peers)
        self._squares = {key: torch.zeros((), dtype=torch.float64) for key in self._squares}
        return total


def square_norm(mean: GlobalMean) -> float:
    """The square norm of the reduced gradient, over all of the models' parts; all ranks call this."""
    ranks = mean.ranks * (dist.get_world_size(mean.peers) if mean.peers is not None else 1)
    total = torch.zeros((), dtype=torch.float64, device=mean.device)
    for parameter in mean.parameters():
        if parameter.grad is not None:
            total += _square(parameter.grad) / all_copies(parameter, ranks)
    dist.all_reduce(total, group=mean.group)
    if mean.peers is not None:
        dist.all_reduce(total, group=mean.peers)
    return float(total)


def _square(gradient: torch.Tensor) -> torch.Tensor:
    """The square norm of a gradient, of complex numbers too; of a sharded one, of this rank's part."""
    own = getattr(gradient.detach(), "_local_tensor", gradient.detach())
    own = own.coalesce().values() if own.is_sparse else own
    real = torch.view_as_real(own.resolve_conj()) if own.is_complex() else own
    return real.double().square().sum()
