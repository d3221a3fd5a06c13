"""A worker in virtual time: the actions of its step machine (pyps.step.machine) as processes of the clock.

One process computes; with a pipeline of depth d, up to d - 1 others each make a transfer. These travel at
once, but use the link, each way, and the store one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from pyps.errors import Ended, Fenced, PushRejected
from pyps.simulate.metrics import COMPUTE, WAIT
from pyps.simulate.optimizer import Vector
from pyps.step.events import (
    Abort,
    Action,
    Advised,
    Arrived,
    Check,
    Claimed,
    ClaimNext,
    Compute,
    Computed,
    Continue,
    End,
    Event,
    Finish,
    Load,
    Loaded,
    Partial,
    Pending,
    Pull,
    Pulled,
    RanOut,
    Rejoin,
    Rejoined,
    Return,
    Send,
    Sent,
    Take,
    Wanted,
    WasFenced,
)
from pyps.step.machine import StepMachine, StepRules
from pyps.step.parts import even_steps, next_part
from pyps.step.transfer import Ask, Done, Transfers, Verb

if TYPE_CHECKING:
    from pyps.simulate.engine import Engine


class Turn(NamedTuple):
    """A worker's turn over a link. opened: when; waited: for it. Nanoseconds."""

    opened: int
    waited: int


Parameters = tuple[Vector, int]  # with their version
SampleRange = tuple[int, int]  # first, count
Gradient = tuple[Vector, float]  # with the loss
Steps = Generator[int | None, None, Any]
UP, STORE, DOWN = range(3)  # what transfers use in turn


@dataclass
class SimulatedStep:
    """A step under way: its samples, what it goes on from, and how far it is."""

    first: int
    count: int
    pulled: Parameters
    base: Vector  # where its next local step goes on from
    claimed: int  # the time at which it could begin
    done: int = 0
    before: int = 0  # samples done before the last micro-batch
    taken: int = 0  # samples whose local steps were taken before newer parameters came
    gradient: Gradient | None = None
    nanoseconds: int = 0  # of computing
    lasted: int = 0  # from its beginning until its gradient was ready
    turn: Turn | None = None  # in which its gradient travels


