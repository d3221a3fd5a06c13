"""Uneven batches on DDP: what GlobalMean costs, what int8 saves, whether a step takes what was planned.

    python benchmarks/ddp.py [mean] [link] [devices] [--save]      # all three by default

mean: two gloo ranks on this machine with equal batches (--device cuda: one NCCL rank, larger models); a round
is one step each with plain DDP, with torch's own averaging hook and with GlobalMean, in turn. GlobalMean
walks the loss's graph and exchanges one row, so it weighs most where a step is short. The median of the
rounds' ratios with its 95 % interval by bootstrap. link: two hosts (network namespaces, so root) on a shaped
link; all wires train to the same loss, bytes are the interface's own count. devices: examples/ddp/demo.py.
With --save the tables go to bench-out/.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import record
from shaped import DEVICE, SERVER, missing, shaped

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples" / "ddp"))
OVERHEAD, SPEEDUP, WIRE_BYTES = 0.03, 2.0, 0.27
SMALL = 0.10  # the same, of a step of some 2 ms
DEADLINE_SECONDS = 240
PARTS = ("mean", "link", "devices")
# Models of the first part: name, width, batch, threshold, and how many times the rounds.
ON_CPU = (
    ("mlp", 577, 16, SMALL, 10),
    ("mlp", 577, 128, OVERHEAD, 4),
    ("mlp", 2885, 16, OVERHEAD, 1),
    ("mlp", 2885, 128, OVERHEAD, 1),
    ("convolutions", 512, 32, OVERHEAD, 1),
)
ON_GPU = (
    ("mlp", 1830, 4096, OVERHEAD, 1),
    ("torchvision:resnet50", 0, 64, OVERHEAD, 1),
    ("transformers:gpt2", 0, 16, OVERHEAD, 1),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; 1 if a threshold is missed."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="of the benchmark; all by default")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of the first part")
    parser.add_argument("--pairs", type=int, default=30, help="rounds of the first part")
    parser.add_argument("--size", type=float, default=1.0, help="of its models, relative")
    parser.add_argument("--mbit", type=float, default=200.0, help="of the link")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24, help="on the link, for each seed and wire")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args(arguments)
    kept, said = True, []
    for part in PARTS:
        if part in options.parts or not options.parts:
            with record.others_share() as others:
                well, text = {"mean": mean, "link": link, "devices": devices}[part](options)
            print(f"{text}\n\nothers kept {others[0]:.0%} of this machine busy\n", flush=True)
            said.append(f"{text}\n\nOthers kept {others[0]:.0%} of the machine busy meanwhile.")
            kept = kept and well
    if options.save:
        section = "ddp" if options.device == "cpu" else "ddp-gpu"
        record.save_table(section, "\n\n".join([f"{record.machine()}.", *said]))
    return 0 if kept else 1


def mean(options: argparse.Namespace) -> tuple[bool, str]:
    """GlobalMean's overhead at equal batches."""
    heading = [
        "model",
        "batch",
        "plain DDP, ms",
        "torch's hook",
        "GlobalMean",
        "95 % interval",
        "threshold",
    ]
    rows = [[*heading, "its thread's work"]]
    well = True
    cuda = options.device == "cuda"
    for model, width, batch, most, times in ON_GPU if cuda else ON_CPU:
        chosen = {"model": model, "width": max(16, round(width * options.size))}
        chosen["pairs"] = times * options.pairs
        more = {"batch": batch, "device": options.device}
        found = launch("mean", chosen | more, [[]] if cuda else [[], []])[0]
        seconds = found["seconds"]
        plain = [took["plain"][0] for took in seconds]
        torchs, ours = (ratios(seconds, name) for name in ("torch", "pyps"))
        low, high = interval(ours)
        name = f"{model}, {found['parameters'] / 1e6:.1f} M"
        overheads = [f"{median(torchs):+.1%}", f"{median(ours):+.1%}", f"{low:+.1%} to {high:+.1%}"]
        thread = f"{median(ratios(seconds, 'pyps', 1)):+.1%}"
        rows.append([name, str(batch), record.milliseconds(plain), *overheads, f"<= {most:.0%}", thread])
        well = well and median(ours) <= most
    setting = f"1 NCCL rank on {gpu()}" if cuda else "2 gloo ranks"
    rounds = f"{options.pairs} rounds of each, more of small models"
    return well, f"{record.table(rows)}\n\n{rounds}, {setting}, equal batches."


def gpu() -> str:
    import torch

    return torch.cuda.get_device_name()


