"""Peers: ranks that share a batch, as those of a tensor-parallel group do, each with its part of the model.

A mesh of data-parallel and tensor-parallel dimensions has one group of ranks with different samples for each
part of the model. All that depends on samples is said in that group. What has to be the same in all of them,
such as a new split, is decided once, for the first peers.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from pyps.errors import InputError

try:
    from torch.distributed.tensor import DTensor as DTensor
except ImportError:  # torch 2.4
    from torch.distributed._tensor import DTensor as DTensor  # type: ignore[attr-defined]


def parameters_of(model: Any) -> list[torch.nn.Parameter]:
    """All of them; a tensor-parallel module in DDP does not name its own after the first forward pass."""
    reduced = getattr(model, "_module_parameters", None)
    return list(model.parameters() if reduced is None else reduced)


def peers_of(parameters: Iterable[torch.Tensor], group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """The ranks with this rank's samples and other parts of the parameters; None if it is alone.

    group: the ranks with other samples. Raises InputError for parameters with different peers.
    """
    found: dict[tuple[int, ...], Any] = {}
    for parameter in parameters:
        mesh, _ = _layout(parameter)
        if mesh is None or (others := _beyond(mesh, group)) is None:
            continue
        found.setdefault(tuple(dist.get_process_group_ranks(others)), others)
    if len(found) > 1:
        listed = " and ".join(str(list(ranks)) for ranks in found)
        expected = "one tensor-parallel group for all of them"
        raise InputError("GlobalMean", "model", f"parts on ranks {listed}", expected)
    return next(iter(found.values()), None)


def own_copies(parameter: torch.Tensor, peers: dist.ProcessGroup | None) -> int:
    """How many of the peers have the same values of the parameter, or of its gradient."""
    if peers is None:
        return 1
    mesh, placements = _layout(parameter)
    ranks, parts = set(dist.get_process_group_ranks(peers)), 1
    for dimension, placement in enumerate(placements):
        of_peers = set(dist.get_process_group_ranks(mesh.get_group(dimension))) <= ranks
        parts *= mesh.size(dimension) if of_peers and not placement.is_replicate() else 1
    return dist.get_world_size(peers) // parts


def all_copies(parameter: torch.Tensor, ranks: int) -> int:
    """How many of all ranks of a model have the same values of the parameter."""
    mesh, placements = _layout(parameter)
    parts = (mesh.size(k) for k, placement in enumerate(placements) if not placement.is_replicate())
    return ranks // int(prod(parts))


def is_divided(parameter: torch.Tensor) -> bool:
    """Return whether DistributedDataParallel has only a part of the parameter, without saying so."""
    return not isinstance(parameter, DTensor) and _layout(parameter)[0] is not None


def _layout(parameter: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
    """The mesh of a parameter and how it lies on it; DDP keeps that of what it has made a plain tensor."""
    if isinstance(parameter, DTensor):
        return parameter.device_mesh, tuple(parameter.placements)
    spec = getattr(parameter, "_st_info", None)
    return (None, ()) if spec is None else (spec.mesh, tuple(spec.placements))


def _beyond(mesh: Any, group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """The group of the mesh's dimensions along which the samples are the same."""
    ranks = set(dist.get_process_group_ranks(group))
    beyond = [
        dimension
        for dimension in range(mesh.ndim)
        if not set(dist.get_process_group_ranks(mesh.get_group(dimension))) <= ranks
    ]
    if not beyond:
        return None
    if len(beyond) == 1:
        one: dist.ProcessGroup = mesh.get_group(beyond[0])
        return one
    flat: dist.ProcessGroup = mesh[tuple(mesh.mesh_dim_names[k] for k in beyond)]._flatten().get_group()
    return flat
