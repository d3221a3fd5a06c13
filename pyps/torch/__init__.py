"""Uneven data parallelism on torch's own DistributedDataParallel: each rank its batch, the gradient exact.

loader = DataLoader(dataset, batch_sampler=UnevenBatchSampler(dataset, "plan.json"))
model = DistributedDataParallel(model)
weighted_hook(model)
"""

from pyps.torch.hook import WeightedHook, weighted_hook
from pyps.torch.sampler import UnevenBatchSampler
from pyps.torch.stream import UnevenIterableDataset

__all__ = ["UnevenBatchSampler", "UnevenIterableDataset", "WeightedHook", "weighted_hook"]
