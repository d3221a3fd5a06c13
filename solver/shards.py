"""The bytes that a rank of a sharded model holds, and the share of the state that each card has room for.

A share s of a model's state takes the same bytes wherever it lies. So with fixed_r, what rank r holds of any
share, and activations a_r of a sample,

    fixed_r + a_r b_r + state s_r <= memory_r,    sum s_r = 1

has shares for given batches b if every free_r = memory_r - fixed_r - a_r b_r is at least 0 and these sum to
at least `state`: then s_r = free_r / sum free. Shares leave the program that way. What is left is a largest
batch of each rank and one sum: the samples of all ranks take at most sum (memory_r - fixed_r) - state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from pyps.errors import InputError
from pyps.formats import (
    MAX_BATCH,
    Cluster,
    HeldBytes,
    Memory,
    PlanWorker,
    Profile,
    Sharding,
    WorkerGroup,
    check_cluster,
)
from pyps.formats.cluster import CLUSTER_FILE
from pyps.solver.exact.minmax import Pool

BYTES = 4  # of a parameter in fp32, and of its gradient
STATE_BYTES = {"SGD": 0, "SGD with momentum": 4, "Adam": 8, "AdamW": 8, "NAdam": 8, "RAdam": 8, "Adamax": 8}
GRADIENTS, GATHERED = 2, 3  # the stages from which on gradients and parameters are sharded


@dataclass(frozen=True)
class ModelState:
    """The bytes of a whole model in training, and how it is sharded.

    stage, whole: as in the cluster file. share: of each rank, where shares are equal; None: they follow the
    cards' memory.
    """

    parameters: float
    gradients: float
    optimizer: float
    stage: int
    whole: float
    share: float | None

    def held(self, share: float) -> tuple[float, float, float]:
        """The bytes of parameters, gradients and optimizer state of a rank that has this share."""
        gathered = share + self.whole * (1 - share)
        parameters = gathered if self.stage == GATHERED else 1.0
        gradients = {GRADIENTS: share, GATHERED: gathered}.get(self.stage, 1.0)
        states = self.optimizer * (share if self.stage else 1.0)
        return self.parameters * parameters, self.gradients * gradients, states

    @property
    def shared(self) -> float:
        """The bytes that the shares divide."""
        return sum(self.held(1.0)) - sum(self.held(0.0))


def states_of(cluster: Cluster, profiles: Sequence[Profile]) -> list[ModelState | None]:
    """The state of each group's model as it is sharded; None if it is not.

    profiles: of each. Raises InputError as `_state_of`, and where ranks divide unlike states.
    """
    given = cluster.sharding
    if given is None:
        return [None] * len(profiles)
    workers = sum(group.count for group in cluster.worker) // given.replicas
    states = [_state_of(given, g, p, workers) for g, p in zip(cluster.worker, profiles, strict=True)]
    if given.shares == "memory":
        check_cluster(CLUSTER_FILE, cluster)
        k = next((k for k, state in enumerate(states) if state != states[0]), None)
        if k is not None:
            found = f"another number, precision or optimizer of parameters than {cluster.worker[0].profile}"
            expected = 'the same, with sharding.shares = "memory"'
            raise InputError(cluster.worker[k].profile, "model", found, expected)
    return list(states)


def _state_of(given: Sharding, group: WorkerGroup, profile: Profile, workers: int) -> ModelState:
    """The state of a group's model. workers: that share it, where they are not nodes.

    Raises InputError where the profile lacks what that needs.
    """
    if profile.memory is None:
        expected = f"a memory model: with stage = {given.stage} it says what a rank has room for"
        raise InputError(group.profile, "memory", "nothing", expected)
    model = profile.model
    if model.parameters is None:
        expected = "the model's number of parameters, for [sharding]"
        raise InputError(group.profile, "model.parameters", "nothing", expected)
    ranks = workers if group.ranks_each == 1 else group.ranks_each
    each = model.parameter_bytes or BYTES
    trained = model.parameters if model.trained is None else model.trained
    return ModelState(
        parameters=each * model.parameters,
        gradients=each * trained,
        optimizer=_state_bytes(given, group, profile) * trained,
        stage=given.stage,
        whole=given.whole,
        share=None if given.shares == "memory" else 1 / ranks,
    )


def _state_bytes(given: Sharding, group: WorkerGroup, profile: Profile) -> float:
    """Bytes of the optimizer's state for each trained parameter, which have the parameters' precision."""
    if given.optimizer_bytes is not None:
        return given.optimizer_bytes
    words = profile.model.optimizer or ""
    name = words if words in STATE_BYTES else words.rpartition(" ")[0]
    if name not in STATE_BYTES:
        found = f"{words or 'nothing'} in {group.profile}"
        expected = "sharding.optimizer_bytes, the bytes of its state for each parameter"
        raise InputError(CLUSTER_FILE, "model.optimizer", found, expected)
    return STATE_BYTES[name] * (profile.model.parameter_bytes or BYTES) / BYTES


def of_shard(profile: Profile, state: ModelState) -> Profile:
    """The profile of one rank of a sharded model: what it no longer holds is room for more samples. Where
    shares follow the memory, it holds none. profile: of the whole model.
    """
    memory, share = profile.memory, state.share or 0.0
    assert memory is not None
    left = sum(state.held(share))
    fixed = math.ceil(max(memory.fixed_bytes - sum(state.held(1.0)) + left, left))
    more = int(max(0, memory.fixed_bytes - fixed) // memory.bytes_per_sample)
    most = profile.max_batch and min(MAX_BATCH, profile.max_batch + more)
    memory = msgspec.structs.replace(memory, fixed_bytes=fixed)
    return msgspec.structs.replace(profile, memory=memory, max_batch=most)


@dataclass(frozen=True)
class Card:
    """A rank that has part of a model's state: its memory model without it, and the bytes of its card."""

    state: ModelState
    memory: Memory
    budget: int

    @property
    def room(self) -> int:
        """The bytes for samples and for a share."""
        return self.budget - self.memory.fixed_bytes


