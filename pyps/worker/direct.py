"""Gradients of CPU fp32 parameters: each lies in the staging buffer, and is looked at as backward makes it.

Backward makes a gradient anew. As soon as it has, a hook copies it to the staging buffer and looks for values
that are not finite, while it is in cache; `.grad` is a view of the buffer from then on. So a push need not
read it once more to refuse it. A gradient that changes afterwards (clipped, unscaled) is not said to be
finite, and the push looks at it. Small gradients have no hook: backward adds them to zeros in the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from pyps import native
from pyps.native.values import Tensor
from pyps.store.staging import StagingBuffer

LEAST_ELEMENTS = 1 << 14  # with a hook, whose Python takes as long as to look at so many


class GradientPlace:
    """A gradient's part of one staging buffer, as torch and as NumPy see it.

    `looked`: the version at which all of it was finite; None: not known to be.
    """

    __slots__ = ("array", "looked", "view")

    def __init__(self, staging: StagingBuffer, tensor: Tensor) -> None:
        self.array = staging.flat[tensor.offset : tensor.offset + tensor.elements]
        self.view = torch.from_numpy(self.array).view(tensor.shape)  # with a version of its own
        self.looked: int | None = None

    def look(self) -> None:
        self._know(native.finite(self.array))

    @torch.no_grad()
    def take(self, gradient: torch.Tensor | None, *, looks: bool) -> None:
        """Copy a gradient here, and look at it on the way if `looks`; None counts as zero."""
        self.looked = None
        if gradient is not None and _is_plain(gradient):
            finite = native.take(gradient.detach().view(-1).numpy(), self.array)
            self._know(looks and finite)
            return
        if gradient is None:
            self.view.zero_()
        elif gradient.is_sparse:
            self.view.zero_().add_(gradient)
        else:
            self.view.copy_(gradient)
        if looks:
            self.look()

    def _know(self, finite: bool) -> None:
        self.looked = self.view._version if finite else None


def _is_plain(gradient: torch.Tensor) -> bool:
    strided = gradient.layout is torch.strided and gradient.device.type == "cpu"
    return strided and gradient.dtype is torch.float32 and gradient.is_contiguous()


class DirectGradients:
    """Gradients of these parameters, which have these places in the flat vector.

    looks: whether they are looked at. hooks: whether backward makes what is pushed; otherwise it is taken
    when the step is collected.
    """

    def __init__(
        self, parameters: Sequence[tuple[nn.Parameter, Tensor]], *, looks: bool, hooks: bool = True
    ) -> None:
        self.places = [place for _, place in parameters]
        self._parameters = [p for p, _ in parameters]
        self._looks = looks
        self._known: dict[int, tuple[StagingBuffer, list[GradientPlace]]] = {}  # by staging buffer
        self._in_use: list[GradientPlace] = []
        self._last = False  # the next backward is the step's last one
        self._made = [not hooks or t.elements >= LEAST_ELEMENTS for t in self.places]
        self._awaited = [False] * len(self.places)  # those that backward is to make
        self._hooks: list[Any] = []
        for k, (p, _) in enumerate(parameters):
            if hooks and self._made[k]:
                parameter: Any = p  # whose method has no types
                hook = partial(self._accumulated, k)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    @property
    def overwritten(self) -> list[Tensor]:
        """The places that collect() writes whole: they need no zeros."""
        return [place for place, made in zip(self.places, self._made, strict=True) if made]

    def gradients(self) -> list[torch.Tensor | None]:
        return [p.grad for p in self._parameters]

    def begin(self, staging: StagingBuffer) -> None:
        """Begin a new gradient in a staging buffer, which has zeros where it is not overwritten."""
        known = self._known.get(staging.index)
        if known is None or known[0] is not staging:
            known = staging, [GradientPlace(staging, place) for place in self.places]
            self._known[staging.index] = known
        self._in_use, self._last = known[1], False
        self._awaited = list(self._made)
        for p, place, made in zip(self._parameters, self._in_use, self._made, strict=True):
            place.looked = None
            p.grad = None if made else place.view

    def last_backward(self) -> None:
        """The next backward is the last one of this gradient."""
        self._last = self._looks

    def collect(self, *, unscaled: bool) -> None:
        """Take every gradient that is not in its place. unscaled: a GradScaler changed them, perhaps without
        a trace.
        """
        for p, place in zip(self._parameters, self._in_use, strict=True):
            if p.grad is not place.view:
                place.take(p.grad, looks=self._looks)
            elif unscaled:
                place.looked = None

    def looked(self) -> list[tuple[int, int]]:
        """After collect(): the first element and the count of each gradient that is known to be finite."""
        return [
            (tensor.offset, tensor.elements)
            for tensor, place in zip(self.places, self._in_use, strict=True)
            if place.looked is not None and place.looked == place.view._version
        ]

    def release(self) -> None:
        """Detach from the staging buffer: `.grad` is None until the next begin()."""
        self._in_use = []
        for p in self._parameters:
            p.grad = None

    def close(self) -> None:
        """Forget the staging buffers, and remove the hooks. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._known.clear()

    def _accumulated(self, k: int, parameter: torch.Tensor) -> None:
        """Backward has added to a gradient. One of a graph, for a derivative of it, stays as it is."""
        gradient = parameter.grad
        if not self._in_use or gradient is None or gradient.requires_grad:
            return
        place = self._in_use[k]
        if gradient is not place.view:
            if not self._awaited[k]:
                return  # the script has put it there
            place.take(gradient, looks=self._last)
            parameter.grad = place.view
        elif self._last:
            place.look()
        self._awaited[k] = False
