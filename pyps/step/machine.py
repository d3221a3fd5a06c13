"""A worker's steps as a state machine without I/O: an event goes in, the next action comes out.

Threads carry its actions out in pyps.worker, the clock does in pyps.simulate: both make the same ones.

    depth 1          claim, pull, compute, push (with a pull, where policies exchange)
    depth d > 1      a step is computed while the transfers of up to d - 1 steps before it are under way; each
                     pushes, claims a later step, and pulls

A step is computed on the newest parameters that had come back when the step before was sent: those after the
push d steps before it, or newer. Before a step is sent, a worker waits until at most d - 2 transfers are
under way, and after it until at most d - 1 are: so with depth 1 it waits for its push.

All workers take the same time for a round. A worker that goes on while another is killed or stands still
would stay ahead for good, and compute on parameters that are as many rounds old. So one that notices that it
has run ahead waits once for all its transfers. With local steps it also waits for the first: workers may join
long after each other.

TRANSITIONS says what may happen in which state. Anything else is an error of what drives the machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from pyps.errors import PypsError
from pyps.native.decisions import Advice, PolicyNeeds
from pyps.native.transfer import Ask
from pyps.step import events


class State(Enum):
    """Name what the machine waits for."""

    __hash__ = object.__hash__  # Enum's own is Python: a lookup is half of what an event costs

    IDLE = "the trainer, between two steps"
    CLAIMING = "a claim"
    PULLING = "parameters, before a step"
    COMPUTING = "the trainer, which computes a step"
    CHECKING = "the policy's advice in the middle of a step"
    MERGING = "parameters in the middle of a step"
    SENDING = "a transfer to begin"
    TAKING = "a transfer to end"
    LOADING = "what came back to be in the model"
    REJOINING = "a place in the store"
    FAILED = "the end: a transfer of a pipeline has failed"


class WrongEvent(PypsError):
    """Say that what drives a step machine gave it an event that cannot happen in its state."""


class Goal(Enum):
    """Why the machine takes transfers: what follows."""

    STEP = "claim the next step"
    ALIGN = "the same, level with the other workers"
    SEND = "send the step"
    SENT = "the step is sent"
    FLUSH = "nothing is under way"
    MERGE = "go on with the step"


@dataclass(frozen=True, slots=True)
class StepRules:
    """Hold what a worker's steps obey. depth: its steps that may be under way at once. needs: of the
    policy. ranks: of the store. local: steps are rounds of local steps. merges: between two pushes, in serial
    local steps that wait for no others.
    """

    depth: int
    needs: PolicyNeeds
    ranks: int
    local: bool = False
    merges: int = 0

    @property
    def exchanges(self) -> bool:
        """Return whether a push brings the next step's parameters: no other worker changes them before, or
        need not wait to. Not in serial steps whose claims share out a round: a claim that comes only after
        the parameters finds that the others have taken its samples.
        """
        needs = self.needs
        in_rounds = needs.lets_ranks_rest or (needs.waits_for_rounds and self.depth > 1)
        return needs.uses_turns or needs.starts_at_once or in_rounds

    @property
    def may_run_ahead(self) -> bool:
        """Return whether a worker's parameters may become older than its pipeline makes them: not if two
        steps are under way, of which one is one version late in any case; local steps need not be.
        """
        in_pipeline = self.depth > 1 and (self.local or self.depth > 2)
        return self.needs.waits_for_rounds and in_pipeline

    @property
    def merges_in_step(self) -> int:
        """Pulls between two pushes."""
        waits = self.needs.waits_for_rounds or self.needs.uses_turns
        return 0 if waits or self.depth > 1 else self.merges

    def is_old(self, version: int, claimed_at: int) -> bool:
        """Return whether parameters that a push brought back should be pulled again before this step: others
        have pushed more than once each since then, while the script evaluated the model, say; or rounds went
        by without this worker, which had rested or was late. Never in a turn.
        """
        if self.needs.waits_for_rounds:
            return claimed_at > version
        return self.needs.starts_at_once and claimed_at - version > self.ranks


def has_run_ahead(waited: float, way: float, computed: float) -> bool:
    """Return whether a gradient waited for the others so long that its step might have begun a step later.

    waited, way, computed: for its round, on its way to the store and back, and of its step; in one unit.
    """
    return waited > way + computed


class StepMachine:
    """One worker's steps. Give each event to `receive`, and carry out the action that it returns."""

    def __init__(self, rules: StepRules) -> None:
        self.rules = rules
        self.state = State.IDLE
        self.version: int | None = None  # of the parameters in the model, where a step may use them
        self._claims = 0  # of the next steps
        self._under_way: deque[int] = deque()  # transfers: the claims that each asks for
        self._unaligned = rules.local and rules.depth > 1  # waits for all transfers before the next step
        self._goal = Goal.STEP
        self._most = 0  # transfers that may stay under way
        self._polls = False  # takes those that have ended already, too
        self._fenced = False  # in the transfers taken since
        self._arrived_version: int | None = None  # of parameters that came back and are not in the model
        self._in_step = False
        self._lost = False  # the step's samples, to others
        self._part = events.Partial(0, 0, 0, 0)  # the last one

    @property
    def skips_parts(self) -> bool:
        """Return whether nothing comes of the ends of the present step's micro-batches but the next one."""
        rules = self.rules
        if rules.needs.checks_between_micro_batches and rules.depth == 1:
            return False
        return not rules.local or not (rules.merges_in_step or (rules.depth > 1 and self._under_way))

    def set_depth(self, depth: int) -> None:
        """Another number of steps under way, at least 2 as before, from the next claims on."""
        self.rules = replace(self.rules, depth=depth)

    def receive(self, event: events.Event) -> events.Action:
        """Return what to do after this event. Raises WrongEvent."""
        transition = TRANSITIONS[self.state].get(type(event))
        if transition is None:
            found = f"{type(event).__name__} while it waits for {self.state.value}"
            expected = ", ".join(kind.__name__ for kind in TRANSITIONS[self.state])
            raise WrongEvent(f"step machine: found {found}; expected {expected}")
        return transition(self, event)

    def _go(self, state: State, action: events.Action) -> events.Action:
        self.state = state
        return action

    # Towards a step.

    def _given_up(self, event: events.Event) -> events.Action:
        """The trainer wants another step in place of the one under way: of the same claim."""
        self._in_step = False
        if self.rules.depth == 1:
            self.version = None
        elif not self._lost:
            self._claims += 1
        return self._wanted(event)

    def _wanted(self, _: events.Event) -> events.Action:
        if self._under_way and self._unaligned:
            self._unaligned = False
            return self._settle(Goal.ALIGN, 0)
        if self._under_way and not self._claims:
            return self._settle(Goal.STEP, len(self._under_way) - 1)
        if self._claims and self.version is not None:
            return self._compute()
        return self._go(State.CLAIMING, events.ClaimNext(self.rules.depth - 1))

    def _claimed(self, event: events.Event) -> events.Action:
        assert isinstance(event, events.Claimed)
        self._claims = event.count
        version = self.version
        if version is None or not self.rules.exchanges or self.rules.is_old(version, event.version):
            return self._go(State.PULLING, events.Pull())
        return self._compute()

    def _pulled(self, event: events.Event) -> events.Action:
        assert isinstance(event, events.Pulled)
        self.version = event.version
        return self._compute()

    def _compute(self) -> events.Action:
        assert self.version is not None
        self._claims -= 1
        self._in_step, self._lost = True, False
        return self._go(State.COMPUTING, events.Compute(self.version, may_claim=self.rules.depth == 1))

    def _ran_out(self, _: events.Event) -> events.Action:
        return self._go(State.IDLE, events.End())

    def _fenced_before_step(self, _: events.Event) -> events.Action:
        return self._rejoin(Goal.STEP)

    # Within a step.

    def _partial(self, event: events.Event) -> events.Action:
        assert isinstance(event, events.Partial)
        self._part = event
        if self._lost:
            self._in_step = False
            return self._go(State.IDLE, events.Abort(fenced=True))
        if self.rules.needs.checks_between_micro_batches and self.rules.depth == 1:
            return self._go(State.CHECKING, events.Check(event.done, event.following))
        return self._merge()

    def _advised(self, event: events.Event) -> events.Action:
        assert isinstance(event, events.Advised)
        if event.advice is Advice.CONTINUE:
            return self._merge()
        if event.advice is Advice.ABORT:
            self.version, self._in_step = None, False
            return self._go(State.IDLE, events.Abort())
        return self._go(State.COMPUTING, events.Finish())

    def _merge(self) -> events.Action:
        part, rules = self._part, self.rules
        if rules.local and rules.depth > 1 and self._under_way:
            return self._settle(Goal.MERGE, len(self._under_way))
        if rules.local and merges_after(part.before, part.done, part.count, rules.merges_in_step):
            return self._go(State.MERGING, events.Pull(merges=True))
        return self._continue()

    def _merged(self, event: events.Event) -> events.Action:
        assert isinstance(event, events.Pulled)
        self.version = event.version
        return self._continue()

    def _continue(self) -> events.Action:
        assert self.version is not None
        return self._go(State.COMPUTING, events.Continue(self.version))

    def _fenced_in_step(self, _: events.Event) -> events.Action:
        return self._rejoin(Goal.MERGE)

    # A step's transfer.

    def _computed(self, _: events.Event) -> events.Action:
        self._in_step = False
        if self._lost:
            return self._go(State.IDLE, events.Return(dropped=True))
        return self._settle(Goal.SEND, max(0, self.rules.depth - 2))

    def _send(self) -> events.Action:
        overlaps = self.rules.depth > 1
        claims = self.rules.depth - self._claims - sum(self._under_way) if overlaps else 0
        exchanges = self.rules.exchanges
        ask = Ask(exchanges, max(0, claims), pulls=overlaps or exchanges)
        self._under_way.append(ask.claims)
        if not overlaps:
            self.version = None
        return self._go(State.SENDING, events.Send(ask))

    def _sent(self, _: events.Event) -> events.Action:
        return self._settle(Goal.SENT, self.rules.depth - 1, polls=False)

    def _flush(self, _: events.Event) -> events.Action:
        return self._settle(Goal.FLUSH, 0)

    def _fenced_in_flush(self, _: events.Event) -> events.Action:
        return self._rejoin(Goal.FLUSH)

    def _refreshed(self, event: events.Event) -> events.Action:
        assert isinstance(event, events.Refreshed)
        if self._in_step or self.version is not None:
            self.version = event.version
        return self._go(self.state, events.Return())

    # Transfers that have ended.

    def _settle(self, goal: Goal, most: int, *, polls: bool = True) -> events.Action:
        """Take the transfers that have ended, and wait until at most `most` are under way."""
        self._goal, self._most, self._polls = goal, most, polls
        self._fenced = False
        return self._take()

    def _take(self) -> events.Action:
        if self._under_way:
            # All that a fenced worker has under way fails.
            if self._fenced or len(self._under_way) > self._most:
                return self._go(State.TAKING, events.Take())
            if self._polls:
                return self._go(State.TAKING, events.Take(waits=False))
        return self._taken(None)

    def _arrived(self, event: events.Event) -> events.Action:
        assert isinstance(event, events.Arrived)
        self._under_way.popleft()
        self._fenced = self._fenced or event.fenced
        if not event.fenced:
            self._claims += event.claims
            if event.version is not None:
                self._arrived_version = event.version
            if self.rules.may_run_ahead and has_run_ahead(event.waited, event.way, event.computed):
                self._unaligned = True
        return self._take()

    def _taken(self, _: events.Event | None) -> events.Action:
        if self._fenced:
            return self._rejoin(self._goal)
        if self._arrived_version is not None:
            return self._go(State.LOADING, events.Load(merges=self._goal is Goal.MERGE))
        return self._settled()

    def _loaded(self, _: events.Event) -> events.Action:
        self.version, self._arrived_version = self._arrived_version, None
        return self._settled()

    def _rejoin(self, goal: Goal) -> events.Action:
        self._goal, self._fenced = goal, True
        self._claims, self.version, self._arrived_version = 0, None, None
        return self._go(State.REJOINING, events.Rejoin())

    def _rejoined(self, _: events.Event) -> events.Action:
        # What came back before counts no wait again, where the worker had waited for all of it.
        self._unaligned = self.rules.local and self.rules.depth > 1
        return self._settled()

    def _settled(self) -> events.Action:
        goal, fenced = self._goal, self._fenced
        if goal in (Goal.STEP, Goal.ALIGN):
            if goal is Goal.ALIGN and not fenced:
                self._unaligned = False  # waits of what came back do not count again
            return self._wanted(events.Wanted())
        if goal is Goal.SEND and not fenced:
            return self._send()
        if goal is Goal.MERGE:
            self._in_step = not fenced
            return self._go(State.IDLE, events.Abort(fenced=True)) if fenced else self._continue()
        if self._in_step:
            self._lost = self._lost or fenced
            return self._go(State.COMPUTING, events.Return())
        return self._go(State.IDLE, events.Return(dropped=goal is Goal.SEND))

    def _interrupted(self, event: events.Event) -> events.Action:
        assert isinstance(event, events.Interrupted)
        failed = event.transfer and self.rules.depth > 1
        if event.transfer and not failed:
            self._under_way.clear()
        after = State.COMPUTING if self._in_step else State.IDLE
        return self._go(State.FAILED if failed else after, events.Return())


