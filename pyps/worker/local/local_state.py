"""Keeps the state of a worker's own optimizers, such as Adam's moments, for the rank's next process.

Where the run has a folder, each push has its file there (pyps.checkpoint.local_states); elsewhere nothing is
kept. The store says which pushes are in its last saved states: their files stay, so a worker on another host
than the checkpoints goes on from any of them. A file appears whole or not at all. It is not synced: what a
crash of the machine takes, the last checkpoint has.

With `average_moments` the store holds the moments as averaged tensors (pyps.worker.device.averages): after a
round each worker has the mean of all workers' moments, weighted by samples. Adam's counts of steps are
averaged with them, for workers take unlike numbers of steps: a moment and the correction of its bias stay of
one age.
"""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from pyps.checkpoint.folder import find_checkpoint, read_manifest
from pyps.checkpoint.local_states import (
    FOLDER,
    checkpoint_file,
    checkpoint_residual,
    moment_name,
    residual_file,
    state_file,
    states_of,
)
from pyps.errors import InputError
from pyps.formats.files import open_plain, temporary_beside
from pyps.native.values import Flat
from pyps.worker.device.attach import Attachment
from pyps.worker.device.averages import Moment
from pyps.worker.local.packing import for_file, from_file
from pyps.worker.run.settings import Settings

STEP = "step"
KEYS: Final[dict[type[torch.optim.Optimizer], tuple[str, ...]]] = {
    torch.optim.SGD: ("momentum_buffer",),
    torch.optim.Adam: (STEP, "exp_avg", "exp_avg_sq"),
    torch.optim.AdamW: (STEP, "exp_avg", "exp_avg_sq"),
}  # all that the optimizer's state of a parameter has
if hasattr(torch.optim, "Muon"):  # torch 2.9 brought it
    KEYS[torch.optim.Muon] = ("momentum_buffer",)
KEEP_FILES = 2  # the newest, and one more for each step under way
KEEP_SAVED = 2  # the checkpoint being written may not become whole
RESIDUAL = "residual"


class LocalState:
    """The files of one rank. load() comes first, then save() before each push.

    settings: of the run. optimizers: the worker's own, of which all but the options of their groups is kept.
    names: of their parameters, by id().
    """

    def __init__(
        self,
        settings: Settings,
        optimizers: Sequence[torch.optim.Optimizer],
        names: Mapping[int, str] | None = None,
    ) -> None:
        self._resume, self._optimizers = settings.resume, optimizers
        self._run_dir, self._rank = settings.run_dir, settings.rank
        self._kind = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        parameters = [p for one in optimizers for group in one.param_groups for p in group["params"]]
        self._parameters = [f"{(names or {}).get(id(p), '')} {list(p.shape)}".lstrip() for p in parameters]
        self._saved: deque[int] = deque(maxlen=KEEP_SAVED)  # pushes in the last saved states, if known
        self._failed = False
        self._newest = KEEP_FILES + settings.depth

    def load(self, pushes: int) -> None:
        """Go on from the state after `pushes` pushes of this rank, in the run's folder or in the checkpoint
        that the run was resumed from; warns if there is none. Raises InputError for another optimizer's,
        or that of other parameters.
        """
        found: dict[int, Path] = {}
        if self._run_dir is not None:
            found = states_of(self._run_dir, self._rank)
            for left in (self._run_dir / FOLDER).glob(f".*-{self._rank}-*.tmp"):  # of a killed process
                left.unlink(missing_ok=True)
        older = (number for number in found if number <= pushes - self._newest)
        self._saved.extend(sorted(older))  # nothing else of so long ago was kept
        if pushes == 0:
            return
        path = found.get(pushes) or self._in_checkpoint(checkpoint_file(self._rank), pushes)
        if path is None:
            self._warn(pushes, "its optimizer begins anew: no file of its state")
            return
        self._put(path)

    def residual(self, pushes: int) -> Flat | None:
        """Give what the codes of this rank's first `pushes` pushes have not carried, from where load() looks;
        warns if there is nothing.
        """
        path = None if self._run_dir is None else residual_file(self._run_dir, self._rank, pushes)
        if path is None or not path.exists():
            path = self._in_checkpoint(checkpoint_residual(self._rank), pushes)
        if pushes == 0 or path is None:
            if pushes:
                self._warn(pushes, "its error feedback begins anew: no file of its residual")
            return None
        open_plain(path).close()
        try:
            with safe_open(path, "np") as file:
                return np.array(file.get_tensor(RESIDUAL), np.float32)
        except (OSError, SafetensorError) as error:
            raise InputError(str(path), "", str(error).lower(), "a residual") from None

    def _warn(self, pushes: int, what: str) -> None:
        warnings.warn(f"rank {self._rank}, after {pushes} pushes: {what}", stacklevel=5)

    def _in_checkpoint(self, name: str, pushes: int) -> Path | None:
        """A file of that checkpoint, if it was written after as many pushes of this rank."""
        if self._resume is None:
            return None
        folder = find_checkpoint(self._resume)
        is_of = (folder / name).exists() and _pushes_in(folder, self._rank) == pushes
        return folder / name if is_of else None

    def _put(self, path: Path) -> None:
        state = from_file(path, "the state of an optimizer")
        known = isinstance(state, dict) and state.keys() == {"kind", "parameters", "state"}
        if not known or state["kind"] != self._kind:
            found = str(state.get("kind")) if isinstance(state, dict) else "something else"
            raise InputError(str(path), "kind", found, f"{self._kind}, as in the script")
        for theirs, mine in zip_longest(state["parameters"], self._parameters):
            if theirs != mine:
                found, expected = (str(one or "no more") for one in (theirs, mine))
                raise InputError(str(path), "parameters", found, f"{expected}, as in the script's optimizer")
        for optimizer, values in zip(self._optimizers, state["state"], strict=True):
            now: dict[str, Any] = optimizer.state_dict()
            optimizer.load_state_dict({**now, "state": {**now["state"], **values}})

    def save(self, pushes: int) -> None:
        """Write the state for the push that will be the rank's number `pushes`; warns once if that fails."""
        if self._run_dir is not None:
            states = [optimizer.state_dict()["state"] for optimizer in self._optimizers]
            kept = {"kind": self._kind, "parameters": self._parameters, "state": states}
            self._write(state_file(self._run_dir, self._rank, pushes), *for_file(kept))

    def save_residual(self, pushes: int, values: Flat) -> None:
        """Write what the codes of that push do not carry; warns as save()."""
        if self._run_dir is not None:
            path = residual_file(self._run_dir, self._rank, pushes)
            self._write(path, {RESIDUAL: torch.from_numpy(values)})

    def _write(
        self, path: Path, tensors: dict[str, torch.Tensor], described: dict[str, str] | None = None
    ) -> None:
        temporary = temporary_beside(path)
        try:
            path.parent.mkdir(exist_ok=True)
            save_file(tensors, temporary, described)
            os.replace(temporary, path)
        except (OSError, SafetensorError) as error:
            for left in (temporary, path):  # that of a push that was undone
                left.unlink(missing_ok=True)
            if not self._failed:
                self._failed = True
                warnings.warn(f"{path}: the worker's state is not kept: {error}", stacklevel=5)

    def move_up(self, first: int, last: int) -> None:
        """The push before number `first` was not admitted: those from there to `last` have one less each."""
        run_dir, rank = self._run_dir, self._rank
        if run_dir is None:
            return
        for number in range(first, last + 1):
            for file in (state_file, residual_file):
                try:
                    os.replace(file(run_dir, rank, number), file(run_dir, rank, number - 1))
                except OSError:  # it was not written, or will be
                    file(run_dir, rank, number - 1).unlink(missing_ok=True)

    def remove_old(self, pushes: int, saved: int) -> None:
        """Remove the files that nothing will ask for.

        pushes: of the rank that were admitted. saved: of these, those in the store's last saved state.
        """
        run_dir, rank = self._run_dir, self._rank
        if run_dir is None:
            return
        if saved not in self._saved:
            self._saved.append(saved)
        for number, path in states_of(run_dir, rank).items():
            if number <= pushes - self._newest and number not in self._saved:
                path.unlink(missing_ok=True)
                residual_file(run_dir, rank, number).unlink(missing_ok=True)


