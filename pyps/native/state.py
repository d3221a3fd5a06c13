"""A store's state, all that it needs to go on from one version bit for bit, and how it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from pyps.native import Pointer, check, hyper_values
from pyps.native.compiled import ffi, lib
from pyps.native.decisions import PolicyParams
from pyps.native.status import PushCounts
from pyps.native.values import Codec, DataSet, Flat, Hyper, Layout, Optimizer, Tensor

# The optimizer's vectors of one number for each parameter, named as torch.optim names them.
VECTORS: Mapping[Optimizer, tuple[str, ...]] = {
    Optimizer.SGD: (),
    Optimizer.MOMENTUM: ("momentum_buffer",),
    Optimizer.ADAMW: ("exp_avg", "exp_avg_sq"),
    Optimizer.ADAM: ("exp_avg", "exp_avg_sq"),
    Optimizer.ADAGRAD: ("sum",),
}
COUNTERS = (  # of a state, 64 bits each
    "version",
    "round",
    "plan",
    "samples",
    "samples_assigned",
    "samples_dropped",
    "slowest",
    "fastest",
    "rounding_seed",
)


@dataclass(frozen=True, slots=True)
class RankHistory:
    """Hold what a rank goes on with.

    clock: its steps. interval: nanoseconds between its last two pushes. step_seconds, sample_seconds,
    staleness_per_sample: moving averages; 0: not known. next_batch, max_samples, extra_steps: as the policy
    keeps them. turn_rank: the rank whose turn is at this place of the policy's ring; turn_gap: planned
    nanoseconds from its push to the next. data_set: that its workers read; None: not known.
    lag: steps that others took between its pulls and its pushes, a moving average of `lags` of them.
    """

    total: PushCounts
    clock: int = 0
    interval: int = 0
    step_seconds: float = 0.0
    sample_seconds: float = 0.0
    staleness_per_sample: float = 0.0
    next_batch: int = 0
    max_samples: int = 0
    extra_steps: int = 0
    turn_rank: int = 0
    turn_gap: int = 0
    data_set: DataSet | None = None
    lag: float = 0.0
    lags: int = 0


@dataclass(frozen=True, slots=True)
class StateHeader:
    """A state without its arrays: what fits a JSON file.

    Gradients that waited for their round have not been pushed at `version`, and samples that were claimed but
    not pushed are to be assigned again. `samples_assigned`: every sample position before it was pushed,
    skipped or dropped, or is in `ranges`: (first, count), in the order in which they will be assigned.
    `samples`: positions in all; 0: without end. `slowest`, `fastest`: clocks. `policy`: its number;
    `policy_state`: 16 words of its own. `steps`: optimizer steps that each tensor has taken, in global
    batches. `hyper`: the constants in force, by group. `master`: how trained parameters are kept;
    `rounding_seed`: of the noise by which a bf16 master is rounded.
    """

    version: int
    round: int
    plan: int
    samples: int
    samples_assigned: int
    samples_dropped: int
    ranges: tuple[tuple[int, int], ...]
    slowest: int
    fastest: int
    optimizer: Optimizer
    policy: int
    policy_params: PolicyParams
    policy_state: tuple[int, ...]
    round_timeout_seconds: float
    chunk_params: int
    ranks: tuple[RankHistory, ...]
    tensors: tuple[Tensor, ...]
    steps: tuple[float, ...]
    hyper: tuple[Hyper | None, ...]
    master: Codec = Codec.F32
    rounding_seed: int = 0

    @property
    def trained(self) -> tuple[Tensor, ...]:
        """The tensors that the optimizer steps on."""
        return tuple(tensor for tensor in self.tensors if not tensor.averaged)


@dataclass(frozen=True, slots=True, eq=False)
class FlatState:
    """A state as it is read: its arrays are flat vectors, padding included."""

    header: StateHeader
    parameters: Flat
    vectors: tuple[Flat, ...]
    residuals: Mapping[int, Flat]


@dataclass(frozen=True, slots=True, eq=False)
class StoreState:
    """A header, and arrays by tensor name, each fp32 in its tensor's shape.

    `vectors`: the optimizer's, by the name that torch gives them (see VECTORS). `residuals`: by rank, what
    the codes of its pushes did not carry yet; ranks without error feedback have none. Averaged tensors have
    neither.
    """

    header: StateHeader
    parameters: Mapping[str, Flat]
    vectors: Mapping[str, Mapping[str, Flat]]
    residuals: Mapping[int, Mapping[str, Flat]]

    @classmethod
    def of(cls, flat: FlatState) -> StoreState:
        """Views of flat vectors."""
        trained = flat.header.trained
        names = VECTORS[flat.header.optimizer]
        return cls(
            flat.header,
            split(flat.parameters, flat.header.tensors),
            {name: split(vector, trained) for name, vector in zip(names, flat.vectors, strict=True)},
            {rank: split(residual, trained) for rank, residual in flat.residuals.items()},
        )


NewVector = Callable[[int], Flat]


def split(flat: Flat, tensors: Sequence[Tensor]) -> dict[str, Flat]:
    """Views of a flat vector by tensor name, each in its tensor's shape; nothing is copied."""
    return {t.name: flat[t.offset : t.offset + t.elements].reshape(t.shape) for t in tensors}


