"""Define what goes into and comes out of the store, as plain frozen values; the numbers are those of
csrc/pyps.h.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from pyps.errors import InputError
from pyps.native.decisions import PolicyParams

STAGING_BUFFERS = 2  # of a worker, at least
Flat = NDArray[np.float32]  # one fp32 number for each parameter, chunk padding included


class Optimizer(IntEnum):
    """The step that the store itself takes; the formulas are those of torch.optim."""

    SGD = 0
    MOMENTUM = 1
    ADAMW = 2
    ADAM = 3
    ADAGRAD = 4

    @classmethod
    def of(cls, value: Optimizer | str) -> Optimizer:
        """The optimizer itself, or the one of that name, as "sgd". Raises InputError."""
        if isinstance(value, Optimizer):
            return value
        if value.upper() not in cls.__members__:
            names = ", ".join(name.lower() for name in cls.__members__)
            raise InputError("store", "optimizer", repr(value), f"one of {names}")
        return cls[value.upper()]


class Codec(IntEnum):
    """How values travel; see pyps.store.codec."""

    F32 = 0
    BF16 = 1
    F16 = 2
    INT8 = 3
    INT4 = 4
    NF4 = 5


Rounding = Literal["nearest", "stochastic"]
NonFinite = Literal["error", "skip", "zero"]


class Role(IntEnum):
    """Workers push; observers only look. A new worker may join as a rank that was not planned."""

    WORKER = 0
    OBSERVER = 1
    NEW_WORKER = 2


@dataclass(frozen=True, slots=True)
class Hyper:
    """One parameter group's constants for one step, named and meant as in torch.optim.

    `weight_decay` is decoupled for AdamW, else L2. `clip` holds every element of the scaled gradient within
    [-clip, clip]. `clip_norm` bounds the norm of the gradient over all trained tensors: of a round's mean
    gradient, or of a push that is applied alone. 0: no such bound. Raises InputError on a value that is not
    finite or not in torch's range; `momentum` is below 1.
    """

    lr: float
    weight_decay: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    nesterov: bool = False
    lr_decay: float = 0.0
    clip: float = 0.0
    clip_norm: float = 0.0

    def __post_init__(self) -> None:
        for field in ("lr", "weight_decay", "momentum", "eps", "lr_decay", "clip", "clip_norm"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0.0):
                raise InputError("hyper", field, repr(value), "a finite number of at least 0")
        if not math.isfinite(self.dampening):
            raise InputError("hyper", "dampening", repr(self.dampening), "a finite number")
        if not self.momentum < 1.0:
            raise InputError("hyper", "momentum", repr(self.momentum), "a number in [0, 1)")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise InputError("hyper", "betas", repr(self.betas), "two numbers in [0, 1)")
        if self.nesterov and (self.momentum <= 0.0 or self.dampening != 0.0):
            raise InputError("hyper", "nesterov", "True", "False, or momentum above 0 and dampening 0")


OUTER: Final = Hyper(lr=0.6, momentum=0.5, nesterov=True)  # of local steps, by default: docs/decisions/0043


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a push is encoded.

    `error_feedback`: what the code does not carry is added to the rank's next gradient. `nonfinite`: what
    NaN and infinities lead to: "error", "skip" (their block is sent as zeros, its residual stays) or "zero"
    (they are sent as zeros). `seed`: of stochastic rounding. Raises InputError on a combination that there
    is not.
    """

    codec: Codec
    rounding: Rounding = "nearest"
    error_feedback: bool = False
    nonfinite: NonFinite = "error"
    seed: int = 0

    def __post_init__(self) -> None:
        for field, kinds in (("rounding", Rounding), ("nonfinite", NonFinite)):
            if getattr(self, field) not in get_args(kinds):
                expected = f"one of {', '.join(get_args(kinds))}"
                raise InputError("encoding", field, repr(getattr(self, field)), expected)
        if self.rounding == "stochastic" and self.codec < Codec.INT8:
            raise InputError("encoding", "rounding", "'stochastic'", f"nearest for {self.codec.name}")
        if self.error_feedback and self.codec is Codec.F32:
            raise InputError("encoding", "error_feedback", "True", "False: f32 carries everything")
        if not 0 <= self.seed < 1 << 64:
            raise InputError("encoding", "seed", str(self.seed), "0 to 2^64 - 1")


