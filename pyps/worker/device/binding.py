"""A model's parameters on one flat local vector, and its gradients on a staging buffer.

A CPU fp32 parameter becomes a view of the vector, its `.grad` a view of the staging buffer: neither pull nor
push copies anything more. Others (on a GPU, or of half precision) go over a `bus`: gradients by `buckets`,
parameters by ranges.

An exchange reports ranges of the flat vector that are final (pyps_exchange_arriving). Their copies go on the
bus at once, so that the last ones leave when the exchange ends. In a pipeline the model is in use meanwhile:
copies go to a second set of parameters on the device, which the model takes between two steps. What is not of
fp32 crosses the bus in its own type, half of the bytes in bf16; fp32 stays on the host, where a thread
rounds what arrives while the exchange goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from pyps.errors import InputError
from pyps.native.ranges import Ranges, merged
from pyps.native.transfer import ArrivalCallback, Transferred
from pyps.native.values import Codec, Flat, Tensor
from pyps.store.codec import encoded_bytes
from pyps.store.staging import StagingBuffer
from pyps.store.store import Store
from pyps.worker.background import BackgroundThread
from pyps.worker.device.attach import Attachment
from pyps.worker.device.averages import BufferBinding
from pyps.worker.device.buckets import FORMATS, DirectGradients, GradientBuckets, PinnedMemory, states_of
from pyps.worker.device.bus import Bus, bus_of

CLOSE_SECONDS = 10.0  # that the last roundings may take
T = TypeVar("T", bound=tuple[Transferred, Any])
Landing = Callable[[Flat, ArrivalCallback | None], T]
Pin = Callable[[NDArray[Any]], object]
Gradients = Sequence[torch.Tensor | None]
ENCODES_ON = ("cuda",)  # on a CPU the C codec is faster, and needs no copy
HALVES = {torch.bfloat16: Codec.BF16, torch.float16: Codec.F16}  # which lose nothing of such gradients


class Binding:
    """A model's parameters on one flat local vector, and its gradients on the staging buffer in use.

    codec: encodes gradients on the device (see `codes`), if all of the model is on one device that can.
    checks_finite: whether gradients are checked on their way. hooks: whether backward makes what is
    pushed. early: whether transfers bring parameters while they go on; overlaps: and the model is in use
    meanwhile. halves: whether gradients that are of half precision all are pushed so.
    """

    def __init__(
        self,
        attachment: Attachment,
        store: Store,
        codec: Codec | None = None,
        *,
        checks_finite: bool = False,
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
        self._direct = DirectGradients(direct, checks_finite=checks_finite, hooks=hooks)
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
            checks_finite = checks_finite or self.half is not None
            self._buckets = GradientBuckets(copied, elements, self._bus, how, checks_finite=checks_finite)
        self._copies = DeviceCopies(
            copied,
            self._elements,
            self._bus if one_place else Bus(),
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
        self.backward = BackwardCheck(self._gradients)

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

    # Parameters that arrive.

    def land(self, finish: Landing[T], vector: HostVector | None = None) -> T:
        """End a transfer, which writes parameters to this vector, by default `flat`: the device's copies of
        them begin as they arrive. Perhaps in another thread than the model's.
        """
        vector, copies = vector or self._vector, self._copies
        copies.begin()
        landed = finish(vector.array, partial(copies.arrived, vector) if copies.early else None)
        if landed[0].version is not None:
            copies.end(vector)
        return landed

    @property
    def swaps(self) -> bool:
        """Return whether take() swaps vectors: nothing but a transfer changes them. Otherwise it copies."""
        return self._copies.early

    def take(self, vector: HostVector) -> HostVector:
        """`flat` is what arrived in this vector. Returns one that is free."""
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
        return self._finite_ranges()

    def _collect_halves(self, finite: bool) -> None:
        """Collect them as codes; what is not finite as fp32, which a push refuses."""
        if self.half is None:
            return
        if finite:
            self._codes = self._filled
        elif self._staging is not None:
            values = self._halves(self._filled)
            self._staging[: values.numel()].copy_(values)

    def _finite_ranges(self) -> Ranges | None:
        found = self._direct.finite_ranges() + (
            self._buckets.finite_ranges() if self._buckets is not None else []
        )
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


class HostVector:
    """The flat vector, as NumPy and torch see it."""

    def __init__(self, elements: int, pin: Pin) -> None:
        self.array = np.zeros(elements, np.float32)
        self.torch = torch.from_numpy(self.array)
        pin(self.array)


class DeviceCopies:
    """These parameters, with their places in the flat vector of `elements`.

    early: whether a transfer may bring them while it goes on: nothing but a transfer changes them. doubles:
    to a second set, since the model is in use. pin: pins host memory.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[nn.Parameter, Tensor]],
        elements: int,
        bus: Bus,
        pin: Pin,
        *,
        early: bool,
        doubles: bool,
    ) -> None:
        self._parts = sorted(
            (part for part in parameters if part[1].elements), key=lambda part: part[1].offset
        )
        self._bus, self._early = bus, early and bool(self._parts)
        self._types: dict[torch.dtype, torch.Tensor] = {}
        for p, _ in self._parts:
            if p.dtype is not torch.float32 and p.dtype not in self._types:
                whole = torch.zeros(elements, dtype=p.dtype)
                pin(whole.view(torch.uint8).numpy())
                self._types[p.dtype] = whole
        self._second = [torch.empty_like(p.detach()) for p, _ in self._parts] if early and doubles else []
        rounds = self._early and bool(self._types) and not bus.at_once
        self._rounding: BackgroundThread[None] | None = BackgroundThread("pyps-rounding") if rounds else None
        self._submitted = 0  # to it, whose end was not awaited
        self._next = 0  # of the parts: those before are on their way
        self._received = 0  # how much of the vector has arrived
        self._holds: HostVector | None = None  # that the last transfer has brought to the second set
        self._in_model: HostVector | None = None
        self._lock = threading.Lock()

    @property
    def early(self) -> bool:
        """Return whether anything comes of arrived()."""
        return self._early

    def begin(self) -> None:
        """A transfer begins: host memory will change."""
        with self._lock:
            if not self._early:
                return
            self._holds, self._next, self._received = None, 0, 0
            if not self._second:
                self._in_model = None
                self._bus.adopt([], [])  # the model was in use until now
        self._await_rounding()
        self._bus.settle()

    def _await_rounding(self) -> None:
        while self._submitted and self._rounding is not None:
            self._submitted -= 1
            self._rounding.take()

    @torch.no_grad()
    def arrived(self, vector: HostVector, first: int, count: int) -> None:
        """In a transfer, a further range of the vector is final."""
        end = self._received = first + count
        with self._lock:
            targets = self._second or [p.detach() for p, _ in self._parts]
            while self._early and self._next < len(self._parts):
                place = self._parts[self._next][1]
                job = partial(self._start, targets[self._next], place, vector, first, end)
                if self._rounding is None:
                    job()
                else:
                    self._submitted += 1
                    self._rounding.submit(job)
                if place.offset + place.elements > end:
                    return
                self._next += 1

    def end(self, vector: HostVector) -> None:
        """A transfer has ended: all of the vector is final."""
        if not self._early:
            return
        if self._next < len(self._parts):
            self.arrived(vector, self._received, vector.array.size - self._received)
        self._await_rounding()
        with self._lock:
            if self._second:
                self._holds = vector
                return
            self._in_model = vector
        self._bus.wait_for_device()

    def close(self) -> None:
        """Copy nothing from now on; what is under way has ended. Idempotent."""
        with self._lock:
            self._early = False
        if self._rounding is not None:
            self._rounding.close(lambda: None, CLOSE_SECONDS)
        self._bus.settle()
        self._bus.close()

    def forget(self) -> None:
        """The flat vector is another one, or changed in another way than by a transfer."""
        self._in_model = None

    @torch.no_grad()
    def bring(self, vector: HostVector) -> None:
        """Bring the model to this vector, if it is not there: what the device computes next is on it."""
        with self._lock:
            if self._second and self._holds is vector:
                self._bus.adopt([p for p, _ in self._parts], self._second)
                self._holds, self._in_model = None, vector
            if self._in_model is vector:
                return
            self._bus.adopt([], [])
        for p, place in self._parts:
            end = place.offset + place.elements
            self._start(p.detach(), place, vector, place.offset, end, alone=not self._second)
        self._bus.wait_for_device()
        self._bus.settle()
        self._in_model = vector if self._early else None

    @torch.no_grad()
    def _start(
        self, to: torch.Tensor, place: Tensor, vector: HostVector, first: int, end: int, *, alone: bool = True
    ) -> None:
        """Begin the copy of what lies in this range; of what is not contiguous, when all of it is there.

        alone: no transfer rounds meanwhile.
        """
        lo, hi = max(first, place.offset), min(end, place.offset + place.elements)
        whole = to.is_contiguous()
        if not whole and hi == place.offset + place.elements:
            lo = place.offset
        if lo >= hi or (not whole and hi - lo < place.elements):
            return
        values = vector.torch[lo:hi]
        if to.dtype is not torch.float32:
            values = self._types[to.dtype][lo:hi].copy_(values) if alone else values.to(to.dtype)
        if whole:
            to, begin = to.view(-1), lo - place.offset
            self._bus.start_to_device(to[begin : begin + hi - lo], values)
        else:
            self._bus.start_to_device(to, values.view(to.shape))


class BackwardCheck:
    """Tell whether backward() ran since the last batch: it makes gradients, or writes to those there."""

    def __init__(self, gradients: Callable[[], Gradients]) -> None:
        self._gradients = gradients
        self._before: list[tuple[int, int]] = []
        self._after: list[tuple[int, int]] = []

    def end(self) -> None:
        """backward() has run."""
        self._after = states_of(self._gradients())

    def check_unchanged(self) -> None:
        """Raise InputError if a gradient is another one than backward() has left."""
        if self._after and self._after != states_of(self._gradients()):
            expected = "attach(clip_norm=), which clips the mean of a round, or a hook of the parameter"
            raise InputError("worker", "step", "gradients changed since worker.backward(loss)", expected)

    def begin(self) -> None:
        """A batch goes to the script, which computes its gradient."""
        self._before, self._after = states_of(self._gradients()), []

    def check(self) -> None:
        """Raise InputError if every gradient is absent or as it was."""
        for g, before in zip(self._gradients(), self._before, strict=True):
            if g is not None and (id(g), g._version) != before:
                return
        found = "no gradient since the last batch"
        raise InputError("worker", "step", found, "loss.backward() before each step()")
