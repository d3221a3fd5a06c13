"""Local steps against uneven int8 DDP on a real link: python benchmarks/local_link.py [--seeds 3] [--save].

The target is DDP's own loss at its end, so it is known before any local step is taken, and no way of those
that are compared can move it; local steps may train more samples to get there.

Two hosts (network namespaces, so root), and between them a link that tc tbf shapes. Four processes of speeds
1 to 4, two on each host, train the model of examples/local_steps: as ranks of DDP with uneven batches, int8
with error feedback and a step each time; and with planned local steps, of which a store on the first host
takes the differences. Compared are the seconds to DDP's last loss on text that was held out. Devices are
emulated and slow, so that four of them fit a few cores; the link is slow in proportion.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from record import machine, others_share, save_table, table
from shaped import DEVICE, SERVER, Shaped, missing, shaped

from pyps.errors import NotReady, SegmentNotFound
from pyps.formats.records import read_run
from pyps.store.store import Store

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "local_steps"))
from text import CONTEXT, load
from train import Transformer, loss_of

HERE = Path(__file__).resolve().parent
Curve = list[tuple[float, int, float]]  # seconds, samples, held-out loss
PORTS, STORE = (5555, 29572), "local-link"
LEAST, SHARE = 2.2, 0.6  # times as fast, where a step of DDP is so much on the link
MORE = 1.3  # times DDP's samples, that local steps may train
LAST = 3  # DDP's last measurements, whose mean is the target: one of them varies by 1 %
HEADERS = 0.95  # of a shaped link's rate is left for what it carries
LOOK_SECONDS, DEADLINE_SECONDS = 0.2, 1500.0


@dataclass(frozen=True)
class Way:
    """Local steps in rounds: how many on average (0: none, a push a step), and the codec of what is pushed;
    parameters come in int8.

    global_batch, lr: of the local steps, where they are not those of a step each time. overlaps: workers go
    on with local steps while differences and parameters travel. nesterov: outside, as learning rate and
    momentum.
    """

    title: str
    steps: int
    codec: str = "int8"
    global_batch: int = 20
    lr: float | None = None
    overlaps: bool = False
    nesterov: tuple[float, float] = (1.0, 0.0)


WAYS = (
    Way("10 local steps", 10),
    Way("10 local steps, int4", 10, "int4"),
    Way("30 local steps, int4, global batch of 8", 30, "int4", global_batch=8, lr=0.006),
    Way("10 local steps, int4, overlapped", 10, "int4", overlaps=True),
    Way(
        "20 local steps, int4, global batch of 8, overlapped, Nesterov 0.5 outside",
        20,
        "int4",
        global_batch=8,
        lr=0.006,
        overlaps=True,
        nesterov=(0.6, 0.5),
    ),
)


def small_transformer(tensors: dict[str, NDArray[np.float32]]) -> float:
    """The held-out loss of the model of examples/local_steps, with these parameters."""
    model = Transformer()
    model.load_state_dict({name: torch.from_numpy(values) for name, values in tensors.items()})
    with torch.no_grad():
        return float(loss_of(model, load()[1]))


@dataclass(frozen=True)
class Setting:
    """Hold what trains where. speeds, hosts: of each rank. batches: of DDP. parameters: those that travel.

    script: a rank's, or a worker's. loss: held-out, of the store's tensors.
    """

    speeds: tuple[int, ...]
    hosts: tuple[int, ...]
    batches: tuple[int, ...]
    parameters: int
    script: Path
    loss: Callable[[dict[str, NDArray[np.float32]]], float]

    def sample_seconds(self, slowest: float) -> list[float]:
        """Return the seconds of each rank. slowest: at speed 1."""
        return [slowest / speed for speed in self.speeds]


FOUR = Setting(
    speeds=(1, 2, 3, 4),
    hosts=(0, 1, 1, 0),
    batches=(2, 4, 6, 8),
    parameters=sum(p.numel() for p in Transformer().parameters()),
    script=HERE / "local_link_worker.py",
    loss=small_transformer,
)


@dataclass(frozen=True)
class Found:
    """A run: its curve, the bytes of a sample that crossed the link, and the seconds of a global batch."""

    curve: Curve
    crossed: float
    step_seconds: float

    @property
    def last(self) -> float:
        """The mean of its last losses."""
        return statistics.mean(loss for _, _, loss in self.curve[-LAST:])


def every_step(
    pair: Shaped, options: argparse.Namespace, seed: int, setting: Setting = FOUR, **more: object
) -> Found:
    """DDP. more: for the script, of which the one of examples/local_steps takes no more."""
    chosen = {
        "batches": setting.batches,
        "sample_seconds": setting.sample_seconds(options.sample_seconds),
        "samples": options.samples,
        "every": options.every,
        "seed": seed,
        **more,
    }
    before = crossed(pair)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ranks = []
        for rank, host in enumerate(setting.hosts):
            group = {"RANK": str(rank), "WORLD_SIZE": str(len(setting.hosts)), "MASTER_ADDR": SERVER}
            group |= {"MASTER_PORT": "29572", "GLOO_SOCKET_IFNAME": DEVICE}
            command = [sys.executable, str(setting.script), json.dumps(chosen)]
            said = stack.enter_context((folder / f"{rank}").open("wb"))
            ranks.append(start(stack, pair, host, command, environment(options, seed) | group, said))
        wait_for(ranks)
        report = json.loads((folder / "0").read_text().splitlines()[-1])
    sent = (crossed(pair) - before) / chosen["samples"]
    return Found([tuple(point) for point in report["curve"]], sent, report["step_seconds"])


def local_steps(
    pair: Shaped, options: argparse.Namespace, way: Way, seed: int, setting: Setting = FOUR
) -> Found:
    """A run through the store, each host's ranks by a `pyps run` of its own."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        plan = planned(folder, options, way, setting)
        address = stack.enter_context(served(pair, folder))
        before, runs = crossed(pair), []
        for host in (0, 1):
            words = new_run(folder, options, host, plan, address, seed, setting)
            said = stack.enter_context((folder / f"out{host}").open("wb"))
            runs.append(start(stack, pair, host, words, environment(options, seed, way), said))
        versions = watched(runs, options.every)
        wait_for(runs)
        sent = crossed(pair) - before
        records = [
            r for host in (0, 1) for r in read_run(folder / f"run{host}") if r.samples and not r.rejected
        ]
    began = min(begin for r in records for kind, begin, _ in r.spans if kind == "compute")
    curve: Curve = []
    for version, tensors in versions:
        made = [r for r in records if r.version <= version]
        if made:
            at, samples = max(r.admitted_at for r in made) - began, sum(r.samples for r in made)
            curve.append((at, samples, setting.loss(tensors)))
    lasted, trained = max(r.admitted_at for r in records) - began, sum(r.samples for r in records)
    return Found(curve, sent / trained, lasted * sum(setting.batches) / trained)


