"""Rivals that are no policies of pyps, in virtual time, as their papers say:

anytime:share=S: Anytime Minibatch (Ferdinand and others, ICLR 2019). Rounds last S of the time that the
    cluster's batches take; each worker computes as many samples as it can.
coded:k=K: gradient coding (Tandon and others, ICML 2017). Each worker computes K + 1 times its batch, and any
    N - K of them make the gradient of the whole global batch.
k-async:k=K: K-async SGD (Dutta and others, AISTATS 2018). A step with the first K gradients; these workers go
    on from there, the others go on as they were.
flexrr: FlexRR's rapid reassignment (Harlap and others, SoCC 2016) at its best. A worker that is done takes
    over as many samples of the last one as make both end soonest, at no cost but its own.

Transfers take no time. Jitter is drawn as `pyps.simulate` draws it, a factor a worker and round.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from pyps import Hyper
from pyps.simulate import Objective, Result, Scenario, SimWorker
from pyps.simulate.metrics import SimulatedRank
from pyps.simulate.problem import Vector
from pyps.simulate.scenario import DeviceModel

NAMES = "anytime", "coded", "k-async", "flexrr"


@dataclass(frozen=True)
class Round:
    """Its seconds, the samples of its gradient, the seconds of it that each worker computes, and how many
    workers' gradients are left out.
    """

    seconds: float
    samples: int
    busy: list[float]
    left_out: int = 0


class Device:
    """A worker's times: T(b) of its cost model, times a factor that is drawn for each round."""

    def __init__(self, worker: SimWorker, seed: int, rank: int) -> None:
        self.cost, self.batch = worker.cost, worker.batch
        self._model = DeviceModel(worker.cost, worker.jitter, (), seed, rank)

    def factor(self) -> float:
        return self._model.seconds(1, 0.0) / self.cost(1)

    def fits(self, seconds: float) -> int:
        """The most samples that take no longer than that."""
        if self.cost(1) > seconds:
            return 0
        least, most = 1, 2
        while self.cost(most) <= seconds:
            least, most = most, 2 * most
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if self.cost(middle) <= seconds else (least, middle)
        return least


def anytime(devices: list[Device], share: float) -> Iterator[Round]:
    seconds = share * max(d.cost(d.batch) for d in devices)
    while True:
        samples = sum(d.fits(seconds / d.factor()) for d in devices)
        yield Round(seconds, samples, [seconds] * len(devices))


def coded(devices: list[Device], k: float) -> Iterator[Round]:
    spare, total = min(int(k), len(devices) - 1), sum(d.batch for d in devices)
    while True:
        takes = [d.cost(min(total, (spare + 1) * d.batch)) * d.factor() for d in devices]
        seconds = sorted(takes)[len(devices) - 1 - spare]
        yield Round(seconds, total, [min(t, seconds) for t in takes], spare)


class Shares:
    """The samples of a round that each worker is at, since when, and when it ends."""

    def __init__(self, devices: list[Device]) -> None:
        self._devices, self._factors = devices, [d.factor() for d in devices]
        self._begins, self._counts = [0.0] * len(devices), [d.batch for d in devices]
        self.ends = [self._end(k, 0) for k in range(len(devices))]

    def helped(self, helper: int) -> int | None:
        """The worker that ends last, after this one has taken samples over; None: that helps neither."""
        last, now = max(range(len(self.ends)), key=self.ends.__getitem__), self.ends[helper]

        def ends(count: int) -> tuple[float, float]:
            taken = self._factors[helper] * self._devices[helper].cost(count)
            return self._end(last, count), now + taken

        there = range(1, self._counts[last])
        meet = bisect_left(there, True, key=lambda n: ends(n)[1] >= ends(n)[0]) + 1
        possible = [n for n in (meet - 1, meet) if n in there and ends(n)[0] >= now]
        best = min(possible, key=lambda n: max(ends(n)), default=0)
        if not best or max(ends(best)) >= self.ends[last]:
            return None
        self.ends[last], self.ends[helper] = ends(best)
        self._counts[last] -= best
        self._begins[helper], self._counts[helper] = now, best
        return last

    def _end(self, rank: int, fewer: int) -> float:
        return self._begins[rank] + self._factors[rank] * self._devices[rank].cost(self._counts[rank] - fewer)


def flexrr(devices: list[Device], _: float) -> Iterator[Round]:
    while True:
        shares = Shares(devices)
        done = [(end, k) for k, end in enumerate(shares.ends)]
        heapq.heapify(done)
        while done:
            now, rank = heapq.heappop(done)
            if now == shares.ends[rank] and (last := shares.helped(rank)) is not None:
                for k in (last, rank):
                    heapq.heappush(done, (shares.ends[k], k))
        yield Round(max(shares.ends), sum(d.batch for d in devices), shares.ends)