def new_vector(elements: int) -> Flat:
    """Memory for a flat vector, contents undefined."""
    return np.empty(elements, np.float32)


def read_state(
    store: Pointer, layout: Layout, tensors: Sequence[Tensor], timeout: float, new: NewVector = new_vector
) -> FlatState:
    """The state of the present version, while pushes go on. new: gives the memory for its vectors."""
    c = ffi.new("pyps_state *")
    check("state", lib.pyps_state_begin(store, timeout, c))
    try:
        return _read(store, layout, tuple(tensors), c, new)
    finally:
        lib.pyps_state_end(store)


def _read(store: Pointer, layout: Layout, tensors: tuple[Tensor, ...], c: Any, new: NewVector) -> FlatState:
    parameters, *vectors = (new(layout.flat_elements) for _ in range(1 + layout.states))
    c_vectors = ffi.new("float *[]", [ffi.from_buffer("float[]", a) for a in vectors] or 1)
    steps, hyper = ffi.new("double[]", layout.tensors), ffi.new("pyps_hyper[]", layout.groups)
    c_parameters = ffi.from_buffer("float[]", parameters)
    check("state", lib.pyps_state_read(store, c_parameters, c_vectors, steps, hyper))
    residuals = {}
    for rank in range(c.ranks):
        if c.rank[rank].has_residual:
            residuals[rank] = new(layout.flat_elements)
            c_residual = ffi.from_buffer("float[]", residuals[rank])
            check("state", lib.pyps_state_residual(store, rank, c_residual))
    constants = tuple(hyper_values(hyper, layout.groups))
    return FlatState(_header(c, tensors, tuple(steps), constants), parameters, tuple(vectors), residuals)


def _rank_state(c: Any) -> RankHistory:
    total = PushCounts(**{field.name: getattr(c.total, field.name) for field in fields(PushCounts)})
    structs = ("total", "data_set")
    own = {field.name: getattr(c, field.name) for field in fields(RankHistory) if field.name not in structs}
    data = {field.name: getattr(c.data_set, field.name) for field in fields(DataSet)}
    return RankHistory(total, **own, data_set=DataSet(**data) if c.data_set.size else None)


def _header(
    c: Any, tensors: tuple[Tensor, ...], steps: tuple[float, ...], hyper: tuple[Hyper | None, ...]
) -> StateHeader:
    params = {field.name: getattr(c.policy_params, field.name) for field in fields(PolicyParams)}
    plain = ("policy", "round_timeout_seconds", "chunk_params", *COUNTERS)
    return StateHeader(
        **{field: getattr(c, field) for field in plain},
        optimizer=Optimizer(c.optimizer),
        master=Codec(c.master),
        ranges=tuple((c.range[k].first, c.range[k].count) for k in range(c.ranges)),
        policy_params=PolicyParams(**params),
        policy_state=tuple(c.policy_state),
        ranks=tuple(_rank_state(c.rank[r]) for r in range(c.ranks)),
        tensors=tensors,
        steps=steps,
        hyper=hyper,
    )
