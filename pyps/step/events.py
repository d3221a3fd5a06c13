"""Define what goes into a step machine and what comes out of it (pyps.step.machine), as plain values."""

from __future__ import annotations

from dataclasses import dataclass

from pyps.native.decisions import Advice
from pyps.native.transfer import Ask


class Event:
    """Tell a machine what the trainer wants, or what an action came to."""

    __slots__ = ()


class Action:
    """Tell a driver what to do next; it answers with an event."""

    __slots__ = ()


# Events: the trainer wants something.


@dataclass(frozen=True, slots=True)
class Wanted(Event):
    """The next step."""


@dataclass(frozen=True, slots=True)
class Partial(Event):
    """A micro-batch of the step was computed, and others follow: `done` of its `count` samples, `before` of
    them earlier; `following` in the next one.
    """

    before: int
    done: int
    count: int
    following: int


@dataclass(frozen=True, slots=True)
class Computed(Event):
    """The step's gradient is ready to be sent."""


@dataclass(frozen=True, slots=True)
class Flush(Event):
    """Nothing may be under way."""


@dataclass(frozen=True, slots=True)
class Refreshed(Event):
    """The parameters of this version were brought into the model, with nothing under way."""

    version: int


# Events: what an action came to.


@dataclass(frozen=True, slots=True)
class Claimed(Event):
    """`count` claims were made, of which the first is of the next step, when the store had this version."""

    count: int
    version: int


@dataclass(frozen=True, slots=True)
class Pulled(Event):
    version: int


@dataclass(frozen=True, slots=True)
class Advised(Event):
    """Tell what the policy says between two micro-batches."""

    advice: Advice


@dataclass(frozen=True, slots=True)
class Sent(Event):
    """A transfer is under way."""


@dataclass(frozen=True, slots=True)
class Arrived(Event):
    """The oldest transfer has ended: with parameters of this version (None: none came) and claims of later
    steps, or `fenced`. waited, way, computed: for others, travelling, and of computing its step; in one unit.
    """

    version: int | None = None
    claims: int = 0
    fenced: bool = False
    waited: float = 0.0
    way: float = 0.0
    computed: float = 0.0


@dataclass(frozen=True, slots=True)
class Pending(Event):
    """No transfer has ended that was not taken."""


@dataclass(frozen=True, slots=True)
class Loaded(Event):
    """The newest parameters are in the model."""


@dataclass(frozen=True, slots=True)
class Rejoined(Event):
    pass


@dataclass(frozen=True, slots=True)
class WasFenced(Event):
    """A call other than a transfer was refused, also one of the trainer's own after a Flush: the samples that
    the worker claimed went to others.
    """


@dataclass(frozen=True, slots=True)
class RanOut(Event):
    """The run's samples are used up."""


@dataclass(frozen=True, slots=True)
class Interrupted(Event):
    """An action raised an error. transfer: it was that of a transfer, which nothing can follow."""

    transfer: bool = False


# Actions for the driver.


@dataclass(frozen=True, slots=True)
class ClaimNext(Action):
    """Claim the next step, waiting until the policy allows it, then up to `ahead` after it: Claimed, RanOut
    or WasFenced.
    """

    ahead: int = 0


@dataclass(frozen=True, slots=True)
class Pull(Action):
    """Bring the newest parameters into the model; in the middle of a step, with its local steps taken so far:
    Pulled or WasFenced.
    """

    merges: bool = False


@dataclass(frozen=True, slots=True)
class Check(Action):
    """Ask the policy whether to go on with the step: Advised or WasFenced."""

    done: int
    following: int


@dataclass(frozen=True, slots=True)
class Send(Action):
    """Begin the step's transfer: Sent."""

    ask: Ask


@dataclass(frozen=True, slots=True)
class Take(Action):
    """Take the oldest transfer that has ended. waits: until one has; otherwise Pending may be the answer."""

    waits: bool = True


@dataclass(frozen=True, slots=True)
class Load(Action):
    """Bring the newest parameters that have arrived into the model: Loaded; or Arrived where they came with a
    transfer that was not taken yet. merges: as for Pull.
    """

    merges: bool = False


@dataclass(frozen=True, slots=True)
class Rejoin(Action):
    """Join again; claims and their staging buffers are gone: Rejoined."""


class Control(Action):
    """An action that gives control back to the trainer."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Compute(Control):
    """Compute the first claimed step, on parameters of this version. may_claim: the step after it may be
    claimed meanwhile, where the policy allows it, so that its samples are loaded early.
    """

    version: int
    may_claim: bool = False


@dataclass(frozen=True, slots=True)
class Continue(Control):
    """Compute the step's next micro-batch, on parameters of this version."""

    version: int


@dataclass(frozen=True, slots=True)
class Finish(Control):
    """The step has enough samples: send what there is."""


@dataclass(frozen=True, slots=True)
class Abort(Control):
    """Give the step up: by the policy's advice; fenced: since the worker was, and has rejoined."""

    fenced: bool = False


@dataclass(frozen=True, slots=True)
class Return(Control):
    """The trainer's wish is done. dropped: the step was not sent, since the store took its samples back."""

    dropped: bool = False


@dataclass(frozen=True, slots=True)
class End(Control):
    """No step follows."""
