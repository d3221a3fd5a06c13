"""Variants of local steps, in a fast program: python benchmarks/local_tried.py [--docs].

The model, data, workers and rounds of local_steps.py, in float32 and in a loop of its own in virtual time,
so that a run takes seconds and what pyps does not have can be tried: outer optimizers, shared moments, steps
that change in number. Compared are the samples to a loss.
"""

from __future__ import annotations

import argparse
import heapq
import math
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from local_steps import LOCAL, ONCE, SPEEDS, Curve, until
from record import table, write_section
from text import load
from torch import nn
from train import Transformer, loss_of

from pyps.step.machine import even_steps
from pyps.worker.sampling import indices

PAGE = "local-steps.md"
ROUND = 200  # samples
EVERY = 1000  # samples between two measurements
LOSSES = (2.3, 2.2, 2.15)  # a run ends with the last
MOST = 10_000  # samples of a run
SEEDS = (0, 1, 2)  # of what is tried again


@dataclass(frozen=True)
class Outer:
    """What is done with the differences. One of them counts by its samples, as a part of a round.

    lr, momentum: of the outer step. delay: 0: Nesterov's momentum at each difference; N: applied once every N
    differences, which take plain steps in between. look: the share of Nesterov's next way by which what a
    worker gets is ahead. align: below this cosine with the momentum a tensor's difference is corrected: its
    share against the momentum is taken out, or it is turned towards it; above 1: never. beta: of the mean of
    ways that takes the momentum's place as the direction, if there is no momentum.
    """

    lr: float = 1.0
    momentum: float = 0.0
    delay: int = 0
    look: float = 0.0
    align: float = -2.0
    beta: float = 0.9


@dataclass(frozen=True)
class Way:
    """A way to train. steps: local ones on average, first and last, if the number grows; 0: a global step
    each time. local: samples of a local step, by worker. begin: the share of samples that are trained a step
    each time at first. shared: what of Adam's state is averaged at a round's end: "m", "v". average: how much
    of the parameters that are measured are those before the last round; 0: none. late: the share of its next
    round that each worker computes on what it has alone, before a round's parameters reach it.
    """

    title: str
    steps: tuple[float, float] = (10.0, 10.0)
    lr: float = 0.008
    local: tuple[int, ...] = (LOCAL,) * len(SPEEDS)
    waits: bool = True
    outer: Outer = Outer()
    merges: int = 0
    begin: float = 0.0
    shared: str = ""
    average: float = 0.0
    late: tuple[float, ...] = (0.0,) * len(SPEEDS)
    betas: tuple[float, float] = (0.9, 0.999)


class Adam:
    """AdamW on a flat vector, in place."""

    def __init__(self, size: int, betas: tuple[float, float]) -> None:
        self.m, self.v, self.t, self.betas = torch.zeros(size), torch.zeros(size), 0, betas

    def step(self, w: torch.Tensor, g: torch.Tensor, lr: float) -> None:
        (a, b), self.t = self.betas, self.t + 1
        w.mul_(1.0 - lr * 0.01)
        self.m.lerp_(g, 1.0 - a)
        self.v.mul_(b).addcmul_(g, g, value=1.0 - b)
        root = self.v.sqrt().div_(math.sqrt(1.0 - b**self.t)).add_(1e-8)
        w.addcdiv_(self.m, root, value=-lr / (1.0 - a**self.t))


