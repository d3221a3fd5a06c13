"""A staging buffer as NumPy and torch see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyps.native.state import split
from pyps.native.values import Flat, Tensor

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class StagingBuffer:
    """A staging buffer: `flat` is a zero-copy fp32 array [flat_elements] to be filled with the mean
    gradient.
    """

    index: int
    flat: Flat
    layout: tuple[Tensor, ...]

    def __getitem__(self, name: str) -> Flat:
        """The zero-copy view of one tensor, in its shape."""
        return self.tensors()[name]

    def tensors(self) -> dict[str, Flat]:
        """Zero-copy views of all tensors, by name."""
        return split(self.flat, self.layout)

    def torch(self) -> torch.Tensor:
        """A zero-copy torch tensor over `flat`."""
        import torch

        return torch.from_numpy(self.flat)
