"""The hook and the split on DDP, each beside plain DDP in the same run.

    python benchmarks/ddp.py hook [--pairs 30]     # what the weighted hook costs at equal batches, 10 M
    parameters python benchmarks/ddp.py link [--mbit 200]     # f32 and int8 on a shaped link between two
    hosts (needs root)

`hook`: two gloo ranks on this machine; a pair is one step with plain DDP and one with the hook, in turn;
the median of the pairs' ratios with its 95 % interval by bootstrap. `link`: two network namespaces joined
by a veth pair that `tc tbf` shapes; bytes are the interface's own count; both wires train to the same loss,
over some seeds. The demo of unlike devices is examples/ddp/demo.py.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pyps.torch import weighted_hook

ME = Path(__file__).resolve()
OVERHEAD, SPEEDUP, WIRE_BYTES = 0.03, 2.0, 0.27
DEADLINE_SECONDS = 240
PORT = 29571
RAW = argparse.RawDescriptionHelpFormatter


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the two; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("hook", "link", "rank"))
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--width", type=int, default=1830, help="of the hook's model: 3 x width^2 parameters")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--mbit", type=float, default=200.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    chosen = parser.parse_args(arguments)
    if chosen.what == "rank":
        print(json.dumps(JOBS[os.environ["JOB"]](chosen)), flush=True)
        return 0
    return hook(chosen) if chosen.what == "hook" else link(chosen)


def wide(width: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def hook_rank(chosen: Any) -> dict[str, Any]:
    """Seconds of each pair: (plain, hooked)."""
    plain, hooked = (DistributedDataParallel(wide(chosen.width)) for _ in range(2))
    weighted_hook(hooked)
    draws = torch.Generator().manual_seed(dist.get_rank())
    inputs = torch.randn(chosen.batch, chosen.width, generator=draws)
    targets = torch.randint(10, (chosen.batch,), generator=draws)
    taken: list[tuple[float, float]] = []
    for number in range(chosen.pairs + 2):
        pair = {}
        for model in (plain, hooked) if number % 2 else (hooked, plain):
            model.zero_grad()
            dist.barrier()
            began = time.perf_counter()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            pair[model] = time.perf_counter() - began
        taken.append((pair[plain], pair[hooked]))
    return {"pairs": taken[2:], "parameters": sum(p.numel() for p in plain.parameters())}


def hook(chosen: Any) -> int:
    """The hook's overhead at equal batches."""
    found = launch("hook", chosen, [[], []])[0]
    ratios = [hooked / plain for plain, hooked in found["pairs"]]
    luck = random.Random(0)
    drawn = sorted(median(luck.choices(ratios, k=len(ratios))) for _ in range(2000))
    overhead, low, high = (x - 1 for x in (median(ratios), drawn[50], drawn[1949]))
    seconds = [median(column) for column in zip(*found["pairs"], strict=True)]
    size = f"{found['parameters'] / 1e6:.1f} M parameters"
    print(f"{size}, batch {chosen.batch} on each of 2 gloo ranks, {len(ratios)} pairs")
    print(f"plain DDP {seconds[0] * 1000:.1f} ms, weighted hook {seconds[1] * 1000:.1f} ms")
    print(f"overhead {overhead:+.2%} (95 % interval {low:+.2%} to {high:+.2%}; bar: {OVERHEAD:.0%})")
    return 0 if overhead <= OVERHEAD else 1


def launch(
    job: str, chosen: Any, prefixes: list[list[str]], address: str = "127.0.0.1", **more: str
) -> list[dict[str, Any]]:
    """What each rank says; rank k's command begins with prefixes[k]."""
    options = [f"--{name}={value}" for name, value in vars(chosen).items() if name != "what"]
    running = []
    for rank, prefix in enumerate(prefixes):
        environment = {
            **os.environ, "JOB": job, "RANK": str(rank), "WORLD_SIZE": str(len(prefixes)),
            "OMP_NUM_THREADS": "1", "MASTER_ADDR": address, **more, "MASTER_PORT": str(PORT),
        }  # fmt: skip
        command = [*prefix, sys.executable, str(ME), "rank", *options]
        running.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    deadline = time.monotonic() + DEADLINE_SECONDS
    try:
        while any(process.poll() is None for process in running):
            if any(process.poll() for process in running) or time.monotonic() > deadline:
                sys.exit("a rank failed, or took too long")
            time.sleep(0.2)
        said = [process.communicate()[0] for process in running]
    finally:
        for process in running:
            process.kill()
    return [json.loads(text.splitlines()[-1]) for text in said]


