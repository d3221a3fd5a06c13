"""Runs one task's training steps on one device, and measures their time and memory.

A step is zero_grad, forward, loss, backward, optimizer step; under autocast, compiled or in micro-batches if
the options say so. The timed part does not include making and moving a batch. The seconds are of the wall
clock, from an idle device until it has finished: what launches the step counts where it takes longer than the
device. A throttled step is one span of pyps.profiler.throttle.
"""

from __future__ import annotations

import gc
import platform
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pyps.errors import InputError
from pyps.profiler.host_memory import cpu_free_bytes, cpu_held_bytes, disable_malloc_trim
from pyps.profiler.throttle import Throttle
from pyps.tasks import TrainingTask

if TYPE_CHECKING:
    import torch

CPU_MEMORY_SHARE = 0.8  # of the free memory; the rest stays for the page cache and other processes
# Of torch's allocator on a CPU, and of CUDA and its libraries, which allocate by themselves.
OUT_OF_MEMORY = "DefaultCPUAllocator", "CUDA error: out of memory", "_STATUS_ALLOC_FAILED"
TRAINING = "training step"  # what failed, in an error
PARTS = ("data", "forward", "backward", "optimizer")
PROC_SELF = Path("/proc/self")
BatchShapes = list[tuple[int, ...]]


@dataclass(frozen=True)
class StepOptions:
    """Hold how a step is taken.

    autocast: "bf16", "f16" (with a gradient scaler on CUDA) or None. accumulate: micro-batches before each
    optimizer step. compile: use torch.compile.
    """

    autocast: str | None = None
    accumulate: int = 1
    compile: bool = False


class OutOfMemoryError(Exception):
    """A step did not fit into the device's memory."""


class Stepper(Protocol):
    """Hold what the measurement needs of a device; tests replace it."""

    name: str
    kind: str
    budget_bytes: int
    length: int | None  # of samples, where make_batch(batch, length) makes those

    def prepare(self, batch: int) -> Any:
        """A batch of `batch` samples, on the device."""
        ...

    def step(self, data: Any) -> None:
        """One finished training step, untimed. Raises OutOfMemoryError."""
        ...

    def timed_step(self, data: Any, batch: int) -> float:
        """Seconds of one training step. Raises OutOfMemoryError."""
        ...

    def peak_bytes(self, data: Any) -> int:
        """Peak memory of one training step, in bytes. Raises OutOfMemoryError."""
        ...

    def parts(self, batch: int) -> dict[str, float]:
        """Seconds of one step's data, forward, backward and optimizer parts. Raises OutOfMemoryError."""
        ...


def resolve_device(name: str) -> torch.device:
    """`cpu` or `cuda:N` as a torch device that exists. Raises InputError."""
    import torch

    if not re.fullmatch(r"cpu|cuda(:\d{1,4})?", name):
        raise InputError("device", "", repr(name), "cpu or cuda:N")
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        found = f"{name!r}, but torch {torch.__version__} sees no CUDA device"
        raise InputError("device", "", found, "cpu, or a CUDA build of torch and a visible GPU")
    index = int(name.partition(":")[2] or 0)
    if index >= (count := torch.cuda.device_count()):
        raise InputError("device", "", repr(name), f"cuda:N with N below {count}, the number of GPUs")
    return torch.device("cuda", index)


def make_stepper(
    task: TrainingTask,
    device: torch.device,
    throttle: float | None,
    where: str,
    options: StepOptions = StepOptions(),
) -> Stepper:
    """The stepper of a device.

    task: what to train. throttle: emulate a device that many times slower; None: no throttle. where: the name
    of the model in error messages. options: how a step is taken.
    """
    kind = CudaStepper if device.type == "cuda" else CpuStepper
    return kind(task, device, throttle, where, options)


