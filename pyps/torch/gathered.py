"""Whether a loss is over the outputs of all ranks, as contrastive ones are: then no rank's samples weigh it.

Such a loss takes the other ranks' outputs from a collective of torch.distributed.nn, whose backward pass
brings their gradients back. The engine goes through it before it comes to the model, whose nodes are older.
A collective within the model comes after the model's output. So these backward passes are noted, and a hook
asks when its first pass is met.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.nn import functional

COLLECTIVES = (
    "_Broadcast",
    "_Gather",
    "_Scatter",
    "_Reduce",
    "_Reduce_Scatter",
    "_AllGather",
    "_AllGatherBase",
    "_AlltoAll",
    "_AlltoAllSingle",
    "_AllReduce",
)
_watched: set[str] = set()
_seen: tuple[int, list[Any]] = -1, []  # autograd's number of a backward pass, and the groups that it met


def watch() -> None:
    """From now on note the backward passes of torch's collectives."""
    for name in COLLECTIVES:
        kind: Any = getattr(functional, name, None)
        if kind is not None and name not in _watched:
            _watched.add(name)
            kind.backward = staticmethod(_noted(kind.backward))


def is_gathered(group: dist.ProcessGroup) -> bool:
    """Whether the running backward pass came through a collective with other ranks of this group."""
    number, groups = _seen
    if number != torch._C._current_graph_task_id():
        return False
    own = set(dist.get_process_group_ranks(group))
    return any(len(own & set(dist.get_process_group_ranks(other))) > 1 for other in groups)


def _noted(backward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(backward)
    def noted(ctx: Any, *gradients: Any) -> Any:
        global _seen
        number = torch._C._current_graph_task_id()
        _seen = number, [*(_seen[1] if _seen[0] == number else []), ctx.group]
        return backward(ctx, *gradients)

    return noted