def ratios(seconds: list[dict[str, list[float]]], name: str, which: int = 0) -> list[float]:
    """Return what a way takes over plain DDP, less 1, by round; which: 0 all seconds, 1 the thread's own."""
    return [took[name][which] / took["plain"][which] - 1 for took in seconds]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The median's 95 % interval by bootstrap."""
    luck = random.Random(0)
    drawn = sorted(median(luck.choices(values, k=len(values))) for _ in range(2000))
    return drawn[50], drawn[1949]


def link(options: argparse.Namespace) -> tuple[bool, str]:
    """Seconds to the loss that f32 has at the end, and bytes."""
    if why := missing():
        return False, f"int8 on a shaped link: not measured ({why})."
    chosen = {"seeds": options.seeds, "steps": options.steps}
    with shaped(f"{options.mbit:g}mbit") as pair:
        hosts = [pair.command(host) for host in (pair.server, pair.client)]
        reported = launch("link", chosen, hosts, SERVER, GLOO_SOCKET_IFNAME=DEVICE)[0]
    names, heading = {"same": "f32", "int8": "int8", "int4": "int4"}, ["seed"]
    heading += [f"final loss, {name}" for name in names.values()] + [
        f"s to it, {name}" for name in names.values()
    ]
    rows, faster = [[*heading, "int8, times as fast", "int4"]], {"int8": [], "int4": []}
    for seed, runs in enumerate(zip(*(reported[wire] for wire in names), strict=True)):
        losses = [smooth(run["losses"])[-1] for run in runs]
        took = [reached(run, losses[0] * 1.02) for run in runs]
        for wire, seconds in zip(faster, took[1:], strict=True):
            faster[wire].append(took[0] / seconds)
        ratios = [f"{found[-1]:.2f}" for found in faster.values()]
        rows.append([str(seed), *(f"{x:.4f}" for x in losses), *(f"{x:.1f}" for x in took), *ratios])
    sent = {wire: sum(run["bytes"] for run in reported[wire]) for wire in names}
    ratio = sent["int8"] / sent["same"]
    setting = f"{options.mbit:g} Mbit/s between two hosts, batches 12 and 4, {options.steps} steps"
    text = (
        f"{record.table(rows)}\n\n4.7 M parameters, {setting}. int8 with error feedback sends {ratio:.3f} "
        f"of f32's bytes (threshold: {WIRE_BYTES}) and is {median(faster['int8']):.2f} times as fast to its "
        f"final loss (threshold: {SPEEDUP:g}); int4 sends {sent['int4'] / sent['same']:.3f} and is "
        f"{median(faster['int4']):.2f} times as fast. Torch's int8 hook on gloo: `{reported['torch']}`."
    )
    return ratio <= WIRE_BYTES and median(faster["int8"]) >= SPEEDUP, text


def devices(options: argparse.Namespace) -> tuple[bool, str]:
    """Emulated devices, compared with their plan."""
    import demo

    found = demo.compare()
    rows = [list(demo.HEADING), *([row.name, *row.cells()] for row in found.rows)]
    return found.well, f"{record.table(rows)}\n\n{found.summary()}"


def smooth(losses: list[float]) -> list[float]:
    """The mean of the latest 5."""
    latest = (losses[max(0, k - 4) : k + 1] for k in range(len(losses)))
    return [sum(some) / len(some) for some in latest]


def reached(run: dict[str, Any], goal: float) -> float:
    """Seconds until the smoothed loss is at the goal; infinite if it never is."""
    both = zip(smooth(run["losses"]), run["seconds"], strict=True)
    return next((seconds for loss, seconds in both if loss <= goal), float("inf"))


def launch(
    job: str,
    chosen: dict[str, Any],
    hosts: list[list[str]],
    address: str = "127.0.0.1",
    script: str = "ddp_ranks.py",
    **more: str,
) -> list[dict[str, Any]]:
    """The output of each rank of a script's job, from JSON; rank k's command begins with hosts[k]."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
    common = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": address, "MASTER_PORT": port, **more}
    command = [sys.executable, str(HERE / script), job, json.dumps(chosen)]
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for rank, host in enumerate(hosts):
            environment = {**common, "RANK": str(rank), "WORLD_SIZE": str(len(hosts))}
            said = (Path(folder) / f"{rank}").open("wb")
            running.append(subprocess.Popen([*host, *command], stdout=said, env=environment))
        deadline = time.monotonic() + DEADLINE_SECONDS
        try:
            while any(process.poll() is None for process in running):
                if any(process.poll() for process in running) or time.monotonic() > deadline:
                    sys.exit(f"{job}: a rank failed, or took too long")
                time.sleep(0.1)
        finally:
            for process in running:
                process.kill()
        lines = [(Path(folder) / f"{rank}").read_text().splitlines() for rank in range(len(hosts))]
    return [json.loads(said[-1]) for said in lines]


if __name__ == "__main__":
    sys.exit(main())
