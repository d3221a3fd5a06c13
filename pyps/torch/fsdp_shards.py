"""ShardedModel: all that is used of FSDP2's own objects, in one place.

A model that went through fully_shard has groups of parameters. Each group gathers its parameters before a
forward or backward pass, and reduces its gradients after the backward pass. torch has public calls to change
how, and none to read it or to learn when; both are read from the groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from pyps.errors import InputError
from pyps.torch.waiting import Waiting
from pyps.torch.wrapped import OPEN, Watcher, Wrapped

COLLECTIVE = ("pre_forward", "pre_backward", "post_backward")  # methods of a group that gather and reduce
PASSES = ("reduce_grads", "all_reduce_grads", "reshard_after_backward")
KEPT = (*PASSES, "post_forward_mesh_info", "gradient_divide_factor")


class ShardedModel(Wrapped):
    """A model under fully_shard. Raises InputError for a model whose parts lie on different meshes, and for a
    torch with other groups.
    """

    is_ddp = False
    again = "fully_shard() the whole model after unfreezing or adding a layer"

    def __init__(self, model: FSDPModule) -> None:
        assert isinstance(model, torch.nn.Module)
        self._model: Any = model
        states: list[Any] = [
            module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)
        ]
        self._states = list(dict.fromkeys(states))
        self._groups: list[Any] = [group for state in self._states for group in _groups_of(state)]
        known = all(hasattr(group, name) for group in self._groups for name in (*COLLECTIVE, *KEPT))
        if not self._groups or not known:
            expected = "one whose FSDP2 is that of 2.11 to 2.13"
            raise InputError("GlobalMean", "torch", torch.__version__, expected)
        meshes = {group.mesh_info.mesh for group in self._groups}
        if len(meshes) > 1:
            found = ", ".join(map(str, meshes))
            raise InputError("GlobalMean", "model", f"parts on different meshes: {found}", "one mesh")
        mesh = meshes.pop()  # of the ranks that have different samples, those with the same shards too (HSDP)
        group: dist.ProcessGroup = (mesh if mesh.ndim == 1 else mesh._flatten()).get_group()
        super().__init__(model, group, self._groups[0].device)

    def time_passes(self, waiting: Waiting) -> None:
        """Count what the groups do in the midst of a pass as waiting, too."""
        for group in self._groups if not self._is_timed else ():
            for name in COLLECTIVE:
                _run_within(group, name, waiting.counted)
        super().time_passes(waiting)

    def watch(self) -> None:
        """Refuse a backward pass with a graph of its own too, after which FSDP2 loses gradients."""
        super().watch()
        for group in self._groups:
            _run_within(group, "pre_backward", _outermost)

    def watch_own(self, watcher: Watcher) -> None:
        for group in self._groups:
            _run_within(group, "post_backward", partial(_shown, group, watcher))

    def _sharded(self) -> Iterator[Any]:
        """FSDP2's own objects of all parameters."""
        return chain.from_iterable(group.fsdp_params for group in self._groups)

    def reduced(self) -> list[torch.nn.Parameter]:
        return [one.sharded_param for one in self._sharded() if one.sharded_param.requires_grad]

    def _known(self) -> set[int]:
        """While parameters are gathered, modules have others in their place."""
        every = [(one.sharded_param, getattr(one, "_unsharded_param", None)) for one in self._sharded()]
        return {id(shown) for shown in chain.from_iterable(every)}

    def reduces(self) -> bool:
        return all(group.reduce_grads and group.all_reduce_grads for group in self._groups)

    def check_pass(self) -> None:
        """Raise InputError if a script lets gradients be divided by another number than that of ranks."""
        ranks = dist.get_world_size(self.group)
        factors = {group.gradient_divide_factor for group in self._groups} - {None, ranks}
        if factors:
            expected = "no call of it: GlobalMean weighs the gradients"
            raise InputError("GlobalMean", "set_gradient_divide_factor()", f"{min(factors):g}", expected)

    @contextmanager
    def averaged_evenly(self) -> Iterator[None]:
        """Within it, a backward pass averages over ranks, whatever factor was set."""
        with self._restored():
            for group in self._groups:
                group.gradient_divide_factor = None
            yield

    @contextmanager
    def micro_batch(self, last: bool, whole: bool) -> Iterator[None]:
        if whole:  # ranks have unlike numbers of passes, so parameters are gathered once
            with self._restored():
                self._stay_whole(last)
                yield
        elif last:
            yield
        else:
            self._model.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                self._model.set_requires_gradient_sync(True)

    def forget(self) -> None:
        super().forget()
        for one in self._sharded():
            one.unsharded_accumulated_grad = None
            if (whole := getattr(one, "_unsharded_param", None)) is not None:
                whole.grad = None
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # passes of a loop that was left may have kept it whole

    def _stay_whole(self, last: bool) -> None:
        """The next pass finds parameters gathered if one was before; only the last one frees and reduces.

        A pass without gradients leaves its order of modules behind, and torch would gather by it again.
        """
        for group in self._groups:
            group.comm_ctx.post_forward_order.clear()
            group._post_forward_indices.clear()
        self._model.set_reshard_after_forward(False)
        self._model.set_reshard_after_backward(last)
        self._model.set_requires_gradient_sync(last)

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """At the end, all is as it was set before."""
        self._states[0]._lazy_init()  # sets some of it
        before = [[getattr(group, name) for name in KEPT] for group in self._groups]
        last = [state._state_ctx.is_last_backward for state in self._states]
        try:
            yield
        finally:
            for group, values in zip(self._groups, before, strict=True):
                for name, value in zip(KEPT, values, strict=True):
                    setattr(group, name, value)
            for state, value in zip(self._states, last, strict=True):
                state._state_ctx.is_last_backward = value


def _groups_of(state: Any) -> list[Any]:
    """A module's groups. Before 2.13, torch had one or none for each."""
    if (groups := getattr(state, "_fsdp_param_groups", None)) is None:
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def _run_within(group: Any, name: str, context: Callable[[], AbstractContextManager[None]]) -> None:
    """Let a method of a group run within a context from now on."""
    method = getattr(group, name)

    @wraps(method)
    def run(*arguments: Any, **named: Any) -> Any:
        with context():
            return method(*arguments, **named)

    setattr(group, name, run)


def _outermost() -> AbstractContextManager[None]:
    if torch.is_grad_enabled() and not OPEN:
        found = "a gradient penalty: torch.autograd.grad(..., create_graph=True) through fully_shard"
        expected = "DistributedDataParallel: FSDP2 loses gradients after such a pass"
        raise InputError("GlobalMean", "model", found, expected)
    return nullcontext()


def _shown(group: Any, watcher: Watcher) -> AbstractContextManager[None]:
    """Show a watcher the gradients that a group is about to reduce."""
    for parameter in group.fsdp_params if group.reduce_grads and group.all_reduce_grads else ():
        own = [getattr(parameter, "unsharded_accumulated_grad", None)]
        own.append(getattr(getattr(parameter, "_unsharded_param", None), "grad", None))
        found = [getattr(g, "_local_tensor", g) for g in own if g is not None]
        if found:
            watcher(parameter.sharded_param, sum(found[1:], found[0]))
    return nullcontext()
