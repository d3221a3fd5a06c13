"""Plans against runs where workers share a link.

    python benchmarks/links.py [--clusters 25] [--docs]

Random clusters of two to six unlike workers, all or all but one of them behind one [[shared]] link that takes
a tenth to twice as long as their computing. Each is planned for four policies and for one to three steps
under way, and its plan is then run in virtual time, where messages divide the link's bandwidth and each
decision is the store's. The table says how far the planned iteration is from the run's. Serial steps of ssp
drift for hundreds of rounds until the fastest worker has reached the bound: their runs are longer.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from record import machine, table, write_section

from pyps.formats import (
    Device,
    Fit,
    ModelInfo,
    Plan,
    Point,
    Profile,
    read_cluster,
    read_profile,
    write_json,
)
from pyps.simulate import scenario_of, simulate
from pyps.solver.plan import make_plan
from pyps.store.policies import policy_named

POLICIES = "bsp", "hps", "ssp:bound=4", "asp"
DEPTHS = 1, 2, 3
PARAMETERS = 32_768 * 4
ROUNDS, DRIFTING = 200, 1000
MEDIAN, WORST = 0.03, 0.08  # what is promised


@dataclass(frozen=True)
class Case:
    """A planned iteration and the run of it, in seconds."""

    policy: str
    depth: int
    planned: float
    run: float

    @property
    def off(self) -> float:
        return self.planned / self.run - 1


def cluster(luck: np.random.Generator, folder: Path) -> str:
    """The text of a cluster file; its profiles are written into the folder."""
    count = int(luck.integers(2, 7))
    shared = count - int(luck.random() < 0.3 and count > 2)
    text = f"[job]\nglobal_batch = {32 * count}\n"
    for k in range(count):
        slope = float(np.exp(luck.uniform(np.log(0.5e-3), np.log(4e-3))))
        fit = Fit(
            kind="affine",
            fixed_seconds=float(luck.uniform(0.002, 0.02)),
            per_sample_seconds=slope,
            trusted_min_batch=1,
            trusted_max_batch=1024,
        )
        write_json(
            folder / f"p{k}.json",
            Profile(
                device=Device(name=f"d{k}"),
                model=ModelInfo(name="m", parameters=PARAMETERS),
                points=[Point(batch=1, seconds=1.0)],
                fit=fit,
            ),
        )
        text += f'[[worker]]\nname = "w{k}"\nprofile = "p{k}.json"\n'
        text += 'shares = ["rack"]\n' if k < shared else ""
    bandwidth = 4 * PARAMETERS * shared / (0.04 * float(np.exp(luck.uniform(np.log(0.1), np.log(2.0)))))
    latency = float(luck.choice([0.0, 0.0005, 0.003]))
    return text + f'[[shared]]\nname = "rack"\nbandwidth = {bandwidth}\nlatency = {latency}\n'


def planned(folder: Path, text: str, policy: str, depth: int) -> Plan:
    """The plan, written to plan.json next to its cluster file."""
    path = folder / "cluster.toml"
    path.write_text(f'{text}[run]\npolicy = "{policy}"\ndepth = {depth}\n')
    read = read_cluster(path)
    profiles = [read_profile(group.profile) for group in read.worker]
    plan = make_plan(read, profiles, policy_named(policy).pace)
    write_json(folder / "plan.json", plan)
    return plan


def case(folder: Path, text: str, policy: str, depth: int) -> Case:
    """Plan a cluster for a policy and a depth, and run the plan in virtual time."""
    plan = planned(folder, text, policy, depth)
    scenario = scenario_of(folder / "cluster.toml", plan_path=folder / "plan.json")
    drifts = policy_named(policy).pace.kind == "clock" and depth == 1
    result = simulate(scenario, policy, iterations=DRIFTING if drifts else ROUNDS, pipeline=depth > 1)
    return Case(policy, depth, plan.iteration_seconds, result.iteration_seconds)


def cases(clusters: int, folder: Path) -> Iterator[Case]:
    for seed in range(clusters):
        text = cluster(np.random.default_rng(seed), folder)
        for policy, depth in itertools.product(POLICIES, DEPTHS):
            if depth == 1 or policy_named(policy).needs.allows_pipeline:
                yield case(folder, text, policy, depth)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clusters", type=int, default=25)
    parser.add_argument("--docs", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = list(cases(options.clusters, Path(name)))
    rows = [["policy", "depth", "plans", "median off", "worst"]]
    for policy, depth in itertools.product(POLICIES, DEPTHS):
        offs = [one.off for one in found if (one.policy, one.depth) == (policy, depth)]
        if offs:
            middle = statistics.median(map(abs, offs))
            rows.append([policy, str(depth), str(len(offs)), f"{middle:.1%}", f"{max(offs, key=abs):+.1%}"])
    middle, worst = statistics.median(abs(one.off) for one in found), max(abs(one.off) for one in found)
    kept = middle <= MEDIAN and worst <= WORST
    text = (
        f"{machine()}. {options.clusters} clusters. Planned iteration over the run's, less 1: median "
        f"{middle:.1%}, worst {worst:.1%} (promised {MEDIAN:.0%} and {WORST:.0%}).\n\n{table(rows)}"
    )
    print(text)
    if options.docs:
        write_section("links", text)
    sys.exit(not kept)


if __name__ == "__main__":
    main()
