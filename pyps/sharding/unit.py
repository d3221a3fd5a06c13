"""Units: the parameters of a block, gathered before it computes and freed after it has.

A unit has one vector for parameters of a dtype. The rank keeps its part of it, which the optimizer steps in
pieces. The whole vector has memory only while some unit holds it. Modules show whole parameters while their
unit is gathered, and else this rank's pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pyps.errors import InputError
from pyps.sharding.flat import FlatVector
from pyps.sharding.state import OWNER, Owned, TensorPart, owned_of

Named = tuple[str, torch.nn.Parameter]


class ShardedVector(FlatVector):
    """A flat vector without memory of its own, but while units hold it; `part` is this rank's.

    compute: the dtype of the whole vector; by default the parameters'. device: where both are.
    """

    def __init__(
        self,
        named: Iterable[Named],
        shares: Sequence[float],
        group: dist.ProcessGroup,
        compute: torch.dtype | None,
        device: torch.device | None,
    ) -> None:
        super().__init__(named, shares, group)
        first: Any = self.parameters[0]
        device = device or self.vector.device
        whole = self.vector.to(device)
        dist.broadcast(whole, dist.get_process_group_ranks(group)[0], group=group)
        self.part = whole[self.mine].clone()
        wanted = compute if compute is not None and first.dtype.is_floating_point else first.dtype
        self.vector = whole.to(wanted) if wanted != first.dtype else whole
        for parameter, slot, place in zip(self.parameters, self.slots, self.places, strict=True):
            parameter.data = slot.shaped(self.vector[place])
        self.holders: set[ShardUnit] = set()
        self._works: list[Any] = []
        self.owned = []
        for k, parameter in enumerate(self.parameters):
            piece = torch.nn.Parameter(self.piece_of(self.part, k), parameter.requires_grad)
            self.owned.append(Owned(self, k, piece))

    @property
    def trains(self) -> bool:
        """Tell whether any of its parameters trains."""
        return any(one.piece.requires_grad for one in self.owned)

    def begin(self, holder: ShardUnit) -> None:
        """Give it memory, unless it has some; begin to gather. Raises InputError for pieces that moved."""
        if not self.holders:
            for one in self.owned:
                if one.piece.data_ptr() != self.piece_of(self.part, one.k).data_ptr():
                    expected = "model.to(), .half() and assignments to .data before shard()"
                    raise InputError("shard", one.name, "a piece in another place", expected)
            self.vector.untyped_storage().resize_(self.layout.count * self.vector.itemsize)
            self.vector[self.mine].copy_(self.part)
            self._works = self.gather()
        self.holders.add(holder)

    def finish(self) -> None:
        """Wait until it is gathered."""
        for work in self._works:
            work.wait()
        self._works = []

    def let_go(self, holder: ShardUnit) -> None:
        """Free its memory, if nothing else holds it."""
        if self.holders == {holder}:
            self.finish()
            self.vector.untyped_storage().resize_(0)
        self.holders.discard(holder)

    def packed(self, dtype: torch.dtype, ranks: int) -> torch.Tensor:
        """Return the gradients divided by `ranks` as one vector, and free them; none counts as zeros."""
        found = torch.empty(self.layout.count, dtype=dtype, device=self.vector.device)
        for parameter, slot, place in zip(self.parameters, self.slots, self.places, strict=True):
            if parameter.grad is None:
                found[place].zero_()
            else:
                if parameter.grad.layout is not torch.strided:
                    raise InputError("shard", slot.name, str(parameter.grad.layout), "a dense gradient")
                own = slot.flat(parameter.grad)
                torch.div(own if own.dtype == dtype else own.to(dtype), ranks, out=found[place])
                parameter.grad = None
        return found


class GuardedParameters(dict[str, Any]):
    """A module's parameters, of which a freed one is not read while the model computes."""

    unit: ShardUnit

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        if self.unit.run.computing and found is not None and owned_of(found) is not None:
            expected = f"to be read in the forward pass of {self.unit.label} alone, or within gathered(model)"
            raise InputError("shard", owned_of(found).name, "a parameter that is freed", expected)  # type: ignore[union-attr]
        return found


