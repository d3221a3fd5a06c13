"""Names of torch that its older releases have elsewhere."""

try:
    from torch.distributed.tensor import DTensor, distribute_tensor
except ImportError:  # torch 2.4; it exports them all the same
    from torch.distributed._tensor import DTensor, distribute_tensor  # type: ignore[attr-defined]

__all__ = ["DTensor", "distribute_tensor"]
