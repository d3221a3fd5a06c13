"""Moves a worker's parameters along its own gradients under way (pyps.step.own)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyps.native.values import Flat, Hyper, Optimizer, PushRequest, Tensor
from pyps.step.own import ADAM, UnderWay, share_of_way, way_of

BLOCK = 1 << 16  # values at a time: they stay in cache


def onward_vectors(optimizer: Optimizer, depth: int) -> int:
    """Vectors of parameters that an Onward holds: two moments, and a difference for each step under way."""
    return 2 + depth if optimizer in ADAM else 0


@dataclass(frozen=True)
class Pushed:
    """A gradient in its staging buffer, and how it was pushed; for Adam what it moves parameters along."""

    flat: Flat
    hyper: tuple[Hyper, ...]
    scale: float
    part: float  # of a global batch, that its samples are


class Onward:
    """The own gradients of a worker of a store with these tensors. global_batch: samples."""

    def __init__(self, optimizer: Optimizer, tensors: Sequence[Tensor], global_batch: int) -> None:
        self._optimizer, self._global_batch = optimizer, global_batch
        self._moments: dict[int, GradientMoments] = {}  # by group
        trained = [t for t in tensors if not t.averaged and t.elements]
        groups = {t.group: [other for other in trained if other.group == t.group] for t in trained}
        self._parts = {
            group: slice(ts[0].offset, max(t.offset + t.elements for t in ts)) for group, ts in groups.items()
        }
        self._under_way: UnderWay[Pushed | None] = UnderWay()

    def sent(self, request: PushRequest, flat: Flat) -> None:
        """A step's gradient, in `flat`, was sent. One that is skipped, or is not finite, moves nothing."""
        scale = request.scale
        known = request.samples > 0 and all(_is_finite(flat[part]) for part in self._parts.values())
        if known and (bound := max(h.clip_norm for h in request.hyper)):
            norm = abs(scale) * math.sqrt(sum(_squares(flat[part]) for part in self._parts.values()))
            scale *= min(1.0, bound / norm) if norm else 1.0
        part = request.samples / self._global_batch
        if known and self._optimizer in ADAM:
            flat, scale = self._differences(request, flat, scale), 1.0
        self._under_way.sent(Pushed(flat, request.hyper, scale, part) if known else None)

    def arrived(self) -> None:
        """The oldest is no more under way."""
        self._under_way.arrived()

    def loaded(self) -> None:
        """New parameters came."""
        self._under_way.loaded()

    def go_on(self, params: Flat) -> None:
        """Bring parameters to where the next step is computed, in place."""
        for pushed, have, wanted in self._under_way.go_on():
            if pushed is None or have == wanted:
                continue
            for group, part in self._parts.items():
                hyper = pushed.hyper[group]
                way = way_of(hyper, self._optimizer, wanted) - way_of(hyper, self._optimizer, have)
                way *= share_of_way(hyper, self._optimizer, pushed.part)
                clip = 0.0 if self._optimizer in ADAM else hyper.clip
                _move(params[part], pushed.flat[part], way, pushed.scale, clip)

    def _differences(self, request: PushRequest, flat: Flat, scale: float) -> Flat:
        """Return those of a gradient from the mean of those before: see GradientMoments."""
        found = np.zeros_like(flat)
        for group, part in self._parts.items():
            hyper = request.hyper[group]
            gradient = np.float32(scale) * flat[part]
            if hyper.clip:
                gradient = np.clip(gradient, -np.float32(hyper.clip), np.float32(hyper.clip))
            moments = self._moments.setdefault(group, GradientMoments(gradient))
            found[part] = moments.difference(gradient, hyper, request.samples / self._global_batch)
        return found


def _move(params: Flat, gradient: Flat, way: float, scale: float, clip: float) -> None:
    for first in range(0, params.size, BLOCK):
        g = gradient[first : first + BLOCK]
        if clip:
            step = np.float32(way) * np.clip(np.float32(scale) * g, -np.float32(clip), np.float32(clip))
        else:
            step = np.float32(way * scale) * g
        params[first : first + BLOCK] -= step


def _is_finite(gradient: Flat) -> bool:
    with np.errstate(all="ignore"):
        return math.isfinite(float(gradient.sum()))


def _squares(gradient: Flat) -> float:
    blocks = (gradient[first : first + BLOCK] for first in range(0, gradient.size, BLOCK))
    return sum(float(np.square(block, dtype=np.float64).sum()) for block in blocks)


class GradientMoments:
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
