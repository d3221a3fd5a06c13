"""Measuring: which batches run, in which order, within which memory, and what becomes of the seconds.

The logic is tested on a device made of arithmetic; a few real steps on the CPU show that the rest is real.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from device import needs_cuda
from hypothesis import given, settings
from hypothesis import strategies as st

from pyps.errors import InputError
from pyps.profiler import profile_model
from pyps.profiler.budget import Budget
from pyps.profiler.climb import LADDER_MAX, Probe, climb, ladder
from pyps.profiler.fit import memory_model, point_seconds
from pyps.profiler.measure import affordable, settle, time_in_rounds, time_parts
from pyps.profiler.stepper import PARTS, OutOfMemoryError, StepOptions, is_out_of_memory, resolve_device
from pyps.profiler.throttle import Throttle
from pyps.tasks import TrainingTask
from pyps.tasks.builtin import digits_mlp

pytestmark = pytest.mark.slow

torch.set_num_threads(1)


class ArithmeticDevice:
    """T(b) = 1 ms + 10 us * b; 100 + b bytes of a budget; remembers what ran."""

    name, kind = "arithmetic", "cpu"

    def __init__(self, budget_bytes: int, real_bytes: int | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.real_bytes = budget_bytes if real_bytes is None else real_bytes
        self.ran: list[int] = []
        self.timed: list[int] = []

    def prepare(self, batch: int) -> int:
        return batch

    def step(self, data: Any) -> None:
        if 100 + data > self.real_bytes:
            raise OutOfMemoryError
        self.ran.append(data)

    def timed_step(self, data: Any, batch: int) -> float:
        self.step(data)
        self.timed.append(batch)
        return 1e-3 + 1e-5 * batch

    def peak_bytes(self, data: Any) -> int:
        self.step(data)
        return 100 + int(data)


@settings(derandomize=True, deadline=None)
@given(st.integers(2, 2**31 - 1))
def test_the_ladder_is_ascending_short_and_ends_at_the_maximum(max_batch: int) -> None:
    sizes = ladder(max_batch)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, max_batch)
    assert len(sizes) <= LADDER_MAX
    assert len(sizes) >= min(max_batch, 7)


def test_the_ladder_has_round_sizes_and_one_below_such() -> None:
    """Devices that are fast at multiples of 8 alone show it there."""
    assert ladder(256) == [1, 2, 4, 8, 16, 32, 64, 127, 128, 256]
    assert [size % 8 for size in ladder(1000)[4:]] == [0, 0, 0, 0, 7, 0, 0]


def test_climbing_stops_where_memory_would_end() -> None:
    said: list[str] = []
    device = ArithmeticDevice(budget_bytes=100 + 40)
    probes = climb(device, [1, 8, 16, 32, 64, 128], 1.0, said.append)
    assert [p.batch for p in probes] == [1, 8, 16, 32]
    assert max(device.ran) == 32  # the step that would not fit is never tried
    assert said == ["memory limits the batch: 32 fits and 64 does not (0.0 GiB)"]


def test_climbing_survives_running_out_of_memory() -> None:
    device = ArithmeticDevice(budget_bytes=10**9, real_bytes=100 + 40)
    probes = climb(device, [1, 8, 16, 32, 64, 128], 1.0, lambda _: None)
    assert [p.batch for p in probes] == [1, 8, 16, 32]


@settings(derandomize=True, deadline=None)
@given(limit=st.integers(2, 10**6), known=st.booleans())
def test_without_sizes_the_limit_is_found_to_a_sixteenth_of_its_octave(limit: int, known: bool) -> None:
    budget = 100 + limit
    device = ArithmeticDevice(budget if known else 10**9, budget)
    probes = climb(device, None, 1e9, lambda _: None)
    largest = probes[-1].batch
    assert largest <= limit
    assert limit - largest <= max(0, limit / 16)
    assert [p.batch for p in probes] == sorted({p.batch for p in probes})
    assert 2 <= len(probes) <= LADDER_MAX


def test_without_sizes_patience_ends_too() -> None:
    probes = climb(ArithmeticDevice(10**9), None, 0.02, lambda _: None)
    assert probes[-1].batch == 1024  # 11 ms; 2048 would take more than 20
    assert all(p.seconds <= 0.02 for p in probes)


@pytest.mark.parametrize("sizes", [None, [1, 4, 8]])
def test_a_model_that_cannot_train_on_one_sample_is_measured_from_more(sizes: list[int] | None) -> None:
    class Normalized(ArithmeticDevice):
        def step(self, data: Any) -> None:
            if data == 1:
                raise InputError(
                    "model", "training step", "ValueError: Expected more than 1 value", "one that runs"
                )
            super().step(data)

    said: list[str] = []
    probes = climb(Normalized(10**9), sizes, 0.02, said.append)
    assert probes[0].batch == (4 if sizes else 2)
    assert said[0].startswith("no step of one sample runs (ValueError: Expected more than 1 value)")


def test_a_step_that_never_runs_is_an_error() -> None:
    class Broken(ArithmeticDevice):
        def step(self, data: Any) -> None:
            raise InputError("model", "training step", f"no step of {data}", "one that runs")

    with pytest.raises(InputError, match="no step of 2"):
        climb(Broken(10**9), None, 1.0, lambda _: None)


def test_fewer_than_two_sizes_are_refused() -> None:
    with pytest.raises(InputError, match="memory for 1 of the batch sizes"):
        climb(ArithmeticDevice(10**9, 101), [1, 2, 4], 1.0, lambda _: None)


def test_rounds_are_interleaved_and_keep_every_second() -> None:
    device = ArithmeticDevice(10**9)
    seconds = time_in_rounds(device, [1, 4, 16], 5)
    warm, kept = device.timed[::2], device.timed[1::2]
    assert warm == kept, "a step of the same size before each that counts"
    rounds = [kept[k : k + 3] for k in range(0, 15, 3)]
    assert all(sorted(r) == [1, 4, 16] for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1
    assert {b: len(s) for b, s in seconds.items()} == {1: 5, 4: 5, 16: 5}


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 10**9), min_size=3, max_size=8))
def test_the_memory_model_lies_above_every_peak(noise: list[int]) -> None:
    peaks = [(2**k, 10**6 * 2**k + n) for k, n in enumerate(noise)]
    memory = memory_model(peaks, 10**12)
    if memory is not None:
        need = [memory.fixed_bytes + memory.bytes_per_sample * batch for batch, _ in peaks]
        assert all(n >= peak - 1e-3 for n, (_, peak) in zip(need, peaks, strict=True))


def test_the_memory_model_is_exact_on_a_line_and_silent_without_growth() -> None:
    line = memory_model([(b, 1000 + 24 * b) for b in (1, 2, 8)], 10**6)
    assert line is not None
    assert (line.fixed_bytes, line.bytes_per_sample, line.budget_bytes) == (1000, 24.0, 10**6)
    assert memory_model([(b, 1000) for b in (1, 2, 8)], 10**6) is None


def test_a_real_profile_of_the_cpu() -> None:
    threads = torch.get_num_threads()
    profile = profile_model("digits_mlp", batches=[64, 1, 256], repeats=3, threads=1)
    assert torch.get_num_threads() == threads
    assert [p.batch for p in profile.points] == [1, 64, 256]
    assert all(len(point_seconds(p)) >= 3 and (p.peak_bytes or 0) > 0 for p in profile.points)
    assert (profile.device.kind, profile.device.emulated, profile.device.throttle) == ("cpu", False, 1.0)
    assert (profile.model.name, profile.model.parameters) == ("digits_mlp", 85002)
    assert profile.max_batch == 256
    assert profile.fit is not None


@pytest.mark.timed
def test_a_throttled_profile_is_slower_and_says_so() -> None:
    """The throttle multiplies CPU time; other processes matter where it is 1, so the quickest step counts."""

    def quickest(factor: float) -> float:
        profile = profile_model("digits_mlp", batches=[1, 1024], repeats=5, throttle=factor, threads=1)
        assert (profile.device.emulated, profile.device.throttle) == (True, factor)
        assert not any(point.parts for point in profile.points)  # a throttle's wait is no part of a step
        return min(point_seconds(profile.points[-1]))

    assert quickest(8.0) > 3.0 * quickest(1.0)


def test_a_task_of_ones_own_with_nested_batches() -> None:
    def make_batch(batch: int) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor]]:
        return {"input": torch.zeros(batch, 4)}, (torch.zeros(batch, 2),)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def forward(self, data: dict[str, torch.Tensor]) -> torch.Tensor:
            out: torch.Tensor = self.layer(data["input"])
            return out

    task = TrainingTask(Net(), make_batch, lambda out, targets: ((out - targets[0]) ** 2).mean())
    profile = profile_model(task, batches=[1, 2], repeats=1, max_batch=64)
    assert (profile.model.name, profile.max_batch) == ("Net", 64)


def test_a_profile_says_what_is_trained_and_in_which_precision() -> None:
    """A frozen layer in bfloat16 and an adapter: what a sharded plan counts of their state."""
    frozen, adapter = (
        torch.nn.Linear(8, 8, bias=False, dtype=torch.bfloat16),
        torch.nn.Linear(8, 2, bias=False),
    )
    frozen.requires_grad_(requires_grad=False)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.adapter = frozen, adapter

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.adapter(self.frozen(x.bfloat16()).float())
            return out

    def make_batch(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(batch, 8), torch.zeros(batch, 2)

    model = profile_model(
        TrainingTask(Net(), make_batch, torch.nn.functional.mse_loss), batches=[1, 2], repeats=1
    ).model
    assert (model.parameters, model.trained) == (64 + 16, 16)
    assert model.parameter_bytes == (64 * 2 + 16 * 4) / 80
    whole = profile_model("digits_mlp", batches=[1, 2], repeats=1).model
    assert (whole.trained, whole.parameter_bytes) == (None, None)


def test_a_task_that_fails_is_named() -> None:
    good = digits_mlp()
    broken = TrainingTask(good.model, lambda batch: (torch.zeros(batch, 63), torch.zeros(batch)), good.loss)
    with pytest.raises(InputError, match=r"Sequential: training step: found RuntimeError: .*shapes"):
        profile_model(broken, batches=[1, 2])

    def no_data(batch: int) -> tuple[Any, Any]:
        raise FileNotFoundError("data.bin")

    with pytest.raises(InputError, match=r"make_batch\(1\): found FileNotFoundError: data.bin"):
        profile_model(TrainingTask(good.model, no_data, good.loss), batches=[1, 2])


@pytest.mark.parametrize("most", [8, 16])  # all batches alike; the larger ones
def test_a_task_that_makes_the_same_of_unlike_batches_is_refused(most: int) -> None:
    good = digits_mlp()
    alike = TrainingTask(good.model, lambda batch: good.make_batch(max(8, min(batch, most))), good.loss)
    with pytest.raises(InputError, match=r"Sequential: make_batch\(\d+\): found (8|16) rows; expected \d+$"):
        profile_model(alike, batches=[1, 4, 16, 32], repeats=1)


@pytest.mark.parametrize("rows_alike", [False, True])
def test_batches_whose_first_dimension_is_not_the_samples_are_measured(rows_alike: bool) -> None:
    """Sequences with the time first, and tokens in rows; a batch that says its own size."""

    def make_batch(batch: int) -> tuple[torch.Tensor, Any]:
        inputs = torch.zeros(5, 64 if rows_alike else batch)
        return inputs, (torch.zeros(1), batch if rows_alike else None)

    scale = torch.nn.Linear(1, 1)
    net = torch.nn.Sequential(torch.nn.Unflatten(1, (-1, 1)), scale)
    task = TrainingTask(net, make_batch, lambda out, targets: out.mean())
    assert len(profile_model(task, batches=[2, 4, 8], repeats=1).points) == 3


def test_running_out_of_real_cpu_memory_is_recovered() -> None:
    good = digits_mlp()

    def make_batch(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        return good.make_batch(batch) if batch <= 4 else (torch.empty(2**60), torch.empty(1))

    said: list[str] = []
    task = TrainingTask(good.model, make_batch, good.loss)
    profile = profile_model(task, batches=[1, 2, 4, 8], max_batch=8, repeats=1, notify=said.append)
    assert [p.batch for p in profile.points] == [1, 2, 4]
    assert profile.max_batch == 4
    assert said[0].startswith("memory limits the batch: 4 fits and 8 does not")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_batch": -4}, "max_batch: found -4"),
        ({"max_batch": 1}, "max_batch: found 1"),
        ({"batches": [1]}, "batches: found 1; expected two or more"),
        ({"batches": []}, "batches: found none"),
        ({"batches": [-1, 4]}, "batches: found -1,4"),
        ({"batches": [1, 8], "max_batch": 4}, "batches: found 8; expected at most max_batch = 4"),
        ({"repeats": 0}, "repeats: found 0"),
        ({"threads": 0}, "threads: found 0"),
        ({"throttle": 0.5}, "throttle: found 0.5"),
        ({"throttle": float("nan")}, "throttle: found nan"),
        ({"max_step_seconds": 0.0}, "max_step_seconds: found 0.0"),
        ({"device": "tpu"}, "device: found 'tpu'; expected cpu or cuda:N"),
        ({"device": "cuda:x"}, "device: found 'cuda:x'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refused:
        profile_model("digits_mlp", **arguments)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("available", "count", "message"),
    [(False, 0, "sees no CUDA device"), (True, 2, "cuda:N with N below 2")],
)
def test_a_gpu_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, available: bool, count: int, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(InputError) as refused:
        resolve_device("cuda:7")
    assert message in str(refused.value)


@needs_cuda
@pytest.mark.parametrize("throttle", [None, 3.0])
def test_a_real_profile_of_a_gpu(throttle: float | None) -> None:
    profile = profile_model("cnn", device="cuda:0", batches=[1, 256, 1024], repeats=5, throttle=throttle)
    assert profile.device.kind == "cuda"
    medians = [float(np.median(point_seconds(p))) for p in profile.points]
    assert medians[-1] > medians[0] > 0
    assert profile.memory is not None
    assert profile.memory.bytes_per_sample > 1024 * 3 * 4


@needs_cuda
def test_a_gpus_memory_limit_is_found() -> None:
    torch.cuda.set_per_process_memory_fraction(0.02)
    try:
        said: list[str] = []
        profile = profile_model("cnn", device="cuda:0", repeats=1, max_step_seconds=60, notify=said.append)
        assert profile.max_batch is not None
        assert profile.max_batch > 64
        assert any("memory limits the batch" in text for text in said)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


class ShrinkingDevice(ArithmeticDevice):
    """Has less memory once a size was timed so often."""

    def timed_step(self, data: Any, batch: int) -> float:
        seconds = super().timed_step(data, batch)
        if self.timed.count(batch) == 4:
            self.real_bytes = 100 + 400
        return seconds


def test_a_size_that_no_longer_fits_is_left_out() -> None:
    device = ShrinkingDevice(2000)
    seconds = time_in_rounds(device, [1, 100, 400, 800], 7)
    assert sorted(seconds) == [1, 100, 400]
    assert all(len(found) == 7 for found in seconds.values())


def test_errors_that_mean_too_little_memory() -> None:
    for said in ("CUDA error: out of memory\nCUDA kernel errors", "CUBLAS_STATUS_ALLOC_FAILED when calling"):
        assert is_out_of_memory(RuntimeError(said))
    assert not is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))


@needs_cuda
@pytest.mark.parametrize(
    "options", [StepOptions("bf16"), StepOptions("f16"), StepOptions(accumulate=3), StepOptions(compile=True)]
)
def test_a_gpus_steps_with_options(options: StepOptions) -> None:
    profile = profile_model("digits_mlp", device="cuda:0", batches=[8, 64], repeats=3, options=options)
    assert [p.batch for p in profile.points] == [8, 64]
    assert profile.memory is None or profile.memory.fixed_bytes > 0


class TimedDevice(ArithmeticDevice):
    """A step of b samples takes b seconds of a clock of its own, times how busy the machine is."""

    def __init__(self, busy: float = 1.0) -> None:
        super().__init__(10**9)
        self.now, self.busy = 0.0, busy

    def step(self, data: Any) -> None:
        super().step(data)
        self.now += data * self.busy

    def parts(self, batch: int) -> dict[str, float]:
        self.step(batch)
        return dict.fromkeys(PARTS, 1.0)

    def measure(self, seconds: float, sizes: list[int], repeats: int = 7) -> tuple[Budget, dict[int, Any]]:
        """Measure as profile_model does: the budget at its end, and what was timed."""
        told: list[tuple[float, float]] = []
        budget = Budget(seconds, lambda: self.now, lambda gone, most: told.append((gone, most)))
        probes = affordable(climb(self, sizes, 1e9, lambda _: None, budget), budget)
        costs = {p.batch: p.cost for p in probes}
        settle(self, [*costs][(len(costs) - 1) // 2], lambda _: None, budget)
        found = time_in_rounds(self, [*costs], repeats, budget, costs)
        for batch in found:
            time_parts(self, batch, budget, costs[batch] / 2)
        self.told = told
        return budget, found


@pytest.mark.parametrize("busy", [1.0, 4.0, 30.0])
@pytest.mark.parametrize("seconds", [100.0, 400.0, 3000.0])
def test_a_budget_of_time_is_kept(busy: float, seconds: float) -> None:
    """By a machine that is busy, and under a throttle; but for two sizes, which are timed in any case."""
    device = TimedDevice(busy)
    budget, found = device.measure(seconds, [1, 2, 4, 8, 16])
    least = 2 * (1 + 2) * busy  # two sizes climb; they settle, and are timed once
    assert device.now <= max(seconds, 2 * least + 8 * 2 * busy)
    assert len(found) >= 2
    assert all(found.values())
    short = len(found) < 5 or any(len(times) < 7 for times in found.values())
    assert short <= bool(budget.left_out)
    assert all(gone <= most for gone, most in device.told)
    assert all(most <= max(seconds, gone) for gone, most in device.told)


@pytest.mark.parametrize(
    ("seconds", "kept", "cut"),
    [
        (300.0, [1, 2, 4, 8, 16, 32], False),
        (100.0, [1, 4, 8, 32], False),
        (40.0, [1, 4, 32], False),
        (34.0, [1, 32], False),
        (21.0, [1, 4, 16], True),
        (2.0, [1, 2], True),
    ],
)
def test_sizes_between_go_before_the_largest(seconds: float, kept: list[int], cut: bool) -> None:
    device = TimedDevice()
    budget = Budget(seconds, lambda: device.now)
    probes = [Probe(b, b / 2, 0, float(b)) for b in (1, 2, 4, 8, 16, 32)]
    found = [probe.batch for probe in affordable(probes, budget)]
    assert (found, budget.cut_short) == (kept, cut)


def test_a_throttle_takes_no_time_before_the_timing() -> None:
    class Throttled(TimedDevice):
        def __init__(self) -> None:
            super().__init__()
            self.throttle = Throttle(100.0, work_clock=lambda: self.now)

        def timed_step(self, data: Any, batch: int) -> float:
            raise AssertionError("a step that waits for the throttle")

    device = Throttled()
    probes = climb(device, [1, 2, 4], 1e9, lambda _: None, Budget(1e3, lambda: device.now))
    assert [(p.batch, p.seconds, p.cost) for p in probes] == [(b, 100.0 * b, 200.0 * b) for b in (1, 2, 4)]


def test_what_a_budget_leaves_out_is_named() -> None:
    device = TimedDevice()
    budget, found = device.measure(60.0, [1, 2, 4, 8, 16, 32])
    assert sorted(found) == [1, 2, 4]
    assert budget.left_out[0] == "batches 8, 16, 32"
    ample, everything = TimedDevice().measure(1e5, [1, 2, 4, 8, 16, 32])
    assert sorted(everything) == [1, 2, 4, 8, 16, 32]
    assert ample.left_out == []
