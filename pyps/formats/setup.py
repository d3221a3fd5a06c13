"""Define what a run was started with: run.json (pyps.run/1), written before the first worker starts.

With the step records and the events it is all that a report needs, also while the run trains, or after its
launcher was killed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from pyps.formats.files import read_struct
from pyps.formats.plan import TurnSchedule

SETUP_SCHEMA: Final = "pyps.run/1"
SETUP_FILE = "run.json"
VARIABLE = "PYPS_RUN"  # of a worker's environment: what its launcher says (pyps.worker.run.settings)


class RankSpec(msgspec.Struct, frozen=True):
    """One rank: its planned batch (0: the plan does not have it), and the plan's seconds for a step of it.

    emulated: a throttle sets its pace, not the real device. compute_seconds, link_seconds: of the step's
    compute and of its transfers, by the plan; earlier versions did not write them.
    """

    rank: Annotated[int, Meta(ge=0)]
    name: str
    batch: Annotated[int, Meta(ge=0)]
    predicted_seconds: float | None = None
    emulated: bool = False
    compute_seconds: float | None = None
    link_seconds: float = 0.0


class RunSetup(msgspec.Struct, frozen=True, kw_only=True):
    """A run, or one host's part of it.

    store: name or address. samples: of the whole run; 0: until the script ends. even: equal batches instead
    of the plan's. predicted_iteration_seconds: the plan's, of one global batch. ranks: those started here.
    turns: the planned ones of all ranks, where the policy takes turns.
    plan_digest: of plan.json as it was written.
    cpus: cores that its processes may use; 0: not known.
    folder: where it was started. options: the other options and the script's arguments, to resume with.
    """

    schema: Literal["pyps.run/1"] = SETUP_SCHEMA
    store: str
    host: str
    script: str
    policy: str
    even: bool
    seed: int
    samples: Annotated[int, Meta(ge=0)]
    predicted_iteration_seconds: float | None
    ranks: tuple[RankSpec, ...]
    turns: TurnSchedule | None = None
    plan_digest: str = ""
    cpus: Annotated[int, Meta(ge=0)] = 0
    folder: str = ""
    options: dict[str, Any] = {}

    @property
    def global_batch(self) -> int:
        """The sum of the ranks' planned batches."""
        return sum(rank.batch for rank in self.ranks)


def read_setup(run_dir: str | os.PathLike[str]) -> RunSetup:
    """The setup of the run in a folder. Raises InputError."""
    return read_struct(Path(run_dir) / SETUP_FILE, RunSetup, f"the folder of a run ({SETUP_SCHEMA})")
