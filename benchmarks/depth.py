"""Does a deeper pipeline pay where the planner says so? python benchmarks/depth.py [--runs 3]

Two workers of a plan train under hps over a link of a known bandwidth and latency each: `pyps serve`, and
`pyps run --connect` through a relay that makes the link. The planner is asked for the best depth, then for
depth 2; each plan is run, and the median of its iterations is compared with its prediction and with virtual
time. The profiles state times, and each worker's throttle keeps them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from delayed import DelayedLink
from record import table

from pyps.formats import Plan, read_plan
from pyps.simulate import scenario_of, simulate

PYPS = str(Path(sys.executable).parent / "pyps")
WORKERS, BATCH, ITERATIONS = 2, 8, 50
PARAMETERS = 250_000  # 1 MB each way
BANDWIDTH, LATENCY = 20e6, 0.1  # bytes per second, seconds one way
STEP_SECONDS = 0.15
WITHIN = 0.10  # of the prediction

CLUSTER = """
[job]
global_batch = {batch}
[run]
policy = "hps"
{mode}
[[worker]]
name = "far"
count = {workers}
profile = "far.json"
bandwidth = {bandwidth}
latency = {latency}
required = true
"""
SCRIPT = """
import torch
import pyps

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear({width}, 500, bias=False)
worker = pyps.join()
worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
for x, y in worker.batches((torch.randn(512, {width}), torch.randn(512, 500))):
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    worker.step(loss)
worker.close()
"""


@dataclass(frozen=True)
class Outcome:
    """Seconds of an iteration: what the plan predicted, in virtual time, and of each run."""

    depth: int
    predicted: float
    simulated: float
    measured: tuple[float, ...]

    @property
    def error(self) -> float:
        """The largest relative distance of a run from the prediction."""
        return max(abs(x / self.predicted - 1) for x in self.measured)


def made_plan(folder: Path, mode: str) -> tuple[Path, Plan, float]:
    """The plan for a mode of the cluster, its file, and its iteration in virtual time."""
    points = [{"batch": b, "seconds": STEP_SECONDS * (0.5 + 0.5 * b / BATCH)} for b in (1, 2, 4, 8, 16)]
    model = {"name": "linear", "parameters": PARAMETERS}
    profile = {"schema": "pyps.profile/1", "device": {"name": "far"}, "model": model, "points": points}
    (folder / "far.json").write_text(json.dumps(profile | {"max_batch": 16}))
    cluster = folder / "cluster.toml"
    fields = {"batch": WORKERS * BATCH, "workers": WORKERS, "bandwidth": BANDWIDTH, "latency": LATENCY}
    text = CLUSTER.format(mode=mode, **fields)
    cluster.write_text(text)
    # The run's devices are emulated without their links: the relay is the link.
    (folder / "devices.toml").write_text(re.sub(r"(?m)^(bandwidth|latency) = .*\n", "", text))
    plan = folder / "plan.json"
    subprocess.run([PYPS, "plan", cluster, "-o", plan], check=True, capture_output=True)
    made = read_plan(plan)
    assert made.run is not None
    depth = max(made.mode_of(worker).depth for worker in made.workers)
    virtual = simulate(scenario_of(cluster), "hps", iterations=200, pipeline=depth)
    return plan, made, virtual.iteration_seconds


def run_once(folder: Path, plan: Path, iterations: int) -> float:
    """The median iteration of one run over the link."""
    script = folder / "train.py"
    script.write_text(SCRIPT.format(width=PARAMETERS // 500))
    store = f"depth-{os.getpid()}"
    serve = [PYPS, "serve", store, "--bind", "tcp://127.0.0.1:*", "--insecure"]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = next(line for line in server.stdout if "tcp://" in line)
            port = int(address.split("tcp://127.0.0.1:")[1].split("/")[0])
            with DelayedLink(port, LATENCY, BANDWIDTH) as link:
                command = [PYPS, "run", "--plan", plan, "--throttle-from", folder / "devices.toml", "--json"]
                command += ["--connect", f"tcp://127.0.0.1:{link.port}/{store}?insecure=1"]
                command += ["--samples", str(WORKERS * BATCH * iterations)]
                command += ["--run-dir", tempfile.mkdtemp(dir=folder), script]
                out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        finally:
            server.terminate()
    median: float = json.loads(out.stdout)["iteration_seconds"]["median"]
    return median


def outcomes(runs: int, iterations: int = ITERATIONS) -> list[Outcome]:
    """For depth 2 and for the depth that the planner chooses."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for mode in ("depth = 2", "pipeline = true"):
            plan, made, simulated = made_plan(folder, mode)
            assert made.run is not None
            depth = max(made.mode_of(worker).depth for worker in made.workers)
            measured = tuple(run_once(folder, plan, iterations) for _ in range(runs))
            found.append(Outcome(depth, made.iteration_seconds, simulated, measured))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="of each plan")
    found = outcomes(parser.parse_args().runs)
    rows = [
        [
            str(o.depth),
            f"{1e3 * o.predicted:.0f}",
            f"{1e3 * o.simulated:.0f}",
            ", ".join(f"{1e3 * x:.0f}" for x in o.measured),
            f"{100 * o.error:.1f} %",
        ]
        for o in found
    ]
    print(table([["depth", "predicted, ms", "virtual time, ms", "measured, ms", "off by at most"], *rows]))
    two, best = found
    gain = statistics.median(two.measured) / statistics.median(best.measured)
    met = best.depth > 2 and gain > 1 and max(o.error for o in found) <= WITHIN
    print(f"depth {best.depth} is {gain:.2f} times as fast as depth 2; {'met' if met else 'missed'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
