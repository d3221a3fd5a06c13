"""Why a GPU ran below its clocks, as NVML says it: by a stand-in, and by the real one."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device import needs_cuda

from pyps.profiler import clocks
from pyps.profiler.clocks import gpu_clocks

GPU = torch.device("cuda", 0)
DEADLINE_SECONDS = 30.0


class NVMLError(Exception):
    """The error that pynvml raises."""


class Driver(SimpleNamespace):
    """pynvml, for one GPU: what it is asked goes to `look`, which notes that it was."""

    def __init__(self, look: Any) -> None:
        self.asked = threading.Event()

        def reasons(handle: str) -> int:
            self.asked.set()
            assert handle == "handle of GPU-one"
            return int(look())

        super().__init__(
            NVMLError=NVMLError,
            nvmlInit=lambda: None,
            nvmlShutdown=lambda: None,
            nvmlDeviceGetHandleByUUID=lambda uuid: f"handle of {uuid}",
            nvmlDeviceGetCurrentClocksThrottleReasons=reasons,
        )


def slowdowns(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> list[str]:
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="one"))
    monkeypatch.setattr(clocks, "LOOK_SECONDS", 0.001)
    with gpu_clocks(GPU) as found:
        assert driver.asked.wait(DEADLINE_SECONDS)
        assert not found
    return found


def test_reasons_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slowdowns(monkeypatch, Driver(lambda: 0x01 | 0x04 | 0x40)) == [
        "power cap",
        "hardware thermal slowdown",
    ]


def test_a_gpu_that_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise NVMLError("Not Supported")

    assert slowdowns(monkeypatch, Driver(refuse)) == []


def test_a_cpu_has_none() -> None:
    with gpu_clocks(torch.device("cpu")) as found:
        pass
    assert found == []


@needs_cuda
def test_the_real_driver() -> None:
    pytest.importorskip("pynvml")
    with gpu_clocks(GPU) as found:
        torch.zeros(1, device=GPU)
    assert set(found) <= set(clocks.REASONS.values())
