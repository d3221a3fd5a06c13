"""Measure what pulls that look ahead save and cost: python benchmarks/lookahead.py [samples] [pulls] [stable]
[--save].

samples: how many it takes to a training loss of 0.02 on scikit-learn's digits (64-96-96-10, ReLU), and with
unlike workers to 97 % of digits held out, in virtual time, each way with the best step size of a ladder of
square roots of two, by seeds that the results do not use.
pulls: how long a pull, a push and an exchange, which is what a worker does, take with look-ahead and without,
in turns, so that all have the same machine.
stable: the largest rate at which a quadratic does not diverge, without noise, from the formulas alone.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from learning_rate import Perceptron
from numpy.typing import NDArray
from record import machine, save_table, table
from sklearn.datasets import load_digits

from pyps import Hyper, Store
from pyps.formats import Jitter
from pyps.simulate import Fault, Objective, Scenario, SimWorker, simulate
from pyps.store.staging import StagingBuffer

PAGE = "learning-rate.md"
SIZES = (64, 96, 96, 10)
MOST_BATCHES = 300
TUNING, SEEDS = (101, 102, 103), tuple(range(1, 9))
ROOT = math.sqrt(2.0)


def workers(seconds: Sequence[float], batches: Sequence[int]) -> Scenario:
    """Steps of these seconds, which jitter by 3 %."""
    jitter = Jitter(sigma=0.03)
    made = zip(seconds, batches, strict=True)
    return Scenario(
        tuple(SimWorker(f"w{k}", b, lambda _, s=s: s, jitter) for k, (s, b) in enumerate(made))  # type: ignore[misc]
    )


def killed(scenario: Scenario) -> Scenario:
    """All workers but the first die, one after another, and come back: 20 % of their time away."""
    faults = tuple(
        Fault(at=10.0 + 12.0 * turn + 4.0 * k, rank=k, kind="kill", seconds=2.0)
        for turn in range(8)
        for k in range(1, len(scenario.workers))
    )
    return Scenario(scenario.workers, faults=faults)


UNLIKE = (1.0, 1.4, 2.9, 4.9)
CLUSTERS = {
    "16 equal workers": workers((1.0,) * 16, (8,) * 16),
    "4 unlike workers, equal batches": workers(UNLIKE, (32,) * 4),
    "4 unlike workers, equal batches, killed": killed(workers(UNLIKE, (32,) * 4)),
    "4 unlike workers, planned batches": workers((1.8,) * 4, (58, 41, 20, 9)),
}


@dataclass(frozen=True)
class Way:
    policy: str
    momentum: float = 0.9

    def __str__(self) -> str:
        return f"`{self.policy}`, momentum {self.momentum:g}"


BSP, AHEAD, PLAIN = Way("bsp"), Way("asp"), Way("asp:lookahead=false")
LESS = tuple(Way("asp:lookahead=false", momentum) for momentum in (0.8, 0.5, 0.0))


class HeldOut(Perceptron):
    """Trains on four of five digits; the loss is the share of wrong answers on the others."""

    def __init__(self, x: NDArray[np.float32], y: NDArray[np.generic], seed: int) -> None:
        fifth = np.arange(len(x)) % 5 == 4
        super().__init__(SIZES, x[~fifth], y[~fifth], seed)
        self.held = x[fifth], y[fifth]

    def loss(self, w: NDArray[np.float64]) -> float:
        x, y = self.held
        return float(np.mean(self.outputs(w, x).argmax(axis=1) != y))


def all_digits(x: NDArray[np.float32], y: NDArray[np.generic], seed: int) -> Perceptron:
    return Perceptron(SIZES, x, y, seed)


@dataclass(frozen=True)
class Goal:
    name: str
    loss: float
    objective: Callable[[NDArray[np.float32], NDArray[np.generic], int], Objective]


LOSS = Goal("a training loss of 0.02", 0.02, all_digits)
ACCURACY = Goal("97 % of the digits held out", 0.03, HeldOut)


@cache
def trained(cluster: str, way: Way, lr: float, seed: int, goal: Goal) -> tuple[float, float]:
    """Samples and seconds to the goal; infinite: never."""
    x, y = load_digits(return_X_y=True)
    with np.errstate(all="ignore"):
        result = simulate(
            CLUSTERS[cluster],
            way.policy,
            iterations=MOST_BATCHES,
            seed=seed,
            objective=goal.objective((x / 16).astype(np.float32), y, seed),
            lr=Hyper(lr=lr, momentum=way.momentum),
            optimizer="momentum",
            target_loss=goal.loss,
        )
    reached = [(samples, seconds) for seconds, samples, loss in result.curve if loss <= goal.loss]
    return reached[0] if reached else (math.inf, math.inf)


def best_rate(cluster: str, way: Way, goal: Goal) -> float:
    """Climbs the ladder from 0.2 for as long as the median of samples falls."""

    def cost(rung: int) -> float:
        lr = 0.2 * (1 - way.momentum) / 0.1 * ROOT**rung
        return statistics.median(trained(cluster, way, lr, seed, goal)[0] for seed in TUNING)

    here = 0
    while cost(here) == math.inf and here > -8:
        here -= 1
    for step in (1, -1):
        while cost(here + step) < cost(here):
            here += step
    return 0.2 * (1 - way.momentum) / 0.1 * ROOT**here


def samples(cluster: str, ways: Sequence[Way], goal: Goal = LOSS) -> dict[Way, tuple[float, float]]:
    """Prints a table; by way the medians of samples and seconds."""
    found, rows = {}, [["way", "step size", "samples", "from", "to", "seconds"]]
    for way in ways:
        lr = best_rate(cluster, way, goal)
        runs = [trained(cluster, way, lr, seed, goal) for seed in SEEDS]
        counts, seconds = ([run[i] for run in runs] for i in (0, 1))
        found[way] = statistics.median(counts), statistics.median(seconds)
        numbers = (found[way][0], min(counts), max(counts), found[way][1])
        cells = (f"{n:,.0f}" if math.isfinite(n) else "never" for n in numbers)
        rows.append([str(way), f"{lr:.2g}" if math.isfinite(found[way][0]) else "-", *cells])
    say(f"**{cluster}**: samples to {goal.name}, {len(SEEDS)} seeds.\n\n{table(rows)}\n")
    return found


SAID: list[str] = []


def say(text: str) -> None:
    SAID.append(text)
    print(text, flush=True)


def judge(figure: str, value: float, least: float) -> None:
    say(f"- {'met' if value >= least else '**missed**'}: {figure}: {value:.2f} (threshold: >= {least:g})")


def all_samples() -> None:
    sixteen, equal, kills, planned = CLUSTERS
    found = samples(sixteen, (BSP, AHEAD, PLAIN, *LESS))
    one, two, three = (found[way][0] for way in (BSP, AHEAD, PLAIN))
    few, even = samples(equal, (BSP, AHEAD)), samples(planned, (BSP, AHEAD))
    restarted = samples(kills, (AHEAD,))
    exact = {cluster: samples(cluster, (BSP, AHEAD), ACCURACY) for cluster in (equal, planned)}
    judge("without look-ahead over with it, momentum 0.9", three / two, 2.0)
    judge("without it, momentum tuned, over with it", min(three, *(found[w][0] for w in LESS)) / two, 1.6)
    judge("`bsp` over `asp` with look-ahead", one / two, round(1 / 1.1, 2))
    judge("samples without kills over those with", few[AHEAD][0] / restarted[AHEAD][0], round(1 / 1.1, 2))
    judge("seconds of `bsp` over `asp`, equal batches", few[BSP][1] / few[AHEAD][1], 1.8)
    judge("seconds of `bsp` over `asp`, planned batches", even[BSP][1] / even[AHEAD][1], 1.0)
    for (cluster, found), least in zip(exact.items(), (1.8, 1.0), strict=True):
        judge(f"seconds of `bsp` over `asp` to 97 %, {cluster}", found[BSP][1] / found[AHEAD][1], least)


def store_of(optimizer: str, parameters: int, *, ahead: bool) -> tuple[Store, NDArray[np.float32]]:
    """A store with momentum in it, and where to pull to."""
    policy = "asp" if ahead else "asp:lookahead=false"
    name, initial = f"ahead-{os.getpid()}-{optimizer}-{ahead:d}", {"w": np.zeros(parameters, np.float32)}
    sizes = {"batches": [1, 1], "max_participants": 2}
    store = Store.create(name, initial, optimizer=optimizer, policy=policy, **sizes)
    store.join(0)
    with Store.open(name) as other:
        other.join(1)
        for one in (other, store):
            exchange(one, np.empty(one.layout.flat_elements, np.float32))
    return store, np.zeros(store.layout.flat_elements, np.float32)


def staged(store: Store) -> StagingBuffer:
    store.start()
    staging = store.stage()
    staging.flat.fill(1e-3)
    return staging


HYPER = Hyper(lr=1e-3, momentum=0.9)
Flat = NDArray[np.float32]


def exchange(store: Store, flat: Flat) -> float:
    staging, begin = staged(store), time.perf_counter()
    store.exchange(staging, 1, HYPER, flat)
    return time.perf_counter() - begin


def push(store: Store, flat: Flat) -> float:
    staging, begin = staged(store), time.perf_counter()
    store.push(staging, 1, HYPER)
    return time.perf_counter() - begin


def pull(store: Store, flat: Flat) -> float:
    begin = time.perf_counter()
    store.pull(flat)
    return time.perf_counter() - begin


def push_and_pull(store: Store, flat: Flat) -> float:
    return push(store, flat) + pull(store, flat)


CALLS = {"pull": pull, "push": push, "push, then pull": push_and_pull, "exchange": exchange}
MOST = 1.7


def all_pulls(parameters: int, rounds: int) -> None:
    """All calls in turns, with look-ahead and without; a ratio is of a pair in the same turn."""
    rows = [["optimizer", "call", "plain, ms", "look-ahead, ms", "ratio", "middle half"]]
    alone, worker = 0.0, 0.0
    for optimizer in ("momentum", "adamw"):
        pair = [store_of(optimizer, parameters, ahead=ahead) for ahead in (False, True)]
        times = np.array([timed(pair, turn) for turn in range(rounds + 1)])[1:]  # turn, call, plain and ahead
        for name, found in zip(CALLS, times.transpose(1, 0, 2), strict=True):
            low, middle, high = np.quantile(found[:, 1] / found[:, 0], (0.25, 0.5, 0.75))
            alone = max(alone, middle if name == "pull" else 0.0)
            plain, ahead = 1e3 * np.median(found, axis=0)
            rows.append(
                [optimizer, name, f"{plain:.1f}", f"{ahead:.1f}", f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]
            )
        plain_pull, plain_push, _, whole = np.median(times, axis=0)
        worker = max(worker, (whole[1] - plain_push[0]) / plain_pull[0])
        for store, _ in pair:
            store.close()
    say(f"{parameters:,} parameters, {rounds} turns: medians.\n\n{table(rows)}\n")
    figures = {
        "a worker's pull, an exchange with look-ahead less a push, over a plain pull": worker,
        "a pull with look-ahead by itself over a plain pull": alone,
    }
    for figure, value in figures.items():
        verdict = "met" if value <= MOST else "**missed**"
        say(f"- {verdict}: {figure}: {value:.2f} (threshold: <= {MOST})")


def timed(pair: Sequence[tuple[Store, Flat]], turn: int) -> list[list[float]]:
    """Return for each call the seconds without look-ahead and with it, in an order that changes with the
    turn.
    """
    found = []
    for call in CALLS.values():
        seconds = [0.0, 0.0]
        for k in (turn % 2, 1 - turn % 2):
            seconds[k] = call(*pair[k])
        found.append(seconds)
    return found


BETA = 0.9
LOOKS = {  # parts of d and of g with which a pull looks ahead
    "as they are": (0.0, 0.0),
    "m, d x 0.5": (0.5, 0.0),
    "m, d": (1.0, 0.0),
    "m, d x 1.5": (1.5, 0.0),
    "m, d and 0.5 g": (1.0, 0.5),
    "m, d and g": (1.0, 1.0),
    "m, d and 1.25 g": (1.0, 1.25),
}


def grows(workers: int, rate: float, of_d: float, of_g: float) -> bool:
    """Return whether a quadratic's parameter grows when equal workers push in turn; rate: lr lambda.

    The state, on which each push acts as a matrix: the parameter, its momentum, and what each worker pulled.
    """

    def along(f: float) -> tuple[float, float]:
        a = BETA * (1 - BETA**f) / (1 - BETA)
        return a, (f - a) / (1 - BETA)

    (a, c), (a_ahead, _), (_, c_ahead) = map(along, (1 / workers, of_d * (1 - 1 / workers), 1 - 1 / workers))
    decay, turns = BETA ** (1 / workers), np.eye(2 + workers)
    for k in range(2, 2 + workers):
        one = np.eye(2 + workers)
        gradient = one[k].copy()
        one[0] -= rate * (a * one[1] + c * gradient)
        one[1] = decay * one[1] + (1 - decay) / (1 - BETA) * gradient
        one[k] = one[0] - rate * (a_ahead * one[1] + of_g * c_ahead * gradient)
        turns = one @ turns
    return bool(abs(np.linalg.eigvals(turns)).max() > 1 + 1e-9)


def largest_stable(workers: int, of_d: float, of_g: float) -> float:
    """The largest rate below the first at which it grows."""
    high = next(hundredth for k in range(1, 1000) if grows(workers, hundredth := k / 100, of_d, of_g))
    low = high - 0.01
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (low, middle) if grows(workers, middle, of_d, of_g) else (middle, high)
    return low


def all_stable() -> None:
    rows = [
        [str(count), *(f"{largest_stable(count, *parts):.2f}" for parts in LOOKS.values())]
        for count in (3, 8, 16)
    ]
    say(table([["workers", *LOOKS], *rows]))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["samples", "pulls"], metavar="samples | pulls | stable")
    parser.add_argument("--parameters", type=int, default=25_000_000)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--save", action="store_true", help="keep the table in bench-out/")
    options = parser.parse_args(arguments)
    for part in options.parts:
        SAID.clear()
        if part == "stable":
            all_stable()
        else:
            say(f"{machine()}.\n")
            all_samples() if part == "samples" else all_pulls(options.parameters, options.rounds)
        if options.save:
            save_table(f"ahead-{part}", "\n".join(SAID), PAGE)


if __name__ == "__main__":
    main()
