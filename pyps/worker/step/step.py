"""A training step under way, and the record that is left of it and of its transfer."""

from __future__ import annotations

import os
import time
import warnings
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from pyps.formats.mode import Mode
from pyps.formats.records import Span, StepRecord
from pyps.native.ranges import Ranges
from pyps.native.transfer import Transferred
from pyps.native.values import Claim
from pyps.store.staging import StagingBuffer

if TYPE_CHECKING:
    from pyps.profiler.throttle import ThrottledSpan

SUM = 2  # torch's number of this reduction


class Step:
    """Hold what is known of a step: a claim, computed in one micro-batch or several.

    `version`: of the parameters it is computed on. `spans`: what the worker did until now, and when.
    """

    def __init__(self, claim: Claim, staging: StagingBuffer, version: int, spans: list[Span]) -> None:
        self.claim, self.staging, self.version, self.spans = claim, staging, version, spans
        self.created = self.began = time.monotonic()
        self.throttle: AbstractContextManager[ThrottledSpan] | None = None
        self.throttled: ThrottledSpan | None = None
        self.compute_seconds = 0.0  # of this rank's device
        self.overrun_seconds = 0.0
        self.loader_seconds = 0.0  # that the loader was busy with this step's samples
        self.loader_workers = 0
        self.late_seconds = 0.0  # that it waited for them because loading takes long
        self.micro = 0  # samples of the micro-batch under way; 0: step() has been called for it
        self.left = claim.count  # samples of later micro-batches
        self.done = 0  # samples whose gradient is there
        self.by_loss = False  # worker.backward(loss) has been called for the micro-batch under way
        self.now = 0.0  # what that weighs
        self.unit = 0.0  # what a micro-batch must weigh for its gradient to be added as it is
        self.weight = 0.0  # of the micro-batches done
        self.loss_scale = 1.0  # by which the weights are too small
        self.finite = True
        self.finite_ranges: Ranges | None = None  # where its gradient is known to be finite
        self.loss: float | None = None
        self.lr: float | None = None  # of the first parameter group
        self.mode: Mode | None = None  # of its transfer, where that may change

    @property
    def share(self) -> float:
        """Give what the accumulated gradient is to be multiplied by, to be the mean over all of its items."""
        return self.unit / self.weight if self.weight else 1.0

    def computed(self, until: float) -> None:
        """A micro-batch was computed, from `began` on."""
        self.spans.append(("compute", self.began, until))
        self.compute_seconds += until - self.began

    @property
    def cost_seconds(self) -> float:
        """Say what a step costs this rank: compute and its batch's lateness, or the loader's time if longer.

        A slow loader need not show as a wait: it also loads while its rank waits for the others.
        """
        return max(self.compute_seconds + self.late_seconds, self.loader_seconds)

    @property
    def data_seconds(self) -> float:
        """Return, of these, what is not compute."""
        return self.cost_seconds - self.compute_seconds

    def record(self, rank: int, number: int, done: Transferred, depth: int) -> StepRecord:
        """Return what is kept of the step once its gradient was admitted or dropped."""
        claim, result = self.claim, done.result
        fenced = done.fenced and result is None
        unencodable = done.skipped and not fenced  # the store has skipped its samples
        return StepRecord(
            rank=rank,
            pid=os.getpid(),
            step=number,
            round=claim.round,
            plan=claim.plan,
            first=claim.first,
            samples=self.done,
            batch=claim.batch,
            version=result.version if result else self.version,
            staleness=result.staleness if result else 0,
            sources=result.sources if result else 0,
            loss=self.loss,
            spans=[*self.spans, *done.spans],
            overrun_seconds=self.overrun_seconds,
            skipped=not self.finite or unencodable,
            rejected=result is None and not unencodable,
            fenced=fenced,
            depth=depth,
            loader_seconds=self.loader_seconds,
            loader_workers=self.loader_workers,
            lr=self.lr,
            mode=self.mode,
            admitted_at=result.admitted_at if result else 0.0,
            pushes=result.rank_pushes if result else 0,
        )


def number_of(loss: Any) -> float | None:
    """A loss as a number; None stays None. Called by what a script calls: warns there of torch's sums."""
    if not isinstance(loss, torch.Tensor):
        return None if loss is None else float(loss)
    if getattr(loss.grad_fn, "_saved_reduction", None) == SUM:
        found = 'the loss given to step() is a sum over the batch (reduction="sum")'
        warnings.warn(f"{found}: give backward() the mean, or larger batches count too much", stacklevel=3)
    return float(loss.detach())
