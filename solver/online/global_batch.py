"""The global batch while training: larger as gradients become noisier, and the learning rate that fits it.

A batch of B learns as much as B (phi + m) / (phi + B) samples in batches of m, with the noise scale phi in
samples (pyps.solver.systems.goodput). The noise scale grows while a model learns, and with it the batch that
learns fastest: a larger one takes a device less time a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, takewhile
from math import sqrt
from typing import Literal

from pyps.errors import Infeasible
from pyps.solver.costs import Cost
from pyps.solver.online.decide import Bounds, Split, best_split, round_seconds
from pyps.solver.systems.goodput import StatisticalEfficiency

Rule = Literal["adascale", "square-root", "linear", "constant"]
STEP = 2**0.25  # between the batches that are tried
FASTEST_GROWTH = 2.0  # at once: the noise of a much larger batch has not been seen
LEAST_GAIN = 0.02  # relative, of the goodput: a smaller one is not worth another batch


@dataclass(frozen=True)
class BoundedCost:
    """A rank: what a step costs it, and its bounds."""

    cost: Cost
    bounds: Bounds


def learning_rate_factor(rule: Rule, base_batch: int, global_batch: int, noise_scale: float | None) -> float:
    """Return what the learning rate of base_batch is multiplied with for global_batch.

    adascale (Johnson et al., ICML 2020): (phi / m + 1) / (phi / B + 1), between 1 and B / m; 1 while phi is
    unknown.
    """
    ratio = global_batch / base_batch
    if rule == "adascale":
        phi = noise_scale or 0.0
        return (phi / base_batch + 1) / (phi / global_batch + 1)
    return {"square-root": sqrt(ratio), "linear": ratio, "constant": 1.0}[rule]


def next_split(
    split: Split,
    devices: Sequence[BoundedCost],
    statistical: StatisticalEfficiency,
    most: int,
    overhead_seconds: float,
    least_efficiency: float,
) -> Split:
    """The split of the batch that learns fastest, from base_batch to `most` and twice the batch in force.

    overhead_seconds: of a round beyond the devices' own steps. least_efficiency: what a sample has to
    contribute, relative to one in a batch of base_batch. The split in force stays if nothing gains more than
    LEAST_GAIN.
    """
    costs = [device.cost for device in devices]

    def goodput(batches: Split) -> float:
        seconds = round_seconds(costs, batches) + overhead_seconds
        return statistical.estimate(sum(batches), seconds).goodput

    def learns(batches: Split) -> bool:
        return statistical.efficiency(sum(batches)) >= least_efficiency

    allowed = min(most, int(sum(split) * FASTEST_GROWTH))
    tried = takewhile(lambda b: b <= allowed, (round(statistical.base_batch * STEP**k) for k in count()))
    splits = ((total == statistical.base_batch, _split_of(total, devices)) for total in tried)
    found = [
        batches
        for is_base, batches in splits
        if batches is not None and (is_base or (sum(batches) <= allowed and learns(batches)))
    ]
    best = max(found, key=goodput, default=split)
    enough = learns(split) or sum(split) == statistical.base_batch
    return best if not enough or goodput(best) > goodput(split) * (1 + LEAST_GAIN) else split


def _split_of(total: int, devices: Sequence[BoundedCost]) -> Split | None:
    multiple = max(device.bounds.multiple for device in devices)
    bounds = [replace(device.bounds, required=True) for device in devices]
    try:
        return best_split(-(-total // multiple) * multiple, [device.cost for device in devices], bounds)
    except Infeasible:
        return None
