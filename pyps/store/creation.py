"""Say what a new store is made from: what the caller gives, and where that is silent, what a state says."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyps.errors import InputError
from pyps.native.state import VECTORS, StoreState
from pyps.native.values import Agreement, Codec, Config, Flat, Optimizer, Tensor
from pyps.store.policies import DEFAULT_POLICY, Policy, policy_named, register_policy

MASTERS = (Codec.F32, Codec.BF16)  # how a store can keep parameters


def store_config(
    where: str,
    tensors: Mapping[str, Any] | None,
    state: StoreState | None,
    *,
    batches: Sequence[int] | None,
    optimizer: Optimizer | str | None,
    policy: Policy | str | None,
    groups: Mapping[str, int] | None,
    averaged: Collection[str],
    samples: int | None,
    master: Codec | str | None,
    agreement: Agreement,
    chunk_params: int,
    **sizes: Any,
) -> tuple[Config, StoreState | None]:
    """A Config, and the state, checked, that the store goes on from; arguments as for Store.create.

    where: what errors name. Raises InputError.
    """
    if state is not None:
        state = checked_state(where, state)
        if tensors is not None:
            _check_same(where, _given(where, tensors, groups or {}, averaged)[0], state, groups is not None)
        given, initial = state.header.tensors, tuple(state.parameters.values())
        batches = batches or tuple(rank.total.batch for rank in state.header.ranks)
        samples = state.header.samples if samples is None else samples
        chunk_params = chunk_params or state.header.chunk_params
    elif tensors is not None and batches is not None:
        given, initial = _given(where, tensors, groups or {}, averaged)
    else:
        raise InputError(where, "tensors, batches", "None", "both, or a state to take them from")
    config = Config(
        tensors=given,
        initial=initial,
        batches=tuple(batches),
        groups=max((tensor.group for tensor in given), default=0) + 1,
        optimizer=_optimizer(where, optimizer, state),
        master=kept_as(where, master, state),
        samples=samples or 0,
        agreement=agreement,
        chunk_params=chunk_params,
        **_policy_fields(policy, state),
        **sizes,
    )
    return config, state


def _optimizer(where: str, given: Optimizer | str | None, state: StoreState | None) -> Optimizer:
    if state is None:
        return Optimizer.of(Optimizer.SGD if given is None else given)
    if given is not None and Optimizer.of(given) is not state.header.optimizer:
        expected = f"{state.header.optimizer.name.lower()}, the state's"
        raise InputError(where, "optimizer", Optimizer.of(given).name.lower(), expected)
    return state.header.optimizer


def kept_as(where: str, given: Codec | str | None, state: StoreState | None = None) -> Codec:
    """How a store keeps parameters: as `given`, else as the state's. Raises InputError."""
    if given is None:
        return Codec.F32 if state is None else state.header.master
    kept = {codec.name.lower(): codec for codec in MASTERS}
    if (named := given.name.lower() if isinstance(given, Codec) else given) not in kept:
        raise InputError(where, "master", repr(named), " or ".join(kept))
    return kept[named]


def _policy_fields(given: Policy | str | None, state: StoreState | None) -> dict[str, Any]:
    if given is None and state is not None:
        fields = ("policy", "policy_params", "round_timeout_seconds")
        return {field: getattr(state.header, field) for field in fields}
    policy = policy_named(given) if isinstance(given, str) else given or DEFAULT_POLICY
    register_policy(policy)
    timeout = policy.round_timeout_seconds
    return {"policy": policy.number, "policy_params": policy.params(), "round_timeout_seconds": timeout}


