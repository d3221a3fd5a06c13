"""A run in virtual time: every worker lives as a real one does, and the C core decides.

start -> pull -> compute -> push, with the transfers over links that all share. Nothing here knows a policy by
name: who waits, for whom and how long comes from the same steps that a store's workers take.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any

from pyps.errors import Busy, Ended, Fenced, PushRejected, PypsError
from pyps.native.core import Core
from pyps.native.values import Advice, Config, Decision, EventKind, MemberState, Optimizer
from pyps.simulate.clock import Clock, Life
from pyps.simulate.devices import Device
from pyps.simulate.metrics import COMPUTE, PULL, PUSH, WAIT, Tally
from pyps.simulate.network import Class, Network
from pyps.simulate.pipelined import Held, PipelinedWorker
from pyps.simulate.problem import Model, Vector
from pyps.simulate.scenario import Mishap, Scenario
from pyps.store.policies import Policy, register_policy

WAIT_VERDICT = 2
DOWN, UP = range(2)
AREAS = 2
DETECTION_NANOSECONDS = 50_000_000  # how long a death goes unnoticed: a waiter's slice
WATCHES_A_TIMEOUT = 4
STUCK_WATCHES = 40

Step = Generator[int | None, None, Any]


class Stuck(PypsError):
    """Everybody waits and nothing will ever happen: a policy's fault."""


