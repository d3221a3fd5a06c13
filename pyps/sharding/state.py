"""State dicts of what is sharded: whole, as one process would have them, and by parts.

A TensorPart says which rows and columns of the whole tensor it has, so that a
checkpoint by parts has whole tensors: other ranks, other shares, DDP and FSDP2 can load it, and theirs can be
loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from pyps.errors import InputError
from pyps.sharding.flat import FlatVector, agree
from pyps.sharding.layout import boxes

OWNED = "_pyps_owned"  # an attribute of a piece
OWNER = "_pyps_owner"  # an attribute of a whole parameter
STEP = "step"  # of an optimizer's state: a number, also of a parameter that is one


@dataclass(frozen=True, eq=False)
class Owned:
    """A parameter whose elements ranks own: number `k` of a flat vector, and this rank's piece of it."""

    flat: FlatVector
    k: int
    piece: torch.nn.Parameter

    def __post_init__(self) -> None:
        setattr(self.piece, OWNED, self)
        setattr(self.flat.parameters[self.k], OWNER, self)

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self.flat.slots[self.k].name

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole parameter."""
        return self.flat.slots[self.k].shape

    def cut_parameter(self, name: str, value: Any) -> Any:
        """Return this rank's piece of the parameter. Raises InputError for another shape."""
        if isinstance(value, TensorPart):
            return value.as_subclass(torch.Tensor)
        if value.shape != self.shape:
            raise InputError("state dict", name, f"shape {list(value.shape)}", f"shape {list(self.shape)}")
        return self.flat.slots[self.k].flat(value)[self.flat.pieces[self.k]]

    def cut(self, value: Any) -> Any:
        """Return this rank's piece of a tensor of the parameter's shape, also in a dict; else the value."""
        if isinstance(value, Mapping):
            return {name: one if name == STEP else self.cut(one) for name, one in value.items()}
        is_whole = isinstance(value, torch.Tensor) and value.shape == self.shape
        if is_whole or isinstance(value, TensorPart):
            return self.cut_parameter(self.name, value).clone()
        return value

    def is_piece(self, value: Any) -> bool:
        """Return whether a value of the optimizer's state has an element for each of the piece."""
        if isinstance(value, TensorPart):
            return True
        return isinstance(value, torch.Tensor) and value.ndim == 1 and value.shape == self.piece.shape

    @property
    def is_by_rows(self) -> bool:
        """Tell whether the parameter's memory has the order of its dimensions."""
        slot = self.flat.slots[self.k]
        return slot.order == tuple(range(len(slot.shape)))


