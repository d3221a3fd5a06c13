"""Watches a GPU's clocks while it is measured: what slowed them down."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LOOK_SECONDS = 0.2
# nvmlClocksEventReasons*: those that slow a clock down unintentionally.
REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


@contextmanager
def gpu_clocks(device: torch.device) -> Iterator[list[str]]:
    """Watches a GPU's clocks with NVML (pip install nvidia-ml-py) during the `with` block; then the list
    holds every reason for which they were slowed down.
    """
    reasons: list[str] = []
    nvml, handle = _nvml(device)
    if nvml is None:
        yield reasons
        return
    seen, done = 0, threading.Event()

    def look() -> None:
        nonlocal seen
        while not done.wait(LOOK_SECONDS):
            try:
                seen |= int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
            except nvml.NVMLError:  # some virtual GPUs do not tell
                return

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield reasons
    finally:
        done.set()
        watcher.join()
        reasons += [name for bit, name in REASONS.items() if seen & bit]
        nvml.nvmlShutdown()


def _nvml(device: torch.device) -> tuple[Any, Any]:
    """NVML and its handle of a CUDA device; None if either is missing."""
    if device.type != "cuda":
        return None, None
    try:
        import pynvml
    except ImportError:
        return None, None
    import torch

    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    try:
        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError:  # no driver library, or a device that it does not manage
        return None, None
