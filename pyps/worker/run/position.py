"""Where a run is, and the learning-rate schedule there: both belong to the run, not to a process.

Position n is the number of global batches before a claim: its first sample over the global batch. A worker
that starts again, joins late or resumes brings its new scheduler to the n of its first claim at once, by
as many calls of step(), 2 microseconds each. (torch's closed forms would be quicker, but differ from step()
in the last bits: then a run that was resumed would not be the uninterrupted one.) n never goes back, also
where samples of a dead worker are claimed once more.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from pyps.errors import InputError
from pyps.native.values import Hyper
from pyps.store.store import Store

ScheduleUnit = Literal["batch", "epoch"]
SchedulerArgument = LRScheduler | Sequence[LRScheduler] | None
ON_SCHEDULE = "with attach(..., scheduler=) its schedule goes on where the run is"
SAME_RULE = "give all ranks the same constants: a round takes those of one rank for all"


@dataclass(frozen=True)
class RunPosition:
    """Where the run is: `samples` come before the batch under way, `global_batches` whole ones of the plan.

    version: of the parameters in the model. dataset_length: 0 before batches(), and of a stream.
    """

    samples: int
    global_batches: int
    version: int
    dataset_length: int = 0

    @property
    def epoch(self) -> int:
        """Whole passes over the data set so far. Raises InputError where its length is not known."""
        if not self.dataset_length:
            raise InputError("position", "epoch", "no length", "batches(dataset) first, of one with a length")
        return self.samples // self.dataset_length


class RunSchedule:
    """Schedulers of the worker's optimizers, stepped by the worker alone.

    given: one torch scheduler or several, stepped in this order. unit: what one step() of them stands for.
    Raises InputError for one that depends on more than the position, has been stepped, or has another
    optimizer.
    """

    def __init__(
        self,
        given: SchedulerArgument,
        optimizers: Sequence[torch.optim.Optimizer],
        unit: ScheduleUnit = "batch",
    ) -> None:
        if unit not in ("batch", "epoch"):
            raise InputError("attach", "scheduler_unit", repr(unit), "'batch' or 'epoch'")
        self._schedulers = _as_tuple(given)
        self._optimizers, self._unit = optimizers, unit
        for scheduler in self._schedulers:
            _check(scheduler, optimizers)
        self._at = 0
        self._left = self._counts()

    def __bool__(self) -> bool:
        return bool(self._schedulers)

    def follow(self, position: RunPosition) -> None:
        """Step forward to the position. Raises InputError if something else has stepped a scheduler."""
        if not self._schedulers:
            return
        if self._counts() != self._left:
            expected = "none: the worker steps what attach(scheduler=) was given"
            raise InputError("step", "scheduler", "a call of scheduler.step()", expected)
        target = position.epoch if self._unit == "epoch" else position.global_batches
        # torch warns if the optimizer has not stepped before. The run's has, in this process or another.
        for optimizer in self._optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]
        while self._at < target:
            self._step()
            self._at += 1
        self._left = self._counts()

    def _step(self) -> None:
        for scheduler in self._schedulers:
            try:
                scheduler.step()
            except ValueError as error:  # OneCycleLR: past its total_steps
                expected = "one that lasts for all global batches of the run"
                raise InputError(
                    "attach", "scheduler", f"{type(scheduler).__name__}: {error}", expected
                ) from None

    def _counts(self) -> list[int | None]:
        return [getattr(leaf, "last_epoch", None) for one in self._schedulers for leaf in _leaves(one)]


def _as_tuple(given: SchedulerArgument) -> tuple[LRScheduler, ...]:
    if given is None:
        return ()
    return tuple(given) if isinstance(given, Sequence) else (given,)


def _leaves(scheduler: Any) -> list[Any]:
    """A scheduler and those that it is made of (SequentialLR, ChainedScheduler)."""
    return [scheduler, *(leaf for part in getattr(scheduler, "_schedulers", ()) for leaf in _leaves(part))]


def _check(scheduler: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    kind = type(scheduler).__name__
    if any(isinstance(leaf, ReduceLROnPlateau) for leaf in _leaves(scheduler)):
        expected = "a schedule of the position alone: this one follows a loss, which differs between workers"
        raise InputError("attach", "scheduler", kind, expected)
    if not isinstance(scheduler, LRScheduler):
        raise InputError("attach", "scheduler", kind, "a torch.optim.lr_scheduler, or a list of them")
    if all(scheduler.optimizer is not optimizer for optimizer in optimizers):
        raise InputError("attach", "scheduler", f"{kind} of another optimizer", "one of the attached one")
    stepped = max((getattr(leaf, "last_epoch", 0) for leaf in _leaves(scheduler)), default=0)
    if stepped > 0:
        found = f"{kind} at last_epoch {stepped}"
        expected = "a new one: the worker brings it to the run's position"
        raise InputError("attach", "scheduler", found, expected)


class RuleWatch:
    """Warns once where a store trains with other constants than this worker pushes: those of another rank.

    is_exact: the store's are of the round of this worker's last push, as in `bsp`. Else they are compared
    only while this worker's stay as they are.
    """

    def __init__(self, is_exact: bool) -> None:
        self.is_exact, self._pushes, self._has_warned = is_exact, 0, False
        self._before: tuple[Hyper, ...] = ()

    def check(self, store: Store, now: tuple[Hyper, ...]) -> None:
        """Compare before pushes 2, 3, 5, 9, ...: over a link it is a call."""
        before, self._before, pushes = self._before, now, self._pushes
        self._pushes += 1
        is_due = pushes > 0 and not pushes & (pushes - 1) and (self.is_exact or before == now)
        if is_due and not self._has_warned:
            self._has_warned = warn_of_other_constants(store, before, "pushes with", SAME_RULE)


def warn_of_other_constants(store: Store, mine: Sequence[Hyper], does: str, hint: str) -> bool:
    """Warn if a run goes on with constants that this process's optimizer does not have; whether it did.

    mine: this optimizer's, a group each. does: what this worker does with them. hint: what helps.
    """
    for group, (own, other) in enumerate(zip(mine, store.hyper(), strict=False)):
        for field in fields(Hyper):
            here, there = getattr(own, field.name), getattr(other, field.name, None)
            if other is None or np.array_equal(np.float32(here), np.float32(there)):
                continue
            was, now = (_text(np.float32(value)) for value in (there, here))
            found = f"group {group} is trained with {field.name} {was}; this worker {does} {now}"
            warnings.warn(
                f"store {store.name!r}, at version {store.status().version}: {found}; {hint}", stacklevel=3
            )
            return True
    return False


def _text(constant: Any) -> str:
    """Return the text of one number, or of several, such as betas."""
    return ", ".join(f"{number:g}" for number in np.ravel(constant))
