"""How a model is cut into shards, one a server, of about equal size; what each server's store is made from.

The flat vector is cut where chunks end, so a shard's store has the same chunks as the whole one would have.
The *head*, at the first server, has one parameter for each group and the policy: what it admits is a version
of the whole. Its tensors also say what the whole ones are: each by its name, with a first dimension of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from pyps import native
from pyps.errors import InvalidArgument
from pyps.native.create import MAX_DIMENSIONS
from pyps.native.decisions import SEVERAL_SERVERS, PolicyParams, unmet
from pyps.native.state import RankHistory, StateHeader, StoreState, split
from pyps.native.status import PushCounts
from pyps.native.values import Agreement, Config, Flat, Layout, Tensor
from pyps.remote.parts import Extents
from pyps.store.marks import mark, run_and_servers, sealed
from pyps.store.policies import policy_named

CHUNK_PARAMS = 32768  # as in csrc/store/geometry.c
BLOCK = 256  # a codec's largest: shards begin where blocks do
APPLIER = policy_named("asp")  # of a shard: it applies what it is given, in the order in which it is given


@dataclass(frozen=True)
class GroupSpan:
    """A parameter group's place in the flat vector: `elements` from `first` on; `end` has the padding."""

    first: int
    elements: int
    end: int
    averaged: bool


@dataclass(frozen=True)
class Shard:
    """A part of the flat vector: `elements` from `first` on, the first `trained` of which are encoded.

    groups: of the whole, of which it has some elements; parts: (first, count) of these in the flat vector.
    """

    first: int
    elements: int
    trained: int
    groups: tuple[int, ...]
    parts: tuple[tuple[int, int], ...]
    averaged: tuple[bool, ...]


@dataclass(frozen=True)
class Cut:
    """A model over several servers. `run` tells one from another of the same name. seal: of its shards, for
    their maker; empty for others (pyps.store.marks).
    """

    run: int
    seal: bytes
    tensors: tuple[Tensor, ...]
    spans: tuple[GroupSpan, ...]
    shards: tuple[Shard, ...]
    chunk_params: int

    @property
    def flat_elements(self) -> int:
        return self.spans[-1].end

    @property
    def trained_elements(self) -> int:
        return next((span.first for span in self.spans if span.averaged), self.flat_elements)

    @property
    def extents(self) -> list[Extents]:
        """Return where the whole's vector holds each shard's values."""
        held = [tuple((a, a + n) for a, n in shard.parts) for shard in self.shards]
        return [Extents(parts, self.trained_elements, self.flat_elements) for parts in held]

    def layout(self, head: Layout, shards: Sequence[Layout]) -> Layout:
        """The whole's, from those of its stores."""
        return replace(
            head,
            segment_bytes=head.segment_bytes + sum(shard.segment_bytes for shard in shards),
            flat_elements=self.flat_elements,
            parameters=sum(tensor.elements for tensor in self.tensors),
            chunks=self.flat_elements // self.chunk_params,
            tensors=len(self.tensors),
            averaged_elements=self.flat_elements - self.trained_elements,
        )


