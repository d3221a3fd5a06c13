"""kill -9 under local steps on a shaped link, and resume: python benchmarks/local_kill.py [--docs].

The hosts, devices and model of local_link.py, int8 both ways, a checkpoint at every third version. Three
runs of the same samples: one left alone; one of which a worker on the far host is killed, which its launcher
starts again; one that is killed whole, with both launchers, all workers, the server and its memory, and
resumed on both hosts. Each must end with all samples trained once, and near the loss of the run left alone
on text that was held out; the resumed one with the same bits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from local_link import (
    DEADLINE_SECONDS,
    FOUR,
    LOOK_SECONDS,
    Setting,
    Way,
    environment,
    new_run,
    planned,
    program,
    served,
    start,
    wait_for,
)
from record import table, write_section
from safetensors.torch import load_file
from shaped import Shaped, missing, shaped

from pyps.checkpoint.folder import newest_checkpoint
from pyps.errors import InputError
from pyps.formats.records import read_run

WAY = Way("10 local steps", 10)
FAR = 1  # the host
KILLED_WORKER = "a far worker killed"  # its samples are trained in another order
NEAR = 0.02  # of the loss


@dataclass(frozen=True)
class Ended:
    """A run's loss in the end, its weights, and the samples in them, as the store counted."""

    loss: float
    weights: dict[str, torch.Tensor]
    samples: int


class Hosts:
    """A run on both hosts, in a folder: started, killed, resumed."""

    def __init__(
        self, pair: Shaped, folder: Path, options: argparse.Namespace, way: Way = WAY, setting: Setting = FOUR
    ) -> None:
        self.pair, self.folder, self.options = pair, folder, options
        self.way, self.setting = way, setting
        self.plan = planned(folder, options, way, setting)

    def begin(self, stack: ExitStack, *, resume: bool = False) -> list[subprocess.Popen[bytes]]:
        """Start the server and both launchers; the launchers, by host."""
        address = stack.enter_context(served(self.pair, self.folder))
        runs = []
        for host in (0, 1):
            command = new_run(self.folder, self.options, host, self.plan, address, 0, self.setting)
            command[-1:-1] = ["--checkpoint-every", "3", "--round-timeout", "60"]
            if resume:
                run = str(self.folder / f"run{host}")
                command = [program("pyps"), "run", "--resume", run, "--connect", address, "--json"]
            said = stack.enter_context((self.folder / f"out{host}").open("ab"))
            runs.append(start(stack, self.pair, host, command, environment(self.options, 0, self.way), said))
        return runs

    def wait_until_trained(self, samples: int) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(InputError, OSError):
                found = [r for host in (0, 1) for r in read_run(self.folder / f"run{host}")]
                if sum(r.samples for r in found if not r.rejected) >= samples:
                    return
            time.sleep(LOOK_SECONDS)
        sys.exit("the run was not trained that far")

    def ended(self) -> Ended:
        weights = load_file(self.folder / "run0" / "model.safetensors")
        loss = self.setting.loss({name: value.numpy() for name, value in weights.items()})
        newest = newest_checkpoint(self.folder / "run0")
        assert newest is not None
        state = json.loads((newest / "checkpoint.json").read_text())["state"]
        open_ranges = sum(end - begin for begin, end in state["ranges"])
        return Ended(loss, weights, state["samples_assigned"] - state["samples_dropped"] - open_ranges)


def left_alone(hosts: Hosts) -> None:
    with ExitStack() as stack:
        wait_for(hosts.begin(stack))


def killed_worker(hosts: Hosts) -> None:
    """kill -9 of a worker on the far host, in the middle."""
    with ExitStack() as stack:
        runs = hosts.begin(stack)
        hosts.wait_until_trained(hosts.options.samples // 2)
        launcher = psutil.Process(runs[FAR].pid)
        workers = [
            c for c in launcher.children(recursive=True) if hosts.setting.script.name in str(c.cmdline())
        ]
        kill(workers[:1])
        wait_for(runs)


def killed_whole(hosts: Hosts) -> None:
    """kill -9 of everything, in the middle; then the store's memory is gone too, and both hosts resume."""
    with ExitStack() as stack:
        runs = hosts.begin(stack)
        hosts.wait_until_trained(hosts.options.samples // 2)
        own = psutil.Process()
        kill([c for c in own.children() if c.pid in {run.pid for run in runs} or "serve" in c.cmdline()])
    for segment in Path(os.environ["PYPS_SHM_DIR"]).iterdir():
        segment.unlink()
    with ExitStack() as stack:
        wait_for(hosts.begin(stack, resume=True))


def kill(processes: Sequence[psutil.Process]) -> None:
    """SIGKILL, and to all that they have started."""
    victims = [v for p in processes for v in (p, *p.children(recursive=True))]
    for victim in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    psutil.wait_procs(victims, timeout=30)


WAYS = {"left alone": left_alone, KILLED_WORKER: killed_worker, "all killed, resumed": killed_whole}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--sample-seconds", type=float, default=0.02, help="at speed 1")
    parser.add_argument("--mbit", type=float, default=100.0, help="of the link")
    parser.add_argument("--lr", type=float, default=0.008)
    parser.add_argument("--docs", action="store_true", help="write the table to local-steps.md")
    options = parser.parse_args()
    options.local_samples = options.samples
    if why := missing():
        print(f"no shaped link: {why}", file=sys.stderr)
        return 2
    found: dict[str, Ended] = {}
    with tempfile.TemporaryDirectory() as folder, shaped(f"{options.mbit:g}mbit") as pair:
        for title, way in WAYS.items():
            place = Path(folder) / title.replace(" ", "-")
            os.environ["PYPS_SHM_DIR"] = str(place / "shm")
            (place / "shm").mkdir(parents=True)
            hosts = Hosts(pair, place, options)
            way(hosts)
            found[title] = hosts.ended()
    alone = found["left alone"]
    rows, well = [["", "held-out loss", "samples", "same bits"]], True
    for title, end in found.items():
        same = all(torch.equal(end.weights[name], value) for name, value in alone.weights.items())
        well &= end.samples == options.samples and abs(end.loss / alone.loss - 1.0) <= NEAR
        well &= same or title == KILLED_WORKER
        rows.append([title, f"{end.loss:.4f}", str(end.samples), "yes" if same else "no"])
    print(table(rows))
    if options.docs:
        write_section("killed", table(rows), "local-steps.md")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
