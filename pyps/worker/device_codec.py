"""int8 and int4 in torch operations, where the gradient is: the very bits of the C codec, to nearest.

    int8   blocks of 256   scale = amax / 127   code = round(x * (127 / amax))
    int4   blocks of 64    scale = amax / 7     two codes a byte: value i below, value i + 32 above

Every operation is one kernel, so that no compiler fuses a product and a sum. Divisors are tensors of the
device: torch divides by a number on a GPU by multiplying with its reciprocal, which is not the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from pyps.errors import InputError, NotFinite
from pyps.native.values import Codec, EncodeCounts, NonFinite

Carried = NonFinite | Literal["carry"]

TINY = 1e-30  # below it a block's scale is 0, and all of it stays in the residual


@dataclass(frozen=True)
class Levels:
    """A block's values, and the largest code."""

    block: int
    most: float


LEVELS = {Codec.INT8: Levels(256, 127.0), Codec.INT4: Levels(64, 7.0)}


def encode(
    codec: Codec,
    values: torch.Tensor,
    *,
    scale: float = 1.0,
    residual: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    nonfinite: Carried = "error",
) -> tuple[torch.Tensor, torch.Tensor, EncodeCounts]:
    """scale * values + residual, encoded: (codes, uint8; scales, float32 [blocks]; what was not finite).

    values, residual, residual_out: float32 [n] on one device; `residual_out`, which must not be `residual`,
    receives what the code does not carry. A last block that is not full is coded as if zeros followed.
    `nonfinite`: as in pyps.native.values.Encoding, or "carry": a block with something that is not finite has
    a NaN for its scale, which a store refuses, and the device is not waited for. Raises NotFinite under the
    policy "error", InputError for another codec.
    """
    if codec not in LEVELS:
        raise InputError("device codec", "codec", codec.name.lower(), "int8 or int4")
    levels = LEVELS[codec]
    v = _blocks(values, levels.block)
    kept = None if residual is None else _blocks(residual, levels.block)
    v = v if scale == 1.0 else v * scale
    summed = v if kept is None else v + kept
    amax = summed.abs().amax(dim=1)
    bad = ~torch.isfinite(amax)
    counts = EncodeCounts(0, 0)
    if nonfinite != "carry" and bool(bad.any()):
        summed, counts = _mended(v, kept, bad, nonfinite)
        amax = summed.abs().amax(dim=1)
        if nonfinite == "skip":
            amax = torch.where(bad, torch.zeros_like(amax), amax)
    large = amax >= TINY
    most = torch.full_like(amax, levels.most)
    scales = torch.where(large, amax / most, torch.zeros_like(amax))
    scales = torch.where(torch.isfinite(amax), scales, torch.nan)
    inverse = torch.where(large, most / torch.where(large, amax, most), torch.zeros_like(amax))
    codes = (summed * inverse.unsqueeze(1)).round_()
    if residual_out is not None:
        left = summed - codes * scales.unsqueeze(1)
        left = torch.where(large.unsqueeze(1), left, summed)
        residual_out.copy_(left.reshape(-1)[: residual_out.numel()])
    return _packed(codec, codes.to(torch.int8)), scales, counts


def _blocks(flat: torch.Tensor, block: int) -> torch.Tensor:
    """[blocks, block], the last one filled up with zeros."""
    missing = -flat.numel() % block
    return torch.nn.functional.pad(flat, (0, missing)).view(-1, block) if missing else flat.view(-1, block)


def _mended(
    v: torch.Tensor, kept: torch.Tensor | None, bad: torch.Tensor, nonfinite: NonFinite
) -> tuple[torch.Tensor, EncodeCounts]:
    """Blocks in which something is not finite send what was kept in its place; skipped ones, of all."""
    summed = v + (torch.zeros_like(v) if kept is None else kept)
    infinite = ~torch.isfinite(summed)
    count = int(infinite.sum())
    if nonfinite == "error":
        raise NotFinite("encode", f"{count} values that are not finite; the policy is to stop")
    before = torch.zeros_like(v) if kept is None else kept
    skipped = bad.unsqueeze(1) if nonfinite == "skip" else torch.zeros_like(infinite)
    mended = torch.where(infinite | skipped, before, summed)
    whole = v if kept is None else summed
    return torch.where(bad.unsqueeze(1), mended, whole), EncodeCounts(
        count, int(bad.sum()) if nonfinite == "skip" else 0
    )


def _packed(codec: Codec, codes: torch.Tensor) -> torch.Tensor:
    bits = codes.view(torch.uint8)
    if codec is Codec.INT8:
        return bits.reshape(-1)
    return ((bits[:, :32] & 15) | (bits[:, 32:] << 4)).reshape(-1)