class Engine:
    """One policy on one scenario; `work` runs it to its end. `pipeline`: workers are pipelined."""

    def __init__(
        self,
        scenario: Scenario,
        policy: Policy,
        model: Model,
        tally: Tally,
        samples: int,
        seed: int,
        pipeline: bool = False,
    ) -> None:
        self.scenario, self.policy, self.model, self.tally = scenario, policy, model, tally
        self.workers, self.needs = scenario.workers, policy.needs
        config = Config(
            (), (), scenario.batches, 1, Optimizer.SGD, policy.number, policy.round_timeout_seconds,
            samples, 0, len(scenario.workers), 0, AREAS, policy.params(),
        )  # fmt: skip
        register_policy(policy)
        self.core = Core(config)
        self.devices = [
            Device(w.cost, w.jitter, w.slowdowns, seed, k, w.recorded) for k, w in enumerate(scenario.workers)
        ]
        self._kinds, networks = _networks(scenario)
        self.clock = Clock((1 + pipeline) * len(self.workers), networks)
        self._pipeline = pipeline
        self.version = self.rounds = self.trained = 0
        self.finished_at = 1
        self._left = len(self.workers)  # lives that have not ended
        self._stir = self._due = self._ticks_at = 0
        self._staging_buffers = [0] * len(self.workers)  # bit by area: staged in the open round
        self._staged: dict[tuple[int, int], tuple[Vector, Vector] | None] = {}
        self._watches = self._watched = 0
        self._sizes = (scenario.down_bytes, scenario.up_bytes)
        self._warm_at = scenario.global_batch  # samples; all pull at the very beginning
        self._measure_at = self._measure_every = 0
        self._target: float | None = None
        self._reached = False

    def measure(self, every: int, target: float | None) -> None:
        """Note the loss every so many samples; stop when it is as low as `target`."""
        self._measure_every, self._target = every, target
        self.tally.curve.append((0.0, 0, self.model.loss()))
        self._measure_at = every

    def work(self, seconds: float = math.inf) -> None:
        """Until every worker has ended, or for so long. Raises Stuck."""
        clock = self.clock
        for k in range(len(self.workers)):
            clock.begin(k, self._worker(k), 1)
        for mishap in self.scenario.mishaps:
            clock.call(_ns(mishap.at), lambda m=mishap: self._befall(m))  # type: ignore[misc]
        self._watch()
        end = _ns(seconds) if math.isfinite(seconds) else None
        while self._left and clock.step():
            if self._reached or (end is not None and clock.now >= end):
                break

    # One worker.

    def _worker(self, k: int) -> Life:
        return PipelinedWorker(self, k).life() if self._pipeline else self._life(k)

    def _life(self, k: int) -> Life:
        yield from self.join(k)
        pulled: Held | None = None
        while True:
            try:
                first, count = yield from self.start(k)
                claimed = self.clock.now
                if pulled is None:
                    pulled = yield from self.pull(k, k)
                done = yield from self.compute(k, count, checks=self.needs.checks_between_micro_batches)
                if done:
                    pulled = yield from self.push(k, k, first, done, pulled, claimed)
                else:
                    pulled = None
                    self.tally.aborted += 1
            except Ended:
                break
            except PushRejected:
                self.rejected()
                pulled = None
            except Fenced:
                self.rejoin(k)
                pulled = None
        self.leave(k)

    def join(self, k: int) -> Step:
        """A predecessor's gradient may be in the open round still."""
        while True:
            try:
                self._note(self.core.step(EventKind.JOIN, k, self.clock.now, rank=k))
                if most := self.workers[k].most:
                    self._note(self.core.step(EventKind.MAX_SAMPLES, k, self.clock.now, next=most))
                return
            except Busy:
                self.clock.park(k, 0, 0)
                yield None

    def leave(self, k: int) -> None:
        self._note(self.core.step(EventKind.LEAVE, k, self.clock.now, state=int(MemberState.LEFT)))
        self._left -= 1

    def rejoin(self, k: int) -> None:
        self.tally.fenced += 1
        self._note(self.core.step(EventKind.REJOIN, k, self.clock.now))

    def rejected(self) -> None:
        self._note(self.core.last)
        self.tally.rejected += 1

    def start_ahead(self, k: int) -> tuple[int, int] | None:
        """The samples of the step after the one under way; None: nothing now."""
        d = self.core.step(EventKind.START_AHEAD, k, self.clock.now)
        self._note(d)
        return (d.first, d.count) if d.count else None

    def start(self, k: int) -> Generator[int | None, None, tuple[int, int]]:
        began = self.clock.now
        while True:
            d = self.core.step(EventKind.START, k, self.clock.now)
            self._note(d)
            if d.verdict != WAIT_VERDICT:
                break
            self.clock.park(k, d.until, d.at)
            yield None
            d = self.core.last
        first, count = d.first, d.count
        self.tally.add(k, WAIT, began, self.clock.now, self.version)
        return first, count

    def pull(self, k: int, lane: int) -> Generator[int | None, None, Held]:
        """lane: the life that waits for transfers, the worker's own or that of its carrier."""
        began, w, version = self.clock.now, self.model.w, self.version
        yield from self._transfer(k, lane, DOWN)
        self._note(self.core.pull(k, self.clock.now, version))
        self.tally.add(lane, PULL, began, self.clock.now, version)
        return w, version

    def compute(self, k: int, count: int, *, checks: bool) -> Generator[int | None, None, int]:
        """The samples whose gradient is there; 0: given up."""
        began, device, done = self.clock.now, self.devices[k], 0
        most = self.workers[k].micro_batch or count
        while done < count:
            part = min(most, count - done)
            if done and checks:
                d = self.core.step(EventKind.CHECK, k, self.clock.now, done=done, next=part)
                self._note(d)
                if d.advice == Advice.ABORT:
                    done = 0
                if d.advice != Advice.CONTINUE:
                    break
            yield self.clock.now + _ns(device.seconds(part, self.clock.now * 1e-9))
            done += part
        self.tally.add(k, COMPUTE, began, self.clock.now, self.version)
        return done

    def push(
        self, k: int, lane: int, first: int, done: int, pulled: Held, claimed: int, base_version: int = 0
    ) -> Generator[int | None, None, Held | None]:
        """What a turn's pull brought; None: pull when the next step begins. `claimed`: when it began."""
        clock, began = self.clock, self.clock.now
        compute_nanoseconds = clock.now - claimed
        learnt = self.model.gradient(pulled[0], first, done)
        norm = float(learnt[0] @ learnt[0]) if learnt else 0.0
        while self.needs.uses_turns:
            d = self.core.step(EventKind.GATE, k, clock.now)
            self._note(d)
            if d.verdict != WAIT_VERDICT:
                break
            clock.park(lane, d.until, d.at)
            yield None
        while self._staging_buffers[k] == (1 << AREAS) - 1:  # both wait in a round
            clock.park(lane, 0, 0)
            yield None
        staging = 1 if self._staging_buffers[k] & 1 else 0
        self.tally.add(lane, WAIT, began, clock.now, self.version)
        began = clock.now
        yield from self._transfer(k, lane, UP)
        self.tally.add(lane, PUSH, began, clock.now, self.version)
        began = clock.now
        while True:
            self._staged[k, staging] = (learnt[0], pulled[0]) if learnt else None
            self._staging_buffers[k] |= 1 << staging
            try:
                d = self.core.push(k, clock.now, staging, done, compute_nanoseconds, norm, base_version)
            except PypsError:
                self._forget(k, staging)
                raise
            if d.verdict != WAIT_VERDICT:
                break
            self._forget(k, staging)
            self._note(d)
            clock.park(lane, d.until, d.at)
            yield None
        until = d.until
        self._admitted(k, staging, done, d)
        while until > clock.progress:  # the round is still open, whatever else has stirred
            clock.park(lane, until, 0)
            yield None
        self.tally.add(lane, WAIT, began, clock.now, self.version)
        return (yield from self.pull(k, lane)) if self.needs.uses_turns else None

    def _transfer(self, k: int, lane: int, network: int) -> Step:
        worker, size = self.workers[k], self._sizes[network]
        if worker.latency:
            yield self.clock.now + _ns(worker.latency)
        self.tally.moved_bytes += size
        if size and self._kinds[k] >= 0:
            self.clock.transfer(lane, network, self._kinds[k], size)
            yield None

    # What follows from decisions.

    def _admitted(self, k: int, staging: int, samples: int, d: Decision) -> None:
        self.tally.staleness[d.staleness] += 1
        if self.tally.keep_slices:
            self.tally.pushed_at.append((k, self.clock.now * 1e-9))
        self.trained += samples
        if 0 < self._warm_at <= self.trained:
            self._warm_at = 0
            for network in self.clock.networks:
                network.peak = network.concurrent
        self.finished_at = self.clock.now
        if d.ticket and d.round == self.rounds:  # a version of its own
            learnt = self._staged[k, staging]
            if learnt is not None:
                self.model.step([(*learnt, samples, d.scale)])
            self._forget(k, staging)
        self._note(d)
        if self._measure_every and self.trained >= self._measure_at:
            self._measure_at += self._measure_every
            loss = self.model.loss()
            self.tally.curve.append((self.clock.now * 1e-9, self.trained, loss))
            self._reached = self._target is not None and loss <= self._target

    def _forget(self, k: int, staging: int) -> None:
        self._staging_buffers[k] &= ~(1 << staging)
        self._staged.pop((k, staging), None)

    def _note(self, d: Decision) -> None:
        """Rounds that have closed, those who may look again, and what is due."""
        self.tally.events += 1
        progress, wake_epoch, due, closed = d.progress, d.wake_epoch, d.next_deadline, d.round != self.rounds
        version = d.version
        if closed:
            self.rounds = d.round
            self._close_round(version > self.version)
        self.version = version
        if progress != self.clock.progress:
            self.clock.wake(progress)
        if wake_epoch != self._stir:
            self._stir = wake_epoch
            if self.clock.parked:
                self.clock.wake_all()
        self._due = due
        if due and not 0 < self._ticks_at <= due:
            self._ticks_at = due
            self.clock.call(due, self._tick)

    def _close_round(self, stepped: bool) -> None:
        if not stepped:
            return
        sources = []
        for slot, staging, samples, scale in self.core.sources():
            learnt = self._staged[slot, staging]
            if learnt is not None:
                sources.append((*learnt, samples, scale))
            self._forget(slot, staging)
        if sources:
            self.model.step(sources)

    # Time passes, and things happen.

    def _tick(self) -> None:
        """What was due may be later by now: then so is the tick."""
        self._ticks_at = 0
        if self.clock.now >= self._due:
            self._note(self.core.step(EventKind.TICK, 0, self.clock.now, waited=0))
        elif self._due:
            self._ticks_at = self._due
            self.clock.call(self._due, self._tick)

    def _watch(self) -> None:
        """What waiting workers do in a store: after a round timeout, fence who holds them up."""
        clock, timeout = self.clock, _ns(self.policy.round_timeout_seconds)
        if clock.parked:
            waited = clock.now - min(since for since, _ in clock.parked.values())
            if waited >= timeout:
                self._note(self.core.step(EventKind.TICK, 0, clock.now, waited=waited))
        self._watches = self._watches + 1 if self._watched == self.tally.events else 0
        self._watched = self.tally.events
        if self._watches > STUCK_WATCHES and len(clock.parked) >= self._left:
            raise Stuck(
                f"{self.policy}: {len(clock.parked)} workers wait for ever at {clock.now * 1e-9:.3f} s"
            )
        clock.call(clock.now + max(1, timeout // WATCHES_A_TIMEOUT), self._watch)

    def _befall(self, mishap: Mishap) -> None:
        k, now = mishap.rank, self.clock.now
        lives = (k, k + len(self.workers)) if self._pipeline else (k,)
        if mishap.kind == "stop":
            for life in lives:
                self.clock.stopped_until[life] = now + _ns(mishap.seconds)
            return
        state = MemberState.DEAD if mishap.kind == "kill" else MemberState.LEFT
        noticed = now + (DETECTION_NANOSECONDS if state is MemberState.DEAD else 0)
        for life in lives:
            self.clock.end(life)
        self._left -= 1
        self.clock.call(noticed, lambda: self._bury(k, state))
        if mishap.seconds:
            self._left += 1
            begins = max(now + _ns(mishap.seconds), noticed + 1)
            self.clock.call(begins, lambda: self.clock.begin(k, self._worker(k), begins))

    def _bury(self, k: int, state: MemberState) -> None:
        self._note(self.core.step(EventKind.LEAVE, k, self.clock.now, state=int(state)))


def _networks(scenario: Scenario) -> tuple[list[int], tuple[Network, Network]]:
    """Each worker's class of links (-1: none that takes time), and the two directions."""
    keys: dict[tuple[str, float], int] = {}
    kinds = []
    for w in scenario.workers:
        key = (w.host, scenario.hosts[w.host]) if w.host else ("", w.bandwidth)
        unlimited = math.isinf(scenario.server_bandwidth) and math.isinf(key[1])
        kinds.append(-1 if unlimited else keys.setdefault(key, len(keys)))
    down, up = (
        Network(scenario.server_bandwidth, [Class(bandwidth, bool(host)) for host, bandwidth in keys])
        for _ in range(2)
    )
    return kinds, (down, up)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
