"""pyps.Store against references: the step, the weighted sum, reproducibility, views and their lifetime."""

from __future__ import annotations

import gc
import math
import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sampled import examples
from threads import in_threads

import pyps
from pyps import errors, native
from pyps.native.status import MemberState
from pyps.native.values import Hyper, Optimizer, Role
from pyps.store import Store

RELATIVE = 1e-6  # of the norm: fp32 rounds at 6e-8 an operation
STEPS = 20
SHAPES = {"weight": (33, 40), "bias": (33,), "scalar": ()}

F64 = NDArray[np.float64]
pytestmark = pytest.mark.usefixtures("shm")
torch.set_num_threads(1)


def relative(found: object, expected: object) -> float:
    a, b = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(a - b)) / max(float(np.linalg.norm(b)), 1e-30)


def joined(tensors: Mapping[str, NDArray[Any]]) -> F64:
    return np.concatenate([tensors[name].astype(np.float64).ravel() for name in SHAPES])


def some_tensors(seed: int) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def push_tensors(store: Store, gradient: dict[str, NDArray[np.float32]], hyper: Hyper) -> None:
    claim = store.start()
    staging = store.stage()
    staging.flat.fill(0.0)
    for name, view in staging.tensors().items():
        view[...] = gradient[name]
    store.push(staging, claim.count, hyper)


# The step, against formulas in fp64 and against torch.


class Reference:
    """torch.optim's formulas in fp64 (torch documentation, the algorithm boxes)."""

    def __init__(self, p: F64, kind: Optimizer, h: Hyper) -> None:
        self.p, self.kind, self.h, self.t = p.copy(), kind, h, 0
        # a push carries its constants as fp32: 1 - 0.999 differs by 1e-5 between the two precisions
        self.betas = [float(np.float32(beta)) for beta in h.betas]
        self.first, self.second = np.zeros_like(p), np.zeros_like(p)

    def step(self, g: F64) -> None:
        self.t += 1
        h = self.h
        g = np.clip(g, -h.clip, h.clip) if h.clip else g
        if self.kind is Optimizer.ADAMW:
            self.p = self.p * (1 - h.lr * h.weight_decay)
            self.adam(g)
        elif self.kind is Optimizer.ADAM:
            self.adam(g + h.weight_decay * self.p)
        elif self.kind is Optimizer.ADAGRAD:
            g = g + h.weight_decay * self.p
            self.first = self.first + g * g
            self.p = self.p - h.lr / (1 + (self.t - 1) * h.lr_decay) * g / (np.sqrt(self.first) + h.eps)
        else:
            self.sgd(g)

    def sgd(self, g: F64) -> None:
        h = self.h
        g = g + h.weight_decay * self.p
        if h.momentum:
            self.first = g if self.t == 1 else h.momentum * self.first + (1 - h.dampening) * g
            g = g + h.momentum * self.first if h.nesterov else self.first
        self.p = self.p - h.lr * g

    def adam(self, g: F64) -> None:
        h, (b1, b2) = self.h, self.betas
        self.first = b1 * self.first + (1 - b1) * g
        self.second = b2 * self.second + (1 - b2) * g * g
        denominator = np.sqrt(self.second) / math.sqrt(1 - b2**self.t) + h.eps
        self.p = self.p - h.lr / (1 - b1**self.t) * self.first / denominator


CASES = {
    "sgd": (Optimizer.SGD, Hyper(lr=0.1)),
    "sgd+decay": (Optimizer.SGD, Hyper(lr=0.1, weight_decay=0.01)),
    "momentum": (Optimizer.MOMENTUM, Hyper(lr=0.05, momentum=0.9)),
    "dampening": (Optimizer.MOMENTUM, Hyper(lr=0.05, momentum=0.9, dampening=0.3, weight_decay=0.01)),
    "nesterov": (Optimizer.MOMENTUM, Hyper(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)),
    "adamw": (Optimizer.ADAMW, Hyper(lr=0.01, weight_decay=0.02)),
    "adamw, other betas": (Optimizer.ADAMW, Hyper(lr=0.01, betas=(0.8, 0.95), eps=1e-6)),
    "adam": (Optimizer.ADAM, Hyper(lr=0.01)),
    "adam+decay": (Optimizer.ADAM, Hyper(lr=0.01, weight_decay=0.02, betas=(0.8, 0.95))),
    "adagrad": (Optimizer.ADAGRAD, Hyper(lr=0.1, eps=1e-10)),
    "adagrad+decay": (Optimizer.ADAGRAD, Hyper(lr=0.1, weight_decay=0.01, lr_decay=0.1, eps=1e-10)),
    "clipped": (Optimizer.MOMENTUM, Hyper(lr=0.05, momentum=0.9, weight_decay=0.01, clip=0.5)),
}


