"""The weights of a checkpoint as one file that any library reads (safetensors)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from pyps.checkpoint.folder import MANIFEST, find_checkpoint, read_folder
from pyps.checkpoint.tensors import write_whole
from pyps.errors import InputError


def write_weights(source: str | os.PathLike[str], out: str | os.PathLike[str]) -> tuple[Path, int]:
    """Write a model's tensors by name: the checkpoint that they are of, and how many there are.

    source: a checkpoint, or a folder of which the newest is taken; of pyps.checkpoint.state or of
    pyps.torch.save. Raises InputError for a damaged file, and where `out` cannot be written.
    """
    path = find_checkpoint(Path(source))
    checkpoint, files = read_folder(path)
    tensors = {name: values for file in files.values() for name, values in file.items()}
    try:
        names = _model_names(checkpoint.state)
        weights = {name: tensors[stored].reshape(shape) for name, (stored, shape) in names.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(str(path / MANIFEST), "state", f"no {error}", "a model's tensors") from None
    written: dict[str, NDArray[Any]] = weights
    write_whole(Path(out), written, {"pyps.version": str(checkpoint.version)})
    return path, len(weights)


def _model_names(state: dict[str, Any]) -> dict[str, tuple[str, list[int]]]:
    """By name in the model: the name on file, and the shape. Checkpoints of DDP keep more than the model."""
    if "common" in state:
        return {name: (t["name"], t["shape"]) for name, t in state["common"]["model"].items()}
    return {tensor["name"]: (tensor["name"], tensor["shape"]) for tensor in state["tensors"]}
