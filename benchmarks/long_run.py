"""A GPT on Python's own sources and documentation, four ways, each killed and resumed five times.

    python benchmarks/long_run.py --minutes 480 [--out long-run] [--save]
    python benchmarks/long_run.py --minutes 24 --width 96 --layers 2 --sample-seconds 0.1 --save

Four emulated devices, the slowest of which takes three times as long as the fastest: DDP with equal batches,
DDP with planned ones, the store under H-PS, and local steps over an emulated link of --megabits. Each way has
a quarter of the time, in six parts; SIGKILL to all processes ends a part. --together: all at the same time,
on a machine that has cores for them. --ways runs some of them: what the others did stays in --out. Writes
curves.json, loss.png, and with --save both and the table in bench-out/.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from record import company, kept_at, machine, save_table, table
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from pyps.profiler.throttle import sleep_until

PACES, BATCH, PARTS, NOTES, HELD_OUT = (1.0, 1.4, 2.0, 3.0), 16, 6, 12, 64
LOCAL_STEPS, MOST_BYTES, RATE = 8, 20_000_000, 1e-3
START_SECONDS = 240.0  # imports and rendezvous, on a busy machine
Curve = list[tuple[float, int, float]]  # seconds, samples, held-out loss


@dataclass(frozen=True)
class Way:
    """A way to train; `run`: options of `pyps run`, where it starts it."""

    title: str
    run: tuple[str, ...] = ()
    planned: bool = True
    local: bool = False


WAYS = {
    "even": Way("DDP, equal batches", planned=False),
    "uneven": Way("DDP, planned batches"),
    "hps": Way("store, H-PS", ("--policy", "hps")),
    "local": Way("local steps over a link", ("--policy", "bsp", "--codec", "int8"), local=True),
}


class GPT(nn.Module):
    """Logits of the next byte, [n, t, 256], from bytes int64 [n, t]."""

    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(context, width)
        block = nn.TransformerEncoderLayer(
            width, width // 32, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.register_buffer(
            "mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.token(x) + self.place.weight[: x.shape[1]]
        return self.head(self.blocks(hidden, self.mask, is_causal=True))


def loss_of(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def text_of(context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(to train on, held out), int64 [n, context + 1]: the library's sources and the language's reference."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [
        library / "pydoc_data" / "topics.py",
        *sorted(library.glob("*.py")),
        *sorted(library.glob("*/*.py")),
    ]
    text = b"".join(path.read_bytes() for path in files if "site-packages" not in path.parts)[:MOST_BYTES]
    count = len(text) // (context + 1)
    parts = (
        np.frombuffer(text, np.uint8)[: count * (context + 1)].reshape(count, context + 1).astype(np.int64)
    )
    parts = parts[np.random.default_rng(0).permutation(count)]
    return torch.from_numpy(parts[HELD_OUT:]), torch.from_numpy(parts[:HELD_OUT])


class Notes:
    """Rank 0's held-out loss from time to time, into OUT/curve.jsonl."""

    def __init__(self, given: dict[str, Any], model: nn.Module, held_out: torch.Tensor) -> None:
        self._file = open(Path(os.environ["OUT"]) / "curve.jsonl", "a", buffering=1)  # noqa: SIM115
        self._model, self._held_out, self._every, self._next = model, held_out, given["note"], 0.0

    def step(self, samples: int) -> None:
        if time.time() >= self._next:
            self._next = time.time() + self._every
            with torch.no_grad():
                loss = float(loss_of(self._model, self._held_out))
            self._file.write(json.dumps([time.time(), samples, loss]) + "\n")


def train_ddp(given: dict[str, Any], model: GPT, training: torch.Tensor, held_out: torch.Tensor) -> None:
    from pyps.torch import GlobalMean, UnevenBatchSampler, load, save

    dist.init_process_group("gloo")
    rank, folder = dist.get_rank(), Path(os.environ["OUT"]) / "checkpoints"
    seconds = PACES[rank] * given["sample_seconds"]

    def lasts(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if torch.is_grad_enabled():
            sleep_until(time.monotonic_ns() + round(1e9 * seconds * len(inputs[0])))

    data = TensorDataset(training)
    sampler = UnevenBatchSampler(data, given["batches"])
    loader = DataLoader(data, batch_sampler=sampler)
    ddp = DistributedDataParallel(model)
    mean = GlobalMean(ddp, sampler)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=RATE)
    before = load(folder, ddp, optimizer, sampler, mean=mean)
    samples, begun = (before["samples"] if before else 0), time.monotonic()
    model.register_forward_pre_hook(lasts)
    notes, saved = Notes(given, model, held_out), 0
    while True:
        for (text,) in loader:
            optimizer.zero_grad()
            mean.backward(loss_of(ddp, text))
            optimizer.step()
            mean.end_step()
            samples += BATCH
            if rank == 0:
                notes.step(samples)
            due = torch.tensor(int((time.monotonic() - begun) / given["save"]))
            dist.broadcast(due, 0)
            if int(due) > saved:
                saved = int(due)
                save(folder, ddp, optimizer, sampler, mean=mean, samples=samples)