class _TaskStepper:
    """The training step itself, the same on every device."""

    throttle: Throttle | None

    def __init__(self, task: TrainingTask, device: torch.device, where: str, options: StepOptions) -> None:
        import torch

        self._task, self._device, self._where, self._options = task, device, where, options
        self._model: Any = task.model.to(device).train()
        self._optimizer = task.make_optimizer()
        if options.compile:
            self._model = torch.compile(self._model)
        self._dtype = {None: None, "bf16": torch.bfloat16, "f16": torch.float16}[options.autocast]
        scales = options.autocast == "f16" and device.type == "cuda"
        self._scaler: Any = torch.amp.GradScaler(device.type, enabled=scales)
        self.length: int | None = None
        self._shapes: dict[int, BatchShapes] = {}  # of batches of two or more samples, where they are known

    def prepare(self, batch: int) -> Any:
        """(inputs, targets) on the device. Raises InputError if make_batch fails, or makes the same of
        unlike numbers of samples; OutOfMemoryError.
        """
        what = f"make_batch({batch})"
        sizes = (batch,) if self.length is None else (batch, self.length)
        data = self._guarded(what, lambda: _to(self._task.make_batch(*sizes), self._device))
        if self.length is None and batch > 1 and batch not in self._shapes and (shapes := _shapes_of(data)):
            if shapes[0][0] != batch and shapes in self._shapes.values():
                raise InputError(self._where, what, f"{shapes[0][0]} rows", str(batch))
            self._shapes[batch] = shapes
        return data

    def _train(self, data: Any, mark: Callable[[str], None] = lambda part: None, keeps: bool = False) -> None:
        """One step; calls `mark` with each part's name after it. keeps: gradients, as DDP's buckets do."""
        import torch

        self._optimizer.zero_grad(set_to_none=not keeps)
        pieces = _pieces(data, self._options.accumulate)
        for inputs, targets in pieces:
            with torch.autocast(self._device.type, self._dtype, enabled=self._dtype is not None):
                loss: Any = self._task.loss(self._model(inputs), targets) / len(pieces)
            mark("forward")
            self._scaler.scale(loss).backward()
            mark("backward")
        self._scaler.step(self._optimizer)
        self._scaler.update()
        mark("optimizer")

    def timed_step(self, data: Any, batch: int) -> float:
        if self.throttle is not None:
            with self.throttle.span(batch) as span:
                self.step(data)
            return span.lasted_seconds
        self._wait()
        start = time.perf_counter()
        self.step(data)
        return time.perf_counter() - start

    def step(self, data: Any, keeps: bool = False) -> None:
        self._guarded(TRAINING, lambda: self._train_and_wait(data, keeps))

    def _train_and_wait(self, data: Any, keeps: bool) -> None:
        self._train(data, keeps=keeps)
        self._wait()

    def _wait(self) -> None:
        """Waits until the device has finished all its work."""

    def parts(self, batch: int) -> dict[str, float]:
        seconds = dict.fromkeys(PARTS, 0.0)
        began = time.perf_counter()

        def mark(part: str) -> None:
            nonlocal began
            self._wait()
            now = time.perf_counter()
            seconds[part] += now - began
            began = now

        data = self.prepare(batch)
        mark("data")
        self._guarded(TRAINING, lambda: self._train(data, mark))
        return seconds

    def _guarded(self, what: str, action: Any) -> Any:
        """Runs a part of the user's task; turns its errors into ours, which name the part."""
        try:
            return action()
        except Exception as error:
            if is_out_of_memory(error):
                raise OutOfMemoryError(what) from None
            found = f"{type(error).__name__}: {error}".splitlines()[0]
            raise InputError(self._where, what, found, "a training step that runs") from error


