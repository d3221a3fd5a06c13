"""Uneven data parallelism on torch's DistributedDataParallel: a batch for each rank, and the exact gradient.

model, loader, step = uneven(model, dataset, 256, optimizer=optimizer)
"""

from pyps.sharding import shard, shard_optimizer
from pyps.solver.online.decide import SplitChange
from pyps.torch.adaptive import AdaptiveBatch
from pyps.torch.check import Cause, GradientCheck, check_gradient
from pyps.torch.checkpoint import load, save
from pyps.torch.compose import UnevenStep, uneven
from pyps.torch.decisions import MeasuredRank, Moves
from pyps.torch.global_mean import GlobalMean
from pyps.torch.initial_split import agreed_split
from pyps.torch.noise import GradientNoise
from pyps.torch.norm import UnevenSyncBatchNorm
from pyps.torch.rebalance import Rebalancer, to_sink
from pyps.torch.sampler import UnevenBatchSampler, UnevenGroupSampler
from pyps.torch.stream import UnevenIterableDataset

__all__ = [
    "AdaptiveBatch",
    "Cause",
    "GlobalMean",
    "GradientCheck",
    "GradientNoise",
    "MeasuredRank",
    "Moves",
    "Rebalancer",
    "SplitChange",
    "UnevenBatchSampler",
    "UnevenGroupSampler",
    "UnevenIterableDataset",
    "UnevenStep",
    "UnevenSyncBatchNorm",
    "agreed_split",
    "check_gradient",
    "load",
    "save",
    "shard",
    "shard_optimizer",
    "to_sink",
    "uneven",
]
