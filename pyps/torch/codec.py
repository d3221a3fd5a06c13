"""int8 and int4 of a gradient, a scale for each block, in torch operations: the same on a CPU and a GPU.

    int8   blocks of 256   scale = max|x| / 127   q = round(x / scale) in -127..127, one byte
    int4   blocks of 64    scale = max|x| / 7     q = round(x / scale) in -7..7, two a byte, the first one low

Scales are fp32, rounding is to the nearest, ties to even. A block whose max|x| is below 1e-30 has scale 0 and
decodes to zeros; error feedback keeps what it held. A block with a NaN or an infinity has a NaN for a scale
and decodes to NaN: a gradient scaler on the other side sees it, and no finite number comes of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

TINY = 1e-30  # below it a scale would be subnormal
SCALE_BYTES = 4


@dataclass(frozen=True)
class Codec:
    """One width: bits, values in a block, and the largest level."""

    bits: int
    block: int
    levels: int

    def packed_bytes(self, values: int) -> int:
        """Bytes that `values` (a multiple of the block) take, scales and all."""
        return values * self.bits // 8 + values // self.block * SCALE_BYTES


INT8 = Codec(8, 256, 127)
INT4 = Codec(4, 64, 7)


def encode(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    """float32 [rows, n], n a multiple of the block -> uint8 [rows, packed_bytes(n)]: scales, then levels."""
    rows = values.shape[0]
    blocks = values.reshape(rows, -1, codec.block)
    # Both NaN wherever there is one; no copy of absolute values.
    amax = torch.maximum(blocks.amax(dim=2), -blocks.amin(dim=2))
    scale = torch.where(amax < TINY, 0.0, amax / codec.levels)
    scale = torch.where(torch.isfinite(amax), scale, torch.nan)
    # x / max|x| is at most 1 and a bit: no level is past the largest. A NaN's level is never looked at.
    levels = blocks * torch.where(scale > 0, 1.0 / scale, 0.0).unsqueeze(2)
    whole = levels.round_().to(torch.int8).view(torch.uint8).reshape(rows, -1)
    if codec.bits == 4:
        whole = (whole[:, 0::2] & 15) | (whole[:, 1::2] << 4)
    return torch.cat([scale.contiguous().view(torch.uint8), whole], dim=1)


def decode(codec: Codec, packed: torch.Tensor, values: int) -> torch.Tensor:
    """What `encode` made of [rows, values], float32: each value off by at most half its block's scale."""
    rows, count = packed.shape[0], values // codec.block
    scale = packed[:, : count * SCALE_BYTES].contiguous().view(torch.float32)
    whole = packed[:, count * SCALE_BYTES :]
    if codec.bits == 4:
        # Shifted to the top and back, the sign bit comes along.
        pair = torch.stack([whole << 4, whole & 240], dim=2).reshape(rows, -1)
        levels = pair.view(torch.int8) >> 4
    else:
        levels = whole.contiguous().view(torch.int8)
    found = levels.to(torch.float32).reshape(rows, count, codec.block)
    return found.mul_(scale.unsqueeze(2)).reshape(rows, values)
