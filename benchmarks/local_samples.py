"""Samples that local steps need, over those of tuned DDP: python benchmarks/local_samples.py [--save].

The transformer of examples/local_steps. Local steps run through pyps: a store and four workers (threads) with
the planned numbers for speeds 1 to 4; DDP is a loop of plain torch that takes the same samples in the same
order at the same global batch. Two families: AdamW, and Muon for the blocks' matrices with AdamW for the
rest. Learning rates, DDP's global batch and the samples of a local step are tuned with a seed of their own,
each until the best has worse neighbours on both sides, or is at an end of what there is.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from local_steps import LOCAL, SPEEDS, STEPS, Curve, planned, spread, until
from record import Kept, machine, save_table, table
from text import load
from torch import nn
from train import Transformer, loss_of

from pyps.worker.data.sampling import indices
from pyps.worker.step.loop import join

PAGE = "local-steps.md"
LOSSES = (2.3, 2.2, 2.15)  # a run ends with the last
MOST = 14_000  # samples of a run
EVERY, FIRST = 600, 1200  # samples between two measurements, and before the first, at least
HELD_OUT = 128  # sequences
GLOBAL = sum(planned(1))
BATCHES = (GLOBAL, 10, 5, 2, 1)  # global ones of DDP, until the next is no better
LOCALS = (LOCAL, 2, 1)  # samples of a local step; as well
TUNED_BY = 100  # the seed
PATIENCE = 1.35  # a trial ends after this many times the best one's mean; the last loss takes some 1.2
START = -14  # the first learning rate: 2 ** (START / 2)
BARS = {"Muon": 1.03, "AdamW": 1.08}
NAMES = count()
KEEP = "PYPS_BENCHMARK_KEEP"  # a variable: a file of the trainings so far, for the processes of a pool


@dataclass(frozen=True)
class Outer:
    """SGD's constants outside; with momentum it is Nesterov's."""

    lr: float = 1.0
    momentum: float = 0.0


NESTEROV = Outer(0.6, 0.5)  # the default


@dataclass(frozen=True)
class Way:
    """A way to train. batch: DDP's global one, or of a local step. outer: None: DDP."""

    title: str
    family: str
    batch: int
    outer: Outer | None = None
    averages: bool = False
    lr: float = 0.0


def rate(key: int) -> float:
    """The learning rate of a place on the ladder, in steps of the square root of two."""
    return float(2.0 ** (key / 2))


