"""A worker in virtual time: the actions of its step machine (pyps.step.machine) as processes of the clock.

One process computes; with a pipeline of depth d, up to d - 1 others each make a transfer. These travel at
once, but use the link, each way, and the store one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pyps.errors import Ended, Fenced, PushRejected
from pyps.native.transfer import Ask, Transferred
from pyps.simulate.clock import Process
from pyps.simulate.engine import Engine
from pyps.simulate.metrics import COMPUTE, NANOSECOND, WAIT
from pyps.simulate.optimizer import Vector
from pyps.simulate.step import Parameters, SimulatedStep, StepProcess
from pyps.solver.online.mode import TimedStep
from pyps.step import events
from pyps.step.machine import StepMachine, StepRules, even_steps, next_part
from pyps.step.own import UnderWay
from pyps.step.transfer import Transfers, Verb

SampleRange = tuple[int, int]  # first, count
UP, STORE, DOWN = range(3)  # what transfers use in turn


class Back(NamedTuple):
    """Hold what came back of a transfer. waited: at the store. way: for travels both ways; back: of these,
    the parameters'.
    """

    done: Transferred
    pulled: Parameters | None
    waited: int
    way: int
    back: int


@dataclass
class Queue:
    """Transfers that use one thing after the other: those that have, and who waits."""

    passed: int = 0
    waiting: dict[int, int] = field(default_factory=dict)  # transfer -> its process


class SimulatedWorker:
    """Worker k of an engine with N workers: process k computes, k + N, k + 2 N ... transfer in turn."""

    def __init__(self, engine: Engine, k: int, rules: StepRules) -> None:
        self._engine, self._k, self._clock = engine, k, engine.clock
        self._machine, self._transfers = StepMachine(rules), Transfers()
        self._rules = rules
        self._claims: deque[SampleRange] = deque()  # of the next steps
        self._claimed = 0  # when the last of them was made by this process
        self._step: SimulatedStep | None = None
        self._pulled: Parameters | None = None  # the newest in the model
        self._arrived: Parameters | None = None  # the newest that came back
        self._ways: deque[Vector] = deque()  # pseudo-gradients under way, which these do not have
        self._own: UnderWay[Vector] | None = UnderWay() if engine.follows_own(rules) else None
        self._sent: deque[tuple[SimulatedStep, Ask]] = deque()
        self._results: deque[Back] = deque()  # of transfers that have ended
        self._count = 0  # transfers that began
        self._queues = (Queue(), Queue(), Queue())
        self._waiting = False
        self._modes = engine.mode_balancer(k)
        self._lanes = max(rules.depth, engine.choices.depths[1] if engine.choices else 1) - 1

    def process(self) -> StepProcess:
        """The compute process, from join to leave."""
        yield from self._engine.join(self._k)
        event: events.Event = events.Wanted()
        while not isinstance(action := self._machine.receive(event), events.End):
            try:
                event = yield from self._do(action)
            except Ended:
                event = events.RanOut()
            except Fenced:
                event = events.WasFenced()
        self._engine.leave(self._k)

    def _do(self, action: events.Action) -> Generator[int | None, None, events.Event]:
        """Carry out one action."""
        match action:
            case events.ClaimNext():
                return (yield from self._claim(action.ahead))
            case events.Pull():
                return (yield from self._pull(merges=action.merges))
            case events.Check():
                return events.Advised(self._engine.check(self._k, action.done, action.following))
            case events.Compute():
                return (yield from self._begin())
            case events.Continue():
                return (yield from self._compute())
            case events.Finish():
                return self._computed()
            case events.Abort():
                self._engine.gave_up(self._k, counts=not action.fenced)
                return events.Wanted()
            case events.Send():
                return self._send(action.ask)
            case events.Take():
                return (yield from self._take(waits=action.waits))
            case events.Load():
                return self._load(merges=action.merges)
            case events.Rejoin():
                return self._rejoin()
            case events.Return():
                self._engine.metrics.rejected += action.dropped  # the store took the step's samples back
                return events.Wanted()
        raise AssertionError(action)

    def _claim(self, ahead: int) -> Generator[int | None, None, events.Event]:
        self._transfers.begin_again()
        first, count, version = yield from self._engine.start(self._k)
        self._claims.append((first, count))
        while len(self._claims) <= ahead and (claim := self._engine.start_ahead(self._k)) is not None:
            self._claims.append(claim)
        self._claimed = self._clock.now
        return events.Claimed(len(self._claims), version)

    def _pull(self, *, merges: bool) -> Generator[int | None, None, events.Event]:
        if merges:
            self._advance()
        self._pulled = yield from self._engine.pull(self._k, self._k)
        self._loaded()
        if merges:
            self._go_on()
        return events.Pulled(self._pulled[1])

    def _load(self, *, merges: bool) -> events.Event:
        if merges:
            self._advance()
        self._pulled = self._arrived
        self._loaded()
        if merges:
            self._go_on()
        return events.Loaded()

    def _loaded(self) -> None:
        if self._own is not None:
            self._own.loaded()

    def _rejoin(self) -> events.Event:
        self._transfers.begin_again()
        self._engine.rejoin(self._k)
        self._claims.clear()
        self._ways.clear()
        self._pulled = None
        return events.Rejoined()

    # Computing a step.

    @property
    def _now(self) -> SimulatedStep:
        assert self._step is not None
        return self._step

    def _base(self) -> Vector:
        """Return where local steps go on: the newest parameters, less the pseudo-gradients they lack."""
        assert self._pulled is not None
        w = self._pulled[0]
        for way in self._ways:
            w = w - way
        if self._own is not None:
            for gradient, have, wanted in self._own.go_on():
                w = w - self._engine.model.way(gradient, have, wanted)
            self._pulled = w, self._pulled[1]
        return w

    def _advance(self) -> None:
        """Take the local steps since the last parameters came."""
        step, limit = self._now, self._engine.workers[self._k].micro_batch
        self._engine.model.advance(step.base, step.first + step.taken, step.done - step.taken, self._k, limit)
        step.taken = step.done

    def _go_on(self) -> None:
        assert self._pulled is not None
        self._now.version, self._now.base = self._pulled[1], self._base()

    def _begin(self) -> Generator[int | None, None, events.Event]:
        assert self._pulled is not None
        first, count = self._claims.popleft()
        claimed = self._claimed if self._rules.depth == 1 else self._clock.now
        self._step = SimulatedStep(first, count, self._pulled[1], self._base(), claimed)
        return (yield from self._compute())

    def _compute(self) -> Generator[int | None, None, events.Event]:
        """The next micro-batch; at once all that are left, if nothing can come between them."""
        step, began, engine = self._now, self._clock.now, self._engine
        at_once = engine.skips_parts and self._machine.skips_parts
        end = began
        while True:
            part = self._part(step.count - step.done)
            end += engine.compute_nanoseconds(self._k, part, end, later=step.done > 0)
            step.before, step.done = step.done, step.done + part
            if not at_once or step.done == step.count:
                break
        try:
            yield end
        finally:  # it may be killed meanwhile
            engine.metrics.add(self._k, COMPUTE, began, self._clock.now, engine.version)
        step.nanoseconds += self._clock.now - began
        if left := step.count - step.done:
            return events.Partial(step.before, step.done, step.count, self._part(left))
        return self._computed()

    def _part(self, left: int) -> int:
        limit = self._engine.workers[self._k].micro_batch or left
        return even_steps(left, limit) if self._rules.local else next_part(left, limit)

    def _computed(self) -> events.Event:
        step, engine = self._now, self._engine
        step.gradient = engine.gradient(self._k, step.base, step.first + step.taken, step.done - step.taken)
        step.lasted = self._clock.now - step.claimed
        if self._rules.local and self._rules.depth > 1 and step.gradient:
            self._ways.append(step.gradient[0])
        return events.Computed()

    # Transfers.

    def _send(self, ask: Ask) -> events.Event:
        step, number = self._now, self._count
        self._step = None
        step.mode = self._modes.mode if self._modes is not None else None
        self._sent.append((step, ask))
        if self._own is not None:
            self._own.sent(
                self._engine.own(self._k, step.gradient[0], step.done) if step.gradient else np.zeros(0)
            )
        self._count += 1
        if self._rules.depth > 1:
            processes = len(self._engine.workers)
            channel = self._k + processes * (1 + number % self._lanes)
            self._clock.begin(channel, self._transfer(number, channel, step, ask), self._clock.now)
        return events.Sent()

    def _take(self, *, waits: bool) -> Generator[int | None, None, events.Event]:
        began = self._clock.now
        step, ask = self._sent[0]
        if self._rules.depth == 1:
            yield from self._transfer(self._count - 1, self._k, step, ask)
        elif not self._results:
            if not waits:
                return events.Pending()
            self._waiting = True
            yield None
            self._waiting = False
            self._engine.metrics.add(self._k, WAIT, began, self._clock.now, self._engine.version)
        self._sent.popleft()
        if self._own is not None:
            self._own.arrived()
        if self._ways:
            self._ways.popleft()
        done, pulled, waited, way, back = self._results.popleft()
        if done.fenced:
            return events.Arrived(fenced=True)
        self._hear(step, waited, way - back, back)
        self._claims.extend(done.claims)  # type: ignore[arg-type]  # ranges of samples here
        self._arrived = pulled
        return events.Arrived(done.version, len(done.claims), False, waited, way, step.nanoseconds)

    def _hear(self, step: SimulatedStep, waited: int, there: int, back: int) -> None:
        """A transfer has ended: the mode may change."""
        if self._modes is None or step.mode is None:
            return
        seconds = [NANOSECOND * n for n in (step.nanoseconds, there, waited, back, self._clock.now)]
        if (change := self._modes.hear(TimedStep(step.mode, *seconds))) is not None:
            self._engine.change_mode(self._k, change)
            self._machine.set_depth(change.after.depth)

    def _transfer(self, number: int, channel: int, step: SimulatedStep, ask: Ask) -> StepProcess:
        """A transfer: the gradient travels, the store answers, and the parameters travel back."""
        k, engine = self._k, self._engine
        if engine.sends_in_turn(k):
            yield from self._in_turn(STORE, number, channel)
            with suppress(Fenced):  # the store will say so again
                step.turn = yield from engine.await_turn(k, channel)
        left = self._clock.now
        yield from engine.travel_up(k, channel, self._in_turn(UP, number, channel))
        self._pass(UP)
        yield from self._in_turn(STORE, number, channel)
        arrived, done, pulled = self._clock.now, Transferred(fenced=True), None
        with suppress(Fenced):
            done, pulled = yield from self._at_store(channel, step, ask)
        answered = self._clock.now
        waited = answered - arrived
        self._pass(STORE)
        if done.version is not None:
            yield from engine.travel_down(k, channel, self._in_turn(DOWN, number, channel), done.version)
        else:
            yield from self._in_turn(DOWN, number, channel)
        self._pass(DOWN)
        now = self._clock.now
        self._results.append(Back(done, pulled, waited, now - left - waited, now - answered))
        if self._waiting:
            self._clock.resume(k)

    def _at_store(
        self, channel: int, step: SimulatedStep, ask: Ask
    ) -> Generator[int | None, None, tuple[Transferred, Parameters | None]]:
        """Return what the store does for a transfer: pyps.step.transfer in virtual time."""
        engine, k = self._engine, self._k
        steps = self._transfers.steps(ask)
        answer: Any = None
        pulled: Parameters | None = None
        try:
            verb = next(steps)
            while True:
                try:
                    match verb:
                        case Verb.PUSH:
                            answer = yield from self._push(channel, step)
                        case Verb.EXCHANGE:
                            answer = (yield from self._push(channel, step)), None
                        case Verb.CLAIM:
                            answer = engine.start_ahead(k)
                        case Verb.PULL:
                            pulled = engine.pull_at_store(k)
                            answer = pulled[1]
                except (Fenced, PushRejected) as error:
                    if isinstance(error, PushRejected):
                        engine.rejected(k)
                    verb = steps.throw(error)
                else:
                    verb = steps.send(answer)
        except StopIteration as end:
            return end.value, pulled

    def _push(self, channel: int, step: SimulatedStep) -> StepProcess:
        lasted = step.lasted
        if self._rules.depth == 1:
            lasted = self._clock.now - step.claimed - (step.turn.waited if step.turn is not None else 0)
        return (yield from self._engine.push(self._k, channel, step, lasted))

    def _in_turn(self, what: int, number: int, channel: int) -> StepProcess:
        """Wait until the transfers before this one have used it."""
        queue = self._queues[what]
        if queue.passed != number:
            queue.waiting[number] = channel
            yield None

    def _pass(self, what: int) -> None:
        queue = self._queues[what]
        queue.passed += 1
        channel = queue.waiting.pop(queue.passed, None)
        if channel is not None:
            self._clock.resume(channel)


def worker_process(engine: Engine, k: int, rules: StepRules) -> Process:
    """Return what worker k of an engine does, to its end."""
    return SimulatedWorker(engine, k, rules).process()
