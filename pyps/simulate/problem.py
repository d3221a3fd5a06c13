"""Objectives of a simulation: gradients of real data at the parameters that a worker had pulled, or none.

Gradients g_i of b_i samples each make one version: a step with sum(b_i s_i g_i) / sum(b_i), with s_i the
policy's scale, or the part of a step that the decision core says (pyps.simulate.optimizer). So a learning
rate means the same under every policy, and the same as in a real store.

With local steps a worker takes steps of its own optimizer, and pushes how far they brought it. The optimizers
are those of the store; each worker's keeps its state from claim to claim.

Quadratic is a convex problem with noisy gradients, that of Ringmaster ASGD's experiments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pyps.errors import InputError
from pyps.native.values import Hyper, Optimizer
from pyps.simulate.optimizer import OptimizerState, Vector
from pyps.step.machine import even_steps
from pyps.step.own import ADAM, share_of_way, way_of
from pyps.worker.data.sampling import indices
from pyps.worker.step.onward import GradientMoments

if TYPE_CHECKING:
    from pyps.tasks import TrainingTask

NAME = "quadratic"
MOST_COORDINATES = 1_000_000


class Objective(Protocol):
    """A model and its data. Parameters are a flat vector, never changed in place."""

    def start(self) -> Vector:
        """The first parameters."""
        ...

    def gradient(self, w: Vector, first: int, count: int) -> tuple[Vector, float]:
        """The mean gradient and loss of the samples at positions first .. first + count."""
        ...

    def loss(self, w: Vector) -> float:
        """The loss on the whole data."""
        ...


class Logistic:
    """Multinomial logistic regression by NumPy on generated data: Gaussian classes with deviation `noise`."""

    def __init__(
        self, samples: int = 2000, features: int = 20, classes: int = 5, noise: float = 2.0, seed: int = 0
    ) -> None:
        draw = np.random.default_rng(seed)
        centres = draw.standard_normal((classes, features))
        self.labels = draw.integers(classes, size=samples)
        self.x = centres[self.labels] + noise * draw.standard_normal((samples, features))
        self._shape, self._seed = (features, classes), seed

    def start(self) -> Vector:
        return np.zeros(self._shape[0] * self._shape[1])

    def gradient(self, w: Vector, first: int, count: int) -> tuple[Vector, float]:
        return self._at(w, indices(first, count, len(self.labels), self._seed))

    def loss(self, w: Vector) -> float:
        return self._at(w, np.arange(len(self.labels)))[1]

    def _at(self, w: Vector, rows: NDArray[np.int64]) -> tuple[Vector, float]:
        x, y = self.x[rows], self.labels[rows]
        scores = x @ w.reshape(self._shape)
        scores -= scores.max(axis=1, keepdims=True)
        p = np.exp(scores)
        p /= p.sum(axis=1, keepdims=True)
        picked = p[np.arange(len(y)), y]
        p[np.arange(len(y)), y] -= 1.0
        return (x.T @ p).ravel() / len(y), float(-np.log(picked).mean())


class TorchObjective:
    """A pyps.tasks.TrainingTask on `inputs` and `targets` in memory, as its loss takes them."""

    def __init__(self, task: TrainingTask, inputs: Any, targets: Any, seed: int = 0) -> None:
        self._task, self._inputs, self._targets, self._seed = task, inputs, targets, seed
        self._parameters = [p for p in task.model.parameters() if p.requires_grad]
        self._start = np.concatenate([p.detach().double().numpy().ravel() for p in self._parameters])

    def start(self) -> Vector:
        """The parameters that the model had at first: a simulation changes them."""
        return self._start.astype(np.float64)

    def gradient(self, w: Vector, first: int, count: int) -> tuple[Vector, float]:
        import torch

        self._load(w)
        rows = torch.from_numpy(indices(first, count, len(self._inputs), self._seed))
        loss = self._task.loss(self._task.model(self._inputs[rows]), self._targets[rows])
        gradients = torch.autograd.grad(loss, self._parameters)
        return np.concatenate([g.double().numpy().ravel() for g in gradients]), float(loss.detach())

    def loss(self, w: Vector) -> float:
        import torch

        self._load(w)
        with torch.no_grad():
            return float(self._task.loss(self._task.model(self._inputs), self._targets))

    def _load(self, w: Vector) -> None:
        import torch

        at = 0
        with torch.no_grad():
            for p in self._parameters:
                p.copy_(torch.from_numpy(w[at : at + p.numel()]).view(p.shape))
                at += p.numel()


@dataclass(frozen=True)
class LocalOptimizer:
    """The workers' own optimizer: its kind, and its constants or learning rate."""

    optimizer: Optimizer | str = "sgd"
    lr: float | Hyper = 0.1


