"""A worker's way to the store: what a push and a pull take, by the bits that each number has on the wire.

Bytes and errors are those of the codecs: 32 is f32, 16 bf16, 8 int8 in blocks of 256, 4 int4 in blocks of 64,
with an fp32 scale a block. An error is the root mean square of what is lost, relative to that of the numbers,
measured on normally distributed ones, as the tests do again.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyps.formats import Bits

WIRE_BYTES: dict[Bits, float] = {32: 4.0, 16: 2.0, 8: 1 + 4 / 256, 4: 0.5 + 4 / 64}
ERROR: dict[Bits, float] = {32: 0.0, 16: 0.0017, 8: 0.0070, 4: 0.108}
BYTES_PER_PARAMETER = 4


@dataclass(frozen=True)
class Link:
    """Seconds of a message of no bytes, and of the model's parameters on the wire, one way, at 32 bits."""

    latency_seconds: float
    model_seconds: float

    def wire_seconds(self, push: Bits = 32, pull: Bits = 32) -> float:
        """How long one push and one pull occupy the link."""
        return self.model_seconds * (WIRE_BYTES[push] + WIRE_BYTES[pull]) / WIRE_BYTES[32]

    def seconds(self, push: Bits = 32, pull: Bits = 32) -> float:
        """A push, then a pull, of the whole model."""
        return 2 * self.latency_seconds + self.wire_seconds(push, pull)


def link_of(parameters: int | None, bandwidth: float | None, latency: float | None) -> Link | None:
    """The link of a bandwidth in bytes a second and a latency in seconds; None where a figure is missing."""
    if parameters is None or bandwidth is None:
        return None
    return Link(latency or 0.0, BYTES_PER_PARAMETER * parameters / bandwidth)
