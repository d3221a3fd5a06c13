"""A model that is no torch module: arrays by name, which a worker trains as it trains a module.

    model = pyps.ArrayModel({"weights": np.zeros((64, 10)), "bias": np.zeros(10)})
    worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for inputs, targets in worker.batches((x, y)):
        loss, gradient = loss_and_gradient(model.arrays(), inputs.numpy(), targets.numpy())
        model.backward(gradient)
        worker.step(loss)

The torch optimizer only says which step the store takes. pyps.worker.jax does this for a pytree of JAX.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from pyps.errors import InputError


class ArrayModel(nn.Module):
    """Holds floating-point arrays by name as parameters; float64 becomes fp32, which is what the store keeps.

    Raises InputError for a name that torch refuses and for what is not an array of floating-point numbers.
    """

    def __init__(self, values: Mapping[str, NDArray[np.floating]]) -> None:
        super().__init__()
        for name, value in values.items():
            array = np.asarray(value)
            if array.dtype not in (np.float32, np.float64):
                raise InputError("ArrayModel", name, f"dtype {array.dtype}", "float32 or float64")
            parameter = nn.Parameter(torch.from_numpy(array.astype(np.float32)))  # a copy
            try:
                self.register_parameter(name, parameter)
            except (KeyError, TypeError) as error:
                raise InputError("ArrayModel", repr(name), str(error), "another name, without '.'") from None

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """The parameters as they are now, copied: the next batch writes to the worker's own."""
        return {name: p.detach().numpy().copy() for name, p in self.named_parameters()}

    def backward(self, gradient: Mapping[str, NDArray[np.floating]]) -> None:
        """Add the gradient of the mean loss over the last batch, as loss.backward() does.

        Raises InputError, naming the array, if one is missing, unknown or of another shape.
        """
        parameters = dict(self.named_parameters())
        if parameters.keys() != gradient.keys():
            found = ", ".join(gradient) or "nothing"
            raise InputError("backward", "gradient", found, f"one for each of {', '.join(parameters)}")
        for name, p in parameters.items():
            if np.shape(gradient[name]) != tuple(p.shape):
                found = f"shape {list(np.shape(gradient[name]))}"
                raise InputError("backward", name, found, f"{list(p.shape)}")
        given = [torch.from_numpy(np.array(gradient[name], np.float32)) for name in parameters]
        torch.autograd.backward(list(parameters.values()), given)
