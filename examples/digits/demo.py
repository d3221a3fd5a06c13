"""All of pyps on one machine: profile four unequal devices, plan, and train on them in three ways.

The devices are emulated: each lasts as long as its own profile says, on a CPU thread that is faster. What
they compute, the store, and the accuracies are real. Everything is written to demo-out/. Exits 1 if samples
or accuracy are not as promised. On a busy machine times may miss what is expected: then it says how busy.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import data
import numpy as np
import picture
import psutil
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from pyps.formats import Plan, read_plan, write_json
from pyps.formats.events import read_events
from pyps.formats.records import StepRecord, read_run
from pyps.formats.setup import read_setup
from pyps.profiler import profile_model
from pyps.report.report import Report, read_report
from pyps.report.steps import version_times
from pyps.report.trace import make_trace
from pyps.tasks.builtin import digits_cnn

HERE = Path(__file__).resolve().parent
OUT = Path("demo-out")
DEVICES = {"fast": 1.0, "good": 1.4, "fair": 2.0, "slow": 2.9}  # time of a step, relative to the first
LEAST_SLOWDOWN = 2.5  # of the first device; four of them must fit on two cores
STEP_SECONDS = 0.100  # of the planned iteration: so long that the emulation, not the cores, sets the pace
GLOBAL_BATCH = 256
PROFILED = {
    "fast": "16,32,64,96,144",
    "good": "16,32,64,96,112",
    "fair": "8,16,32,48,64,80",
    "slow": "8,16,24,32,64",
}
REPEATS = 5  # of each size, and more while its median is uncertain
ITERATIONS = 140
SEED = 1
WINDOW_ITERATIONS = 4.2  # of the equal split: what the picture shows of each run
TARGET = 0.95
LEAST_SPEEDUP, MOST_ERROR, MOST_IMAGES = 1.7, 0.10, 3


@dataclass(frozen=True)
class Way:
    """One way to train: what it is called, its options of `pyps run`, and how many versions make an
    iteration.
    """

    key: str
    title: str
    options: tuple[str, ...]
    versions: int


WAYS = (
    Way("even", "BSP, equal", ("--policy", "bsp", "--even"), 1),
    Way("boa", "BSP, planned", ("--policy", "bsp"), 1),
    Way("asp", "ASP, planned", ("--policy", "asp"), len(DEVICES)),
)


@dataclass(frozen=True)
class Accuracy:
    """Held-out accuracy of one version: its training time since the first step began, and images right."""

    seconds: float
    samples: int
    right: int


@dataclass(frozen=True)
class Result:
    """One way's run: its report, its step records, and the accuracy of its snapshots; the last is final."""

    way: Way
    report: Report
    records: list[StepRecord]
    curve: list[Accuracy]

    def seconds_to_target(self) -> float | None:
        return next((a.seconds for a in self.curve if a.right >= TARGET * data.HELD_OUT), None)


@dataclass(frozen=True)
class Check:
    """Hold what was measured, and what was expected. timed: other programs on this machine can change it."""

    what: str
    found: float
    expected: str
    passed: bool
    timed: bool = True


class Load:
    """How many cores programs other than the demo's have used since this was made."""

    def __init__(self) -> None:
        self.began, self.busy, self.own = time.monotonic(), self._busy(), self._own()

    def others(self) -> float:
        seconds = time.monotonic() - self.began
        return max(0.0, self._busy() - self.busy - (self._own() - self.own)) / seconds

    def _busy(self) -> float:
        times = psutil.cpu_times()
        return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice

    def _own(self) -> float:
        times = os.times()
        return times.user + times.system + times.children_user + times.children_system