class TensorPart(torch.Tensor):
    """This rank's piece of a tensor, [elements], as torch.distributed.checkpoint takes it."""

    owned: Owned
    whole: torch.Size  # the shape of the whole tensor
    places: dict[torch.Size, torch.Tensor]  # views of it by where they are in the whole tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(owned: Owned, piece: torch.Tensor) -> TensorPart:
        """Return a piece of the parameter, or of a state that has its shape."""
        slot, plain = owned.flat.slots[owned.k], piece.as_subclass(torch.Tensor).detach()
        part: TensorPart = plain.as_subclass(TensorPart)
        part.owned, part.whole, part.places = owned, slot.shape, {}
        first, back = 0, sorted(range(len(slot.order)), key=slot.order.__getitem__)
        for offsets, sizes in boxes(slot.in_memory, owned.flat.pieces[owned.k]):
            count = prod(sizes)
            view = plain[first : first + count].view(sizes).permute(back)
            part.places[torch.Size(offsets[k] for k in back)] = view
            first += count
        return part

    @staticmethod
    def as_vector(owned: Owned, piece: torch.Tensor) -> TensorPart:
        """Return a piece of the parameter, or of a state, as that of a vector of all its elements."""
        part = TensorPart.of(owned, piece)
        cut = owned.flat.pieces[owned.k]
        part.whole = torch.Size([prod(owned.shape)])
        part.places = {torch.Size([cut.start]): part.as_subclass(torch.Tensor)} if part.numel() else {}
        return part

    def __repr__(self) -> str:  # type: ignore[override]
        return f"TensorPart({self.numel()} elements of a tensor of shape {list(self.size())})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        found = "this rank's part of a tensor, to be pickled"
        expected = "whole_state_dict(), pyps.torch.save() or torch.distributed.checkpoint"
        raise InputError("state dict", self.owned.name, found, expected)

    def size(self) -> torch.Size:  # type: ignore[override]
        """Return the shape of the whole tensor."""
        return self.whole

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The shape of the whole tensor."""
        return self.whole

    def detach(self) -> TensorPart:
        """Return itself, which has no graph."""
        return self

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(place, view.shape) for place, view in self.places.items()]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.places[index.offset]


def owned_of(piece: torch.Tensor) -> Owned | None:
    """Return what parameter a piece is of; None for one that is not sharded."""
    return getattr(piece, OWNED, None)


def parts_of(state: dict[str, Any], owned: Mapping[int, Owned]) -> dict[str, Any]:
    """Return an optimizer's state dict with TensorParts in place of tensors that belong to a piece."""

    def part(one: Owned, value: Any) -> Any:
        return TensorPart.of(one, value) if one.is_piece(value) else value

    found = {
        k: {name: part(owned[k], value) for name, value in values.items()} if k in owned else values
        for k, values in state["state"].items()
    }
    return {**state, "state": found}


def whole_of(state: dict[str, Any], owned: Mapping[int, Owned], to: int | None = None) -> dict[str, Any]:
    """Return an optimizer's state dict with whole tensors, on the CPU, gathered from all ranks.

    to: the rank that keeps them; by default all. Raises InputError for ranks with unlike states.
    """
    flats = list({id(one.flat): one.flat for one in owned.values()}.values())
    if not flats:
        return state
    kinds = {
        k: {
            name: str(value.dtype) for name, value in state["state"].get(k, {}).items() if one.is_piece(value)
        }
        for k, one in owned.items()
    }
    agree("state dict", flats[0].group, {"state": kinds})
    wholes: dict[tuple[int, str], torch.Tensor] = {}
    for flat in flats:
        of_flat = {k: one for k, one in owned.items() if one.flat is flat}
        for name, dtype in sorted({kind for k in of_flat for kind in kinds[k].items()}):
            pieces = {of_flat[k].k: state["state"][k][name] for k in of_flat if kinds[k].get(name) == dtype}
            found = gathered_wholes(flat, pieces)
            for k, one in of_flat.items():
                if one.k in pieces and to in (None, flat.rank):
                    wholes[k, name] = found(one.k)
    if to not in (None, flats[0].rank):
        return {}
    state["state"] = {
        k: {name: wholes.get((k, name), value) for name, value in values.items()}
        if isinstance(values, dict)
        else values
        for k, values in state["state"].items()
    }
    return state


def gathered_wholes(flat: FlatVector, pieces: Mapping[int, torch.Tensor]) -> Callable[[int], torch.Tensor]:
    """Gather a vector from the pieces of all ranks: what gives the whole tensor of a number, on the CPU."""
    first = next(iter(pieces.values()))
    vector = torch.zeros(flat.layout.count, dtype=first.dtype, device=first.device)
    for k, piece in pieces.items():
        flat.piece_of(vector[flat.mine], k).copy_(piece.as_subclass(torch.Tensor).detach())
    for work in flat.gather(vector):
        work.wait()
    return lambda k: flat.slots[k].shaped(vector[flat.places[k]]).cpu().clone()


def cut_state(state: dict[str, Any], owned: Mapping[int, Owned]) -> dict[str, Any]:
    """Return a whole optimizer's state dict, or one of TensorParts, with this rank's pieces."""
    found = {k: owned[k].cut(values) if k in owned else values for k, values in state["state"].items()}
    return {**state, "state": found}