def cut(run: int, tensors: Sequence[Tensor], chunk_params: int, servers: int, seal: bytes = b"") -> Cut:
    """Cut a model into as many shards as there are servers. Raises InvalidArgument if it is too small."""
    size = chunk_params or CHUNK_PARAMS
    if size % BLOCK:
        raise InvalidArgument("create", f"chunk_params: found {size}; expected a multiple of {BLOCK}")
    placed, spans = _place(tensors, size)
    chunks = spans[-1].end // size
    if chunks < servers:
        found = f"found {chunks} chunks of {size} parameters for {servers} servers"
        raise InvalidArgument("create", f"tensors: {found}; expected one a server, or smaller chunk_params")
    edges = [size * (chunks * k // servers) for k in range(servers + 1)]
    shards = tuple(_shard(spans, a, b) for a, b in pairwise(edges))
    return Cut(run, seal, placed, spans, shards, size)


def _place(tensors: Sequence[Tensor], chunk_params: int) -> tuple[tuple[Tensor, ...], tuple[GroupSpan, ...]]:
    """Place groups as csrc/store/geometry.c does: one after another, each from the start of a chunk."""
    placed, at = list(tensors), 0
    spans: list[GroupSpan] = []
    for group in range(max((t.group for t in tensors), default=0) + 1):
        first, averaged = at, bool(spans) and spans[-1].averaged
        for k, tensor in enumerate(tensors):
            if tensor.group == group:
                elements = int(np.prod(tensor.shape, dtype=np.int64))
                placed[k] = replace(tensor, offset=at, elements=elements)
                at, averaged = at + elements, tensor.averaged
        end = first + -(-(at - first) // chunk_params) * chunk_params
        spans.append(GroupSpan(first, at - first, end, averaged))
        at = end
    return tuple(placed), tuple(spans)


def _shard(spans: Sequence[GroupSpan], first: int, end: int) -> Shard:
    overlaps = [
        (group, max(first, span.first), min(end, span.first + span.elements))
        for group, span in enumerate(spans)
    ]
    found = [(group, a, b) for group, a, b in overlaps if a < b]
    trained = min([a for group, a, _ in found if spans[group].averaged], default=end)
    return Shard(
        first,
        end - first,
        trained - first,
        tuple(group for group, _, _ in found),
        tuple((a, b - a) for _, a, b in found),
        tuple(spans[group].averaged for group, _, _ in found),
    )


def head_tensors(whole: Cut) -> tuple[Tensor, ...]:
    """The tensors of the head. Raises InvalidArgument for one of too many dimensions."""
    for tensor in whole.tensors:
        if len(tensor.shape) >= MAX_DIMENSIONS:
            found = (
                f"{len(tensor.shape)} dimensions; expected at most {MAX_DIMENSIONS - 1} on several servers"
            )
            raise InvalidArgument("create", f"tensors[{tensor.name[:80]!r}]: found {found}")
    described = [Tensor(t.name, (0, *t.shape), t.group, averaged=t.averaged) for t in whole.tensors]
    marks = [
        Tensor(mark(whole.run, len(whole.shards), sealed(whole.seal), g), (1,), g, averaged=span.averaged)
        for g, span in enumerate(whole.spans)
    ]
    return (*described, *marks)


def cut_of_head(layout: Layout, tensors: Sequence[Tensor]) -> Cut | None:
    """The whole that this store is the head of; None: it is no head."""
    marked = run_and_servers(tensors)
    if marked is None or len(tensors) <= layout.groups:
        return None
    whole = [
        Tensor(t.name, t.shape[1:], t.group, averaged=t.averaged)
        for t in tensors[: len(tensors) - layout.groups]
    ]
    return cut(marked[0], whole, layout.chunk_params, marked[1])


def check_policy(config: Config) -> None:
    """Raise InvalidArgument for a policy whose versions are not one push each, or that needs more of it."""
    if why := unmet(native.policy_needs(config.policy, config.policy_params), SEVERAL_SERVERS):
        expected = "expected one that takes each push by itself, such as asp, ssp or r2sp"
        raise InvalidArgument("create", f"policy: found one that {why}, on several servers; {expected}")


def head_config(whole: Cut, config: Config) -> Config:
    """Return what the head is made from."""
    tensors = head_tensors(whole)
    initial = tuple(np.zeros(t.shape, np.float32) for t in tensors)
    return replace(config, tensors=tensors, initial=initial, chunk_params=whole.chunk_params)


def head_state(whole: Cut, config: Config, state: StoreState) -> StoreState:
    """A head's state. Residuals are not in it: workers elsewhere keep their own."""
    steps = _steps(whole, state.header)
    tensors = head_tensors(whole)
    header = replace(
        state.header,
        tensors=tensors,
        steps=tuple(steps[tensor.group] for tensor in tensors),
        chunk_params=whole.chunk_params,
    )
    zeros = {t.name: np.zeros(t.shape, np.float32) for t in tensors}
    trained = {t.name: zeros[t.name] for t in tensors if not t.averaged}
    return StoreState(header, zeros, dict.fromkeys(state.vectors, trained), {})


def _steps(whole: Cut, header: StateHeader) -> list[float]:
    """The optimizer steps of each group: all of its tensors take every one."""
    taken = {t.name: steps for t, steps in zip(header.tensors, header.steps, strict=True)}
    groups = [[taken[t.name] for t in whole.tensors if t.group == g] for g in range(len(whole.spans))]
    return [max(steps, default=0.0) for steps in groups]


def shard_config(whole: Cut, shard: Shard, config: Config, flat: Flat) -> Config:
    """Return what a shard's store is made from. flat: the whole's values."""
    tensors = _shard_tensors(whole, shard)
    return Config(
        tensors=tensors,
        initial=tuple(np.ascontiguousarray(flat[a : a + n]) for a, n in shard.parts),
        batches=(1,),
        groups=len(tensors),
        optimizer=config.optimizer,
        policy=APPLIER.number,
        round_timeout_seconds=APPLIER.round_timeout_seconds,
        samples=0,
        chunk_params=whole.chunk_params,
        max_participants=8,
        snapshot_spares=config.snapshot_spares,
        staging_buffers=2,
        policy_params=APPLIER.params(),
        agreement=Agreement(0, config.agreement.seed),
        master=config.master,
    )


def _shard_tensors(whole: Cut, shard: Shard) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(mark(whole.run, len(whole.shards), whole.seal, group), (count,), k, averaged=averaged)
        for k, (group, (_, count), averaged) in enumerate(
            zip(shard.groups, shard.parts, shard.averaged, strict=True)
        )
    )


def shard_state(
    whole: Cut, shard: Shard, header: StateHeader, flat: Flat, vectors: dict[str, Flat]
) -> StoreState:
    """A shard's state at the version of a whole's. flat, vectors: the whole's."""
    tensors, steps = _shard_tensors(whole, shard), _steps(whole, header)
    own = replace(
        header,
        round=0,
        plan=0,
        samples=0,
        samples_assigned=0,
        samples_dropped=0,
        ranges=(),
        slowest=0,
        fastest=0,
        policy=APPLIER.number,
        policy_params=PolicyParams(),
        policy_state=(0,) * len(header.policy_state),
        round_timeout_seconds=APPLIER.round_timeout_seconds,
        chunk_params=whole.chunk_params,
        ranks=(RankHistory(PushCounts(1, 0, 0, 0, 0, 0, 0)),),
        tensors=tensors,
        steps=tuple(steps[group] for group in shard.groups),
        hyper=tuple(header.hyper[group] for group in shard.groups),
    )

    def arrays(vector: Flat, trained: bool) -> dict[str, Flat]:
        return {
            t.name: np.ascontiguousarray(vector[a : a + n])
            for t, (a, n) in zip(tensors, shard.parts, strict=True)
            if not (trained and t.averaged)
        }

    held = {name: arrays(vector, True) for name, vector in vectors.items()}
    return StoreState(own, arrays(flat, False), held, {})


def flat_of(whole: Cut, values: dict[str, Flat]) -> Flat:
    """The flat vector of values by tensor name; 0 where no value is given, and between groups."""
    flat = np.zeros(whole.flat_elements, np.float32)
    for name, view in split(flat, whole.tensors).items():
        if name in values:
            view[...] = values[name]
    return flat


def whole_header(whole: Cut, header: StateHeader) -> StateHeader:
    """The whole's state header, from its head's."""
    described = len(header.tensors) - len(whole.spans)
    steps = tuple(header.steps[described + tensor.group] for tensor in whole.tensors)
    return replace(header, tensors=whole.tensors, steps=steps)
