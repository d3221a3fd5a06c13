"""One worker of a run: join, attach a model, then batch after batch: claim, pull, compute, push.

    worker = pyps.join()
    worker.attach(model, optimizer)
    for inputs, targets in worker.batches(dataset):
        loss = loss_function(model(inputs), targets)  # the mean over the batch
        loss.backward()
        worker.step(loss)

The store takes the optimizer's step; the torch optimizer only says which and with what constants.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import nn

from pyps.area import Area
from pyps.attach import Attachment, Binding, check_same, hyper_of, inspect
from pyps.errors import (
    Ended,
    Fenced,
    InputError,
    NotFinite,
    NotReady,
    PushRejected,
    SegmentExists,
    SegmentNotFound,
    TimedOut,
)
from pyps.memory import Room, budget_bytes, sharers
from pyps.metrics import RecordWriter, Span, StepRecord, record_path
from pyps.policy import DCASGD, HPS, R2SP, Backup, Policy, SaPS, acquaint
from pyps.sampling import fetcher, indices
from pyps.settings import Settings, read_settings
from pyps.store import Store
from pyps.values import Advice, Claim, Codec, MemberState, PushResult

if TYPE_CHECKING:
    from pyps.throttle import Span as ThrottleSpan
    from pyps.throttle import Throttle

ATTACH_TIMEOUT_SECONDS = 300.0  # others may still be importing torch and reading data
RINGMASTER = 2  # Rules.threshold
POLL_SECONDS = 0.02  # only while the segment does not exist yet: nothing to sleep on


def join(
    store: str | None = None,
    rank: int | None = None,
    *,
    batches: list[int] | None = None,
    policy: Policy | str | None = None,
    samples: int | None = None,
    seed: int | None = None,
    run_dir: str | Path | None = None,
    micro_batch: int | None = None,
    codec: Codec | str | None = None,
) -> Worker:
    """This process's part of a run. Under `pyps run` without arguments; else at least store, rank and
    batches.

    An argument goes before what the launcher set. `batches` is the planned batch of each rank, `samples` the
    sample positions of the whole run (0: without end), `micro_batch` the most samples to compute at once
    (None: as the plan says), `codec` how gradients travel: what it does not carry is added to this rank's
    next gradient. Raises InputError, naming what is missing.
    """
    return Worker(read_settings(store, rank, batches, policy, samples, seed, run_dir, micro_batch, codec))


class _Step:
    """What is known of the step under way: a claim, computed in one micro-batch or several."""

    def __init__(self, claim: Claim, area: Area, version: int, spans: list[Span]) -> None:
        self.claim, self.area, self.version, self.spans = claim, area, version, spans
        self.began = time.monotonic()
        self.throttle: AbstractContextManager[ThrottleSpan] | None = None
        self.throttled: ThrottleSpan | None = None
        self.overrun_seconds = 0.0
        self.micro = 0  # samples of the micro-batch under way; 0: step() has been called for it
        self.micro_before = 0  # of the last one that began
        self.left = claim.count  # samples of later micro-batches
        self.done = 0  # samples whose gradient is there


class Worker:
    """Made by pyps.join(); a context manager, closed at exit otherwise.

    `steps` counts the pushes that were taken, `fenced`, `rejected` and `aborted` the gradients that were
    dropped: by a deadline, by the policy when done, and by the policy before.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rank = settings.rank
        self.steps = self.fenced = self.rejected = self.aborted = self.skipped = 0
        self._store: Store | None = None
        self._attached: tuple[nn.Module, Attachment, Binding] | None = None
        self._step: _Step | None = None
        self._records: RecordWriter | None = None
        self._throttle: Throttle | None = None
        self._room: Room | None = None
        self._offered = -1
        self._stepping = self._finite = False
        self._count = 0
        self._fresh: int | None = None  # the version that an exchange has left in the model

    @property
    def store(self) -> Store:
        """The open store. Raises InputError before attach()."""
        if self._store is None:
            raise InputError("worker", "store", "nothing", "attach(model) first")
        return self._store

    @property
    def claim(self) -> Claim | None:
        """The samples of the step under way."""
        return self._step.claim if self._step else None

    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        timeout: float = ATTACH_TIMEOUT_SECONDS,
    ) -> None:
        """Put the model's parameters in the store (rank 0), or check that they are those there (the others).

        `optimizer`: torch.optim.SGD, AdamW, Adam or Adagrad without earlier steps; None: SGD with torch's
        defaults. Its groups' options are read again at every step, so schedules work. Its own step() is
        refused. A parameter without a gradient in a step counts as having a gradient of zero (it decays, its
        momentum goes on). Raises InputError for what cannot be trained here, TimedOut if rank 0 does not
        come.
        """
        if self._attached is not None:
            raise InputError("attach", "model", "a second one", "one model for each worker")
        chosen = optimizer if optimizer is not None else torch.optim.SGD(model.parameters())
        attachment = inspect(model, chosen)
        acquaint(self.settings.policy)
        self._store = store = self._open_or_create(attachment, timeout)
        atexit.register(_close_if_alive, weakref.ref(self))
        check_same(store, attachment)
        store.join(self.rank)
        binding = Binding(attachment, store)
        self._attached = (model, attachment, binding)
        store.pull(binding.flat)
        binding.refresh()
        chosen.register_step_pre_hook(self._on_optimizer_step)
        self._throttle = self.settings.make_throttle(on_gpu=binding.on_gpu)
        if self._is(HPS):
            read = partial(self._budget, binding.device)
            self._room = Room(self.settings.memory, self.settings.max_batch, read)
        if self.settings.run_dir is not None:
            self._records = RecordWriter(record_path(self.settings.run_dir, self.rank, os.getpid()))

    def batches(self, dataset: Any, collate: Callable[[list[Any]], Any] | None = None) -> Iterator[Any]:
        """Batch after batch of this worker's samples until the run's are used up; step() after each.

        `dataset`: a map-style dataset, or a tuple of tensors (indexed at once). Which samples a position
        means depends on the seed alone. Where the plan splits this rank's batch, each micro-batch comes by
        itself. At the end the model holds the run's final parameters. Raises InputError if a batch is asked
        for before step().
        """
        length, fetch = fetcher(dataset, collate)
        while (step := self._begin()) is not None:
            while step.left:
                first = step.claim.first + step.claim.count - step.left
                self._begin_micro_batch(step)
                batch = fetch(indices(first, step.micro, length, self.settings.seed))
                step.began = time.monotonic()
                if self._throttle is not None:
                    step.throttle = self._throttle.span(batch=step.micro)
                    step.throttled = step.throttle.__enter__()
                yield batch
                if self._step is step and step.micro:
                    raise InputError(
                        "worker", "batches", "no step() since the last batch", "step() after each batch"
                    )
        self.refresh()

    @property
    def accumulating(self) -> bool:
        """Whether more micro-batches of this step follow: a GradScaler's update() and a learning-rate
        schedule's step() wait until none do.
        """
        return self._step is not None and self._step.left > 0

    def step(self, loss: Any = None, scaler: Any = None) -> PushResult | None:
        """Push the gradient, the mean over the claimed samples; None if it was skipped or dropped, or while
        micro-batches of it are still to come.

        `loss` (a number or a scalar tensor) is only recorded. `scaler`: a torch.amp.GradScaler; gradients are
        unscaled, and the step is skipped if they are not finite; call scaler.update() after. A worker that
        was fenced meanwhile rejoins and drops this gradient.
        """
        step, (_, attachment, binding) = self._step, self._require()
        if step is None or not step.micro:
            raise InputError("worker", "step", "no batch", "step() once after each batch of batches()")
        binding.check_kept()
        step.done += step.micro
        finite = not step.left and self._finish_gradients(attachment, binding, scaler)
        if step.throttle is not None and step.throttled is not None:
            step.throttle.__exit__(None, None, None)
            step.overrun_seconds += step.throttled.overrun_seconds
        pushed_at = time.monotonic()
        step.spans.append(("compute", step.began, pushed_at))
        if step.left:
            advice = self._advice(step)
            if advice is Advice.GO_ON:
                step.micro = 0
                binding.keep()
                return None
            finite = self._finish_gradients(attachment, binding, scaler)
            step.left = 0
            if advice is Advice.ABORT:
                self._step = None
                self._account(step, None, True, loss, pushed_at)
                return None
        self._step = None
        result = self._push(step, attachment, binding, finite)
        self._account(step, result, finite, loss, pushed_at)
        return result if finite else None

    def _is(self, *kinds: type[Policy]) -> bool:
        """Whether the store's policy is one of these."""
        return self.store.layout.policy in [kind.number for kind in kinds]

    def _advice(self, step: _Step) -> Advice:
        """Between two micro-batches: whether the next one is worth computing."""
        if not self._is(SaPS, Backup):
            return Advice.GO_ON
        try:
            advice = self.store.check(step.done, self._at_once(step))
        except Fenced:
            self.fenced += 1
            self.store.rejoin()
            return Advice.ABORT
        self.aborted += advice is Advice.ABORT
        return advice

    def refresh(self) -> int:
        """Pull one single version into the model, as for an evaluation; the version."""
        _, _, binding = self._require()
        _, version = self.store.pull(binding.flat, strict=True)
        binding.refresh()
        return version

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The model's state after `refresh`, copied: parameters of one version, buffers of this worker."""
        self.refresh()
        return {name: value.detach().clone() for name, value in self._require()[0].state_dict().items()}

    def close(self) -> None:
        """Leave the run; samples claimed but not pushed go back to be handed out again. Idempotent."""
        if self._attached is not None:
            self._attached[2].release()
        self._step = None
        if self._records is not None:
            self._records.close()
            self._records = None
        if self._store is not None:
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self.close()

    def _require(self) -> tuple[nn.Module, Attachment, Binding]:
        if self._attached is None:
            raise InputError("worker", "model", "nothing", "attach(model) first")
        return self._attached

    def _open_or_create(self, attachment: Attachment, timeout: float) -> Store:
        """Rank 0 creates the segment unless it finds it there (after a restart); the others wait for it."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                return Store.open(self.settings.store)
            except (SegmentNotFound, NotReady):
                if self.rank == 0:
                    try:
                        return self._create(attachment)
                    except SegmentExists:
                        pass  # somebody else was faster: open that one
                if time.monotonic() > deadline:
                    raise
            time.sleep(POLL_SECONDS)

    def _create(self, attachment: Attachment) -> Store:
        settings = self.settings
        return Store.create(
            settings.store,
            {entry.name: entry.parameter for entry in attachment.entries},
            batches=settings.planned_batches(),
            optimizer=attachment.kind,
            policy=settings.policy,
            groups={entry.name: entry.group for entry in attachment.entries},
            samples=settings.samples,
            keep=settings.launched,
        )

    def _begin(self) -> _Step | None:
        """Claim, get an area, pull; None when the run's samples are used up. A fenced worker rejoins
        first.
        """
        _, _, binding = self._require()
        store, began = self.store, time.monotonic()
        while True:
            try:
                self._offer()
                claim = self._claim()
                area = store.stage()
                ready = time.monotonic()
                binding.fill(area)
                version = self._fresh if self._fresh is not None else store.pull(binding.flat)[1]
                self._fresh = None
                break
            except Ended:
                return None
            except Fenced:
                self.fenced += 1
                self._fresh = None
                store.rejoin()
        binding.refresh()
        spans: list[Span] = [("wait", began, ready), ("pull", ready, time.monotonic())]
        self._step = _Step(claim, area, version, spans)
        return self._step

    def _begin_micro_batch(self, step: _Step) -> None:
        """The next micro-batch of at most the planned size.

        Each backward adds the mean over its micro-batch, so what is there is first brought to the new one's
        weight: after the last, of m samples, the sum times m / b is the mean over all b samples.
        """
        before, step.micro = step.micro_before, self._at_once(step)
        step.left -= step.micro
        if before and before != step.micro:
            self._require()[2].weigh(before / step.micro)
        step.micro_before = step.micro

    def _at_once(self, step: _Step) -> int:
        """Samples of the next micro-batch: as planned, and no more than memory holds now."""
        limits = (step.left, self.settings.micro_batch, self._room.look() if self._room is not None else 0)
        return min(limit for limit in limits if limit)

    def _offer(self) -> None:
        """Tell the policy how many samples fit into memory now."""
        if self._room is not None and self._room.look() != self._offered:
            self.store.offer(self._room.most_)
            self._offered = self._room.most_

    def _budget(self, device: torch.device) -> int:
        """All that this process may hold. The segment is this machine's, and so are the others in it."""
        alive = (MemberState.ACTIVE, MemberState.FENCED)
        others = [member.pid for member in self.store.members() if member.state in alive]
        return budget_bytes(device, sharers(others))

    def _claim(self) -> Claim:
        """start(), patient for as long as not every rank has joined for the first time."""
        deadline = time.monotonic() + ATTACH_TIMEOUT_SECONDS
        while True:
            try:
                return self.store.start()
            except TimedOut:
                if self.store.status().opened or time.monotonic() > deadline:
                    raise

    def _finish_gradients(self, attachment: Attachment, binding: Binding, scaler: Any) -> bool:
        """Bring the gradients to the area; False if the scaler found some that are not finite.

        torch's own optimizer.step() is called, with no gradients left: schedulers and scalers want to see it.
        """
        self._stepping, self._finite = True, False
        optimizer = attachment.optimizer
        try:
            if scaler is None:
                optimizer.step()
            elif getattr(optimizer, "_step_supports_amp_scaling", False):
                raise InputError("step", "optimizer.fused", "True", "False where a GradScaler is used")
            else:
                scaler.step(optimizer)
        finally:
            self._stepping = False
            binding.release()
        return self._finite

    def _on_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Runs before every optimizer.step(): takes the gradients away from it, so that it changes
        nothing.
        """
        if not self._stepping:
            raise InputError(
                "optimizer", "step", "a call of optimizer.step()", "worker.step(): the store steps"
            )
        binding = self._require()[2]
        binding.collect()
        binding.release()
        self._finite = True

    def _push(self, step: _Step, attachment: Attachment, binding: Binding, finite: bool) -> PushResult | None:
        samples = step.done if finite else 0
        hyper, share = hyper_of(attachment), step.micro / step.done  # see _begin_micro_batch
        encoding, norm = self.settings.encoding, self._square_norm(step.area, share)
        try:
            if self._is(R2SP):  # push and pull are one turn
                result, self._fresh = self.store.exchange(
                    step.area, samples, hyper, binding.flat, share, encoding=encoding
                )
                return result
            pulled = binding.flat if self._is(DCASGD) else None
            return self.store.push(
                step.area, samples, hyper, share, encoding=encoding, pulled=pulled, square_norm=norm
            )
        except Fenced:
            self.fenced += 1
            self.store.rejoin()
        except PushRejected:
            self.rejected += 1
        except NotFinite:
            self.skipped += 1
            self.store.push(step.area, 0, hyper)  # the claim was still ours
        return None

    def _square_norm(self, area: Area, share: float) -> float:
        """Of the gradient, where the policy learns from it."""
        learns = self._is(SaPS) and self.store.rules().threshold == RINGMASTER
        return float(np.dot(area.flat, area.flat)) * share**2 if learns else 0.0

    def _account(
        self, step: _Step, result: PushResult | None, finite: bool, loss: Any, pushed_at: float
    ) -> None:
        done = time.monotonic()
        taken = result is not None and finite
        self._count += 1
        self.steps += taken
        self.skipped += not finite
        if result is not None and result.wait_seconds > 0.0:
            waited = min(pushed_at + result.wait_seconds, done)
            step.spans.append(("wait", pushed_at, waited))
            pushed_at = waited
        step.spans.append(("push" if finite else "skip", pushed_at, done))
        if self._records is None:
            return
        claim = step.claim
        self._records.write(
            StepRecord(
                rank=self.rank, pid=os.getpid(), step=self._count, round=claim.round, plan=claim.plan,
                first=claim.first, samples=step.done, batch=claim.batch,
                version=result.version if result else step.version,
                staleness=result.staleness if result else 0, sources=result.sources if result else 0,
                loss=_number(loss), spans=step.spans,
                overrun_seconds=step.overrun_seconds,
                skipped=not finite, rejected=result is None,
            )
        )  # fmt: skip


def _number(loss: Any) -> float | None:
    return float(loss.detach() if isinstance(loss, torch.Tensor) else loss) if loss is not None else None


def _close_if_alive(worker: weakref.ref[Worker]) -> None:
    if (alive := worker()) is not None:
        alive.close()
