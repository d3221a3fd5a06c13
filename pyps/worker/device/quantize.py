"""int8 and int4 of float32 blocks in torch operations: the bits of the C codec, on a CPU and on a GPU.

    int8   blocks of 256   scale = max|x| / 127   code = round(x * (127 / max|x|))
    int4   blocks of 64    scale = max|x| / 7     two codes a byte: value i low, value i + 32 high

Rounding is to the nearest, ties to even. A block whose max|x| is below 1e-30 has scale 0 and codes 0. A block
with a NaN or an infinity has a NaN for its scale and decodes to NaN.

Every operation is one kernel, so that no compiler fuses a product and a sum. Divisors are tensors on the
device: on a GPU torch divides by a number by multiplying with its reciprocal, which gives other bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

TINY = 1e-30  # below it a scale would be subnormal
SCALE_BYTES = 4


@dataclass(frozen=True)
class BlockFormat:
    """Bits of a code, values in a block, and the largest code."""

    bits: int
    block: int
    largest: float

    def code_bytes(self, values: int) -> int:
        """Bytes that the codes of `values`, a multiple of the block, take."""
        return values * self.bits // 8


INT8 = BlockFormat(8, 256, 127.0)
INT4 = BlockFormat(4, 64, 7.0)


def block_maxima(blocks: torch.Tensor) -> torch.Tensor:
    """max|x| of float32 [..., block], without a copy of absolute values; NaN where a block has one."""
    return torch.maximum(blocks.amax(dim=-1), -blocks.amin(dim=-1))


def quantize(
    blocks: torch.Tensor, maxima: torch.Tensor, form: BlockFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [..., block] and its maxima -> (codes, whole numbers as float32 [..., block]; scales [...]).

    Codes of a block that is not finite mean nothing.
    """
    large = maxima >= TINY
    largest, zero = torch.full_like(maxima, form.largest), torch.zeros_like(maxima)
    scales = torch.where(large, maxima / largest, zero)
    scales = torch.where(torch.isfinite(maxima), scales, torch.nan)
    inverse = torch.where(large, largest / torch.where(large, maxima, largest), zero)
    return (blocks * inverse.unsqueeze(-1)).round_(), scales


def pack(codes: torch.Tensor, form: BlockFormat) -> torch.Tensor:
    """Codes [..., block] as quantize() makes them -> uint8 [..., code_bytes(block)]."""
    whole = codes.to(torch.int8).view(torch.uint8)
    if form.bits == 8:
        return whole
    half = form.block // 2
    return (whole[..., :half] & 15) | (whole[..., half:] << 4)


def unpack(packed: torch.Tensor, form: BlockFormat) -> torch.Tensor:
    """uint8 [..., code_bytes(block)] -> int8 [..., block]."""
    if form.bits == 8:
        return packed.view(torch.int8)
    # Shifted to the top and back, the sign bit comes along.
    return torch.cat([packed << 4, packed & 240], dim=-1).view(torch.int8) >> 4
