"""Wrapped: what GlobalMean asks of a model in DDP or under fully_shard, in one place for both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, Protocol
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist

from pyps.errors import InputError
from pyps.torch.peers import parameters_of, peers_of
from pyps.torch.waiting import Waiting, watch_passes

REDUCED = "_pyps_reduced"  # an attribute of parameters: the flags of the GlobalMeans' models that reduce it
BY_VIEWS: dict[str, Any] = {
    "gradient_as_bucket_view": True
}  # with which DDP holds gradients once, as plans count them
ARRIVED = "_pyps_arrived"  # an attribute of models, a flag: whether gradients came since it was read last
OPEN: list[Any] = []  # backward passes of GlobalMeans that run now, and unweighted() blocks


class Watcher(Protocol):
    """A call that looks at this rank's gradients."""

    def __call__(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None: ...


WATCHERS: list[ReferenceType[Any]] = []  # of all parameters in DDP


def _arrival(flags: list[list[bool]], is_ddp: bool) -> Callable[[torch.Tensor], None]:
    """The hook of a parameter, which sets the flags of its models. It is called in each step."""

    def arrived(parameter: torch.Tensor) -> None:
        if not OPEN:
            expected = "mean.backward(loss)"
            raise InputError("GlobalMean", "loss.backward()", "a gradient without its weight", expected)
        for flag in flags:
            flag[0] = True
        if WATCHERS and is_ddp and parameter.grad is not None:
            for known in WATCHERS.copy():
                if (watcher := known()) is not None:
                    watcher(parameter, parameter.grad)

    return arrived


class Wrapped(ABC):
    """A model whose gradients are averaged over ranks.

    group: the ranks with samples of their own. peers: those that share this rank's samples, or None.
    """

    is_ddp: bool
    again: str  # what to do about other parameters

    def __init__(self, model: torch.nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
        self.model, self.group, self.device = model, group, device
        self._parameters = parameters_of(model)
        self.peers = peers_of(self._parameters, group)
        self._checked: Any = None  # what modules held at the latest check, and what trained
        self._shown: list[torch.nn.Parameter] = []
        self._holders: list[dict[str, Any]] = []
        self._empty: list[dict[str, Any]] = []
        self._described, self._is_divided, self._is_timed = "", False, False

    def time_passes(self, waiting: Waiting) -> None:
        """Tell the timers of a device from now on what of the model's passes is a wait."""
        if not self._is_timed:
            self._is_timed = True
            watch_passes(self.model, waiting)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Return those of the model when it was wrapped."""
        return iter(self._parameters)

    @abstractmethod
    def reduced(self) -> list[torch.nn.Parameter]:
        """The parameters whose gradients are averaged over ranks."""

    @abstractmethod
    def reduces(self) -> bool:
        """Return whether the next backward pass reduces gradients."""

    def refused(self) -> InputError | None:
        """Return what a GlobalMean refuses of the model."""
        return None

    def check_pass(self) -> None:  # noqa: B027 - shard() has nothing that could be in the way
        """Raise InputError for what a pass cannot be weighed with."""

    def averaged_evenly(self) -> AbstractContextManager[None]:
        """Within it, a backward pass averages over ranks, whatever a script has set."""
        return nullcontext()

    @abstractmethod
    def micro_batch(self, last: bool, whole: bool) -> AbstractContextManager[None]:
        """The context of a micro-batch's passes; only the last one reduces. whole: numbers of micro-batches
        differ by rank.
        """

    def forget(self) -> None:
        """Drop the gradients of all passes since the last one that reduced, and their own."""
        for parameter in self.parameters():
            parameter.grad = None

    def check_trained(self) -> None:
        """Raise InputError for a parameter that trains and that nothing reduces."""
        self.check_pass()
        if self._is_divided:  # DDP has taken its parameters from the modules
            return
        if self._held() == self._checked and not any(self._empty):
            return
        reduced = self._known()
        for name, p in self.model.named_parameters():
            if p.requires_grad and id(p) not in reduced:
                expected = f"parameters that train when the model is wrapped; {self.again}"
                raise InputError(
                    "GlobalMean", name, "a parameter that trains and that nothing reduces", expected
                )
        within = [d for m in self.model.modules() for d in (m._modules, m._parameters)]
        self._holders, self._empty = [d for d in within if d], [d for d in within if not d]
        self._shown = list(self.model.parameters())
        self._checked = self._held()
        listed = [(n, tuple(p.shape)) for n, p in self.model.named_parameters() if p.requires_grad]
        self._described = f"{len(listed)} ({listed})"

    def _held(self) -> tuple[list[int], list[bool]]:
        """Return what the modules of the latest check hold now, and which of its parameters train: both may
        have changed since. In each step this takes a tenth of a walk through the model.
        """
        within = chain.from_iterable(map(dict.values, self._holders))
        return list(map(id, within)), [p.requires_grad for p in self._shown]

    def trained(self) -> str:
        """Names and shapes of the trained parameters, as of the latest check."""
        return self._described

    def _known(self) -> set[int]:
        """The identities of what the model's modules show of the parameters that are reduced."""
        return {id(p) for p in self.reduced()}

    def watch(self) -> None:
        """Note the arrival of gradients, and refuse it outside a backward pass of a GlobalMean."""
        self._arrived: list[bool] = self.model.__dict__.setdefault(ARRIVED, [False])
        for p in self.reduced():
            flags: list[list[bool]] | None = getattr(p, REDUCED, None)
            if flags is None:
                setattr(p, REDUCED, flags := [])
                p.register_post_accumulate_grad_hook(_arrival(flags, self.is_ddp))  # type: ignore[no-untyped-call]
            if not any(flag is self._arrived for flag in flags):
                flags.append(self._arrived)

    def check_reduced(self) -> None:  # noqa: B027 - FSDP2 reduces whatever computes
        """Raise InputError for gradients of a pass that the model has not reduced."""

    def watch_own(self, watcher: Watcher) -> None:
        """Call it with each parameter and this rank's gradient of it, before that is reduced."""
        WATCHERS.append(ref(watcher, WATCHERS.remove))

    def install_wire(self, wire: str, scaler: Any) -> Any:
        """Send gradients in another type."""
        raise InputError("GlobalMean", "wire", repr(wire), "same")
