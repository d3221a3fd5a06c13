"""SaPS from far above the noise floor down to it: python benchmarks/noise.py [--clusters NAME ...] [--save].

Least squares with noisy targets in 30 dimensions, a batch of 8 for every worker, in virtual time with the
decisions of the core (noise.c, which it builds). Time until the excess loss is at most each of three targets,
for SaPS as it is by default and its rivals. Rates, and Ringmaster's R, are chosen for each cluster and target
by seeds of their own; a rate that counts has worse ones on both sides. In brackets: what a copy of the best
rival, tuned and timed with other seeds, takes over it. --condition: of the Hessian. --oracle:
instead of SaPS its weights with the best fixed bound, chosen as R is.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import multiprocessing
import os
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray
from record import Kept, machine, save_table, table

from pyps._native import ffi
from pyps.native import fill_policy_params
from pyps.store.policies import policy_named

Array = NDArray[np.float64]
HOME = Path(__file__).resolve().parent
D, BATCH, POOL = 30, 8, 1 << 16
TARGETS = (0.05, 0.01, 0.002)
TUNING, APART = tuple(range(101, 109)), 1000  # from these, and from the other seeds, to those of copies
START, LAST = 14, 24  # keys of rates
LIMIT, PATIENCE = 2000.0, 2.0  # seconds of a run, and of the best one's time
OURS, RINGMASTER = "SaPS", "Ringmaster"
SHARES = (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0)  # of N: Ringmaster's R, and 1; beyond is ASP
HELD_OUT = ("6x1 + 10x4 + 16x25", "40, uniform 1 to 30")  # SaPS's constants were chosen without them
ILL = ("4x1 + 60x10", "8x1 + 24x3", "lognormal, 32", *HELD_OUT)  # with a condition number
PAGE = "papers.md"


@dataclass(frozen=True)
class Cluster:
    """Seconds of each worker's steps and the deviation of their logarithm; with `turn_seconds`, one of
    `groups` is fast in turn, and the others take `factor` times as long.
    """

    seconds: Sequence[float]
    jitter: float = 0.1
    turn_seconds: float = 0.0
    groups: int = 1
    factor: float = 1.0


def quantiles(count: int) -> Array:
    return (np.arange(count) + 0.5) / count


def lognormal(count: int) -> list[float]:
    return [math.exp(statistics.NormalDist().inv_cdf(q)) for q in quantiles(count)]


CLUSTERS = {
    "4x1 + 60x10": Cluster([1.0] * 4 + [10.0] * 60),
    "2x1 + 18x30": Cluster([1.0] * 2 + [30.0] * 18),
    "8x1 + 24x3": Cluster([1.0] * 8 + [3.0] * 24),
    "3x1 + 13x8, jitter 0.8": Cluster([1.0] * 3 + [8.0] * 13, jitter=0.8),
    "lognormal, 32": Cluster(lognormal(32)),
    "Pareto, 32": Cluster([*(1.0 / (1.0 - quantiles(32)))]),
    "roles change": Cluster([1.0] * 32, turn_seconds=60.0, groups=8, factor=10.0),
    "16x1": Cluster([1.0] * 16),
    "3x1 + 29x6": Cluster([1.0] * 3 + [6.0] * 29),
    "1x1 + 15x20": Cluster([1.0] + [20.0] * 15),
    "24, uniform 1 to 12": Cluster([*(1.0 + 11.0 * quantiles(24))]),
    HELD_OUT[0]: Cluster([1.0] * 6 + [4.0] * 10 + [25.0] * 16),
    HELD_OUT[1]: Cluster([*(1.0 + 29.0 * quantiles(40))]),
}


class _Problem(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("x", "y", "best", "scales")] + [
        ("pool", ctypes.c_uint64),
        ("d", ctypes.c_uint32),
    ]


class _Cluster(ctypes.Structure):
    _fields_ = [
        ("seconds", ctypes.c_void_p),
        ("workers", ctypes.c_uint32),
        ("batch", ctypes.c_uint32),
        ("jitter", ctypes.c_double),
        ("turn_seconds", ctypes.c_double),
        ("groups", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
        ("factor", ctypes.c_double),
    ]


@cache
def library() -> ctypes.CDLL:
    """noise.c, built against the installed core."""
    package = HOME.parent / "pyps"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "noise.so")
        sources = [str(HOME / "noise.c"), str(package / "lib" / "libpyps.a")]
        flags = ["-std=c11", "-O2", "-shared", "-fPIC", "-I", str(package / "include"), "-o", str(out)]
        subprocess.run(["cc", *flags, *sources, "-lm", "-lpthread"], check=True)
        found = ctypes.CDLL(str(out))
    found.seconds_to.restype = ctypes.c_double
    return found


@cache
def problem(seed: int, condition: float = 1.0) -> tuple[_Problem, list[Array]]:
    """The mean of (x.w - y)^2 / 2 with y = x.w* + noise, and the arrays that it points to."""
    draw = np.random.default_rng(seed)
    scales = condition ** (-np.arange(D) / (2 * (D - 1)))
    best = draw.standard_normal(D)
    x = draw.standard_normal((POOL, D)) * scales
    arrays = [x, x @ best + draw.standard_normal(POOL), best, scales]
    return _Problem(*(a.ctypes.data for a in arrays), POOL, D), arrays


@cache
def policy(text: str) -> tuple[int, object]:
    chosen, params = policy_named(text), ffi.new("pyps_policy_params *")
    fill_policy_params(params, chosen.params())
    return chosen.number, params


@dataclass(frozen=True)
class Job:
    """A policy, or Ringmaster and its R, on a cluster. condition: the problem's."""

    cluster: str
    way: str
    condition: float = 1.0


