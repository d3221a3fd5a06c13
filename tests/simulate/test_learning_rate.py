"""One learning rate under every policy, on a quadratic whose gradients are late."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from pyps.native.values import Hyper
from pyps.simulate import Scenario, SimWorker, TorchObjective, simulate
from pyps.simulate.problem import Quadratic as Tridiagonal
from pyps.store.policies import Policy
from pyps.tasks import TrainingTask

Array = NDArray[np.float64]
EIGHT = Scenario(tuple(SimWorker(f"w{k}", 4, lambda _, k=k: 1.0 + 0.001 * k) for k in range(8)))  # type: ignore[misc]


class Quadratic:
    """Half the sum of lambda w^2: no noise."""

    curvature = np.array([1.0, 0.5, 0.1])

    def start(self) -> Array:
        return np.ones(3)

    def gradient(self, w: Array, first: int, count: int) -> tuple[Array, float]:
        return self.curvature * w, self.loss(w)

    def loss(self, w: Array) -> float:
        with np.errstate(over="ignore"):
            return float(0.5 * np.sum(self.curvature * w * w))


def loss(policy: str, hyper: Hyper, optimizer: str, iterations: int = 60) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        options = {"objective": Quadratic(), "lr": hyper, "optimizer": optimizer}
        return simulate(EIGHT, policy, iterations=iterations, **options).loss  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", Policy.known)
@pytest.mark.parametrize(
    ("optimizer", "hyper"),
    [("momentum", Hyper(lr=0.05, momentum=0.9)), ("adamw", Hyper(lr=0.02)), ("sgd", Hyper(lr=0.3))],
    ids=["momentum", "adamw", "sgd"],
)
def test_the_rate_of_bsp_does_under_every_policy(policy: str, optimizer: str, hyper: Hyper) -> None:
    # Adam's second moment long remembers the first, fresh gradients, which dynsgd weighs eight times.
    slack = 0.1 if (policy, optimizer) == ("dynsgd", "adamw") else 0.01
    assert loss(policy, hyper, optimizer) < 1.5 * loss("bsp", hyper, optimizer) + slack


def test_look_ahead_bears_rates_that_a_delay_does_not() -> None:
    """One curvature bears lr of 0.22 without look-ahead, 0.69 if momentum alone looks ahead, and 1.05 with
    it.
    """
    hyper = Hyper(lr=0.9, momentum=0.9)
    for policy in ("asp", "r2sp:slack=0"):
        assert loss(policy, hyper, "momentum", 200) < 1e-6
        assert (
            not loss(f"{policy}{',' if ':' in policy else ':'}lookahead=false", hyper, "momentum", 200) < 1.0
        )


SGD_KINDS = {
    "momentum": Hyper(lr=0.2, momentum=0.9),
    "nesterov": Hyper(lr=0.2, momentum=0.75, nesterov=True),
}


@pytest.mark.parametrize("depth", [2, 3, 4])
@pytest.mark.parametrize("kind", SGD_KINDS)
def test_a_pipeline_of_rounds_does_not_matter_where_gradients_are_alike(kind: str, depth: int) -> None:
    """A worker knows its own gradients under way, and the others' are the same here."""
    far = Scenario(tuple(SimWorker(f"w{k}", 4, lambda _: 1.0, latency=0.5 * depth - 0.7) for k in range(4)))
    options = {"objective": Quadratic(), "lr": SGD_KINDS[kind], "iterations": 40}
    serial, piped = (
        simulate(far, "hps", optimizer="momentum", depth=steps, **options)  # type: ignore[arg-type]
        for steps in (1, depth)
    )
    assert max(piped.staleness) == depth - 1
    np.testing.assert_allclose([loss for *_, loss in piped.curve], [loss for *_, loss in serial.curve])


class Sharp(Quadratic):
    """The sum of |w|^3 / 3, a different noise in each sample: a worker's own point is off by its noise."""

    def gradient(self, w: Array, first: int, count: int) -> tuple[Array, float]:
        noise = np.random.default_rng(first).standard_normal(3) * 8.0 / np.sqrt(count)
        return np.abs(w) * w + noise, self.loss(w)

    def loss(self, w: Array) -> float:
        return float(np.sum(np.abs(w) ** 3) / 3.0)


