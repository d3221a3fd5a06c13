"""shard: parameters, gradients and optimizer states in proportion to shares (ZeRO-3).

    for block in model.blocks:
        shard(block, shares)
    shard(model, shares)
    optimizer = AdamW(model.parameters())        # of this rank's pieces
    ...
    loss.backward(); clip_grad_norm_(model.parameters(), 1.0); optimizer.step(); optimizer.zero_grad()

It is used as torch's fully_shard. A block is gathered before its forward and its backward pass and freed
after; its gradients are averaged on their owners. Ranks say which block they compute before they gather it,
so that one that skips a block is named. A block is reduced and freed as the one before it in the forward pass
begins its backward pass: autograd has all of its gradients then, and ranks keep one order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial, reduce
from itertools import chain
from operator import or_
from types import MethodType
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_flatten, tree_map

from pyps.agreement.rows import StepAgreement
from pyps.errors import InputError
from pyps.sharding.elementwise import check_elementwise
from pyps.sharding.flat import Reduction, agree, world
from pyps.sharding.gradient import PieceGradients
from pyps.sharding.layout import SharesLike, read_shares
from pyps.sharding.state import OWNER, Owned, cut_state, parts_of, whole_of
from pyps.sharding.state_dicts import owned_by, pieces_state
from pyps.sharding.unit import ShardedVector, ShardUnit

CALL = "shard"
UNIT = "_pyps_unit"  # an attribute of a module
TIMEOUT_SECONDS = 300.0
IN_FLIGHT = 2  # reductions whose vectors are held at a time
PLAIN = (int, float, str, type(None), torch.Tensor)  # of an output: what has no gradient
BITS = 48  # of a number that tells which parameters have gradients
_checked: WeakSet[torch.optim.Optimizer] = WeakSet()
_engine: Any = torch.autograd.Variable._execution_engine


def shard(
    module: torch.nn.Module,
    shares: SharesLike,
    group: dist.ProcessGroup | None = None,
    *,
    mp_policy: Any = None,
    device: torch.device | str | None = None,
    prefetch: bool = True,
    timeout: float = TIMEOUT_SECONDS,
) -> torch.nn.Module:
    """Keep this rank's share of a module's parameters alone; the same module. All ranks call it equally.

    module: a block, then the whole model. shares: of the ranks of `group`, which sum to one, or a plan with
    shares, or its file. mp_policy: a MixedPrecisionPolicy of torch.distributed.fsdp. device: where the parts
    and gathered blocks lie; by default where the parameters are, which begin as the first rank's.
    prefetch: begin to gather the next block while one computes. timeout: seconds to wait for a rank.
    Make the optimizer afterwards. Raises InputError for what does not fit, and for ranks that differ.
    """
    group, place = world(group), torch.device(device) if device is not None else None
    if unit_of(module) is not None:
        raise InputError(CALL, "module", "a sharded one", "one call for each module")
    known = read_shares(shares, dist.get_world_size(group))
    inner = [one for other in module.modules() if (one := unit_of(other)) is not None]
    taken = {id(other) for one in inner for other in one.members}
    members = [other for other in module.modules() if id(other) not in taken]
    places = [(m, name) for m in members for name, p in m._parameters.items() if p is not None]
    unit = ShardUnit(module, members, places)
    compute = getattr(mp_policy, "param_dtype", None)
    unit.shard(lambda named: ShardedVector(named, known, group, compute, place))
    for owner, name, buffer in [(m, n, b) for m in members for n, b in m._buffers.items() if b is not None]:
        owner._buffers[name] = buffer = buffer.to(place) if place is not None else buffer
        dist.broadcast(buffer, dist.get_process_group_ranks(group)[0], group=group)
    ShardedRun([*inner, unit], group, known, mp_policy, prefetch, timeout)
    setattr(module, UNIT, unit)
    _hook(unit, mp_policy)
    return module


def _check_optimizer(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise InputError as an optimizer first steps pieces, if that differs from whole parameters, or if it
    has whole ones, which get no gradients. From then on its state dict has TensorParts, as the model's.
    """
    if optimizer not in _checked:
        every = (getattr(p, OWNER, None) for group in optimizer.param_groups for p in group["params"])
        early = next((one for one in every if one is not None and isinstance(one.flat, ShardedVector)), None)
        if early is not None:
            found = "a parameter of before shard()"
            raise InputError(CALL, f"optimizer, {early.name}", found, "an optimizer made after shard()")
        if owned_by(optimizer):
            check_elementwise(CALL, optimizer)
            optimizer.register_state_dict_post_hook(lambda own, state: parts_of(state, owned_by(own)))
            optimizer.register_load_state_dict_pre_hook(lambda own, state: cut_state(state, owned_by(own)))
        _checked.add(optimizer)


