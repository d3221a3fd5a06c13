"""Measure whether a plan for a mode of running predicts the run: python benchmarks/modes.py [--only NAME]
[--slower FACTOR] [--save].

Each cluster has unlike devices and links, and states a mode in [run]. It is planned; the plan is run by real
processes through the store; the median iteration is compared with the plan's. Devices are emulated: a step
takes as long as the profile's cost model says, 170 ms or more. Links are emulated too (in each direction one
message follows the other for its bytes over the bandwidth, and arrives a latency later), except those of the
last two clusters: there workers in one network namespace reach a served store in another, and tc tbf shapes
the link between them both ways.

The gain is that of the joint plan over planning for serial steps at 32 bits first and launching in the mode
then: both by the planner's prediction, on the same clusters and on the 20 MB/s case.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import shaped
from record import machine, others_share, save_table, table

from pyps.formats import Cluster, Pace, Profile, RunTable, read_cluster, read_plan, read_profile
from pyps.profiler.curve import fit_of
from pyps.report.report import read_report
from pyps.solver.constrained import evaluate
from pyps.solver.mode import stated_policy
from pyps.solver.plan import make_plan
from pyps.solver.problem import planning_problem
from pyps.solver.ranks import planned_ranks
from pyps.store.policies import policy_named

HERE = Path(__file__).resolve().parent
MODEL = 98_304  # numbers: whole chunks, so that nothing is padded; 0.4 MB one way at 32 bits
ITERATIONS = 25  # odd: under backup one and two rounds alternate, and the median is then between both
MEDIAN_ERROR, WORST_ERROR = 0.05, 0.10
GAIN = 2.0  # at least, on the 20 MB/s case
HEADERS = 0.95  # of a shaped link's rate is left for what it carries


@dataclass(frozen=True)
class Device:
    """A worker: seconds of a step before its first sample and of each sample; its link, in MB/s and ms."""

    fixed: float
    per_sample: float
    bandwidth: float | None = None
    latency: float = 0.0
    more: str = ""


@dataclass(frozen=True)
class Case:
    """A cluster: its devices, the global batch and [run].

    shared_megabytes: a second, of the link that devices share. rate: of that link, if it is a real one.
    """

    name: str
    run: str
    batch: int
    devices: tuple[Device, ...]
    shared_megabytes: float | None = None
    rate: str = ""
    quick: bool = False
    iterations: int = ITERATIONS


# Seconds of a step before its first sample, and of each sample.
KINDS = {"fast": (0.050, 0.0050), "good": (0.050, 0.0075), "slow": (0.050, 0.0150)}
INT8 = 'codec = "int8"; pull_codec = "int8"'
PIPED = 'depth = "auto"'
PLANNED = 'depth = "auto"; codec = "plan"'


def case_of(
    name: str,
    run: str,
    devices: str,
    *,
    batch: int = 96,
    shared: float | None = None,
    rate: str = "",
    quick: bool = False,
) -> Case:
    """A case from its row of the table.

    name: of the case. run: the keys of [run]. devices: "kind MB/s ms, ..." with the link's speed and latency.
    batch: the global one. shared: MB/s of the link that devices without one of their own share. rate: of that
    link, if it is a real one. quick: the tests run it.
    """
    made = []
    for one in devices.split(", "):
        kind, *link = one.split()
        bandwidth, latency = (*map(float, link), 0.0, 0.0)[:2]
        made.append(Device(*KINDS[kind], bandwidth or None, latency, "" if link else 'shares = ["rack"]'))
    return Case(name, run.replace("; ", "\n"), batch, tuple(made), shared, rate, quick)


CASES = (
    case_of("bsp, slow links", 'policy = "bsp"', "fast 16, good 8, slow 16"),
    case_of(
        "bsp, bf16, shared link",
        'policy = "bsp"; codec = "bf16"; pull_codec = "bf16"',
        "fast, good, slow",
        shared=16.0,
    ),
    case_of("hps, planned", f'policy = "hps"; {PLANNED}', "fast 3.2 12, good 16, slow 16", quick=True),
    case_of("hps, serial", 'policy = "hps"', "fast 16 12, good 16, slow 32"),
    case_of("hps, deep", f'policy = "hps"; {PIPED}', "fast 2 300, good 4 60"),
    case_of("r2sp", 'policy = "r2sp"', "fast 32, good 16, slow 32"),
    case_of("r2sp, pipeline, int8", f'policy = "r2sp"; {PIPED}; {INT8}', "fast 4, good 4, slow 8"),
    case_of("asp", 'policy = "asp"', "fast 16, good 4, slow 16"),
    case_of("asp, deep", f'policy = "asp"; {PIPED}', "fast 1.6, good 3.2 100"),
    case_of("saps, planned", f'policy = "saps"; {PLANNED}', "fast 1.6, good 8, slow 16"),
    case_of("ssp, pipeline, shared link", f'policy = "ssp:bound=3"; {PIPED}', "fast, good, slow", shared=6.4),
    case_of("dssp", 'policy = "dssp"', "fast 8 12, good 8, slow 16"),
    case_of("backup", 'policy = "backup:k=1"', "good 16, good 16, good 16", batch=120),
    case_of("quorum", 'policy = "quorum:k=1"', "good 16, good 16, good 16", batch=120),
    case_of("softsync, pipeline", f'policy = "softsync:n=3"; {PIPED}', "fast 3.2, good 16, slow 16"),
    case_of("dynsgd, int8", 'policy = "dynsgd"; codec = "int8"', "fast 4, good 4"),
    case_of("dynsgd, int4", 'policy = "dynsgd"; codec = "int4"', "fast 4, good 16"),
    case_of("bsp, tbf 100 Mbit/s", 'policy = "bsp"', "fast, good", shared=HEADERS * 100 / 8, rate="100mbit"),
    case_of(
        "hps, pipeline, int8, tbf 20 Mbit/s",
        f'policy = "hps"; {PIPED}; {INT8}',
        "fast, good",
        shared=HEADERS * 20 / 8,
        rate="20mbit",
    ),
)
TWENTY = Case(
    "20 MB/s",
    'policy = "hps"\ndepth = "auto"\ncodec = "plan"',
    64,
    (Device(0.0009, 0.000625, 10_000.0), Device(0.0009, 0.00015, 20.0)),
)


@dataclass(frozen=True)
class Outcome:
    """A case: predicted and measured seconds of an iteration, and what it does to the prediction."""

    case: Case
    batches: tuple[int, ...]
    depths: tuple[int, ...]
    predicted_seconds: float
    measured_seconds: float

    @property
    def error(self) -> float:
        return self.measured_seconds / self.predicted_seconds - 1


def slower(case: Case, factor: float) -> Case:
    """The case with every device and link slower, so that a busy machine disturbs it less."""
    devices = tuple(
        replace(
            one,
            fixed=one.fixed * factor,
            per_sample=one.per_sample * factor,
            bandwidth=None if one.bandwidth is None else one.bandwidth / factor,
            latency=one.latency * factor,
        )
        for one in case.devices
    )
    rate, bandwidth = case.rate, case.shared_megabytes
    if rate:
        rate = f"{float(rate.removesuffix('mbit')) / factor:g}mbit"
    if bandwidth is not None:
        bandwidth /= factor
    return replace(case, devices=devices, rate=rate, shared_megabytes=bandwidth)


def write_cluster(case: Case, folder: Path) -> Path:
    """The case's cluster file, in the folder of its profiles."""
    text = f"[job]\nglobal_batch = {case.batch}\n[run]\n{case.run}\n"
    if case.shared_megabytes is not None:
        text += f'[[shared]]\nname = "rack"\nbandwidth = {case.shared_megabytes * 1e6}\n'
    for k, one in enumerate(case.devices):
        points = [{"batch": b, "seconds": one.fixed + one.per_sample * b} for b in (1, 8, 32, 128)]
        profile = {
            "schema": "pyps.profile/1",
            "device": {"name": f"d{k}"},
            "model": {"name": "modes", "parameters": MODEL},
            "points": points,
        }
        (folder / f"d{k}.json").write_bytes(msgspec.json.encode(profile))
        text += f'[[worker]]\nname = "d{k}"\nprofile = "d{k}.json"\n{one.more}\n'
        if one.bandwidth is not None:
            text += f"bandwidth = {one.bandwidth * 1e6}\nlatency = {one.latency / 1e3}\n"
    path = folder / "cluster.toml"
    path.write_text(text)
    return path


