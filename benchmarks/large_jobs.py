"""How long plans of many unlike machines take, and how near the best they are proven to be.

python benchmarks/large_jobs.py

jobs    12 kinds of 2 and 64 machines, 3 kinds of 64, of which half may be taken away, with a deadline, a
        budget, or both
limits  4,096 machines of 8 kinds with a price limit, with a limit that nothing keeps, and without one
"""

from __future__ import annotations

import sys
import time
from typing import Any

import msgspec
import numpy as np
from record import table

from pyps.errors import Infeasible
from pyps.formats import Cluster, Device, Fit, ModelInfo, Plan, Point, Profile
from pyps.solver.plan import make_plan

MOST_SECONDS = 10.0


def device(luck: np.random.Generator) -> Profile:
    fit = Fit(
        kind="affine",
        fixed_seconds=float(luck.uniform(2e-3, 2e-2)),
        per_sample_seconds=float(10 ** luck.uniform(-3.5, -2)),
        trusted_min_batch=1,
        trusted_max_batch=512,
    )
    model = ModelInfo(name="m", parameters=100_000)
    point = Point(batch=1, seconds=1.0)
    return Profile(device=Device(name="d"), model=model, points=[point], fit=fit, max_batch=512)


def case(kinds: int, count: int, batch: int, **tables: Any) -> tuple[Cluster, list[Profile]]:
    """A cluster of unlike kinds; every second one may be taken away."""
    luck = np.random.default_rng(kinds * count)
    devices = [device(luck) for _ in range(kinds)]
    groups = []
    for k, one in enumerate(devices):
        assert one.fit is not None
        spot = k % 2 == 1
        price = (0.35 if spot else 1.0) * float(luck.uniform(0.8, 1.3)) * 4e-3 / one.fit.per_sample_seconds
        groups.append(
            {"name": f"g{k}", "profile": f"p{k}", "count": count, "price_per_hour": price}
            | {"preemptions_per_hour": float(luck.uniform(0.002, 0.05)) if spot else 0.0}
        )
    job = {"global_batch": batch} | tables.pop("job", {})
    spot_table = {"checkpoint_seconds": 60.0, "restart_seconds": 600.0}
    return msgspec.convert({"job": job, "worker": groups, "spot": spot_table} | tables, Cluster), devices


def planned(cluster: Cluster, profiles: list[Profile]) -> tuple[Plan | None, str, float, float]:
    """The plan, what is said of it, and the wall and CPU seconds that it took."""
    began, worked = time.perf_counter(), time.process_time()
    plan, said = None, ""
    try:
        plan = make_plan(cluster, profiles)
        said = next((w for w in plan.warnings if "at most" in w), "the best")
    except Infeasible as refusal:
        said = f"refused: {refusal.nearest}"
    return plan, said, time.perf_counter() - began, time.process_time() - worked


def main() -> int:
    rows, slow = [["case", "wall s", "CPU s", "found", "said"]], 0
    for kinds, count, batch in ((12, 2, 768), (3, 64, 3072), (12, 64, 6144)):
        target = 1e9
        plain, devices = case(kinds, count, batch, job={"target": target})
        whole = make_plan(plain, devices)
        assert whole.target is not None
        hours, price = whole.target.seconds / 3600, whole.target.price or 0.0
        bounds: dict[str, dict[str, float]] = {
            "deadline": {"deadline_hours": 2 * hours},
            "budget": {"budget": 0.8 * price},
            "both": {"deadline_hours": 3 * hours, "budget": 0.8 * price},
        }
        for name, bound in bounds.items():
            job = msgspec.structs.replace(plain.job, **bound)
            plan, said, wall, cpu = planned(msgspec.structs.replace(plain, job=job), devices)
            target_of = plan.target if plan else None
            found = f"{target_of.seconds / 3600:.4g} h, {target_of.price:.4g}" if target_of else "-"
            rows.append([f"{kinds} x {count}, {name}", f"{wall:.1f}", f"{cpu:.1f}", found, said])
            slow += cpu > MOST_SECONDS
    whole_price = sum(g.price_per_hour * g.count for g in case(8, 512, 65_536)[0].worker if g.price_per_hour)
    for name, limit in (("price limit", whole_price / 2), ("infeasible", 1e-3), ("no limit", None)):
        limits = {} if limit is None else {"limits": {"price_per_hour": limit}}
        plan, said, wall, cpu = planned(*case(8, 512, 65_536, **limits))
        found = f"{1e3 * plan.iteration_seconds:.5g} ms" if plan else "-"
        rows.append([f"8 x 512, {name}", f"{wall:.1f}", f"{cpu:.1f}", found, said])
        slow += cpu > MOST_SECONDS
    print(table(rows))
    return min(slow, 1)


if __name__ == "__main__":
    sys.exit(main())
