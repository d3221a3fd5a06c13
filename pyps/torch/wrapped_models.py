"""WrappedDDP and WrappedShards: models in DDP, or that went through shard(), as GlobalMean uses them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import repeat
from operator import contains
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from pyps.errors import InputError
from pyps.sharding.modules import run_of, unit_of
from pyps.torch.peers import is_divided, parameters_of
from pyps.torch.waiting import Waiting
from pyps.torch.wire import install_wire
from pyps.torch.wrapped import Watcher, Wrapped

NOT_YET: Any = 1  # of DDP's require_forward_param_sync, to which it is as good as True: no forward() since
BY_HOOKS = "_in_backward_optimizers"  # an attribute that torch gives parameters whose optimizers are in hooks


class WrappedDDP(Wrapped):
    """A DistributedDataParallel."""

    is_ddp = True
    again = "make DistributedDataParallel anew after unfreezing or adding a layer"

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
            return InputError("GlobalMean", "model", found, f"the same; {self.again}")
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
        return install_wire(self._ddp, wire, scaler)  # type: ignore[arg-type]

    def micro_batch(self, last: bool, whole: bool) -> AbstractContextManager[None]:
        found: AbstractContextManager[None] = nullcontext() if last else self._ddp.no_sync()
        return found


class WrappedShards(Wrapped):
    """A model that went through shard()."""

    is_ddp = False
    again = "shard() the whole model after adding a layer"

    def __init__(self, model: torch.nn.Module) -> None:
        self.run = run_of(model)
        first = self.run.owned[0].piece
        super().__init__(model, self.run.group, first.device)

    def time_passes(self, waiting: Waiting) -> None:
        self.run.waits = waiting.counted
        super().time_passes(waiting)

    def watch_own(self, watcher: Watcher) -> None:
        self.run.watchers.append(watcher)

    def reduced(self) -> list[torch.nn.Parameter]:
        return [one.piece for one in self.run.owned if one.piece.requires_grad]

    def trained(self) -> str:
        listed = [(one.name, tuple(one.shape)) for one in self.run.owned if one.piece.requires_grad]
        return f"{len(listed)} ({listed})"

    def _known(self) -> set[int]:
        wholes = [one.flat.parameters[one.k] for one in self.run.owned]
        return {id(p) for p in (*self.reduced(), *wholes)}

    def reduces(self) -> bool:
        return self.run.ends_round

    def forget(self) -> None:
        super().forget()
        for one in self.run.owned:
            one.flat.parameters[one.k].grad = None
        self.run.let_all_go()

    @contextmanager
    def micro_batch(self, last: bool, whole: bool) -> Iterator[None]:
        """Each pass is reduced as it ends, and adds up on owners; ranks with unlike numbers of passes hold
        the parameters, and their gradients, until the last.
        """
        self.run.ends_round, self.run.is_last = last, last or not whole
        if whole:
            self.run.hold_all()
        try:
            yield
        finally:
            self.run.ends_round = True
            if whole and last:
                self.run.let_all_go()


def wrapped_models(
    model: torch.nn.Module | Sequence[torch.nn.Module], where: str = "GlobalMean"
) -> list[Wrapped]:
    """Each of one or several models. Raises InputError, of `where`, for one without DDP or fully_shard."""
    models = [model] if isinstance(model, torch.nn.Module) else list(model)
    if not models:
        raise InputError(where, "model", "none", "at least one")
    return [_wrapped(one, where) for one in models]


def _wrapped(model: torch.nn.Module, where: str) -> Wrapped:
    plain = getattr(model, "_orig_mod", model)
    if isinstance(plain, DistributedDataParallel):
        return WrappedDDP(plain)
    if unit_of(plain) is not None:
        return WrappedShards(plain)
    fsdp = sys.modules.get("torch.distributed.fsdp")  # a sharded model has imported it
    if fsdp is None or not hasattr(fsdp, "FSDPModule") or not isinstance(plain, fsdp.FSDPModule):
        expected = "a DistributedDataParallel, or what fully_shard or shard gives"
        raise InputError(where, "model", type(plain).__name__, expected)
    from pyps.torch.fsdp_shards import ShardedModel

    return ShardedModel(plain)