register_optimizer_step_pre_hook(_check_optimizer)


def shard_blocks(model: torch.nn.Module, shares: SharesLike, **options: Any) -> torch.nn.Module:
    """Shard a model's blocks, then the model: those that it names in `_no_split_modules`, as transformers'
    do, or else what its lists and sequences of modules hold. A model with a sharded block keeps to these.
    """
    known = getattr(model, "_no_split_modules", None) or ()
    if not any(unit_of(module) is not None for module in model.modules()):
        for block in _blocks(model, set(known)):
            shard(block, shares, **options)
    return shard(model, shares, **options)


def _blocks(module: torch.nn.Module, known: set[str]) -> Iterator[torch.nn.Module]:
    """Yield the outermost blocks that have parameters."""
    is_list = isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential))
    for child in module.children():
        if type(child).__name__ in known if known else is_list and any(True for _ in child.parameters()):
            yield child
        else:
            yield from _blocks(child, known)


def take_pieces(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer that was made before shard() this rank's pieces in place of whole parameters.

    As shard_optimizer() does, it adds consolidate_state_dict(), after which state_dict() is whole. Raises
    InputError for an optimizer that would step pieces otherwise than whole parameters.
    """
    for group in optimizer.param_groups:
        owned: list[Owned | None] = [getattr(p, OWNER, None) for p in group["params"]]
        for p, one in zip(group["params"], owned, strict=True):
            if one is not None and p in optimizer.state:
                optimizer.state[one.piece] = one.cut(optimizer.state.pop(p))
        pairs = zip(group["params"], owned, strict=True)
        group["params"] = [p if one is None else one.piece for p, one in pairs]
    if not owned_by(optimizer):
        return
    _check_optimizer(optimizer)
    whole: list[dict[str, Any]] = []

    def consolidate(own: torch.optim.Optimizer, to: int | None = 0) -> None:
        whole[:] = [whole_of(pieces_state(own), owned_by(own), to)]

    def state_dict(own: torch.optim.Optimizer) -> dict[str, Any]:
        return (whole.pop() if whole else None) or type(own).state_dict(own)

    own: Any = optimizer
    own.consolidate_state_dict = MethodType(consolidate, optimizer)
    own.state_dict = MethodType(state_dict, optimizer)


def unit_of(module: torch.nn.Module) -> ShardUnit | None:
    """Return what shard() has made of this module; None if it was not called for it."""
    return module.__dict__.get(UNIT)


def run_of(model: torch.nn.Module) -> ShardedRun:
    """Return what a sharded model's units share. Raises InputError for another model."""
    unit = unit_of(model)
    if unit is None:
        raise InputError(CALL, "model", type(model).__name__, "one that went through shard()")
    run: ShardedRun = unit.run
    return run


@contextmanager
def gathered(model: torch.nn.Module) -> Iterator[None]:
    """Within it, all parameters are whole and no pass waits for other ranks; all ranks enter and leave it.

    For generation, an evaluation on some ranks, and other code that reads parameters. What it changes of them
    is lost.
    """
    run = run_of(model)
    run.hold_all()
    try:
        yield
    finally:
        run.let_all_go()


def _hook(unit: ShardUnit, mp_policy: Any) -> None:
    """Put the unit's calls around the passes and the state dicts of its module."""
    casts = getattr(mp_policy, "param_dtype", None), getattr(mp_policy, "output_dtype", None)
    into = casts[0] if getattr(mp_policy, "cast_forward_inputs", False) else None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enters(_: Any, args: Any, named: Any) -> Any:
        unit.run.enter(unit)
        return _cast((args, named), into)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def leaves(_: Any, __: Any, output: Any) -> Any:
        output = _cast(output, casts[1])
        unit.run.leave(unit, output)
        return output

    unit.module.register_forward_pre_hook(enters, prepend=True, with_kwargs=True)
    unit.module.register_forward_hook(leaves, always_call=False)
    for member in unit.members:
        hooked: Any = member  # torch's types lack these
        hooked._register_state_dict_hook(unit.note_state)
        hooked._register_load_state_dict_pre_hook(partial(unit.cut_state, member))


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    """Return nested values with floating-point tensors of this dtype."""
    if dtype is None:
        return values

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return tree_map(cast, values)


class ShardedRun:
    """The state that units of a model share: where the passes are, and what ranks have agreed on.

    units: of the model, the root last. computing: whether a pass of the model runs now. is_last: whether
    the next backward pass reduces gradients that were held. ends_round: whether a GlobalMean weighs what has
    added up when it is over. waits: a context for waits, of timers.
    """

    def __init__(
        self,
        units: list[ShardUnit],
        group: dist.ProcessGroup,
        shares: Sequence[float],
        mp_policy: Any,
        prefetch: bool,
        timeout: float,
    ) -> None:
        self.units, self.root, self.group, self.shares = units, units[-1], group, shares
        self.ranks = dist.get_world_size(group)
        self.waits: Callable[[], AbstractContextManager[None]] = nullcontext
        self.computing, self.is_last, self.ends_round = False, True, True
        self.watchers: list[Any] = []
        self._prefetches, self._timeout = prefetch, timeout
        self._reduce_dtype = getattr(mp_policy, "reduce_dtype", None)
        self._agreement: StepAgreement | None = None
        self._held = self._in_backward = False
        self._order: list[ShardUnit] = []  # of the latest forward pass
        self._entered: list[ShardUnit] = []  # of this one
        self._open: dict[
            ShardUnit, bool
        ] = {}  # gathered in this backward pass; whether their backward pass has begun
        self._passes = 0  # backward passes
        self._used: set[Owned] = set()
        self._reductions: list[tuple[ShardedVector, Reduction]] = []
        for unit in units:
            unit.run = self
        self._name(self.root.module)

    def _name(self, root: torch.nn.Module) -> None:
        """Name units and parameters as seen from the root."""
        names = {id(module): name for name, module in root.named_modules()}
        for unit in self.units:
            unit.name = names[id(unit.module)]
            for module, attribute, one in unit.shown:
                if one.flat in unit.vectors:
                    name = ".".join(filter(None, (names[id(module)], attribute)))
                    one.flat.slots[one.k] = replace(one.flat.slots[one.k], name=name)
        self.vectors = [vector for unit in self.units for vector in unit.vectors]
        self.owned: list[Owned] = [one for vector in self.vectors for one in vector.owned]

    def _agree(self, call: str, values: Sequence[float] = ()) -> list[list[float]]:
        """Wait until all ranks are at this call, with a row of values each; the rows. Raises InputError that
        names ranks elsewhere.
        """
        with self.waits():
            if self._agreement is None:
                described = [(one.name, tuple(one.shape), str(one.piece.dtype)) for one in self.owned]
                agree(CALL, self.group, {"shares": self.shares, "parameters": described})
                self._agreement = StepAgreement(CALL, self.group, None, self._timeout)
            return self._agreement.exchange({"pass": call}, values)

    # Forward passes

    def enter(self, unit: ShardUnit) -> None:
        """A unit begins a forward pass: gather it, and begin to gather the next."""
        if self._held:
            return
        if self._in_backward and torch._C._current_graph_task_id() == -1:
            self._reset()  # an error has ended that backward pass
        again = self._in_backward  # activation checkpointing's second forward pass
        if not again and (unit is self.root or not self.computing):
            self.computing, self._entered = True, []
            unit.let_go()  # the optimizer may have stepped since
        if again and unit.is_whole:
            return
        self._agree(f"forward of {unit.label}")
        self._gather(unit)
        if again:
            self._open.setdefault(unit, False)
            return
        self._entered.append(unit)
        self._prefetch(unit, 1)

    def leave(self, unit: ShardUnit, output: Any) -> None:
        """A unit's forward pass is over: free it until the gradient of its output arrives."""
        if not self._held and not self._in_backward:
            graph = torch.is_grad_enabled()
            ends = unit is self.root or self.root not in self._entered
            if unit is not self.root or not graph:
                unit.let_go()
            if ends:
                self.computing, self._order = False, [one for one in self._entered if one is not self.root]
                for one in self.units[:-1]:
                    one.let_go()  # what was prefetched for nothing
        call, leaves = [-1], tree_flatten(output)[0]
        computed = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
        for value in computed:
            value.register_hook(partial(self._arrives, unit, call))  # type: ignore[no-untyped-call]
        unknown = [type(x).__name__ for x in leaves if not isinstance(x, PLAIN)]
        if torch.is_grad_enabled() and unknown and not computed:
            expected = "tensors, in tuples, lists and dicts, or what torch.utils._pytree knows"
            raise InputError(CALL, f"output of {unit.label}", f"a {unknown[0]}", expected)

    def _gather(self, unit: ShardUnit) -> None:
        with self.waits():
            unit.hold()

    def _prefetch(self, unit: ShardUnit, step: int) -> None:
        if self._prefetches and unit in self._order:
            k = self._order.index(unit) + step
            if 0 <= k < len(self._order):
                self._order[k].begin()

    # Backward passes

    def _arrives(self, unit: ShardUnit, call: list[int], _: torch.Tensor) -> None:
        """A gradient of a unit's output is there: gather it; reduce and free those after it."""
        if not self._in_backward:
            self._in_backward, self.computing = True, True
            self._passes += 1
            _engine.queue_callback(self._finish)
        if call[0] == self._passes or self._held:
            return
        call[0] = self._passes
        self._agree(f"backward of {unit.label}")
        for other, has_begun in list(self._open.items()):
            if not other.is_within(unit) and not unit.is_within(other):
                self._close(other, has_begun)
        self._gather(unit)
        self._open[unit] = True
        self._prefetch(unit, -1)

    def _close(self, unit: ShardUnit, reduces: bool) -> None:
        del self._open[unit]
        unit.let_go()
        if reduces:
            for vector in unit.vectors:
                if vector.trains:
                    self._reduce(vector)

    def _reduce(self, vector: ShardedVector) -> None:
        """Begin to average a vector's gradients on their owners."""
        had = [one for one in vector.owned if vector.parameters[one.k].grad is not None]
        self._used |= set(had)
        for watcher in self.watchers:
            for one in had:
                watcher(one.piece, vector.parameters[one.k].grad)
        dtype = self._reduce_dtype if self._reduce_dtype is not None else vector.vector.dtype
        packed = vector.packed(dtype, self.ranks)
        if len(self._reductions) >= IN_FLIGHT:
            self._reductions[-IN_FLIGHT][1].wait()
        self._reductions.append((vector, vector.reduce(packed)))

    def _finish(self) -> None:
        """The backward pass is over: reduce what is left, and give the pieces their gradients."""
        if self._held and not self.is_last:
            self._in_backward = self.computing = False
            return
        for unit, has_begun in list(self._open.items()):
            self._close(unit, has_begun)
        trained = [one for one in self.owned if one.piece.requires_grad]
        waiting = [one.flat.parameters[one.k].grad is not None for one in trained]
        used = [one in self._used or left for one, left in zip(trained, waiting, strict=True)]
        rows = self._agree("the end of backward", _numbers([*waiting, *used]))
        either = _bits(rows, 2 * len(trained))
        left = {one.flat for one, some in zip(trained, either, strict=False) if some}
        for vector in self.vectors:
            if vector in left:
                self._reduce(vector)
        with self.waits():
            for _, reduction in self._reductions:
                reduction.wait()
        try:
            self._give({one for one, some in zip(trained, either[len(trained) :], strict=True) if some})
        finally:
            self._reset()

    def _give(self, used: set[Owned]) -> None:
        """Add the reduced gradients to those of the pieces."""
        for vector, reduction in self._reductions:
            own = reduction.wait()
            for one in vector.owned:
                if one in used:
                    found = vector.piece_of(own, one.k).to(one.piece.dtype)
                    if one.piece.grad is None:
                        one.piece.grad = found
                    else:
                        one.piece.grad.add_(found)
        PieceGradients([one.piece for one in self.owned if one.piece.grad is not None], self.group)
        for one in self.owned:
            hooks: Any = one in used and getattr(one.piece, "_post_accumulate_grad_hooks", None)
            for hook in list((hooks or {}).values()):
                hook(one.piece)

    def _reset(self) -> None:
        self._reductions, self._open = [], {}
        self._used.clear()
        self._in_backward = self.computing = False
        if not self._held:
            for unit in self.units:
                unit.let_go()

    # Whole parameters

    def hold_all(self) -> None:
        """Gather all units, until let_all_go()."""
        if not self._held:
            for unit in self.units:
                unit.let_go()
            self._agree("gathered")
            for unit in self.units:
                self._gather(unit)
            self._held = True

    def let_all_go(self) -> None:
        """Free all units."""
        self._held, self.is_last = False, True
        self._reset()


def _numbers(bits: Sequence[bool]) -> list[float]:
    """Return bits as numbers that float64 holds exactly."""
    parts = [bits[k : k + BITS] for k in range(0, len(bits), BITS)]
    return [float(sum(1 << k for k, bit in enumerate(part) if bit)) for part in parts]


def _bits(rows: list[list[float]], count: int) -> list[bool]:
    """Return which bits are set on any rank."""
    either = [reduce(or_, map(int, column)) for column in zip(*rows, strict=True)]
    found = chain.from_iterable([bool(number >> k & 1) for k in range(BITS)] for number in either)
    return list(found)[:count]
