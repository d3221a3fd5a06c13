"""One learning rate under every policy, on a quadratic whose gradients are late."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from pyps.native.values import Hyper
from pyps.simulate import Scenario, SimWorker, TorchObjective, simulate
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
