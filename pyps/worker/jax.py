"""A pytree of JAX that a worker trains: parameters out, gradients in.

    model = Pytree(parameters)
    worker.attach(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for inputs, targets in worker.batches((x, y)):
        loss, gradient = loss_and_gradient(model.tree(), inputs.numpy(), targets.numpy())  # value_and_grad
        model.backward(gradient)
        worker.step(float(loss))

Leaves are named by their path, as in layers/0/weights.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from pyps.errors import InputError
from pyps.worker.arrays import ArrayModel


class Pytree(ArrayModel):
    """Holds the leaves of a pytree; `tree` gives them back in its form. Raises what ArrayModel raises."""

    def __init__(self, tree: Any) -> None:
        leaves, self._form = jax.tree_util.tree_flatten_with_path(tree)
        super().__init__({_name(path): np.asarray(leaf) for path, leaf in leaves})

    def tree(self) -> Any:
        """The parameters as they are now, as JAX arrays."""
        leaves = [jax.numpy.asarray(array) for array in self.arrays().values()]
        return jax.tree_util.tree_unflatten(self._form, leaves)

    def backward(self, gradient: Any) -> None:
        """Add the gradient of the mean loss over the last batch: a pytree of the same form.

        Raises InputError if it has another one.
        """
        leaves, form = jax.tree_util.tree_flatten_with_path(gradient)
        if form != self._form:
            raise InputError("backward", "gradient", str(form), str(self._form))
        super().backward({_name(path): np.asarray(leaf) for path, leaf in leaves})


def _name(path: tuple[Any, ...]) -> str:
    return "/".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)
