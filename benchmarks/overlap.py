"""Whether a DDP step takes what was planned, with and without gradients that travel during backward.

    python benchmarks/overlap.py [--mbit 200] [--long] [--docs]      # needs root: network namespaces

Two to four gloo ranks, each on a host (network namespace) with a shaped link to one switch. Each device's
compute is a pause, a third of it forward, spread over equal layers; the devices are unlike. Their profiles
are the steps that a rank takes by itself, without DDP. [sync] has the latency and bandwidth that two sizes of
an all-reduce show before, and the overlap and tail that follow from DDP's buckets, one a layer: the first is
ready after the forward pass and one layer's backward, and the last one is reduced when backward has ended.
Without overlap, DDP has one bucket. The plan's batches are then trained, and the median step is compared with
the plan's. A case has five timed steps, with --long nine.
With --docs the table goes to docs/results/benchmarks.md.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

import ddp
import record
from overlap_ranks import FORWARD
from shaped import DEVICE, missing, star

from pyps.formats import Cluster, Device, Job, ModelInfo, Plan, Point, Profile, SyncCost, WorkerGroup
from pyps.profiler.select import select_fit
from pyps.solver.plan import make_plan

PACES = (1.0, 1.5, 2.0, 3.0)
NEAR = 0.03  # of the planned step: the median case may be so far off
PAUSES = (0.1, 0.4, 0.8)  # seconds of compute with which a step by itself is timed
SHARES = (0.3, 1.0, 2.0)  # a device's compute in the even split, in times of the synchronisation
GLOBAL_BATCH, LAYERS = 1024, 8
STEPS, LONG_STEPS = 5, 9  # timed steps of each case


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases; 1 if the threshold is missed."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--mbit", type=float, default=200.0, help="of each host's link")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--width", type=int, default=512, help="of a layer: width^2 parameters")
    parser.add_argument("--long", action="store_true", help="more steps of each case")
    parser.add_argument("--docs", action="store_true")
    options = parser.parse_args(arguments)
    options.steps = LONG_STEPS if options.long else STEPS
    if why := missing():
        print(f"not measured: {why}")
        return 1
    with record.others_share() as others:
        rows, off = [["ranks", "batches", "overlap", "compute", "step, ms", "planned, ms", "off"]], []
        for count in options.ranks:
            for cells, apart in cases(options, count):
                rows.append(cells)
                off.append(abs(apart))
                print(*cells, flush=True)
    text = (
        f"{record.table(rows)}\n\n{options.mbit:g} Mbit/s a host, {LAYERS} layers of {options.width}^2 "
        f"parameters, {options.steps} steps a case. Off by {median(off):.1%} (median; threshold "
        f"{NEAR:.0%}), at most {max(off):.1%}. Others kept {others[0]:.0%} of the machine busy meanwhile."
    )
    print(text)
    if options.docs:
        record.write_section("overlap", f"{record.machine()}.\n\n{text}")
    return 0 if median(off) <= NEAR else 1


def cases(options: argparse.Namespace, count: int) -> list[tuple[list[str], float]]:
    """Each case of `count` ranks as a row of the table, and how far it is off the plan."""
    common = {"layers": LAYERS, "width": options.width, "steps": options.steps}
    with star(f"{options.mbit:g}mbit", count) as network:

        def launched(**chosen: Any) -> dict[str, Any]:
            hosts, more = [network.command(k) for k in range(count)], {"GLOO_SOCKET_IFNAME": DEVICE}
            chosen = {**common, "pauses": [], "seconds": {}, **chosen}
            script = "overlap_ranks.py"
            return ddp.launch("steps", chosen, hosts, network.addresses[0], script, **more)[0]

        alone = launched(pauses=PAUSES)
        links, extra = (
            alone["all_reduce"],
            median(took - p for took, p in zip(alone["alone"], PAUSES, strict=True)),
        )
        planned = {
            (overlapped, share): plan(options.width, links, (share * links[-1][1], extra), count, overlapped)
            for overlapped, share in itertools.product((True, False), SHARES)
        }
        pauses = {
            str(o): [[x - extra for x in seconds_of(planned[o, share])] for share in SHARES]
            for o in (True, False)
        }
        found = launched(seconds=pauses)
    rows = []
    for (overlapped, share), one in planned.items():
        took = found[str(overlapped)][SHARES.index(share)]
        apart = took / one.iteration_seconds - 1
        batches = " ".join(str(worker.batch) for worker in one.workers)
        figures = [f"{x * 1e3:.0f}" for x in (max(seconds_of(one)), took, one.iteration_seconds)]
        rows.append(([str(count), batches, "yes" if overlapped else "no", *figures, f"{apart:+.1%}"], apart))
    return rows


def seconds_of(plan: Plan) -> list[float]:
    """The compute of each rank in a plan."""
    return [worker.predicted_seconds for worker in plan.workers]


def plan(
    width: int,
    links: Sequence[Sequence[float]],
    compute: tuple[float, float],
    count: int,
    overlapped: bool,
) -> Plan:
    """The plan for devices of unlike pace.

    width: of a layer. links: bytes and seconds of two all-reduces. compute: seconds of a device's samples in
    the even split, on average, and those of any step. count: of ranks. overlapped: DDP has a bucket a layer,
    not one for all.
    """
    (few, soon), (many, late) = links
    passes, parts = 2 * (count - 1), 2 * (count - 1) / count
    bandwidth = parts * (many - few) / (late - soon)
    latency = max(0.0, (late - parts * many / bandwidth) / passes)
    ready = FORWARD + (1 - FORWARD) / LAYERS
    shares = {"overlap": 1 - ready, "tail": 1 / LAYERS} if overlapped else {}
    sync = SyncCost(kind="ring", bandwidth=bandwidth, latency=latency, **shares)
    paces = PACES[:count]
    a_sample = compute[0] * count / GLOBAL_BATCH / (sum(paces) / count)
    groups = [WorkerGroup(name=f"x{pace:g}", profile="", required=True) for pace in paces]
    cluster = Cluster(job=Job(global_batch=GLOBAL_BATCH), worker=groups, sync=sync)
    return make_plan(cluster, [profile(compute[1], pace * a_sample, width) for pace in paces])


def profile(fixed: float, a_sample: float, width: int) -> Profile:
    """A device that takes so many seconds a step, and so many a sample."""
    points = [Point(batch=b, seconds=fixed + a_sample * b) for b in (64, 256, 1024)]
    model = ModelInfo(name="paused", parameters=LAYERS * width**2)
    return Profile(device=Device(name="paused"), model=model, points=points, fit=select_fit(points))


if __name__ == "__main__":
    sys.exit(main())