def train_store(given: dict[str, Any], model: GPT, training: torch.Tensor, held_out: torch.Tensor) -> None:
    import pyps

    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    with pyps.join() as worker:
        worker.attach(model, optimizer)
        notes = Notes(given, model, held_out) if worker.rank == 0 else None
        for (text,) in worker.batches((training,)):
            position = worker.claim.first  # of all workers' samples
            loss = loss_of(model, text)
            worker.backward(loss)
            worker.step(loss)
            if notes is not None:
                notes.step(position)


def rank_main() -> None:
    """Run a process of a way."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    given = json.loads(os.environ["LONG_RUN"])
    model = GPT(given["width"], given["layers"], given["context"])
    (train_store if WAYS[given["way"]].run else train_ddp)(given, model, *text_of(given["context"]))


def planned(folder: Path, way: Way, options: argparse.Namespace, parameters: int) -> Path:
    """The plan of the emulated devices, whose times are known."""
    lines = [f"[job]\nglobal_batch = {BATCH}"]
    for k, pace in enumerate(PACES):
        points = [{"batch": b, "seconds": pace * options.sample_seconds * b} for b in (1, 4, BATCH)]
        profile = {"schema": "pyps.profile/1", "device": {"name": f"d{k}"}, "points": points}
        profile["model"] = {"name": "gpt", "parameters": parameters}
        (folder / f"d{k}.json").write_text(json.dumps(profile))
        link = f"\nbandwidth = {options.megabits * 125e3:.0f}\nlatency = 0.02" if way.local else ""
        lines.append(f'[[worker]]\nname = "d{k}"\nprofile = "d{k}.json"{link}')
    (folder / "cluster.toml").write_text("\n".join(lines) + "\n")
    steps = ["--local-steps", str(LOCAL_STEPS)] if way.local else []
    command = [sys.executable, "-m", "pyps", "plan", "cluster.toml", *steps, "-o", "plan.json"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return folder / "plan.json"


def start(key: str, folder: Path, env: dict[str, str], batches: list[int]) -> list[subprocess.Popen[bytes]]:
    """The processes of a part; it goes on from the part before."""
    way, script = WAYS[key], str(Path(__file__).resolve())
    with open(folder / "log.txt", "ab") as log:
        if not way.run:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = str(probe.getsockname()[1])
            env = env | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(len(batches))}
            return [
                subprocess.Popen([sys.executable, script], env=env | {"RANK": str(k)}, stdout=log, stderr=log)
                for k in range(len(batches))
            ]
        run = folder / "run"
        command = [sys.executable, "-m", "pyps", "run"]
        if (run / "checkpoints").exists():
            command += ["--resume", str(run)]
        else:
            shutil.rmtree(run, ignore_errors=True)
            command += ["--plan", str(folder / "plan.json"), "--throttle-from", str(folder / "cluster.toml")]
            command += ["--samples", "100000000", "--run-dir", str(run), *way.run]
            command += ["--checkpoint-every", f"{json.loads(env['LONG_RUN'])['save']:.0f}s"]
        return [subprocess.Popen([*command, script], env=env, stdout=log, stderr=log)]


def kill(processes: list[subprocess.Popen[bytes]]) -> None:
    """SIGKILL to all, but to the guard of a run, which removes the store's memory."""
    those = [psutil.Process(p.pid) for p in processes if p.poll() is None]
    those += [
        child
        for p in those
        for child in p.children(recursive=True)
        if "guard" not in " ".join(child.cmdline())
    ]
    for process in those:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    for p in processes:
        p.wait()


def check(key: str, folder: Path, processes: list[subprocess.Popen[bytes]], until: float) -> None:
    """Sleep a little. Raises SystemExit where a process has ended, or nothing was noted until then."""
    if time.monotonic() > until or any(p.poll() is not None for p in processes):
        sys.exit(f"{key}: a process ended, or never trained:\n{(folder / 'log.txt').read_text()[-2000:]}")
    time.sleep(0.2)


