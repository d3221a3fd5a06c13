"""int8 and int4 as ranks send them to each other: rows of scales and codes (pyps.worker.quantize).

A block with a NaN or an infinity decodes to NaN: a gradient scaler sees it on every rank, and no finite
number is made of it.
"""

from __future__ import annotations

import torch

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