@dataclass(frozen=True, slots=True)
class EncodeCounts:
    """Hold what was not finite: how many values, and how many blocks were skipped for that."""

    nonfinite: int
    blocks_skipped: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named part of the flat vector: `elements` numbers from `offset` on, of this shape, row-major.

    `averaged`: a push brings values that the store averages, not a gradient.
    """

    name: str
    shape: tuple[int, ...]
    group: int = 0
    offset: int = 0
    elements: int = 0
    averaged: bool = False


@dataclass(frozen=True, slots=True)
class Agreement:
    """Hold what all workers of a run must have alike: a digest of the plan, and the seed of the order of
    samples.

    plan 0: neither is said.
    """

    plan: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Config:
    """All that a store is made from; 0 means the C core's default. See pyps.Store.create."""

    tensors: tuple[Tensor, ...]
    initial: tuple[NDArray[np.float32], ...]  # one for each tensor, contiguous
    batches: tuple[int, ...]
    groups: int
    optimizer: Optimizer
    policy: int
    round_timeout_seconds: float
    samples: int
    chunk_params: int
    max_participants: int
    snapshot_spares: int
    staging_buffers: int
    policy_params: PolicyParams = PolicyParams()  # noqa: RUF009 - frozen
    agreement: Agreement = Agreement()
    master: Codec = Codec.F32


@dataclass(frozen=True, slots=True)
class Layout:
    """The store's fixed sizes. flat_elements is the length of the flat vector, chunk padding included.

    The last averaged_elements of it are of averaged tensors, and travel as fp32 under every codec.
    master: how trained parameters are kept.
    """

    segment_bytes: int
    flat_elements: int
    parameters: int
    chunks: int
    chunk_params: int
    max_participants: int
    staging_buffers: int
    groups: int
    tensors: int
    ranks: int
    optimizer: Optimizer
    policy: int
    states: int
    averaged_elements: int = 0
    samples: int = 0
    plan: int = 0
    seed: int = 0
    master: Codec = Codec.F32

    @property
    def trained_elements(self) -> int:
        """Elements of the flat vector that codecs encode."""
        return self.flat_elements - self.averaged_elements


@dataclass(frozen=True, slots=True)
class Claim:
    """`count` sample positions from `first` on, in the endless sequence of epochs, to be learnt from now.

    version: the store's, when it was returned.
    """

    first: int
    count: int
    batch: int
    round: int
    plan: int
    wait_seconds: float
    version: int


@dataclass(frozen=True, slots=True)
class DataSet:
    """A data set as one worker sees it.

    length: samples of an epoch; 0: a stream. digest: of all that must be equal. mean: of some of its values,
    known to within `tolerance`.
    """

    length: int
    digest: int = 0
    mean: float = 0.0
    tolerance: float = 0.0


Tag = tuple[int, int]  # a push's name, given by its sender: two 64-bit numbers
NO_TAG: Tag = (0, 0)


@dataclass(frozen=True, slots=True)
class Ticket:
    """Hold what a push that became `version` was given: its factor, the share that averaged tensors go of
    the way to its values, and the part of an optimizer step that it takes. tag: of its request.
    """

    version: int
    tag: Tag
    samples: int
    scale: float
    share: float
    part: float


