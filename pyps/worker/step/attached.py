"""Define what a worker has once a model is attached, how it is put together, and how misuse is shown."""

from __future__ import annotations

import math
import sys
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from pyps.errors import Diverged, InputError, InvalidArgument
from pyps.formats.mode import Mode
from pyps.native.decisions import PolicyNeeds
from pyps.native.values import Codec, Encoding, PushRequest
from pyps.solver.online.mode import ModeBalancer
from pyps.step.machine import StepRules
from pyps.step.own import follows_own, loss_of_pipeline
from pyps.store.codec import name_of
from pyps.store.store import Store
from pyps.worker.device.attach import Attachment, OptimizerSteps, hyper_of
from pyps.worker.device.binding import Binding
from pyps.worker.local.local_steps import LocalSteps
from pyps.worker.run.memory import MemoryBudget
from pyps.worker.run.position import RuleWatch, RunSchedule
from pyps.worker.run.settings import Settings
from pyps.worker.step.client import StoreClient
from pyps.worker.step.onward import Onward, onward_vectors
from pyps.worker.step.step import Step
from pyps.worker.step.terms import OWN_BATCHES, normalized_by_batch
from pyps.worker.step.transport import StepCallback, Transport, check_depth, extra_buffers
from pyps.worker.step.weights import Weights

CHECK_EVERY = 32  # steps between two checks of the parameters where no loss is given
SHOWN_SHORT = (InputError, InvalidArgument, Diverged)
INSIDE = (f"{Path(__file__).parents[2]}/", f"{Path(torch.__file__).parent}/")
SINGLE = "for the gradient of a single process: GroupNorm or LayerNorm, or BatchNorm in eval mode"
TRANSFER_ROUND_TIMEOUTS = 4.0  # that a transfer may take: it waits twice, for up to two


