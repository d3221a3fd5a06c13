"""Uneven data parallelism on torch's DistributedDataParallel: a batch for each rank, and the exact gradient.

loader = DataLoader(dataset, batch_sampler=UnevenBatchSampler(dataset, "plan.json"))
model = DistributedDataParallel(model)
weighted_hook(model)
"""

from pyps.solver.online.decide import SplitChange
from pyps.torch.adaptive import AdaptiveBatch
from pyps.torch.check import Cause, GradientCheck, check_gradient
from pyps.torch.checkpoint import load, save
from pyps.torch.compose import UnevenLoader, UnevenStep, uneven
from pyps.torch.cost_sampler import UnevenCostSampler
from pyps.torch.decisions import Moves, RankState
from pyps.torch.groups import UnevenGroupSampler
from pyps.torch.hook import weighted_hook
from pyps.torch.initial_split import agreed_split
from pyps.torch.noise import GradientNoise
from pyps.torch.norm import UnevenSyncBatchNorm
from pyps.torch.rebalance import Rebalancer, to_sink
from pyps.torch.sampler import UnevenBatchSampler
from pyps.torch.stream import UnevenIterableDataset
from pyps.torch.weighted import WeightedHook
from pyps.torch.weighting import count_targets, loss_scale

__all__ = [
    "AdaptiveBatch",
    "Cause",
    "GradientCheck",
    "GradientNoise",
    "Moves",
    "RankState",
    "Rebalancer",
    "SplitChange",
    "UnevenBatchSampler",
    "UnevenCostSampler",
    "UnevenGroupSampler",
    "UnevenIterableDataset",
    "UnevenLoader",
    "UnevenStep",
    "UnevenSyncBatchNorm",
    "WeightedHook",
    "agreed_split",
    "check_gradient",
    "count_targets",
    "load",
    "loss_scale",
    "save",
    "to_sink",
    "uneven",
    "weighted_hook",
]
