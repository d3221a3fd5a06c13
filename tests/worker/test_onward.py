"""In a pipeline of rounds a worker goes on along its own gradients under way, which it knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worker_tools import SAMPLES, X, Y, backward, loss_of, make_model

from pyps.native.values import Hyper, Optimizer, PushRequest, Tensor
from pyps.remote.server import Server
from pyps.step.own import way_of
from pyps.worker.loop import join
from pyps.worker.onward import Onward
from pyps.worker.sampling import indices

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
        pipeline=depth,
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
    own = Onward(Optimizer.MOMENTUM, tensors)
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
