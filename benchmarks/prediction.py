"""Measure whether profiles predict step times: python benchmarks/prediction.py [--models mlp,cnn]
[--scale 1] [--short] [--save].

For each model, on one CPU thread:

1. A profile of sizes over a factor of 16: its median error at a size that was left out of the fit.
2. Every other size alone is fitted, and the sizes between are predicted: the held-out half.
3. Two devices, emulated by multiplying the step's own CPU time by 2.5 and by 5, profiled and planned. The
   plan is run by two processes through the store, and the median of its iterations compared with the
   prediction.

--short: steps of 3 to 5 ms instead, where the worker's own work and its copies count most: two to four such
devices, planned and run by the plan and with equal batches in turn, three times each. Without
--models of the mlp alone.

The last column is how busy other processes kept the machine meanwhile: with more than a few per cent, the
figures are theirs as well.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from record import machine, others_share, save_table, table

from pyps.formats import Point, read_plan
from pyps.profiler import point_seconds, predict_seconds, profile_model, select_fit
from pyps.report.report import read_report

HERE = Path(__file__).resolve().parent
MODELS = ("mlp", "cnn", "transformer")
LARGEST = {"mlp": 2048, "cnn": 64, "transformer": 64}  # in the part where time grows with the batch
SLOWDOWNS = 2.5, 5.0  # so much that the throttle sets the pace, not the two processes' cores
ITERATIONS = 60
SHORT_MODELS = "mlp"  # a step of the others takes 100 ms and more with these batches
SHORT_SLOWDOWNS = 2.5, 5.0, 3.5, 4.0
SHORT_BATCHES = {2: 64, 3: 96, 4: 128}  # by the number of devices
SHORT_ITERATIONS, SHORT_RUNS = 300, 3
REPEATS = 21  # of each size in the profile that is judged by itself


@dataclass(frozen=True)
class Client:
    """One device of a run: the options that its profile is made with, and its processes' environment."""

    name: str
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def emulated(slowdowns: Sequence[float]) -> tuple[Client, ...]:
    return tuple(Client(f"slower-{x:g}", ("--throttle", str(x))) for x in slowdowns)


CPU_PAIR = emulated(SLOWDOWNS)


@dataclass(frozen=True)
class Run:
    """A planned run: its batches, what the plan promised, and the median of its iterations."""

    batches: tuple[int, ...]
    predicted_seconds: float
    measured_seconds: float

    @property
    def ratio(self) -> float:
        return self.measured_seconds / self.predicted_seconds


@dataclass(frozen=True)
class Prediction:
    """Relative errors, the median at sizes left out one by one and those at the held-out half; the run."""

    model: str
    kind: str
    left_out: float
    held_out: list[float]
    run: Run


def sizes(largest: int) -> list[int]:
    """Nine sizes over a factor of 16, evenly spaced on a log scale."""
    return sorted({round(b) for b in np.geomspace(largest / 16, largest, 9)})


def held_out(points: list[Point]) -> list[float]:
    """Errors at every second size, predicted by a fit of the others."""
    fit = select_fit(points[::2])
    return [predict_seconds(fit, p.batch) / statistics.median(point_seconds(p)) - 1 for p in points[1::2]]


