"""A gradient encoded as int8 or int4 on its device, with its residual: the bits of the C codec."""

from __future__ import annotations

from typing import Literal

import torch

from pyps.errors import InputError, NotFinite
from pyps.native.values import Codec, EncodeCounts, NonFinite
from pyps.worker.quantize import INT4, INT8, TINY, block_maxima, pack, quantize

Carried = NonFinite | Literal["carry"]
FORMATS = {Codec.INT8: INT8, Codec.INT4: INT4}


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
    if codec not in FORMATS:
        raise InputError("device codec", "codec", codec.name.lower(), "int8 or int4")
    form = FORMATS[codec]
    v = _blocks(values, form.block)
    kept = None if residual is None else _blocks(residual, form.block)
    v = v if scale == 1.0 else v * scale
    summed = v if kept is None else v + kept
    maxima = block_maxima(summed)
    bad = ~torch.isfinite(maxima)
    counts = EncodeCounts(0, 0)
    if nonfinite != "carry" and bool(bad.any()):
        summed, counts = _mended(v, kept, bad, nonfinite)
        maxima = block_maxima(summed)
        if nonfinite == "skip":
            maxima = torch.where(bad, torch.zeros_like(maxima), maxima)
    codes, scales = quantize(summed, maxima, form)
    if residual_out is not None:
        left = summed - codes.add_(0.0) * scales.unsqueeze(1)  # a code is whole: its zero has no sign
        left = torch.where((maxima >= TINY).unsqueeze(1), left, summed)
        residual_out.copy_(left.reshape(-1)[: residual_out.numel()])
    return pack(codes, form).reshape(-1), scales, counts


def _blocks(flat: torch.Tensor, block: int) -> torch.Tensor:
    """[blocks, block], the last one filled up with zeros."""
    missing = -flat.numel() % block
    return torch.nn.functional.pad(flat, (0, missing)).view(-1, block) if missing else flat.view(-1, block)


def _mended(
    v: torch.Tensor, kept: torch.Tensor | None, bad: torch.Tensor, nonfinite: NonFinite
) -> tuple[torch.Tensor, EncodeCounts]:
    """Values that are not finite give way to their residual; a skipped block sends its residual only."""
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
