"""Every policy on a Ray cluster of two hosts: python benchmarks/on_ray.py [--policies bsp,asp] [--docs].

The hosts are network namespaces (so root) with a link of 1 Gbit/s between them, shaped by tc tbf, and a
raylet in each. Four emulated devices of the speeds of clusters/four.toml, two on each host, train the digits:
those of the first host through its shared memory, the others over the link, encrypted. Shown are the seconds
from the last worker's start to the end, and the accuracy on held-out digits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from record import machine, table, write_section
from safetensors.torch import load_file
from shaped import CLIENT, SERVER, Shaped, missing, shaped

import pyps.ray
from pyps.formats.events import read_events
from pyps.store.policies import Policy
from pyps.tasks.builtin import digits_cnn

ROOT = Path(__file__).resolve().parent.parent
DIGITS = ROOT / "examples" / "digits"
CLUSTER = ROOT / "benchmarks" / "clusters" / "four.toml"
PORT, RATE = 6399, "1gbit"
FAR = {"good": {"far": 1.0}, "fair": {"far": 1.0}}
EPOCHS, SEED = 8, 5
START_SECONDS = 60.0


@contextmanager
def raylet(pair: Shaped, where: str, address: str, folder: str, *options: str) -> Iterator[None]:
    """Ray on one host, until the end. address: of the host."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    command += ["--node-ip-address", address, "--object-store-memory", str(80 << 20), *options]
    path, deadline = Path(folder) / f"{address}.log", time.monotonic() + START_SECONDS
    with path.open("wb") as log:
        process = subprocess.Popen(pair.command(where, *command), stdout=log, stderr=log)
        try:
            while "Ray runtime started" not in path.read_text():
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"on_ray.py: no Ray at {address}: {path.read_text()}")
                time.sleep(0.2)
            yield
        finally:
            process.terminate()
            process.wait()


@contextmanager
def two_hosts() -> Iterator[Shaped]:
    """The namespaces with a raylet in each."""
    with ExitStack() as stack:
        pair = stack.enter_context(shaped(RATE))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray", dir="/tmp"))
        head = ("--head", "--port", str(PORT), "--include-dashboard", "false", "--num-cpus", "2")
        near = raylet(pair, pair.server, SERVER, folder, *head, "--temp-dir", f"{folder}/r")
        stack.enter_context(near)
        far = ("--address", f"{SERVER}:{PORT}", "--num-cpus", "0", "--resources", '{"far": 2}')
        stack.enter_context(raylet(pair, pair.client, CLIENT, folder, *far))
        yield pair


def drive(policies: list[str], folder: Path) -> None:
    """On the first host: a run with each policy, and a line of JSON about it."""
    import ray

    sys.path.insert(0, str(DIGITS))
    import data

    ray.init(f"{SERVER}:{PORT}", _node_ip_address=SERVER, logging_level="error", log_to_driver=False)
    deadline = time.monotonic() + START_SECONDS
    while "far" not in ray.cluster_resources():
        assert time.monotonic() < deadline, "the second host did not join"
        time.sleep(0.2)
    images, labels = data.load()[1]
    for policy in policies:
        out = folder / policy
        options: dict[str, Any] = {"policy": policy, "seed": SEED, "run_dir": out, "throttle_from": CLUSTER}
        samples = EPOCHS * data.TRAIN
        trainer = pyps.ray.Trainer(DIGITS / "train.py", folder / "plan.json", FAR, samples=samples, **options)
        report = trainer.fit(on_notice=lambda text: print(text, file=sys.stderr))
        model = digits_cnn(seed=0).model
        model.load_state_dict(load_file(out / "model.safetensors"), strict=False)
        with torch.no_grad():
            right = (model.eval()(images).argmax(1) == labels).sum().item()
        events = read_events(out / "run.jsonl")
        joined = max(e.monotonic_seconds for e in events if e.kind == "joined")
        found = {
            "policy": policy,
            "accuracy": right / len(labels),
            "seconds": events[-1].monotonic_seconds - joined,
            "trained": report.samples.trained,
            "asked": samples,
            "keys": sorted(path.stem for path in (out / "keys").glob("rank-*")),
        }
        print(json.dumps(found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", help="some of them, with commas; default: all")
    parser.add_argument("--docs", action="store_true", help="write the table to docs/results/benchmarks.md")
    parser.add_argument("--drive", help=argparse.SUPPRESS)
    options = parser.parse_args()
    policies = options.policies.split(",") if options.policies else sorted(Policy.known)
    if options.drive:
        drive(policies, Path(options.drive))
        return
    if reason := missing():
        sys.exit(f"on_ray.py: {reason}")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with two_hosts() as pair, tempfile.TemporaryDirectory() as folder:
        make = [sys.executable, "-m", "pyps", "plan", str(CLUSTER), "-o", f"{folder}/plan.json"]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        again = [sys.executable, __file__, "--drive", folder, "--policies", ",".join(policies)]
        done = subprocess.run(pair.command(pair.server, *again), stdout=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit("on_ray.py: the runs ended early")
    report([json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")], options.docs)


def report(found: list[dict[str, Any]], docs: bool) -> None:
    rows = [["policy", "held-out accuracy", "s", "samples trained", "ranks over the link"]]
    for one in found:
        keys = " and ".join(key.removeprefix("rank-") for key in one["keys"])
        trained = f"{one['trained']:,} of {one['asked']:,}"
        rows.append([one["policy"], f"{100 * one['accuracy']:.1f} %", f"{one['seconds']:.0f}", trained, keys])
    text = f"{machine()}; {EPOCHS} epochs, seed {SEED}, link {RATE}.\n\n{table(rows)}"
    print(text)
    if docs:
        write_section("on-ray", text)


if __name__ == "__main__":
    main()
