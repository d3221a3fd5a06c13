"""Uneven data parallelism on torch's own DistributedDataParallel: each rank its batch, the gradient exact."""

from pyps.torch.sampler import UnevenBatchSampler
from pyps.torch.stream import UnevenIterableDataset

__all__ = ["UnevenBatchSampler", "UnevenIterableDataset"]