class Task:
    """The model on a flat vector: gradients and the loss on what is held out."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.seed, (self.text, self.held_out) = seed, load()
        self.model = Transformer()
        parameters = list(self.model.parameters())
        self.sizes = [p.numel() for p in parameters]
        self.flat = nn.utils.parameters_to_vector(parameters).detach().clone()
        self.grad = torch.zeros_like(self.flat)
        for p, part, g in zip(
            parameters, self.flat.split(self.sizes), self.grad.split(self.sizes), strict=True
        ):
            p.data, p.grad = part.view_as(p), g.view_as(p)

    def gradient(self, w: torch.Tensor, first: int, count: int) -> torch.Tensor:
        self.flat.copy_(w)
        self.grad.zero_()
        rows = torch.from_numpy(indices(first, count, len(self.text), self.seed))
        loss_of(self.model, self.text[rows]).backward()
        return self.grad

    def loss(self, w: torch.Tensor) -> float:
        self.flat.copy_(w)
        with torch.no_grad():
            return float(loss_of(self.model, self.held_out))


class Store:
    """The parameters and the outer optimizer."""

    def __init__(self, w: torch.Tensor, outer: Outer, sizes: list[int]) -> None:
        self.w, self.outer, self.sizes = w, outer, sizes
        self.m, self.sum = torch.zeros_like(w), torch.zeros_like(w)
        self.count = 0

    def push(self, way: torch.Tensor, part: float) -> None:
        o = self.outer
        if o.align > -1.0:
            way = self.aligned(way)
        if o.delay:
            self.sum.add_(way, alpha=part)
            self.count += 1
            self.w.sub_(way, alpha=o.lr * part)
            if self.count % o.delay == 0:
                self.m.mul_(o.momentum).add_(self.sum)
                self.w.sub_(self.m, alpha=o.lr * o.momentum)
                self.sum.zero_()
            return
        beta = o.momentum or o.beta
        kept = beta**part
        if o.momentum:  # a part of Nesterov's step, as the store takes it
            steady = 1.0 / (1.0 - beta)
            a = beta * beta * (1.0 - kept) / (1.0 - beta)
            rate = beta * steady + 1.0
            self.w.sub_(self.m, alpha=o.lr * a).sub_(way, alpha=o.lr * (rate * part - a * steady))
            self.m.mul_(kept).add_(way, alpha=(1.0 - kept) * steady)
        else:
            self.w.sub_(way, alpha=o.lr * part)
            self.m.mul_(kept).add_(way, alpha=1.0 - kept)

    def aligned(self, way: torch.Tensor) -> torch.Tensor:
        """Each tensor's difference, turned towards the momentum or shortened where it is against it."""
        parts = []
        for d, m in zip(way.split(self.sizes), self.m.split(self.sizes), strict=True):
            size, length = float(d.norm()), float(m.norm())
            if not size or not length:
                parts.append(d)
                continue
            unit = m / length
            cosine = float(d @ unit) / size
            trust = size / (size + length)
            if cosine >= self.outer.align:
                parts.append(d)
            elif cosine < 0.0:
                parts.append(d - min(1.0, -cosine * trust * 4.0) * cosine * size * unit)
            else:
                turn = (1.0 - cosine) * trust
                turned = (1.0 - turn) * d / size + turn * unit
                parts.append(size * turned / turned.norm())
        return torch.cat(parts)

    def pulled(self) -> torch.Tensor:
        return self.w - self.outer.look * self.outer.lr * self.outer.momentum * self.m


def train(way: Way, seed: int, samples: int = MOST) -> Curve:
    """(seconds, samples, held-out loss) about every EVERY samples."""
    return Training(way, Task(seed), samples).run()