def torch_optimizer(parameters: list[torch.Tensor], kind: Optimizer, h: Hyper) -> torch.optim.Optimizer:
    if kind is Optimizer.ADAMW:
        return torch.optim.AdamW(parameters, lr=h.lr, betas=h.betas, eps=h.eps, weight_decay=h.weight_decay)
    if kind is Optimizer.ADAM:
        return torch.optim.Adam(parameters, lr=h.lr, betas=h.betas, eps=h.eps, weight_decay=h.weight_decay)
    if kind is Optimizer.ADAGRAD:
        return torch.optim.Adagrad(
            parameters, lr=h.lr, lr_decay=h.lr_decay, weight_decay=h.weight_decay, eps=h.eps
        )
    return torch.optim.SGD(
        parameters,
        lr=h.lr,
        momentum=h.momentum,
        dampening=h.dampening,
        weight_decay=h.weight_decay,
        nesterov=h.nesterov,
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("policy", ["bsp", "asp"])
def test_steps_are_those_of_torch(case: str, policy: str) -> None:
    kind, hyper = CASES[case]
    initial = some_tensors(0)
    rivals = {name: torch.tensor(value) for name, value in initial.items()}
    optimizer = torch_optimizer(list(rivals.values()), kind, hyper)
    references = {name: Reference(value.astype(np.float64), kind, hyper) for name, value in initial.items()}
    with Store.create(
        "steps", initial, batches=[4], optimizer=kind, policy=policy, chunk_params=1024
    ) as store:
        store.join()
        for step in range(STEPS):
            gradient = some_tensors(step + 1)
            push_tensors(store, gradient, hyper)
            for name, tensor in rivals.items():
                tensor.grad = torch.tensor(gradient[name])
                references[name].step(gradient[name].astype(np.float64))
            if hyper.clip:
                torch.nn.utils.clip_grad_value_(rivals.values(), hyper.clip)
            optimizer.step()
        flat, version = store.pull(strict=True)
        snapshot = store.snapshot()
    assert version == STEPS == snapshot.version
    assert snapshot.steps.tolist() == [STEPS] * len(snapshot.steps)
    np.testing.assert_array_equal(flat, snapshot.parameters)
    assert {name: value.shape for name, value in snapshot.tensors.items()} == SHAPES
    found = joined(snapshot.tensors)
    assert relative(found, joined({name: reference.p for name, reference in references.items()})) < RELATIVE
    assert relative(found, joined({name: tensor.numpy() for name, tensor in rivals.items()})) < RELATIVE
    states = [store.views(state)["weight"] for state in snapshot.state]
    for state, expected in zip(
        states, [references["weight"].first, references["weight"].second], strict=False
    ):
        assert relative(state, expected) < RELATIVE
    assert len(states) == {"SGD": 0, "MOMENTUM": 1, "ADAMW": 2, "ADAM": 2, "ADAGRAD": 1}[kind.name]


def test_groups_have_their_own_constants() -> None:
    initial = some_tensors(0)
    groups = {"bias": 1, "scalar": 1}
    with Store.create("groups", initial, batches=[1], policy="asp", groups=groups) as store:
        store.join()
        store.start()
        staging = store.stage()
        staging.flat.fill(1.0)
        store.push(staging, 1, [Hyper(lr=1.0), Hyper(lr=0.0)])
        after = store.views(store.pull()[0])
        np.testing.assert_array_equal(after["weight"], initial["weight"] - 1.0)
        np.testing.assert_array_equal(after["bias"], initial["bias"])
        with pytest.raises(errors.InvalidArgument, match="found 1; expected 2"):
            store.push(staging, 1, [Hyper(lr=1.0)])


def test_scale_multiplies_the_gradient() -> None:
    with Store.create("scale", {"w": np.zeros(4)}, batches=[1], policy="asp") as store:
        store.join()
        store.start()
        staging = store.stage()
        staging.flat.fill(8.0)
        store.push(staging, 1, Hyper(lr=1.0), scale=0.125)
        assert store.views(store.pull()[0])["w"].tolist() == [-1.0] * 4


# Many workers.


def weighted_step(split: list[int], gradients: NDArray[np.float32]) -> tuple[F64, F64]:
    """One round through the store, and what plain averaging of the workers' means would have given."""
    means: dict[int, NDArray[np.float32]] = {}

    def worker(rank: int) -> None:
        with Store.open("round") as store:
            store.join(rank)
            claim = store.start()
            mean = gradients[claim.first : claim.first + claim.count].astype(np.float64).mean(axis=0)
            means[rank] = mean.astype(np.float32)
            staging = store.stage()
            staging.flat.fill(0.0)
            staging["w"][...] = means[rank]
            result = store.push(staging, claim.count, Hyper(lr=1.0))
            assert (result.samples, result.sources) == (sum(split), len(split))

    size = gradients.shape[1]
    with Store.create("round", {"w": np.zeros(size)}, batches=split, samples=sum(split)) as store:
        in_threads(*(lambda rank=rank: worker(rank) for rank in range(len(split))))
        applied = -store.snapshot().tensors["w"].astype(np.float64)
    return applied, np.mean([means[r].astype(np.float64) for r in means], axis=0)


@settings(
    derandomize=True, deadline=None, max_examples=examples(10, 25), suppress_health_check=list(HealthCheck)
)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(0, 2**32 - 1))
def test_any_split_gives_the_full_batch_gradient(split: list[int], seed: int) -> None:
    gradients = np.random.default_rng(seed).standard_normal((sum(split), 200)).astype(np.float32) + 0.5
    full = gradients.astype(np.float64).mean(axis=0)
    applied, unweighted = weighted_step(split, gradients)
    assert relative(applied, full) < RELATIVE
    if len(set(split)) > 1:
        assert relative(unweighted, full) > 100 * RELATIVE


