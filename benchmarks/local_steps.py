"""Local steps on a character-level transformer: python benchmarks/local_steps.py [--only TABLE] [--save].

Trains the model of examples/local_steps on four workers of speeds 1 to 4, in virtual time (so the machine's
speed does not matter): every gradient, decision and outer step is real. Compares uneven synchronous steps
with rounds of local steps: equal and planned numbers, synchronous and not, with jitter, with a worker that
stands still, and over a slow link.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from record import Kept, save_table, table
from torch import nn

from pyps import Hyper
from pyps.formats import Jitter
from pyps.simulate import Fault, LocalOptimizer, Scenario, SimWorker, simulate
from pyps.solver.links import WIRE_BYTES
from pyps.store.policies import policy_named
from pyps.worker.data.sampling import indices

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "local_steps"))
from text import CONTEXT, load
from train import Transformer, loss_of

Vector = NDArray[np.float64]
Curve = list[tuple[float, int, float]]  # seconds, samples, held-out loss
PAGE = "local-steps.md"
TABLES = ("losses", "losses-one", "equal", "delays", "stalls", "link")
SPEEDS = (1, 2, 3, 4)
LOCAL, STEPS = 5, 10  # samples of a local step; local steps on average
ONCE = 0.1  # seconds of a sample at speed 1
SAMPLES = 18_000  # 1.15 million tokens
INNER = Hyper(lr=0.008, weight_decay=0.01)  # the best of 0.003, 0.005, 0.008 and 0.012, each step or not
FEW, FEW_INNER = 2, Hyper(lr=0.006, weight_decay=0.01)  # samples of a smaller local step
OUTER = Hyper(lr=1.0)  # the mean
EQUAL = (STEPS * LOCAL,) * len(SPEEDS)
NO_JITTER, JITTER = Jitter(), Jitter(sigma=0.5)
STALLS = tuple(
    Fault(rank=k, at=at, kind="stop", seconds=60.0) for k, at in ((3, 60.0), (1, 200.0), (2, 400.0))
)
SHORT = tuple(Fault(rank=3 * k % 4, at=5.0 + 7.0 * k, kind="stop", seconds=3.0) for k in range(60))


def planned(steps: int, local: int = LOCAL) -> tuple[int, ...]:
    """Samples of a round of so many local steps on average, by worker, so that all end together.

    local: samples of a step.
    """
    return tuple(steps * local * len(SPEEDS) * speed // sum(SPEEDS) for speed in SPEEDS)


PLANNED = planned(STEPS)


class Characters:
    """An objective: the transformer's loss on the text, and on what was held out."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self._model, self._seed = Transformer(), seed
        self._training, self._held_out = load()
        self._parameters = list(self._model.parameters())

    def start(self) -> Vector:
        return self._flat(self._parameters)

    def gradient(self, w: Vector, first: int, count: int) -> tuple[Vector, float]:
        self._load(w)
        rows = torch.from_numpy(indices(first, count, len(self._training), self._seed))
        loss = loss_of(self._model, self._training[rows])
        return self._flat(torch.autograd.grad(loss, self._parameters)), float(loss.detach())

    def loss(self, w: Vector) -> float:
        self._load(w)
        with torch.no_grad():
            return float(loss_of(self._model, self._held_out))

    def _load(self, w: Vector) -> None:
        with torch.no_grad():
            nn.utils.vector_to_parameters(torch.from_numpy(w).float(), self._parameters)

    @staticmethod
    def _flat(tensors: Sequence[torch.Tensor]) -> Vector:
        flat = torch.cat([t.detach().reshape(-1) for t in tensors]).double().numpy()
        return np.asarray(flat, np.float64)


