"""Measures a model on a device: selects the batch sizes, times their steps, and makes a profile of the times.

First every size runs once, in ascending order, which measures the memory and finds the limit. Then the middle
size runs until its steps take about the same time: caches, allocator and clocks have settled. Then the sizes
are timed in rounds, each round in a different fixed order, with an untimed step before each timed one. So a
machine that drifts or is interrupted disturbs all sizes alike instead of bending the curve. Rounds continue
until the median of every size is known well enough, up to a limit. The profile keeps all seconds; the fit
uses the median of each size. All of it has a budget of wall time; what does not fit is left out, and named.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from pyps.errors import InputError, needed
from pyps.formats import MAX_BATCH, Device, ModelInfo, Parts, Point, Profile
from pyps.profiler.budget import SECONDS, UNLIMITED, Budget, Progress
from pyps.profiler.climb import FEW, Notify, Probe, check_two, climb, ladder
from pyps.profiler.clocks import gpu_clocks
from pyps.profiler.curve import select_fit
from pyps.profiler.fit import memory_model
from pyps.profiler.lengths import check_lengths, measure_lengths
from pyps.profiler.statistics import median_and_error
from pyps.profiler.stepper import (
    PARTS,
    OutOfMemoryError,
    StepOptions,
    Stepper,
    make_stepper,
    resolve_device,
)
from pyps.profiler.throttle import Throttle
from pyps.tasks.by_name import load_task
from pyps.tasks.task import TrainingTask, require_torch

if TYPE_CHECKING:
    import torch

SETTLE_SHARE = 0.1  # of them
LEAST_ROUNDS = 2  # of all sizes: where time is short, some are left out
REPEATS = 7  # least timed steps of a batch size: an odd number, so that the median is one of them
MAX_REPEATS = 31
MEDIAN_ERROR = 0.01  # a median is known well enough with this relative standard error
SETTLED, SETTLE_STEPS, SETTLE_LIMIT = 0.05, 3, 40  # relative spread, steps in a row within it, most steps
MAX_STEP_SECONDS = 1.0  # without a largest batch, the sizes end before a step takes longer than this
PARTS_REPEATS = 3


def profile_model(
    model: str | TrainingTask,
    *,
    name: str | None = None,
    device: str = "cpu",
    max_batch: int | None = None,
    batches: Sequence[int] | None = None,
    repeats: int = REPEATS,
    throttle: float | None = None,
    threads: int | None = None,
    max_step_seconds: float = MAX_STEP_SECONDS,
    options: StepOptions = StepOptions(),  # noqa: B008 - frozen
    memory_budget: int | None = None,
    seconds: float = SECONDS,
    lengths: Sequence[int] | None = None,
    notify: Notify = warnings.warn,
    progress: Progress | None = None,
) -> Profile:
    """Time real training steps of a model on a device and fit T(b) = max(t0, c + a*b).

    model: a built-in's name, "module:factory" or a TrainingTask. name: the model's, in the profile. device:
    cpu or cuda:N. max_batch: the end of a ladder of sizes; without it the ladder ends where memory or
    max_step_seconds do. batches: exactly these sizes. repeats: least timed steps of each size. throttle:
    emulates a device that many times slower. threads: torch's threads meanwhile. options: how a step is
    taken. memory_budget: bytes for a step, if less than are free. seconds: of wall time; two sizes are
    timed once in any case. lengths: of samples, in tokens, which make_batch(batch, length) makes; what they
    cost is measured too, and batch sizes with samples of the middle one. notify: gets what limits the result.
    progress: gets (seconds gone, seconds at most). Raises InputError for a wrong argument, model or device,
    PypsError without torch or scipy.
    """
    budget = Budget(seconds, progress=progress)
    sizes = _check_arguments(max_batch, batches, repeats, throttle, threads, max_step_seconds)
    several = None if lengths is None else check_lengths(lengths)
    require_torch()
    needed("scipy", "plan")  # fits what is measured
    where = name or (model if isinstance(model, str) else type(model.model).__name__)
    target = resolve_device(device)
    with _threads(threads):
        task = load_task(model) if isinstance(model, str) else model
        stepper = make_stepper(task, target, throttle, where, options)
        if memory_budget is not None:
            stepper.budget_bytes = min(stepper.budget_bytes, memory_budget)
        stepper.length = several[len(several) // 2] if several else None
        probes = affordable(climb(stepper, sizes, max_step_seconds, notify, budget), budget)
        points, clocks = _timed_points(stepper, target, probes, repeats, budget, notify)
        by_length = measure_lengths(stepper, several) if several else None
        _report_overrun(stepper, notify)
    budget.say(notify)
    return Profile(
        device=_device_of(stepper, throttle),
        model=_model_info(where, task, options, stepper.length),
        points=points,
        max_batch=_largest(max_batch, sizes, points),
        cut_short=budget.cut_short,
        min_batch=FEW if points[0].batch > 1 and (sizes is None or 1 in sizes) else None,
        memory=memory_model([(p.batch, p.peak_bytes) for p in probes], stepper.budget_bytes),
        fit=select_fit(points),
        lengths=by_length,
        clocks=clocks or None,
    )


def _timed_points(
    stepper: Stepper,
    device: torch.device,
    probes: Sequence[Probe],
    repeats: int,
    budget: Budget,
    notify: Notify,
) -> tuple[list[Point], list[str]]:
    """The points of the sizes that could be timed, and what slowed a GPU's clocks down meanwhile. Raises
    InputError if fewer than two sizes could.
    """
    costs = {p.batch: p.cost for p in probes}
    settle(stepper, [*costs][(len(costs) - 1) // 2], notify, budget)
    with gpu_clocks(device) as clocks:
        seconds = time_in_rounds(stepper, [*costs], repeats, budget, costs)
    for reason in clocks:
        notify(f"the GPU ran below its clocks while it was timed: {reason}")
    if left_out := [probe.batch for probe in probes if probe.batch not in seconds]:
        notify(f"memory for batches {left_out} was there at first, but not while they were timed: left out")
    timed = [probe for probe in probes if probe.batch in seconds]
    check_two(timed, stepper)
    return [_point_of(stepper, p, seconds[p.batch], budget) for p in timed], clocks


def _point_of(stepper: Stepper, probe: Probe, seconds: list[float], budget: Budget) -> Point:
    """The point of a size; without the parts of a step where a throttle makes up the time."""
    median, throttled = float(np.median(seconds)), _throttle_of(stepper) is not None
    parts = None if throttled else time_parts(stepper, probe.batch, budget, median)
    return Point(batch=probe.batch, seconds=seconds, peak_bytes=probe.peak_bytes, parts=parts)


def _device_of(stepper: Stepper, throttle: float | None) -> Device:
    emulated = throttle is not None
    return Device(name=stepper.name, kind=stepper.kind, throttle=throttle or 1.0, emulated=emulated)


def _model_info(name: str, task: TrainingTask, options: StepOptions, length: int | None) -> ModelInfo:
    parameters = list(task.model.parameters())
    count = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    size = sum(p.numel() * p.element_size() for p in parameters)
    return ModelInfo(
        name=name,
        parameters=count or None,
        trained=None if trained == count else trained,
        parameter_bytes=None if size == 4 * count else size / count,
        autocast=options.autocast,  # type: ignore[arg-type]
        accumulate=options.accumulate,
        compiled=options.compile,
        optimizer=_optimizer_in_words(task),
        tokens_per_sample=length,
    )


def _optimizer_in_words(task: TrainingTask) -> str:
    optimizer = task.make_optimizer()
    momentum = optimizer.defaults.get("momentum")
    return type(optimizer).__name__ + (f" with momentum {momentum:g}" if momentum else "")


def affordable(probes: list[Probe], budget: Budget) -> list[Probe]:
    """The sizes for which there is time. Where LEAST_ROUNDS of all do not fit, sizes between go, as evenly as
    they come; then rounds; the largest size last.
    """
    kept = next((some for some in _fewer(probes) if budget.allows(_seconds_of(some))), probes[:2])
    if dropped := [p.batch for p in probes if p not in kept]:
        budget.left_out.append(f"batches {', '.join(map(str, dropped))}")
        budget.cut_short |= kept[-1] is not probes[-1]
    return kept


def _fewer(probes: list[Probe]) -> Iterator[list[Probe]]:
    """Selections of two sizes or more, all with the smallest: those with the largest first."""
    for end in range(len(probes), 1, -1):
        for count in range(end, 1, -1):
            yield [probes[k] for k in sorted({round(x) for x in np.linspace(0, end - 1, count)})]


def _seconds_of(probes: list[Probe]) -> float:
    """Return what timing these sizes takes at least: of three or fewer, each is timed but once."""
    rounds = LEAST_ROUNDS if len(probes) > 3 else 1
    return rounds * sum(p.cost for p in probes)


def time_in_rounds(
    stepper: Stepper,
    batches: Sequence[int],
    repeats: int,
    budget: Budget = UNLIMITED,
    costs: dict[int, float] | None = None,
) -> dict[int, list[float]]:
    """Seconds of the steps of every batch size, in interleaved rounds; a seed fixes the order.

    Each size gets `repeats` steps, and then up to MAX_REPEATS while its median's error exceeds MEDIAN_ERROR.
    A size that does not fit into memory any more is left out. costs: about how long a step and the one before
    take, by batch; measured again here. Where the budget ends, sizes keep the steps that they have.
    """
    seconds: dict[int, list[float]] = {batch: [] for batch in batches}
    order, shuffle = list(batches), random.Random(0).shuffle
    costs = {} if costs is None else costs
    most, scarce = max(repeats, MAX_REPEATS), 0
    for number in range(most):
        shuffle(order)
        wanted = [b for b in order if number < repeats or median_and_error(seconds[b])[1] > MEDIAN_ERROR]
        for batch in wanted:
            # One run of each size's; under a throttle they are not timed.
            parts = sum(costs.values()) / 2 if _throttle_of(stepper) is None else 0.0
            if seconds[batch] and not budget.allows(costs.get(batch, 0.0) + parts):
                scarce += number < repeats
                continue
            budget.advance((most - number) * sum(costs.get(b, 0.0) for b in order))
            began = budget.clock()
            try:
                data = stepper.prepare(batch)
                stepper.timed_step(data, batch)  # untimed: caches, allocator, clock and throttle settle
                seconds[batch].append(stepper.timed_step(data, batch))
            except OutOfMemoryError:
                order.remove(batch)
                del seconds[batch]
                continue
            finally:
                data = None
            costs[batch] = budget.clock() - began
    if scarce:
        budget.left_out.append(f"{scarce} of {repeats * len(seconds)} timed steps")
    return seconds


def settle(stepper: Stepper, batch: int, notify: Notify, budget: Budget = UNLIMITED) -> bool:
    """Runs steps until the last few take about the same time; False, after a notice, if they never do, or if
    a part of the budget ends.
    """
    data = stepper.prepare(batch)
    latest: list[float] = []
    end = budget.gone + SETTLE_SHARE * budget.seconds
    for _ in range(SETTLE_LIMIT):
        if budget.gone > end:
            return False
        latest = [*latest[1 - SETTLE_STEPS :], stepper.timed_step(data, batch)]
        if len(latest) == SETTLE_STEPS and max(latest) <= (1 + SETTLED) * min(latest):
            return True
    notify(f"the device does not settle: steps still differ by over {SETTLED:.0%} after {SETTLE_LIMIT}")
    return False


def time_parts(stepper: Stepper, batch: int, budget: Budget, cost: float) -> Parts | None:
    """The median seconds of a step's parts; measured in separate steps, because it slows a step down. None
    where the budget has no room for one, which takes about `cost` seconds.
    """
    runs = [stepper.parts(batch) for _ in range(PARTS_REPEATS) if budget.allows(cost)]
    if not runs:
        budget.left_out.append(f"the parts of a step of {batch}")
        return None
    return Parts(**{part: float(np.median([run[part] for run in runs])) for part in PARTS})


def _largest(max_batch: int | None, sizes: Sequence[int] | None, points: Sequence[Point]) -> int:
    """The largest batch that a plan may use: max_batch if all sizes ran, else the largest size that ran."""
    largest = points[-1].batch
    everything_ran = sizes is not None and largest == sizes[-1]
    return max_batch if max_batch is not None and everything_ran else largest


def _throttle_of(stepper: Stepper) -> Throttle | None:
    return getattr(stepper, "throttle", None)


def _report_overrun(stepper: Stepper, notify: Notify) -> None:
    throttle = _throttle_of(stepper)
    if throttle is not None and throttle.overruns:
        notify(
            f"{throttle.overruns} of {throttle.spans} throttled steps took longer than their target, "
            f"{throttle.overrun_seconds:.3f} s in all: this machine is too busy for a throttle of "
            f"{throttle.factor:g}"
        )


def _check_arguments(
    max_batch: int | None,
    batches: Sequence[int] | None,
    repeats: int,
    throttle: float | None,
    threads: int | None,
    max_step_seconds: float,
) -> list[int] | None:
    """The sizes to run, ascending; None if neither max_batch nor batches are given. Raises InputError.

    The parameters are those of profile_model.
    """
    for field, value in (("max_batch", max_batch), ("repeats", repeats), ("threads", threads)):
        if value is not None and value < 1:
            raise InputError("profile", field, str(value), "a whole number of at least 1")
    if throttle is not None and not (math.isfinite(throttle) and throttle >= 1):
        raise InputError("profile", "throttle", str(throttle), "a finite factor of at least 1")
    if not max_step_seconds > 0:
        raise InputError("profile", "max_step_seconds", str(max_step_seconds), "a positive number")
    if batches is None:
        if max_batch is not None and not 2 <= max_batch <= MAX_BATCH:
            raise InputError("profile", "max_batch", str(max_batch), f"2 to {MAX_BATCH} (a fit takes two)")
        return ladder(max_batch) if max_batch is not None else None
    sizes = sorted(set(batches))
    low, high = (sizes[0], sizes[-1]) if sizes else (0, 0)
    if low < 1 or high > MAX_BATCH or len(sizes) < 2:
        expected = f"two or more different batches from 1 to {MAX_BATCH}"
        raise InputError("profile", "batches", ",".join(map(str, batches)) or "none", expected)
    if max_batch is not None and high > max_batch:
        raise InputError("profile", "batches", str(high), f"at most max_batch = {max_batch}")
    return sizes


@contextmanager
def _threads(threads: int | None) -> Iterator[None]:
    """Sets torch's thread count for the `with` block; None leaves it."""
    import torch

    before = torch.get_num_threads()
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        yield
    finally:
        torch.set_num_threads(before)
