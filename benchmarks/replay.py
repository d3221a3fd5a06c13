"""Disturbed runs in virtual time: how near to the best split the Balancer keeps them.

    python benchmarks/replay.py [--seeds 24] [--first-seed 0] [--hiccups 0.01] [--drifts] [--docs]

Four unlike devices with profiles train 512 samples a round. After 40 quiet rounds one of them is disturbed,
and every 40 rounds the disturbance moves to another: for 320 rounds. It takes time once a step (a tenth to
four fifths of the device's time more) or for every sample (1.1 to 2 times as long); the noise of a step is
1 or 3 %, and one step in a hundred takes three times as long. The oracle knows every cost exactly and
changes the split at once.

The Balancer is the product's own. Driven as a store's run drives it, it looks at every round. Driven as the
ranks of DDP drive it, by the product's Cadence, it hears of each rank every 5 rounds, and a change holds from
the third round after a report; a rank that is sure of a change lets all report a round later, on GPUs two,
and what is decided then holds at once. It was tuned with other seeds (--first-seed 1000) than those that the
page shows.

With --drifts the devices drift, stall, switch or only scatter instead (drifts.py), for 400 rounds, and the
Balancer is compared with doing nothing, too, and with the best that a causal rule can reach: it knows each
cost exactly once a round is over, and its split holds from the next round on, of DDP from the one after that.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean

import numpy as np
from drifts import DRIFTS, changes
from record import machine, table, write_section

from pyps.solver import Cost, Line
from pyps.solver.online.balancer import Balancer, Rules
from pyps.solver.online.decide import Cadence, Split, best_split, round_seconds
from pyps.solver.online.device import BalancedDevice, DeviceReading
from pyps.solver.online.members import Ranks
from pyps.solver.online.refit import stretched
from pyps.torch.decisions import Moves

SPEEDS = (1.0, 1.4, 2.0, 2.9)
GLOBAL_BATCH, ROTATES, ROUNDS = 512, 40, 360
HICCUP = 3.0  # times a step's seconds
FREE = [1] * 4, [GLOBAL_BATCH] * 4  # least and most samples
OVER_ORACLE, SLOPES, IMBALANCED, REPLANS = 1.03, (0.5, 2.0), 0.10, 2  # what is promised
WAITS = (1, 2, 3, 4)  # rounds: the store's, DDP's, DDP's on GPUs; one more where no device became quicker
IMBALANCE = 0.10  # the longest step over the mean, less 1


STORE, DDP = Rules(), Moves()
DRIVERS = ("store", "ddp", "ddp on GPUs")
LAGS = {"store": 1, "ddp": 2, "ddp on GPUs": 3}  # rounds from a change to the split for it, at least
DRIFTED = 1.05  # of the oracle's time: what is promised of drifts
ASKS = {"ddp": 1, "ddp on GPUs": 2}  # rounds from a rank's being sure of a change to all ranks' knowing it
PROFILES: list[Cost] = [Line(0.010 * s, 0.0008 * s) for s in SPEEDS]


def disturbed(seed: int, kind: str) -> Callable[[int], list[Cost]]:
    """The true costs by round."""
    luck = random.Random(seed)
    ranks, last, usual = [], -1, best_split(GLOBAL_BATCH, PROFILES, *FREE)
    for _ in range(ROUNDS // ROTATES):
        last = luck.choice([rank for rank in range(4) if rank != last])
        ranks.append((last, luck.uniform(0.1, 0.8), luck.uniform(1.1, 2.0)))

    def at(step: int) -> list[Cost]:
        costs = list(PROFILES)
        if step >= ROTATES:
            rank, share, factor = ranks[step // ROTATES]
            more = share * PROFILES[rank].seconds(usual[rank])
            costs[rank] = stretched(costs[rank], *((more, 1.0) if kind == "additive" else (0.0, factor)))
        return costs

    return at


@dataclass
class Run:
    """What came of one run: by round its time over the oracle's, its imbalance; slopes believed."""

    over: list[float] = field(default_factory=list)
    imbalance: list[float] = field(default_factory=list)
    slopes: list[float] = field(default_factory=list)
    changes: list[int] = field(default_factory=list)

    def note(self, split: Split, costs: Sequence[Cost]) -> None:
        times = [cost.seconds(b) for cost, b in zip(costs, split, strict=True)]
        self.over.append(max(times) / fastest(tuple(costs)))
        self.imbalance.append(max(times) / mean(times) - 1)

    @property
    def replans(self) -> list[int]:
        """By change of the devices, how many re-plans it brought."""
        counts = [0] * (ROUNDS // ROTATES)
        for step in self.changes:
            counts[step // ROTATES] += 1
        return counts[1:]


@functools.cache
def fastest(costs: tuple[Cost, ...]) -> float:
    """The seconds of the best round."""
    return round_seconds(costs, best_split(GLOBAL_BATCH, costs, *FREE))


def slope(cost: Cost) -> float:
    """The seconds of one more sample."""
    return cost.seconds(200) - cost.seconds(199)


class Driven:
    """A Balancer at work. split: of the next round."""

    def __init__(self, rules: Rules, split: Split) -> None:
        self.split = split
        self.devices = [BalancedDevice(profile) for profile in PROFILES]
        self.balancer = Balancer(self.devices, split, rules)
        self.changes: list[int] = []

    def trained(self, step: int, seconds: Sequence[float]) -> None:
        """A round is over."""
        for device, batch, own in zip(self.devices, self.split, seconds, strict=True):
            device.hear(batch, own)


class OfStore(Driven):
    """As a launcher drives it that looks once a round."""

    def trained(self, step: int, seconds: Sequence[float]) -> None:
        super().trained(step, seconds)
        change = self.balancer.look(Ranks({rank: rank for rank in range(4)}, self.split), step, step)
        if change is not None:
            self.balancer.adopt(change)
            self.split, self.changes = change.after, [*self.changes, step]


class OfDDP(Driven):
    """As ranks drive it that train in lockstep, without loaders that draw ahead."""

    def __init__(self, rules: Rules, split: Split, ask: int) -> None:
        super().__init__(rules, split)
        self._cadence, self._ask = Cadence(rules.window), ask
        self._asked: set[int] = set()  # rounds in which all know that one asks
        self._readings: list[DeviceReading] = []
        self._found: tuple[int, Split] | None = None  # decided: from which round on
        self._coming: tuple[int, Split] | None = None  # read
        self._step = self._reported = 0

    def trained(self, step: int, seconds: Sequence[float]) -> None:
        super().trained(step, seconds)
        self._step = step
        if any(device.tells(self.balancer.rules.window) for device in self.devices):
            self._asked.add(step + self._ask)
        if self._cadence.step(step in self._asked, self):
            self._asked.discard(step + self._ask)
        if self._coming is not None and self._coming[0] <= step + 1:
            self.split, self._coming = self._coming[1], None

    def report(self, number: int, asked: bool) -> None:
        """As in Cadence."""
        next_split = self._coming[1] if self._coming is not None else self.split
        batches = zip(self.devices, self.split, next_split, strict=True)
        window, self._reported = self.balancer.rules.window, self._step
        self._readings = [device.read(window, asked, now, then) for device, now, then in batches]

    def decide(self, number: int, lead: int) -> None:
        """As in Cadence: it holds once all ranks have drawn `lead` rounds since their report."""
        change, _ = self.balancer.decide_read(self._readings, self._step)
        self._found = None
        if change is not None:
            self._found = self._reported + 1 + lead, change.after
            self.balancer.adopt(change, [reading.estimate.level for reading in self._readings])
            self.changes.append(self._step)

    def read(self, number: int) -> bool:
        """As in Cadence."""
        found, self._found = self._found, None
        self._coming = found or self._coming
        return found is not None


def driven(driver: str, split: Split) -> Driven:
    """A Balancer with its driver."""
    return OfStore(STORE, split) if driver == "store" else OfDDP(DDP, split, ASKS[driver])


def replay(driver: str, kind: str, noise: float, seed: int, hiccups: float) -> Run:
    """One run with its rebalancer. hiccups: the share of steps that take longer for no reason."""
    luck, at, run = random.Random(1000 + seed), disturbed(seed, kind), Run()
    one = driven(driver, best_split(GLOBAL_BATCH, PROFILES, *FREE))
    for step in range(ROUNDS):
        costs = at(step)
        run.note(one.split, costs)
        seconds = []
        for cost, batch in zip(costs, one.split, strict=True):
            hiccup = HICCUP if luck.random() < hiccups else 1.0
            seconds.append(cost.seconds(batch) * hiccup * luck.lognormvariate(0, noise))
        one.trained(step, seconds)
        believed = [device.online.cost for device in one.devices]
        run.slopes += [slope(found) / slope(true) for found, true in zip(believed, costs, strict=True)]
    run.changes = one.changes
    return run


def waiting_alone(kind: str, rounds: int, seeds: Sequence[int]) -> float:
    """The time over the oracle of runs that keep a split for so many rounds after each change of the
    devices, and are as good as the oracle from then on.
    """
    over = []
    for seed in seeds:
        at = disturbed(seed, kind)
        for step in range(ROTATES, ROUNDS):
            costs, before = at(step), at(step // ROTATES * ROTATES - 1)
            kept = step % ROTATES < rounds
            split = best_split(GLOBAL_BATCH, before, *FREE) if kept else None
            over.append(round_seconds(costs, split) / fastest(tuple(costs)) if split else 1.0)
    return mean(over)


@functools.cache
def best_at(factors: tuple[float, ...]) -> Split:
    """The best split of devices that take so many times as long."""
    costs = [stretched(cost, 0.0, factor) for cost, factor in zip(PROFILES, factors, strict=True)]
    return best_split(GLOBAL_BATCH, costs, *FREE)


def drift(driver: str, name: str, seed: int) -> list[float]:
    """Over the oracle: the Balancer, doing nothing, the best causal rule; then changes, and real ones."""
    luck, kind = random.Random(1000 + seed), DRIFTS[name]
    factors = [tuple(each) for each in kind.factors(random.Random(seed))]
    first = best_split(GLOBAL_BATCH, PROFILES, *FREE)
    one, lag, over = driven(driver, first), LAGS[driver], []
    for step, now in enumerate(factors):
        splits = best_at(now), one.split, first, best_at(factors[step - lag]) if step >= lag else first
        best, *took = [
            max(cost.seconds(b) * factor for cost, factor, b in zip(PROFILES, now, split, strict=True))
            for split in splits
        ]
        over.append([seconds / best for seconds in took])
        batches = zip(PROFILES, now, one.split, strict=True)
        one.trained(step, [cost.seconds(b) * factor * kind.scattered(luck) for cost, factor, b in batches])
    return [*np.mean(over, axis=0).tolist(), len(one.changes), changes(factors)]


def drifting(drivers: Sequence[str], seeds: Sequence[int]) -> tuple[str, list[str]]:
    """The table of all drifts, and what was promised of them and is not kept."""
    rows, short = [["run, drift", "over the oracle", "doing nothing", "causal", "changes", "real ones"]], []
    for driver in drivers:
        for name, kind in DRIFTS.items():
            found = np.mean([drift(driver, name, seed) for seed in seeds], axis=0)
            over, still, causal, made, real = found.tolist()
            counted = f"{real:.1f}" if kind.sudden else "all the time"
            rows.append(
                [f"{driver}, {name}", *(f"{x:.3f}" for x in (over, still, causal)), f"{made:.1f}", counted]
            )
            if over > min(DRIFTED, 1.01 * still):
                short.append(f"{driver}, {name}: {over:.3f} of the oracle's time")
            if kind.sudden and made > real + 1:
                short.append(f"{driver}, {name}: {made:.1f} changes for {real:.1f}")
    return table(rows), short


def row(driver: str, kind: str, noise: float, runs: Sequence[Run]) -> tuple[list[str], list[str]]:
    """The figures of runs, and what was promised of them and is not kept."""
    late = [run.over[ROTATES:] for run in runs]
    over = float(np.mean(late))
    low, high = min(min(run.slopes) for run in runs), max(max(run.slopes) for run in runs)
    outside = float(np.mean([not SLOPES[0] <= s <= SLOPES[1] for run in runs for s in run.slopes]))
    apart = float(np.mean([np.mean(np.array(run.imbalance[ROTATES:]) > IMBALANCE) for run in runs]))
    replans = [count for run in runs for count in run.replans]
    cells = [
        f"{driver}, {kind}, {noise:.0%}",
        f"{over:.3f}",
        f"{low:.2f} to {high:.2f}",
        f"{outside:.2%}",
        f"{apart:.1%}",
        f"{mean(replans):.1f}",
        f"{mean(count > REPLANS for count in replans):.1%}, {max(replans)}",
    ]
    short = []
    if over > OVER_ORACLE:
        short.append(f"{over:.3f} of the oracle's time")
    if outside:
        short.append(f"slopes from {low:.2f} to {high:.2f} of the true one")
    if apart > IMBALANCED:
        short.append(f"imbalanced in {apart:.1%} of the rounds")
    if max(replans) > REPLANS:
        short.append(f"{max(replans)} re-plans after one change")
    return cells, [f"{cells[0]}: {line}" for line in short]


def waits(seeds: Sequence[int]) -> str:
    """What waiting alone costs, in words."""
    each = [
        f"{rounds} round{'s' * (rounds > 1)} {waiting_alone('additive', rounds, seeds):.3f} and "
        f"{waiting_alone('multiplicative', rounds, seeds):.3f}"
        for rounds in WAITS
    ]
    return f"Over the oracle (additive and multiplicative) by waiting alone: {'; '.join(each)}."


def kept(short: Sequence[str]) -> str:
    """What is not kept, in words."""
    return "; ".join(short) if short else "All that is promised is kept."


def publish(section: str, text: str, docs: bool) -> None:
    """Print it; docs: write it into its page, too."""
    print(text)
    if docs:
        write_section(section, text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=24)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--hiccups", type=float, default=0.01, help="the share of steps that hiccup")
    parser.add_argument("--drivers", nargs="+", choices=DRIVERS, default=DRIVERS)
    parser.add_argument("--drifts", action="store_true")
    parser.add_argument("--docs", action="store_true")
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    if options.drifts:
        rows, short = drifting(options.drivers, seeds)
        text = f"{machine()}. {options.seeds} seeds, 400 rounds.\n\n{rows}\n\n{kept(short)}"
        publish("replay-drifts", text, options.docs)
        sys.exit(bool(short))
    heading = ["run, disturbance, noise", "over the oracle", "slope over true", "slopes off", "imbalanced"]
    rows, short = [[*heading, "re-plans", "over two, most"]], []
    for driver in options.drivers:
        for kind in ("additive", "multiplicative"):
            for noise in (0.01, 0.03):
                runs = [replay(driver, kind, noise, seed, options.hiccups) for seed in seeds]
                cells, missed = row(driver, kind, noise, runs)
                rows.append(cells)
                short += missed
    text = (
        f"{machine()}. {options.seeds} seeds. Imbalanced: rounds whose longest step is over {IMBALANCE:.0%} "
        f"above the mean; re-plans: a change of the devices brings so many; in so many changes over two.\n\n"
        f"{table(rows)}\n\n{waits(seeds)}\n\n{kept(short)}"
    )
    publish("replay" if options.hiccups else "replay-no-hiccups", text, options.docs)
    sys.exit(bool(short))


if __name__ == "__main__":
    main()
