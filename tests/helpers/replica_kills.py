"""Replicas under torchft that are killed at random steps and come back: are the parameters right at the end?

    python tests/helpers/replica_kills.py --kills 20

Three replicas train in float64; each takes another time for a sample. One that is killed (SIGKILL) is started
anew. Prints the kills, whether each sample counted once an epoch, and how far the parameters of each replica
are from those of one process over the samples that were trained. Needs torchft: pip install '.[torchft]'.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import replica_jobs as jobs
import torch

SPEEDS, DEADLINE_SECONDS = (0.0005, 0.0005, 0.0015), 1500.0  # a sample
TIMEOUT = timedelta(seconds=5)
EXACT = 1e-12


def replica(number: int, folder: Path) -> None:
    """A replica's process: notes each committed step, and its parameters at the end."""
    import socket

    import torch.distributed as dist
    from torchft import Manager, Optimizer, ProcessGroupGloo

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        use_async_quorum=False,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        replica_id=f"{socket.gethostname()}-{os.getpid()}-",
    )
    again = (folder / f"{number}.jsonl").exists()  # others have the parameters
    held, inner = jobs.begun(manager, 5 if again else 0)
    optimizer = Optimizer(manager, inner)
    with (folder / f"{number}.jsonl").open("a", buffering=1) as notes:
        while not ((folder / "stop").exists() and held.epoch >= int((folder / "stop").read_text() or "0")):
            optimizer.zero_grad()
            at = [held.epoch, held.position]
            x, y = held.batch()
            found = held.model(x)
            time.sleep(SPEEDS[number] * len(x))
            held.backward(jobs.mse(found, y))
            optimizer.step()
            if held.step():
                notes.write(json.dumps([*at, list(held.split), held.mean.trained, len(x)]) + "\n")
    torch.save([p.detach() for p in held.model.parameters()], folder / f"{number}.pt")
    manager.shutdown()


def notes_of(file: Path) -> list[Any]:
    """The steps that a replica has noted; a kill may cut one."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("]")]


def steps_of(folder: Path) -> dict[tuple[int, int], Any]:
    """The committed steps by (epoch, position). Raises RuntimeError where replicas differ."""
    found: dict[tuple[int, int], Any] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for step in notes_of(file):
            same = found.setdefault((step[0], step[1]), step)
            if same[:4] != step[:4]:
                raise RuntimeError(f"replicas differ: {same} and {step}")
    return found


class Run:
    """Replicas that train in a folder until told to stop."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self.began = folder, time.monotonic()
        self._environment = {**os.environ, "TORCHFT_LIGHTHOUSE": address, "OMP_NUM_THREADS": "1"}
        self.running = [self.start(number) for number in range(len(SPEEDS))]

    def start(self, number: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(Path(__file__).resolve()), "--replica", str(number)]
        with (self.folder / f"{number}.err").open("ab") as said:
            return subprocess.Popen(
                [*command, "--folder", str(self.folder)], env=self._environment, stderr=said, stdout=said
            )

    def kill(self, number: int) -> None:
        self.running[number].send_signal(signal.SIGKILL)
        self.running[number].wait()
        self.running[number] = self.start(number)

    def there(self) -> list[int]:
        """The replicas that have noted the latest step."""
        latest: dict[int, tuple[int, int]] = {}
        for number in range(len(SPEEDS)):
            if noted := notes_of(self.folder / f"{number}.jsonl"):
                latest[number] = (noted[-1][0], noted[-1][1])
        return [number for number, at in latest.items() if at == max(latest.values())]

    def wait(self, until: Callable[[], bool]) -> None:
        """Raises RuntimeError if a replica fails, or all take too long."""
        while not until():
            late = time.monotonic() - self.began > DEADLINE_SECONDS
            if late or any(one.poll() for one in self.running):
                said = "\n".join(f"{f.name}: {f.read_text()[-3000:]}" for f in self.folder.glob("*.err"))
                raise RuntimeError(f"replicas do not go on:\n{said}")
            time.sleep(0.02)

    def end(self) -> None:
        for one in self.running:
            one.kill()
            one.wait(10)


def killed(kills: int, seed: int) -> dict[str, Any]:
    """Return what a run with so many kills was. Two replicas at least have the parameters when one of them
    dies.
    """
    from torchft.coordination import LighthouseServer

    house = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=200, quorum_tick_ms=20, heartbeat_timeout_ms=1000
    )
    luck, done = random.Random(seed), []
    with tempfile.TemporaryDirectory() as name:
        run = Run(Path(name), house.address())
        try:
            while len(done) < kills:
                wanted = len(steps_of(run.folder)) + luck.randint(2, 9)
                run.wait(lambda: len(steps_of(run.folder)) >= wanted and len(run.there()) > 1)  # noqa: B023
                time.sleep(luck.random() * 0.05)  # anywhere in a step
                victim = luck.choice(run.there())
                done.append(f"replica {victim} in step {len(steps_of(run.folder))}")
                run.kill(victim)
            run.wait(lambda: len(run.there()) == len(SPEEDS))
            (run.folder / "stop").write_text(str(max(steps_of(run.folder))[0] + 3))
            run.wait(lambda: all(one.poll() is not None for one in run.running))
        finally:
            run.end()
            house.shutdown()
        return {"kills": done, **judged(run.folder), "seconds": time.monotonic() - run.began}


def judged(folder: Path) -> dict[str, Any]:
    """Return whether each sample counted once an epoch, and the worst error of a replica's parameters."""
    steps = [step for _, step in sorted(steps_of(folder).items())]
    position = epoch = 0
    for step in steps:
        if step[:2] != [epoch, position] or sum(step[2]) != jobs.B:
            raise RuntimeError(f"{step} is not the one at {epoch}, {position}")
        position += step[3]
        epoch, position = (epoch + 1, 0) if position == jobs.SAMPLES else (epoch, position)
    right = torch.cat([p.flatten() for p in jobs.alone(steps)])
    errors = []
    for file in sorted(folder.glob("*.pt")):
        own = torch.cat([p.flatten() for p in torch.load(file, weights_only=True)])
        errors.append(float((own - right).norm() / right.norm()))
    replicas = sorted({len(step[2]) for step in steps})
    return {"steps": len(steps), "epochs": epoch, "replicas": replicas, "errors": errors}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replica", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.replica is not None:
        replica(options.replica, options.folder)
        return
    found = killed(options.kills, options.seed)
    print(*found["kills"], sep="\n")
    print(
        f"{len(found['kills'])} kills in {found['steps']} steps of {found['replicas']} replicas, "
        f"{found['epochs']} epochs of each sample once, {found['seconds']:.0f} s; parameters off by "
        + ", ".join(f"{error:.1e}" for error in found["errors"])
    )
    sys.exit(max(found["errors"], default=1.0) > EXACT)


if __name__ == "__main__":
    main()