class Training:
    """A way's run to the last of LOSSES, or so many samples."""

    def __init__(self, way: Way, task: Task, samples: int) -> None:
        self.way, self.task, self.samples = way, task, samples
        start = task.flat.clone()
        self.store = Store(start, way.outer, task.sizes)
        self.adams = [Adam(start.numel(), way.betas) for _ in SPEEDS]
        self.claimed = self.done = 0
        self.now = 0.0
        self.mean, self.weight = torch.zeros_like(start), 0.0
        self.curve: Curve = [(0.0, 0, task.loss(start))]

    @property
    def ended(self) -> bool:
        return self.curve[-1][2] <= LOSSES[-1]

    def measure(self, count: int) -> None:
        """So many samples more are in the store."""
        self.done += count
        if self.way.average:
            kept = self.way.average ** (count / ROUND)
            self.mean.mul_(kept).add_(self.store.w, alpha=1.0 - kept)
            self.weight = self.weight * kept + 1.0 - kept
        if self.done >= self.curve[-1][1] + EVERY or self.done >= self.samples:
            w = self.mean / self.weight if self.way.average else self.store.w
            self.curve.append((self.now, self.done, self.task.loss(w)))

    def run(self) -> Curve:
        every = self.samples if not self.way.steps[1] else round(self.way.begin * self.samples)
        self.each(every)
        if self.done < self.samples:
            if every:
                for adam in self.adams[1:]:
                    adam.m.copy_(self.adams[0].m)
                    adam.v.copy_(self.adams[0].v)
                    adam.t = self.adams[0].t
            (self.rounds if self.way.waits else self.free)()
        return self.curve

    def each(self, until: int) -> None:
        """A global step each time."""
        size = sum(self.way.local)
        while self.done < until and not self.ended:
            g = self.task.gradient(self.store.w, self.claimed, size)
            self.adams[0].step(self.store.w, g, self.way.lr)
            self.claimed += size
            self.now += ONCE * size / sum(SPEEDS)
            self.measure(size)

    def steps(self) -> float:
        """Local steps of a round on average, now."""
        first, last = self.way.steps
        return first * (last / first) ** (self.done / self.samples)

    def counts(self) -> tuple[int, ...]:
        """Samples of each worker's next round: whole local steps, of which each has one at least."""
        each = self.steps() * sum(self.way.local)
        return tuple(
            max(1, round(each * s / sum(SPEEDS) / b)) * b for s, b in zip(SPEEDS, self.way.local, strict=True)
        )

    def local(self, k: int, w: torch.Tensor, first: int, count: int) -> torch.Tensor:
        at, end = w.clone(), first + count
        while first < end:
            size = even_steps(end - first, self.way.local[k])
            self.adams[k].step(at, self.task.gradient(at, first, size), self.way.lr)
            first += size
        return at

    def rounds(self) -> None:
        ends = [self.store.pulled() for _ in SPEEDS]
        while self.done < self.samples and not self.ended:
            counts = self.counts()
            pulled = self.store.pulled()
            total = torch.zeros_like(pulled)
            for k, count in enumerate(counts):
                ahead = round(self.way.late[k] * count / self.way.local[k]) * self.way.local[k]
                way = self.local(k, ends[k], self.claimed, ahead) - ends[k]
                ends[k] = self.local(k, pulled + way, self.claimed + ahead, count - ahead)
                total.add_(pulled - ends[k], alpha=count / sum(counts))
                self.claimed += count
            self.share(counts)
            self.store.push(total, 1.0)
            self.now += max(ONCE * c / s for c, s in zip(counts, SPEEDS, strict=True))
            self.measure(sum(counts))

    def share(self, counts: tuple[int, ...]) -> None:
        """Average what is shared of the workers' states."""
        for name in self.way.shared:
            states = [getattr(adam, name) for adam in self.adams]
            mean = sum(s * (c / sum(counts)) for s, c in zip(states, counts, strict=True))
            for state in states:
                state.copy_(mean)

    def free(self) -> None:
        """No worker waits: each pushes when its steps are done, and goes on from what is then there."""
        parts = self.way.merges + 1
        at = [self.store.pulled() for _ in SPEEDS]  # what the worker has pulled last
        gone = [torch.zeros_like(at[0]) for _ in SPEEDS]  # how far its steps have brought it since its push
        counts = list(self.counts())
        events: list[tuple[float, int, int]] = []
        for k, s in enumerate(SPEEDS):
            heapq.heappush(events, (ONCE * counts[k] / parts / s, k, 1))
        firsts = []
        for c in counts:
            firsts.append(self.claimed)
            self.claimed += c
        while self.done < self.samples and not self.ended:
            self.now, k, part = heapq.heappop(events)
            begin, end = (counts[k] * p // parts for p in (part - 1, part))
            w = at[k] + gone[k]
            gone[k] = self.local(k, w, firsts[k] + begin, end - begin) - at[k]
            if part == parts:
                self.store.push(-gone[k], counts[k] / sum(self.counts()))
                gone[k] = torch.zeros_like(w)
                self.measure(counts[k])
                counts[k] = self.counts()[k]
                firsts[k], part = self.claimed, 0
                self.claimed += counts[k]
            at[k] = self.store.pulled()
            begin, end = (counts[k] * p // parts for p in (part, part + 1))
            heapq.heappush(events, (self.now + ONCE * (end - begin) / SPEEDS[k], k, part + 1))


def smaller(local: int, samples: int, lr: float) -> Way:
    """Local steps of fewer samples each, and so many in a round."""
    steps = samples / local / len(SPEEDS)
    title = f"local steps of {local}, rounds of {samples}, lr {lr:g}"
    return Way(title, (steps, steps), lr, (local,) * len(SPEEDS))


def late(way: Way, share: float, *, far: bool = True) -> Way:
    """Parameters come late: to the two workers that are behind a link, or to all."""
    shares = (0.0, share, share, 0.0) if far else (share,) * len(SPEEDS)
    return replace(
        way, title=f"{way.title}, {'two' if far else 'all'} {share:g} of a round late", late=shares
    )


def with_momentum(way: Way) -> Way:
    return replace(way, title=f"{way.title}, Nesterov 0.5 outside, lr 0.6", outer=Outer(0.6, 0.5))


EVERY_STEP = Way("every step", (0, 0))
PLANNED = Way("planned, 10 local steps")
FREE = Way("asynchronous", waits=False)
IN_ROUNDS = (
    EVERY_STEP,
    replace(EVERY_STEP, title="every step, global batch of 12", local=(3,) * 4),
    replace(EVERY_STEP, title="every step, global batch of 8, lr 0.005", local=(2,) * 4, lr=0.005),
    PLANNED,
    replace(PLANNED, title="4 local steps", steps=(4, 4)),
    replace(PLANNED, title="2 local steps", steps=(2, 2)),
    replace(PLANNED, title="2 local steps at first, 20 in the end", steps=(2, 20)),
    replace(PLANNED, title="every step for the first quarter", begin=0.25),
    replace(PLANNED, title="Adam's moments averaged after a round", shared="mv"),
    replace(PLANNED, title="only the first moment averaged", shared="m"),
    replace(PLANNED, title="only the second moment averaged", shared="v"),
    replace(PLANNED, title="4 local steps, moments averaged", steps=(4, 4), shared="mv"),
    replace(PLANNED, title="Nesterov 0.3 outside, lr 0.8", outer=Outer(0.8, 0.3)),
    with_momentum(PLANNED),
    with_momentum(replace(PLANNED, title="lr 0.012", lr=0.012)),
    replace(PLANNED, title="Nesterov 0.7 outside, lr 0.4", outer=Outer(0.4, 0.7)),
    replace(PLANNED, title="lr 1.3 outside", outer=Outer(1.3)),
    replace(PLANNED, title="as many steps each, of 2, 4, 6 and 8", local=(2, 4, 6, 8)),
    replace(PLANNED, title="5 local steps of 10", steps=(5, 5), local=(10,) * 4),
    smaller(3, 120, 0.008),
    smaller(2, 80, 0.006),
    smaller(1, 80, 0.004),
    late(PLANNED, 0.3, far=False),
    late(PLANNED, 0.5, far=False),
    late(PLANNED, 0.4),
    smaller(2, 160, 0.006),
    late(smaller(2, 160, 0.006), 0.5),
    late(with_momentum(smaller(2, 160, 0.006)), 0.5),
    replace(EVERY_STEP, title="every step, averaged parameters measured", average=0.5),
    replace(PLANNED, title="planned, averaged parameters measured", average=0.5),
)
ASYNCHRONOUS = (
    FREE,
    replace(FREE, title="lr 0.005", lr=0.005),
    replace(FREE, title="lr 0.8 outside", outer=Outer(0.8)),
    replace(FREE, title="delayed Nesterov 0.3 every 4, lr 0.75", outer=Outer(0.75, 0.3, 4)),
    replace(FREE, title="delayed Nesterov 0.5 every 4, lr 0.55", outer=Outer(0.55, 0.5, 4)),
    replace(FREE, title="delayed Nesterov 0.3 every 16, lr 0.75", outer=Outer(0.75, 0.3, 16)),
    replace(FREE, title="corrected below a cosine of 0", outer=Outer(align=0.0, beta=0.5)),
    replace(FREE, title="the same, below 0.2, Nesterov 0.3, lr 0.75", outer=Outer(0.75, 0.3, align=0.2)),
    replace(FREE, title="Nesterov 0.3, lr 0.75", outer=Outer(0.75, 0.3)),
    replace(FREE, title="the same, pulls look ahead", outer=Outer(0.75, 0.3, look=1.0)),
    replace(FREE, title="merged 3 times", merges=3),
)


AGAIN = (
    PLANNED,
    replace(PLANNED, title="4 local steps", steps=(4, 4)),
    replace(PLANNED, title="2 local steps", steps=(2, 2)),
    replace(PLANNED, title="Adam's moments averaged after a round", shared="mv"),
    replace(PLANNED, title="4 local steps, moments averaged", steps=(4, 4), shared="mv"),
    smaller(3, 120, 0.008),
    smaller(2, 80, 0.006),
    with_momentum(smaller(2, 120, 0.006)),
    with_momentum(smaller(2, 200, 0.006)),
    with_momentum(PLANNED),
)


def samples_to(curve: Curve) -> float:
    """The mean over LOSSES of the samples to each; infinite if the last is never reached."""
    found = [until(curve, loss) for loss in LOSSES]
    return sum(at[1] if at else math.inf for at in found) / len(found)


def samples_of(work: tuple[Way, int]) -> float:
    way, seed = work
    return samples_to(train(way, seed))


def compare(ways: Sequence[Way], found: dict[tuple[Way, int], float], seeds: Sequence[int]) -> str:
    """Samples to LOSSES, over those of a step each time with the same seed. found: by way and seed."""
    rows = [["", "samples, over every step's"]]
    for way in ways:
        over = [found[way, seed] / found[EVERY_STEP, seed] for seed in seeds]
        rows.append([way.title, ", ".join(f"{ratio:.2f}" if ratio < math.inf else "never" for ratio in over)])
    return table(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--docs", action="store_true", help=f"write the tables to {PAGE}")
    options = parser.parse_args()
    found: dict[tuple[Way, int], float] = {}
    sections = {"tried": (IN_ROUNDS, [0]), "tried-free": (ASYNCHRONOUS, [0]), "tried-again": (AGAIN, SEEDS)}
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for name, (ways, seeds) in sections.items():
            work = [(way, seed) for seed in seeds for way in (EVERY_STEP, *ways)]
            new = [pair for pair in dict.fromkeys(work) if pair not in found]
            found |= zip(new, pool.map(samples_of, new, chunksize=1), strict=True)
            text = compare(ways, found, seeds)
            print(text, end="\n\n", flush=True)
            if options.docs:
                write_section(name, text, PAGE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