class Hosts:
    """Two network namespaces joined by a veth pair, each way shaped to a rate in Mbit/s."""

    def __init__(self, mbit: float) -> None:
        self.names = [f"pyps{os.getpid()}-{k}" for k in range(2)]
        self._mbit = mbit

    def __enter__(self) -> Hosts:
        a, b = self.names
        try:
            for name in self.names:
                run(f"ip netns add {name}")
            run(f"ip link add pyps0 netns {a} type veth peer name pyps0 netns {b}")
            for k, name in enumerate(self.names):
                run(f"ip -n {name} link set lo up")
                run(f"ip -n {name} addr add 10.213.7.{k + 1}/24 dev pyps0")
                run(f"ip -n {name} link set pyps0 up")
                rate = f"rate {self._mbit}mbit burst 128kb latency 100ms"
                run(f"ip netns exec {name} tc qdisc add dev pyps0 root tbf {rate}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)

    def prefixes(self) -> list[list[str]]:
        return [["ip", "netns", "exec", name] for name in self.names]


def run(command: str) -> None:
    subprocess.run(command.split(), check=True)


def link_rank(chosen: Any) -> dict[str, Any]:
    """Per wire and seed: the losses after each step, the seconds when, and the bytes that left this host."""
    told: dict[str, Any] = {}
    for wire in ("same", "int8"):
        told[wire] = [trained(chosen, wire, seed) for seed in range(chosen.seeds)]
    return told | {"torch": torchs_own()}


def trained(chosen: Any, wire: Any, seed: int) -> dict[str, Any]:
    """Uneven batches, 3 to 1, of a teacher's answers."""
    torch.manual_seed(100)
    teacher = nn.Sequential(nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 10))
    torch.manual_seed(seed)
    hidden = nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU()
    model = nn.Sequential(*hidden, nn.Linear(2048, 10))
    ddp = DistributedDataParallel(model)
    weighted_hook(ddp, wire=wire)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=5e-4)
    draws = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    batch = 12 if dist.get_rank() == 0 else 4
    losses, seconds = [], []
    dist.barrier()
    sent, began = sent_bytes(), time.monotonic()
    for _ in range(chosen.steps):
        inputs = torch.randn(batch, 256, generator=draws)
        with torch.no_grad():
            targets = teacher(inputs)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(inputs), targets)
        loss.backward()
        optimizer.step()
        seconds.append(time.monotonic() - began)
        whole = torch.tensor([float(loss.detach()) * batch / 16], dtype=torch.float64)
        dist.all_reduce(whole)
        losses.append(float(whole))
    return {"losses": losses, "seconds": seconds, "bytes": sent_bytes() - sent}


def sent_bytes() -> int:
    return int(Path("/sys/class/net/pyps0/statistics/tx_bytes").read_text())


def torchs_own() -> str:
    """What torch's own quantized hook does here."""
    from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks

    ddp = DistributedDataParallel(copy.deepcopy(nn.Linear(256, 256)))
    ddp.register_comm_hook(dist.group.WORLD, quantization_hooks.quantization_pertensor_hook)
    try:
        ddp(torch.randn(4, 256)).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][-100:]}"
    return "works"


def link(chosen: Any) -> int:
    """Seconds to the loss that f32 has at the end, and bytes."""
    with Hosts(chosen.mbit) as hosts:
        told = launch("link", chosen, hosts.prefixes(), "10.213.7.1", GLOO_SOCKET_IFNAME="pyps0")[0]
    ratio = sum(r["bytes"] for r in told["int8"]) / sum(r["bytes"] for r in told["same"])
    faster, last = [], []
    for plain, few in zip(told["same"], told["int8"], strict=True):
        goal = smooth(plain["losses"])[-1] * 1.02
        faster.append(reached(plain, goal) / reached(few, goal))
        last.append((smooth(plain["losses"])[-1], smooth(few["losses"])[-1]))
    print(f"{chosen.mbit:g} Mbit/s between two hosts, batches 12 and 4, {chosen.steps} steps")
    print("final loss of each seed, f32 and int8:", *(f"{a:.4f} {b:.4f};" for a, b in last))
    print(f"bytes of int8 over f32: {ratio:.3f} (bar: {WIRE_BYTES})")
    each = ", ".join(f"{x:.2f}" for x in faster)
    print(f"time to f32's final loss, f32 over int8: {median(faster):.2f} of {each} (bar: {SPEEDUP})")
    print(f"torch's own int8 hook on gloo: {told['torch']}")
    return 0 if ratio <= WIRE_BYTES and median(faster) >= SPEEDUP else 1


def smooth(losses: list[float]) -> list[float]:
    """The mean of the latest 5."""
    latest = (losses[max(0, k - 4) : k + 1] for k in range(len(losses)))
    return [sum(some) / len(some) for some in latest]


def reached(run_: dict[str, Any], goal: float) -> float:
    """Seconds until the smoothed loss is at the goal; infinite if it never is."""
    both = zip(smooth(run_["losses"]), run_["seconds"], strict=True)
    return next((seconds for loss, seconds in both if loss <= goal), float("inf"))


JOBS = {"hook": hook_rank, "link": link_rank}

if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    sys.exit(main())
