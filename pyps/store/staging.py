"""A staging buffer as NumPy and torch see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pyps.errors import InvalidArgument
from pyps.native.state import split
from pyps.native.values import Flat, Tensor

if TYPE_CHECKING:
    import torch


def _given_up() -> Flat:
    raise InvalidArgument("staging", "found one that leave() or close() gave up; expected one of stage()")


class StagingBuffer:
    """A staging buffer: `flat` is a zero-copy fp32 array [flat_elements] to be filled with the mean
    gradient.

    It gets its memory when `flat` is first read (OutOfSpace): a push of ranges, or of codes, needs less.
    """

    __slots__ = ("_find", "_flat", "index", "layout")

    def __init__(self, index: int, find: Callable[[], Flat], layout: tuple[Tensor, ...]) -> None:
        """index: as the core has it. find: gives the array, with memory. layout: of the store's tensors."""
        self.index = index
        self.layout = layout
        self._find = find
        self._flat: Flat | None = None

    @property
    def flat(self) -> Flat:
        if self._flat is None:
            self._flat = self._find()
        return self._flat

    def retire(self) -> None:
        """The buffer is no longer this worker's: its array is only read from now on, or not made any more."""
        self._find = _given_up
        if self._flat is not None:
            self._flat.flags.writeable = False

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

    def __dlpack__(self, **options: Any) -> Any:
        """`flat` for any library that reads DLPack, without a copy: numpy.from_dlpack(staging)."""
        return self.flat.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.flat.__dlpack_device__()