def main() -> int:
    torch.set_num_threads(1)
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    base = base_slowdown()
    print(f"four emulated devices: {', '.join(f'{n} {base * f:.1f}x' for n, f in DEVICES.items())} slower")
    profile_devices(base)
    pyps("pyps-plan", OUT / "cluster.toml", "-o", OUT / "plan.json")
    plan = read_plan(OUT / "plan.json")
    load = Load()
    results = [train(way) for way in WAYS]
    others, checks = load.others(), check(results)
    result = Console(highlight=False, record=True, width=None if sys.stdout.isatty() else 110)
    result.print(table(results))
    for item in checks:
        mark = "ok    " if item.passed else "missed" if item.timed else "WRONG "
        result.print(f"{mark} {item.what}: {item.found:.3g} (expected: {item.expected})")
    if not all(item.passed for item in checks if item.timed):
        result.print(f"Other programs used {others:.1f} of this machine's {os.cpu_count()} cores meanwhile.")
    (OUT / "report.txt").write_text(result.export_text())
    write(plan, results, checks)
    print(f"wrote plan.json, report.json, report.png and trace.json in {OUT}/")
    return 0 if all(item.passed or item.timed for item in checks) else 1


def base_slowdown() -> float:
    """How much slower the first device is than this machine, so that the planned iteration lasts
    STEP_SECONDS.
    """
    point = profile_model("digits_cnn", batches=[8, 64], repeats=5, threads=1).points[1]
    even_seconds = float(np.median(point.seconds)) * GLOBAL_BATCH / len(DEVICES) / point.batch
    mean_speed = sum(1 / f for f in DEVICES.values()) / len(DEVICES)
    return max(LEAST_SLOWDOWN, round(STEP_SECONDS / (even_seconds / mean_speed), 1))


def profile_devices(base: float) -> None:
    """A profile of each emulated device, measured, and the cluster file that names them.

    Measured together, as they will train together: what else the machine does meets all of them alike. Each
    at the sizes that equal batches and a good split may give it: the slow one needs no batch of 144.
    """
    lines = [f"[job]\nglobal_batch = {GLOBAL_BATCH}\n"]
    measuring = {}
    for name, factor in DEVICES.items():
        options = (
            "--batches",
            PROFILED[name],
            "--repeats",
            REPEATS,
            "--seconds",
            300,  # on a busy machine, too, no size may be left out: equal batches need 64
            "--threads",
            "1",
            "--throttle",
            f"{base * factor:.2f}",
        )
        command = show("pyps-profile", "digits_cnn", *options, "-o", OUT / f"{name}.json")
        measuring[name] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        lines.append(f'[[worker]]\nname = "{name}"\nprofile = "{name}.json"\n')
    print("measuring the four together, half a minute", flush=True)
    for name, process in measuring.items():
        output, errors = process.communicate()
        if process.returncode:
            sys.exit(errors)
        for line in errors.splitlines():
            if "too busy" in line:
                print(f"{name}: {line}")
        print(f"{name}:", next(line for line in output.splitlines() if line.startswith("T(b)")))
    (OUT / "cluster.toml").write_text("\n".join(lines))


def train(way: Way) -> Result:
    """One run through the store by four processes, then the accuracy of its checkpoints."""
    folder = OUT / way.key
    options = ["--plan", OUT / "plan.json", "--throttle-from", OUT / "cluster.toml", *way.options]
    options += ["--samples", ITERATIONS * GLOBAL_BATCH, "--seed", SEED]
    options += ["--run-dir", folder, "--checkpoint-every", 3 * way.versions, "--keep-checkpoints", 9999]
    pyps("pyps", "run", *options, HERE / "train.py")
    records = read_run(folder)
    return Result(way, read_report(folder / "report.json"), records, accuracies(folder, records))


def accuracies(folder: Path, records: list[StepRecord]) -> list[Accuracy]:
    """Every checkpoint's: when its version was done, of how many samples it is."""
    began = min(begin for r in records for kind, begin, _ in r.spans if kind == "compute")
    done: dict[int, tuple[float, int]] = {}
    latest, total = began, 0
    for version, (seconds, samples) in sorted(version_times(records).items()):
        latest, total = max(latest, seconds), total + samples
        done[version] = (latest - began, total)
    _, (images, labels) = data.load()
    model = digits_cnn().model
    curve: dict[int, Accuracy] = {}
    for path in sorted((folder / "checkpoints").glob("0*")):
        arrays = load_file(path / "model.safetensors")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(arrays[name])
            right = int((model(images).argmax(1) == labels).sum())
        version = int(path.name)
        curve[version] = Accuracy(*done[version], right)
    return [curve[version] for version in sorted(curve)]