def pyps(name: str, *arguments: object) -> None:
    command = [str(Path(sys.executable).parent / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


def profile_together(model: str, batches: list[int], clients: Sequence[Client], folder: Path) -> None:
    """Every client's profile, measured at the same time, as they will run, with its link to the store."""
    ladder = ",".join(map(str, batches))
    measuring = []
    for client in clients:
        command = [str(Path(sys.executable).parent / "pyps-profile"), model, "--batches", ladder]
        command += ["--threads", "1", "--no-plot", "-o", str(folder / f"{client.name}.json"), *client.options]
        environment = {**os.environ, **client.environment}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        measuring.append(subprocess.Popen(command, env=environment, **pipes))
    for process in measuring:
        said, _ = process.communicate()
        if process.returncode:
            sys.exit(said)
    for client in clients:
        pyps("pyps-profile", "link", folder / f"{client.name}.json")


def run_plan(
    model: str,
    both: int,
    clients: Sequence[Client],
    folder: Path,
    device: str = "cpu",
    name: str = "run",
    more: Sequence[str] = (),
    iterations: int = ITERATIONS,
) -> Run:
    """Plan a global batch for the clients, train by the plan, and compare.

    model: a task's name. both: the global batch. clients: with their profiles in the folder. name: of the
    run's folder. more: options of `pyps run`.
    """
    text = f"[job]\nglobal_batch = {both}\n"
    for client in clients:
        text += f'[[worker]]\nname = "{client.name}"\nprofile = "{client.name}.json"\n'
    (folder / "cluster.toml").write_text(text)
    pyps("pyps-plan", folder / "cluster.toml", "-o", folder / "plan.json")
    parts = [c.environment.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE") for c in clients]
    shares = [",".join(part for part in parts if part)] if all(parts) else []
    emulated = ["--throttle-from", "plan"] if any("--throttle" in c.options for c in clients) else []
    options = ["--plan", folder / "plan.json", *emulated, "--samples", iterations * both, *more]
    worker = [HERE / "builtin_worker.py", model, device, *shares]
    pyps("pyps", "run", *options, "--run-dir", folder / name, *worker)
    plan = read_plan(folder / "plan.json")
    measured = read_report(folder / name / "report.json").iteration_seconds.median
    return Run(tuple(w.batch for w in plan.workers), plan.iteration_seconds, measured)


def measure(model: str, scale: float) -> Prediction:
    """scale: of the model's largest batch."""
    largest = max(16, round(LARGEST[model] * scale))
    alone = profile_model(model, batches=sizes(largest), threads=1, repeats=REPEATS, notify=print)
    fit = alone.fit
    assert fit is not None
    with tempfile.TemporaryDirectory() as name:
        profile_together(model, sizes(largest), CPU_PAIR, Path(name))
        run = run_plan(model, largest + largest // 4, CPU_PAIR, Path(name))
    return Prediction(model, fit.kind, fit.leave_one_out_error or 0.0, held_out(alone.points), run)


def short_steps(models: Sequence[str]) -> str:
    """The table of short steps."""
    heading = "model", "devices", "batches", "plan ms", "run / plan", "run ms", "even ms", "even / run"
    rows = [[*heading, "others"]]
    for model, (count, both) in itertools.product(models, SHORT_BATCHES.items()):
        clients = emulated(SHORT_SLOWDOWNS[:count])
        with tempfile.TemporaryDirectory() as name, others_share() as others:
            folder, runs, even = Path(name), [], []
            profile_together(model, sizes(both), clients, folder)
            for k in range(SHORT_RUNS):
                for found, more in ((runs, ()), (even, ("--even",))):
                    options = f"{k}{''.join(more)}", more, SHORT_ITERATIONS
                    found.append(run_plan(model, both, clients, folder, "cpu", *options))
        run, equal = (statistics.median(one.measured_seconds for one in found) for found in (runs, even))
        ratios = sorted(one.ratio for one in runs)
        rows.append(
            [
                model,
                str(count),
                ", ".join(map(str, runs[0].batches)),
                f"{1e3 * runs[0].predicted_seconds:.2f}",
                f"{ratios[len(ratios) // 2]:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})",
                f"{1e3 * run:.2f}",
                f"{1e3 * equal:.2f}",
                f"{equal / run:.2f}",
                f"{others[0]:.0%}",
            ]
        )
    return f"{machine()}.\n\n{table(rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", help=f"{','.join(MODELS)}; with --short {SHORT_MODELS}")
    parser.add_argument("--scale", type=float, default=1.0, help="of batches: 0.01 for short steps")
    parser.add_argument("--short", action="store_true", help="steps of 3 to 5 ms, planned and even")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    if options.short:
        text = short_steps((options.models or SHORT_MODELS).split(","))
        print(text)
        if options.save:
            save_table("short-steps", text)
        return
    heading = "model", "fit", "left out", "held-out half: median, worst", "plan ms", "run ms", "run / plan"
    rows, found = [[*heading, "others"]], []
    for model in options.models.split(",") if options.models else MODELS:
        with others_share() as others:
            one = measure(model, options.scale)
        found.append(one)
        errors = np.abs(one.held_out)
        rows.append(
            [
                one.model,
                one.kind,
                f"{one.left_out:.1%}",
                f"{np.median(errors):.1%}, {errors.max():.1%}",
                f"{1e3 * one.run.predicted_seconds:.1f}",
                f"{1e3 * one.run.measured_seconds:.1f}",
                f"{one.run.ratio:.3f}",
                f"{others[0]:.0%}",
            ]
        )
    middle = statistics.median(one.left_out for one in found)
    text = f"{machine()}. Median left-out error over the models: {middle:.1%}.\n\n{table(rows)}"
    print(text)
    if options.save:
        save_table("prediction", text)


if __name__ == "__main__":
    main()
