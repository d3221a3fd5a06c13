"""FlatVector: parameters of one kind as views of one flat vector, of which each rank owns its part.

Ranks gather a vector from its owners and reduce one to them. gloo takes no all_gather of unlike sizes, so
that each owner broadcasts there, all at once; NCCL groups the same into one call. Few ranks of gloo send
their parts to the owners, which add them up: in a third of the CPU seconds of its reduce_scatter. Parts may
be empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pyps.errors import InputError
from pyps.sharding.layout import PieceLayout

MOST_DIRECT = 4  # ranks; of more, a large owner would receive many times what a ring sends it
TAG = 0x7079  # of these messages


@dataclass(frozen=True)
class Slot:
    """How a tensor lies in a flat vector: its dimensions in the order of memory, which is kept.

    name: for messages and checkpoints.
    """

    name: str
    shape: torch.Size
    order: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Slot:
        """Return that of a tensor; one with gaps is laid out by rows."""
        strides, plain = tensor.stride(), tuple(range(tensor.ndim))
        order = tuple(sorted(plain, key=lambda dimension: -strides[dimension]))
        return cls(name, tensor.shape, order if tensor.permute(order).is_contiguous() else plain)

    @property
    def in_memory(self) -> tuple[int, ...]:
        """The sizes of the dimensions, in the order of memory."""
        return tuple(self.shape[dimension] for dimension in self.order)

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of this shape as a vector: a view if its memory has this order, else a copy."""
        return tensor.permute(self.order).reshape(-1)

    def shaped(self, vector: torch.Tensor) -> torch.Tensor:
        """Return a vector's view in this shape."""
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return vector.view(self.in_memory).permute(back)


class FlatVector:
    """Parameters of one dtype and device as views of `vector`, cut by shares.

    named: the parameters, which become views. group: of the ranks. `pieces` are this rank's, one of each
    parameter.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, torch.nn.Parameter]],
        shares: Sequence[float],
        group: dist.ProcessGroup,
    ) -> None:
        listed = list(named)
        self.parameters = [parameter for _, parameter in listed]
        self.slots = [Slot.of(name, parameter) for name, parameter in listed]
        self.group, self.rank = group, dist.get_rank(group)
        self.layout = PieceLayout.by_shares([parameter.numel() for parameter in self.parameters], shares)
        self.places = list(self.layout.places())
        self.pieces = self.layout.pieces(self.rank)
        self.mine = self.layout.part(self.rank)
        first = self.parameters[0]
        self.vector = torch.empty(self.layout.count, dtype=first.dtype, device=first.device)
        for parameter, slot, place in zip(self.parameters, self.slots, self.places, strict=True):
            view = slot.shaped(self.vector[place])
            parameter.data = view.copy_(parameter.data)

    def piece_of(self, vector: torch.Tensor, k: int) -> torch.Tensor:
        """Return this rank's piece of parameter k, of a vector that has this rank's part alone."""
        piece, place = self.pieces[k], self.places[k]
        first = place.start + piece.start - self.mine.start if piece.stop else 0
        return vector[first : first + piece.stop - piece.start]

    def gather(self, vector: torch.Tensor | None = None) -> list[Any]:
        """Begin to copy each rank's part of the vector to all ranks; wait for the works that it returns."""
        parts = list(torch.split(self.vector if vector is None else vector, list(self.layout.lengths)))
        if is_nccl(self.group, parts[0].device):
            return [dist.all_gather(parts, parts[self.rank], group=self.group, async_op=True)]
        roots = dist.get_process_group_ranks(self.group)
        return [
            dist.broadcast(part, root, group=self.group, async_op=True)
            for root, part in zip(roots, parts, strict=True)
            if len(part)
        ]

    def reduce(self, packed: torch.Tensor) -> Reduction:
        """Begin to sum each part of the ranks' vectors on its owner."""
        parts, ranks = list(torch.split(packed, list(self.layout.lengths))), len(self.layout.lengths)
        mine = parts[self.rank]
        nccl = is_nccl(self.group, packed.device)
        if packed.device.type != "cpu" and not nccl:  # of a GPU's tensors gloo takes whole ones alone
            return Reduction([dist.all_reduce(packed, group=self.group, async_op=True)], [mine], cuts=True)
        if ranks > MOST_DIRECT or nccl:
            own = torch.empty_like(mine)
            return Reduction([dist.reduce_scatter(own, parts, group=self.group, async_op=True)], [own])
        others = [rank for rank in range(ranks) if rank != self.rank]
        global_ranks, works = dist.get_process_group_ranks(self.group), list[Any]()
        found = [torch.empty_like(mine) for _ in others] if len(mine) else []
        for rank, part in zip(others, found, strict=False):
            works.append(dist.irecv(part, global_ranks[rank], self.group, TAG))
        works += [dist.isend(parts[k], global_ranks[k], self.group, TAG) for k in others if len(parts[k])]
        return Reduction(works, [*found, mine] if found else [mine.clone()])


class Reduction:
    """A sum that is on its way to this rank. cuts: it is part of a tensor that is not needed."""

    def __init__(self, works: list[Any], parts: list[torch.Tensor], cuts: bool = False) -> None:
        self._works, self._parts, self._cuts = works, parts, cuts

    def wait(self) -> torch.Tensor:
        """Return the sum of this rank's part, once it is there; what was sent is free then."""
        for work in self._works:
            work.wait()
        for part in self._parts[1:]:
            self._parts[0].add_(part)
        if self._cuts:
            self._parts[0], self._cuts = self._parts[0].clone(), False
        del self._parts[1:]
        self._works = []
        return self._parts[0]


def is_nccl(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether NCCL carries what ranks of the group send from that device."""
    known: Any = group
    return bool(known._get_backend(torch.device(device.type)).name() == "nccl")


def world(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group, or that of all ranks. Raises InputError before init_process_group()."""
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise InputError("sharding", "group", "no process group", "dist.init_process_group() before")
    return found


def agree(call: str, group: dist.ProcessGroup, own: dict[str, Any]) -> None:
    """Raise InputError on all ranks for a value that is not the same on all of them."""
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, own, group=group)
    for name in own:
        values = [one.get(name) for one in every]
        if any(value != values[0] for value in values):
            listed = ", ".join(f"{value!r} on rank {rank}" for rank, value in enumerate(values))
            raise InputError(call, name, listed, "the same on all ranks")


def agree_refusal(group: dist.ProcessGroup, refused: InputError | None) -> InputError | None:
    """Return what this rank refuses, or else what the first one does that refuses something."""
    own = None if refused is None else (refused.where, refused.field, refused.found, refused.expected)
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, own, group=group)
    others = [(rank, said) for rank, said in enumerate(every) if said is not None]
    if refused is not None or not others:
        return refused
    rank, (where, field, found, expected) = others[0]
    return InputError(where, f"{field} on rank {rank}", found, expected)