@dataclass(frozen=True, slots=True)
class PushRequest:
    """One push: a gradient, and everything that the store needs to apply it, from the worker to the core.

    staging: index of the staging buffer. samples: how many samples the gradient is the mean of; 0 skips the
    step. hyper: one for each parameter group. scale: multiplies the gradient. timeout: seconds; None: the
    store's own. encoding: how the gradient travels. gradient: fp32 [flat_elements], or with `encoded` codes
    of that codec, uint8; None: what the staging buffer holds. base_version: of the parameters that the
    gradient was computed on; None: the version pulled last. grad_norm_squared: of the gradient, where the
    policy needs it; 0: not known. compute_seconds: how long the gradient took to compute; 0: since its claim.
    position: of `hyper` in its schedule; a round takes the constants of the greatest one. cost_seconds: what
    the step cost this worker, compute and data; 0: compute_seconds. data_seconds: of these, for data. ranges:
    the parts of the flat vector that the gradient is of (pyps.native.ranges), in fp32; `gradient` holds their
    values one after the other. None: all of it. tag: the sender's name of this push, which its ticket tells.
    looked: the parts of the flat vector (pyps.native.ranges) where the gradient in the staging buffer is
    known to be finite, so that the core need not read them once more; FalseLook if one is not. None: none.
    A store on this machine reads it where `encoding` is fp32 and refuses what is not finite, and of halves
    that are given as codes.
    weight: what the gradient counts in its round's mean, at least 0: the number that its loss was divided
    by, such as its targets or the sum of their class weights; None: its samples. Averaged tensors, and a
    push's part of a global batch, count by samples.
    given: of a store that holds a part of a model: the ticket that the store which decides gave this
    gradient; its scale, share and part are taken.
    """

    staging: int
    samples: int
    hyper: tuple[Hyper, ...]
    scale: float = 1.0
    timeout: float | None = None
    encoding: Encoding = Encoding(Codec.F32)
    gradient: Flat | NDArray[np.uint8] | None = None
    encoded: bool = False
    base_version: int | None = None
    grad_norm_squared: float = 0.0
    compute_seconds: float = 0.0
    position: int = 0
    cost_seconds: float = 0.0
    data_seconds: float = 0.0
    ranges: NDArray[np.uint64] | None = None
    tag: Tag = NO_TAG
    given: Ticket | None = None
    looked: NDArray[np.uint64] | None = None
    weight: float | None = None


@dataclass(frozen=True, slots=True)
class PushResult:
    """Which version the push became (0: all workers skipped, or its round has not closed), how stale it was,
    what went into the version, how many values were not finite, and when the gradient was taken: seconds of
    the monotonic clock of the store's machine.

    rank_pushes: of this worker's rank that were admitted, with this one. saved_pushes: of these, how many are
    in the last state that was read, or that the store began from.
    """

    version: int
    staleness: int
    sources: int
    samples: int
    wait_seconds: float
    nonfinite: int = 0
    blocks_skipped: int = 0
    admitted_at: float = 0.0
    rank_pushes: int = 0
    saved_pushes: int = 0


@dataclass(slots=True)
class Traffic:
    """Bytes that went over a link, headers and numbers, and calls that were sent again."""

    sent: int = 0
    received: int = 0
    resent: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All of one version: flat parameters, the optimizer's state vectors (flat too), and the steps that each
    chunk has taken, in global batches.

    `tensors` maps names to views into `parameters`.
    """

    version: int
    parameters: Flat
    state: tuple[Flat, ...]
    steps: NDArray[np.float64]
    tensors: dict[str, Flat]


@dataclass(frozen=True, slots=True)
class CostModel:
    """The seconds of a step of b samples: fixed + b * sample, at least `least`. max_batch 0: not known."""

    fixed_seconds: float
    sample_seconds: float
    least_seconds: float = 0.0
    max_batch: int = 0


@dataclass(frozen=True, slots=True)
class RankCost:
    """Hold what a rank's steps cost. steps: whole ones of its planned batch, since that was planned or its
    worker joined, without the first two of a worker. seconds: of the last of them, the latest last.
    data_seconds: of these, for data, on average. sample_seconds: of a sample in any steps, on average.
    model: as its worker knew before; None: it did not.
    """

    steps: int
    seconds: tuple[float, ...]
    data_seconds: float = 0.0
    sample_seconds: float = 0.0
    model: CostModel | None = None


@dataclass(frozen=True, slots=True)
class Replay:
    """Hold what came of deciding a journal's events again: how many changed the view, how many decisions
    there were in all, how many came out otherwise, and how many are not on file; the first difference, in
    words.
    """

    events: int
    decisions: int
    differences: int
    missing_events: int
    first: str
