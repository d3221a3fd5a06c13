"""One worker of a run: join, attach a model, then batch after batch: claim, pull, compute, push.

    worker = pyps.join()
    worker.attach(model, optimizer)
    for inputs, targets in worker.batches(dataset):
        loss = loss_function(model(inputs), targets)  # the mean over the batch
        worker.backward(loss)
        worker.step(loss)

The store takes the optimizer's step; the torch optimizer only says which and with what constants.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from pyps.errors import InputError
from pyps.formats import options
from pyps.formats.options import check_limits
from pyps.formats.records import RecordWriter, drop_undone, record_path
from pyps.native.transfer import Transferred
from pyps.native.values import Claim, Codec, PushResult
from pyps.profiler.host_memory import disable_malloc_trim
from pyps.step.events import Abort, Continue, Control, Finish
from pyps.step.machine import even_steps, next_part
from pyps.store.policies import DEFAULT_POLICY, Policy, register_policy
from pyps.store.store import Store
from pyps.worker.data.epochs import Epochs, OnEpoch
from pyps.worker.data.loader import LoaderOptions
from pyps.worker.data.samples import Collate, make_source, warn_of_a_stream_anew
from pyps.worker.device.attach import (
    Attachment,
    OptimizerArgument,
    as_optimizers,
    check_same,
    hyper_of,
    inspect,
    open_or_create,
    set_planned_turns,
)
from pyps.worker.device.averages import plain_name
from pyps.worker.device.binding import Binding
from pyps.worker.local.local_state import with_moments
from pyps.worker.local.local_steps import (
    LocalStepsArgument,
    local_steps_of,
    stored_optimizer,
    with_local_steps,
)
from pyps.worker.run.mode import ModeOptions
from pyps.worker.run.notice import Notice
from pyps.worker.run.position import (
    ON_SCHEDULE,
    RunPosition,
    RunSchedule,
    SchedulerArgument,
    ScheduleUnit,
    warn_of_other_constants,
)
from pyps.worker.run.settings import Settings, check_agreed
from pyps.worker.step.attached import Attached, DivergenceCheck, shorten_tracebacks
from pyps.worker.step.feed import BatchFeed, RoundForecast
from pyps.worker.step.step import Step, number_of
from pyps.worker.step.transport import Transport

if TYPE_CHECKING:
    from pyps.profiler.throttle import Throttle

ATTACH_TIMEOUT_SECONDS = 300.0  # other workers may still be importing torch and reading data


def join(
    store: str | None = None,
    rank: int | None = None,
    *,
    batches: list[int] | None = None,
    policy: Policy | options.PolicyOption | None = None,
    samples: options.SamplesOption | None = None,
    seed: options.SeedOption | None = None,
    run_dir: str | options.RunDirOption | None = None,
    micro_batch: options.MicroBatchOption | None = None,
    codec: Codec | str | options.CodecOption | None = None,
    depth: options.DepthOption | None = None,
    allow_nonfinite: options.AllowNonfiniteOption | None = None,
) -> Worker:
    """Make this process a worker of a run. Under `pyps run` no argument is needed; otherwise at least store,
    rank and batches are. Arguments override the environment.

    store: the segment's name or address. rank: in the store. batches: the planned batch of each rank.
    run_dir: folder for step records. depth: steps under way at once; "auto": as many as planned, or 2.
    codec: a name, or "plan": gradients and parameters with the plan's bits. pyps.formats.options says what
    the others are. Raises InputError, naming what is missing or outside its limits.
    """
    given = {"samples": samples, "seed": seed, "micro_batch": micro_batch}
    check_limits(join, given)
    if store is not None and rank is None:
        raise InputError("join", "rank", "nothing", "a whole number of at least 0, as store is given")
    settings = Settings.from_env() if store is None else Settings(store, rank or 0, DEFAULT_POLICY)
    settings = settings.with_arguments(
        ModeOptions(policy=policy, codec=codec, depth=depth),
        rank=rank,
        batches=batches,
        run_dir=None if run_dir is None else Path(run_dir),
        allow_nonfinite=allow_nonfinite,
        **given,
    )
    shorten_tracebacks()
    return Worker(settings)


class Worker:
    """Made by pyps.join(); a context manager, closed at exit otherwise.

    `rank` counts the workers of all hosts from 0. `steps` counts the pushes that were admitted, `fenced`,
    `rejected` and `aborted` the gradients that were dropped: by a deadline, by the policy when done, and by
    the policy before. `skipped` counts the steps whose gradient was not finite.

    On SIGTERM the worker finishes its step (of one in micro-batches, those begun), pushes it, gives back what
    it has claimed, and raises SystemExit(143) in batches(); see pyps.worker.run.notice.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rank = settings.rank
        self.steps = self.rejected = self.aborted = self.skipped = 0
        self._store: Store | None = None
        self._attached: Attached | None = None
        self._step: Step | None = None
        self._records: RecordWriter | None = None
        self._throttle: Throttle | None = None
        self._divergence = DivergenceCheck()
        self._notice = Notice()
        self._notice.listen()
        self._count = self._begun = 0
        self._position: RunPosition | None = None  # of the last step that began

    @property
    def fenced(self) -> int:
        return self._attached.client.fenced if self._attached is not None else 0

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

    @property
    def position(self) -> RunPosition:
        """Where the run is: at the step under way; before the first one, where the others are.

        Never goes back, and is the run's also in a worker that started again: scripts whose logic follows
        epochs or steps should ask it and count nothing themselves. Raises InputError before attach().
        """
        if self._position is not None:
            return self._position
        attached, status = self._require(), self.store.status()
        held = [member.claim_first for member in self.store.members() if member.claim_count]
        samples = min([status.samples_assigned, *held])
        return RunPosition(samples, samples // attached.global_batch, status.version)

    def attach(
        self,
        model: nn.Module,
        optimizer: OptimizerArgument = None,
        *,
        scheduler: SchedulerArgument = None,
        scheduler_unit: ScheduleUnit = "batch",
        clip_norm: float | None = None,
        local_steps: LocalStepsArgument = "plan",
        outer: torch.optim.Optimizer | None = None,
        merges: int = 0,
        average_moments: bool | None = None,
        master: str | None = None,
        resume: str | Path | None = None,
        timeout: float = ATTACH_TIMEOUT_SECONDS,
    ) -> None:
        """Rank 0 puts the model's parameters in the store; the others check that theirs have the same shapes.

        optimizer: torch.optim.SGD, AdamW, Adam or Adagrad without earlier steps; None: SGD with torch's
        defaults. Its groups' options are read again at every step. The training script must not call its
        step(). scheduler: a torch learning-rate scheduler of it, or several; before each batch the worker
        steps them to the run's position, also in a process that started again. scheduler_unit: what one step
        of a scheduler stands for, a global "batch" or an "epoch". clip_norm: the bound of the gradient's norm
        over all parameters, as in torch's clip_grad_norm_: where gradients are collected into a round, of
        their mean over the global batch; elsewhere of each by itself; with local steps, of each of these.
        local_steps: steps of `optimizer`, then any of torch's, or several that share the parameters, between
        two pushes of the difference that they made; "plan": as planned, by default none. outer: the store's
        optimizer for these differences; None: SGD with lr 0.6 and Nesterov's momentum of 0.5. merges: how
        often the worker pulls between two pushes, and goes on from there with the local steps that it has
        taken; without effect where workers wait for rounds, take turns, or have a pipeline. average_moments:
        the moments of SGD, Adam, AdamW or Muon are averaged over the workers, as the parameters are: as many
        values more each way, in fp32; None: as planned. master: how a new store keeps the parameters, "f32"
        or "bf16" (as in Store.create); None: as the checkpoint says, else "f32". resume: a checkpoint, or a
        folder of which the newest is taken, that a new store goes on from in place of the model's parameters;
        under `pyps run`, its --resume. timeout: seconds to wait for rank 0. Raises InputError for a model,
        optimizer or scheduler that cannot be used here, StoreError if rank 0 creates no store.

        A parameter without a gradient in a step counts as having a gradient of zero (it decays, its momentum
        goes on). Persistent floating-point buffers (BatchNorm's statistics) become the mean of the workers'.
        """
        if self._attached is not None:
            raise InputError("attach", "model", "a second one", "one model for each worker")
        disable_malloc_trim()
        settings = with_local_steps(self.settings, local_steps)
        chosen = as_optimizers(optimizer, model, is_local=(is_local := settings.local_steps > 0))
        stored = stored_optimizer(chosen, outer, settings)
        attachment = replace(inspect(model, stored, None if is_local else clip_norm), master=master)
        if settings.average_moments if average_moments is None else average_moments:
            attachment = with_moments(attachment, chosen, settings)
        schedule = RunSchedule(scheduler, chosen, scheduler_unit)
        self.settings = settings
        resumed = settings if resume is None else replace(settings, resume=Path(resume))
        store, pushes = self._join(resumed, attachment, timeout)
        local = local_steps_of(settings, store, chosen, attachment.entries, clip_norm, pushes, merges)
        self._attached = Attached(model, attachment, store, schedule, self.settings, local, self._report)
        self._attached.client.idle = self._notice.idle
        if is_local or not schedule:
            warn_of_other_constants(store, hyper_of(attachment), "begins with", ON_SCHEDULE)
        self._begin(self._attached.binding)
        self._attached.changes.note()

    def _begin(self, binding: Binding) -> None:
        """The model goes on from the store's parameters, and records begin."""
        self.store.pull(binding.flat)
        binding.refresh()
        self._throttle = self.settings.make_throttle(on_gpu=binding.on_gpu)
        if self.settings.run_dir is not None:
            self._records = RecordWriter(record_path(self.settings.run_dir, self.rank, os.getpid()))

    def _join(self, settings: Settings, attachment: Attachment, timeout: float) -> tuple[Store, int]:
        """Open the run's store, which rank 0 makes, and join it; the store, and this rank's pushes so far."""
        register_policy(settings.policy)
        self._store = store = settings.across_links(open_or_create(settings, attachment, timeout))
        atexit.register(_close_if_alive, weakref.ref(self))
        check_same(store, attachment)
        check_agreed(store, settings)
        if settings.journal is not None:
            store.journal(settings.journal)
        set_planned_turns(store, settings)
        is_new = (settings.launched or settings.may_be_new) and self.rank >= store.layout.ranks
        store.join(self.rank, "new_worker" if is_new else "worker")
        store.set_threads(settings.threads)
        if settings.cost_model is not None:
            store.set_cost_model(settings.cost_model)
        ranks = store.ranks()
        pushes = ranks[self.rank].pushes if self.rank < len(ranks) else 0
        if settings.run_dir is not None and settings.launched:
            drop_undone(settings.run_dir, self.rank, pushes)
        return store, pushes

    def batches(
        self,
        dataset: Any,
        num_workers: int = 0,
        *,
        collate_fn: Collate | None = None,
        pin_memory: bool = False,
        prefetch: int = 2,
        sharded: bool = False,
        on_epoch: OnEpoch | None = None,
        **loader_options: Any,
    ) -> Iterator[Any]:
        """Yield this worker's batches until the run's samples are used up. Call step() after each.

        dataset: a map-style dataset, an IterableDataset, or a tuple of tensors (indexed at once, here).
        num_workers: processes that load batches while steps are computed; 0: each is loaded when needed.
        collate_fn: makes a batch of samples; None: torch's default.
        prefetch: batches that each loader process loads in advance, as far as claims are known.
        sharded: an IterableDataset that gives each rank and loader process its part by itself; otherwise each
            takes its share of one stream. A stream that ends begins again.
        on_epoch: a validation (pyps.worker.data.epochs): called with the number of finished epochs, on one
            rank, with the newest parameters in the model. Rounds wait for it, at most the round timeout.
        pin_memory, loader_options: torch's DataLoader's: timeout, worker_init_fn ...

        Which sample a position means depends on the seed alone, and so do random numbers: torch, NumPy and
        random are seeded before each sample is read and each batch is yielded. Where the plan splits this
        rank's batch, micro-batches are yielded. At the end the model holds the run's final parameters. Raises
        InputError without step() for the last batch, and for a dataset unreadable or unlike other ranks'.
        """
        attached, settings = self._require(), self.settings
        attached.changes.check()
        ranks, ahead = self.store.layout.ranks, attached.needs.allows_pipeline
        source = make_source(dataset, collate_fn, settings.seed, self.rank, ranks, sharded=sharded)
        _check_length(source.length, settings.dataset_size)
        warn_of_a_stream_anew(source, self.store, self.rank)
        options = LoaderOptions(num_workers, prefetch, loader_options | {"pin_memory": pin_memory})
        forecast = None if ahead else RoundForecast(sum(settings.batches), settings.samples)
        client, transport = attached.client, attached.transport
        epochs = Epochs(on_epoch, self.refresh, self.store, self.rank, settings.run_dir) if on_epoch else None
        with BatchFeed(source, options, client, transport.claim_ahead, self._at_once, forecast) as feed:
            while (step := self._next_step(transport)) is not None:
                self._step = step
                self._follow(step, source.length)
                if epochs is not None:
                    epochs.follow(self.position.samples, source.length, attached.global_batch)
                feed.begin(step.claim)
                while step.left:
                    self._begin_micro_batch(step)
                    batch = feed.load(step)
                    if self._throttle is not None:
                        step.throttle = self._throttle.span(batch=step.micro)
                        step.throttled = step.throttle.__enter__()
                    yield batch
                    if self._step is step and step.micro:
                        found = "no step() since the last batch"
                        raise InputError("worker", "batches", found, "step() after each batch")
                    attached.changes.check()
        self.refresh()
        if epochs is not None:
            epochs.end(source.length)

    def _next_step(self, transport: Transport) -> Step | None:
        """Claim the next step; None when the run's samples are used up. Raises SystemExit on notice."""
        self._notice.leave_if_asked()
        self._notice.busy = True
        if (local := self._require().local) is not None:
            local.give_up()
        step = transport.begin()
        self._require().changes.note()
        self._notice.leave_if_asked()
        self._notice.busy = step is not None
        return step

    def _follow(self, step: Step, dataset_length: int) -> None:
        """A step begins: bring the schedule, and what counts batches in the model, to its position."""
        attached, claim = self._require(), step.claim
        samples = max(claim.first, self._position.samples if self._position is not None else 0)
        whole = samples // attached.global_batch
        self._position = RunPosition(samples, whole, step.version, dataset_length)
        self._begun += 1
        attached.schedule.follow(self._position)
        planned = -(-claim.count // self._at_once(claim.count))
        attached.binding.buffers.begin_step(whole, planned, max(1, self.settings.local_steps))
        if attached.local is not None:
            attached.local.begin()

    @property
    def accumulating(self) -> bool:
        """Return whether more micro-batches of this step follow: a GradScaler's update(), and the step() of a
        schedule that attach() was not given, wait until none do. Never with local steps.
        """
        return self._step is not None and self._step.left > 0 and not self.settings.local_steps

    def backward(self, loss: torch.Tensor, n: float | None = None, **options: Any) -> None:
        """Run loss.backward(), and note what the gradient weighs: what the loss was divided by.

        So the mean of a round, and of micro-batches, is the gradient of the same loss on all of their
        samples: also of a mean over targets, by class weights, or over what a mask leaves. A loss whose
        graph cannot say it (compiled, a sum, a model's own operation) needs `n`: how many items it is a mean
        over; 0: the gradient counts for nothing. options: of torch's backward. Raises InputError for terms
        with divisors for which no single weight is right.
        """
        step, attached = self._step, self._require()
        if step is None or not step.micro:
            raise InputError("worker", "backward", "no batch", "a batch of batches() first")
        attached.weights.backward(step, attached.binding, loss, n, options)

    def step(self, loss: Any = None, scaler: Any = None) -> PushResult | None:
        """Push the gradient. Returns None if it was skipped or dropped, or while micro-batches of it are
        still to come. After a plain loss.backward() it counts as the mean over the claimed samples.

        loss: a number or a scalar tensor; only recorded. scaler: a torch.amp.GradScaler; gradients are
        unscaled, and the step is skipped if they are not finite. Call scaler.update() afterwards. A worker
        that was fenced meanwhile rejoins and drops this gradient. In a pipeline the result, or the error
        raised, is that of an earlier step. Raises InputError if no backward() ran, and Diverged, before
        anything is pushed, for a loss or parameters that are not finite.
        """
        step, attached = self._step, self._require()
        if step is None or not step.micro:
            raise InputError("worker", "step", "no batch", "step() once after each batch of batches()")
        attached.changes.check()
        attached.binding.check_kept()
        attached.binding.backward.check()
        loss = attached.weights.end(step, attached.binding, loss, scaler)
        step.done += step.micro
        if attached.local is not None:
            attached.local.step(scaler)
        step.finite = bool(step.left) or self._collect(step, attached, scaler)
        if step.throttle is not None and step.throttled is not None:
            step.throttle.__exit__(None, None, None)
            step.overrun_seconds += step.throttled.overrun_seconds
        ready = time.monotonic()
        step.computed(ready)
        step.loss = number_of(loss)
        if step.finite and not (self.settings.allow_nonfinite or (scaler is not None and step.left)):
            self._divergence.check(step, attached.binding.flat)
        if step.left:
            following: Control = Finish()
            if not self._notice.received:
                following = attached.transport.go_on(step, self._at_once(step.left))
            if isinstance(following, Continue):
                step.micro = 0
                if attached.local is None:
                    attached.binding.keep()
                attached.changes.note()
                return None
            step.finite = self._collect(step, attached, scaler)
            step.left = 0
            if isinstance(following, Abort):
                self.aborted += not following.fenced
                self._step = None
                attached.changes.note()
                self._report(step, Transferred(spans=(("push", ready, time.monotonic()),)))
                return None
        self._step = None
        # Without a schedule, the script's own is as old as the script.
        position = self.position.global_batches if attached.schedule else self._begun
        result = attached.transport.send(step, attached.request(step, position))
        attached.changes.note()
        return result

    def refresh(self) -> int:
        """Pull one single version into the model, as for an evaluation, after any transfer under way; the
        version. Local steps taken since the last push are put on it when the next batch begins.
        """
        attached = self._require()
        attached.changes.check()
        version = attached.refresh(self._step)
        attached.changes.note()
        return version

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The model's state after `refresh`, copied: parameters and averaged buffers of one version, by the
        names that they have without torch.compile.
        """
        self.refresh()
        state = self._require().model.state_dict()
        return {plain_name(name): value.detach().clone() for name, value in state.items()}

    def close(self) -> None:
        """Leave the run. Samples claimed but not pushed go back to be assigned again. Idempotent.

        Raises TimedOut if a pipeline's transfer does not end; the worker leaves the run when it does.
        """
        self._step = None
        self._notice.busy = True
        try:
            if self._attached is not None:
                self._attached.binding.close()
                self._attached.transport.close()
            elif self._store is not None:
                self._store.close()
        finally:
            self._notice.close()
        if self._records is not None:  # else a later call records what comes of the steps under way
            self._records.close()
            self._records = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require(self) -> Attached:
        if self._attached is None:
            raise InputError("worker", "model", "nothing", "attach(model) first")
        return self._attached

    def _begin_micro_batch(self, step: Step) -> None:
        """The next micro-batch of at most the planned size.

        Each backward adds the mean over its micro-batch (see Weights). Local steps leave nothing to add to.
        """
        attached = self._require()
        binding = attached.binding
        step.micro = self._at_once(step.left)
        binding.buffers.begin_micro_batch()
        step.left -= step.micro
        if attached.local is not None:
            attached.local.resume_steps()
        attached.weights.begin(step, binding)
        binding.backward.begin()
        attached.changes.note()

    def _at_once(self, left: int) -> int:
        """Samples of the next micro-batch: as planned, and no more than memory holds now."""
        attached = self._require()
        limits = (left, self.settings.micro_batch, attached.budget.look() if attached.budget else 0)
        most = min(filter(None, limits))
        return even_steps(left, most) if attached.local is not None else next_part(left, most)

    def _collect(self, step: Step, attached: Attached, scaler: Any) -> bool:
        """Bring what is pushed to the staging buffer; False if the scaler found what is not finite."""
        try:
            if attached.local is not None:
                attached.local.collect(step.staging.index)
                step.finite_ranges = attached.binding.collect(1.0, unscaled=False)
                return True
            if scaler is not None:
                attached.optimizer.unscale(scaler)
            step.finite_ranges = attached.binding.collect(step.share, unscaled=scaler is not None)
        finally:
            attached.binding.release()
        return attached.optimizer.call(scaler)

    def _report(self, step: Step, done: Transferred) -> None:
        """Count and record what became of a step."""
        self._count += 1
        self.steps += done.result is not None and step.finite
        self.rejected += done.rejected
        self.skipped += done.skipped or not step.finite
        if (local := self._require().local) is not None:
            local.pushed(done.result)
        if self._records is not None:
            depth = self._require().transport.depth
            self._records.write(step.record(self.rank, self._count, done, depth))
        if done.skipped and not self.settings.allow_nonfinite:
            raise self._divergence.error("the gradient is not finite", step)


def _close_if_alive(worker: weakref.ref[Worker]) -> None:
    if (alive := worker()) is not None:
        alive.close()


def _check_length(found: int, announced: int) -> None:
    """Raise InputError if a data set has another number of samples than --dataset-size. 0: not known."""
    if announced and found not in (0, announced):
        expected = f"{announced}, as --dataset-size says"
        raise InputError("batches", "dataset", f"{found} samples", expected)