def shuffled_run(seed: int, ranks: int, rounds: int) -> bytes:
    order = random.Random(seed)
    delays = [[order.random() * 0.004 for _ in range(rounds)] for _ in range(ranks)]
    batches = [3 + rank for rank in range(ranks)]

    def worker(rank: int) -> None:
        time.sleep(delays[rank][0])
        with Store.open("race") as store:
            store.join(rank)
            for k in range(rounds):
                claim = store.start()
                flat, _ = store.pull()
                staging = store.stage()
                staging.flat[...] = flat * np.float32(0.1) + np.float32(math.sin(claim.first))
                time.sleep(delays[rank][k])
                store.push(staging, claim.count, Hyper(lr=0.05, momentum=0.9))

    initial = some_tensors(3)
    with Store.create("race", initial, batches=batches, optimizer="momentum", chunk_params=1024) as store:
        in_threads(*(lambda rank=rank: worker(rank) for rank in range(ranks)))
        snapshot = store.snapshot()
        assert snapshot.version == rounds
        return snapshot.parameters.tobytes() + snapshot.state[0].tobytes()


def test_bsp_runs_are_bitwise_equal_in_any_order() -> None:
    runs = {shuffled_run(seed, ranks=3, rounds=8) for seed in range(4)}
    assert len(runs) == 1


def test_asp_applies_every_push_once() -> None:
    pushes, ranks = 30, 3

    def worker(rank: int) -> None:
        with Store.open("count") as store:
            store.join(rank)
            while True:
                try:
                    claim = store.start()
                except errors.Ended:
                    return
                store.pull()
                staging = store.stage()
                staging.flat.fill(float(claim.first + 1))
                store.push(staging, claim.count, Hyper(lr=1.0))

    with Store.create(
        "count",
        {"w": np.zeros(3000)},
        batches=[1] * ranks,
        policy="asp:scaling=none",
        samples=pushes,
        chunk_params=1024,
    ) as store:
        in_threads(*(lambda rank=rank: worker(rank) for rank in range(ranks)))
        total = store.snapshot().tensors["w"]
        assert set(total.tolist()) == {-pushes * (pushes + 1) / 2}
        ranks_after = store.ranks()
        assert sum(r.pushes for r in ranks_after) == pushes == store.status().version
        assert sum(r.samples for r in ranks_after) == pushes
        assert [m.state for m in store.members()].count(MemberState.LEFT) >= ranks


def test_a_skipped_step_changes_nothing_and_is_counted() -> None:
    with Store.create("skip", some_tensors(0), batches=[5], samples=10) as store:
        store.join()
        store.start()
        before = store.pull()[0]
        result = store.push(store.stage(), 0, Hyper(lr=1.0))
        assert result.version == 0
        np.testing.assert_array_equal(store.pull()[0], before)
        assert store.ranks()[0].skipped == 5
        push_tensors(store, some_tensors(1), Hyper(lr=1.0))
        with pytest.raises(errors.Ended):
            store.start()


def test_replan_changes_the_next_claims() -> None:
    with Store.create("replan", {"w": np.zeros(4)}, batches=[5], policy="asp") as store:
        store.join()
        assert store.start().batch == 5
        store.replan([7])
        store.push(store.stage(), 5, Hyper(lr=0.0))
        claim = store.start()
        assert (claim.first, claim.count, claim.plan) == (5, 7, 1)


