"""In a pipeline of rounds a worker goes on along its own gradients under way, which it knows."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worker_tools import SAMPLES, X, Y, backward, loss_of, make_model

from pyps.native.values import Hyper, Optimizer, PushRequest, Tensor
from pyps.remote.server import Server
from pyps.step.own import way_of
from pyps.worker.data.sampling import indices
from pyps.worker.step.loop import join
from pyps.worker.step.onward import GradientMoments, Onward

KINDS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.75, "nesterov": True},
    "decay": {"momentum": 0.9, "weight_decay": 1e-5},
}
EPOCHS = 3


def optimizer_of(model: torch.nn.Module, **options: Any) -> torch.optim.SGD:
    """Two groups with rates of their own."""
    weights, *others = model.parameters()
    return torch.optim.SGD([{"params": others}, {"params": [weights], "lr": 0.02}], lr=0.05, **options)


def piped(
    store: str, depth: int, codec: str = "f32", policy: str = "hps", **options: Any
) -> list[torch.Tensor]:
    """The parameters after a run of one worker."""
    model = make_model()
    with join(
        store,
        0,
        batches=[10],
        samples=EPOCHS * SAMPLES,
        seed=5,
        policy=policy,
        depth=depth,
        codec=codec,
        micro_batch=4,
    ) as worker:
        worker.attach(model, optimizer_of(model, **options), clip_norm=1.0)
        for x, y in worker.batches((X, Y)):
            backward(loss_of(model, x, y))
            worker.step()
        assert 1 <= worker.store.ranks()[0].staleness_max < depth
    return [p.detach().clone() for p in model.parameters()]


def plain(**options: Any) -> list[torch.Tensor]:
    """The parameters after as many steps of torch."""
    model = make_model()
    optimizer = optimizer_of(model, **options)
    for first in range(0, EPOCHS * SAMPLES, 10):
        rows = torch.from_numpy(indices(first, 10, SAMPLES, 5))
        optimizer.zero_grad()
        backward(loss_of(model, X[rows], Y[rows]))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(("kind", "depth"), [(kind, 2) for kind in KINDS] + [("sgd", 3), ("sgd", 5)])
def test_alone_it_is_as_without_a_pipeline(shm: Path, kind: str, depth: int) -> None:
    """With momentum in a deeper one too, where each gradient is as late as the last one."""
    for found, expected in zip(piped("run", depth, **KINDS[kind]), plain(**KINDS[kind]), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("codec", ["f32", "int8"])
def test_the_same_bits_over_the_link(shm: Path, codec: str) -> None:
    local = piped("near", 2, codec, **KINDS["momentum"])
    with Server("far") as server:
        remote = piped(server.address, 2, codec, **KINDS["momentum"])
    for found, expected in zip(remote, local, strict=True):
        assert torch.equal(found, expected)
    for found, expected in zip(local, plain(**KINDS["momentum"]), strict=True):
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


def test_without_look_ahead_it_is_sgd_with_a_delay(shm: Path) -> None:
    late = piped("run", 2, policy="hps:lookahead=false", **KINDS["momentum"])
    assert not torch.allclose(late[0], plain(**KINDS["momentum"])[0], atol=2e-3)


def test_the_way_of_a_gradient_is_scaled_clipped_and_whole() -> None:
    hyper = Hyper(lr=0.5, momentum=0.5, clip=2.0)
    assert [way_of(hyper, Optimizer.MOMENTUM, n) for n in range(4)] == [0.0, 0.5, 0.75, 0.875]
    tensors = (Tensor("w", (3,), 0, 0, 3), Tensor("mean", (1,), 1, 4, 1, averaged=True))
    own = Onward(Optimizer.MOMENTUM, tensors, 4)
    params = np.zeros(5, np.float32)
    for values, samples in (([1.0, 2.0, 8.0], 4), ([np.nan, 1.0, 1.0], 4), ([1.0, 1.0, 1.0], 0)):
        gradient = np.array([*values, 9.0, 9.0], np.float32)
        own.sent(PushRequest(0, samples, (hyper, Hyper(lr=0.1)), scale=0.5), gradient)
        own.go_on(params)
    np.testing.assert_allclose(params, [-0.4375, -0.875, -1.75, 0.0, 0.0])
    own.loaded()
    own.arrived()
    params[:] = 0.0
    own.go_on(params)
    assert not params.any(), "one is not finite, one was skipped"


def test_a_part_of_a_round_goes_on_by_twice_the_root_of_its_part() -> None:
    """Unless momentum makes a gradient's own step short beside the way of a round's gradient."""
    tensors = (Tensor("w", (1,), 0, 0, 1), Tensor("v", (1,), 1, 1, 1))
    hypers = Hyper(lr=0.5), Hyper(lr=0.5, momentum=0.75)
    own, params = Onward(Optimizer.MOMENTUM, tensors, 64), np.zeros(2, np.float32)
    own.sent(PushRequest(0, 1, hypers), np.ones(2, np.float32))
    own.go_on(params)
    np.testing.assert_allclose(params, [-0.5 / 4, -0.5])


def test_adam_goes_on_by_how_gradients_differ_from_its_mean() -> None:
    """Against the formulas, in two groups with constants of their own; the first gradient tells nothing."""
    hypers = Hyper(lr=0.1, betas=(0.5, 0.75)), Hyper(lr=0.2, betas=(0.9, 0.99), clip=1.0)
    tensors = Tensor("w", (2,), 0, 0, 2), Tensor("v", (2,), 1, 2, 2)
    own, params, expected = Onward(Optimizer.ADAMW, tensors, 16), np.zeros(4, np.float32), np.zeros(4)
    first, second = np.zeros(4), np.zeros(4)
    beta1, beta2 = np.repeat([[h.betas[0], h.betas[1]] for h in hypers], 2, axis=0).T
    lr, draw = np.repeat([h.lr for h in hypers], 2), np.random.default_rng(0)
    for step in range(1, 6):
        pushed = draw.standard_normal(4).astype(np.float32)
        own.sent(PushRequest(0, 4, hypers, scale=2.0), pushed)
        own.go_on(params)
        g = 2.0 * pushed.astype(np.float64)
        g[2:] = np.clip(g[2:], -1.0, 1.0)
        mean = first / (1 - beta1 ** (step - 1)) if step > 1 else g
        first = beta1 * first + (1 - beta1) * g
        second = beta2 * second + (1 - beta2) * (mean + (g - mean) / 2) ** 2
        expected -= lr * (1 - beta1) * (g - mean) / (np.sqrt(second / (1 - beta2**step)) + 1e-8)
        np.testing.assert_allclose(params, expected, rtol=1e-4, atol=1e-6)
        own.arrived()


def test_moments_do_not_depend_on_blocks() -> None:
    draw, hyper = np.random.default_rng(1), Hyper(lr=0.1)
    gradients = draw.standard_normal((3, (1 << 16) + 5)).astype(np.float32)
    long, short = GradientMoments(gradients[0]), GradientMoments(gradients[0, -5:])
    for gradient in gradients:
        whole, end = long.difference(gradient, hyper, 0.5), short.difference(gradient[-5:], hyper, 0.5)
        np.testing.assert_array_equal(whole[-5:], end)


@pytest.mark.parametrize(
    ("depth", "momentum", "told"),
    [
        (2, 0.0, "2 steps under way, SGD: after as many samples the loss was 1.00 to 1.10 times"),
        (3, 0.9, "3 steps under way, MOMENTUM: after as many samples the loss was 0.98 to 1.23 times"),
        (1, 0.0, ""),
    ],
)
def test_what_a_pipeline_cost_is_told_before_it_trains(
    shm: Path, depth: int, momentum: float, told: str
) -> None:
    model = make_model()
    options: dict[str, Any] = {"batches": [2] * 2, "samples": 40, "policy": "hps", "depth": depth}
    with join("told", 0, **options) as worker, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        worker.attach(model, optimizer_of(model, momentum=momentum))
    said = [str(one.message) for one in found if "steps under way" in str(one.message)]
    assert [text.startswith(told) for text in said] == [True] * bool(told)
