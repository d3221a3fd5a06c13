"""A sum over all ranks in few bits: each rank reduces a part of it; what rounding loses is kept for later.

Stage 1: everybody cuts its vector in N parts, encodes each and sends part j to rank j (all_to_all). Rank j
sums what it got, in rank order. Stage 2: it encodes the sum and sends it to everybody (all_gather). All ranks
decode the same bytes, so all get the same bits.

Both stages round, and both errors are fed back (Seide et al., Interspeech 2014, for one stage). Rank j adds
what stage 2 lost of its part to its own residual of stage 1: the next round's sum takes it up once, from rank
j. So one residual a rank holds both, it belongs to a parameter and not to a part, and it stays right when the
parts change. What was sent and the residuals sum to what was put in.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from pyps.torch.codec import Codec, decode, encode


def quantized_sum(
    codec: Codec, values: torch.Tensor, group: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The sum over ranks of float32 [n], this rank's error [n] to add next time, and the bytes it sent.

    Where any rank's block holds a value that is not finite, the sum is NaN on all ranks; the error says
    nothing there.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    length = len(values)
    part = -(-length // (ranks * codec.block)) * codec.block
    padded = torch.nn.functional.pad(values, (0, ranks * part - length)).view(ranks, part)
    sent = encode(codec, padded)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    error = padded - decode(codec, sent, part)
    mine = decode(codec, received, part).sum(dim=0, keepdim=True)
    back = encode(codec, mine)
    everything = torch.empty(ranks * back.shape[1], dtype=torch.uint8, device=back.device)
    _all_gather(everything, back.view(-1), group)
    total = decode(codec, everything.view(ranks, -1), part).view(-1)[:length]
    error[rank] += mine[0] - decode(codec, back, part)[0]
    return total, error.view(-1)[:length], 2 * (ranks - 1) * back.shape[1]


def _all_gather(into: torch.Tensor, values: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    # Renamed in torch 2.13; before, the old name is the only one.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(into, values, group=group)
