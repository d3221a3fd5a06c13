"""The seam to C: every code has its exception, every number its name, every bad argument a typed error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyps import errors, native
from pyps.native.create import F32, STATE_WORDS, create
from pyps.native.status import MemberState
from pyps.native.values import Config, Hyper, Optimizer, Role, Tensor
from pyps.store import Store
from pyps.store.policies import ASP, BSP, Policy, policy_named

HEADER = Path(__file__).parents[2] / "csrc" / "pyps.h"
CODES = {name: int(n) for name, n in re.findall(r"(PYPS_E[A-Z]+) = (-\d+)", HEADER.read_text())}


@pytest.mark.parametrize("name", CODES)
def test_every_code_has_a_class_with_its_name(name: str) -> None:
    with pytest.raises(errors.StoreError) as caught:
        native.check("something", CODES[name])
    assert type(caught.value) is not errors.StoreError
    assert caught.value.code == name
    assert caught.value.exit_code == 2
    assert "something" in str(caught.value)


def test_every_class_has_a_code_of_c() -> None:
    classes = errors.StoreError.__subclasses__()
    ours = (errors.StoreClosed, errors.LinkLost, errors.LinkRefused)
    assert {kind.code for kind in classes} == {*CODES, *(kind.code for kind in ours)}
    assert all(kind.hint for kind in classes if kind is not errors.InvalidArgument)
    native.check("nothing", 0)


def test_numbers_are_those_of_the_header() -> None:
    defined = {name: int(n) for name, n in re.findall(r"PYPS_([A-Z0-9_]+) = (\d+)", HEADER.read_text())}
    for kind in (Optimizer, Role, MemberState):
        for member in kind:
            assert defined[member.name] == member.value
    for policy in Policy.known.values():
        assert defined[policy.name.upper()] == policy.number
    assert defined["F32"] == F32
    assert defined["STATE_WORDS"] == STATE_WORDS


def test_policies_are_checked_values() -> None:
    assert policy_named("bsp") == BSP()
    assert policy_named("asp", 5.0) == ASP(round_timeout_seconds=5.0)
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(errors.InputError, match="asp: round_timeout_seconds"):
            ASP(round_timeout_seconds=bad)
    with pytest.raises(errors.InputError, match="found 'bps'; expected one of bsp, asp"):
        policy_named("bps")
    with pytest.raises(errors.InputError, match=r"found '\.\.bsp'; expected one of bsp, asp"):
        policy_named("..bsp")


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("lr", {"lr": -0.1}),
        ("lr", {"lr": float("nan")}),
        ("weight_decay", {"lr": 1.0, "weight_decay": -1.0}),
        ("betas", {"lr": 1.0, "betas": (0.9, 1.0)}),
        ("eps", {"lr": 1.0, "eps": float("inf")}),
        ("dampening", {"lr": 1.0, "dampening": float("nan")}),
        ("momentum", {"lr": 1.0, "momentum": 1.0}),  # of which there is no part
        ("nesterov", {"lr": 1.0, "nesterov": True}),
        ("nesterov", {"lr": 1.0, "nesterov": True, "momentum": 0.9, "dampening": 0.1}),
    ],
)
def test_hyper_refuses_what_torch_refuses(field: str, values: dict[str, object]) -> None:
    with pytest.raises(errors.InputError) as caught:
        Hyper(**values)  # type: ignore[arg-type]
    assert caught.value.field == field


GOOD = {"w": np.zeros(3)}


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (errors.InvalidArgument, "batches", {"batches": [-1]}),
        (errors.InvalidArgument, "batches", {"batches": [2**32]}),
        (errors.InvalidArgument, "batch", {"batches": [0]}),
        (errors.InvalidArgument, "ranks", {"batches": []}),
        (errors.InvalidArgument, "samples", {"samples": -1}),
        (errors.InvalidArgument, "chunk_params", {"chunk_params": 1000}),
        (errors.InvalidArgument, "chunk_params", {"chunk_params": 2**40}),
        (errors.InvalidArgument, "staging_buffers", {"staging_buffers": 9}),
        (errors.InvalidArgument, "participants", {"max_participants": 100_000}),
        (errors.InvalidArgument, "tensor", {"tensors": {}}),
        (errors.InvalidArgument, "tensor name", {"tensors": {"": np.zeros(1)}}),
        (errors.InvalidArgument, "tensor name", {"tensors": {"é" * 80: np.zeros(1)}}),
        (errors.InvalidArgument, "tensor name", {"tensors": {"a\0b": np.zeros(1)}}),
        (errors.InvalidArgument, "9 dimensions", {"tensors": {"w": np.zeros((1,) * 9)}}),
        (errors.InputError, "real numbers", {"tensors": {"w": np.zeros(1, complex)}}),
        (errors.InputError, "real numbers", {"tensors": {"w": np.array(["a"])}}),
        (errors.InputError, "'x'", {"groups": {"x": 1}}),
        (errors.InvalidArgument, "group", {"groups": {"w": -1}}),
        (errors.InputError, "sgd, momentum, adamw, adam, adagrad", {"optimizer": "lion"}),
        (errors.InputError, "bsp, asp", {"policy": "sync"}),
    ],
)
def test_create_names_what_is_wrong(
    shm: Path, error: type[errors.PypsError], message: str, arguments: dict[str, object]
) -> None:
    good: dict[str, object] = {"tensors": GOOD, "batches": [1]}
    with pytest.raises(error, match=message):
        Store.create("bad", **{**good, **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "a/b", "../x", "a b", "x" * 201, "é", "a\0b", "\n"])
def test_bad_names_are_refused(shm: Path, name: str) -> None:
    with pytest.raises(errors.InvalidArgument):
        Store.create(name, GOOD, batches=[1])
    with pytest.raises(errors.InvalidArgument):
        Store.open(name)


def test_two_tensors_of_one_name_are_refused(shm: Path) -> None:
    tensor, values = Tensor("w", (2,)), np.zeros(2, np.float32)
    config = Config((tensor, tensor), (values, values), (1,), 1, Optimizer.SGD, 0, 60.0, 0, 0, 0, 0, 0)
    with pytest.raises(errors.InvalidArgument, match="w"):
        create("twice", config)


def test_parts_of_a_sample_are_refused(shm: Path) -> None:
    half: list[dict[str, Any]] = [{"batches": [1.5]}, {"batches": [4], "samples": 9.5}]
    for wrong in [*half, {"batches": [4], "samples": float("nan")}]:
        with pytest.raises(errors.InvalidArgument, match="expected a whole number"):
            Store.create("halves", GOOD, **wrong)
    with Store.create("halves", GOOD, batches=[np.float64(4.0)]) as store:
        store.join()
        assert store.start().count == 4
        with pytest.raises(errors.InvalidArgument, match=r"samples: found 3\.9"):
            store.push(store.stage(), 3.9, Hyper(lr=0.1))  # type: ignore[arg-type]
        with pytest.raises(errors.InvalidArgument, match=r"batches\[0\]: found 3\.9"):
            store.replan([3.9])  # type: ignore[list-item]


def test_bad_pushes_are_refused(shm: Path) -> None:
    with Store.create("pushes", GOOD, batches=[4]) as store:
        store.join()
        store.start()
        staging = store.stage()
        hyper = Hyper(lr=0.1)
        for bad in (
            lambda: store.push(7, 4, hyper),
            lambda: store.push(-1, 4, hyper),
            lambda: store.push(staging, 5, hyper),
            lambda: store.push(staging, -1, hyper),
            lambda: store.push(staging, 4, hyper, scale=float("nan")),
            lambda: store.push(staging, 4, hyper, timeout=-1.0),
            lambda: store.push(staging, 4, []),
            lambda: store.staging(9),
            lambda: store.replan([1, 2]),
            lambda: store.replan([0]),
        ):
            with pytest.raises(errors.InvalidArgument):
                bad()
        staging.flat.fill(0.0)
        assert store.push(staging, 4, hyper).version == 1
