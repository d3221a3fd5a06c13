"""Policies on a Ray cluster of two hosts: python benchmarks/on_ray.py [--policies bsp,asp] [--save].

The hosts are network namespaces (so root) with a link of 1 Gbit/s between them, shaped by tc tbf, and a
raylet in each. Four emulated devices of the speeds of clusters/four.toml, two on each host, train the digits:
those of the first host through its shared memory, the others over the link, encrypted. Shown are the seconds
from the last worker's start to the end, and the accuracy on held-out digits.

--servers 2: the store is spread over both hosts, each with memory of its own; policies that need a whole
store are left out.
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
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from ray_token import use_ray_token
from record import machine, save_table, table
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
SERVE = {"serve": 1.0}  # what each host has for one server
EPOCHS, SEED = 8, 5
START_SECONDS = 60.0
use_ray_token()
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
PATIENT = {"max_restarts": 50, "client_timeout": 3.0}  # with servers


@contextmanager
def raylet(
    pair: Shaped, where: str, address: str, folder: str, *options: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Ray on one host, until the end. address: of the host. Its segments are in folder/address."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    command += ["--node-ip-address", address, "--object-store-memory", str(80 << 20), *options]
    path, deadline = Path(folder) / f"{address}.log", time.monotonic() + START_SECONDS
    memory = Path(folder) / address
    memory.mkdir(exist_ok=True)
    env = {**os.environ, "PYPS_SHM_DIR": str(memory)}
    with path.open("wb") as log:
        process = subprocess.Popen(pair.command(where, *command), stdout=log, stderr=log, env=env)
        try:
            while "Ray runtime started" not in path.read_text():
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"on_ray.py: no Ray at {address}: {path.read_text()}")
                time.sleep(0.2)
            yield process
        finally:
            process.terminate()
            process.wait()


def near_raylet(pair: Shaped, folder: str, *options: str) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """The cluster's head."""
    head = ("--head", "--port", str(PORT), "--include-dashboard", "false", "--num-cpus", "2")
    own = ("--temp-dir", f"{folder}/r", "--resources", json.dumps(SERVE))
    return raylet(pair, pair.server, SERVER, folder, *head, *own, *options)


def far_raylet(pair: Shaped, folder: str, *options: str) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """The other host's."""
    own = ("--num-cpus", "0", "--resources", json.dumps({"far": 2} | SERVE))
    return raylet(pair, pair.client, CLIENT, folder, "--address", f"{SERVER}:{PORT}", *own, *options)


@contextmanager
def two_hosts() -> Iterator[tuple[Shaped, str]]:
    """The namespaces with a raylet in each, and where the first one's segments are."""
    with ExitStack() as stack:
        pair = stack.enter_context(shaped(RATE))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray", dir=MEMORY))
        stack.enter_context(near_raylet(pair, folder))
        stack.enter_context(far_raylet(pair, folder))
        yield pair, f"{folder}/{SERVER}"


def make_plan(folder: str) -> None:
    """Plan the run: folder/plan.json."""
    make = [sys.executable, "-m", "pyps", "plan", str(CLUSTER), "-o", f"{folder}/plan.json"]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)


def drive(policies: list[str], folder: Path, servers: int, epochs: int) -> None:
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
        samples = epochs * data.TRAIN
        if servers > 1:
            options |= {"servers": servers, "server_resources": SERVE, "checkpoint_every": 100, **PATIENT}
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
            "undone": report.undone,
        }
        print(json.dumps(found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", help="some of them, with commas; default: all")
    parser.add_argument("--save", action="store_true", help="keep the table in bench-out/")
    parser.add_argument("--servers", type=int, default=1, help="nodes that the store is spread over")
    parser.add_argument("--drive", help=argparse.SUPPRESS)
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    policies = options.policies.split(",") if options.policies else known(options.servers)
    if options.drive:
        drive(policies, Path(options.drive), options.servers, options.epochs)
        return
    if reason := missing():
        sys.exit(f"on_ray.py: {reason}")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with two_hosts() as (pair, memory), tempfile.TemporaryDirectory() as folder:
        make_plan(folder)
        again = [sys.executable, __file__, "--drive", folder, "--policies", ",".join(policies)]
        again += ["--servers", str(options.servers)]
        env = {
            **os.environ,
            "PYPS_SHM_DIR": memory,
        }  # one server is the launcher's, whose store workers share
        done = subprocess.run(pair.command(pair.server, *again), stdout=subprocess.PIPE, text=True, env=env)
        if done.returncode:
            sys.exit("on_ray.py: the runs ended early")
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    report(found, options.servers, options.save)


def known(servers: int) -> list[str]:
    """The policies that a store on so many servers can have."""
    found = {name: kind().needs for name, kind in Policy.known.items()}
    whole = {name for name, needs in found.items() if needs.collects_pushes}
    return sorted(found if servers == 1 else found.keys() - whole)


def report(found: list[dict[str, Any]], servers: int, save: bool) -> None:
    rows = [["policy", "held-out accuracy", "s", "samples trained", "ranks over the link"]]
    for one in found:
        keys = " and ".join(key.removeprefix("rank-") for key in one["keys"])
        trained = f"{one['trained']:,} of {one['asked']:,}"
        rows.append([one["policy"], f"{100 * one['accuracy']:.1f} %", f"{one['seconds']:.0f}", trained, keys])
    over = f", {servers} servers" if servers > 1 else ""
    text = f"{machine()}; {EPOCHS} epochs, seed {SEED}, link {RATE}{over}.\n\n{table(rows)}"
    print(text)
    if save:
        save_table("on-ray" if servers == 1 else "on-ray-servers", text)


if __name__ == "__main__":
    main()
