"""Text that every machine with Python has: the sources of its library, in parts of CONTEXT + 1 characters."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import torch

CONTEXT = 64
LETTERS = 97  # printable ASCII, the end of a line, and all others as one
HELD_OUT = 256  # parts


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """(to train on, held out), int64 [n, CONTEXT + 1]; the same on every host with the same Python."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    letters = np.full(256, LETTERS - 1, np.int64)
    letters[32:127] = np.arange(95)
    letters[ord("\n")] = 95
    text = letters[np.frombuffer(b"".join(path.read_bytes() for path in files), np.uint8)]
    count = len(text) // (CONTEXT + 1)
    parts = text[: count * (CONTEXT + 1)].reshape(count, CONTEXT + 1)
    order = np.random.default_rng(0).permutation(count)
    return torch.from_numpy(parts[order[HELD_OUT:]]), torch.from_numpy(parts[order[:HELD_OUT]])
