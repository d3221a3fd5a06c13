"""Names of torch that its older releases have elsewhere."""

try:
    from torch.distributed.tensor import DTensor, distribute_tensor
except ImportError:  # torch 2.4
    from torch.distributed._tensor import DTensor, distribute_tensor

__all__ = ["DTensor", "distribute_tensor"]
