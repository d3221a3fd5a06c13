"""Run one policy in virtual time: workers behave as real ones do, and the C core decides.

start -> pull -> compute -> push, with transfers over shared links. Nothing here knows a policy by name: the
core decides which worker waits, and for how long, with the code that serves a real store.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence

from msgspec.structs import replace

from pyps.errors import Busy, PypsError
from pyps.native.core import Core
from pyps.native.decisions import Advice, Decision, EventKind
from pyps.native.status import MemberState
from pyps.native.values import STAGING_BUFFERS, Config, Optimizer
from pyps.simulate.clock import Clock, Process
from pyps.simulate.faults import Fault
from pyps.simulate.metrics import PULL, PUSH, WAIT, Metrics, SimulatedModeChange
from pyps.simulate.optimizer import Vector
from pyps.simulate.problem import Model
from pyps.simulate.scenario import DeviceModel, Scenario, byte_shares, networks_of
from pyps.simulate.step import Parameters, Pipelines, SimulatedStep, StepProcess, Turn
from pyps.solver.links import WIRE_BYTES
from pyps.solver.online.mode import ModeBalancer, ModeChange
from pyps.step.machine import StepRules
from pyps.step.own import follows_own
from pyps.store.policies import Policy, register_policy

WAIT_VERDICT = 2
DOWN, UP = range(2)
CHECKS_PER_TIMEOUT = 4
DEADLOCK_CHECKS = 40
MOST_FENCED = 100  # a worker, while no step ends

MakeWorker = Callable[["Engine", int, StepRules], Process]  # the engine, the worker's number, its rules


class Deadlock(PypsError):
    """The run does not end: no event will ever resume a worker, or they fence each other for ever."""


class Engine:
    """One policy on one scenario; `work` runs it to its end.

    scenario, policy: what is simulated. model: the parameters. metrics: filled while it runs. samples: to
    train in all. seed: of the jitter. make_worker: what a worker does (pyps.simulate.worker). pipelines:
    how many of its steps are under way.
    """

    def __init__(
        self,
        scenario: Scenario,
        policy: Policy,
        model: Model,
        metrics: Metrics,
        samples: int,
        seed: int,
        make_worker: MakeWorker,
        pipelines: Pipelines,
    ) -> None:
        self.scenario, self.policy, self.model, self.metrics = scenario, policy, model, metrics
        self.workers, self.needs = scenario.workers, policy.needs
        self.depths, self.choices = pipelines
        self._deepest = most = pipelines.deepest
        self._staging_count = max(STAGING_BUFFERS, most)
        register_policy(policy)
        self.core = Core(_config(scenario, policy, samples, self._staging_count))
        if scenario.schedule is not None and self.needs.uses_turns:
            self.core.set_schedule(0, scenario.schedule)
        self.devices = [
            DeviceModel(w.cost, w.jitter, w.slowdowns, seed, k, w.recorded)
            for k, w in enumerate(scenario.workers)
        ]
        self._make_worker = make_worker
        self._kinds, networks = networks_of(scenario)
        self.clock = Clock(most * len(self.workers), networks)
        self.version = self.rounds = self.trained = 0
        self.finished_at = 1
        self._fenced_since = 0  # workers, since then
        self._left = len(self.workers)  # workers that have not ended, or whose successors will come
        self._present = dict.fromkeys(range(len(self.workers)), 0)  # since when
        self._wake_epoch = self._next_deadline = self._tick_at = 0
        self._staging_buffers = [0] * len(self.workers)  # bit k: staging buffer k waits in the open round
        self._staged: dict[tuple[int, int], Vector | None] = {}
        self.ending = False  # a worker has found no samples
        stops = any(fault.kind == "stop" for fault in scenario.faults)
        self.skips_parts = not stops and not metrics.keep_timeline  # micro-batches need no event each
        self._own: dict[int, Vector] = {}  # each worker's gradient that was applied last
        self._idle_checks = self._events_checked = 0
        self._sizes = (scenario.down_bytes, scenario.up_bytes)
        self._shares = [(w.down_share, w.up_share) for w in self.workers]
        self._warm_at = scenario.global_batch  # samples: the peak counts after a first step of all at once
        self._measure_at = self._measure_every = 0
        self._target: float | None = None
        self._reached = False

    def measure(self, every: int, target: float | None) -> None:
        """Record the loss every `every` samples; stop when it is at most `target`."""
        self._measure_every, self._target = every, target
        self.metrics.curve.append((0.0, 0, self.model.loss()))
        self._measure_at = every

    def work(self, seconds: float = math.inf) -> None:
        """Run until every worker has ended, or for `seconds`. Raises Deadlock."""
        clock = self.clock
        for k in range(len(self.workers)):
            clock.begin(k, self._process(k), 1)
        for fault in self.scenario.faults:
            clock.call(_ns(fault.at), lambda f=fault: self._inject(f))  # type: ignore[misc]
        for k, worker in enumerate(self.workers):
            for edge in {at for slow in worker.link_slowdowns for at in (slow.begin, slow.end)}:
                if math.isfinite(edge):
                    clock.call(_ns(edge), lambda k=k: self._set_bandwidth(k))  # type: ignore[misc]
        self._check_round_timeout()
        end = _ns(seconds) if math.isfinite(seconds) else None
        while self._left and clock.step():
            if self._reached or (end is not None and clock.now >= end):
                break
        for k in list(self._present):
            self._go(k)

    # One worker.

    def _set_bandwidth(self, k: int) -> None:
        """Worker k's link becomes slower or recovers now."""
        worker, now = self.workers[k], self.clock.now * 1e-9
        factors = [s.factor for s in worker.link_slowdowns if s.begin <= now < s.end]
        self.clock.set_bandwidth(self._kinds[k], worker.bandwidth / math.prod(factors))

    def mode_balancer(self, k: int) -> ModeBalancer | None:
        """Return what decides worker k's mode while it runs; None: it stays."""
        worker, size = self.workers[k], self.scenario.up_bytes
        if self.choices is None or self._kinds[k] < 0 or not size:
            return None
        mode = replace(worker.mode, depth=self.depths[k])
        return ModeBalancer(self.choices, mode, round(size / WIRE_BYTES[32]), worker.latency)

    def change_mode(self, k: int, change: ModeChange) -> None:
        """Worker k's transfers are in another mode from the next one on."""
        push, pull = byte_shares(change.after)
        self._shares[k] = pull, push
        self.metrics.mode_changes.append(SimulatedModeChange(self.clock.now * 1e-9, k, change))

    def _process(self, k: int) -> Process:
        scenario = self.scenario
        rules = StepRules(self.depths[k], self.needs, len(self.workers), scenario.local, scenario.merges)
        return self._make_worker(self, k, rules)

    def join(self, k: int) -> StepProcess:
        """Join as rank k. Waits while a predecessor's gradient is still in the open round."""
        self._forget(k)
        while True:
            try:
                self._note(self.core.step(EventKind.JOIN, k, self.clock.now, rank=k))
                if (limit := self.workers[k].max_samples) and not self.scenario.local:
                    self._note(self.core.step(EventKind.MAX_SAMPLES, k, self.clock.now, next=limit))
                return
            except Busy:
                self.clock.park(k, 0, 0)
                yield None

    def leave(self, k: int) -> None:
        self._note(self.core.step(EventKind.LEAVE, k, self.clock.now, state=int(MemberState.LEFT)))
        self._left -= 1
        self._go(k)
        self.ending = True

    def replan(self, batches: Sequence[int]) -> None:
        """Another split, by rank, from each worker's next claim on."""
        self._note(self.core.replan(self.clock.now, batches))

    @property
    def present(self) -> frozenset[int]:
        """The ranks that have a worker."""
        return frozenset(self._present)

    def _go(self, k: int) -> None:
        """A worker is not there from now on."""
        self.metrics.present[k] += self.clock.now - self._present.pop(k)

    def rejoin(self, k: int) -> None:
        self._forget(k)
        self.metrics.fenced += 1
        self._fenced_since += 1
        if self._fenced_since > MOST_FENCED * len(self.workers):
            since, limit = self.finished_at * 1e-9, self.policy.round_timeout_seconds
            why = (
                f"no step has ended since {since:.3f} s: they take longer than {limit:g} s, the round timeout"
            )
            raise Deadlock(f"{self.policy}: {why}")
        self._note(self.core.step(EventKind.REJOIN, k, self.clock.now))

    def _forget(self, k: int) -> None:
        """A worker begins anew: what it computed and did not push is gone."""
        self._own.pop(k, None)
        self.model.forget(k)

    def rejected(self, k: int) -> None:
        self._own.pop(k, None)
        self._note(self.core.last)
        self.metrics.rejected += 1

    def start_ahead(self, k: int) -> tuple[int, int] | None:
        """Claim samples for the step after the current one: (first, count); None: none now."""
        d = self.core.step(EventKind.START_AHEAD, k, self.clock.now)
        self._note(d)
        return (d.first, d.count) if d.count else None

    def start(self, k: int) -> Generator[int | None, None, tuple[int, int, int]]:
        """Claim samples: first, count, and the store's version."""
        began = self.clock.now
        while True:
            d = self.core.step(EventKind.START, k, self.clock.now)
            self._note(d)
            if d.verdict != WAIT_VERDICT:
                break
            self.clock.park(k, d.until, d.at)
            yield None
        first, count = d.first, d.count
        self.metrics.add(k, WAIT, began, self.clock.now, self.version)
        return first, count, self.version

    def check(self, k: int, done: int, following: int) -> Advice:
        """Return what the policy says between two micro-batches."""
        d = self.core.step(EventKind.CHECK, k, self.clock.now, done=done, next=following)
        self._note(d)
        return Advice(d.advice)

    def gave_up(self, k: int, *, counts: bool) -> None:
        """A step was given up; `counts`: by the policy's advice."""
        self.model.forget(k)
        self.metrics.aborted += counts

    def pull_at_store(self, k: int) -> Parameters:
        """The parameters as the store gives them to worker k now, with their version."""
        w, version = self._ahead(k), self.version
        self._note(self.core.pull(k, self.clock.now, version))
        return w, version

    def pull(self, k: int, channel: int) -> Generator[int | None, None, Parameters]:
        """Pull; `channel` is the process that transfers: the worker's own, or its transfer process."""
        pulled = self.pull_at_store(k)
        yield from self.travel_down(k, channel, (), pulled[1])
        return pulled

    def _ahead(self, k: int) -> Vector:
        """The parameters as worker k pulls them."""
        return self.model.ahead(self.core.lookahead(k), self._own.get(k), rounds=self.needs.waits_for_rounds)

    def follows_own(self, rules: StepRules) -> bool:
        """Return whether these workers go on along their own gradients under way."""
        return follows_own(rules, self.model.optimizer.kind, lookahead=self.policy.looks_ahead)

    def own(self, k: int, gradient: Vector, samples: int) -> Vector:
        """Return what worker k goes on along of a gradient of so many samples that it has sent."""
        return self.model.own(k, gradient, samples / self.scenario.global_batch)

    def travel_up(self, k: int, channel: int, turn: Iterable[int | None] = ()) -> StepProcess:
        """A gradient's way to the store; it waits for its `turn` on the wire."""
        began = self.clock.now
        yield from self._transfer(k, channel, UP, turn)
        self.metrics.add(channel, PUSH, began, self.clock.now, self.version)

    def travel_down(self, k: int, channel: int, turn: Iterable[int | None], version: int) -> StepProcess:
        """The way of a version's parameters to the worker."""
        began = self.clock.now
        yield from self._transfer(k, channel, DOWN, turn)
        self.metrics.add(channel, PULL, began, self.clock.now, version)

    def gradient(self, k: int, w: Vector, first: int, count: int) -> tuple[Vector, float] | None:
        """Return what worker k pushes that has computed these samples from these parameters, and the loss."""
        return self.model.gradient(w, first, count, k, self.workers[k].micro_batch)

    def compute_nanoseconds(self, k: int, samples: int, begins: int, later: bool = False) -> int:
        """Return what a micro-batch takes from then. later: a step's first has the optimizer's time."""
        seconds, worker = self.devices[k].seconds(samples, begins * 1e-9), self.workers[k]
        if later and worker.optimizer_seconds:
            seconds *= max(0.0, 1 - worker.optimizer_seconds / worker.cost(samples))
        return _ns(seconds)

    def sends_in_turn(self, k: int) -> bool:
        """Return whether worker k's gradients wait for their turn before they travel: over a link they do."""
        return self.needs.uses_turns and self._kinds[k] >= 0

    def await_turn(self, k: int, channel: int) -> Generator[int | None, None, Turn]:
        """Wait until worker k's gradient may be sent."""
        began = self.clock.now
        while True:
            d = self.core.step(EventKind.GATE, k, self.clock.now)
            self._note(d)
            if d.verdict != WAIT_VERDICT:
                break
            self.clock.park(channel, d.until, d.at)
            yield None
        self.metrics.add(channel, WAIT, began, self.clock.now, self.version)
        return Turn(self.clock.now, self.clock.now - began)

    def push(self, k: int, channel: int, step: SimulatedStep, compute_nanoseconds: int) -> StepProcess:
        """Push a gradient that has arrived, and wait for its turn or its round, as the store does.

        k: the worker. channel: the process that transfers. compute_nanoseconds: as in PushRequest.
        """
        clock, began, gradient = self.clock, self.clock.now, step.gradient
        while self._staging_buffers[k] == (1 << self._staging_count) - 1:  # all wait in a round
            clock.park(channel, 0, 0)
            yield None
        staging = (~self._staging_buffers[k] & self._staging_buffers[k] + 1).bit_length() - 1  # the first
        norm = float(gradient[0] @ gradient[0]) if gradient and self.needs.needs_grad_norm else 0.0
        if gradient and self.core.looks_at_gradients:
            self.core.see_gradient(gradient[0])
        opened, waited = step.turn or (0, 0)
        while True:
            self._staged[k, staging] = gradient[0] if gradient else None
            self._staging_buffers[k] |= 1 << staging
            try:
                sent = clock.now - opened if opened else 0
                waits = waited + clock.now - began
                more = compute_nanoseconds, norm, 1 + step.version, waits, sent, step.nanoseconds
                d = self.core.push(k, clock.now, staging, step.done, *more)
            except PypsError:
                self._release(k, staging)
                raise
            if d.verdict != WAIT_VERDICT:
                break
            self._release(k, staging)
            self._note(d)
            opened = 0  # the turn passed while the gradient travelled
            clock.park(channel, d.until, d.at)
            yield None
        until = d.until
        self._admitted(k, staging, step, d)
        while until > clock.progress:  # the round is still open
            clock.park(channel, until, 0)
            yield None
        self.metrics.add(channel, WAIT, began, clock.now, self.version)
        return d

    def _transfer(self, k: int, channel: int, network: int, turn: Iterable[int | None]) -> StepProcess:
        worker = self.workers[k]
        size = self._sizes[network] * self._shares[k][network]
        if worker.latency:
            yield self.clock.now + _ns(worker.latency)
        yield from turn
        self.metrics.moved_bytes += size
        if size and self._kinds[k] >= 0:
            self.clock.transfer(channel, network, self._kinds[k], size)
            yield None

    # After a decision.

    def _admitted(self, k: int, staging: int, step: SimulatedStep, d: Decision) -> None:
        samples = step.done
        self.metrics.count(k, step.first, samples, step.nanoseconds)
        self.metrics.staleness[d.staleness] += 1
        if self.metrics.keep_timeline:
            self.metrics.pushed_at.append((k, self.clock.now * 1e-9))
        self.trained += samples
        if 0 < self._warm_at <= self.trained:
            self._warm_at = 0
            for network in self.clock.networks:
                network.peak = network.concurrent
        self.finished_at, self._fenced_since = self.clock.now, 0
        if d.ticket and d.round == self.rounds:  # a version of its own
            gradient = self._staged[k, staging]
            if gradient is not None:
                self.model.step([(gradient, samples, d.scale)], d.part)
                self._own[k] = d.scale * gradient
            self._release(k, staging)
        self._note(d)
        if self._measure_every and self.trained >= self._measure_at:
            self._measure_at += self._measure_every
            loss = self.model.loss()
            self.metrics.curve.append((self.clock.now * 1e-9, self.trained, loss))
            self._reached = self._target is not None and loss <= self._target

    def _release(self, k: int, staging: int) -> None:
        self._staging_buffers[k] &= ~(1 << staging)
        self._staged.pop((k, staging), None)

    def _note(self, d: Decision) -> None:
        """Act on a decision: close rounds, resume workers, and schedule the next deadline."""
        self.metrics.events += 1
        progress, wake_epoch, due, closed = d.progress, d.wake_epoch, d.next_deadline, d.round != self.rounds
        version = d.version
        if closed:
            self.rounds = d.round
            self._close_round(version > self.version, d.part)
        self.version = version
        if progress != self.clock.progress:
            self.clock.wake(progress)
        if wake_epoch != self._wake_epoch:
            self._wake_epoch = wake_epoch
            if self.clock.parked:
                self.clock.wake_all()
        self._next_deadline = due
        if due and not 0 < self._tick_at <= due:
            self._tick_at = due
            self.clock.call(due, self._tick)

    def _close_round(self, stepped: bool, part: float) -> None:
        if not stepped:
            return
        sources = []
        for slot, staging, samples, scale in self.core.sources():
            gradient = self._staged[slot, staging]
            if gradient is not None:
                sources.append((gradient, samples, scale))
            self._release(slot, staging)
        if sources:
            self.model.step(sources, part)

    # Deadlines, timeouts and faults.

    def _tick(self) -> None:
        """Tick the core at its deadline; if the deadline has moved, tick then."""
        self._tick_at = 0
        if self.clock.now >= self._next_deadline:
            self._note(self.core.step(EventKind.TICK, 0, self.clock.now, waited=0))
        elif self._next_deadline:
            self._tick_at = self._next_deadline
            self.clock.call(self._next_deadline, self._tick)

    def _check_round_timeout(self) -> None:
        """After a round timeout, fence the workers that hold the others up, as in a real store."""
        clock, timeout = self.clock, _ns(self.policy.round_timeout_seconds)
        due = 0
        if clock.parked:
            due = min(since for since, _ in clock.parked.values()) + timeout
            if (waited := clock.now - due + timeout) >= timeout:
                self._note(self.core.step(EventKind.TICK, 0, clock.now, waited=waited))
        self._idle_checks = self._idle_checks + 1 if self._events_checked == self.metrics.events else 0
        self._events_checked = self.metrics.events
        if self._idle_checks > DEADLOCK_CHECKS and len(clock.parked) >= self._left:
            raise Deadlock(
                f"{self.policy}: all {len(clock.parked)} workers wait for ever at {clock.now * 1e-9:.3f} s"
            )
        # Nothing changes before the next event but that a wait becomes too long.
        interval = max(1, timeout // CHECKS_PER_TIMEOUT)
        ahead = (min(due, clock.next_at) if due > clock.now else clock.next_at) - clock.now
        clock.call(clock.now + interval * max(1, -(-ahead // interval)), self._check_round_timeout)

    def _inject(self, fault: Fault) -> None:
        k, now = fault.rank, self.clock.now
        if k not in self._present:
            return
        processes = range(k, self._deepest * len(self.workers), len(self.workers))
        if fault.kind == "stop":
            for process in processes:
                self.clock.stopped_until[process] = now + _ns(fault.seconds)
            return
        state = MemberState.DEAD if fault.kind == "kill" else MemberState.LEFT
        noticed = now + (_ns(self.scenario.noticed) if state is MemberState.DEAD else 0)
        for process in processes:
            self.clock.end(process)
        self._go(k)
        self.clock.call(noticed, lambda: self._leave_as(k, state))
        if fault.seconds:
            begins = max(now + _ns(fault.seconds), noticed + 1)
            self.clock.call(begins, lambda: self._succeed(k, begins))
        else:
            self._left -= 1

    def _succeed(self, k: int, begins: int) -> None:
        self._present[k] = begins
        self.clock.begin(k, self._process(k), begins)

    def _leave_as(self, k: int, state: MemberState) -> None:
        self._note(self.core.step(EventKind.LEAVE, k, self.clock.now, state=int(state)))


def _config(scenario: Scenario, policy: Policy, samples: int, staging_buffers: int) -> Config:
    return Config(
        tensors=(),
        initial=(),
        batches=scenario.batches,
        groups=1,
        optimizer=Optimizer.SGD,
        policy=policy.number,
        round_timeout_seconds=policy.round_timeout_seconds,
        samples=samples,
        chunk_params=0,
        max_participants=len(scenario.workers),
        snapshot_spares=0,
        staging_buffers=staging_buffers,
        policy_params=policy.params(),
    )


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