class Attached:
    """A model's way to the store and back.

    model, attachment: what of it is in the store, which the worker has joined. schedule: of the worker's
    optimizer. settings: of the run. local: the worker's own optimizer, where it takes local steps. report:
    gets each step that was sent, once its outcome is known. `budget`: where the policy resizes batches.
    """

    def __init__(
        self,
        model: nn.Module,
        attachment: Attachment,
        store: Store,
        schedule: RunSchedule,
        settings: Settings,
        local: LocalSteps | None,
        report: StepCallback,
    ) -> None:
        self.model, self.attachment, self.schedule, self.local = model, attachment, schedule, local
        self.needs = needs = store.policy_needs()
        if store.layout.ranks > 1 and settings.rank == 0 and normalized_by_batch(model):
            warnings.warn(f"{OWN_BATCHES}; {SINGLE}", stacklevel=3)
        check_depth(settings.most_depth, store)
        merges, optimizer = local.merges if local is not None else 0, store.layout.optimizer
        rules = StepRules(settings.depth, needs, store.layout.ranks, local is not None, merges)
        # Whether the worker goes on along its own gradients, which it needs as they are.
        follows = follows_own(rules, optimizer, lookahead=settings.policy.looks_ahead)
        if settings.rank == 0 and follows:
            warnings.warn(loss_of_pipeline(optimizer, settings.most_depth), stacklevel=3)
        self.binding = _binding_of(attachment, store, settings, local is not None, follows)
        self.budget = _budget_of(self.binding, store, settings, local is not None, follows)
        self.client = StoreClient(store, settings.pull_codec, budget=self.budget)
        self.global_batch = sum(settings.batches) or sum(rank.batch for rank in store.ranks())
        self.transport = Transport(
            self.client,
            self.binding,
            report,
            rules,
            encoding=settings.encoding,
            modes=_mode_balancer(settings, self.client),
            own=Onward(optimizer, store.tensors, self.global_batch) if follows else None,
            timeout=TRANSFER_ROUND_TIMEOUTS * max(1.0, settings.policy.round_timeout_seconds),
            merge=local.merge if local is not None else None,
        )
        rounds = needs.waits_for_rounds or needs.collects_pushes
        self.weights = Weights(rounds=rounds and store.layout.ranks > 1, local=local is not None)
        self.optimizer = OptimizerSteps(attachment.optimizer, (e.parameter for e in attachment.entries))
        stored = {} if local is not None else {e.name: e.parameter for e in attachment.entries}
        self.changes = ScriptChanges(stored)
        self.rule = RuleWatch(needs.lets_ranks_rest and not store.policy_params().backup)

    def refresh(self, step: Step | None) -> int:
        """Pull one single version into the model, after any transfer under way; the version. step: the one
        under way, which goes on from there.
        """
        pull, local = self.transport.refresh, self.local
        if step is None:
            return pull()
        version = pull() if local is None else local.pull_whole(pull)
        self.binding.buffers.begin_again(forwards=1 if step.micro else 0)
        if local is not None or not step.done:
            step.version = version  # of what its gradient is computed on
        return version

    def request(self, step: Step, position: int) -> PushRequest:
        """The push of a step whose gradients are in its staging buffer. position: of its learning rate."""
        binding, needs = self.binding, self.needs
        samples = step.done if step.finite else 0
        hyper = hyper_of(self.attachment)
        if self.transport.depth == 1 and (self.rule.is_exact or not self.schedule):  # a pipeline cannot wait
            self.rule.check(self.client.store, hyper)
        hyper += binding.buffers.hyper()
        step.lr, share = hyper[0].lr, step.share
        if self.local is not None:
            step.lr, share = self.local.lr, 1.0
        codes = binding.codes if samples else None
        half = binding.half if codes is not None else None  # and not scaled, as others are
        encoding, squared_norm = self.transport.encoding, 0.0
        if needs.needs_grad_norm:
            flat = step.staging.flat[: self.client.store.layout.trained_elements]
            squared_norm = binding.squared_norm(flat) * share**2
        return PushRequest(
            staging=step.staging.index,
            samples=samples,
            hyper=hyper,
            scale=share if codes is None or half is not None else 1.0,
            encoding=encoding if codes is None else Encoding(half or encoding.codec),
            gradient=codes,
            encoded=codes is not None,
            base_version=step.version,
            grad_norm_squared=squared_norm,
            looked=step.finite_ranges,
            position=position,
            cost_seconds=step.cost_seconds,
            data_seconds=step.data_seconds,
            weight=step.weight * step.loss_scale if step.by_loss and self.local is None else None,
        )


def _binding_of(
    attachment: Attachment, store: Store, settings: Settings, local: bool, follows: bool
) -> Binding:
    """Return the model's way to and from staging buffers. local: with local steps."""
    needs, plain = store.policy_needs(), not local and not follows
    return Binding(
        attachment,
        store,
        # A pipeline encodes in its background thread. An encoder on the device would begin the next gradient
        # before it knows whether this one was admitted, so that its residual counts.
        None if settings.depth > 1 else settings.encoding.codec,
        checks_finite=_checks_finite(attachment, store, settings, needs),
        hooks=not local,
        early=plain,
        overlaps=settings.depth > 1,
        halves=plain and not store.has_link and _is_exact(store, settings),
    )


def _budget_of(
    binding: Binding, store: Store, settings: Settings, local: bool, follows: bool
) -> MemoryBudget | None:
    """Return how many samples fit, where the policy resizes batches."""
    if not store.policy_needs().resizes_batches:
        return None
    vectors = onward_vectors(store.layout.optimizer, settings.depth) if follows else 0
    extra = (extra_buffers(settings.most_depth) + vectors + local) * binding.flat.nbytes
    most, device = settings.max_batch, binding.device
    return MemoryBudget(store, settings.memory, most, device, extra, announces=not local)