class LocalWorkers:
    """Pseudo-gradients of every worker's local steps on an objective."""

    def __init__(self, objective: Objective, steps: LocalOptimizer) -> None:
        self._objective = objective
        self._kind = Optimizer.of(steps.optimizer)
        self._hyper = steps.lr if isinstance(steps.lr, Hyper) else Hyper(steps.lr)
        self._states: dict[int, OptimizerState] = {}
        self._ways: dict[int, Vector] = {}  # of the steps since each worker's last push, where it has merged

    def gradient(self, worker: int, w: Vector, first: int, count: int, most: int) -> tuple[Vector, float]:
        """The way back from where the local steps lead, and the loss of the last one; arguments as below."""
        loss = self.advance(worker, w, first, count, most)
        return self._ways.pop(worker), loss

    def advance(self, worker: int, w: Vector, first: int, count: int, most: int) -> float:
        """Take local steps; the loss of the last one.

        worker: whose. w: what it pulled, from which its steps since the last push lead further. first, count:
        the samples of these steps. most: of one step; 0: all.
        """
        state = self._states.setdefault(worker, OptimizerState(self._kind, self._hyper, w.size))
        at = w - self._ways.pop(worker, 0.0)
        loss, end = float("nan"), first + count
        while first < end:
            size = even_steps(end - first, most or count)
            gradient, loss = self._objective.gradient(at, first, size)
            at, first = state.step(at, gradient, 1.0), first + size
        self._ways[worker] = w - at
        return loss

    def forget(self, worker: int) -> None:
        """Drop the steps since the last push."""
        self._ways.pop(worker, None)


class Model:
    """The parameters in virtual time; without an objective it has none and no loss."""

    def __init__(
        self,
        objective: Objective | None,
        optimizer: Optimizer,
        hyper: Hyper,
        local: LocalOptimizer | None = None,
    ) -> None:
        """optimizer, hyper: the store's. local: the workers' own optimizer, if they take local steps."""
        self._objective = objective
        self._local = LocalWorkers(objective, local) if objective is not None and local is not None else None
        self.w = objective.start() if objective else np.zeros(0)
        self.optimizer = OptimizerState(optimizer, hyper, self.w.size)
        self._own: dict[int, GradientMoments] = {}

    def gradient(
        self, w: Vector, first: int, count: int, worker: int = 0, most: int = 0
    ) -> tuple[Vector, float] | None:
        """Return what a worker pushes that has computed these samples, `most` at once, and the loss."""
        if self._local is not None:
            return self._local.gradient(worker, w, first, count, most)
        return self._objective.gradient(w, first, count) if self._objective else None

    def advance(self, w: Vector, first: int, count: int, worker: int, most: int) -> None:
        """A worker takes these local steps now, and will push them with later ones."""
        if self._local is not None:
            self._local.advance(worker, w, first, count, most)

    def forget(self, worker: int) -> None:
        """Drop a worker's local steps since its last push."""
        if self._local is not None:
            self._local.forget(worker)

    def step(self, sources: Sequence[tuple[Vector, int, float]], part: float) -> None:
        """Make a version by a part of a step; a source is (gradient, samples, scale), in summation order."""
        if not self._objective:
            return
        total = np.zeros_like(self.w)
        for gradient, samples, scale in sources:
            total += samples * (scale * gradient)
        mean = total / sum(samples for _, samples, _ in sources)
        self.w = self.optimizer.step(self.w, mean, part)

    def ahead(self, distance: float, gradient: Vector | None, *, rounds: bool) -> Vector:
        """The parameters as they will be after `distance` global batches, if their gradients are like
        this one; in `rounds` there is none.
        """
        if not self._objective:
            return self.w
        return self.optimizer.ahead(self.w, distance, gradient, rounds=rounds)

    def own(self, worker: int, gradient: Vector, part: float) -> Vector:
        """Return what a worker goes on along of a gradient that it has sent. part: of a global batch."""
        h = self.optimizer.hyper
        g = np.clip(gradient, -h.clip, h.clip) if h.clip else gradient
        if self.optimizer.kind not in ADAM:
            return share_of_way(h, self.optimizer.kind, part) * g
        return self._own.setdefault(worker, GradientMoments(g)).difference(g, h, part)

    def way(self, own: Vector, have: int, wanted: int) -> Vector:
        """Return how far that goes from `have` steps of it to `wanted`."""
        h, kind = self.optimizer.hyper, self.optimizer.kind
        return (way_of(h, kind, wanted) - way_of(h, kind, have)) * own

    def loss(self) -> float:
        return self._objective.loss(self.w) if self._objective else float("nan")


