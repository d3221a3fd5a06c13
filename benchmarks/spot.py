"""Plans for machines that may be taken away, against runs: at random times, and by traces of real ones.

python benchmarks/spot.py [--runs 300]

confidence   deadlines that a plan keeps with probability 0.95: how many of so many runs kept them, whose
             machines are away at exponential times; the worst cases again, as by luck alone the least of
             many is lower
traces       a job on one machine of each trace in spot_traces.csv, again and again from its beginning:
             hours and price over those planned
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from record import table

from pyps.formats import Cluster, Device, Fit, ModelInfo, Point, Profile
from pyps.formats.cluster import Spot
from pyps.solver.jobs.spot import HOUR, Delays, lost_to_preemptions
from pyps.solver.plan import make_plan

TRACES = Path(__file__).resolve().parent / "spot_traces.csv"
CONFIDENCE, KEPT, OFF = 0.95, 0.93, 0.10
CASES = 20
WORST, AGAIN = 4, 1000  # cases that are run again, and their runs
PASSES = 6  # of a trace, that a job takes


def run_at_random(luck: np.random.Generator, work: float, rate: float, gone: float, spot: Spot) -> float:
    """The seconds of one run with exponential times of presence and, of `gone` seconds, of absence."""
    every = float(lost_to_preemptions(rate * HOUR, spot)[1])
    left, now, until = work, 0.0, float(luck.exponential(1 / rate))
    while True:
        step = min(every, left)
        if now + step + spot.checkpoint_seconds <= until:
            now, left = now + step + spot.checkpoint_seconds, left - step
            if left <= 0:
                return now
            continue
        now = until
        while True:  # until it is back, and has restarted undisturbed
            now += float(luck.exponential(gone)) if gone else 0.0
            until = now + float(luck.exponential(1 / rate))
            if until >= now + spot.restart_seconds:
                now += spot.restart_seconds
                break
            now = until


@dataclass(frozen=True)
class Case:
    """A job's seconds of work, its preemptions a second, the seconds that a machine is away, and the time by
    which it ends with CONFIDENCE.
    """

    work: float
    rate: float
    gone: float
    spot: Spot
    by: float

    @staticmethod
    def drawn(luck: np.random.Generator) -> Case:
        spot = Spot(
            checkpoint_seconds=float(luck.uniform(5, 90)), restart_seconds=float(luck.uniform(60, 900))
        )
        rate, work = float(10 ** luck.uniform(-2.5, 0.0)), float(10 ** luck.uniform(1, 2.8)) * HOUR
        gone = float(luck.choice([0.0, 600.0, 4000.0]))
        away = np.log1p(rate / HOUR * gone)
        by = float(Delays.of(work, rate, away, spot).by(CONFIDENCE))
        return Case(work, rate / HOUR, gone, spot, by)

    def kept(self, runs: int, seed: int) -> float:
        """The share of runs within the planned time."""
        luck = np.random.default_rng(seed)
        took = [run_at_random(luck, self.work, self.rate, self.gone, self.spot) for _ in range(runs)]
        return float(np.mean(np.array(took) <= self.by))


def least_by_luck(runs: int) -> tuple[float, float]:
    """The least share of all cases where each keeps its time with CONFIDENCE: in the median, and at 2.5 %."""
    least = np.random.default_rng(0).binomial(runs, CONFIDENCE, (10_000, CASES)).min(axis=1) / runs
    middle, low = np.quantile(least, [0.5, 0.025])
    return float(middle), float(low)


def device() -> Profile:
    fit = Fit(
        kind="affine", fixed_seconds=0.01, per_sample_seconds=0.001, trusted_min_batch=1, trusted_max_batch=64
    )
    model = ModelInfo(name="m")
    return Profile(device=Device(name="d"), model=model, points=[Point(batch=1, seconds=0.011)], fit=fit)


def by_trace(runs: list[tuple[float, bool]], work: float, every: float, spot: Spot) -> tuple[float, float]:
    """The seconds of a run by a trace, and of the machine's presence in it."""
    left, now, there = work, 0.0, 0.0
    while True:
        for seconds, here in runs:
            done = spot.restart_seconds
            while here and done + every + spot.checkpoint_seconds <= seconds:
                done += every + spot.checkpoint_seconds
                left -= every
                if left <= 0:
                    return now + done, there + done
            now += seconds
            there += seconds if here else 0.0


def off_trace(name: str, rows: list[dict[str, str]]) -> tuple[float, float]:
    """Hours and price of a run by a trace, over those of its plan."""
    spot = {"checkpoint_seconds": 30.0, "restart_seconds": 300.0}
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        file.write("seconds,available\n")
        file.writelines(f"{row['seconds']},{row['available']}\n" for row in rows)
        file.flush()
        worker = {"name": name, "profile": "p", "trace": file.name, "price_per_hour": 1.0}
        length = sum(float(row["seconds"]) for row in rows)
        share = sum(float(row["seconds"]) for row in rows if row["available"] == "1") / length
        target = PASSES * length * share / 0.074 * 64 * 0.8
        cluster = {"job": {"global_batch": 64, "target": target}, "worker": [worker], "spot": spot}
        plan = make_plan(msgspec.convert(cluster, Cluster), [device()])
    assert plan.target is not None
    every = plan.target.checkpoint_every_seconds
    assert every is not None
    runs = [(float(row["seconds"]), row["available"] == "1") for row in rows]
    work = plan.iteration_seconds * target / 64
    seconds, there = by_trace(runs, work, every, msgspec.convert(spot, Spot))
    return seconds / plan.target.seconds, there / HOUR / (plan.target.price or 1.0)


def off_traces() -> dict[str, tuple[float, float]]:
    found: dict[str, list[dict[str, str]]] = {}
    with open(TRACES, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            found.setdefault(row["trace"], []).append(row)
    return {name: off_trace(name, rows) for name, rows in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=300)
    options = parser.parse_args()
    luck = np.random.default_rng(0)
    cases = [Case.drawn(luck) for _ in range(CASES)]
    shares = [case.kept(options.runs, seed) for seed, case in enumerate(cases)]
    worst = np.argsort(shares, kind="stable")[:WORST]
    again = [cases[k].kept(AGAIN, CASES + int(k)) for k in worst]
    off = off_traces()
    hours, prices = (np.array([one[k] for one in off.values()]) for k in (0, 1))
    rows = [["figure", "least", "mean", "most"]]
    for name, one in (("kept at 0.95", np.array(shares)), ("hours/plan", hours), ("price/plan", prices)):
        rows.append([name, f"{one.min():.3f}", f"{one.mean():.3f}", f"{one.max():.3f}"])
    print(f"{len(off)} traces, {CASES} cases of {options.runs} runs\n\n{table(rows)}")
    middle, low = least_by_luck(options.runs)
    print(f"\nThe least of cases that keep {CONFIDENCE}: {middle:.3f} in the median, {low:.3f} at 2.5 %.")
    found = zip(worst, again, strict=True)
    text = ", ".join(f"case {k} {one:.3f} (before {shares[k]:.3f})" for k, one in found)
    print(f"The worst again, {AGAIN} other runs each: {text}.")
    bad = min(again) < KEPT or max(np.abs(hours - 1).max(), np.abs(prices - 1).max()) > OFF
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