Transition = Callable[[StepMachine, events.Event], events.Action]
_M = StepMachine
TRANSITIONS: dict[State, dict[type[events.Event], Transition]] = {
    State.IDLE: {
        events.Wanted: _M._wanted,
        events.Flush: _M._flush,
        events.Refreshed: _M._refreshed,
        events.WasFenced: _M._fenced_in_flush,
    },
    State.CLAIMING: {
        events.Claimed: _M._claimed,
        events.RanOut: _M._ran_out,
        events.WasFenced: _M._fenced_before_step,
    },
    State.PULLING: {events.Pulled: _M._pulled, events.WasFenced: _M._fenced_before_step},
    State.COMPUTING: {
        events.Wanted: _M._given_up,
        events.Partial: _M._partial,
        events.Computed: _M._computed,
        events.Flush: _M._flush,
        events.Refreshed: _M._refreshed,
        events.WasFenced: _M._fenced_in_flush,
    },
    State.CHECKING: {events.Advised: _M._advised, events.WasFenced: _M._fenced_in_step},
    State.MERGING: {events.Pulled: _M._merged, events.WasFenced: _M._fenced_in_step},
    State.SENDING: {events.Sent: _M._sent},
    State.TAKING: {events.Arrived: _M._arrived, events.Pending: _M._taken},
    State.LOADING: {events.Loaded: _M._loaded, events.Arrived: _M._arrived},
    State.REJOINING: {events.Rejoined: _M._rejoined},
    State.FAILED: {},
}
for _state in (s for s in State if s not in (State.IDLE, State.COMPUTING)):
    TRANSITIONS[_state][events.Interrupted] = _M._interrupted


def even_steps(samples: int, most: int) -> int:
    """The samples of the next local step if `samples` are left, at most `most` in one: all are alike."""
    return -(-samples // -(-samples // most))


def next_part(samples: int, most: int) -> int:
    """The samples of the next micro-batch if `samples` are left: what `most` allows, but one less where a
    single one would be left over, which batch normalization cannot train on.
    """
    return min(samples, most - (samples - most == 1 and most > 2))


def merges_after(before: int, done: int, count: int, merges: int) -> bool:
    """Return whether a worker merges when `done` samples of a claim of `count` have had their local steps.

    before: samples at the last step. merges: in all, evenly spaced; never after the last step.
    """
    return done < count and done * (merges + 1) // count > before * (merges + 1) // count