def _checks_finite(attachment: Attachment, store: Store, settings: Settings, needs: PolicyNeeds) -> bool:
    """Return whether a check of the gradient saves the push one (`looked` in pyps.h). A server reads what it
    was sent; where the norm of one push is taken, that shows what is not finite; softsync checks in any case.
    """
    clips = attachment.clip_norm > 0.0
    return _is_exact(store, settings) and (needs.waits_for_rounds or not (clips or needs.collects_pushes))


def _is_exact(store: Store, settings: Settings) -> bool:
    """Return whether gradients go to a store on this machine as they are, all of them finite."""
    encoding = settings.encoding
    return encoding.codec is Codec.F32 and encoding.nonfinite == "error" and not store.servers


def _mode_balancer(settings: Settings, client: StoreClient) -> ModeBalancer | None:
    """Return what decides this worker's mode while it runs; None: its mode stays, since it has no link."""
    choices = settings.choices
    if choices is None or not client.store.has_link:
        return None
    push, pull = name_of(settings.encoding.codec), name_of(settings.pull_codec)
    mode = Mode(push=push, pull=pull, depth=settings.depth)
    layout, links = client.store.layout, settings.throttle.links if settings.throttle else ()
    return ModeBalancer(choices, mode, layout.parameters, sum(link.latency_seconds for link in links))


class ScriptChanges:
    """Changes that the training script makes to a model in the store, which would be lost in silence: of
    parameters' values, of their memory, of whether they train.

    It tells by torch's versions, which a change through `.data` does not have.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """parameters: those in the store, by name."""
        self._names, self._parameters = list(parameters), list(parameters.values())
        self._before: list[tuple[int, int]] = []

    def note(self) -> None:
        """The script's code follows."""
        self._before = [(p._version, p.data_ptr()) for p in self._parameters]

    def check(self) -> None:
        """Raise InputError if the script has changed a parameter since `note`, or frozen one."""
        for name, p, before in zip(self._names, self._parameters, self._before, strict=False):
            if not p.requires_grad:
                expected = "requires_grad as at attach(): the store steps it all the same; lr 0 holds a group"
                raise InputError("worker", name, "a parameter that was frozen after attach()", expected)
            if (p._version, p.data_ptr()) != before:
                expected = (
                    "parameters as the store has them: load a state before attach(), and evaluate other "
                    "values in a copy of the model"
                )
                raise InputError("worker", name, "a parameter that the script has changed", expected)


class DivergenceCheck:
    """Tell whether training diverged: a loss or, where none is given, a parameter that is not finite."""

    def __init__(self) -> None:
        self._steps = 0
        self._last_finite: float | None = None

    def check(self, step: Step, parameters: NDArray[np.float32]) -> None:
        """Raise Diverged, before the step's gradient is pushed."""
        self._steps += 1
        if step.loss is not None:
            if math.isfinite(step.loss):
                self._last_finite = step.loss
                return
            raise self.error(f"the loss is {step.loss}", step)
        if self._steps % CHECK_EVERY == 1 and not math.isfinite(float(np.dot(parameters, parameters))):
            bad = int(np.count_nonzero(~np.isfinite(parameters)))
            if bad:
                raise self.error(f"{bad} parameters are not finite", step)

    def error(self, what: str, step: Step) -> Diverged:
        """Return what is to be raised for a step."""
        first, last = step.claim.first, step.claim.first + step.claim.count - 1
        where = f"samples {first} to {last}, version {step.version}"
        return Diverged(what, where, self._last_finite)


_previous = sys.excepthook


def shorten_tracebacks() -> None:
    """From now on misuse that ends this process is shown by the script's own frames: those of pyps and torch
    do not show the cause. Idempotent.
    """
    global _previous
    if sys.excepthook is not _show:
        _previous, sys.excepthook = sys.excepthook, _show


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, SHOWN_SHORT):
        _previous(kind, error, trace)
        return
    shown = traceback.TracebackException(kind, error, trace)
    own = [frame for frame in shown.stack if not frame.filename.startswith(INSIDE)]
    shown.stack = traceback.StackSummary.from_list(own or list(shown.stack))
    sys.stderr.write("".join(shown.format()))
