"""The options of a run as `pyps run` and Trainer take them, and as run.json keeps them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from pyps.checkpoint.folder import KEEP
from pyps.errors import InputError
from pyps.formats import options
from pyps.formats.mode import FROM_PLAN
from pyps.metrics import check_sink
from pyps.native.values import Codec
from pyps.store.policies import Policy
from pyps.worker.run.mode import ModeOptions

MAX_RESTARTS = 3
GRACE_SECONDS = 8.0  # with the last checkpoint less than the 30 s that schedulers leave between their signals
CHECKPOINT_EVERY = "10m"
SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
EVERY = re.compile(r"(\d{1,18})|(\d{1,9}(?:\.\d{1,9})?)([smh])")
StrPath = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class RunOptions(ModeOptions):
    """How to run a script by a plan; pyps.formats.options says what each option is.

    dataset_size: a script with a data set of another length is refused; 0: any. throttle_from: see
    pyps.run.ranks.throttles. max_restarts: a worker that dies before it joined ends the run.
    checkpoint_every: a signal or a failed worker brings a checkpoint too. connect None: a store on this
    machine. ranks None: all. metrics: see pyps.metrics.SINKS.
    """

    samples: options.SamplesOption
    args: options.ArgsOption = ()
    dataset_size: options.DatasetSizeOption = 0
    seed: options.SeedOption = 0
    journal: options.JournalOption = False
    run_dir: StrPath | options.RunDirOption | None = None
    throttle_from: StrPath | options.ThrottleFromOption | None = None
    even: options.EvenOption = False
    max_restarts: options.MaxRestartsOption = MAX_RESTARTS
    grace: options.GraceOption = GRACE_SECONDS
    checkpoint_every: options.CheckpointEveryOption = CHECKPOINT_EVERY
    keep_checkpoints: options.KeepCheckpointsOption = KEEP
    resume: StrPath | options.ResumeOption | None = None
    connect: options.ConnectOption | None = None
    ranks: options.RanksOption | None = None
    profile: StrPath | options.ProfileOption | None = None
    rebalance: options.RebalanceOption = False
    allow_nonfinite: options.AllowNonfiniteOption = False
    micro_batch: options.MicroBatchOption | None = None
    metrics: options.MetricsOption = ()

    def check(self) -> None:
        """Raise InputError, naming the option, for one that is outside its limits or contradicts another."""
        options.check_limits(RunOptions, vars(self))
        interval_of(self.checkpoint_every, "checkpoint_every")
        for text in self.metrics:
            check_sink(text)
        options.as_depth(self.depth)


def options_to_json(given: RunOptions) -> dict[str, Any]:
    """The options as plain data, for run.json: all but those that name folders of runs."""
    values = {f.name: getattr(given, f.name) for f in fields(given) if f.name not in ("run_dir", "resume")}
    if isinstance(policy := given.policy, Policy):
        values |= {"policy": str(policy), "round_timeout": policy.round_timeout_seconds}
    if isinstance(given.codec, Codec):
        values["codec"] = given.codec.name.lower()
    for name in ("throttle_from", "profile"):
        if values[name] not in (None, FROM_PLAN):
            values[name] = os.path.abspath(values[name])
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def options_from_json(where: str, values: dict[str, Any]) -> RunOptions:
    """The options that `options_to_json` wrote. Raises InputError, naming the file `where`."""
    values = dict(values)
    overlaps = values.pop("pipeline", None)  # of earlier versions, unless they say how deep
    if overlaps is not None and values.get("depth") is None:
        values["depth"] = options.AUTO if overlaps else 1
    if unknown := values.keys() - {f.name for f in fields(RunOptions)}:
        expected = "options of this version of pyps"
        raise InputError(where, f"options.{min(unknown)}", "an unknown option", expected)
    if "samples" not in values:
        raise InputError(where, "options.samples", "nothing", "the samples of the run")
    for name, kind, _ in options.declared(RunOptions):
        if (value := values.get(name)) is not None:
            try:
                msgspec.convert(value, str if kind is Path else kind)
            except msgspec.ValidationError as error:
                raise InputError(where, f"options.{name}", repr(value)[:60], str(error)) from None
    return RunOptions(**values)


@dataclass(frozen=True)
class Interval:
    """A number of versions, or of seconds; neither: never."""

    versions: int = 0
    seconds: float = 0.0


def interval_of(every: int | str, field: str) -> Interval:
    """500 or "500": versions; "30s", "5m", "2h": a time; 0: never. Raises InputError, naming the field."""
    match = EVERY.fullmatch(str(every))
    if match is None:
        raise InputError(field, "", repr(every), "a number of versions (500) or a time (30s, 5m, 2h)")
    return Interval(int(match[1])) if match[1] else Interval(seconds=float(match[2]) * SECONDS[match[3]])