def _given(
    where: str, tensors: Mapping[str, Any], groups: Mapping[str, int], averaged: Collection[str]
) -> tuple[tuple[Tensor, ...], tuple[Flat, ...]]:
    for field, names in (("groups", groups.keys()), ("averaged", set(averaged))):
        if unknown := names - tensors.keys():
            raise InputError(where, field, repr(min(unknown)), "names of tensors")
    initial = {key: _as_f32(where, f"tensors[{key!r}]", value) for key, value in tensors.items()}
    kinds = (Tensor(key, a.shape, groups.get(key, 0), averaged=key in averaged) for key, a in initial.items())
    return tuple(kinds), tuple(initial.values())


def _check_same(where: str, found: tuple[Tensor, ...], state: StoreState, with_groups: bool) -> None:
    """Raise InputError unless these are the tensors of the state, in any order."""
    wanted = {tensor.name: tensor for tensor in state.header.tensors}
    given = {tensor.name: tensor for tensor in found}
    for name in sorted(given.keys() ^ wanted.keys()):
        whose = "in the state alone" if name in wanted else "not in the state"
        raise InputError(where, f"tensors[{name!r}]", whose, "the tensors of the state")
    for name, tensor in given.items():
        if tensor.shape != wanted[name].shape:
            expected = f"{list(wanted[name].shape)}, as in the state"
            raise InputError(where, f"tensors[{name!r}]", str(list(tensor.shape)), expected)
        if with_groups and tensor.group != wanted[name].group:
            expected = f"{wanted[name].group}, as in the state"
            raise InputError(where, f"groups[{name!r}]", str(tensor.group), expected)


def checked_state(where: str, state: StoreState) -> StoreState:
    """The state with every array that its header says, fp32 and contiguous, in the header's order.

    Numbers are checked by the core. Raises InputError.
    """
    header = state.header
    if not len(header.tensors) == len(header.steps) == len({tensor.name for tensor in header.tensors}):
        expected = f"{len(header.tensors)}, one for each tensor, of unique names"
        raise InputError(where, "state: steps", str(len(header.steps)), expected)
    groups = max((tensor.group for tensor in header.tensors), default=0) + 1
    if len(header.hyper) != groups:
        raise InputError(where, "state: hyper", str(len(header.hyper)), f"{groups}, one for each group")
    trained = header.trained
    vectors = VECTORS[header.optimizer]
    if set(state.vectors) != set(vectors):
        found, expected = ", ".join(state.vectors) or "none", ", ".join(vectors) or "none"
        raise InputError(where, "state: vectors", found, expected)
    if late := [rank for rank in state.residuals if not 0 <= rank < len(header.ranks)]:
        expected = f"ranks 0 to {len(header.ranks) - 1}"
        raise InputError(where, "state: residuals", f"rank {late[0]}", expected)
    return replace(
        state,
        parameters=_arrays(where, "parameters", state.parameters, header.tensors),
        vectors={name: _arrays(where, name, state.vectors[name], trained) for name in vectors},
        residuals={
            rank: _arrays(where, f"residual of rank {rank}", arrays, trained)
            for rank, arrays in state.residuals.items()
        },
    )


def _arrays(where: str, what: str, arrays: Mapping[str, Any], tensors: tuple[Tensor, ...]) -> dict[str, Flat]:
    checked = {}
    for tensor in tensors:
        field = f"state: {what}[{tensor.name!r}]"
        if tensor.name not in arrays:
            raise InputError(where, field, "nothing", f"an array {list(tensor.shape)}")
        checked[tensor.name] = _as_f32(where, field, arrays[tensor.name])
        if checked[tensor.name].shape != tuple(tensor.shape):
            found = str(list(checked[tensor.name].shape))
            raise InputError(where, field, found, str(list(tensor.shape)))
    return checked


def _as_f32(where: str, field: str, value: Any) -> NDArray[np.float32]:
    """A contiguous fp32 copy-if-needed of an array or tensor of real numbers. Raises InputError."""
    if hasattr(value, "detach"):  # a torch tensor, without importing torch
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "fiu":
        raise InputError(where, field, f"an array of {array.dtype}", "real numbers")
    return np.asarray(array, dtype=np.float32, order="C")