def test_what_the_store_says_of_itself() -> None:
    with Store.create("who", some_tensors(0), batches=[2, 3]) as store:
        assert {t.name: t.shape for t in store.tensors} == SHAPES
        assert store.layout.parameters == sum(math.prod(shape) for shape in SHAPES.values())
        assert not store.status().all_joined
        assert store.join(1) == 1
        (member,) = store.members()
        assert (member.rank, member.role, member.pid) == (1, Role.WORKER, os.getpid())
        with Store.open("who") as other:
            assert other.join(role="observer") == -1
            assert [m.rank for m in other.members()] == [1, None]
        sequence = store.status().sequence
        with pytest.raises(errors.TimedOut):
            store.wait(sequence, timeout=0.01)
        assert [r.batch for r in store.ranks()] == [2, 3]


# Views.


def test_views_are_of_the_area_itself() -> None:
    with Store.create("views", some_tensors(0), batches=[1]) as store:
        store.join()
        staging = store.stage()
        assert staging.flat.shape == (store.layout.flat_elements,)
        assert staging["weight"].shape == SHAPES["weight"]
        staging.flat.fill(0.0)
        staging["bias"][:] = 5.0
        assert float(staging.flat.sum()) == 5.0 * 33
        assert staging.torch().data_ptr() == staging.flat.__array_interface__["data"][0]
        assert store.staging(staging.index) is staging


def mapped(shm: Path) -> bool:
    return str(shm) in Path("/proc/self/maps").read_text()


def test_a_view_keeps_the_mapping_alive(shm: Path) -> None:
    store = Store.create("alive", some_tensors(0), batches=[1])
    store.join()
    staging = store.stage()
    weight, tensor = staging["weight"], staging.torch()
    store.close()
    assert not any(shm.iterdir()), "the creator's close removes the name"
    assert mapped(shm)
    assert not staging.flat.flags.writeable
    del staging, weight
    gc.collect()
    assert mapped(shm), "the torch tensor still needs it"
    assert math.isfinite(float(tensor.nan_to_num().sum()))
    del tensor
    gc.collect()
    assert not mapped(shm)


def test_after_leave_the_area_is_read_only_and_calls_are_refused() -> None:
    with Store.create("left", some_tensors(0), batches=[1]) as store:
        store.join()
        staging, unused = store.stage(), store.stage()
        staging.flat.fill(0.0)
        store.leave()
        with pytest.raises(ValueError, match="read-only"):
            staging["bias"][:] = 1.0
        with pytest.raises(errors.InvalidArgument, match="gave up"):
            unused["bias"][:] = 1.0
        for call in (store.start, store.stage, lambda: store.staging(0), store.pull):
            with pytest.raises(errors.InvalidArgument):
                call()
        store.join()
        store.stage().flat.fill(0.0)


def test_after_close_every_call_is_refused() -> None:
    store = Store.create("closed", some_tensors(0), batches=[1])
    store.close()
    store.close()
    assert store.closed
    for call in (
        store.start,
        store.pull,
        store.status,
        store.members,
        store.snapshot,
        store.leave,
        store.reap,
    ):
        with pytest.raises(errors.StoreClosed):
            call()


def test_pull_writes_into_the_given_array() -> None:
    with Store.create("out", some_tensors(0), batches=[1]) as store:
        store.join()
        out = np.zeros(store.layout.flat_elements, np.float32)
        flat, _ = store.pull(out)
        assert flat is out
        np.testing.assert_array_equal(store.pull(strict=True)[0], out)
        wrong: list[Any] = [out[:-1], out.astype(np.float64), np.zeros(2 * len(out), np.float32)[::2]]
        for bad in wrong:
            with pytest.raises(errors.InvalidArgument, match="out: found"):
                store.pull(bad)
        out.flags.writeable = False
        with pytest.raises(errors.InvalidArgument, match="read-only"):
            store.pull(out)


def test_threads_may_read_at_once_from_a_store_that_has_not_joined() -> None:
    """Each as an observer: one is not to end the place that another reads from."""
    initial = some_tensors(0)
    with Store.create("readers", initial, batches=[1]) as store:

        def read() -> None:
            for _ in range(10):
                np.testing.assert_array_equal(store.snapshot().tensors["weight"], initial["weight"])
                store.read(lambda first, values: None)
                assert store.state().header.version == 0

        in_threads(*[read] * 4)
        assert store.rank is None


def test_public_names() -> None:
    assert pyps.Store is Store
    assert {"BSP", "ASP", "Hyper", "join", "Worker", "load_parameters"} <= set(dir(pyps))
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = pyps.nothing_like_it
    assert native.isa() in ("scalar", "avx2", "avx512", "neon")