def seconds(job: Job, target: float, key: int, seed: int, limit: float) -> float:
    """Until the target; infinite: not within `limit` seconds."""
    way, c, (of, _) = job.way, CLUSTERS[job.cluster], problem(seed, job.condition)
    times = np.array(c.seconds, dtype=float)
    there = _Cluster(times.ctypes.data, len(times), BATCH, c.jitter, c.turn_seconds, c.groups, 0, c.factor)
    bound = int(way.partition("=")[2]) if way.startswith(RINGMASTER) else 0
    number, params = policy("asp" if bound else way)
    found = library().seconds_to(
        ctypes.byref(of),
        ctypes.byref(there),
        ctypes.c_uint32(number),
        ctypes.c_void_p(int(ffi.cast("uintptr_t", params))),
        ctypes.c_double(2.0 ** (-key / 2)),
        ctypes.c_uint64(bound),
        ctypes.c_uint64(seed),
        ctypes.c_double(target),
        ctypes.c_double(limit),
    )
    if math.isnan(found):
        raise SystemExit(f"{job.cluster}, {way}: the core has refused a step")
    return float(found)


def ways(n: int, saps: str = "saps") -> dict[str, tuple[str, ...]]:
    """The policies that each competitor may choose from, on n workers. saps: "": a fixed bound."""
    bounds = sorted({1, *(round(share * n) for share in SHARES)})
    weighed = {b: f"saps:threshold=fixed,bound={b},late=weigh" for b in bounds}
    return {
        OURS: (saps,) if saps else tuple(weighed.values()),
        "ASP": ("asp",),
        "delay-adaptive": (weighed[n],),
        RINGMASTER: tuple(f"{RINGMASTER}={b}" for b in bounds),
    }


@dataclass
class Tuned:
    """A policy on a cluster, for one target. key: of the best rate, 2 ** (-key / 2) of a gradient. tuned: the
    mean of the tuning seeds with it. seconds: by seed.
    """

    key: int
    tuned: float
    seconds: list[float]


def tune(job: Job, seeds: Sequence[int], apart: int = 0) -> list[Tuned]:
    """By target: the best rate by the tuning seeds, with worse ones on both sides; then the seeds' runs.
    apart: added to all seeds.
    """
    tuning, seeds = ([apart + seed for seed in some] for some in (TUNING, seeds))
    return [_tune(job, target, tuning, seeds) for target in TARGETS]


def _tune(job: Job, target: float, tuning: Sequence[int], seeds: Sequence[int]) -> Tuned:
    tried: dict[int, float] = {}

    def tuned(key: int) -> float:
        if key not in tried:
            limit = PATIENCE * min([LIMIT, *tried.values()])
            runs = [seconds(job, target, key, seed, limit) for seed in tuning]
            late = sum(run == math.inf for run in runs)
            tried[key] = math.inf if 4 * late > len(runs) else mean([min(run, 2 * limit) for run in runs])
        return tried[key]

    here = START
    while tuned(here) == math.inf and here < LAST:
        here += 2
    for step in (2, 1):
        while tuned(near := min((here - step, here + step), key=tuned)) < tuned(here):
            here = near
    limit = 10 * min(LIMIT, tuned(here))
    found = [min(limit, seconds(job, target, here, seed, limit)) for seed in seeds]
    return Tuned(here, tuned(here), found)


