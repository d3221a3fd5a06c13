"""A thousand unlike workers behind unlike links, where one dies every few seconds, in virtual time:

    python benchmarks/internet.py [--workers 1000] [--hours 6] [--seeds 3] [--ways 0,5] [--keep FILE] [--save]
    python benchmarks/internet.py --loss [--workers 100] [--ways ...] [--keep FILE] [--save]

Forty places with links of 10 Mbit/s to 1 Gbit/s and 5 to 200 ms, five kinds of devices of speeds 1 to 8.
Each worker dies once an hour and is away for ten minutes; a tenth leave for good, and as many others join.
`pyps-plan` plans each way to train; the C core decides, and the clock is virtual. With --loss fewer workers
of the same kinds learn, for the time to a loss. --keep adds what was found to a file: parts may run apart.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from record import machine, save_table, table, write_whole

from pyps.simulate import LocalOptimizer, Logistic, Result, Scenario, scenario_of, simulate
from pyps.store.policies import Policy, policy_named

PAGE = "internet.md"
PLACES = 40
MEGABITS, LATENCIES = (10.0, 1000.0), (0.005, 0.2)  # seconds
SAMPLE_SECONDS = (0.16, 0.24, 0.4, 0.64, 1.28)  # of each kind of device, for a sequence of 2,048 tokens
STEP_SECONDS = 0.1  # of every step, whatever its size
LOCAL = 8  # sequences of a local step
PARAMETERS = 25_000_000
SERVERS, SERVER_MEGABITS = 4, 1000.0
LIFE, AWAY, GONE, NOTICED = 3600.0, 600.0, 0.1, 10.0
MEGABIT = 1e6 / 8  # bytes
PATIENCE = 36_000.0  # the round timeout
LOSS, SAMPLES, RATES = 0.5, 20_000, (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # of what is learned


@dataclass(frozen=True)
class Way:
    """A way to train. steps: local ones on average; 0: each gradient is a step of all."""

    title: str
    policy: str
    codec: str = "int4"
    pull_codec: str = "int8"
    steps: int = 0
    even: bool = False
    depth: Any = 1
    servers: bool = (
        True  # that the workers share; False: all-reduce, whose bytes cross the workers' links only
    )

    @property
    def chosen(self) -> Policy:
        """The policy, which fences no worker that is late."""
        return policy_named(self.policy, PATIENCE)

    @property
    def run_table(self) -> str:
        """[run] of the cluster file."""
        lines = [f'policy = "{self.policy}"', f'codec = "{self.codec}"', f'pull_codec = "{self.pull_codec}"']
        lines += [f"local_steps = {self.steps}"] * bool(self.steps) + [f'depth = "{self.depth}"'] * (
            self.depth != 1
        )
        return "\n".join(["[run]", *lines, f"round_timeout = {PATIENCE}"])


FULL = Way("DDP, fp32", "bsp", "f32", "f32", even=True, servers=False)
WAYS = (
    FULL,
    replace(FULL, title="DDP, int8", codec="int8", pull_codec="int8"),
    Way("local steps, equal, in rounds", "bsp", steps=75, even=True),
    Way("local steps, planned, in rounds", "bsp", steps=75),
    Way("planned, rounds, pipeline", "hps", steps=40, depth="auto"),
    Way("planned, a quorum of a quarter", "softsync:n=4", steps=75),
    Way("planned, a quorum of a quarter, pipeline", "softsync:n=4", steps=40, depth="auto"),
    Way("planned, no waiting", "asp", steps=75),
    Way("planned, no waiting, pipeline", "asp", steps=40, depth="auto"),
)


def spaced(low: float, high: float, count: int, seed: int) -> list[float]:
    """So many numbers, evenly spaced by their logarithms, in random order."""
    values = np.exp(np.linspace(math.log(low), math.log(high), count))
    return [float(x) for x in np.random.default_rng(seed).permutation(values)]


def write_cluster(folder: Path, way: Way, workers: int, hours: float) -> Path:
    """The cluster file of a way, with its profiles.

    workers: that are there at first; a tenth of all others join.
    """
    for k, seconds in enumerate(SAMPLE_SECONDS):
        points = [{"batch": b, "seconds": STEP_SECONDS + seconds * b} for b in (1, 8, 64)]
        model = {"name": "gpt", "parameters": PARAMETERS}
        profile = {
            "schema": "pyps.profile/1",
            "device": {"name": f"kind{k}"},
            "model": model,
            "points": points,
        }
        (folder / f"kind{k}.json").write_text(json.dumps(profile))
    kinds = PLACES * len(SAMPLE_SECONDS)
    counts = np.bincount(np.arange(round(workers / (1 - GONE))) % kinds, minlength=kinds)
    links = zip(spaced(*MEGABITS, PLACES, 1), spaced(*LATENCIES, PLACES, 2), strict=True)
    lines = [f"[job]\nglobal_batch = {LOCAL * int(counts.sum())}", way.run_table]
    for place, (megabits, latency) in enumerate(links):
        for kind in range(len(SAMPLE_SECONDS)):
            if count := int(counts[place * len(SAMPLE_SECONDS) + kind]):
                named = f'name = "p{place}k{kind}"\ncount = {count}\nprofile = "kind{kind}.json"'
                link = f"bandwidth = {megabits * MEGABIT:.0f}\nlatency = {latency:.4f}"
                lines.append(f"[[worker]]\n{named}\n{link}")
    served = f"servers = {SERVERS}\nserver_bandwidth = {SERVER_MEGABITS * MEGABIT:.0f}" if way.servers else ""
    lines.append(f"[simulation]\n{served}\njitter = {{ sigma = 0.1 }}")
    churn = f"every = {LIFE}\naway = {AWAY}\ngone = {GONE}\nnoticed = {NOTICED}"
    lines.append(f"[simulation.churn]\nuntil = {3600 * hours}\n{churn}")
    path = folder / "cluster.toml"
    path.write_text("\n\n".join(lines) + "\n")
    return path


@dataclass(frozen=True)
class Planned:
    """A way's plan and how long it took."""

    scenario: Scenario
    seconds: float


