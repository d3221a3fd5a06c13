"""UnevenCostSampler: as many samples for each rank as planned, chosen so that ranks end a round together.

    cost = LengthCost.fitted(tokens=[128, 1024, 4096], seconds=[0.011, 0.052, 0.31])
    sampler = UnevenCostSampler(dataset, "plan.json", costs=cost.seconds(lengths))

Within each round the samples are shared among ranks by their cost. A round has the samples, and a rank the
number of them, that UnevenBatchSampler gives: gradients, weights and memory are the same.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import numpy as np
import numpy.typing as npt

from pyps.errors import InputError
from pyps.solver.lengths import shares_by_cost
from pyps.torch.sampler import UnevenBatchSampler
from pyps.torch.schedule import PlanLike, proportional_split, round_sizes


class UnevenCostSampler(UnevenBatchSampler):
    """UnevenBatchSampler for samples of unlike cost, such as sequences of unlike length.

    costs: of each sample of the data set, in any unit; the same on all ranks. The other arguments are
    UnevenBatchSampler's. Shares follow the split that is in force when a pass begins. Raises InputError for
    costs that are not as many as the samples, not finite, or negative.
    """

    def __init__(
        self,
        dataset: Sized | int,
        plan: PlanLike,
        rank: int | None = None,
        *,
        costs: npt.ArrayLike,
        **more: Any,
    ) -> None:
        super().__init__(dataset, plan, rank, **more)
        self.costs = np.asarray(costs, np.float64)
        if self.costs.shape != (self.length,):
            expected = f"one for each of {self.length} samples"
            raise InputError("sampler", "costs", f"{self.costs.size} numbers", expected)
        if not (np.isfinite(self.costs) & (self.costs >= 0)).all():
            raise InputError(
                "sampler", "costs", "one that is negative or not finite", "finite numbers from 0"
            )

    def _order(self, *epoch: int) -> Any:
        order = np.array(super()._order(*epoch))
        first = self.position if epoch in ((), (self.epoch,)) else 0
        split, least = self.split, self._min_batches
        for size in round_sizes(self.length - first, split, least, self.drop_last):
            part = order[first : first + size]
            counts = proportional_split(size, split, least)
            shares = shares_by_cost(self.costs[part], [float(batch) for batch in split], counts)
            order[first : first + size] = part[np.concatenate(shares).astype(np.int64)]
            first += size
        return order
