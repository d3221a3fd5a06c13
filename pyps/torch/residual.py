"""The rounding error of each parameter's gradient that is still to be sent: one flat vector for each bucket.

DDP cuts parameters into buckets, and cuts them anew after the first step. A residual belongs to its
parameter: for a bucket of other parameters than before, a new vector is put together from theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from pyps.errors import InputError


class Residuals:
    """fp32 residuals of a model's parameters, zero at first. sizes: elements of each parameter, by name."""

    def __init__(self, named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        parameters = dict(named)
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self.sizes = {name: parameter.numel() for name, parameter in parameters.items()}
        self._flat: dict[tuple[str, ...], torch.Tensor] = {}
        self._views: dict[str, torch.Tensor] = {}

    @property
    def buckets(self) -> list[tuple[str, ...]]:
        """The parameters of each bucket in use, by name."""
        return list(self._flat)

    def names_of(self, parameters: Sequence[torch.Tensor]) -> tuple[str, ...]:
        return tuple(self._names[id(parameter)] for parameter in parameters)

    def of(self, names: tuple[str, ...], buffer: torch.Tensor) -> torch.Tensor:
        """The residual of a bucket, float32 [its elements], on its device; written to in place."""
        flat = self._flat.get(names)
        if flat is not None and flat.device == buffer.device:
            return flat
        flat = torch.zeros(buffer.numel(), dtype=torch.float32, device=buffer.device)
        offset = 0
        for name in names:
            view = flat[offset : offset + self.sizes[name]]
            if (old := self._views.get(name)) is not None:
                view.copy_(old)
            self._views[name] = view
            offset += self.sizes[name]
        self._flat = {key: kept for key, kept in self._flat.items() if not set(key) & set(names)}
        self._flat[names] = flat
        return flat

    def state_dict(self) -> dict[str, torch.Tensor]:
        """A copy by parameter name, float32 [numel]; only of those that were reduced at least once."""
        return {name: view.clone() for name, view in self._views.items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take a copy of a state; parameters that it does not name get zero.

        Raises InputError for a wrong size.
        """
        for name, values in state.items():
            if self.sizes.get(name) != values.numel():
                expected = f"{self.sizes.get(name)} values"
                raise InputError("hook state", f"residuals[{name!r}]", f"{values.numel()} values", expected)
        self._flat, self._views = {}, {name: values.clone() for name, values in state.items()}
