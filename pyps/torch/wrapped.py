"""Wrapped: what GlobalMean asks of a model in DDP or under fully_shard, in one place for both."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, repeat
from operator import contains
from typing import Any, Protocol
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pyps.errors import InputError
from pyps.sharding.modules import unit_of
from pyps.torch.peers import is_divided, parameters_of, peers_of
from pyps.torch.waiting import Waiting, watch_passes

REDUCED = "_pyps_reduced"  # an attribute of parameters: the flags of the GlobalMeans' models that reduce it
BY_VIEWS: dict[str, Any] = {
    "gradient_as_bucket_view": True
}  # with which DDP holds gradients once, as plans count them
NOT_YET: Any = 1  # of DDP's require_forward_param_sync, to which it is as good as True: no forward() since
ARRIVED = "_pyps_arrived"  # an attribute of models, a flag: whether gradients came since it was read last
BY_HOOKS = "_in_backward_optimizers"  # an attribute that torch gives parameters whose optimizers are in hooks
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

    @abstractmethod
    def refused(self) -> InputError | None:
        """Return what a GlobalMean refuses of the model."""

    @abstractmethod
    def check_pass(self) -> None:
        """Raise InputError for what a pass cannot be weighed with."""

    @abstractmethod
    def micro_batch(self, last: bool, whole: bool) -> AbstractContextManager[None]:
        """The context of a micro-batch's passes; only the last one reduces. whole: numbers of micro-batches
        differ by rank.
        """

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
                expected = f"parameters that train when the model is wrapped; {self._again()}"
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

    @abstractmethod
    def _again(self) -> str:
        """Return what to do about other parameters."""

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


class WrappedDDP(Wrapped):
    """A DistributedDataParallel."""

    is_ddp = True

    def __init__(self, ddp: DistributedDataParallel) -> None:
        first = next(iter(parameters_of(ddp)))
        super().__init__(ddp, ddp.process_group, first.device)
        self._ddp: Any = ddp
        self._reduced = [p for p in self._parameters if p.requires_grad]
        self._is_divided = any(is_divided(p) for p in self._parameters)
        if not getattr(ddp, "_lazy_init_ran", True):  # no forward pass yet
            self._ddp.require_forward_param_sync = NOT_YET

    def reduced(self) -> list[torch.nn.Parameter]:
        return self._reduced

    def reduces(self) -> bool:
        return bool(self._ddp.require_backward_grad_sync)

    def refused(self) -> InputError | None:
        number = int(self._ddp._get_ddp_logging_data()["num_parameter_tensors"])
        if number != len(self._reduced):
            found = f"{len(self._reduced)} parameters that train, of which it reduces {number}"
            return InputError("GlobalMean", "model", found, f"the same; {self._again()}")
        return None

    def check_pass(self) -> None:
        if self._ddp._join_config.enable:
            expected = "no join(): a sampler of pyps gives all ranks as many rounds"
            raise InputError("GlobalMean", "join()", "a model in it", expected)
        if self._ddp.require_forward_param_sync and not self.reduces():
            found = "a forward pass outside of it, whose gradients are reduced"
            raise InputError("GlobalMean", "no_sync()", found, "forward and backward in it")
        by_hooks = any(map(contains, self._given, repeat(BY_HOOKS)))
        if by_hooks or max(map(len, self._hooks), default=1) > 1:
            found = "an optimizer's step, or another hook, before the gradient is reduced"
            raise InputError("GlobalMean", "parameters' hooks", found, "optimizer.step() after backward()")

    def watch(self) -> None:
        super().watch()
        self._hooks: list[Any] = [p._post_accumulate_grad_hooks for p in self._reduced]
        self._given = [p.__dict__ for p in self._reduced]

    def check_reduced(self) -> None:
        if not self._arrived[0]:
            return
        self._arrived[0] = False
        if self._ddp.require_forward_param_sync is not True:  # DDP's forward() sets it
            found = "gradients that DistributedDataParallel did not reduce"
            expected = "one backward pass for each forward pass of the model itself, not of its parts"
            raise InputError("GlobalMean", "forward()", found, expected)
        self._ddp.require_forward_param_sync = NOT_YET

    def install_wire(self, wire: str, scaler: Any) -> Any:
        from pyps.torch.wire import install_wire

        return install_wire(self._ddp, wire, scaler)  # type: ignore[arg-type]

    def micro_batch(self, last: bool, whole: bool) -> AbstractContextManager[None]:
        found: AbstractContextManager[None] = nullcontext() if last else self._ddp.no_sync()
        return found

    def _again(self) -> str:
        return "make DistributedDataParallel anew after unfreezing or adding a layer"


def wrapped_models(model: torch.nn.Module | Sequence[torch.nn.Module]) -> list[Wrapped]:
    """Each of one or several models. Raises InputError for one without DDP or fully_shard."""
    models = [model] if isinstance(model, torch.nn.Module) else list(model)
    if not models:
        raise InputError("GlobalMean", "model", "none", "at least one")
    return [_wrapped(one) for one in models]


def _wrapped(model: torch.nn.Module) -> Wrapped:
    plain = getattr(model, "_orig_mod", model)
    if isinstance(plain, DistributedDataParallel):
        return WrappedDDP(plain)
    if unit_of(plain) is not None:
        from pyps.torch.wrapped_shards import WrappedShards

        return WrappedShards(plain)
    fsdp = sys.modules.get("torch.distributed.fsdp")  # a sharded model has imported it
    if fsdp is None or not hasattr(fsdp, "FSDPModule") or not isinstance(plain, fsdp.FSDPModule):
        expected = "a DistributedDataParallel, or what fully_shard or shard gives"
        raise InputError("GlobalMean", "model", type(plain).__name__, expected)
    from pyps.torch.fsdp_shards import ShardedModel

    return ShardedModel(plain)
