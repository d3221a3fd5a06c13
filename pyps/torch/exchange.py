"""A sum over all ranks in int8 or int4: each rank reduces one part; rounding errors are kept and sent later.

Stage 1: each rank cuts its vector into N parts, encodes each and sends part j to rank j (all_to_all). Rank j
sums the parts it receives, in rank order. Stage 2: rank j encodes its sum and sends it to all ranks
(all_gather). All ranks decode the same bytes, so all get the same bits.

Both stages round, and both errors are fed back (Seide et al., Interspeech 2014, for one stage). Rank j adds
the error of stage 2 in its part to its own residual of stage 1, so the next sum takes that error up once,
from rank j. One residual a rank therefore holds both errors. It belongs to a parameter and not to a part, and
it stays right when the parts change: the sums sent and the residuals add up to the gradients put in.

A long vector goes in pieces: one is encoded while another is on its way, and a piece fits into the cache.
A block with a NaN or an infinity decodes to NaN: a gradient scaler sees it on every rank, and no finite
number is made of it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from pyps.worker.quantize import SCALE_BYTES, BlockFormat, block_maxima, pack, quantize, unpack


def packed_bytes(form: BlockFormat, values: int) -> int:
    """Bytes that `values`, a multiple of the block, take with their scales."""
    return form.code_bytes(values) + values // form.block * SCALE_BYTES


def encode(form: BlockFormat, values: torch.Tensor) -> torch.Tensor:
    """float32 [rows, n], n a multiple of the block -> uint8 [rows, packed_bytes(n)]: scales, then codes."""
    rows = values.shape[0]
    blocks = values.reshape(rows, -1, form.block)
    codes, scales = quantize(blocks, block_maxima(blocks), form)
    return torch.cat([scales.view(torch.uint8), pack(codes, form).reshape(rows, -1)], dim=1)


def decode(form: BlockFormat, packed: torch.Tensor, values: int) -> torch.Tensor:
    """What encode() made of [rows, values], float32: each value off by at most half its block's scale."""
    rows, count = packed.shape[0], values // form.block
    scales = packed[:, : count * SCALE_BYTES].contiguous().view(torch.float32)
    codes = packed[:, count * SCALE_BYTES :].reshape(rows, count, -1)
    found = unpack(codes, form).to(torch.float32)
    return found.mul_(scales.unsqueeze(2)).reshape(rows, values)


PIECE = 1 << 19  # values


def quantized_sum(
    form: BlockFormat, values: torch.Tensor, group: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The sum over ranks of float32 [n], this rank's error [n] to add next time, and the bytes it sent.

    Where any rank's block holds a value that is not finite, the sum is NaN on all ranks and the error means
    nothing.
    """
    pieces = [_Piece(form, piece, group) for piece in torch.split(values, PIECE)]
    for piece in pieces:
        piece.reduce()
    for piece in pieces:
        piece.finish()
    total, error = (torch.cat(parts) for parts in zip(*((p.total, p.error) for p in pieces), strict=True))
    return total, error, sum(piece.sent_bytes for piece in pieces)


class _Piece:
    """A piece of the vector.

    Made: stage 1 is under way. After reduce(): stage 2. After finish(): `total`, `error`.
    """

    def __init__(self, form: BlockFormat, values: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        self._form, self._group, self._length = form, group, len(values)
        self._ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._part = -(-len(values) // (self._ranks * form.block)) * form.block
        missing = self._ranks * self._part - len(values)
        padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
        padded = padded.view(self._ranks, self._part)
        self._sent = encode(form, padded)
        self._received = torch.empty_like(self._sent)
        self._work = dist.all_to_all_single(self._received, self._sent, group=group, async_op=True)
        self.sent_bytes = 2 * (self._ranks - 1) * self._sent.shape[1]
        self._error = padded - decode(form, self._sent, self._part)

    def reduce(self) -> None:
        self._work.wait()
        mine = decode(self._form, self._received, self._part).sum(dim=0, keepdim=True)
        back = encode(self._form, mine)
        self._gathered = torch.empty(self._ranks * back.shape[1], dtype=torch.uint8, device=back.device)
        self._back = back.view(-1)
        self._work = _all_gather(self._gathered, self._back, self._group)
        self._error[self._rank] += mine[0] - decode(self._form, back, self._part)[0]

    def finish(self) -> None:
        self._work.wait()
        total = decode(self._form, self._gathered.view(self._ranks, -1), self._part)
        self.total, self.error = total.view(-1)[: self._length], self._error.view(-1)[: self._length]


def _all_gather(into: torch.Tensor, values: torch.Tensor, group: dist.ProcessGroup | None) -> Any:
    # Renamed in torch 2.13; before, the old name is the only one.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(into, values, group=group, async_op=True)
