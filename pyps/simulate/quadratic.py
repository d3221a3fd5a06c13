"""A convex quadratic with noisy gradients: the problem of Ringmaster ASGD's experiments.

    f(x) = x'Ax / 2 - b'x,  A = tridiag(-1, 2, -1) / 4,  b = (-1, 0, ..., 0) / 4,  x_0 = (sqrt(d), 0, ..., 0)

A gradient of one sample is that of f plus normal noise in each coordinate. As text it is
`quadratic:d=1729,noise=0.01`.
"""

from __future__ import annotations

import math

import numpy as np

from pyps.errors import InputError
from pyps.simulate.optimizer import Vector

NAME = "quadratic"
MOST_COORDINATES = 1_000_000


class Quadratic:
    """d: coordinates, at least 2. noise: standard deviation of each in a gradient of a sample. seed: of it.

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
