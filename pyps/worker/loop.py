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
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import nn

from pyps.errors import (
    Ended,
    Fenced,
    InputError,
    TimedOut,
)
from pyps.formats.records import RecordWriter, Span, record_path
from pyps.native.values import Advice, Claim, Codec, Encoding, MemberState, PushRequest, PushResult
from pyps.profiler.host_memory import cgroup_peers, disable_malloc_trim
from pyps.store.policies import Policy, register_policy
from pyps.store.staging import StagingBuffer
from pyps.store.store import Store
from pyps.worker.attach import Attachment, Binding, check_same, hyper_of, inspect, open_or_create
from pyps.worker.memory import MemoryBudget, budget_bytes
from pyps.worker.pipeline import Delivery, Pipeline
from pyps.worker.sampling import fetcher, indices
from pyps.worker.settings import Settings, read_settings
from pyps.worker.step import Step, number_of
from pyps.worker.transport import Outcome, Transfer

if TYPE_CHECKING:
    from pyps.profiler.throttle import Throttle

ATTACH_TIMEOUT_SECONDS = 300.0  # others may still be importing torch and reading data
PATIENCE = 4.0  # round timeouts that a transfer may take: it waits twice, for up to two


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
    pipeline: bool | None = None,
) -> Worker:
    """This process's part of a run. Under `pyps run` without arguments; else at least store, rank and
    batches.

    An argument goes before what the launcher set. `batches` is the planned batch of each rank, `samples` the
    sample positions of the whole run (0: without end), `micro_batch` the most samples to compute at once
    (None: as the plan says), `codec` how gradients travel: what it does not carry is added to this rank's
    next gradient; "plan": gradients and parameters with the plan's bits. `pipeline`: transfers run beside the
    next step, which is computed on parameters one more step old. Raises InputError, naming what is missing.
    """
    return Worker(
        read_settings(store, rank, batches, policy, samples, seed, run_dir, micro_batch, codec, pipeline)
    )


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
        self._step: Step | None = None
        self._records: RecordWriter | None = None
        self._throttle: Throttle | None = None
        self._room: MemoryBudget | None = None
        self._offered = -1
        self._stepping = self._finite = self._unscaled = False
        self._count = 0
        self._fresh: int | None = None  # the version that is in the model already
        self._waited: list[Span] = []
        self._pipeline: Pipeline | None = None
        self._neighbours = 1

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
        disable_malloc_trim()
        chosen = optimizer if optimizer is not None else torch.optim.SGD(model.parameters())
        attachment = inspect(model, chosen)
        register_policy(self.settings.policy)
        self._store = store = open_or_create(self.settings, attachment, timeout)
        atexit.register(_close_if_alive, weakref.ref(self))
        check_same(store, attachment)
        if self.settings.journal is not None:
            store.journal(self.settings.journal)
        store.join(self.rank)
        # In a pipeline the carrier encodes, beside the next step; and whether a gradient is admitted, so that
        # what is left of it counts, is known too late for an encoder here.
        binding = Binding(attachment, store, None if self.settings.pipeline else self.settings.encoding.codec)
        self._attached = (model, attachment, binding)
        store.pull(binding.flat)
        binding.refresh()
        chosen.register_step_pre_hook(self._on_optimizer_step)
        self._throttle = self.settings.make_throttle(on_gpu=binding.on_gpu)
        self._needs = store.policy_needs()
        if self._needs.resizes_batches:
            read = partial(self._budget, binding.device)
            self._room = MemoryBudget(self.settings.memory, self.settings.max_batch, read)
        self._transfer = Transfer(store, self.settings.pull_codec, self._needs.uses_turns)
        if self.settings.pipeline:
            patience = PATIENCE * max(1.0, self.settings.policy.round_timeout_seconds)
            self._pipeline = Pipeline(store, self._transfer, binding.flat.size, patience, self._offer)
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
        was fenced meanwhile rejoins and drops this gradient. In a pipeline the result is that of the step
        before, and so is what its transfer raised.
        """
        step, (_, attachment, binding) = self._step, self._require()
        if step is None or not step.micro:
            raise InputError("worker", "step", "no batch", "step() once after each batch of batches()")
        binding.check_kept()
        step.done += step.micro
        step.finite = bool(step.left) or self._finish_gradients(attachment, binding, scaler)
        if step.throttle is not None and step.throttled is not None:
            step.throttle.__exit__(None, None, None)
            step.overrun_seconds += step.throttled.overrun_seconds
        ready = time.monotonic()
        step.spans.append(("compute", step.began, ready))
        step.loss = number_of(loss)
        if step.left:
            advice = self._advice(step)
            if advice is Advice.CONTINUE:
                step.micro = 0
                binding.keep()
                return None
            step.finite = self._finish_gradients(attachment, binding, scaler)
            step.left = 0
            if advice is Advice.ABORT:
                self._step = None
                self._settle(step, Outcome(spans=[("push", ready, time.monotonic())]))
                return None
        self._step = None
        request = self._request(step, attachment, binding)
        if self._pipeline is not None:
            return self._send(self._pipeline, step, request)
        outcome = self._transfer.push(request, binding.flat)
        self._fresh = outcome.version
        binding.settle(outcome.result is not None and step.finite)
        self._settle(step, outcome)
        return outcome.result if step.finite else None

    def _advice(self, step: Step) -> Advice:
        """Between two micro-batches: whether the next one is worth computing. In a pipeline nobody asks: the
        answer would be about the gradient that is travelling.
        """
        if self._pipeline is not None or not self._needs.checks_between_micro_batches:
            return Advice.CONTINUE
        try:
            advice = self.store.should_continue(step.done, self._at_once(step))
        except Fenced:
            self.fenced += 1
            self.store.rejoin()
            return Advice.ABORT
        self.aborted += advice is Advice.ABORT
        return advice

    def refresh(self) -> int:
        """Pull one single version into the model, as for an evaluation, after any transfer under way; the
        version.
        """
        _, _, binding = self._require()
        self._receive()
        _, version = self.store.pull(binding.flat, strict=True)
        binding.refresh()
        if self._pipeline is not None:
            self._fresh = version
        return version

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The model's state after `refresh`, copied: parameters of one version, buffers of this worker."""
        self.refresh()
        return {name: value.detach().clone() for name, value in self._require()[0].state_dict().items()}

    def close(self) -> None:
        """Leave the run; samples claimed but not pushed go back to be handed out again. Idempotent.

        Raises TimedOut if a transfer of a pipeline does not end; the run is left when it does.
        """
        if self._attached is not None:
            self._attached[2].close()
        self._step = None
        try:
            if self._pipeline is not None:
                self._pipeline.close()
                if not self._pipeline.failed:
                    self._receive()
            elif self._store is not None:
                self._store.close()
        finally:
            if self._records is not None:
                self._records.close()
                self._records = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self.close()

    def _require(self) -> tuple[nn.Module, Attachment, Binding]:
        if self._attached is None:
            raise InputError("worker", "model", "nothing", "attach(model) first")
        return self._attached

    def _begin(self) -> Step | None:
        """Claim, get a staging buffer, pull; None when the run's samples are used up. A fenced worker rejoins
        first.
        """
        _, _, binding = self._require()
        if self._pipeline is not None and self._pipeline.ahead is None:
            self._receive()
        store, began, waited = self.store, time.monotonic(), self._waited
        self._waited = []
        while True:
            try:
                claim, staging = self._claimed()
                ready = time.monotonic()
                binding.fill(staging)
                fetched = self._fresh is None
                version = self._transfer.pull(binding.flat) if self._fresh is None else self._fresh
                if self._pipeline is None:
                    self._fresh = None
                elif fetched:
                    self._fresh = version
                    self._pipeline.claim_ahead()
                break
            except Ended:
                return None
            except Fenced:
                self.fenced += 1
                self._fresh = None
                store.rejoin()
        binding.refresh()
        spans: list[Span] = [*waited, ("wait", began, ready), ("pull", ready, time.monotonic())]
        self._step = Step(claim, staging, version, spans)
        return self._step

    def _claimed(self) -> tuple[Claim, StagingBuffer]:
        """The samples of the next step, and where its gradient goes. Raises Ended, Fenced."""
        if self._pipeline is not None and self._pipeline.ahead is not None:
            ahead, self._pipeline.ahead = self._pipeline.ahead, None
            return ahead
        self._fresh = None if self._pipeline is not None else self._fresh
        self._offer()
        return self._claim(), self.store.stage()

    def _begin_micro_batch(self, step: Step) -> None:
        """The next micro-batch of at most the planned size.

        Each backward adds the mean over its micro-batch, so what is there is first brought to the new one's
        weight: after the last, of m samples, the sum times m / b is the mean over all b samples.
        """
        before, step.micro = step.micro_before, self._at_once(step)
        step.left -= step.micro
        if before and before != step.micro:
            self._require()[2].weigh(before / step.micro)
        step.micro_before = step.micro
        if not step.left:
            self._require()[2].last(step.micro / (step.done + step.micro))

    def _at_once(self, step: Step) -> int:
        """Samples of the next micro-batch: as planned, and no more than memory holds now."""
        limits = (step.left, self.settings.micro_batch, self._room.look() if self._room is not None else 0)
        return min(limit for limit in limits if limit)

    def _offer(self) -> None:
        """Tell the policy how many samples fit into memory now, which the others in the store may share."""
        if self._room is None:
            return
        alive = (MemberState.ACTIVE, MemberState.FENCED)
        others = [member.pid for member in self.store.members() if member.state in alive]
        self._neighbours = cgroup_peers(others)  # of this machine, as the segment is
        if self._room.look() != self._offered:
            self.store.set_max_samples(self._room.most_)
            self._offered = self._room.most_

    def _budget(self, device: torch.device) -> int:
        """All that this process may hold. Asks nothing of the store, which may be in use by a transfer."""
        return budget_bytes(device, self._neighbours)

    def _claim(self) -> Claim:
        """start(), patient for as long as not every rank has joined for the first time."""
        deadline = time.monotonic() + ATTACH_TIMEOUT_SECONDS
        while True:
            try:
                return self.store.start()
            except TimedOut:
                if self.store.status().all_joined or time.monotonic() > deadline:
                    raise

    def _finish_gradients(self, attachment: Attachment, binding: Binding, scaler: Any) -> bool:
        """Bring the gradients to the staging buffer; False if the scaler found some that are not finite.

        torch's own optimizer.step() is called, with no gradients left: schedulers and scalers want to see it.
        """
        self._stepping, self._finite, self._unscaled = True, False, scaler is not None
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
        binding, step = self._require()[2], self._step
        share = step.micro / step.done if step is not None else 1.0
        binding.collect(share, unscaled=self._unscaled)
        binding.release()
        self._finite = True

    def _request(self, step: Step, attachment: Attachment, binding: Binding) -> PushRequest:
        """What is to be sent of a step whose gradients are in its staging buffer."""
        share = step.micro / step.done  # see _begin_micro_batch
        norm = (
            float(np.dot(step.staging.flat, step.staging.flat)) * share**2
            if self._needs.needs_grad_norm
            else 0.0
        )
        pulled = binding.flat if self._needs.needs_base_params else None
        if pulled is not None and self._pipeline is not None:
            pulled = pulled.copy()  # the model goes on while this travels
        samples = step.done if step.finite else 0
        codes = binding.codes if samples else None
        encoding = self.settings.encoding
        return PushRequest(
            staging=step.staging.index,
            samples=samples,
            hyper=hyper_of(attachment),
            scale=share if codes is None else 1.0,
            encoding=encoding if codes is None else Encoding(encoding.codec),
            gradient=codes,
            encoded=codes is not None,
            base_params=pulled,
            base_version=step.version,
            grad_norm_squared=norm,
            # Serially it took as long as its claim was held. A claim of a pipeline is held for longer.
            compute_seconds=time.monotonic() - step.created if self._pipeline is not None else 0.0,
        )

    def _send(self, pipeline: Pipeline, step: Step, request: PushRequest) -> PushResult | None:
        """Let a gradient travel beside the next step; the result of the one before."""
        before = self._receive()
        if before is not None and before.lost:
            self._settle(step, Outcome(rejected=True))
        else:
            pipeline.send(step, request)
        return before.outcome.result if before is not None else None

    def _receive(self) -> Delivery | None:
        """Wait for the transfer under way: its parameters are then in the model."""
        began = time.monotonic()
        received = self._pipeline.receive() if self._pipeline is not None else None
        if self._pipeline is None or received is None:
            return None
        step, delivery = received
        binding, version = self._require()[2], delivery.outcome.version
        if version is not None:
            np.copyto(binding.flat, self._pipeline.spare)
            binding.refresh()
            self._fresh = version
        self._waited = [("wait", began, time.monotonic())]
        self._settle(step, delivery.outcome)
        if delivery.lost and not delivery.outcome.fenced:
            self.fenced += 1
        return delivery

    def _settle(self, step: Step, outcome: Outcome) -> None:
        """Count and record what became of a step."""
        self._count += 1
        self.steps += outcome.result is not None and step.finite
        self.fenced += outcome.fenced
        self.rejected += outcome.rejected
        self.skipped += outcome.unencodable or not step.finite
        if self._records is not None:
            depth = 1 if self._pipeline is None else 2
            self._records.write(step.record(self.rank, self._count, outcome, depth))


def _close_if_alive(worker: weakref.ref[Worker]) -> None:
    if (alive := worker()) is not None:
        alive.close()