def planned(way: Way, workers: int, hours: float) -> Planned:
    """Plan with the command, and read what is simulated."""
    with tempfile.TemporaryDirectory(prefix="internet-") as name:
        folder = Path(name)
        cluster, plan = write_cluster(folder, way, workers, hours), folder / "plan.json"
        command = [sys.executable, "-m", "pyps", "plan", str(cluster), "-o", str(plan)]
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - began
        return Planned(scenario_of(cluster, even=way.even, plan_path=plan), seconds)


def restarted(result: Result, workers: int) -> float:
    """The useful share of DDP in which a death undoes the step of all.

    Deaths come at random, `workers / LIFE` a second, so a step of T seconds takes (exp(T rate) - 1) / rate of
    them on average, with no time for the restart.
    """
    exponent = workers / LIFE * result.seconds / max(1, result.rounds)
    return result.useful_share * exponent / math.expm1(exponent)


def useful(way: Way, workers: int, hours: float, seeds: int) -> list[str]:
    """A row: what became of the workers' time."""
    plan = planned(way, workers, hours)
    began = time.perf_counter()
    results = [
        simulate(plan.scenario, way.chosen, iterations=10**9, seconds=3600 * hours, depth=way.depth, seed=k)
        for k in range(seeds)
    ]
    took = (time.perf_counter() - began) / seeds
    again = sum(result.repeated for result in results)
    assert not again, f"{again} samples counted twice"
    share = spread([result.useful_share for result in results])
    if not way.servers:
        undone = spread([restarted(result, workers) for result in results])
        share = f"{undone} ({share} if a death undid no others' work)"
    each = median(result.seconds * plan.scenario.global_batch / result.samples for result in results)
    moved = median(result.moved_bytes / result.seconds / MEGABIT for result in results)
    return [way.title, share, f"{each:.0f}", f"{moved:.0f}", f"{plan.seconds:.1f}", f"{took:.0f}"]


def spread(values: list[float]) -> str:
    """The median, and the range where it has one that shows."""
    low, middle, high = (f"{value:.3f}" for value in (min(values), median(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def learned(way: Way, workers: int, hours: float, seeds: int) -> list[str]:
    """A row: hours and samples to the loss at the best of RATES, in virtual time with real gradients.

    A death of a rank of DDP undoes no others' work here, which favours it.
    """
    plan = planned(way, workers, hours)
    found = []
    for rate in RATES:
        results = [
            simulate(
                plan.scenario,
                way.chosen,
                iterations=10**9,
                seconds=3600 * hours,
                depth=way.depth,
                seed=k,
                objective=Logistic(SAMPLES, 64, 10, 3.0),
                lr=1.0 if way.steps else rate,
                local=LocalOptimizer(lr=rate) if way.steps else None,
                target_loss=LOSS,
                measure_every=plan.scenario.global_batch,
            )
            for k in range(seeds)
        ]
        assert not any(result.repeated for result in results)
        reached = [result.seconds_to(LOSS) or math.inf for result in results]
        found.append((median(reached), median(result.samples for result in results), spread(reached), rate))
    seconds, samples, _, rate = min(found)
    never = f"not in {hours:g} h (loss {median(result.loss for result in results):.3f})"
    hours_text = f"{seconds / 3600:.2f}" if seconds < math.inf else never
    return [way.title, hours_text, f"{samples / 1e6:.2f}", f"{rate:g}"]


HEAD = ["", "useful", "seconds a round", "Mbit/s on all links", "plan, s", "simulation, s"]
LEARNED = ["", "hours to the loss", "million samples", "learning rate"]


def kept(path: Path | None) -> dict[str, list[str]]:
    """The rows in a file, by title; none where there is no file yet."""
    return dict(json.loads(path.read_text())) if path is not None and path.exists() else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, help="default: 1000, with --loss 100")
    parser.add_argument("--hours", type=float, default=6.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--loss", action="store_true", help="the time to a loss")
    parser.add_argument("--ways", default=",".join(map(str, range(len(WAYS)))), help="rows, from 0")
    parser.add_argument("--keep", type=Path, help="a JSON file of rows, which is added to")
    parser.add_argument("--save", action="store_true", help="keep the table in bench-out/")
    options = parser.parse_args()
    workers = options.workers or (100 if options.loss else 1000)
    rows = kept(options.keep)
    for way in (WAYS[int(k)] for k in options.ways.split(",") if k):
        row = (learned if options.loss else useful)(way, workers, options.hours, options.seeds)
        rows |= kept(options.keep) | {way.title: row}  # another process may have added its own
        print("  ".join(row), file=sys.stderr, flush=True)
        if options.keep:
            write_whole(options.keep, json.dumps(rows))
    in_order = [rows[way.title] for way in WAYS if way.title in rows]
    text = f"{table([LEARNED if options.loss else HEAD, *in_order])}\n\n{machine()}, {options.seeds} seeds"
    print(text)
    if options.save:
        save_table("internet-loss" if options.loss else "internet", text, PAGE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