def inner(family: str, model: Transformer, lr: float) -> list[torch.optim.Optimizer]:
    """A family's optimizers. Muon's step is scaled so that AdamW's learning rates fit it."""
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2] if family == "Muon" else []
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    adamw: torch.optim.Optimizer = torch.optim.AdamW(rest, lr=lr, weight_decay=0.01)
    if not matrices:
        return [adamw]
    return [torch.optim.Muon(matrices, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"), adamw]


class Progress:
    """Held-out losses of a run by its samples, until the last of LOSSES or `limit` samples."""

    def __init__(self, held_out: torch.Tensor, limit: float) -> None:
        self._held_out, self._limit = held_out, limit
        self.curve: Curve = []

    def ended(self, model: nn.Module, samples: int) -> bool:
        """Look at the model after so many samples; whether that was enough."""
        if samples < (self.curve[-1][1] + EVERY if self.curve else FIRST):
            return False
        with torch.no_grad():
            loss = float(loss_of(model, self._held_out))
        self.curve.append((0.0, samples, loss))
        return loss <= LOSSES[-1] or samples >= self._limit or not math.isfinite(loss)


def train(way: Way, seed: int, limit: float = MOST) -> float:
    """The mean over LOSSES of the samples to each; infinite: not within the limit."""
    kept, what = _kept(), f"{replace(way, title='')}, seed {seed}"
    known = kept.get(what)
    if known is not None and (known[0] is not None or known[1] >= limit):
        return math.inf if known[0] is None or known[0] > limit else float(known[0])
    torch.set_num_threads(1)
    text, held_out = load()
    progress = Progress(held_out[:HELD_OUT], limit)
    (every_step if way.outer is None else local_steps)(way, text, progress, seed)
    found = [until(progress.curve, loss) for loss in LOSSES]
    mean = sum(at[1] if at else math.inf for at in found) / len(found)
    kept.add(what, [None if mean == math.inf else mean, limit])
    return mean


def _kept() -> Kept:
    path = os.environ.get(KEEP)
    return Kept(Path(path) if path else None)


def every_step(way: Way, text: torch.Tensor, progress: Progress, seed: int) -> None:
    """DDP: the gradient of a global batch, and a step."""
    torch.manual_seed(seed)
    model = Transformer()
    optimizers = inner(way.family, model, way.lr)
    for first in count(0, way.batch):
        if progress.ended(model, first):
            return
        loss_of(model, text[torch.from_numpy(indices(first, way.batch, len(text), seed))]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def local_steps(way: Way, text: torch.Tensor, progress: Progress, seed: int) -> None:
    """The workers of a run in rounds, as threads; rank 0 measures where a round begins."""
    assert way.outer is not None
    torch.manual_seed(seed)
    models = [Transformer() for _ in SPEEDS]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    name, rounds, enough = f"samples-{os.getpid()}-{next(NAMES)}", planned(STEPS), threading.Event()
    outer: dict[str, Any] = {"lr": way.outer.lr, "momentum": way.outer.momentum}
    outer["nesterov"] = way.outer.momentum > 0

    def work(rank: int) -> None:
        model = models[rank]
        with join(name, rank, batches=list(rounds), samples=MOST, seed=seed, policy="bsp") as worker:
            worker.settings = replace(worker.settings, local_steps=STEPS, micro_batch=way.batch)
            worker.attach(
                model,
                inner(way.family, model, way.lr),
                outer=torch.optim.SGD(model.parameters(), **outer),
                average_moments=way.averages,
            )
            begun = -1
            for (rows,) in worker.batches((text,)):
                assert worker.claim is not None
                if rank == 0 and worker.claim.first != begun:
                    begun = worker.claim.first
                    if progress.ended(model, worker.position.version * sum(rounds)):
                        enough.set()
                if enough.is_set():
                    return
                loss_of(model, rows).backward()
                worker.step()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(SPEEDS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def climbed(samples: Callable[[int, float], float], first: int) -> dict[int, float]:
    """Samples by place on a ladder, from `first` on until the best has worse neighbours on both sides.

    samples: of a place, given up past a limit.
    """
    found: dict[int, float] = {}

    def look(key: int) -> None:
        if key not in found:
            found[key] = samples(key, PATIENCE * min([MOST, *found.values()]))

    look(first)
    while not interior(found):
        best = min(found, key=lambda k: found[k])
        look(best + 1)
        look(best - 1)
        if min(found.values()) == math.inf:
            break
    return found


def interior(found: dict[int, float]) -> bool:
    """Return whether the best place of a ladder has others on both sides."""
    best = min(found, key=lambda k: found[k])
    return min(found) < best < max(found)


def tuned(ways: Sequence[Way]) -> tuple[Way, list[tuple[int, list[float]]]]:
    """The best of a ladder of ways, climbed until the next is no better; batches and rates tried."""
    best, least, tried, at = ways[0], math.inf, [], START
    for way in ways:

        def samples(key: int, limit: float, way: Way = way, least: float = least) -> float:
            return train(replace(way, lr=rate(key)), TUNED_BY, min(limit, PATIENCE * least))

        found = climbed(samples, at)
        at = min(found, key=lambda k: found[k])
        tried.append((way.batch, sorted(map(rate, found))))
        print(f"{way.family}, {way.title}, batch of {way.batch}: {rate(at):.4f}, {found[at]:.0f}", flush=True)
        if found[at] >= least:
            break
        best, least = replace(way, lr=rate(at)), found[at]
    return best, tried


def ladders(family: str) -> Iterator[list[Way]]:
    """Return for each row the ways to choose from; the first row is DDP at the same global batch."""
    yield [Way("DDP, the same global batch", family, GLOBAL)]
    yield [Way("DDP, its own best global batch", family, batch) for batch in BATCHES]
    yield [Way("local steps, Nesterov 0.5 outside", family, b, NESTEROV) for b in LOCALS]


def trained(work: tuple[Way, int]) -> float:
    return train(*work)


def compare(rows: Sequence[Way], found: dict[tuple[Way, int], float], seeds: Sequence[int]) -> str:
    """Samples of each row of a family, over those of its first two rows at the same seed."""
    cells = [["", "batch", "lr", "samples", "over DDP at the same global batch", "over DDP at its own best"]]
    for way in rows:
        samples = [found[way, seed] for seed in seeds]
        over = [
            [n / found[ddp, seed] for n, seed in zip(samples, seeds, strict=True)]
            for ddp in (rows[0], rows[1])
        ]
        ratios = [spread(values, ".2f") for values in over]
        cells.append(
            [f"{way.family}: {way.title}", str(way.batch), f"{way.lr:.4f}", spread(samples, ".0f"), *ratios]
        )
    return table(cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--families", nargs="+", choices=sorted(BARS), default=sorted(BARS))
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--keep", help="a file of the trainings so far, to go on from")
    parser.add_argument("--save", action="store_true", help="keep the table in bench-out/")
    options = parser.parse_args()
    if options.keep:
        os.environ[KEEP] = options.keep
    seeds = range(options.seeds)
    parts, tried = [], []
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        every = [ladder for family in options.families for ladder in ladders(family)]
        best = pool.map(tuned, every, chunksize=1)
        again = [way for way, _ in best if way.outer == NESTEROV]
        best += [(replace(way, title="the same, moments averaged", averages=True), []) for way in again]
        work = [(way, seed) for way, _ in best for seed in seeds]
        found = dict(zip(work, pool.map(trained, work, chunksize=1), strict=True))
    for family in options.families:
        rows = [way for way, _ in best if way.family == family]
        parts.append(compare(rows, found, seeds))
        held = min(
            statistics.median(found[way, s] / found[rows[0], s] for s in seeds) for way in rows if way.outer
        )
        tried.append(f"{family}: at best {held:.2f} times DDP's samples (threshold: {BARS[family]}).")
    for way, ladder in ((way, ladder) for way, ladder in best if ladder):
        text = "; ".join(f"{b}: {min(r):.4f} to {max(r):.4f}" for b, r in ladder)
        tried.append(f"Tried for {way.family}, {way.title}: {text}.")
    text = "\n\n".join([*parts, "\n".join(f"- {line}" for line in tried), machine()])
    print(text)
    if options.save:
        save_table("samples", text, PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