class Back(NamedTuple):
    """What came back of a transfer; None: the worker was fenced."""

    done: Done | None
    waited: int
    way: int


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
        self._sent: deque[tuple[SimulatedStep, Ask]] = deque()
        self._results: deque[Back] = deque()  # of transfers that have ended
        self._count = 0  # transfers that began
        self._queues = (Queue(), Queue(), Queue())
        self._waiting = False

    def process(self) -> Steps:
        """The compute process, from join to leave."""
        yield from self._engine.join(self._k)
        event: Event = Wanted()
        while not isinstance(action := self._machine.receive(event), End):
            try:
                event = yield from self._do(action)
            except Ended:
                event = RanOut()
            except Fenced:
                event = WasFenced()
        self._engine.leave(self._k)

    def _do(self, action: Action) -> Generator[int | None, None, Event]:
        """Carry out one action."""
        match action:
            case ClaimNext():
                return (yield from self._claim(action.ahead))
            case Pull():
                return (yield from self._pull(merges=action.merges))
            case Check():
                return Advised(self._engine.check(self._k, action.done, action.following))
            case Compute():
                return (yield from self._begin())
            case Continue():
                return (yield from self._compute())
            case Finish():
                return self._computed()
            case Abort():
                self._engine.gave_up(self._k, counts=not action.fenced)
                return Wanted()
            case Send():
                return self._send(action.ask)
            case Take():
                return (yield from self._take(waits=action.waits))
            case Load():
                return self._load(merges=action.merges)
            case Rejoin():
                return self._rejoin()
            case Return():
                self._engine.metrics.rejected += action.dropped  # the store took the step's samples back
                return Wanted()
        raise AssertionError(action)

    def _claim(self, ahead: int) -> Generator[int | None, None, Event]:
        self._transfers.begin_again()
        first, count, version = yield from self._engine.start(self._k)
        self._claims.append((first, count))
        while len(self._claims) <= ahead and (claim := self._engine.start_ahead(self._k)) is not None:
            self._claims.append(claim)
        self._claimed = self._clock.now
        return Claimed(len(self._claims), version)

    def _pull(self, *, merges: bool) -> Generator[int | None, None, Event]:
        if merges:
            self._advance()
        self._pulled = yield from self._engine.pull(self._k, self._k)
        if merges:
            self._go_on()
        return Pulled(self._pulled[1])

    def _load(self, *, merges: bool) -> Event:
        if merges:
            self._advance()
        self._pulled = self._arrived
        if merges:
            self._go_on()
        return Loaded()

    def _rejoin(self) -> Event:
        self._transfers.begin_again()
        self._engine.rejoin(self._k)
        self._claims.clear()
        self._ways.clear()
        self._pulled = None
        return Rejoined()

    # Computing a step.

    @property
    def _now(self) -> SimulatedStep:
        assert self._step is not None
        return self._step

    def _base(self) -> Vector:
        """Where local steps go on from: the newest parameters, less the pseudo-gradients they do not have."""
        assert self._pulled is not None
        w = self._pulled[0]
        for way in self._ways:
            w = w - way
        return w

    def _advance(self) -> None:
        """Take the local steps since the last parameters came."""
        step, limit = self._now, self._engine.workers[self._k].micro_batch
        self._engine.model.advance(step.base, step.first + step.taken, step.done - step.taken, self._k, limit)
        step.taken = step.done

    def _go_on(self) -> None:
        assert self._pulled is not None
        self._now.pulled, self._now.base = self._pulled, self._base()

    def _begin(self) -> Generator[int | None, None, Event]:
        assert self._pulled is not None
        first, count = self._claims.popleft()
        claimed = self._claimed if self._rules.depth == 1 else self._clock.now
        self._step = SimulatedStep(first, count, self._pulled, self._base(), claimed)
        return (yield from self._compute())

    def _compute(self) -> Generator[int | None, None, Event]:
        """The next micro-batch."""
        step, began = self._now, self._clock.now
        part = self._part(step.count - step.done)
        yield began + self._engine.compute_nanoseconds(self._k, part)
        step.nanoseconds += self._clock.now - began
        self._engine.metrics.add(self._k, COMPUTE, began, self._clock.now, self._engine.version)
        step.before, step.done = step.done, step.done + part
        if left := step.count - step.done:
            return Partial(step.before, step.done, step.count, self._part(left))
        return self._computed()

    def _part(self, left: int) -> int:
        limit = self._engine.workers[self._k].micro_batch or left
        return even_steps(left, limit) if self._rules.local else next_part(left, limit)

    def _computed(self) -> Event:
        step, engine = self._now, self._engine
        step.gradient = engine.gradient(self._k, step.base, step.first + step.taken, step.done - step.taken)
        step.lasted = self._clock.now - step.claimed
        if self._rules.local and self._rules.depth > 1 and step.gradient:
            self._ways.append(step.gradient[0])
        return Computed()

    # Transfers.

    def _send(self, ask: Ask) -> Event:
        step, number = self._now, self._count
        self._step = None
        self._sent.append((step, ask))
        self._count += 1
        if self._rules.depth > 1:
            processes = len(self._engine.workers)
            channel = self._k + processes * (1 + number % (self._rules.depth - 1))
            self._clock.begin(channel, self._transfer(number, channel, step, ask), self._clock.now)
        return Sent()

    def _take(self, *, waits: bool) -> Generator[int | None, None, Event]:
        began = self._clock.now
        step, ask = self._sent[0]
        if self._rules.depth == 1:
            yield from self._transfer(self._count - 1, self._k, step, ask)
        elif not self._results:
            if not waits:
                return Pending()
            self._waiting = True
            yield None
            self._waiting = False
            self._engine.metrics.add(self._k, WAIT, began, self._clock.now, self._engine.version)
        self._sent.popleft()
        if self._ways:
            self._ways.popleft()
        done, waited, way = self._results.popleft()
        if done is None:
            return Arrived(fenced=True)
        self._claims.extend(done.claims)  # type: ignore[arg-type]  # ranges of samples here
        self._arrived = done.pulled
        version = done.pulled[1] if done.pulled is not None else None
        return Arrived(version, len(done.claims), False, waited, way, step.nanoseconds)

    def _transfer(self, number: int, channel: int, step: SimulatedStep, ask: Ask) -> Steps:
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
        arrived, done = self._clock.now, None
        with suppress(Fenced):
            done = yield from self._at_store(channel, step, ask)
        waited = self._clock.now - arrived
        self._pass(STORE)
        if done is not None and done.fenced is not None:
            done = None
        if done is not None and done.pulled is not None:
            yield from engine.travel_down(k, channel, self._in_turn(DOWN, number, channel), done.pulled[1])
        else:
            yield from self._in_turn(DOWN, number, channel)
        self._pass(DOWN)
        self._results.append(Back(done, waited, self._clock.now - left - waited))
        if self._waiting:
            self._clock.resume(k)

    def _at_store(self, channel: int, step: SimulatedStep, ask: Ask) -> Generator[int | None, None, Done]:
        """What the store does for a transfer: pyps.step.transfer in virtual time."""
        engine, k = self._engine, self._k
        steps = self._transfers.steps(ask)
        answer: Any = None
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
                            answer = engine.pull_at_store(k)
                        case Verb.LIMIT:
                            answer = None
                except (Fenced, PushRejected) as error:
                    if isinstance(error, PushRejected):
                        engine.rejected(k)
                    verb = steps.throw(error)
                else:
                    verb = steps.send(answer)
        except StopIteration as end:
            done: Done = end.value
            return done

    def _push(self, channel: int, step: SimulatedStep) -> Steps:
        lasted = step.lasted
        if self._rules.depth == 1:
            lasted = self._clock.now - step.claimed - (step.turn.waited if step.turn is not None else 0)
        return (yield from self._engine.push(self._k, channel, step, lasted))

    def _in_turn(self, what: int, number: int, channel: int) -> Steps:
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