def pool_of(cards: Sequence[Card | None]) -> Pool | None:
    """Return what the samples of all ranks may take together; None where shares do not follow the memory."""
    found = [card for card in cards if card is not None and card.state.share is None]
    if not found:
        return None
    each = np.array([card.memory.bytes_per_sample for card in found])
    return Pool(each, math.fsum([card.room for card in found]) - found[0].state.shared)


def shares_of(cards: Sequence[Card], batches: Sequence[int]) -> list[float]:
    """The share of each card with these samples at once, where shares follow the memory."""
    free = [card.room - card.memory.bytes_per_sample * b for card, b in zip(cards, batches, strict=True)]
    total = math.fsum(free)
    return [left / total if total > 0 else 1 / len(free) for left in free]


def with_shares(workers: Sequence[PlanWorker], cards: Sequence[Card | None]) -> list[PlanWorker]:
    """The workers of a plan with their shares, the bytes that each holds, and what is left for its samples.

    cards: of each, in the same order.
    """
    known = [card for card in cards if card is not None]
    if len(known) < len(workers):
        return list(workers)
    shares, found = shares_of(known, [worker.micro_batch for worker in workers]), []
    for worker, card, share in zip(workers, known, shares, strict=True):
        state, memory, whole = card.state, card.memory, 1.0
        if state.share is None:
            memory = msgspec.structs.replace(
                memory, fixed_bytes=math.ceil(memory.fixed_bytes + state.shared * share)
            )
            fits = int((card.budget - memory.fixed_bytes) // memory.bytes_per_sample)
            most = max(worker.micro_batch, min(worker.max_batch or MAX_BATCH, fits))
            worker = msgspec.structs.replace(worker, memory=memory, max_batch=most or None)
        else:
            share, whole = state.share, state.share * len(workers)
        parameters, gradients, optimizer = map(math.ceil, state.held(share))
        bytes_ = HeldBytes(
            fixed=max(0, card.memory.fixed_bytes - math.ceil(sum(state.held(state.share or 0.0)))),
            parameters=parameters,
            gradients=gradients,
            optimizer=optimizer,
            activations=math.ceil(memory.bytes_per_sample * worker.micro_batch),
            memory=card.budget,
        )
        alone = state.stage > 0 and math.isclose(whole, 1.0)  # else each copy of the model has its shares
        found.append(msgspec.structs.replace(worker, share=share if alone else None, bytes=bytes_))
    return found