def new_run(
    folder: Path,
    options: argparse.Namespace,
    host: int,
    plan: Path,
    address: str,
    seed: int,
    setting: Setting = FOUR,
) -> list[str]:
    """The command of a host's `pyps run`, in folder/run0 or run1.

    options: of this benchmark. plan, address: of the run and its store. seed: of the samples' order.
    """
    ranks = ",".join(str(rank) for rank, at in enumerate(setting.hosts) if at == host)
    command = [program("pyps"), "run", "--plan", str(plan), "--samples", str(options.local_samples)]
    command += ["--throttle-from", str(folder / "devices.toml"), "--connect", address]
    command += ["--ranks", ranks, "--run-dir", str(folder / f"run{host}"), "--json"]
    return [*command, "--seed", str(seed), str(setting.script)]


def planned(folder: Path, options: argparse.Namespace, way: Way, setting: Setting = FOUR) -> Path:
    """The plan of a way, by pyps-plan, and devices.toml next to it, in which links are not emulated."""
    text = f"[job]\nglobal_batch = {way.global_batch}\n[run]\n"
    text += f"local_steps = {way.steps}\n" if way.steps else ""
    text += 'policy = "hps"\ndepth = "auto"\n' if way.overlaps else 'policy = "bsp"\n'
    text += f'codec = "{way.codec}"\npull_codec = "int8"\n'
    text += f'[[shared]]\nname = "link"\nbandwidth = {options.mbit * 1e6 / 8 * HEADERS}\n'
    for rank, seconds in enumerate(setting.sample_seconds(options.sample_seconds)):
        profile = {
            "schema": "pyps.profile/1",
            "device": {"name": f"w{rank}"},
            "model": {"name": "characters", "parameters": setting.parameters},
            "points": [{"batch": b, "seconds": seconds * b} for b in (1, 4, 16, 64)],
        }
        (folder / f"w{rank}.json").write_bytes(msgspec.json.encode(profile))
        text += f'[[worker]]\nname = "w{rank}"\nprofile = "w{rank}.json"\nrequired = true\n'
        text += 'shares = ["link"]\n' if setting.hosts[rank] else ""
    (folder / "cluster.toml").write_text(text)
    (folder / "devices.toml").write_text(text.replace('shares = ["link"]\n', ""))
    plan = folder / "plan.json"
    subprocess.run(
        [program("pyps-plan"), str(folder / "cluster.toml"), "-o", str(plan)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return plan


def watched(
    runs: Sequence[subprocess.Popen[bytes]], every: int
) -> list[tuple[int, dict[str, NDArray[np.float32]]]]:
    """Versions of the store while it is trained, about every so many samples, and the last."""
    found: list[tuple[int, dict[str, NDArray[np.float32]]]] = []
    while is_running(runs):
        time.sleep(LOOK_SECONDS)
        try:
            store = Store.open(STORE)
        except (SegmentNotFound, NotReady):
            continue
        with store:
            seen = 0
            while is_running(runs):
                time.sleep(LOOK_SECONDS)
                trained = sum(rank.samples for rank in store.ranks())
                if trained >= seen + every:
                    seen = trained
                    snapshot = store.snapshot()
                    found.append((snapshot.version, snapshot.tensors))
            last = store.snapshot()
            found.append((last.version, last.tensors))
    return found


def is_running(runs: Sequence[subprocess.Popen[bytes]]) -> bool:
    return any(run.poll() is None for run in runs)


def wait_for(running: Sequence[subprocess.Popen[bytes]]) -> None:
    """Until all have ended. Ends this process if one failed."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while is_running(running):
        if any(process.poll() for process in running) or time.monotonic() > deadline:
            break
        time.sleep(LOOK_SECONDS)
    if codes := [process.poll() for process in running if process.poll() != 0]:
        sys.exit(f"a process failed, or took too long: {codes}")


def start(
    stack: ExitStack,
    pair: Shaped,
    host: int,
    command: Sequence[str],
    environment: dict[str, str],
    said: IO[bytes],
) -> subprocess.Popen[bytes]:
    """Start a process on a host; it ends with the stack. said: gets its output."""
    inside = pair.command((pair.server, pair.client)[host])
    process = subprocess.Popen([*inside, *command], stdout=said, env=environment)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return process


def environment(options: argparse.Namespace, seed: int, way: Way | None = None) -> dict[str, str]:
    lr, nesterov = (way.lr, way.nesterov) if way is not None else (None, (1.0, 0.0))
    rates = {"LR": str(lr or options.lr), "OUTER": json.dumps(nesterov)}
    return {**os.environ, "OMP_NUM_THREADS": "1", "MODEL_SEED": str(seed), **rates}


def program(name: str) -> str:
    return str(Path(sys.executable).parent / name)


@contextmanager
def served(pair: Shaped, folder: Path) -> Iterator[str]:
    """`pyps serve` on the first host; the address of its store for both."""
    keys = folder / "keys"
    listen = ["serve", STORE, "--bind", f"tcp://{SERVER}:{PORTS[0]}", "--keys", str(keys)]
    command = [*pair.command(pair.server), program("pyps"), *listen]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        server.stdout.readline()
        yield f"tcp://{SERVER}:{PORTS[0]}/{STORE}?keys={keys / 'client.key'}"
    finally:
        server.terminate()
        server.wait()


def crossed(pair: Shaped) -> int:
    """Bytes that have crossed the link, both ways."""
    return sum(pair.wire_bytes())


def until(curve: Curve, loss: float) -> tuple[float, float]:
    """Seconds and samples to a loss, between two measurements in proportion; infinite if it never is."""
    for (t0, n0, a), (t1, n1, b) in pairwise(curve):
        if b <= loss:
            part = (a - loss) / (a - b) if a > b else 1.0
            return t0 + part * (t1 - t0), n0 + part * (n1 - n0)
    return float("inf"), float("inf")


def spread(values: Sequence[float], form: str) -> str:
    """The median and the range."""
    middle, low, high = (f"{f(values):{form}}" for f in (statistics.median, min, max))
    return f"{middle} ({low} to {high})" if len(values) > 1 else middle


def compare(options: argparse.Namespace) -> tuple[bool, str]:
    """The table, and whether one way of local steps was fast enough."""
    titles = ["every step, int8", *(way.title for way in WAYS)]
    found: dict[str, list[Found]] = {title: [] for title in titles}
    with shaped(f"{options.mbit:g}mbit") as pair:
        for seed in range(options.seeds):
            found[titles[0]].append(every_step(pair, options, seed))
            for way in WAYS:
                found[way.title].append(local_steps(pair, options, way, seed))
            print(f"seed {seed} done", file=sys.stderr, flush=True)
    goals = [run.last for run in found[titles[0]]]
    compute = FOUR.batches[0] * options.sample_seconds / FOUR.speeds[0]
    share = statistics.median(1 - compute / one.step_seconds for one in found[titles[0]])
    heading = ["loss in the end", "seconds of a global batch", "samples to the target", "seconds to it"]
    rows = [["", *heading, "times as fast", "bytes per token"]]
    best = 0.0
    for title, runs in found.items():
        reached = [until(run.curve, goal) for run, goal in zip(runs, goals, strict=True)]
        every = [until(run.curve, goal)[0] for run, goal in zip(found[titles[0]], goals, strict=True)]
        faster = [slow / seconds for slow, (seconds, _) in zip(every, reached, strict=True)]
        best = max(best, statistics.median(faster))
        cells = [
            spread([run.last for run in runs], ".3f"),
            spread([run.step_seconds for run in runs], ".3f"),
            spread([samples for _, samples in reached], ".0f"),
            spread([seconds for seconds, _ in reached], ".0f"),
            spread(faster, ".2f"),
            f"{statistics.median(run.crossed for run in runs) / CONTEXT:.1f}",
        ]
        rows.append([title, *cells])
    well = best >= LEAST and share >= SHARE
    text = (
        f"{table(rows)}\n\nTargets: {', '.join(f'{goal:.3f}' for goal in goals)}, by seed. {options.mbit:g} "
        f"Mbit/s; a step of int8 DDP is {share:.0%} on the link (threshold: {SHARE:.0%}). Best: {best:.2f} "
        f"times as fast to the same loss (threshold: {LEAST:g})."
    )
    return well, text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=4000, help="of DDP")
    parser.add_argument("--every", type=int, default=200, help="samples between two measurements")
    parser.add_argument("--sample-seconds", type=float, default=0.05, help="at speed 1")
    parser.add_argument("--mbit", type=float, default=5.0, help="of the link")
    parser.add_argument("--lr", type=float, default=0.008)
    parser.add_argument("--save", action="store_true", help="keep the table in bench-out/")
    options = parser.parse_args()
    options.local_samples = round(MORE * options.samples)
    if why := missing():
        print(f"no shaped link: {why}", file=sys.stderr)
        return 2
    with others_share() as others:
        well, text = compare(options)
    print(text)
    if options.save:
        meanwhile = f"Others kept {others[0]:.0%} of it busy meanwhile."
        save_table(f"real-link-{options.mbit:g}", f"{text}\n\n{machine()}. {meanwhile}", "local-steps.md")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
