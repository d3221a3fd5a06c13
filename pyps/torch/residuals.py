"""Rounding errors of int8 and int4, which are sent later: by parameter, whatever DDP's buckets are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch.futures import Future

from pyps.errors import InputError


class Residuals:
    """Rounding errors of gradients that are still to be sent: fp32, one flat vector a bucket, zero at first.

    DDP cuts parameters into other buckets after the first step. A residual belongs to its parameter: a new
    bucket's vector is put together from theirs. sizes: elements of each parameter, by name.
    """

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


Names = tuple[str, ...]
Exchange = Callable[[Names, torch.Tensor], None]  # sums a bucket of these parameters over the ranks, in place


class Regrouped:
    """The first step of a run that goes on, reduced in the buckets of the process before.

    DDP cuts other buckets in its first step than later, and int8 and int4 scale blocks of a bucket: the step
    would be rounded otherwise than in a run that did not stop. So its buckets are collected first.

    layout: the parameters of each bucket before, by name. sizes: elements of each parameter. exchange: what
    is done with each bucket.
    """

    def __init__(self, layout: Sequence[Names], sizes: Mapping[str, int], exchange: Exchange) -> None:
        self._layout, self._sizes, self._exchange = list(layout), sizes, exchange
        self._waiting: list[tuple[Names, torch.Tensor, Future[torch.Tensor]]] = []

    def add(self, names: Names, buffer: torch.Tensor, done: Future[torch.Tensor]) -> None:
        """A bucket that is there; `done` gets its sum in flush()."""
        self._waiting.append((names, buffer, done))

    def flush(self) -> None:
        """Reduce the remaining buckets in last step's order; if their parameters changed, as they arrived."""
        parts: dict[str, torch.Tensor] = {}
        for names, buffer, _ in self._waiting:
            parts |= self._parts(names, buffer)
        if sorted(parts) == sorted(name for names in self._layout for name in names):
            for names in self._layout:
                whole = torch.cat([parts[name] for name in names])
                self._exchange(names, whole)
                for name, total in self._parts(names, whole).items():
                    parts[name].copy_(total)
        else:
            for names, buffer, _ in self._waiting:
                self._exchange(names, buffer)
        for _, buffer, done in self._waiting:
            done.set_result(buffer)
        self._waiting.clear()

    def _parts(self, names: Names, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of a bucket, by parameter."""
        sizes = [self._sizes[name] for name in names]
        return dict(zip(names, torch.split(whole, sizes), strict=True))
