"""Whether a plan for a mode of running predicts the run: python benchmarks/modes.py [--only NAME]
[--slower FACTOR] [--docs].

Each cluster has unlike devices and links, and states a mode in [run]. It is planned; the plan is run by real
processes through the store; the median iteration is compared with the plan's. Devices are emulated: a step
takes as long as the profile's cost model says, 170 ms or more. Links are emulated too (a message takes its
latency and its bytes over the bandwidth; workers of a shared link take turns), except those of the last two
clusters: there workers in one network namespace reach a served store in another, and tc tbf shapes the link
between them both ways.

The second table holds the joint plan against planning for serial steps at 32 bits first and launching in the
mode then: both by the planner's prediction, on the same clusters and on the 20 MB/s case.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import shaped
from record import machine, others_share, table, write_section

from pyps.formats import Cluster, Pace, Profile, RunTable, read_cluster, read_plan, read_profile
from pyps.profiler.select import fit_of
from pyps.report.report import read_report
from pyps.solver.milp.constrained import evaluate
from pyps.solver.mode import stated_policy
from pyps.solver.plan import make_plan, planning_problem
from pyps.solver.ranks import planned_ranks
from pyps.store.policies import policy_named

HERE = Path(__file__).resolve().parent
MODEL = 98_304  # numbers: whole chunks, so that nothing is padded; 0.4 MB one way at 32 bits
ITERATIONS = 25
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


FAST, GOOD, SLOW = (0.050, 0.0050), (0.050, 0.0075), (0.050, 0.0150)


def device(kind: tuple[float, float], bandwidth: float | None = None, latency: float = 0.0) -> Device:
    return Device(*kind, bandwidth, latency)


RACK = 'shares = ["rack"]'
CASES = (
    Case("bsp, slow links", 'policy = "bsp"', 96, (device(FAST, 16), device(GOOD, 8), device(SLOW, 16))),
    Case(
        "bsp, a shared link",
        'policy = "bsp"\ncodec = "bf16"\npull_codec = "bf16"',
        96,
        (Device(*FAST, more=RACK), Device(*GOOD, more=RACK), Device(*SLOW, more=RACK)),
        16.0,
    ),
    Case(
        "hps, pipeline, planned bits",
        'policy = "hps"\npipeline = true\ncodec = "plan"',
        96,
        (device(FAST, 3.2, 12), device(GOOD, 16), device(SLOW, 16)),
        quick=True,
    ),
    Case("hps, serial", 'policy = "hps"', 96, (device(FAST, 16, 12), device(GOOD, 16), device(SLOW, 32))),
    Case("r2sp", 'policy = "r2sp"', 96, (device(FAST, 32), device(GOOD, 16), device(SLOW, 32))),
    Case(
        "r2sp, pipeline, int8",
        'policy = "r2sp"\npipeline = true\ncodec = "int8"\npull_codec = "int8"',
        96,
        (device(FAST, 4), device(GOOD, 4), device(SLOW, 8)),
    ),
    Case("asp", 'policy = "asp"', 96, (device(FAST, 16), device(GOOD, 4), device(SLOW, 16))),
    Case(
        "saps, pipeline, planned bits",
        'policy = "saps"\npipeline = true\ncodec = "plan"',
        96,
        (device(FAST, 1.6), device(GOOD, 8), device(SLOW, 16)),
    ),
    Case(
        "ssp, shared link, pipeline",
        'policy = "ssp:bound=3"\npipeline = true',
        96,
        (Device(*FAST, more=RACK), Device(*GOOD, more=RACK), Device(*SLOW, more=RACK)),
        6.4,
    ),
    Case("dssp", 'policy = "dssp"', 96, (device(FAST, 8, 12), device(GOOD, 8), device(SLOW, 16))),
    Case("backup", 'policy = "backup:k=1"', 120, (device(GOOD, 16), device(GOOD, 16), device(GOOD, 16))),
    Case(
        "softsync, pipeline",
        'policy = "softsync:n=3"\npipeline = true',
        96,
        (device(FAST, 3.2), device(GOOD, 16), device(SLOW, 16)),
    ),
    Case("dynsgd, int8", 'policy = "dynsgd"\ncodec = "int8"', 96, (device(FAST, 4), device(GOOD, 4))),
    Case("consgd", 'policy = "consgd"', 96, (device(FAST, 8), device(SLOW, 8))),
    Case("dcasgd, int4", 'policy = "dcasgd"\ncodec = "int4"', 96, (device(FAST, 4), device(GOOD, 16))),
    Case(
        "bsp, tbf 100 Mbit/s",
        'policy = "bsp"',
        96,
        (Device(*FAST, more=RACK), Device(*GOOD, more=RACK)),
        HEADERS * 100 / 8,
        rate="100mbit",
    ),
    Case(
        "hps, pipeline, int8, tbf 20 Mbit/s",
        'policy = "hps"\npipeline = true\ncodec = "int8"\npull_codec = "int8"',
        96,
        (Device(*FAST, more=RACK), Device(*GOOD, more=RACK)),
        HEADERS * 20 / 8,
        rate="20mbit",
    ),
)
TWENTY = Case(
    "20 MB/s",
    'policy = "hps"\npipeline = true\ncodec = "plan"',
    64,
    (Device(0.0009, 0.000625, 10_000.0), Device(0.0009, 0.00015, 20.0)),
)


@dataclass(frozen=True)
class Outcome:
    """A case: predicted and measured seconds of an iteration, and what it does to the prediction."""

    case: Case
    batches: tuple[int, ...]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--slower", type=float, default=1.0, help="so many times as slow devices and links")
    parser.add_argument("--docs", action="store_true")
    options = parser.parse_args()
    cases = [slower(case, options.slower) for case in CASES if options.only in case.name]
    if reason := shaped.missing():
        print(f"without shaped links: {reason}", file=sys.stderr)
        cases = [case for case in cases if not case.rate]
    rows, found = [["cluster", "batches", "plan ms", "run ms", "error", "others"]], []
    for case in cases:
        with tempfile.TemporaryDirectory() as name, others_share() as others:
            one = run_case(case, Path(name))
        found.append(one)
        batches = " ".join(map(str, one.batches))
        figures = ms(one.predicted_seconds), ms(one.measured_seconds), f"{one.error:+.1%}", f"{others[0]:.0%}"
        rows.append([case.name, batches, *figures])
        print(*rows[-1], sep="  ", flush=True)
    errors = [abs(one.error) for one in found]
    middle, worst = statistics.median(errors), max(errors)
    gains = [["cluster", "planned first, launched then, ms", "planned for the mode, ms", "gain"]]
    ratios = []
    for case in (*cases, TWENTY):
        with tempfile.TemporaryDirectory() as name:
            before, after = two_stages(case, Path(name))
        ratios.append(before / after)
        gains.append([case.name, ms(before), ms(after), f"{before / after:.2f}x"])
    met = middle <= MEDIAN_ERROR and worst <= WORST_ERROR and min(ratios) >= 1 - 1e-9 and ratios[-1] >= GAIN
    text = (
        f"{machine()}. Median error {middle:.1%}, worst {worst:.1%} (at most {MEDIAN_ERROR:.0%} and "
        f"{WORST_ERROR:.0%}); least gain {min(ratios):.2f}x, on the 20 MB/s case {ratios[-1]:.2f}x "
        f"(at least 1 and {GAIN:g}): {'met' if met else 'missed'}.\n\n{table(rows)}\n\n{table(gains)}"
    )
    print(text)
    if options.docs:
        write_section("modes", text)
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