def pyps(*words: object, inside: Sequence[str] = ()) -> None:
    command = [*inside, str(Path(sys.executable).parent / str(words[0])), *map(str, words[1:])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def run_case(case: Case, folder: Path) -> Outcome:
    """Plan the case, train by the plan, and compare."""
    cluster = write_cluster(case, folder)
    pyps("pyps-plan", cluster, "-o", folder / "plan.json")
    options = ["--plan", folder / "plan.json", "--samples", case.iterations * case.batch]
    options += ["--run-dir", folder / "run"]
    worker = HERE / "modes_worker.py"
    if case.rate:
        bare = cluster.with_name("devices.toml")  # the link is real
        bare.write_text(cluster.read_text().replace("bandwidth", "samples_per_second"))
        with served(case.rate, folder) as (pair, address):
            inside = pair.command(pair.client)
            pyps(
                "pyps", "run", *options, "--throttle-from", bare, "--connect", address, worker, inside=inside
            )
    else:
        pyps("pyps", "run", *options, "--throttle-from", cluster, worker)
    plan, report = read_plan(folder / "plan.json"), read_report(folder / "run" / "report.json")
    return Outcome(
        case,
        tuple(w.batch for w in plan.workers),
        tuple(plan.mode_of(w).depth for w in plan.workers) if plan.run else (),
        plan.iteration_seconds,
        report.iteration_seconds.median,
    )


@contextmanager
def served(rate: str, folder: Path) -> Iterator[tuple[shaped.Shaped, str]]:
    """`pyps serve` in one namespace; the address at which workers in the other reach a store there."""
    with ExitStack() as stack:
        pair = stack.enter_context(shaped.shaped(rate))
        program = str(Path(sys.executable).parent / "pyps")
        listen = ["serve", "modes", "--bind", f"tcp://{shaped.SERVER}:5555", "--keys", str(folder / "keys")]
        server = subprocess.Popen(
            [*pair.command(pair.server), program, *listen], stdout=subprocess.PIPE, text=True
        )
        stack.callback(server.wait)
        stack.callback(server.terminate)
        assert server.stdout is not None
        server.stdout.readline()
        yield pair, f"tcp://{shaped.SERVER}:5555/modes?keys={folder / 'keys' / 'client.key'}"


def two_stages(case: Case, folder: Path) -> tuple[float, float]:
    """Seconds of an iteration as launched: of the split for serial steps at 32 bits; of the joint plan."""
    cluster = read_cluster(write_cluster(case, folder))
    profiles = [_fitted(group.profile) for group in cluster.worker]
    pace = policy_named(stated_policy(cluster.run)).pace
    serial = make_plan(msgspec.structs.replace(cluster, run=RunTable()), profiles)
    first = valued(cluster, profiles, pace, [worker.batch for worker in serial.workers])
    return first, make_plan(cluster, profiles, pace).iteration_seconds


def _fitted(path: str) -> Profile:
    profile = read_profile(path)
    return msgspec.structs.replace(profile, fit=fit_of(profile))


def valued(cluster: Cluster, profiles: Sequence[Profile], pace: Pace, batches: Sequence[int]) -> float:
    problem = planning_problem(cluster, planned_ranks(cluster, profiles), pace)
    return evaluate(problem, np.array(batches)).iteration_seconds


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def bars(outcomes: Sequence[Outcome], ratios: Sequence[float]) -> list[tuple[bool, str]]:
    """Each bar, and whether it was met. ratios: two stages over the joint plan, of the 20 MB/s case last."""
    errors = [abs(one.error) for one in outcomes]
    middle, worst = statistics.median(errors), max(errors)
    return [
        (middle <= MEDIAN_ERROR, f"median error {middle:.1%} (threshold: {MEDIAN_ERROR:.0%})"),
        (worst <= WORST_ERROR, f"worst error {worst:.1%} (threshold: {WORST_ERROR:.0%})"),
        (min(ratios) >= 1 - 1e-9, f"least gain of the joint plan {min(ratios):.2f} (threshold: 1)"),
        (ratios[-1] >= GAIN, f"gain on the 20 MB/s case {ratios[-1]:.2f} (threshold: {GAIN:g})"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--slower", type=float, default=1.0, help="so many times as slow devices and links")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    cases = [slower(case, options.slower) for case in CASES if options.only in case.name]
    if reason := shaped.missing():
        print(f"without shaped links: {reason}", file=sys.stderr)
        cases = [case for case in cases if not case.rate]
    heading = [
        "cluster",
        "batches",
        "depths",
        "plan ms",
        "run ms",
        "error",
        "two stages ms",
        "gain",
        "others",
    ]
    rows, found, ratios, began = [heading], [], [], time.monotonic()
    for case in cases:
        with tempfile.TemporaryDirectory() as name, others_share() as others:
            found.append(one := run_case(case, Path(name)))
            before, after = two_stages(case, Path(name))
        ratios.append(before / after)
        plan = " ".join(map(str, one.batches)), " ".join(map(str, one.depths))
        measured = ms(one.predicted_seconds), ms(one.measured_seconds), f"{one.error:+.1%}"
        rows.append([case.name, *plan, *measured, ms(before), f"{ratios[-1]:.2f}x", f"{others[0]:.0%}"])
        print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as name:
        before, after = two_stages(TWENTY, Path(name))
    ratios.append(before / after)
    rows.append([TWENTY.name, "", "", ms(after), "", "", ms(before), f"{ratios[-1]:.2f}x", ""])
    reached = bars(found, ratios)
    lines = "\n".join(f"- {'met' if met else 'missed'}: {text}" for met, text in reached)
    lasted = time.monotonic() - began
    text = f"{machine()}, in {lasted:.0f} s.\n\n{table(rows)}\n\n{lines}"
    print(text)
    if options.save:
        save_table("modes", text)
    return int(not all(met for met, _ in reached))


if __name__ == "__main__":
    sys.exit(main())