def run_way(key: str, options: argparse.Namespace) -> Curve:
    folder = (options.out / key).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    parameters = sum(p.numel() for p in GPT(options.width, options.layers, options.context).parameters())
    plan = json.loads(planned(folder, WAYS[key], options, parameters).read_text())
    even = [BATCH // len(PACES)] * len(PACES)
    batches = [worker["batch"] for worker in plan["workers"]] if WAYS[key].planned else even
    part = 60 * options.minutes / len(WAYS) / PARTS
    names = ("width", "layers", "context", "sample_seconds")
    given = {name: getattr(options, name) for name in names} | {"way": key, "batches": batches}
    given |= {"note": part / NOTES, "save": max(2.0, part / 4)}
    env = os.environ | {"OUT": str(folder), "LONG_RUN": json.dumps(given), "OMP_NUM_THREADS": "1"}
    began, file = time.time(), folder / "curve.jsonl"
    for _ in range(PARTS):
        noted = file.stat().st_size if file.exists() else 0
        processes = start(key, folder, env, batches)
        try:
            until = time.monotonic() + START_SECONDS
            while not file.exists() or file.stat().st_size == noted:
                check(key, folder, processes, until)
            until = time.monotonic() + part
            while time.monotonic() < until:
                check(key, folder, processes, math.inf)
        finally:
            kill(processes)
    lines = (folder / "curve.jsonl").read_text().splitlines()
    return [(at - began, samples, loss) for at, samples, loss in map(json.loads, lines)]


def summary(curves: dict[str, Curve], options: argparse.Namespace, others: str) -> str:
    """Each way's samples and loss at its end, and the seconds to what equal batches reached."""
    goal = min(loss for _, _, loss in curves["even"]) if "even" in curves else 0.0
    rows = [["", "samples", "held-out loss", f"seconds to {goal:.3f}"]]
    for key, curve in curves.items():
        to = next((f"{at:.0f}" for at, _, loss in curve if loss <= goal), "not reached")
        rows.append([WAYS[key].title, f"{curve[-1][1]:,}", f"{curve[-1][2]:.3f}", to])
    model = GPT(options.width, options.layers, options.context)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    each = f"{options.minutes / len(WAYS):.3g} minutes a way, each killed five times"
    ran = f"{size:.1f} million parameters, {each}"
    return f"{table(rows)}\n\n{ran}; {machine()}{others}"


def draw(path: Path, curves: dict[str, Curve]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
    looks = (("0.6", "--"), ("0.0", "-"), ("0.3", ":"), ("0.4", "-."))
    for (key, curve), (grey, style) in zip(curves.items(), looks, strict=False):
        for k, axis in enumerate(axes):
            axis.plot([p[k] for p in curve], [p[2] for p in curve], style, color=grey, label=WAYS[key].title)
    shown = [loss for curve in curves.values() for at, _, loss in curve if at > curve[-1][0] / 10]
    axes[0].set_ylim(top=1.05 * max(shown))  # what comes before falls too steeply to tell ways apart
    axes[0].set_xlabel("seconds, restarts included")
    axes[1].set_xlabel("samples")
    axes[0].set_ylabel("held-out loss, nats a byte")
    axes[0].legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=480.0, help="of all ways together")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--together", action="store_true", help="the ways at the same time")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--context", type=int, default=64, help="bytes")
    parser.add_argument("--sample-seconds", type=float, default=1.0, help="of the fastest device")
    parser.add_argument("--megabits", type=float, default=20.0, help="a second, of the link of local steps")
    parser.add_argument("--out", type=Path, default=Path("long-run"))
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    file, others = options.out / "curves.json", company()
    curves: dict[str, Curve] = json.loads(file.read_text()) if file.exists() else {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    keys = [key for key in options.ways.split(",") if key]
    with ThreadPoolExecutor(len(keys) if options.together and keys else 1) as pool:
        for key, curve in zip(keys, pool.map(lambda key: run_way(key, options), keys), strict=True):
            curves[key] = curve
            curves = {k: curves[k] for k in WAYS if k in curves}
            file.write_text(json.dumps(curves))
    text = summary(curves, options, others)
    print(text)
    draw(options.out / "loss.png", curves)
    if options.save:
        save_table("long-run", text, "peers.md")
        shutil.copy(options.out / "loss.png", kept_at("long-run.png"))
    return 0


if __name__ == "__main__":
    if "LONG_RUN" in os.environ:
        rank_main()
    else:
        raise SystemExit(main())
