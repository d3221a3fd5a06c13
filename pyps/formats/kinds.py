"""The types of numbers and names that the formats share, with their limits."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

MAX_BATCH = 2**31 - 1  # keeps every product of two batches within 64 bits

Batch = Annotated[int, Meta(ge=1, le=MAX_BATCH)]
Share = Annotated[int, Meta(ge=0, le=MAX_BATCH)]
Seconds = Annotated[float, Meta(gt=0, le=1e12)]  # products and sums of these stay finite
Elapsed = Annotated[float, Meta(ge=0, le=1e12)]
Bytes = Annotated[int, Meta(ge=0)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]
Factor = Annotated[float, Meta(ge=1)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Unit = Literal["samples", "tokens"]  # that a batch counts
Bits = Literal[4, 8, 16, 32]  # of one number on the wire
