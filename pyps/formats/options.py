"""The options of a run, each declared once: its type, its limits, its unit and its help.

An option is a type: `DepthOption`. What may set it has a field or an argument `depth` of this type:

    RunTable        (pyps.formats.mode)   [run] of a cluster file, and the options of `pyps-plan`
    RunOptions      (pyps.run.options)    the options of `pyps run`, and of Trainer of pyps.ray
    SimulateOptions (pyps.cli.simulate)   the options of `pyps simulate`
    join            (pyps.worker.step.loop)    arguments

Defaults stand there. None: as the plan says. The command lines (pyps.cli.options), the checks of limits and
the reference page are made of these declarations. `VARIABLES` has what a user may set in the environment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

from msgspec import Meta

from pyps.errors import InputError
from pyps.formats import kinds
from pyps.formats.kinds import Name

AUTO: Final = "auto"
MAX_DEPTH: Final = 8  # steps of one worker that may be under way at once: its most staging buffers
MAX_LOCAL_STEPS: Final = 100_000
MAX_ACCUMULATION: Final = 1_000_000
MAX_SEED: Final = 2**64 - 1
MAX_COUNT: Final = 2**63 - 1
MAX_SECONDS: Final = 1e12

VARIABLES: Final = {
    "PYPS_KEYS": "File of this client's keys for stores on other hosts.",
    "PYPS_SHM_DIR": "Folder of the stores' segments, on a tmpfs; default: /dev/shm.",
    "PYPS_ISA": "Instruction set of the kernels: scalar, avx2, avx512 or neon; default: the best.",
    "PYPS_HUGE_PAGES": "1: the memory of a store comes as huge pages.",
    "PYPS_NUMA": "interleave: a new store's parameters are spread over the nodes of the memory.",
}


def option(said: str, *, unit: str = "", text: str = "", **limits: float) -> Meta:
    """Return what is said of an option, in a sentence. unit: of its number. text: how it is written, where
    its type does not say so. limits: ge, le.
    """
    return Meta(description=said, extra={"unit": unit, "text": text}, **limits)  # type: ignore[call-overload,no-any-return]


CodecName = Literal["f32", "bf16", "f16", "int8", "int4", "nf4"]

PolicyOption = Annotated[
    Name, option("Synchronization policy, with parameters after a colon as in ssp:bound=4.")
]
CodecOption = Annotated[
    CodecName | Literal["plan"],
    option(
        f"How gradients are encoded: {', '.join(get_args(CodecName))}; plan: the planner's choice, both ways."
    ),
]
PullCodecOption = Annotated[
    CodecName | Literal["plan"],
    option(f"How parameters are encoded: {', '.join(get_args(CodecName))}; plan: the planner's choice."),
]
DepthOption = Annotated[
    kinds.Batch | Literal["auto"],
    option(
        f"Steps of a worker under way at once, so that transfers overlap with compute, up to {MAX_DEPTH}; "
        "auto: as many as hide the transfers; 1: no pipeline.",
        unit="steps",
        text="N|auto",
    ),
]
RoundTimeoutOption = Annotated[
    float,
    option("Seconds that one worker may delay the others.", unit="seconds", ge=0.001, le=MAX_SECONDS),
]
AccumulationOption = Annotated[
    int,
    option("Most micro-batches in which a worker computes its batch.", ge=1, le=MAX_ACCUMULATION),
]
LocalStepsOption = Annotated[
    int,
    option(
        "Steps of a worker's own optimizer between two pushes, on average.",
        unit="steps",
        text="H",
        ge=1,
        le=MAX_LOCAL_STEPS,
    ),
]
LocalBatchOption = Annotated[
    kinds.Batch | Literal["auto"],
    option(
        "Samples of a local step; auto: the fewest at which the workers are hardly slower. "
        "Default: each one's even share of a global batch.",
        unit="samples",
        text="N|auto",
    ),
]
AverageMomentsOption = Annotated[
    int,
    option(
        "Moments of workers' own optimizers that are averaged with the parameters: Muon 1, Adam 2.",
        text="COUNT",
        ge=0,
        le=2,
    ),
]
MicroBatchOption = Annotated[
    int,
    option(
        "Most samples to compute at once; in between, saps:abort=true ends late steps.",
        unit="samples",
        ge=1,
        le=MAX_COUNT,
    ),
]
SamplesOption = Annotated[
    int, option("Samples to train; 0: until the script ends.", unit="samples", ge=0, le=MAX_COUNT)
]
DatasetSizeOption = Annotated[
    int, option("Samples in one epoch, with --epochs; 0: not known.", unit="samples", ge=0, le=MAX_COUNT)
]
SeedOption = Annotated[int, option("Seed of the order of samples.", ge=0, le=MAX_SEED)]
AllowNonfiniteOption = Annotated[bool, option("Go on when the loss is not finite.")]
RunDirOption = Annotated[Path, option("Folder of the run, by default pyps-runs/<time>-<pid>.")]
JournalOption = Annotated[bool, option("Record each decision, to replay it.")]
ThrottleFromOption = Annotated[
    str,
    option(
        "Emulate devices: by the plan's factors, or by the cost models of a cluster file.",
        text="plan|CLUSTER",
    ),
]
EvenOption = Annotated[bool, option("Equal batches instead of the plan's.")]
MaxRestartsOption = Annotated[int, option("Restarts allowed per rank.", ge=0, le=MAX_COUNT)]
GraceOption = Annotated[
    float,
    option(
        "Seconds in which workers finish their steps after a signal; then the last checkpoint is written.",
        unit="seconds",
        ge=0.0,
        le=MAX_SECONDS,
    ),
]
CheckpointEveryOption = Annotated[
    int | str,
    option("Versions (500) or time (30s, 5m, 2h) between checkpoints; 0: only at the end.", text="N|TIME"),
]
KeepCheckpointsOption = Annotated[int, option("Checkpoints to keep; 0: write none.", ge=0, le=MAX_COUNT)]
ResumeOption = Annotated[
    Path,
    option(
        "Go on from a run's newest checkpoint in its folder, or begin a new run with one checkpoint.",
        text="RUN|CHECKPOINT",
    ),
]
ConnectOption = Annotated[
    str, option("Address of a store served by `pyps serve`: tcp://host:port/name.", text="ADDRESS")
]
RanksOption = Annotated[
    Sequence[int],
    option("Start only these ranks here; ones that the plan does not have join its run.", text="R,R..."),
]
ProfileOption = Annotated[
    Path, option("Profile of a rank that the plan does not have; without one it is measured.")
]
RebalanceOption = Annotated[
    bool,
    option(
        "Move samples between workers that become slower or faster, on all hosts. In a pipeline with --codec "
        "plan, bits and depth follow each worker's link and device, too."
    ),
]
MetricsOption = Annotated[
    Sequence[str], option("Send figures while it trains; may be repeated.", text="SINK")
]
ArgsOption = Annotated[Sequence[str], option("The script's arguments.")]


def declared(holder: Any) -> Iterator[tuple[str, Any, Meta]]:
    """The options that a class or a function takes, in order: the name, the type, and what is said of it."""
    for name, hint in get_type_hints(holder, include_extras=True).items():
        for part in (hint, *get_args(hint)):
            if get_origin(part) is Annotated and isinstance(meta := get_args(part)[-1], Meta):
                yield name, get_args(part)[0], meta
                break


def check_limits(holder: Any, values: Mapping[str, Any], prefix: str = "") -> None:
    """Raise InputError, naming the option, if a number is outside its limits.

    holder: whose options they are. values: by name. prefix: "--" names them as on a command line.
    """
    for name, _, meta in declared(holder):
        value = values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if (meta.ge is not None and value < meta.ge) or (meta.le is not None and value > meta.le):
            where = prefix + name.replace("_", "-") if prefix else name
            raise InputError(where, "", str(value), f"{meta.ge} to {meta.le}")


def as_depth(value: Any, where: str = "depth") -> int | Literal["auto"] | None:
    """Return a depth that is given as a number or text, if any. Raises InputError, naming `where`."""
    if value is None or value == AUTO:
        return value  # type: ignore[no-any-return]
    if re.fullmatch(r"\d{1,3}", text := str(value)) and 1 <= int(text) <= MAX_DEPTH:
        return int(text)
    raise InputError(where, "", text, f"1 to {MAX_DEPTH}, or {AUTO}")
