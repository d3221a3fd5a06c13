"""Local steps: a worker takes steps of its own optimizer, and pushes how far they brought it.

    pseudo-gradient = parameters before the first local step - parameters after the last

Each micro-batch of a claim is a local step. The pseudo-gradient then takes the place of the gradients, and
the store's optimizer, the outer one, steps with it: with SGD of rate 1 the store goes to where one worker is.
A worker is always at

    the newest parameters that it has - its pseudo-gradients that are not in them yet

So in a pipeline it goes on from where it is while a pseudo-gradient travels, and in between it may merge:
newer parameters come, and it goes on from there with the steps that it has taken.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from pyps.errors import InputError
from pyps.native.values import OUTER, Codec, Flat, PushResult
from pyps.store.store import Store
from pyps.worker.device.attach import Entry, OptimizerSteps
from pyps.worker.local.local_state import LocalState
from pyps.worker.run.settings import Settings

LocalStepsArgument = int | Literal["plan"]


class LocalSteps:
    """A worker's own optimizers, on the parameters that are in the store.

    optimizers: any of torch's; the training script must not call their step(). clip_norm: the bound of each
    local step's gradient, as in torch's clip_grad_norm_; 0: none. state: where the optimizers' is kept.
    pushes: admitted ones of the rank until now. merges: between two pushes, evenly spaced. overlaps: steps go
    on while a push travels.
    """

    def __init__(
        self,
        optimizers: tuple[torch.optim.Optimizer, ...],
        parameters: list[nn.Parameter],
        clip_norm: float,
        state: LocalState,
        pushes: int,
        merges: int = 0,
        overlaps: bool = False,
    ) -> None:
        self.merges, self._overlaps = merges, overlaps
        self._travelling: deque[list[torch.Tensor]] = deque()  # pseudo-gradients; where it overlaps
        self._optimizers = optimizers
        self._steps = [OptimizerSteps(optimizer, parameters) for optimizer in optimizers]
        self._parameters, self._clip_norm = parameters, clip_norm
        self._start = [torch.empty_like(p, requires_grad=False) for p in parameters]
        self._pushed_from: dict[int, int] = {}  # by staging buffer, the number of its push
        self._collected: deque[int] = deque()  # staging buffers of pushes under way
        self._lock = threading.Lock()  # guards their numbers, and files that have them
        self._is_away = False  # between pull_whole() and the next local step
        self._begun = False  # and not collected
        self._state, self._pushes = state, pushes
        state.load(pushes)

    @property
    def lr(self) -> float:
        """The learning rate of the first optimizer's first parameter group."""
        return float(self._optimizers[0].param_groups[0]["lr"])

    @torch.no_grad()
    def begin(self) -> None:
        """Local steps follow, from the parameters that are in the model and what is travelling."""
        self._is_away, self._begun = False, True
        self._go_on()
        for start, p in zip(self._start, self._parameters, strict=True):
            start.copy_(p)

    @torch.no_grad()
    def give_up(self) -> None:
        """The local steps since begin(), if they were not collected, count for nothing."""
        if self._begun and not self._is_away:
            self._restore()
        self._begun = self._is_away = False

    def _restore(self) -> None:
        """The parameters that came from the store, which lack what is travelling."""
        for p, start in zip(self._parameters, self._start, strict=True):
            p.copy_(start)
        for earlier in self._travelling:
            for p, way in zip(self._parameters, earlier, strict=True):
                p.add_(way)

    def _go_on(self) -> None:
        """From the newest parameters, in the model, to where the pushes that they do not have lead."""
        for ways in self._travelling:
            for p, way in zip(self._parameters, ways, strict=True):
                p.sub_(way)

    def step(self, scaler: Any = None) -> None:
        """Take a local step with the gradients that are there, and clear them. A GradScaler skips it, for
        each optimizer by itself as in torch, if they are not finite.
        """
        self.resume_steps()
        if self._clip_norm:
            if scaler is not None:
                for steps in self._steps:
                    steps.unscale(scaler)
            nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        for steps in self._steps:
            steps.call(scaler)
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def merge(self, pull: Callable[[], int]) -> int:
        """Go on from newer parameters with the steps taken so far; their version, that `pull` returns when it
        has put them into the model. Raises what it raises.
        """
        version = self.pull_whole(pull)
        self._go_on()
        self.resume_steps()
        return version

    @torch.no_grad()
    def pull_whole(self, pull: Callable[[], int]) -> int:
        """Between begin() and collect(), for the script to look at the store's parameters: as merge(), but
        the steps taken so far are put on them by resume_steps() alone.
        """
        if not self._is_away:
            for start, p in zip(self._start, self._parameters, strict=True):
                start.sub_(p)  # the way back
            self._is_away = True
        return pull()

    @torch.no_grad()
    def resume_steps(self) -> None:
        """After pull_whole(): go on from its parameters with the steps taken so far."""
        if not self._is_away:
            return
        self._is_away = False
        for way, p in zip(self._start, self._parameters, strict=True):
            newest = p.clone()
            p.sub_(way)
            way.copy_(newest)

    @torch.no_grad()
    def collect(self, staging: int = 0) -> None:
        """Put the pseudo-gradient where gradients are, and the parameters that came from the store back.

        staging: the number of the staging buffer that it is pushed from.
        """
        ways = [start - p for start, p in zip(self._start, self._parameters, strict=True)]
        for p, way in zip(self._parameters, ways, strict=True):
            p.grad = way
        self._restore()
        self._begun = False
        if self._overlaps:
            self._travelling.append(ways)
        else:
            self._collected.clear()  # an error may have ended the last one: see `pushed`
        with self._lock:
            self._pushes += 1
            self._pushed_from[staging] = self._pushes
            self._collected.append(staging)
            self._state.save(self._pushes)

    def keep_residual(self, store: Store, codec: Codec) -> None:
        """Where this worker encodes its pushes, for a link: go on with what the codes of the rank's last one
        did not carry, and keep that of each from now on.
        """
        if store.servers and codec is not Codec.F32:
            store.keep_residual(self._state.residual(self._pushes), self._save_residual)

    def _save_residual(self, staging: int, values: Flat) -> None:
        """Perhaps in another thread, when later pushes have been collected."""
        with self._lock:
            self._state.save_residual(self._pushed_from[staging], values)

    def pushed(self, result: PushResult | None) -> None:
        """The oldest push under way has ended: admitted; None: it was not."""
        if self._travelling:
            self._travelling.popleft()
        if self._collected:
            self._collected.popleft()
        if result is None:
            self._count_down()
        else:
            while self._pushes - len(self._collected) > result.rank_pushes > 0:  # one before it had failed
                self._count_down(after=1)
            self._state.remove_old(result.rank_pushes, result.saved_pushes)

    def _count_down(self, after: int = 0) -> None:
        """A push is none of the rank's: the `after` that have ended since, and those under way, move up."""
        with self._lock:
            for staging in set(self._collected):
                self._pushed_from[staging] -= 1
            self._state.move_up(self._pushes - len(self._collected) + 1 - after, self._pushes)
            self._pushes -= 1


