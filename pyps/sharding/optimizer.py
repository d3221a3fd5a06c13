"""shard_optimizer: an optimizer's state in proportion to shares, under DistributedDataParallel (ZeRO-1).

    model = DistributedDataParallel(model)
    optimizer = AdamW(model.parameters())
    shard_optimizer(optimizer, [2 / 3, 1 / 3])
    ...
    loss.backward(); clip_grad_norm_(model.parameters(), 1.0); optimizer.step(); optimizer.zero_grad()

The optimizer stays the user's own object. Its groups have the whole parameters, as before, whose gradients
DDP has made alike on all ranks: so clipping, a GradScaler and schedulers work as they do. Within step() the
groups have this rank's pieces instead, which are views of the parameters, with views of their gradients.
Afterwards each rank's part of the parameters goes to all. With master weights a piece is a copy in float32,
say, that its owner alone has: it is rounded into the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.utils.dlpack import from_dlpack

from pyps.errors import InputError
from pyps.sharding.elementwise import check_elementwise
from pyps.sharding.flat import FlatVector, agree, agree_refusal, world
from pyps.sharding.layout import SharesLike, read_shares
from pyps.sharding.state import STEP, Owned, cut_state, whole_of

CALL = "shard_optimizer"
MOST_BYTES = 1 << 26  # of a vector, unless a parameter has more: what is held twice while vectors are made
APART = ("cpu", "cuda")  # devices whose memory other libraries' tensors may share
MASTER = "master"  # of a parameter's state
NOT_SHARDED = "a state that is on this rank alone"
_sharded: WeakKeyDictionary[torch.optim.Optimizer, ShardedOptimizer] = WeakKeyDictionary()


def shard_optimizer(
    optimizer: torch.optim.Optimizer,
    shares: SharesLike,
    group: dist.ProcessGroup | None = None,
    *,
    master_dtype: torch.dtype | None = None,
) -> torch.optim.Optimizer:
    """Keep this rank's share of the optimizer's state alone; the same optimizer, which all ranks call it for.

    optimizer: of a model in DistributedDataParallel, or of one whose gradients are alike on all ranks in
    another way; one that computes each element by itself. Its parameters become views of flat vectors.
    shares: of the ranks of `group`, which sum to one, or a plan with shares, or its file.
    master_dtype: that of the master weights and of the optimizer's state, of parameters in a smaller one.
    Call it before schedulers and hooks of the optimizer are made. state_dict() then needs
    optimizer.consolidate_state_dict() on all ranks, as of a ZeroRedundancyOptimizer. Raises InputError for
    shares, parameters and optimizers that differ by rank or do not fit.
    """
    group = world(group)
    if optimizer in _sharded:
        raise InputError(CALL, "optimizer", "a sharded one", "one call for each optimizer")
    known: tuple[float, ...] = ()
    named: list[tuple[str, torch.nn.Parameter]] = []
    refused: InputError | None = None
    try:
        known = read_shares(shares, dist.get_world_size(group))
        named = list(_trained(optimizer))
        check_elementwise(CALL, optimizer)
    except InputError as error:  # the other ranks may not refuse it, and would wait
        refused = error
    described = [(slot, tuple(parameter.shape), str(parameter.dtype)) for slot, parameter in named]
    if (said := agree_refusal(group, refused)) is not None:
        raise said
    alike = {"shares": known, "optimizer": type(optimizer).__name__, "parameters": described}
    agree(CALL, group, {**alike, "master_dtype": str(master_dtype)})
    flats = [FlatVector(some, known, group) for some in _buckets(named)]
    _sharded[optimizer] = ShardedOptimizer(optimizer, flats, master_dtype)
    return optimizer


def sharded_optimizer(optimizer: torch.optim.Optimizer) -> ShardedOptimizer | None:
    """Return what shard_optimizer() has made of it, if it has."""
    return _sharded.get(optimizer)


def _trained(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters that train, by number. Raises InputError for those that cannot be cut."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for number, parameter in enumerate(parameters):
        if type(parameter.data) is not torch.Tensor or parameter.layout is not torch.strided:
            found = f"a {type(parameter.data).__name__} with layout {parameter.layout}"
            raise InputError(CALL, f"parameter {number}", found, "a plain tensor")
        if parameter.requires_grad:
            yield str(number), parameter


def _buckets(
    named: Sequence[tuple[str, torch.nn.Parameter]],
) -> Iterator[list[tuple[str, torch.nn.Parameter]]]:
    """Yield the parameters in order, those of one dtype and device together, up to MOST_BYTES."""
    waiting: dict[Any, list[tuple[str, torch.nn.Parameter]]] = {}
    for name, parameter in named:
        bucket = waiting.setdefault((parameter.dtype, parameter.device), [])
        if bucket and sum(p.nbytes for _, p in bucket) + parameter.nbytes > MOST_BYTES:
            yield list(bucket)
            bucket.clear()
        bucket.append((name, parameter))
    yield from waiting.values()


def _apart(view: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the same memory, with a storage of its own: what saves files of safetensors drops or
    refuses tensors that share one.
    """
    return from_dlpack(view) if view.numel() and view.device.type in APART else view