@dataclass(frozen=True)
class Case:
    """A way to train. batches: of a step or a round, by worker. outer: None: AdamW takes each step itself.

    local: samples of a local step. inner: AdamW's constants. deadline: the round timeout, in planned rounds;
    0: none.
    """

    title: str
    batches: tuple[int, ...]
    policy: str = "bsp"
    outer: Hyper | None = OUTER
    merges: int = 0
    jitter: Jitter = NO_JITTER
    faults: tuple[Fault, ...] = ()
    local: int = LOCAL
    inner: Hyper = INNER
    deadline: float = 0.0

    @property
    def waits(self) -> bool:
        """Return whether all wait for all in any case."""
        return self.policy == "bsp" and not self.deadline

    def scenario(self) -> Scenario:
        workers = tuple(
            SimWorker(
                f"w{k}",
                batch,
                lambda n, speed=speed: ONCE * n / speed,
                self.jitter,
                micro_batch=self.local if self.outer else 0,
            )
            for k, (batch, speed) in enumerate(zip(self.batches, SPEEDS, strict=True))
        )
        return Scenario(workers, faults=self.faults, local=self.outer is not None, merges=self.merges)

    @property
    def learned(self) -> Case:
        """The case with the same parameters after the same samples: if all wait for all, without delays."""
        return replace(self, title="", jitter=NO_JITTER, faults=()) if self.waits else replace(self, title="")

    def curve(self, curve: Curve, seed: int) -> Curve:
        """A curve that was learned, at the times of this case."""
        if not self.waits:
            return curve
        scenario = self.scenario()
        rounds = SAMPLES // scenario.global_batch
        pushed = simulate(scenario, self.policy, iterations=rounds, seed=seed, timeline=True).pushed_at
        ends = [0.0] + [pushed[len(SPEEDS) * (k + 1) - 1][1] for k in range(rounds)]
        return [(ends[samples // scenario.global_batch], samples, loss) for _, samples, loss in curve]

    def train(self, seed: int) -> Curve:
        scenario = self.scenario()
        outer = self.outer
        seconds = self.deadline * max(w.cost(w.batch) for w in scenario.workers)
        result = simulate(
            scenario,
            policy_named(self.policy, seconds) if seconds else self.policy,
            iterations=SAMPLES // scenario.global_batch,
            seed=seed,
            objective=Characters(seed),
            lr=outer or self.inner,
            optimizer="adamw" if outer is None else "sgd",
            local=LocalOptimizer("adamw", self.inner) if outer is not None else None,
            measure_every=1000,
        )
        return list(result.curve)


DDP = Case("every step, uneven batches", planned(1), outer=None)
SYNC = Case("planned local steps", PLANNED)
EVEN = Case("equal local steps", EQUAL)
FREE = Case("planned, asynchronous", PLANNED, "asp")
MERGED = replace(FREE, title="planned, asynchronous, merged 3 times", merges=3)
FEWER = Case("planned local steps, global batch of 8", planned(STEPS, FEW), local=FEW, inner=FEW_INNER)
CASES = (DDP, SYNC, MERGED, FEWER)
ONE_SEED = (
    DDP,
    EVEN,
    SYNC,
    FREE,
    MERGED,
    Case("every step, global batch of 8", (1, 2, 2, 3), outer=None, inner=FEW_INNER),
    FEWER,
    replace(FEWER, title="the same, asynchronous", policy="asp"),
)
DELAYED = (
    replace(SYNC, title="planned, jitter", jitter=JITTER),
    replace(MERGED, title="planned, asynchronous, merged 3 times, jitter", jitter=JITTER),
    replace(SYNC, title="planned, a worker stands still", faults=STALLS),
    replace(MERGED, title="planned, asynchronous, merged 3 times, a worker stands still", faults=STALLS),
)
QUORUM = replace(SYNC, policy="quorum")
STALLED = (
    (
        DELAYED[2],
        replace(SYNC, title="the same, a round timeout of 1.5 rounds", faults=STALLS, deadline=1.5),
        replace(QUORUM, title="the same, a quorum of three, late work merged", faults=STALLS),
    ),
    (
        replace(SYNC, title="planned, one stands still for 3 s, every 7 s", faults=SHORT),
        replace(QUORUM, title="the same, a quorum of three, 3 s", faults=SHORT),
    ),
    (DELAYED[0], replace(QUORUM, title="planned, a quorum of three, jitter", jitter=JITTER)),
)


def until(curve: Curve, loss: float) -> tuple[float, float] | None:
    """Seconds and samples to a loss, between two measurements in proportion."""
    for (t0, n0, a), (t1, n1, b) in pairwise(curve):
        if b <= loss:
            part = (a - loss) / (a - b) if a > b else 1.0
            return t0 + part * (t1 - t0), n0 + part * (n1 - n0)
    return None


def trained(work: tuple[Case, int]) -> Curve:
    case, seed = work
    return case.train(seed)


def losses(curves: dict[tuple[Case, int], Curve], cases: Sequence[Case], seeds: Sequence[int]) -> str:
    """Return for each case the loss in the end, and seconds and samples to a target that those in rounds
    reach.
    """
    heading = ["held-out loss", "over every step", "over planned", "seconds to the target", "samples to it"]
    rows = [["", *heading, "over every step's"]]
    goal = {s: 1.005 * max(curves[c, s][-1][2] for c in (DDP, EVEN, SYNC) if c in cases) for s in seeds}
    for case in cases:
        ends = [curves[case, s][-1][2] for s in seeds]
        over = [
            [curves[case, s][-1][2] / curves[other, s][-1][2] for s in seeds]
            for other in (DDP, SYNC if SYNC in cases else DDP)
        ]
        row = [spread(ends, ".3f"), *(spread(ratios, ".3f") for ratios in over)]
        rows.append([case.title, *row, *reached(curves, case, DDP, goal)])
    return f"{table(rows)}\n\n{targets(goal)}"


def delays(
    curves: dict[tuple[Case, int], Curve], seeds: Sequence[int], groups: Sequence[Sequence[Case]]
) -> str:
    """Seconds to a loss that all cases with delays reach: in each group one that waits, and others."""
    goal = {s: 1.005 * max(curves[c, s][-1][2] for group in groups for c in group) for s in seeds}
    rows = [["", "held-out loss", "seconds to the target", "times as fast"]]
    for group in groups:
        for case in group:
            ends = spread([curves[case, s][-1][2] for s in seeds], ".3f")
            seconds = [_seconds(curves[case, s], goal[s]) for s in seeds]
            faster = [_seconds(curves[group[0], s], goal[s]) / t for s, t in zip(seeds, seconds, strict=True)]
            rows.append([case.title, ends, spread(seconds, ".0f"), spread(faster, ".2f")])
    return f"{table(rows)}\n\n{targets(goal)}"


def _seconds(curve: Curve, loss: float) -> float:
    found = until(curve, loss)
    return found[0] if found else float("inf")


def reached(
    curves: dict[tuple[Case, int], Curve], case: Case, other: Case, goal: dict[int, float]
) -> list[str]:
    """Seconds and samples of a case to each seed's goal, and the samples over another case's."""
    found = [until(curves[case, s], loss) for s, loss in goal.items()]
    all_found = [f for f in found if f is not None]
    if len(all_found) < len(found):
        return [f"{len(found) - len(all_found)} of {len(found)} never", "", ""]
    others = [until(curves[other, s], loss) for s, loss in goal.items()]
    over = [f[1] / o[1] for f, o in zip(all_found, others, strict=True) if o]
    return [*(spread([f[k] for f in all_found], ".0f") for k in (0, 1)), spread(over, ".3f")]


def targets(goal: dict[int, float]) -> str:
    return f"Targets: {', '.join(f'{loss:.3f}' for loss in goal.values())}, by seed."


def spread(values: Sequence[float], form: str) -> str:
    """The median and the range."""
    middle, low, high = (f"{f(values):{form}}" for f in (statistics.median, min, max))
    return f"{middle} ({low} to {high})" if len(values) > 1 else middle


def seconds_of(case: Case, push: int, pull: int, link: float, overlaps: bool = False) -> float:
    """Seconds of as many samples as a round has. push, pull: bits; link: the server's bytes a second."""
    size = sum(p.numel() for p in Transformer().parameters()) * 4.0
    scenario = replace(case.scenario(), up_bytes=size, down_bytes=size, server_bandwidth=link)
    shares = {"up_share": WIRE_BYTES[push] / 4.0, "down_share": WIRE_BYTES[pull] / 4.0}
    workers = tuple(replace(w, **shares) for w in scenario.workers)
    scenario = replace(scenario, workers=workers)
    rounds = 40 * sum(PLANNED) // scenario.global_batch
    result = simulate(scenario, case.policy, iterations=rounds, depth="auto" if overlaps else 1)
    return result.seconds * sum(PLANNED) / result.samples


def on_a_link() -> str:
    """A link on which uneven int8 steps spend 60, 75 or 90 % of their time."""
    parameters = sum(p.numel() for p in Transformer().parameters())
    sent = {"every step, int8": (DDP, 8, 8, False), "local steps, int8": (SYNC, 8, 8, False)}
    sent["local steps, int4"] = (SYNC, 4, 8, False)
    sent["asynchronous, int8"] = (FREE, 8, 8, False)
    sent["asynchronous, int8, pipeline"] = (FREE, 8, 8, True)
    rows = [["", "bytes per token", *(f"{share:.0%} on the link" for share in (0.6, 0.75, 0.9))]]
    free = seconds_of(DDP, 8, 8, float("inf"))
    for title, (case, push, pull, pipeline) in sent.items():
        tokens = sum(case.batches) * CONTEXT
        wire = (WIRE_BYTES[push] + WIRE_BYTES[pull]) * parameters * len(SPEEDS) / tokens
        cells = []
        for share in (0.6, 0.75, 0.9):
            transfers = free * share / (1.0 - share)  # of ten steps
            each = STEPS * len(SPEEDS) * (WIRE_BYTES[8] + WIRE_BYTES[8]) * parameters
            link = each / transfers
            every, here = seconds_of(DDP, 8, 8, link), seconds_of(case, push, pull, link, pipeline)
            cells.append(f"{here:.2f} s, {every / here:.2f}x")
        rows.append([title, f"{wire:.1f}", *cells])
    return table(rows)


def trained_by(processes: int, work: Sequence[tuple[Case, int]], kept: Kept) -> dict[tuple[Case, int], Curve]:
    """Train cases by seed, several at once, those that are kept left out; the curve of each."""
    names = {pair: f"{pair[0]}, seed {pair[1]}" for pair in work}
    missing = [pair for pair in work if kept.get(names[pair]) is None]
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for k, (pair, curve) in enumerate(zip(missing, pool.imap(trained, missing), strict=True), 1):
            kept.add(names[pair], curve)
            done = f"{k} of {len(missing)} trained in {time.monotonic() - began:.0f} s"
            print(done, file=sys.stderr, flush=True)
    return {pair: [(t, n, loss) for t, n, loss in kept.get(names[pair])] for pair in work}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=TABLES, nargs="+", default=TABLES, help="tables")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--keep", type=Path, help="a file of the trainings so far, to go on from")
    parser.add_argument("--save", action="store_true", help="keep the table in bench-out/")
    options = parser.parse_args()
    seeds = range(options.seeds)
    cases = {"losses": (CASES, seeds), "losses-one": (ONE_SEED, [0]), "delays": (DELAYED, seeds)}
    cases["equal"] = ((EVEN, SYNC), seeds)
    cases["stalls"] = (tuple(case for group in STALLED for case in group), seeds)
    wanted = [
        (case, seed)
        for name, (some, several) in cases.items()
        if name in options.only
        for seed in several
        for case in some
    ]
    work = list(dict.fromkeys((case.learned, seed) for case, seed in wanted))
    learned = trained_by(options.processes, work, Kept(options.keep))
    curves = {(c, s): c.curve(learned[c.learned, s], s) for c, s in wanted}
    tables = {
        "losses": lambda: losses(curves, CASES, seeds),
        "losses-one": lambda: losses(curves, ONE_SEED, [0]),
        "equal": lambda: delays(curves, seeds, ((EVEN, SYNC),)),
        "delays": lambda: delays(curves, seeds, (DELAYED[:2], DELAYED[2:])),
        "stalls": lambda: delays(curves, seeds, STALLED),
        "link": on_a_link,
    }
    for name in options.only:
        text = tables[name]()
        print(text, end="\n\n")
        if options.save:
            save_table(name, text, PAGE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
