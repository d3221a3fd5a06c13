"""A network in JAX on the digits of scikit-learn, trained through the store.

    pip install '.[torch,jax]' scikit-learn        (in a clone)
    pyps run --plan plan.json --samples 46080 examples/jax/train.py

Rank 0 prints the accuracy on held-out images.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from sklearn.datasets import load_digits

import pyps
from pyps.worker.jax import Pytree

HELD_OUT = 360
WIDTHS = (64, 128, 10)


def main() -> None:
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x, y = images[order].astype(np.float32) / 16, labels[order]
    model = Pytree(network())
    with pyps.join() as worker:
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        train = torch.from_numpy(x[HELD_OUT:]), torch.from_numpy(y[HELD_OUT:])
        for inputs, targets in worker.batches(train):
            value, gradient = loss_and_gradient(model.tree(), inputs.numpy(), targets.numpy())
            model.backward(gradient)
            worker.step(float(value))
        if worker.rank == 0:
            found = jnp.argmax(outputs(model.tree(), x[:HELD_OUT]), axis=1)
            print(f"accuracy {float((found == y[:HELD_OUT]).mean()):.3f}")


def network() -> list[dict[str, Any]]:
    """The first parameters; the same on every rank."""
    layers, key = [], jax.random.key(0)
    for before, after in pairwise(WIDTHS):
        key, part = jax.random.split(key)
        weights = jax.random.normal(part, (before, after)) / before**0.5
        layers.append({"weights": weights, "bias": jnp.zeros(after)})
    return layers


def outputs(layers: list[dict[str, Any]], x: Any) -> Any:
    for layer in layers[:-1]:
        x = jnp.tanh(x @ layer["weights"] + layer["bias"])
    return x @ layers[-1]["weights"] + layers[-1]["bias"]


def loss(layers: list[dict[str, Any]], x: Any, targets: Any) -> Any:
    """The mean over the batch."""
    chances = jax.nn.log_softmax(outputs(layers, x))
    return -jnp.take_along_axis(chances, targets[:, None], axis=1).mean()


loss_and_gradient = jax.jit(jax.value_and_grad(loss))

if __name__ == "__main__":
    main()
