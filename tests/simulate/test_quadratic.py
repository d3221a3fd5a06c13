"""The quadratic with noisy gradients against its matrices, and steps of half-normal times."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pyps.errors import InputError
from pyps.formats import Jitter
from pyps.simulate import Quadratic, Scenario, SimWorker, simulate
from pyps.simulate.problem import quadratic_of
from pyps.simulate.scenario import DeviceModel

D = 20
A = (2 * np.eye(D) - np.eye(D, k=1) - np.eye(D, k=-1)) / 4
B = np.concatenate([[-0.25], np.zeros(D - 1)])


def value(x: np.ndarray) -> float:
    return float(x @ A @ x / 2 - B @ x)


def test_the_loss_and_the_gradient_are_those_of_the_matrices() -> None:
    problem, w = Quadratic(D, noise=0.0), np.random.default_rng(1).standard_normal(D)
    gradient, loss = problem.gradient(w, 5, 3)
    assert gradient == pytest.approx(A @ w - B, abs=1e-14)
    least = np.linalg.solve(A, B)
    assert loss == pytest.approx(value(w) - value(least), abs=1e-12)
    assert problem.loss(w) == pytest.approx(loss, abs=1e-12)
    assert problem.loss(least) == pytest.approx(0.0, abs=1e-12)
    assert problem.start().tolist() == [math.sqrt(D)] + [0.0] * (D - 1)


def test_noise_depends_on_positions_and_seed_and_falls_with_the_batch() -> None:
    w = np.zeros(1000)
    one, again, other = (Quadratic(1000, 0.5, seed).gradient(w, 7, 4)[0] for seed in (1, 1, 2))
    assert (one == again).all()
    assert (one != other).all()
    assert (one != Quadratic(1000, 0.5, 1).gradient(w, 11, 4)[0]).all()
    assert one[1:].std() == pytest.approx(0.25, rel=0.1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("quadratic:d=1", "d: found 1; expected 2 to"),
        ("quadratic:d=2.5", "'d=2.5'"),
        ("quadratic:e=2", "'e=2'"),
        ("quadratic:noise=-1", "noise: found -1"),
        ("quadratic:noise=x", "'noise=x'"),
    ],
)
def test_a_wrong_text_is_named(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        quadratic_of(text, 0)


def test_a_run_measures_the_loss_as_often_as_asked() -> None:
    workers = tuple(SimWorker(f"w{k}", 4, lambda b: 1.0) for k in range(4))
    problem = quadratic_of("quadratic:d=50,noise=0.0", 0)
    often = simulate(Scenario(workers), "asp", iterations=10, objective=problem, lr=0.5, measure_every=8)
    assert [samples for _, samples, _ in often.curve] == [8 * k for k in range(21)]
    assert often.loss < 0.8 * often.curve[0][2]
    usual = simulate(Scenario(workers), "asp", iterations=10, objective=problem, lr=0.5)
    assert [samples for _, samples, _ in usual.curve] == [16 * k for k in range(11)]
    with pytest.raises(InputError, match="measure_every"):
        simulate(Scenario(workers), "asp", measure_every=-1)


def test_half_normal_steps_are_never_shorter_and_have_its_mean() -> None:
    device = DeviceModel(lambda b: 2.0, Jitter(half_normal=0.5), (), seed=1, rank=0)
    seconds = np.array([device.seconds(1, 0.0) for _ in range(4000)])
    assert seconds.min() >= 2.0
    assert seconds.mean() == pytest.approx(2.0 * (1 + 0.5 * math.sqrt(2 / math.pi)), rel=0.03)
