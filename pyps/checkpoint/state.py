"""A store's state as a checkpoint, and back.

    path = save(store.state(), "checkpoints")
    saved = load("checkpoints")

model.safetensors has the parameters in fp32 by tensor name, buffers.safetensors averaged tensors,
optimizer.safetensors the optimizer's vectors as <tensor>.<vector>, residuals.safetensors what pushes have not
carried yet as <rank>.<tensor>. local-<rank>.safetensors is the state of a worker's own optimizer, where it
takes local steps. The rest is in checkpoint.json.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pyps.checkpoint.folder import KEEP, MANIFEST, MODEL, find_checkpoint, read_folder, write_folder
from pyps.checkpoint.tensors import Tensors
from pyps.errors import InputError
from pyps.formats import Plan
from pyps.formats.checkpoint import Checkpoint, TensorFile
from pyps.formats.files import learnt
from pyps.native.state import VECTORS, StateHeader, StoreState

BUFFERS, OPTIMIZER, RESIDUALS = "buffers.safetensors", "optimizer.safetensors", "residuals.safetensors"


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was read: its folder, checkpoint.json, and the state."""

    path: Path
    checkpoint: Checkpoint
    state: StoreState


def save(
    state: StoreState,
    folder: str | os.PathLike[str],
    *,
    keep: int = KEEP,
    policy: str | None = None,
    seed: int | None = None,
    plan: Plan | None = None,
    local: Mapping[str, IO[bytes]] | None = None,
) -> Path:
    """Write a checkpoint of Store.state() and remove all but the last `keep`; its folder, durable.

    state: of one version. folder: of the checkpoints, made if missing. policy, seed, plan: of the run, for
    those that go on from it. local: files of workers' own optimizers, by name. Raises InputError, naming the
    file, if it cannot be written, and the tensor, if a parameter is not finite; older checkpoints are then
    unchanged.
    """
    for name, values in state.parameters.items():
        if values.size and not np.isfinite([values.min(), values.max()]).all():
            raise InputError(str(folder), name, "values that are not finite", "finite ones")
    averaged = {tensor.name for tensor in state.header.tensors if tensor.averaged}
    files: dict[str, Tensors] = {
        MODEL: {name: values for name, values in state.parameters.items() if name not in averaged},
        BUFFERS: {name: values for name, values in state.parameters.items() if name in averaged},
        OPTIMIZER: _joined(state.vectors, "{inner}.{outer}"),
        RESIDUALS: _joined(state.residuals, "{outer}.{inner}"),
    }

    def describe(written: dict[str, TensorFile]) -> Checkpoint:
        return Checkpoint(
            made_with=metadata.version("pyps-train"),
            unix_seconds=time.time(),
            version=state.header.version,
            policy=policy,
            seed=seed,
            plan=plan,
            state=msgspec.to_builtins(state.header),
            files=written,
        )

    kept = {name: tensors for name, tensors in files.items() if tensors}
    return write_folder(Path(folder), state.header.version, kept, describe, keep, local)


def load(path: str | os.PathLike[str]) -> Saved:
    """A checkpoint, or the newest one in a run's folder or a folder of checkpoints, every file verified.

    Raises InputError, naming what is missing or damaged, and the checkpoint before it.
    """
    folder = find_checkpoint(Path(path))
    checkpoint, files = read_folder(folder)
    manifest = str(folder / MANIFEST)
    try:
        header = msgspec.convert(checkpoint.state, learnt(StateHeader))
    except (msgspec.ValidationError, InputError) as error:
        raise InputError(manifest, "state", str(error), "that of a store") from None
    trained = [tensor for tensor in header.tensors if not tensor.averaged]
    known = files.get(MODEL, {}) | files.get(BUFFERS, {})
    parameters = {t.name: _tensor(folder, known, t.name, t.shape) for t in header.tensors}
    vectors = {
        vector: {
            t.name: _tensor(folder, files.get(OPTIMIZER, {}), f"{t.name}.{vector}", t.shape) for t in trained
        }
        for vector in VECTORS[header.optimizer]
    }
    left = files.get(RESIDUALS, {})
    ranks = sorted({int(rank) for name in left if (rank := name.partition(".")[0]).isdecimal()})
    residuals = {
        rank: {t.name: _tensor(folder, left, f"{rank}.{t.name}", t.shape) for t in trained} for rank in ranks
    }
    return Saved(folder, checkpoint, StoreState(header, parameters, vectors, residuals))


def _joined(nested: Any, pattern: str) -> dict[str, NDArray[Any]]:
    """{outer: {inner: values}} with one name for each of the values."""
    return {
        pattern.format(outer=outer, inner=inner): values
        for outer, inners in nested.items()
        for inner, values in inners.items()
    }


def _tensor(folder: Path, tensors: Tensors, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    values = tensors.get(name)
    if values is None or values.shape != shape or values.dtype != np.float32:
        found = "nothing" if values is None else f"{values.dtype} {list(values.shape)}"
        raise InputError(str(folder), name, found, f"float32 {list(shape)}, as checkpoint.json says")
    return values
