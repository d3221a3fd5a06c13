"""A store over two Ray nodes, of which something is killed again and again: python benchmarks/ray_kills.py.

The cluster, the workers and the data are those of `on_ray.py --servers 2`, under asp. While they train,
kill -9 takes a worker, each server, the raylet of the second host, and at last that raylet together with
all that its host had in memory; a new raylet comes at once. Shown are the seconds until every rank has taken
a whole step again, and the pushes that were undone. At the end every sample was trained. --docs: write the
table.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import on_ray
import psutil
from record import machine, table, write_section
from shaped import CLIENT, Shaped, missing, shaped

from pyps.formats.events import read_events, read_undone
from pyps.formats.records import StepRecord, read_run

POLICY, RANKS, EPOCHS = "asp", 4, 40
WAIT_SECONDS = 180.0
STEPS_BETWEEN = 3  # of every rank


class Run:
    """The run under way. out: its folder."""

    def __init__(self, pair: Shaped, folder: str) -> None:
        self.pair, self.folder, self.out = pair, folder, Path(folder) / POLICY
        script = [sys.executable, on_ray.__file__, "--drive", folder, "--policies", POLICY]
        script += ["--servers", "2", "--epochs", str(EPOCHS)]
        self.driver = subprocess.Popen(pair.command(pair.server, *script), stdout=subprocess.PIPE, text=True)

    def wait_for_steps(self, since: float, steps: int) -> None:
        """Until every rank has taken so many steps that began after this time."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            begun = [r.rank for r in self.records() if r.spans and r.spans[0][1] > since]
            if all(begun.count(rank) >= steps for rank in range(RANKS)):
                return
            if self.driver.poll() is not None or time.monotonic() > deadline:
                sys.exit("ray_kills.py: training did not go on")
            time.sleep(0.1)

    def records(self) -> list[StepRecord]:
        return read_run(self.out) if self.out.exists() else []

    def worker(self) -> list[psutil.Process]:
        """Rank 1's, on the second host."""
        joined = [e.pid for e in read_events(self.out / "run.jsonl") if e.kind == "joined" and e.rank == 1]
        return [psutil.Process(joined[-1])]

    def server(self, number: int) -> list[psutil.Process]:
        """Of the host that it says it is on."""
        host = (self.out / f"server-{number}.address").read_text().rpartition(":")[0]
        all_there = psutil.process_iter(["cmdline"])
        actors = [p for p in all_there if (p.info["cmdline"] or [""])[0].startswith("ray::StoreActor")]
        found = [p for p in actors if p.environ().get("PYPS_SHM_DIR", "").endswith(host)]
        assert len(found) == 1, f"{len(found)} servers at {host}"
        return found


def family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    one = psutil.Process(process.pid)
    return [one, *one.children(recursive=True)]


def storm(pair: Shaped, folder: str) -> tuple[list[list[str]], dict[str, Any]]:
    rows = [["kill -9 of", "s until all ranks step again", "pushes before it", "of them undone"]]
    with ExitStack() as stack:
        stack.enter_context(on_ray.near_raylet(pair, folder))
        far = stack.enter_context(on_ray.far_raylet(pair, folder))
        on_ray.make_plan(folder)
        run = Run(pair, folder)
        stack.callback(run.driver.kill)
        run.wait_for_steps(0.0, STEPS_BETWEEN)
        victims: list[tuple[str, Callable[[], list[psutil.Process]]]] = [
            ("a worker", run.worker),
            ("the second server", lambda: run.server(1)),
            ("the first server", lambda: run.server(0)),
            ("a raylet, and all of its workers", lambda: family(far)),
            ("a raylet, its host's memory lost", lambda: family(far)),
        ]
        for name, find in victims:
            before, undone = max(r.version for r in run.records()), len(read_undone(run.out))
            began = time.monotonic()
            for process in find():
                process.send_signal(signal.SIGKILL)
            if "raylet" in name:
                far.wait()
                if "lost" in name:
                    shutil.rmtree(Path(folder) / CLIENT)
                far = stack.enter_context(on_ray.far_raylet(pair, folder))
            run.wait_for_steps(began, 1)
            seconds = time.monotonic() - began
            gone = sum(one.pushes for one in read_undone(run.out)[undone:])
            rows.append([name, f"{seconds:.0f}", str(before), str(gone)])
            print(*rows[-1], sep="; ", flush=True)
            run.wait_for_steps(time.monotonic(), STEPS_BETWEEN)
        printed, _ = run.driver.communicate()
        (line,) = [line for line in printed.splitlines() if line.startswith("{")]
        return rows, json.loads(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--docs", action="store_true", help="write the table to docs/results/benchmarks.md")
    options = parser.parse_args()
    if reason := missing():
        sys.exit(f"ray_kills.py: {reason}")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with shaped(on_ray.RATE) as pair, tempfile.TemporaryDirectory(prefix="ray", dir=on_ray.MEMORY) as folder:
        rows, end = storm(pair, folder)
    whole = end["trained"] == end["asked"]
    counted = f"{end['trained']:,} of {end['asked']:,} samples are trained, {end['undone']} pushes undone"
    text = f"{machine()}; {EPOCHS} epochs, {POLICY}, link {on_ray.RATE}.\n\n{table(rows)}\n\n"
    text += f"At the end {counted}; accuracy on held-out digits {100 * end['accuracy']:.1f} %."
    print(text)
    if options.docs:
        write_section("ray-kills", text)
    sys.exit(0 if whole else 1)


if __name__ == "__main__":
    main()