class ShardedOptimizer:
    """The pieces that an optimizer steps on this rank.

    owned: of each trained parameter, by its number among those of the optimizer. masters: this rank's part of
    a vector in a larger dtype, where it has one.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, flats: list[FlatVector], master_dtype: torch.dtype | None
    ) -> None:
        self.flats, self.owned = flats, dict[int, Owned]()
        self.masters: dict[FlatVector, torch.Tensor] = {}
        self._pieces: dict[torch.Tensor, torch.nn.Parameter] = {}
        self._wholes: dict[torch.Tensor, torch.nn.Parameter] = {}
        self._state: dict[str, Any] | None = None
        for flat in flats:
            part = flat.vector[flat.mine]
            if (
                master_dtype is not None
                and part.is_floating_point()
                and part.itemsize < master_dtype.itemsize
            ):
                part = self.masters[flat] = part.to(master_dtype)
            for k, parameter in enumerate(flat.parameters):
                parameter.data = _apart(parameter.data)
                piece = torch.nn.Parameter(flat.piece_of(part, k))
                self.owned[int(flat.slots[k].name)] = Owned(flat, k, piece)
                self._pieces[parameter], self._wholes[piece] = piece, parameter
                if parameter in optimizer.state:
                    one = self.owned[int(flat.slots[k].name)]
                    state = one.cut(optimizer.state.pop(parameter))
                    cast = {n: v.to(part.dtype) for n, v in state.items() if n != STEP and one.is_piece(v)}
                    optimizer.state[piece] = state | cast
        self._stand_in(optimizer)

    def _stand_in(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the place of step(), state_dict() and load_state_dict() of this object."""
        inner = optimizer.step

        @wraps(inner)  # with the marks that a scheduler has left
        def step(own: torch.optim.Optimizer, closure: Callable[[], Any] | None = None, **named: Any) -> Any:
            if closure is not None:
                named["closure"] = self._with_wholes(own, closure)
            last = own.register_step_pre_hook(lambda *_: self._begin(own))
            try:
                return inner(**named)
            finally:
                last.remove()
                self._show(own, self._wholes)

        def state_dict(own: torch.optim.Optimizer) -> dict[str, Any]:
            state, self._state = self._state, None
            if state is None:
                expected = "consolidate_state_dict() on all ranks before, which gives one rank all of it"
                raise InputError("state_dict", "optimizer", NOT_SHARDED, expected)
            return state

        def load_state_dict(own: torch.optim.Optimizer, state: dict[str, Any]) -> None:
            with self.showing_pieces(own):
                type(own).load_state_dict(own, self._without_masters(cut_state(state, self.owned)))

        ended = optimizer.register_step_post_hook(lambda *_: self._end(optimizer))
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(ended.id, last=False)
        own: Any = optimizer
        own.step, own.state_dict = MethodType(step, optimizer), MethodType(state_dict, optimizer)
        own.load_state_dict = MethodType(load_state_dict, optimizer)
        own.consolidate_state_dict = MethodType(self._consolidate, optimizer)

    def _consolidate(self, own: torch.optim.Optimizer, to: int | None = 0) -> None:
        """Gather the state for the next state_dict() of rank `to`, or of all (None); all ranks call it."""
        state = whole_of(self.pieces_state(own), self.owned, to)
        self._state = state or None

    def pieces_state(self, own: torch.optim.Optimizer) -> dict[str, Any]:
        """Return its state dict with this rank's pieces of each tensor."""
        with self.showing_pieces(own):
            found: dict[str, Any] = type(own).state_dict(own)
        of_masters = [(k, one.piece.detach()) for k, one in self.owned.items() if one.flat in self.masters]
        more = {k: {**found["state"].get(k, {}), MASTER: value} for k, value in of_masters}
        return {**found, "state": found["state"] | more}

    def _without_masters(self, state: dict[str, Any]) -> dict[str, Any]:
        """Load the master weights of a state dict, or the parameters where it has none; return the rest."""
        for flat, master in self.masters.items():
            master.copy_(flat.vector[flat.mine])
        for k, one in self.owned.items():
            if (value := state["state"].get(k, {}).get(MASTER)) is not None and one.flat in self.masters:
                one.piece.data.copy_(value.as_subclass(torch.Tensor))
        rest = {
            k: {name: value for name, value in values.items() if name != MASTER}
            for k, values in state["state"].items()
        }
        return {**state, "state": {k: values for k, values in rest.items() if values}}

    @contextmanager
    def showing_pieces(self, own: torch.optim.Optimizer) -> Iterator[None]:
        """Within it, the optimizer's groups have pieces in place of parameters."""
        self._show(own, self._pieces)
        try:
            yield
        finally:
            self._show(own, self._wholes)

    def _show(self, own: torch.optim.Optimizer, instead: dict[torch.Tensor, torch.nn.Parameter]) -> None:
        for group in own.param_groups:
            group["params"] = [instead.get(parameter, parameter) for parameter in group["params"]]

    def _with_wholes(self, own: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure computes gradients within step(): it sees parameters, and the step sees its gradients."""

        def called() -> Any:
            self._show(own, self._wholes)
            try:
                return closure()
            finally:
                self._begin(own)

        return called

    def _begin(self, own: torch.optim.Optimizer) -> None:
        """Show pieces with their gradients. Raises InputError for parameters that are new, or moved."""
        for number, parameter in enumerate(p for group in own.param_groups for p in group["params"]):
            if parameter not in self._pieces and parameter.grad is not None:
                expected = "parameters that the optimizer had, and that trained, when it was sharded"
                raise InputError(CALL, f"parameter {number}", "a gradient of another one", expected)
        for one in self.owned.values():
            whole = one.flat.parameters[one.k]
            if whole.data_ptr() != one.flat.vector[one.flat.places[one.k]].data_ptr():
                expected = "model.to(), .half() and assignments to .data before shard_optimizer()"
                raise InputError(CALL, f"parameter {one.name}", "a tensor in another place", expected)
            gradient = whole.grad
            if gradient is not None and gradient.layout is not torch.strided:
                raise InputError(CALL, f"gradient {one.name}", str(gradient.layout), "a dense one")
            cut = None if gradient is None else one.flat.slots[one.k].flat(gradient)[one.flat.pieces[one.k]]
            one.piece.grad = None if cut is None else cut.to(one.piece.dtype)
        for flat, master in self.masters.items():  # a script may have changed the parameters
            part = flat.vector[flat.mine]
            torch.where(master.to(part.dtype) == part, master, part.to(master.dtype), out=master)
        self._show(own, self._pieces)

    def _end(self, own: torch.optim.Optimizer) -> None:
        """Show parameters, and gather them."""
        self._show(own, self._wholes)
        for one in self.owned.values():
            one.piece.grad = None
        for flat, master in self.masters.items():
            flat.vector[flat.mine].copy_(master)
        for work in [work for flat in self.flats for work in flat.gather()]:
            work.wait()
