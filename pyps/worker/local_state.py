"""Keeps the state of a worker's own optimizer, such as Adam's moments, for the rank's next process.

Where the run has a folder, each push has its file there (pyps.checkpoint.local_states); elsewhere nothing is
kept. A file appears whole or not at all. It is not synced: what a crash of the machine takes, the last
checkpoint has.
"""

from __future__ import annotations

import os
import time
import warnings
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from pyps.checkpoint.folder import find_checkpoint
from pyps.checkpoint.local_states import FOLDER, checkpoint_file, state_file, states_of
from pyps.errors import InputError
from pyps.worker.packing import pack, unpack
from pyps.worker.settings import Settings

KEEP_SECONDS = 2.0  # a checkpoint takes the file of its version at once, but not before it has the version
KEEP_FILES = 2
STATE = "state"


class LocalState:
    """The files of one rank. load() comes first, then save() before each push.

    settings: of the run. optimizer: the worker's own, of which all but the options of its groups is kept.
    """

    def __init__(self, settings: Settings, optimizer: torch.optim.Optimizer) -> None:
        self._settings, self._optimizer = settings, optimizer
        self._written: deque[tuple[float, Path]] = deque()
        self._failed = False

    def load(self, pushes: int) -> None:
        """Go on from the state after so many pushes of this rank, in the run's folder or in the checkpoint
        that the run was resumed from; warns if there is none. Raises InputError for another optimizer's.
        """
        run_dir, rank = self._settings.run_dir, self._settings.rank
        found: dict[int, Path] = {}
        if run_dir is not None:
            found = states_of(run_dir, rank)
            for left in (run_dir / FOLDER).glob(f".rank-{rank}-*.tmp"):  # by a process that was killed
                left.unlink(missing_ok=True)
        self._written.extend((0.0, path) for number, path in sorted(found.items()) if number != pushes)
        if pushes == 0:
            return
        path = found.get(pushes) or self._in_checkpoint()
        if path is None:
            where = f"rank {rank}, after {pushes} pushes"
            warnings.warn(f"{where}: its optimizer begins anew: no file of its state", stacklevel=4)
            return
        self._put(path)

    def _in_checkpoint(self) -> Path | None:
        if self._settings.resume is None:
            return None
        path = find_checkpoint(self._settings.resume) / checkpoint_file(self._settings.rank)
        return path if path.exists() else None

    def _put(self, path: Path) -> None:
        try:
            with safe_open(path, "pt") as file:
                packed = msgspec.json.decode((file.metadata() or {})[STATE])
                state = unpack(packed, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        except (OSError, SafetensorError, KeyError, msgspec.DecodeError) as error:
            raise InputError(str(path), "", str(error).lower(), "the state of an optimizer") from None
        kind = type(self._optimizer).__name__
        if state["kind"] != kind:
            raise InputError(str(path), "kind", state["kind"], f"{kind}, as the script's optimizer")
        now: dict[str, Any] = self._optimizer.state_dict()
        self._optimizer.load_state_dict({**now, "state": state["state"]})

    def save(self, pushes: int) -> None:
        """Write the state for the push that will be the rank's so many-th; warns once if that fails."""
        run_dir = self._settings.run_dir
        if run_dir is None:
            return
        path = state_file(run_dir, self._settings.rank, pushes)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        tensors: dict[str, torch.Tensor] = {}
        kept = {"kind": type(self._optimizer).__name__, "state": self._optimizer.state_dict()["state"]}
        packed = pack(kept, "s", tensors)
        whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        try:
            path.parent.mkdir(exist_ok=True)
            save_file(whole, temporary, {STATE: msgspec.json.encode(packed).decode()})
            os.replace(temporary, path)
        except (OSError, SafetensorError) as error:
            temporary.unlink(missing_ok=True)
            if not self._failed:
                self._failed = True
                warnings.warn(f"{path}: the optimizer's state is not kept: {error}", stacklevel=4)
            return
        self._written.append((time.monotonic(), path))
        self._remove_old(path)

    def _remove_old(self, newest: Path) -> None:
        """All but the newest files, as soon as they are old enough."""
        least = KEEP_FILES + self._settings.depth
        while len(self._written) > least and self._written[0][0] < time.monotonic() - KEEP_SECONDS:
            _, path = self._written.popleft()
            if path != newest and all(path != other for _, other in self._written):
                path.unlink(missing_ok=True)
