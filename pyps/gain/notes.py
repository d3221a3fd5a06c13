"""Define what passes between the command and the ranks that it starts: orders to a rank, notes from it."""

from __future__ import annotations

import msgspec

ORDERS = "PYPS_GAIN"  # the variable that holds a rank's orders, as JSON
NO_LOADER = 77  # a rank's exit code where a script steps without a batch that could be sized
BLOCK = 4  # batches of one size in succession


class Orders(msgspec.Struct, frozen=True):
    """Tell a rank what to do. sizes: in turn, a block of batches of each; none: those of the script.

    notes: the file for the batches. pace: how many times longer an emulated device takes; 1: a real one.
    """

    notes: str
    sizes: list[int] = []
    pace: float = 1.0


class Note(msgspec.Struct, frozen=True):
    """A batch that has ended. budget_bytes: of the device's memory; 0: it was not counted, as on a CPU."""

    samples: int
    seconds: float
    peak_bytes: int = 0
    budget_bytes: int = 0