@dataclass
class Training:
    """Parameters, and what came of them so far. every: samples between two measurements of the loss."""

    objective: Objective
    lr: float  # of a global batch
    target: float
    every: int
    w: Vector = field(init=False)
    seconds: float = 0.0
    samples: int = 0
    versions: int = 0
    claimed: int = 0
    curve: list[tuple[float, int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.w = self.objective.start()
        self.curve.append((0.0, 0, self.objective.loss(self.w)))

    def claim(self, count: int) -> int:
        """The position of the next samples."""
        self.claimed += count
        return self.claimed - count

    def step(self, gradient: Vector, part: float, samples: int, seconds: float) -> bool:
        """The part of a step, at that time; whether the target is reached."""
        before = self.samples // self.every
        self.w = self.w - self.lr * part * gradient
        self.samples, self.seconds, self.versions = self.samples + samples, seconds, self.versions + 1
        if self.samples // self.every == before:
            return False
        self.curve.append((seconds, self.samples, self.objective.loss(self.w)))
        return not self.curve[-1][2] > self.target


ROUNDS: dict[str, Callable[[list[Device], float], Iterator[Round]]] = {
    "anytime": anytime,
    "coded": coded,
    "flexrr": flexrr,
}


def train(
    cluster: Scenario,
    policy: str,
    *,
    iterations: int,
    seed: int,
    seconds: float,
    objective: Objective,
    lr: Hyper,
    optimizer: str,
    target_loss: float,
    measure_every: int,
) -> Result:
    """One training, as `pyps.simulate.simulate` with the same arguments does it for a policy."""
    if optimizer != "sgd" or math.isfinite(
        min(cluster.server_bandwidth, *(w.bandwidth for w in cluster.workers))
    ):
        raise ValueError(f"{policy}: rivals are there for SGD and transfers that take no time")
    devices = [Device(worker, seed, k) for k, worker in enumerate(cluster.workers)]
    training = Training(objective, lr.lr, target_loss, measure_every)
    busy, stale, left_out = [0.0] * len(devices), Counter[int](), 0
    most, number = iterations * cluster.global_batch, float(policy.partition("=")[2] or 0)
    if policy.startswith("k-async"):
        k_async(devices, int(number), training, most, seconds, busy, stale)
    else:
        for one in islice(ROUNDS[policy.partition(":")[0]](devices, number), most):
            if training.samples >= most or training.seconds + one.seconds > seconds:
                break
            busy = [a + b for a, b in zip(busy, one.busy, strict=True)]
            left_out += one.left_out
            stale[0] += len(devices) - one.left_out
            now = training.seconds + one.seconds
            if not one.samples:
                training.seconds = now
                continue
            gradient, _ = objective.gradient(training.w, training.claim(one.samples), one.samples)
            if training.step(gradient, 1.0, one.samples, now):
                break
    return result(policy, seed, cluster, training, busy, stale, left_out)


def k_async(
    devices: list[Device],
    k: int,
    training: Training,
    most: int,
    limit: float,
    busy: list[float],
    stale: Counter[int],
) -> None:
    """Trains to the end. A step with k gradients is the part of one that their samples are."""
    total = sum(d.batch for d in devices)
    begun: list[tuple[Vector, int, int]] = [(training.w, 0, 0)] * len(devices)  # and version, first sample
    queue: list[tuple[float, int]] = []

    def begin(rank: int, now: float) -> None:
        takes = devices[rank].cost(devices[rank].batch) * devices[rank].factor()
        begun[rank] = training.w, training.versions, training.claim(devices[rank].batch)
        busy[rank] += takes
        heapq.heappush(queue, (now + takes, rank))

    for rank in range(len(devices)):
        begin(rank, 0.0)
    while training.samples < most:
        ranks, total_gradient, samples, now = [], 0.0 * training.w, 0, 0.0
        for _ in range(k):
            now, rank = heapq.heappop(queue)
            w, version, first = begun[rank]
            batch = devices[rank].batch
            total_gradient = total_gradient + batch * training.objective.gradient(w, first, batch)[0]
            samples += batch
            stale[training.versions - version] += 1
            ranks.append(rank)
        if now > limit or training.step(total_gradient / samples, samples / total, samples, now):
            return
        for rank in ranks:
            begin(rank, now)


def result(
    policy: str,
    seed: int,
    cluster: Scenario,
    training: Training,
    busy: list[float],
    stale: Counter[int],
    left_out: int,
) -> Result:
    """Return the result as a simulation's; what the rivals have not is 0 or empty."""
    seconds, samples = training.seconds, training.samples
    ranks = tuple(
        SimulatedRank(w.name, w.batch, 0, 0, 0, 0.0, 0, min(own, seconds), 0.0, max(0.0, seconds - own))
        for w, own in zip(cluster.workers, busy, strict=True)
    )
    return Result(
        policy=policy,
        seed=seed,
        seconds=seconds,
        versions=training.versions,
        rounds=training.versions,
        samples=samples,
        iteration_seconds=seconds * cluster.global_batch / samples if samples else math.nan,
        ranks=ranks,
        staleness=dict(sorted(stale.items())),
        curve=tuple(training.curve),
        loss=training.curve[-1][2],
        rejected=left_out,
        aborted=0,
        fenced=0,
        moved_bytes=0.0,
        peak_transfers=0,
        events=0,
        timeline=(),
        pushed_at=(),
    )
