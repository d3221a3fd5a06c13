"""AdaptiveBatch: the global batch grows with the noise of the gradients, and the learning rate with it.

    noise, balance = GradientNoise(mean), Rebalancer(sampler, mean)
    adaptive = AdaptiveBatch(noise, balance, optimizer, max_batch=2048)
    for epoch in ...:
        for ...:
            mean.backward(loss); noise.step(); optimizer.step(); balance.step()
        adaptive.epoch()

At the end of an epoch all ranks know the same noise scale, and tell each other what a step costs their
devices now. The next epoch has the batch of the highest goodput: throughput times what a sample contributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import msgspec
import torch
import torch.distributed as dist

from pyps.errors import InputError
from pyps.formats.files import learnt
from pyps.solver.online.global_batch import BoundedCost, Rule, learning_rate_factor, next_split
from pyps.solver.systems.goodput import StatisticalEfficiency
from pyps.torch.noise import GradientNoise
from pyps.torch.rebalance import Rebalancer
from pyps.torch.sampler import UnevenBatchSampler
from pyps.torch.schedule import proportional_split

RULES = get_args(Rule)


class _State(msgspec.Struct, frozen=True):
    """Hold what a run goes on with: the split, the batch at first, and the factor of the learning rate, which
    is that of the next epoch's split, if it is known.
    """

    split: list[int]
    base_batch: int
    factor: float
    next_split: list[int] | None = None


class AdaptiveBatch:
    """Chooses the global batch of each epoch. Every rank makes one, with the same options.

    noise, balance, optimizer: those of the run; its learning rate is that of the sampler's batch.
    max_batch: the largest global batch.
    rule: how the learning rate follows: adascale (for SGD), square-root (for Adam), linear or constant.
    least_efficiency: how much a sample has to contribute at least, relative to one in the first batch; 0.95
        bounds the samples that larger batches cost to 5 %.
    overhead_seconds: of a round beyond the slowest rank's own step, such as reducing gradients.
    schedulers: whose base learning rates follow too; without this, those that compute them anew forget it.

    `history` has the global batch of each epoch so far. Raises InputError for another rule, or a max_batch
    below the batch.
    """

    def __init__(
        self,
        noise: GradientNoise,
        balance: Rebalancer,
        optimizer: torch.optim.Optimizer,
        *,
        max_batch: int,
        rule: Rule = "adascale",
        least_efficiency: float = 0.0,
        overhead_seconds: float = 0.0,
        schedulers: tuple[Any, ...] = (),
    ) -> None:
        if rule not in RULES:
            raise InputError("AdaptiveBatch", "rule", repr(rule), f"one of {', '.join(RULES)}")
        sampler = balance.sampler
        if not isinstance(sampler, UnevenBatchSampler) or sampler.lengths is not None:
            expected = "an UnevenBatchSampler without lengths: other batches stay"
            raise InputError("AdaptiveBatch", "sampler", type(sampler).__name__, expected)
        if max_batch < sampler.global_batch:
            expected = f"at least the global batch, {sampler.global_batch}"
            raise InputError("AdaptiveBatch", "max_batch", str(max_batch), expected)
        self.base_batch, self.factor = sampler.global_batch, 1.0
        self.history = [sampler.global_batch]
        self._sampler, self._noise, self._balance, self._optimizer = sampler, noise, balance, optimizer
        if sampler.drop_last:  # a larger batch than the data set would leave epochs without a round
            max_batch = min(max_batch, sampler.length)
        self._most, self._rule, self._schedulers = max_batch, rule, schedulers
        self._least_efficiency, self._overhead_seconds = least_efficiency, overhead_seconds

    def epoch(self) -> int:
        """Call at the end of an epoch, before set_epoch(), on all ranks: the next epoch's global batch."""
        scale = self._noise.scale
        if scale is not None:
            split = next_split(
                self._sampler.latest_split,
                self._devices(),
                StatisticalEfficiency(scale, self.base_batch),
                self._most,
                self._overhead_seconds,
                self._least_efficiency,
            )
            if sum(split) != self._sampler.global_batch:
                self._sampler.resize(split)
            self._scale_rates(sum(split), scale)
            self.history.append(sum(split))
        return self._sampler.next_batch

    def _devices(self) -> list[BoundedCost]:
        """Return those of all ranks with samples of their own, in each group of such ranks the same."""
        mean = self._balance.mean
        every: list[Any] = [None] * len(self._sampler.split)
        dist.all_gather_object(every, self._balance.device, group=mean.group)
        if mean.peers is not None:
            dist.broadcast_object_list(every, src=dist.get_global_rank(mean.peers, 0), group=mean.peers)
        return every

    def state_dict(self) -> dict[str, Any]:
        """The splits and the factor of the learning rate; the optimizer's state has that rate."""
        split, after = self._sampler.latest_split, self._sampler.next_split
        state = _State(list(split), self.base_batch, self.factor, None if after is None else list(after))
        found: dict[str, Any] = msgspec.to_builtins(state)
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with that; other ranks share the batches in proportion to the sampler's split. Raises
        InputError for another kind of state.
        """
        try:
            known = msgspec.convert(state, learnt(_State))
        except msgspec.ValidationError as error:
            raise InputError("AdaptiveBatch", "state", str(error), "that of an AdaptiveBatch") from None
        self.base_batch, self.factor = known.base_batch, known.factor
        self._sampler.resize(self._of_these_ranks(known.split), at_once=True)
        if known.next_split is not None:
            self._sampler.resize(self._of_these_ranks(known.next_split))

    def _of_these_ranks(self, split: list[int]) -> Sequence[int]:
        """The same batch for as many ranks as there are now."""
        own = self._sampler.split
        if len(split) == len(own):
            return split
        return proportional_split(sum(split), own, self._sampler.accumulations)

    def _scale_rates(self, batch: int, scale: float) -> None:
        factor = learning_rate_factor(self._rule, self.base_batch, batch, scale)
        ratio, self.factor = factor / self.factor, factor
        for group in self._optimizer.param_groups:
            group["lr"] *= ratio
            if "initial_lr" in group:
                group["initial_lr"] *= ratio
        for scheduler in self._schedulers:
            scheduler.base_lrs = [rate * ratio for rate in scheduler.base_lrs]
