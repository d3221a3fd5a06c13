"""UnevenGroupSampler: whole groups of samples for each rank, such as all completions of a prompt.

    sampler = UnevenGroupSampler(prompts, plan, group=8, passes=4)

Reinforcement learning compares the completions of one prompt. So the unit of the split is a prompt: a round
has B prompts, rank i takes b_i of them, and each index comes `group` times in a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized

from pyps.errors import InputError
from pyps.solver.online.decide import Split
from pyps.torch.sampler import UnevenBatchSampler
from pyps.torch.schedule import PlanLike


class UnevenGroupSampler(UnevenBatchSampler):
    """Lists of dataset indices: b_i different ones for rank i, each `group` times.

    group: how often an index comes in a round.
    passes: how many micro-batches the round is computed in. A rank gets its whole round for each of them, as
        TRL's trainers want it, which generate completions at the first and cut them themselves.
    dataset, plan, rank, seed, shuffle, drop_last: as in UnevenBatchSampler; plan counts different indices.
    Raises InputError as that, and for numbers below 1.
    """

    def __init__(
        self,
        dataset: Sized | int,
        plan: PlanLike,
        rank: int | None = None,
        *,
        group: int,
        passes: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        for name, number in (("group", group), ("passes", passes)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise InputError("UnevenGroupSampler", name, repr(number), "a whole number from 1")
        self.group, self._round_passes = group, passes
        super().__init__(
            dataset,
            plan,
            rank,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            accumulate=least_groups(group, passes),
        )

    @property
    def accumulation(self) -> int:
        return self._round_passes

    @property
    def accumulations(self) -> Split:
        return (self._round_passes,) * len(self.split)

    @property
    def least(self) -> int:
        return least_groups(self.group, self._round_passes)

    def _cut(self, part: Sequence[int]) -> Iterator[list[int]]:
        whole = [int(k) for k in part for _ in range(self.group)]
        for _ in range(self._round_passes):
            yield whole


def least_groups(group: int, passes: int) -> int:
    """The fewest groups that have a sample for each pass."""
    return -(-passes // group)
