"""A model's parameters on one flat local vector, and its gradients on a staging buffer.

A CPU fp32 parameter becomes a view of the vector, its `.grad` a view of the staging buffer
(pyps.worker.direct): neither pull nor push copies anything more. Others (on a GPU, or of half precision) go
over a bus (pyps.worker.bus), in both directions: gradients by buckets (pyps.worker.buckets), parameters by
ranges (pyps.worker.device_copies).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from pyps.errors import InputError
from pyps.native.ranges import Ranges, merged
from pyps.native.transfer import ArrivalCallback
from pyps.native.values import Codec, Tensor
from pyps.store.codec import encoded_bytes
from pyps.store.staging import StagingBuffer
from pyps.store.store import Store
from pyps.worker.attach import Attachment
from pyps.worker.averages import BufferBinding
from pyps.worker.buckets import FORMATS, GradientBuckets, PinnedMemory
from pyps.worker.bus import AtOnce, bus_of
from pyps.worker.checks import BackwardCheck
from pyps.worker.device_copies import DeviceCopies, HostVector
from pyps.worker.direct import DirectGradients

ENCODES_ON = ("cuda",)  # on a CPU the C codec is faster, and needs no copy
HALVES = {torch.bfloat16: Codec.BF16, torch.float16: Codec.F16}  # which lose nothing of such gradients


class Binding:
    """A model's parameters on one flat local vector, and its gradients on the staging buffer in use.

    codec: encodes gradients on the device (see `codes`), if all of the model is on one device that can.
    looks: whether gradients are looked at on their way (see `looked`). hooks: whether backward makes what is
    pushed. early: whether transfers bring parameters while they go on; overlaps: and the model is in use
    meanwhile. halves: whether gradients that are of half precision all are pushed so.
    """

    def __init__(
        self,
        attachment: Attachment,
        store: Store,
        codec: Codec | None = None,
        *,
        looks: bool = False,
        hooks: bool = True,
        early: bool = False,
        overlaps: bool = False,
        halves: bool = False,
    ) -> None:
        self._store = store
        self._slices = {t.name: t for t in store.tensors}
        entries = [(entry.parameter, self._slices[entry.name]) for entry in attachment.entries]
        devices = [p.device for p, _ in entries if p.device.type != "cpu"]
        self.device = devices[0] if devices else torch.device("cpu")  # where steps are computed
        self._pinned = PinnedMemory() if self.on_gpu else None
        self._bus = bus_of(self.device)
        self._elements = store.layout.flat_elements
        self._vector = self.vector()
        direct = [entry for entry in entries if self._lives_here(entry[0])]
        copied = [entry for entry in entries if not self._lives_here(entry[0])]
        for p, place in direct:
            p.data = _slice(self._vector.torch, place)
        self._direct = DirectGradients(direct, looks=looks, hooks=hooks)
        self._copied = copied
        self._buckets: GradientBuckets | None = None
        self.half: Codec | None = None  # that the gradients are in as they are
        self._filled = np.empty(0, np.uint8)  # codes of half precision, of the step under way
        self._codes: NDArray[np.uint8] | None = None  # these, collected
        one_place = {p.device for p, _ in copied} == {self.device}
        if one_place:
            encodes = not direct and self.device.type in ENCODES_ON and codec in FORMATS
            how = codec if encodes else None
            elements = store.layout.trained_elements
            types = {p.dtype for p, _ in copied}
            if halves and not direct and len(types) == 1:
                self.half = HALVES.get(types.pop())
            looks = looks or self.half is not None
            self._buckets = GradientBuckets(copied, elements, self._bus, how, looks=looks)
        self._copies = DeviceCopies(
            copied,
            self._elements,
            self._bus if one_place else AtOnce(),
            self._pin,
            early=early and one_place and not direct,
            doubles=overlaps,
        )
        # What is not overwritten of a staging buffer begins with zeros; what nothing writes needs them once.
        places = self._direct.overwritten
        places += [place for _, place in copied] if self._buckets is not None else []
        self._gaps = _others(store.tensors, store.layout.flat_elements)
        self._cleared = _not_among(places, store.tensors)
        self._known: dict[int, tuple[StagingBuffer, torch.Tensor, NDArray[np.uint8]]] = {}  # by index
        self.buffers = BufferBinding(attachment.buffers, self._slices, self.device)
        self._staging: torch.Tensor | None = None
        self._kept: list[torch.Tensor | None] = []
        self._backward = BackwardCheck()

    def _lives_here(self, p: nn.Parameter) -> bool:
        """Return whether a parameter can be a part of the vector of parameters."""
        return p.device.type == "cpu" and p.dtype is torch.float32 and not self._bus.emulated

    @property
    def flat(self) -> NDArray[np.float32]:
        """The parameters that came last, fp32 [flat_elements]."""
        return self._vector.array

    @property
    def on_gpu(self) -> bool:
        """Return whether some parameter lives outside the CPU."""
        return self.device.type != "cpu"

    def vector(self) -> HostVector:
        """Room for parameters that are under way."""
        return HostVector(self._elements, self._pin)

    def _pin(self, array: NDArray[Any]) -> None:
        if self._pinned is not None:
            self._pinned.pin(array)

    # Parameters that come.

    def coming(self) -> None:
        """A transfer begins, perhaps in another thread than the model's."""
        self._copies.begin()

    def arrived(self, vector: HostVector | None = None) -> ArrivalCallback | None:
        """For this transfer: gets each further range of what comes. vector: where it comes; None:
        in `flat`. None: there is nothing to do.
        """
        return partial(self._copies.arrived, vector or self._vector) if self._copies.early else None

    def came(self, vector: HostVector | None = None) -> None:
        """All of it is."""
        self._copies.end(vector or self._vector)

    @property
    def swaps(self) -> bool:
        """Return whether take() swaps vectors: nothing but a transfer changes them. Otherwise it copies."""
        return self._copies.early

    def take(self, vector: HostVector) -> HostVector:
        """`flat` is what came in this vector. Returns one that is free."""
        self._copies.forget()
        if not self.swaps:
            np.copyto(self.flat, vector.array)
            return vector
        free, self._vector = self._vector, vector
        return free

    def pulled(self) -> None:
        """`flat` changed in another way than by a transfer."""
        self._copies.forget()

    def refresh(self) -> None:
        """After a change of `flat`: update the parameters that are copies, and the averaged buffers."""
        self.refresh_parameters()
        self.buffers.load(self._vector.torch)

    def refresh_parameters(self) -> None:
        """After a change of `flat`: update the parameters that are copies."""
        if self._copied:
            self._copies.bring(self._vector)

    @property
    def codes(self) -> NDArray[np.uint8] | None:
        """The collected gradient, encoded on the device, or of half precision as it was computed; None: the
        staging buffer holds it as fp32.
        """
        if self._codes is not None:
            return self._codes
        return self._buckets.codes if self._buckets is not None and self._buckets.codec is not None else None

    def squared_norm(self, staging: NDArray[np.float32]) -> float:
        """The sum of the squares of the gradient collected last, unscaled. staging: its staging buffer."""
        if self._buckets is not None and self._buckets.codec is not None:
            return self._buckets.squared_norm()  # the staging buffer has no gradient
        if self._codes is not None:
            staging = self._halves(self._codes).float().numpy()
        return float(np.dot(staging, staging))

    def attach_grads(self, staging: StagingBuffer) -> None:
        """A step begins, whose gradient goes to this staging buffer."""
        known = self._known.get(staging.index)
        if known is None or known[0] is not staging:
            known = self._known[staging.index] = staging, staging.torch(), self._room(staging)
            self._pin(staging.flat)
            for part in self._gaps:
                staging.flat[part] = 0.0
        for part in self._cleared:
            staging.flat[part] = 0.0
        self._staging, self._filled, self._codes = known[1], known[2], None
        self._direct.begin(staging)
        for p, _ in self._copied:
            p.grad = None
        if self._buckets is not None:
            self._buckets.begin(self._staging if self.half is None else self._halves(self._filled))

    def _room(self, staging: StagingBuffer) -> NDArray[np.uint8]:
        """For codes of half precision in a staging buffer, with zeros where no parameter is. Asking waits
        for the store, which a transfer may have.
        """
        if self.half is None:
            return np.empty(0, np.uint8)
        trained = self._store.layout.trained_elements
        codes = self._store.staging_codes(staging.index, encoded_bytes(self.half, trained))
        self._pin(codes)
        values = self._halves(codes)
        for part in _others([place for _, place in self._copied], trained):
            values[part].zero_()
        return codes

    def _halves(self, codes: NDArray[np.uint8]) -> torch.Tensor:
        return torch.from_numpy(codes).view(self._copied[0][0].dtype)

    def last_backward(self, scale: float) -> None:
        """The next backward is the last: each gradient may be copied to the staging buffer as it is ready.

        `scale` multiplies what is encoded on the way.
        """
        self._direct.last_backward()
        if self._buckets is not None:
            self._buckets.last_backward(scale)

    def commit_residual(self, admitted: bool) -> None:
        """Commit the residual of a gradient encoded on the device, if that was admitted."""
        if self._buckets is not None:
            self._buckets.commit_residual(admitted)

    def begin_batch(self) -> None:
        """A batch goes to the script, which computes its gradient."""
        self._backward.begin(self._gradients())

    def check_backward(self) -> None:
        """Raise InputError if no backward() ran since `begin_batch`."""
        self._backward.check(self._gradients())

    def note_backward(self) -> None:
        """backward() has run."""
        self._backward.end(self._gradients())

    def check_unchanged(self) -> None:
        """Raise InputError if a gradient has changed since `note_backward`."""
        self._backward.check_unchanged(self._gradients())

    def _gradients(self) -> list[torch.Tensor | None]:
        return self._direct.gradients() + [p.grad for p, _ in self._copied]

    def scale_grads(self, factor: float) -> None:
        """Multiply the gradients accumulated so far."""
        with torch.no_grad():
            for gradient in self._gradients():
                if gradient is not None:
                    gradient.mul_(factor)

    def keep(self) -> None:
        """More micro-batches follow: remember the gradients to which they must add."""
        self._kept = self._gradients()

    def check_kept(self) -> None:
        """Raise InputError if a gradient that was kept is another object now, as after zero_grad()."""
        for before, now in zip(self._kept, self._gradients() if self._kept else (), strict=True):
            if before is not None and before is not now:
                found = "gradients cleared between the micro-batches of one batch"
                raise InputError("step", "zero_grad", found, "no zero_grad(): each step begins with zeros")

    def collect(self, scale: float, *, unscaled: bool) -> Ranges | None:
        """Bring averaged buffers, and every gradient that is not a view of it, to the staging buffer; a
        gradient that is missing counts as zero. The ranges of the gradient that are known to be finite.

        scale: multiplies gradients that are encoded on the way. unscaled: a GradScaler changed the gradients.
        """
        if self._staging is None:
            return None
        self.buffers.collect(self._staging)
        self._direct.collect(unscaled=unscaled)
        if self._buckets is not None:
            if unscaled:
                self._buckets.forget()
            self._buckets.finish(scale)
            self._collect_halves(self._buckets.finite)
        else:
            for p, place in self._copied:
                _copy_gradient(p, _slice(self._staging, place))
        return self._looked()

    def _collect_halves(self, finite: bool) -> None:
        """Collect them as codes; what is not finite as fp32, which a push refuses."""
        if self.half is None:
            return
        if finite:
            self._codes = self._filled
        elif self._staging is not None:
            values = self._halves(self._filled)
            self._staging[: values.numel()].copy_(values)

    def _looked(self) -> Ranges | None:
        found = self._direct.looked() + (self._buckets.looked() if self._buckets is not None else [])
        return merged(np.array(sorted(found), np.uint64)) if found else None

    def release(self) -> None:
        """Detach from the staging buffer: `.grad` is None until the next `attach_grads`."""
        self._staging, self._kept = None, []
        self._direct.release()
        for p, _ in self._copied:
            p.grad = None

    def close(self) -> None:
        """Detach from the staging buffer, unpin memory and remove the hooks of parameters. Idempotent."""
        self.release()
        self._filled, self._codes = np.empty(0, np.uint8), None  # views of the store's memory
        self._known.clear()
        self._direct.close()
        if self._buckets is not None:
            self._buckets.close()
        self._copies.close()
        if self._pinned is not None:
            self._pinned.close()


def _slice(flat: torch.Tensor, place: Tensor) -> torch.Tensor:
    return flat[place.offset : place.offset + place.elements].view(place.shape)


def _not_among(places: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[slice]:
    """The parts of the flat vector where the other tensors are."""
    known = {place.offset for place in places if place.elements}
    others = sorted((t.offset, t.elements) for t in tensors if t.elements and t.offset not in known)
    runs = merged(np.array(others, np.uint64).reshape(-1, 2)).tolist()
    return [slice(first, first + count) for first, count in runs]


def _others(places: Sequence[Tensor], elements: int) -> list[slice]:
    """Return what these places leave of a flat vector."""
    found, end = [], 0
    for place in sorted(places, key=lambda place: place.offset):
        found.append(slice(end, place.offset))
        end = place.offset + place.elements
    return [part for part in (*found, slice(end, elements)) if part.start < part.stop]


def _copy_gradient(p: nn.Parameter, view: torch.Tensor) -> None:
    with torch.no_grad():
        if p.grad is None:
            view.zero_()
        else:
            view.copy_(p.grad.to_dense() if p.grad.is_sparse else p.grad)