def test_own_noise_is_kept_small_in_a_pipeline_of_many() -> None:
    """Plain SGD, 16 workers. Along the whole of their own gradients the loss is several times as high."""
    far = Scenario(tuple(SimWorker(f"w{k}", 4, lambda _: 1.0, latency=0.3) for k in range(16)))
    options = {"lr": Hyper(lr=0.3), "iterations": 300, "optimizer": "sgd", "objective": Sharp()}
    serial, piped = (
        simulate(far, "hps", depth=depth, **options)  # type: ignore[arg-type]
        for depth in (1, 2)
    )
    ends = [np.mean([loss for *_, loss in found.curve[-200:]]) for found in (piped, serial)]
    assert ends[0] < 1.2 * ends[1]


@pytest.mark.parametrize("depth", [2, 3])
def test_sixteen_workers_bear_in_a_pipeline_the_rate_that_they_bear_without(depth: int) -> None:
    """Half of its own gradient is enough for any curvature below 2 / lr: here it is up to 1."""
    far = Scenario(tuple(SimWorker(f"w{k}", 4, lambda _: 1.0, latency=0.5 * depth - 0.7) for k in range(16)))
    options = {
        "lr": Hyper(lr=1.6),
        "iterations": 80,
        "optimizer": "sgd",
        "objective": Tridiagonal(noise=1e-3),
    }
    serial, piped = (
        simulate(far, "hps", depth=steps, **options).loss  # type: ignore[arg-type]
        for steps in (1, depth)
    )
    assert piped < 1.5 * serial


@pytest.mark.parametrize("depth", [2, 3])
def test_adam_goes_on_along_its_mean_in_a_pipeline(depth: int) -> None:
    far = Scenario(tuple(SimWorker(f"w{k}", 4, lambda _: 1.0, latency=0.5 * depth - 0.7) for k in range(4)))
    options = {"objective": Quadratic(), "lr": Hyper(lr=0.05), "iterations": 60, "optimizer": "adamw"}
    ends = [
        simulate(far, policy, depth=depth, **options).loss  # type: ignore[arg-type]
        for policy in ("hps", "hps:lookahead=false")
    ]
    assert ends[0] < 0.5 * ends[1]


def test_adam_is_as_without_a_pipeline_where_gradients_differ_from_its_mean() -> None:
    """A third step under way, at a large rate. By the mean alone the loss is 2.6 times as high."""
    far = Scenario(tuple(SimWorker(f"w{k}", 4, lambda _: 1.0, latency=0.8) for k in range(4)))
    options = {"objective": Quadratic(), "lr": Hyper(lr=0.4), "iterations": 60, "optimizer": "adamw"}
    serial, piped = (
        simulate(far, "hps", depth=depth, **options).loss  # type: ignore[arg-type]
        for depth in (1, 3)
    )
    assert piped < 1.2 * serial


def test_whole_steps_diverge_where_parts_do_not() -> None:
    hyper = Hyper(lr=0.1, momentum=0.9)
    assert loss("asp", hyper, "momentum", 200) < 1e-3
    assert not loss("asp:scaling=none", hyper, "momentum", 200) < 1.0


def test_a_simulation_leaves_the_start_of_a_torch_objective() -> None:
    torch = pytest.importorskip("torch")
    task = TrainingTask(torch.nn.Linear(2, 1), lambda count: (None, None), torch.nn.functional.mse_loss)
    objective = TorchObjective(task, torch.ones(32, 2), torch.zeros(32, 1))
    start = objective.start()
    simulate(EIGHT, "asp", iterations=2, objective=objective, lr=0.1)
    np.testing.assert_array_equal(objective.start(), start)


@pytest.mark.parametrize("policy", ["saps", "saps:noise=4", "dynsgd", "asp"])
def test_weights_leave_the_rate_as_it_is_on_unlike_workers(policy: str) -> None:
    """Equal batches, four workers ten times as fast as the others: with as many samples about as far as bsp,
    but for the first steps, when times are not known. Weights as they are leave three times its loss.
    """
    times = [1.0] * 4 + [10.0] * 28
    unlike = Scenario(tuple(SimWorker(f"w{k}", 4, lambda _, t=t: t) for k, t in enumerate(times)))  # type: ignore[misc]
    lost = {}
    for name in (policy, "bsp"):
        result = simulate(unlike, name, iterations=60, objective=Quadratic(), lr=0.05)
        lost[name] = result.loss
    assert lost[policy] == pytest.approx(lost["bsp"], rel=0.2)