def check(results: list[Result]) -> list[Check]:
    """Return what the demo promises."""
    even, boa, _ = results
    speedup = even.report.iteration_seconds.median / boa.report.iteration_seconds.median
    error = abs((boa.report.measured_over_predicted or math.inf) - 1.0)
    images = abs(even.curve[-1].right - boa.curve[-1].right)
    same_samples = {r.curve[-1].samples for r in results} == {ITERATIONS * GLOBAL_BATCH}
    speedup_what = "equal batches' iteration time over the planned ones'"
    error_what = "planned batches' iteration time, off the plan's prediction by"
    images_what = f"images of {data.HELD_OUT} between equal and planned batches"
    return [
        Check(speedup_what, speedup, f">= {LEAST_SPEEDUP}", speedup >= LEAST_SPEEDUP),
        Check(error_what, error, f"<= {MOST_ERROR}", error <= MOST_ERROR),
        Check(images_what, images, f"<= {MOST_IMAGES}", images <= MOST_IMAGES and same_samples, timed=False),
    ]


def table(results: list[Result]) -> Table:
    """The three ways, a row each."""
    samples = ITERATIONS * GLOBAL_BATCH
    view = Table(title=f"{samples} samples of scikit-learn's digits; iteration = {GLOBAL_BATCH} samples")
    view.add_column("way", no_wrap=True)
    times_columns = ("iteration", "quartiles", "predicted", "ratio", f"to {TARGET:.0%}")
    for heading in ("batches", *times_columns, "accuracy", "idle"):
        view.add_column(heading, justify="right")
    for result in results:
        report, final, target = result.report, result.curve[-1], result.seconds_to_target()
        times = report.iteration_seconds
        view.add_row(
            result.way.title,
            " ".join(str(rank.batch) for rank in report.ranks),
            f"{times.median * 1e3:.1f} ms",
            f"{times.lower_quartile * 1e3:.1f}-{times.upper_quartile * 1e3:.1f}",
            f"{(report.predicted_iteration_seconds or 0) * 1e3:.1f} ms",
            f"{report.measured_over_predicted or math.nan:.3f}",
            "never" if target is None else f"{target:.1f} s",
            f"{final.right / data.HELD_OUT:.1%} ({final.right})",
            f"{report.idle_share:.1%}",
        )
    return view


def write(plan: Plan, results: list[Result], checks: list[Check]) -> None:
    """report.json, report.png and trace.json of all three runs; plan.json is there already."""
    runs = [
        {
            "way": r.way.title,
            "report": r.report,
            "seconds_to_target": r.seconds_to_target(),
            "accuracy": [asdict(a) for a in r.curve],
        }
        for r in results
    ]
    whole = {
        "schema": "pyps.demo/1",
        "devices": DEVICES,
        "speedup_predicted": plan.speedup_over_even,
        "checks": [asdict(item) for item in checks],
        "held_out_images": data.HELD_OUT,
        "runs": runs,
    }
    write_json(OUT / "report.json", whole)
    rows = []
    for k, r in enumerate(results, start=1):
        events = read_events(OUT / r.way.key / "run.jsonl")
        ranks = read_setup(OUT / r.way.key).ranks
        rows += make_trace(ranks, r.records, events, process=k, title=r.way.title)["traceEvents"]
    (OUT / "trace.json").write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": rows}))
    panels = [
        picture.Panel(
            f"{r.way.title}: {r.report.iteration_seconds.median * 1e3:.0f} ms an iteration",
            r.records,
            [rank.name for rank in r.report.ranks],
            [(a.seconds, 100.0 * a.right / data.HELD_OUT) for a in r.curve],
        )
        for r in results
    ]
    window = WINDOW_ITERATIONS * results[0].report.iteration_seconds.median
    picture.draw(OUT / "report.png", panels, window, 100.0 * TARGET)


def show(program: str, *arguments: object) -> list[str]:
    """Print a command of pyps as a user would type it; the command to run."""
    words = [str(argument) for argument in arguments]
    print("$", program, *words, flush=True)
    return [str(Path(sys.executable).parent / program), *words]


def pyps(program: str, *arguments: object) -> None:
    """Run a command and show its output; exit with its code if it fails."""
    done = subprocess.run(show(program, *arguments))
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    sys.exit(main())