class ShardUnit:
    """The parameters that go with one module: its own, and those of modules in it that no other unit has.

    members: these modules. shown: their parameters, by module and attribute. borrowed: vectors of other units
    that have parameters of it too, as tied ones.
    """

    run: Any  # of the root that it belongs to

    def __init__(
        self,
        module: torch.nn.Module,
        members: list[torch.nn.Module],
        places: list[tuple[torch.nn.Module, str]],
    ) -> None:
        self.module, self.members, self.name = module, members, ""
        self._places: list[tuple[torch.nn.Module, str, Any]] = [
            (inner, attribute, inner._parameters[attribute]) for inner, attribute in places
        ]
        self.vectors: list[ShardedVector] = []
        self.borrowed: list[ShardedVector] = []
        self.shown: list[tuple[torch.nn.Module, str, Owned]] = []
        self.is_whole = self._has_begun = False

    @property
    def label(self) -> str:
        """Return what messages call it."""
        return repr(self.name) if self.name else "the model"

    def is_within(self, other: ShardUnit) -> bool:
        """Return whether its module is the other's, or in it."""
        return other.name in ("", self.name) or self.name.startswith(f"{other.name}.")

    def shard(self, make: Any) -> None:
        """Cut its parameters, those of one dtype that train together; `make` makes a vector of them."""
        kinds: dict[Any, dict[torch.nn.Parameter, str]] = {}
        for _, attribute, parameter in self._places:
            owned = getattr(parameter, OWNER, None)
            if owned is not None:  # tied to one of another unit
                self.borrowed = list(dict.fromkeys([*self.borrowed, owned.flat]))
            else:
                if type(parameter.data) is not torch.Tensor:
                    found = f"a {type(parameter.data).__name__}"
                    raise InputError("shard", attribute, found, "a plain tensor: no tensor parallelism")
                key = parameter.dtype, parameter.device, parameter.requires_grad
                kinds.setdefault(key, {}).setdefault(parameter, attribute)
        self.vectors = [make([(name, p) for p, name in some.items()]) for some in kinds.values()]
        self.shown = [(inner, attribute, getattr(p, OWNER)) for inner, attribute, p in self._places]
        for inner in dict.fromkeys(inner for inner, _, _ in self.shown):
            shown = GuardedParameters(inner._parameters)
            shown.unit = self
            inner.__dict__["_parameters"] = shown
        self._has_begun = self.is_whole = True
        for vector in self.vectors:
            vector.holders.add(self)
        self.let_go()

    def begin(self) -> None:
        """Begin to gather."""
        if not self._has_begun:
            self._has_begun = True
            for vector in (*self.vectors, *self.borrowed):
                vector.begin(self)

    def hold(self) -> None:
        """Wait until all is gathered, and show whole parameters."""
        self.begin()
        if self.is_whole:
            return
        self.is_whole = True
        for vector in (*self.vectors, *self.borrowed):
            vector.finish()
        for inner, attribute, one in self.shown:
            whole = one.flat.parameters[one.k]
            if whole.requires_grad != one.piece.requires_grad:  # frozen or unfrozen since
                whole.requires_grad_(one.piece.requires_grad)
            inner._parameters[attribute] = whole

    def let_go(self) -> None:
        """Show pieces, and free what no other unit holds."""
        if self._has_begun:
            self._has_begun = self.is_whole = False
            for inner, attribute, one in self.shown:
                inner._parameters[attribute] = one.piece
            for vector in (*self.vectors, *self.borrowed):
                vector.let_go(self)

    def note_state(self, module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Put parts into a module's state dict, in place of this rank's pieces."""
        for inner, attribute, one in self.shown:
            if inner is module and state.get(prefix + attribute) is not None and not self.is_whole:
                state[prefix + attribute] = TensorPart.of(one, one.piece)

    def cut_state(
        self, module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
    ) -> None:
        """Put this rank's pieces into a module's state dict that is loaded, in place of whole tensors.

        Raises InputError for tensors of another shape, and for load_state_dict(assign=True).
        """
        if metadata.get("assign_to_params_buffers"):
            raise InputError("load_state_dict", "assign", "True", "False: pieces of parameters stay in place")
        for inner, attribute, one in self.shown:
            if inner is module and (value := state.get(prefix + attribute)) is not None:
                state[prefix + attribute] = one.cut_parameter(prefix + attribute, value)
