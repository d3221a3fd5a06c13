"""peak_bytes: the most memory that steps take on the CPU, as torch's allocator counts it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from torch.autograd.profiler import profile, record_function  # torch.profiler imports its compiler

STEADY = "steady steps"


def peak_bytes(make: Callable[[], Callable[[], Any]], warm: int = 2, steps: int = 2) -> int:
    """Return the most bytes that are held at a time in a step, of what `make` and the steps allocate.

    make: returns the step. warm: steps before those that count.
    """
    gc.collect()
    with profile(use_kineto=True, profile_memory=True) as recorded:
        step = make()
        for _ in range(warm):
            step()
        with record_function(STEADY):
            for _ in range(steps):
                step()
    held = most = 0
    events: Any = recorded.kineto_results.events()  # type: ignore[union-attr]
    began = next(event.start_ns() for event in events if event.name() == STEADY)
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        if event.start_ns() >= began:
            most = max(most, held)
    return most