def with_local_steps(settings: Settings, wanted: LocalStepsArgument) -> Settings:
    """The settings of a worker that takes `wanted` local steps of its planned batch between two pushes, or
    those of its plan. Raises InputError.
    """
    if wanted == "plan":
        return settings
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
        raise InputError("attach", "local_steps", repr(wanted), 'a number of steps, or "plan"')
    if settings.launched:
        expected = '"plan", and a plan made with pyps-plan --local-steps'
        raise InputError("attach", "local_steps", f"{wanted} under pyps run", expected)
    batches = settings.planned_batches()
    own = batches[min(settings.rank, len(batches) - 1)]
    return replace(
        settings,
        local_steps=wanted,
        batches=tuple(wanted * batch for batch in batches),
        micro_batch=min(own, settings.micro_batch or own),
    )


def local_steps_of(
    settings: Settings,
    store: Store,
    optimizers: tuple[torch.optim.Optimizer, ...],
    entries: Sequence[Entry],
    clip_norm: float | None,
    pushes: int,
    merges: int,
) -> LocalSteps | None:
    """Return those of a worker that has joined, as LocalSteps takes them; None: it takes none.

    entries: what of the model is in the store. Raises InputError for `merges` that are no number of times.
    """
    if not settings.local_steps:
        return None
    if isinstance(merges, bool) or not isinstance(merges, int) or merges < 0:
        raise InputError("attach", "merges", repr(merges), "a number of times")
    names = {id(entry.parameter): entry.name for entry in entries}
    state, overlaps = LocalState(settings, optimizers, names), settings.depth > 1
    parameters = [entry.parameter for entry in entries]
    local = LocalSteps(optimizers, parameters, clip_norm or 0.0, state, pushes, merges, overlaps)
    local.keep_residual(store, settings.encoding.codec)
    return local


def stored_optimizer(
    optimizers: tuple[torch.optim.Optimizer, ...], outer: torch.optim.Optimizer | None, settings: Settings
) -> torch.optim.Optimizer:
    """The optimizer whose steps the store takes: with local steps `outer`, or OUTER.

    Raises InputError for an outer one without local steps.
    """
    if not settings.local_steps:
        if outer is not None:
            raise InputError("attach", "outer", type(outer).__name__, "nothing without local steps")
        return optimizers[0]
    if outer is not None:
        return outer
    parameters = [p for one in optimizers for group in one.param_groups for p in group["params"]]
    return torch.optim.SGD(parameters, lr=OUTER.lr, momentum=OUTER.momentum, nesterov=OUTER.nesterov)
