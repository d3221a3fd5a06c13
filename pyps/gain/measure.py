"""Measure what a planned split gains: the script as it is, each device alone, then the split that fits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import fmean, median

from pyps.errors import InputError
from pyps.formats import MAX_BATCH
from pyps.gain.notes import BLOCK, Note
from pyps.gain.ranks import LocalDevice, Script, alone, together
from pyps.profiler.fit import fit_points, memory_model
from pyps.solver.costs import cost_of
from pyps.solver.online.decide import Bounds, best_split, round_seconds

WARM = 3  # batches of a run that do not count
AGREEMENT = 1.35  # factor between what was predicted and measured: beyond it something else was
PARTS = 5  # of a run, whose means tell how much its times vary
MEMORY_SHARE = 0.9  # of a device's memory that a plan uses


@dataclass(frozen=True)
class TimedSplit:
    """A run of all devices: the batch of each; the seconds of a batch: median, least and most of parts."""

    batches: tuple[int, ...]
    seconds: float
    low: float
    high: float

    @property
    def samples_per_second(self) -> float:
        """Return the samples of all devices."""
        return sum(self.batches) / self.seconds


@dataclass(frozen=True)
class Gain:
    """Hold what was measured. points: of each device alone, the seconds of a batch by its samples.

    planned: None if no other split is faster by those points. predicted: how much faster it is by them.
    """

    points: Sequence[Mapping[int, float]]
    equal: TimedSplit
    planned: TimedSplit | None
    predicted: float

    @property
    def faster(self) -> float:
        """Return how many times as many samples a second planned batches give; 1.0 if equal ones are."""
        return 1.0 if self.planned is None else self.equal.seconds / self.planned.seconds

    @property
    def certain(self) -> bool:
        """Return whether the two ways' times do not overlap, and agree with those of each device alone."""
        agrees = self.predicted / AGREEMENT < self.faster < self.predicted * AGREEMENT
        return self.planned is not None and self.planned.high < self.equal.low and agrees


def measure_gain(script: Script, devices: Sequence[LocalDevice], say: Callable[[str], None]) -> Gain:
    """Run the script three times for a while, and compare. say: is called with each run that begins.

    Raises InputError for fewer than two devices, a script that draws its batches otherwise than by a
    DataLoader at random or gives its ranks unlike ones, PypsError with the script's last lines if it fails.
    """
    if len(devices) < 2:
        found = f"{len(devices)} of them"
        raise InputError("--devices", "", found, "two or more, which share the batch")
    say(f"{script.path} on {len(devices)} devices, as it is")
    equal = _way(together(script, devices, (), WARM + PARTS))
    batch = equal.batches[0]
    if batch < 2 or set(equal.batches) != {batch}:
        expected = "as many samples for each rank, and two or more"
        raise InputError(str(script.path), "batches", " ".join(map(str, equal.batches)), expected)
    sizes = sorted({batch, max(1, batch // 2), max(1, batch // 4)}, reverse=True)
    say(f"each device alone, with batches of {', '.join(map(str, sizes))}")
    notes = alone(script, devices, sizes, WARM + BLOCK * len(sizes))
    points = [points_of(found) for found in notes]
    costs = [cost_of(fit_points(sorted(found.items()))) for found in points]
    most = [Bounds(most=max(batch, _most(found)), required=True) for found in notes]
    split = best_split(sum(equal.batches), costs, most)
    predicted = round_seconds(costs, equal.batches) / round_seconds(costs, split)
    if split == equal.batches:
        return Gain(points, equal, None, 1.0)
    say(f"all devices, with batches of {' '.join(map(str, split))}")
    return Gain(points, equal, _way(together(script, devices, split, WARM + PARTS)), predicted)


def points_of(notes: Sequence[Note]) -> dict[int, float]:
    """Return the seconds of a batch by its samples: the median of its blocks' means.

    A block's first batch does not count, for what was loaded ahead of it had another size.
    """
    blocks = defaultdict(list)
    for samples, block in groupby(notes[WARM:], key=lambda note: note.samples):
        if counted := [note.seconds for note in block][1:]:
            blocks[samples].append(fmean(counted))
    return {samples: median(means) for samples, means in blocks.items()}


def _way(notes: Sequence[Sequence[Note]]) -> TimedSplit:
    """Return a run's batches and times: ranks wait for each other, so the first one's times count."""
    seconds = [note.seconds for note in notes[0][WARM:]]
    ends = [len(seconds) * k // PARTS for k in range(PARTS + 1)]
    means = [fmean(seconds[first:last]) for first, last in pairwise(ends)]
    return TimedSplit(tuple(found[-1].samples for found in notes), median(means), min(means), max(means))


def _most(notes: Sequence[Note]) -> int:
    """Return the largest batch that a device's memory takes, by a line through the peaks that were seen."""
    peaks = {note.samples: note.peak_bytes for note in notes}
    budget = round(MEMORY_SHARE * notes[-1].budget_bytes)
    memory = memory_model(list(peaks.items()), budget) if budget and len(peaks) > 1 else None
    if memory is None:
        return MAX_BATCH
    return max(0, int((memory.budget_bytes - memory.fixed_bytes) // memory.bytes_per_sample))
