"""ShardedModules: all that is used of FSDP2's own objects, in one place.

A model that went through fully_shard has groups of parameters. Each group gathers its parameters before a
forward or backward pass, and reduces its gradients after the backward pass. torch has public calls to change
how, and none to read it or to learn when; both are read from the groups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from pyps.errors import InputError
from pyps.torch.waiting import Waiting

COLLECTIVE = ("pre_forward", "pre_backward", "post_backward")  # methods of a group that gather and reduce
GradientWatch = Callable[[list[tuple[torch.Tensor, torch.Tensor]], bool], None]
KEPT = (
    "reduce_grads",
    "all_reduce_grads",
    "reshard_after_backward",
    "post_forward_mesh_info",
    "gradient_divide_factor",
)


class ShardedModules:
    """The parameter groups of a model. mesh: of the ranks that have different samples.

    Raises InputError for a model whose parts lie on different meshes, and for a torch with other groups.
    """

    def __init__(self, model: FSDPModule) -> None:
        assert isinstance(model, torch.nn.Module)
        self._model: Any = model
        modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        states: list[Any] = [module._get_fsdp_state() for module in modules]
        self._states = list(dict.fromkeys(states))
        self._groups: list[Any] = [group for state in self._states for group in _groups_of(state)]
        known = all(hasattr(group, name) for group in self._groups for name in (*COLLECTIVE, *KEPT))
        if not self._groups or not known:
            raise InputError(
                "weighted_hook", "torch", torch.__version__, "one whose FSDP2 is that of 2.11 to 2.13"
            )
        meshes = {group.mesh_info.mesh for group in self._groups}
        if len(meshes) > 1:
            found = ", ".join(map(str, meshes))
            raise InputError("weighted_hook", "model", f"parts on different meshes: {found}", "one mesh")
        self.mesh: Any = meshes.pop()
        self.device: torch.device = self._groups[0].device

    def process_group(self) -> dist.ProcessGroup:
        """All ranks of the mesh, those that hold the same shards among them (HSDP)."""
        mesh = self.mesh if self.mesh.ndim == 1 else self.mesh._flatten()
        group: dist.ProcessGroup = mesh.get_group()
        return group

    def reduce_last(self, last: bool) -> None:
        """Whether the next backward pass is the last one of a round; each of them reduces."""
        self._model.set_is_last_backward(last)

    def stay_whole(self, last: bool) -> None:
        """The next pass finds parameters gathered if one was before; only the last one frees and reduces.

        A pass without gradients leaves its order of modules behind, and torch would gather by it again.
        """
        for group in self._groups:
            group.comm_ctx.post_forward_order.clear()
            group._post_forward_indices.clear()
        self._model.set_reshard_after_forward(False)
        self._model.set_reshard_after_backward(last)
        self._model.set_requires_gradient_sync(last)

    def reduce_now(self) -> None:
        """From now on each pass reduces."""
        self._model.set_requires_gradient_sync(True)

    def forget_gradients(self) -> None:
        """Drop gradients that are not reduced, and whole parameters: model.zero_grad() would see these, and
        not the shards.
        """
        for group in self._groups:
            group._partial_reduce_output = None
            for parameter in group.fsdp_params:
                if hasattr(parameter, "_unsharded_param"):
                    parameter.unsharded_accumulated_grad = parameter._unsharded_param.grad = None
            group.reshard()

    def check_divisor(self, ranks: int) -> None:
        """Raise InputError if a script lets gradients be divided by another number than that of ranks."""
        factors = {group.gradient_divide_factor for group in self._groups} - {None, ranks}
        if factors:
            expected = "no call of it: the hook divides"
            raise InputError("weighted_hook", "set_gradient_divide_factor()", f"{min(factors):g}", expected)

    def divide_evenly(self) -> None:
        """The next backward pass averages over ranks, whatever factor was set."""
        for group in self._groups:
            group.gradient_divide_factor = None

    @contextmanager
    def restored(self) -> Iterator[None]:
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

    def on_gradients(self, watch: GradientWatch) -> None:
        """Call it with a group's parameters and this rank's gradients of them, and whether they are reduced
        next.
        """
        for group in self._groups:
            group.post_backward = _watched(group, group.post_backward, watch)

    def own_gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters and this rank's gradients of them that are not reduced yet."""
        return chain.from_iterable(map(_own_gradients, self._groups))

    def on_methods(self, before: Callable[..., None], after: Callable[..., None]) -> None:
        """Call them around the model's methods that register_fsdp_forward_method makes forward passes."""
        state, module = self._states[0], self._model
        enter, leave = state._pre_forward, state._post_forward

        named: list[Any] = [{}]

        def entered(of: Any, args: Any, kwargs: Any) -> Any:
            named[0] = kwargs
            before(module, args, kwargs)
            return enter(of, args, kwargs)

        def left(of: Any, args: Any, output: Any) -> Any:
            found = leave(of, args, output)
            after(module, args, named[0], found)
            return found

        state._pre_forward, state._post_forward = entered, left

    def count_waits(self, waiting: Waiting) -> None:
        """From now on what the groups do in the midst of a pass counts as waiting."""
        for group in self._groups:
            for name in COLLECTIVE:
                setattr(group, name, _counted(getattr(group, name), waiting))


def _groups_of(state: Any) -> list[Any]:
    """A module's groups. Before 2.13, torch had one or none for each."""
    if (groups := getattr(state, "_fsdp_param_groups", None)) is None:
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def _watched(group: Any, method: Callable[..., Any], watch: GradientWatch) -> Callable[..., Any]:
    @functools.wraps(method)
    def watched(*arguments: Any, **named: Any) -> Any:
        watch(list(_own_gradients(group)), group.reduce_grads)
        return method(*arguments, **named)

    return watched


def _own_gradients(group: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A group's parameters and this rank's gradients of them, as they are reduced next."""
    for parameter in group.fsdp_params:
        if not hasattr(parameter, "_unsharded_param"):
            continue
        parameter.accumulate_unsharded_grad_if_needed()
        if parameter.unsharded_accumulated_grad is not None:
            yield parameter.sharded_param, parameter.unsharded_accumulated_grad_data
        elif parameter.unsharded_param.grad is not None:
            yield parameter.sharded_param, parameter.unsharded_grad_data


def _counted(method: Callable[..., Any], waiting: Waiting) -> Callable[..., Any]:
    @functools.wraps(method)
    def counted(*arguments: Any, **named: Any) -> Any:
        with waiting.counted():
            return method(*arguments, **named)

    return counted
