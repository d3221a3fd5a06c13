"""How a worker's own gradients differ from Adam's mean, for pyps.step.own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyps.native.values import Hyper

BLOCK = 1 << 16  # values at a time: they stay in cache


class OwnMoments:
    """Adam's moments of one worker's gradients, in their type."""

    def __init__(self, like: NDArray[Any]) -> None:
        self._first, self._second, self._steps = np.zeros_like(like), np.zeros_like(like), 0

    def difference(self, gradient: NDArray[Any], hyper: Hyper, part: float) -> NDArray[Any]:
        """How the next gradient differs from the mean of those before, over the root of the second moment.

        part: of a global batch, that its samples are: as in a store, what is squared has the noise of a
        whole one. Of the first gradient it is zero.
        """
        (beta1, beta2), before, found = hyper.betas, self._steps, np.zeros_like(gradient)
        self._steps += 1
        whole = 1.0 - beta2**self._steps
        for at in range(0, gradient.size, BLOCK):
            g, first, second = (all_[at : at + BLOCK] for all_ in (gradient, self._first, self._second))
            mean = first / (1.0 - beta1**before) if before else g
            difference = g - mean
            first += (1.0 - beta1) * (g - first)
            second += (1.0 - beta2) * (np.square(mean + math.sqrt(part) * difference) - second)
            found[at : at + BLOCK] = difference / (np.sqrt(second / whole) + hyper.eps)
        return found
