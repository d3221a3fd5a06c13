"""Files with the states of workers' own optimizers, for local steps, in the folder of a run.

A worker writes its state before each push, under the number that the push will have among the rank's admitted
ones. So the file whose number is the store's count of a rank's pushes is the state to go on with, in a new
process of the rank as in a checkpoint. A worker that encodes its pushes for a link also writes what the codes
of each do not carry.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TypeVar

FOLDER = "local"  # in a run's folder
MOMENT = "workers' optimizers: "  # so begin names of what is no part of the model
AnyTensor = TypeVar("AnyTensor")
NAME = re.compile(r"rank-(\d+)-(\d+)\.safetensors")


def state_file(run_dir: Path, rank: int, pushes: int) -> Path:
    """The file of a rank's state after `pushes` admitted pushes."""
    return run_dir / FOLDER / f"rank-{rank}-{pushes:09d}.safetensors"


def checkpoint_file(rank: int) -> str:
    """The name of a rank's file in a checkpoint."""
    return f"local-{rank}.safetensors"


def residual_file(run_dir: Path, rank: int, pushes: int) -> Path:
    """The file of what the codes of a rank's last push have not carried, after `pushes` admitted ones."""
    return run_dir / FOLDER / f"residual-{rank}-{pushes:09d}.safetensors"


def checkpoint_residual(rank: int) -> str:
    """The name of that file in a checkpoint."""
    return f"local-{rank}-residual.safetensors"


def moment_name(parameter: str, key: str) -> str:
    """In a store: the name of that tensor of the state of workers' own optimizers, averaged over them."""
    return f"{MOMENT}{key} of {parameter}"


def without_moments(tensors: Mapping[str, AnyTensor]) -> dict[str, AnyTensor]:
    """A model's part of a store's tensors, by name."""
    return {name: values for name, values in tensors.items() if not name.startswith(MOMENT)}


def is_local(name: str) -> bool:
    """Return whether a checkpoint's file is a worker's own."""
    return name.startswith("local-")


def open_states(run_dir: Path, pushes: Sequence[int]) -> dict[str, IO[bytes]]:
    """The open file of each rank that has one, by its name in a checkpoint: after `pushes[rank]` pushes, or
    else the newest before. An open file stays what it is, whatever becomes of its name.
    """
    opened: dict[str, IO[bytes]] = {}
    for rank, count in enumerate(pushes):
        with contextlib.suppress(OSError):
            opened[checkpoint_residual(rank)] = residual_file(run_dir, rank, count).open("rb")
        before = [number for number in states_of(run_dir, rank) if number <= count]
        for number in sorted(before, reverse=True):
            with contextlib.suppress(OSError):  # it was the oldest, and its worker is faster
                opened[checkpoint_file(rank)] = state_file(run_dir, rank, number).open("rb")
                break
    return opened


def states_of(run_dir: Path, rank: int) -> dict[int, Path]:
    """All files of a rank, by pushes."""
    found = (NAME.fullmatch(path.name) for path in (run_dir / FOLDER).glob(f"rank-{rank}-*.safetensors"))
    return {int(match[2]): run_dir / FOLDER / match[0] for match in found if match is not None}