def mean(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(statistics.fmean(map(math.log, values)))


Found = dict[tuple[str, str], list[Tuned]]  # by cluster and policy


def picked(cluster: str, several: Sequence[str], found: Found) -> list[Tuned]:
    """The best policy of a competitor by the tuning seeds, for each target."""
    return [
        min((found[cluster, policy][k] for policy in several), key=lambda t: t.tuned)
        for k in range(len(TARGETS))
    ]


def row(
    cluster: str, policies: dict[str, tuple[str, ...]], found: Found, copies: Found
) -> tuple[list[str], list[float], list[float]]:
    """The seconds of each competitor, then by target SaPS's over the best of the others, and that one's copy
    over it.
    """
    times = {way: [mean(t.seconds) for t in picked(cluster, some, found)] for way, some in policies.items()}
    again = {way: [mean(t.seconds) for t in picked(cluster, some, copies)] for way, some in policies.items()}
    ratios, null = [], []
    for k in range(len(TARGETS)):
        best = min((way for way in times if way != OURS), key=lambda way: times[way][k])
        ratios.append(times[OURS][k] / times[best][k])
        null.append(again[best][k] / times[best][k])
    cells = [" / ".join(f"{v:.0f}" for v in several) for several in times.values()]
    title = f"{cluster} (held out)" if cluster in HELD_OUT else cluster
    figures = [f"{ratio:.2f} ({copy:.2f})" for ratio, copy in zip(ratios, null, strict=True)]
    return [title, *cells, *figures], ratios, null


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clusters", nargs="+", choices=list(CLUSTERS))
    parser.add_argument("--condition", type=float, default=1.0)
    parser.add_argument("--saps", default="saps", help="the policy that is compared")
    parser.add_argument("--oracle", action="store_const", const="", dest="saps", help="the best fixed bound")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--save", action="store_true", help="keep the table in bench-out/")
    parser.add_argument("--keep", type=Path, help="a file of what was tuned, to go on with when cut off")
    options = parser.parse_args()
    ill = options.condition != 1.0
    clusters = options.clusters or (ILL if ill else list(CLUSTERS))
    policies = {cluster: ways(len(CLUSTERS[cluster].seconds), options.saps) for cluster in clusters}
    pairs = [(c, policy) for c in clusters for policy in dict.fromkeys(chain(*policies[c].values()))]
    jobs = {pair: Job(*pair, options.condition) for pair in pairs}
    seeds, kept = range(1, options.seeds + 1), Kept(options.keep)
    halves = []
    for apart in (0, APART):
        missing = [job for job in jobs.values() if kept.get(f"{job}, {seeds}, {apart}") is None]
        with multiprocessing.get_context("fork").Pool() as pool:
            tuned = pool.imap(partial(tune, seeds=seeds, apart=apart), missing)
            for job, several in zip(missing, tuned, strict=True):
                kept.add(f"{job}, {seeds}, {apart}", [asdict(t) for t in several])
        halves.append(
            {p: [Tuned(**t) for t in kept.get(f"{job}, {seeds}, {apart}")] for p, job in jobs.items()}
        )
    heading = ["cluster", *(f"{way}, s" for way in ways(1)), *(f"to {t:g} (copy)" for t in TARGETS)]
    rows, ratios, null = zip(*(row(c, policies[c], *halves) for c in clusters), strict=True)
    worst, copies = max(chain(*ratios)), sorted(chain(*null))
    ours = "SaPS's time" if options.saps else "The time of the best fixed bound, with weights,"
    verdict = "within what copies are" if worst <= copies[-1] else "beyond what copies are"
    closing = (
        f"- {verdict}: {ours} over that of its best rival, at most: {worst:.2f}; its copy's: {copies[-1]:.2f}"
    )
    closing += f", {copies[math.ceil(0.9 * len(copies)) - 1]:.2f} in nine of ten"
    about = f"{machine()}, {options.seeds} seeds a point"
    about += f", condition number {options.condition:g}." if ill else "."
    text = "\n".join([f"{about}\n", table([heading, *rows]), "", closing])
    print(text)
    if options.save and ill:
        save_table("condition", text, PAGE)
    elif options.save:
        save_table("noise", text, PAGE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
