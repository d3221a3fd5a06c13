"""Define what the comparisons learn: a 64-32-10 tanh network on scikit-learn's digits (1,797 real images),
in NumPy.

It is a `pyps.simulate.Objective`. The workers of real runs compute the same gradients at the same samples.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from pyps.simulate.problem import Vector
from pyps.worker.data.sampling import indices

PIXELS, HIDDEN, CLASSES = 64, 32, 10
SHAPES = ((PIXELS, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,))
ENDS = [0, *np.cumsum([int(np.prod(shape)) for shape in SHAPES]).tolist()]
PLACES = [(slice(a, b), shape) for (a, b), shape in zip(pairwise(ENDS), SHAPES, strict=True)]


class Digits:
    """`seed` is that of the first parameters and of the samples' order."""

    def __init__(self, seed: int = 0) -> None:
        digits = load_digits()
        self.x = digits.data / 8.0 - 1.0
        self._single = self.x.astype(np.float32)  # of all samples, whose loss is three times as fast in it
        self.labels = digits.target.astype(np.int64)
        self._seed = seed

    def start(self) -> Vector:
        draw = np.random.default_rng(self._seed)
        drawn = [draw.standard_normal(shape) / np.sqrt(shape[0]) * (len(shape) > 1) for shape in SHAPES]
        return np.concatenate([part.ravel() for part in drawn])

    def gradient(self, w: Vector, first: int, count: int) -> tuple[Vector, float]:
        rows = indices(first, count, len(self.labels), self._seed)
        a, b, c, d = parts(w)
        x, y = self.x[rows], self.labels[rows]
        hidden = np.tanh(x @ a + b)
        p, loss = softmax(hidden @ c + d, y)
        p[np.arange(len(y)), y] -= 1.0
        p /= len(y)
        back = (p @ c.T) * (1.0 - hidden * hidden)
        gradient = np.empty(ENDS[-1])
        a, b, c, d = parts(gradient)
        np.matmul(x.T, back, out=a)
        np.sum(back, axis=0, out=b)
        np.matmul(hidden.T, p, out=c)
        np.sum(p, axis=0, out=d)
        return gradient, loss

    def loss(self, w: Vector) -> float:
        a, b, c, d = parts(w.astype(np.float32))
        return softmax(np.tanh(self._single @ a + b) @ c + d, self.labels)[1]


def parts(w: Vector) -> list[Vector]:
    """The two layers' weights and biases, as views."""
    return [w[place].reshape(shape) for place, shape in PLACES]


def softmax(scores: Vector, labels: NDArray[np.int64]) -> tuple[Vector, float]:
    """Probabilities, and the mean cross-entropy."""
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    picked = p[np.arange(len(labels)), labels]
    return p, -float(np.log(np.maximum(picked, 1e-30)).sum()) / len(labels)