class CpuStepper(_TaskStepper):
    """Steps on this machine's CPU; memory is the resident set of this process."""

    kind = "cpu"

    def __init__(
        self,
        task: TrainingTask,
        device: torch.device,
        throttle: float | None,
        where: str,
        options: StepOptions,
    ) -> None:
        disable_malloc_trim()  # before any allocation, as in a worker
        super().__init__(task, device, where, options)
        import torch

        threads = torch.get_num_threads()
        self.name = f"{_cpu_name()}, {threads} thread{'' if threads == 1 else 's'}"
        self.throttle = None if throttle is None else Throttle(throttle)
        self.budget_bytes = cpu_held_bytes() + int(CPU_MEMORY_SHARE * cpu_free_bytes())

    def peak_bytes(self, data: Any) -> int:
        gc.collect()
        peaks_reset = _reset_peak_resident()
        self.step(data, keeps=True)
        return _peak_resident_bytes() if peaks_reset else cpu_held_bytes()


class CudaStepper(_TaskStepper):
    """Steps on a CUDA device; memory is what torch's allocator reserved there."""

    kind = "cuda"

    def __init__(
        self,
        task: TrainingTask,
        device: torch.device,
        throttle: float | None,
        where: str,
        options: StepOptions,
    ) -> None:
        super().__init__(task, device, where, options)
        import torch

        self._cuda: Any = torch.cuda
        self.name = str(torch.cuda.get_device_name(device))
        # The thread only launches kernels: the work is the wall time of a synchronised span.
        self.throttle = None if throttle is None else Throttle(throttle, work_clock=time.perf_counter)
        free_bytes, _ = torch.cuda.mem_get_info(device)
        self.budget_bytes = int(free_bytes) + int(torch.cuda.memory_reserved(device))

    def peak_bytes(self, data: Any) -> int:
        gc.collect()
        self._cuda.empty_cache()
        self._cuda.reset_peak_memory_stats(self._device)
        self.step(data, keeps=True)
        return int(self._cuda.max_memory_reserved(self._device))

    def _guarded(self, what: str, action: Any) -> Any:
        """Run it once more where memory is short, after the allocator has given back its pieces."""
        try:
            return super()._guarded(what, action)
        except OutOfMemoryError:
            pass  # the error held the step's tensors
        gc.collect()
        self._cuda.empty_cache()
        return super()._guarded(what, action)

    def _wait(self) -> None:
        self._cuda.synchronize(self._device)


def is_out_of_memory(error: Exception) -> bool:
    import torch

    if isinstance(error, MemoryError | torch.cuda.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in OUT_OF_MEMORY)


def _pieces(data: Any, count: int) -> list[Any]:
    """The batch in `count` parts along its first dimension; fewer parts if it has fewer samples."""
    if count == 1:
        return [data]
    from torch.utils._pytree import tree_flatten, tree_unflatten

    leaves, structure = tree_flatten(data)
    chunks = [leaf.chunk(count) for leaf in leaves]
    return [tree_unflatten(list(piece), structure) for piece in zip(*chunks, strict=True)]


def _shapes_of(data: Any) -> BatchShapes | None:
    """The shapes of a batch's tensors; None where it has something else, or the first one has no rows."""
    import torch
    from torch.utils._pytree import tree_leaves

    leaves = [leaf for leaf in tree_leaves(data) if leaf is not None]
    if not leaves or not all(isinstance(leaf, torch.Tensor) and not leaf.is_nested for leaf in leaves):
        return None
    return [tuple(leaf.shape) for leaf in leaves] if leaves[0].dim() else None


def _to(data: Any, device: torch.device) -> Any:
    """Tensors, or tuples, lists and dicts of them, moved to a device."""
    if hasattr(data, "to"):
        return data.to(device)
    if isinstance(data, dict):
        return {key: _to(value, device) for key, value in data.items()}
    if isinstance(data, tuple | list):
        return type(data)(_to(value, device) for value in data)
    return data


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else f"{platform.machine()} CPU"


def _reset_peak_resident() -> bool:
    """Resets this process's peak memory in the kernel; False if that is not permitted (some containers)."""
    try:
        (PROC_SELF / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _peak_resident_bytes() -> int:
    found = re.search(r"^VmHWM:\s*(\d+) kB", (PROC_SELF / "status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else cpu_held_bytes()
