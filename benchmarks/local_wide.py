"""64 workers on wide-area links: python benchmarks/local_wide.py [--seeds 3] [--docs].

Planned local steps against equal ones, in virtual time: seconds of a round, and seconds to a loss that is
learned with real gradients, on scikit-learn's digits.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from learning_rate import Perceptron
from local_steps import LOCAL, ONCE, SPEEDS, spread, until
from record import table, write_section
from sklearn.datasets import load_digits

from pyps import Hyper
from pyps.formats import Jitter
from pyps.simulate import LocalOptimizer, Result, Scenario, SimWorker, simulate

WORKERS, BYTES, BANDWIDTH, LATENCY = 64, 1e8, 25e6, 0.04
STEPS = (1, 10, 50, 250)  # local ones on average
LEARNED = (10, 50)
ROUNDS = {10: 60, 50: 30}  # at most
LOSSES = (1.0, 0.5, 0.3, 0.2, 0.1)
FIRST_RATE = 0.016
TUNED_BY = 100  # the seed
NETWORK = (64, 32, 10)


@dataclass(frozen=True)
class Way:
    title: str
    planned: bool
    policy: str = "bsp"


WAYS = (
    Way("equal", False),
    Way("planned", True),
    Way("planned, asynchronous", True, "asp"),
)


def scenario(steps: int, planned: bool) -> Scenario:
    """So many local steps on average, on workers of speeds 1 to 4, each with a link of its own."""
    workers = []
    for k in range(WORKERS):
        speed = SPEEDS[k % len(SPEEDS)]
        count = max(1, len(SPEEDS) * steps * speed // sum(SPEEDS)) if planned else steps
        cost = ONCE / speed
        workers.append(
            SimWorker(
                f"w{k}",
                LOCAL * count,
                lambda n, cost=cost: cost * n,
                Jitter(sigma=0.1),
                bandwidth=BANDWIDTH,
                latency=LATENCY,
                micro_batch=LOCAL,
            )
        )
    return Scenario(tuple(workers), up_bytes=BYTES, down_bytes=BYTES, local=True)


def rounds() -> str:
    """Seconds of as many samples as a round has."""
    rows = [["local steps", "planned, seconds a round", "equal", "planned is faster by"]]
    for steps in STEPS:
        found = []
        for planned in (True, False):
            result = simulate(scenario(steps, planned), "bsp", iterations=20)
            found.append(result.seconds / result.samples * LOCAL * WORKERS * steps)
        rows.append([str(steps), f"{found[0]:.1f}", f"{found[1]:.1f}", f"{found[1] / found[0]:.2f}x"])
    return table(rows)


def learned(steps: int, way: Way, lr: float, seed: int, count: int = 0) -> Result:
    """A run to the last of LOSSES, or so many rounds."""
    x, y = load_digits(return_X_y=True)
    return simulate(
        scenario(steps, way.planned),
        way.policy,
        iterations=count or ROUNDS[steps],
        seed=seed,
        objective=Perceptron(NETWORK, (x / 16).astype(np.float32), y, seed),
        lr=1.0,
        local=LocalOptimizer("adamw", Hyper(lr=lr, weight_decay=0.01)),
        target_loss=LOSSES[-1],
    )


def seconds_to(result: Result) -> list[float]:
    """Seconds to each of LOSSES; infinite where it was not reached."""
    found = [until(list(result.curve), loss) for loss in LOSSES]
    return [at[0] if at else float("inf") for at in found]


def best_rate(cost: Callable[[float], float]) -> float:
    """The rate of which half and double both cost more, or as much."""
    rate, found = FIRST_RATE, dict[float, float]()
    while True:
        for other in (rate, rate / 2, rate * 2):
            if other not in found:
                found[other] = cost(other)
        best = min(found, key=lambda other: (found[other], other != rate))
        if best == rate:
            return rate
        rate = best


def learning(steps: int, seeds: Sequence[int]) -> list[list[str]]:
    """A table: seconds to each loss, every way at its own best rate."""
    rows = [["local steps", "", "lr", *(f"loss {loss:g}" for loss in LOSSES), "faster to the last"]]
    equal: list[float] = []
    for way in WAYS:
        lr = best_rate(lambda rate, way=way: seconds_to(learned(steps, way, rate, TUNED_BY))[-1])
        runs = [seconds_to(learned(steps, way, lr, seed)) for seed in seeds]
        equal = equal or [run[-1] for run in runs]
        cells = [f"{statistics.median(run[k] for run in runs):.0f} s" for k in range(len(LOSSES))]
        faster = [slow / run[-1] for slow, run in zip(equal, runs, strict=True)]
        rows.append([str(steps), way.title, f"{lr:g}", *cells, spread(faster, ".2f")])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--docs", action="store_true", help="write the tables to local-steps.md")
    options = parser.parse_args()
    sections = {"wide": rounds()}
    parts = [learning(steps, range(options.seeds)) for steps in LEARNED]
    sections["wide-learned"] = table([parts[0][0], *(row for part in parts for row in part[1:])])
    for name, text in sections.items():
        print(text, end="\n\n", flush=True)
        if options.docs:
            write_section(name, text, "local-steps.md")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