def _pushes_in(folder: Path, rank: int) -> int | None:
    """The pushes of a rank in a checkpoint; None: it does not say."""
    try:
        return int(read_manifest(folder).state["ranks"][rank]["total"]["pushes"])
    except (LookupError, TypeError, ValueError):
        return None


def with_moments(
    attachment: Attachment, optimizers: Sequence[torch.optim.Optimizer], settings: Settings
) -> Attachment:
    """The attachment, with the moments of the optimizers of local steps behind its buffers.

    Raises InputError without local steps, in a pipeline, and for an optimizer whose state is not known.
    """
    if not settings.local_steps or settings.depth > 1:
        where = "in a pipeline" if settings.local_steps else "without local steps"
        raise InputError("attach", "average_moments", f"True {where}", "local steps, one push at a time")
    moments = tuple(_moments(attachment, optimizers))
    if not moments:
        expected = "momentum above 0, or Adam"
        raise InputError("attach", "average_moments", "optimizers without moments", expected)
    return replace(attachment, buffers=(*attachment.buffers, moments))


def _moments(attachment: Attachment, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Moment]:
    names = {id(entry.parameter): entry.name for entry in attachment.entries}
    for optimizer in optimizers:
        kind = type(optimizer)
        for group in optimizer.param_groups:
            if kind not in KEYS or group.get("amsgrad"):
                found = f"{kind.__name__}{' with amsgrad' * (kind in KEYS)}"
                raise InputError("attach", "average_moments", found, "SGD, Adam, AdamW or Muon")
            for p in group["params"]:
                if id(p) in names and group.get("momentum", 1.0) > 0.0:
                    _begin(optimizer, group, p)
                    for key in KEYS[kind]:
                        yield Moment(moment_name(names[id(p)], key), optimizer, p, key)


def _begin(optimizer: torch.optim.Optimizer, group: dict[str, Any], p: nn.Parameter) -> None:
    """Give the optimizer the state that it would begin its first step with."""
    state = optimizer.state[p]
    if state:
        return
    on_device = group.get("capturable") or group.get("fused")
    for key in KEYS[type(optimizer)]:
        if key == STEP:
            state[key] = torch.zeros((), dtype=torch.float32, device=p.device if on_device else None)
        else:
            state[key] = torch.zeros_like(p, memory_format=torch.preserve_format)