class Quadratic:
    """A convex quadratic with noisy gradients; as text `quadratic:d=1729,noise=0.01`.

    f(x) = x'Ax / 2 - b'x,  A = tridiag(-1, 2, -1) / 4,  b = (-1, 0, ..., 0) / 4,  x_0 = (sqrt(d), 0, ..., 0)

    A gradient of one sample is that of f plus normal noise in each coordinate.
    d: coordinates, at least 2. noise: standard deviation of each in a gradient of a sample. seed: of it.

    A gradient's noise depends on its samples' positions and the seed alone. Raises InputError for a number
    out of range.
    """

    def __init__(self, d: int = 100, noise: float = 0.01, seed: int = 0) -> None:
        if not 2 <= d <= MOST_COORDINATES:
            raise InputError(NAME, "d", str(d), f"2 to {MOST_COORDINATES}")
        if not (noise >= 0.0 and math.isfinite(noise)):
            raise InputError(NAME, "noise", str(noise), "a number of at least 0")
        self._d, self._noise, self._seed = d, noise, seed
        self._least = -0.125 * d / (d + 1)  # f where its gradient is 0

    def start(self) -> Vector:
        x = np.zeros(self._d)
        x[0] = math.sqrt(self._d)
        return x

    def gradient(self, w: Vector, first: int, count: int) -> tuple[Vector, float]:
        g = 0.5 * w
        g[1:] -= 0.25 * w[:-1]
        g[:-1] -= 0.25 * w[1:]
        loss = float(0.5 * (w @ g)) + 0.25 * float(w[0]) - self._least
        g[0] += 0.25
        if self._noise:
            draw = np.random.Generator(np.random.Philox(key=self._seed, counter=[0, first, count, 0]))
            g += draw.standard_normal(self._d) * (self._noise / math.sqrt(count))
        return g, loss

    def loss(self, w: Vector) -> float:
        """f(w) above its least value."""
        steps = np.diff(w)
        squares = float(w[0] ** 2 + steps @ steps + w[-1] ** 2)
        return 0.125 * squares + 0.25 * float(w[0]) - self._least


def quadratic_of(text: str, seed: int) -> Quadratic:
    """The problem of `quadratic` or `quadratic:d=100,noise=0.01`. Raises InputError for what is neither."""
    values: dict[str, float] = {}
    for item in filter(None, text.partition(":")[2].split(",")):
        key, _, value = item.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        whole = key == "d" and not number.is_integer()
        if key not in ("d", "noise") or not math.isfinite(number) or whole:
            raise InputError(
                "--learn", NAME, repr(item), "d=WHOLE NUMBER or noise=NUMBER, and a comma between"
            )
        values[key] = number
    return Quadratic(d=int(values.get("d", 100)), noise=values.get("noise", 0.01), seed=seed)
