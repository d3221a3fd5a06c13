"""The four systems on networks that people know: python benchmarks/networks.py [--seeds 5] [--real] [--save].

ResNet-20, a VGG and a GPT (known_networks.py) train on four unlike devices that share a server's link
(clusters/hps.toml), in virtual time with real gradients, at the learning rate that they have under `bsp`. For
each way: held-out loss after as many samples over that of `bsp` with equal batches, and the time and samples
to the loss that this one has after three fifths of its samples, over its own: medians. --real trains each
network once as processes of `pyps run`, each as fast as its emulated device, and compares the time of an
iteration and the loss with the simulation.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import msgspec
import torch
from known_networks import NETWORKS, Network, loss_of
from pipelined import Array, Coded
from record import Kept, machine, save_table, table
from safetensors.torch import load_file

from pyps.formats.records import read_run
from pyps.run import RunOptions, run
from pyps.simulate import Scenario, TorchObjective, scenario_of, simulate
from pyps.store.policies import policy_named
from pyps.tasks import TrainingTask

HERE = Path(__file__).resolve().parent
CLUSTER = HERE / "clusters" / "hps.toml"
PAGE = "networks.md"
INT8 = 0.26  # of a float's bytes: a code each, and a scale for each block
LOOKS = 40  # at the held-out loss, in a training
TARGET_AT = 0.6  # of BSP's samples: later looks differ by noise only
REAL_BATCHES = 40


class HeldOut:
    """Gradients of a network's training data, and the loss of the samples that were held out."""

    def __init__(self, network: Network, seed: int) -> None:
        model = network.model(seed)
        inputs, targets, self._inputs, self._targets = network.data()
        task = TrainingTask(model, lambda count: (inputs[:count], targets[:count]), loss_of)
        self._training = TorchObjective(task, inputs, targets, seed)
        self._held_out = TorchObjective(task, self._inputs, self._targets, seed)
        self.start, self.gradient = self._training.start, self._training.gradient

    def loss(self, w: Array) -> float:
        return self._held_out.loss(w)


@dataclass(frozen=True)
class Way:
    """A policy, with planned batches or equal ones; in a pipeline, and in int8.

    ring: as DDP: the same gradients go round a ring of links, each as fast as the server's.
    """

    title: str
    policy: str
    planned: bool = True
    depth: int = 1
    int8: bool = False
    ring: bool = False

    def scenario(self) -> Scenario:
        made = scenario_of(CLUSTER, even=not self.planned)
        if self.ring:
            n = len(made.workers)
            each_way = (n - 1) / n * made.up_bytes / made.server_bandwidth  # to reduce, and to gather
            workers = tuple(replace(w, latency=each_way) for w in made.workers)
            return replace(made, workers=workers, up_bytes=0.0, down_bytes=0.0, server_bandwidth=math.inf)
        share = INT8 if self.int8 else 1.0
        workers = tuple(replace(w, up_share=share, down_share=share) for w in made.workers)
        return replace(made, workers=workers)


EVEN = Way("BSP, equal batches", "bsp", planned=False)
WAYS = (
    EVEN,
    Way("DDP, equal batches", "bsp", planned=False, ring=True),
    Way("BOA: BSP, planned batches", "bsp"),
    Way("H-PS: planned, 2 steps under way", "hps", depth=2),
    Way("H-PS: and int8", "hps", depth=2, int8=True),
    Way("R2SP, planned batches", "r2sp"),
    Way("SaPS, equal batches", "saps", planned=False),
    Way("ASP, equal batches", "asp", planned=False),
)


Case = tuple[str, Way, int]  # network, way, seed


class Learned(msgspec.Struct, frozen=True):
    """Hold what a training came to. curve: seconds, samples and held-out loss."""

    curve: list[tuple[float, int, float]]
    seconds: float
    samples: int


def trained(case: Case) -> Learned:
    """One training in virtual time."""
    name, way, seed = case
    network = NETWORKS[name]
    scenario, objective = way.scenario(), HeldOut(network, seed)
    result = simulate(
        scenario,
        way.policy,
        iterations=network.batches,
        measure_every=network.batches * scenario.global_batch // LOOKS,
        seed=seed,
        objective=Coded(objective) if way.int8 else objective,
        lr=network.hyper,
        optimizer=network.optimizer,
        depth=way.depth,
    )
    return Learned(list(result.curve), result.seconds, result.samples)


def timed(result: Learned, case: Case) -> Learned:
    """A training by the same gradients at the same parameters, with the times of another way."""
    name, way, seed = case
    other = simulate(way.scenario(), way.policy, iterations=NETWORKS[name].batches, seed=seed)
    share = other.seconds / result.seconds
    curve = [(share * seconds, samples, loss) for seconds, samples, loss in result.curve]
    return Learned(curve, other.seconds, result.samples)


def reached(result: Learned, loss: float) -> tuple[float, float]:
    """Seconds and samples until the median of three looks was first so low; infinite: never."""
    looks = zip(result.curve, result.curve[1:], result.curve[2:], strict=False)
    smooth = ((*last[:2], statistics.median(look[2] for look in (*two, last))) for *two, last in looks)
    return next(((seconds, float(n)) for seconds, n, value in smooth if value <= loss), (math.inf, math.inf))


def compared(name: str, found: dict[Case, Learned], seeds: range) -> str:
    """A network's table."""

    def over(way: Way) -> list[str]:
        losses, times, samples = [], [], []
        for seed in seeds:
            base, other = found[name, EVEN, seed], found[name, way, seed]
            target = loss_after(base, TARGET_AT)
            pairs = zip(reached(base, target), reached(other, target), strict=True)
            (base_seconds, seconds), (base_samples, needed) = pairs
            losses.append(loss_after(other, 1.0) / loss_after(base, 1.0))
            times.append(base_seconds / seconds)
            samples.append(needed / base_samples)
        return [f"{statistics.median(figures):.2f}" for figures in (losses, times, samples)]

    rows = [["", "loss over BSP's, equal samples", "times as fast to the loss", "samples to it"]]
    rows += [[way.title, *over(way)] for way in WAYS]
    network = NETWORKS[name]
    least = statistics.median(loss_after(found[name, EVEN, s], 1.0) for s in seeds)
    count = sum(p.numel() for p in network.make().parameters())
    about = f"{network.batches} global batches; BSP's loss: {least:.3g}."
    return f"**{network.title}**, {count:,} parameters, {network.optimizer}. {about}\n\n{table(rows)}"


def loss_after(result: Learned, share: float) -> float:
    """The median of the five looks that end after this share of the samples: a single one is noisy."""
    last = next(k for k, look in enumerate(result.curve) if look[1] >= share * result.samples)
    return statistics.median(loss for _, _, loss in result.curve[last - 4 : last + 1])


@cache
def steady() -> Scenario:
    """The cluster without jitter, and without links: a throttle emulates neither."""
    made = Way("", "bsp").scenario()
    workers = tuple(replace(w, jitter=type(w.jitter)()) for w in made.workers)
    return replace(made, workers=workers, up_bytes=0.0, down_bytes=0.0, server_bandwidth=math.inf)


def run_for_real(name: str, policy: str, folder: Path) -> list[str]:
    """Train as processes, and the same in virtual time: a row of the table."""
    network, plan = NETWORKS[name], folder / "plan.json"
    planner = Path(sys.executable).parent / "pyps-plan"
    subprocess.run([str(planner), str(CLUSTER), "-o", str(plan)], check=True, capture_output=True)
    out = folder / f"{name}-{policy}"
    options = RunOptions(
        samples=REAL_BATCHES * steady().global_batch,
        policy=policy_named(policy),
        args=[name],
        run_dir=out,
        throttle_from=str(CLUSTER),
        checkpoint_every=4 * REAL_BATCHES,
    )
    report = run(plan, HERE / "networks_worker.py", options)
    virtual = simulate(
        steady(),
        policy,
        iterations=REAL_BATCHES,
        measure_every=REAL_BATCHES * steady().global_batch,
        objective=HeldOut(network, options.seed),
        lr=network.hyper,
        optimizer=network.optimizer,
    )
    model = network.model(options.seed)
    last = max((out / "checkpoints").glob("0*"), key=lambda folder: folder.name)
    model.load_state_dict(load_file(last / "model.safetensors"), strict=False)  # only what is trained
    *_, inputs, targets = network.data()
    with torch.no_grad():
        loss = float(loss_of(model(inputs), targets))
    seconds = report.iteration_seconds.mean
    samples = sum(step.samples for step in read_run(out) if step.version)
    return [
        f"{network.title}, `{policy}`",
        f"{samples}",
        f"{1e3 * seconds:.0f}",
        f"{1e3 * virtual.iteration_seconds:.0f}",
        f"{loss:.3g}",
        f"{virtual.loss:.3g}",
    ]


def all_trained(cases: list[Case], processes: int, kept: Kept) -> dict[Case, Learned]:
    """Each training, those that are kept left out."""
    names = {case: f"{case[0]}, {case[1].title}, seed {case[2]}" for case in cases}
    missing = [case for case in cases if kept.get(names[case]) is None]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for case, learned in zip(missing, pool.imap(trained, missing), strict=True):
            kept.add(names[case], msgspec.to_builtins(learned))
    return {case: msgspec.convert(kept.get(names[case]), Learned) for case in cases}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--real", action="store_true", help="train each once as processes instead")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--keep", type=Path, help="a file of what was done so far, to go on from")
    parser.add_argument("--save", action="store_true", help="keep the table in bench-out/")
    options = parser.parse_args()
    kept = Kept(options.keep)
    if options.real:
        rows = [["run", "samples", "ms a global batch: run", "simulated", "held-out loss: run", "simulated"]]
        with tempfile.TemporaryDirectory() as folder:
            for name, policy in product(options.networks, ("bsp", "hps", "r2sp", "saps")):
                if kept.get(f"{name}, {policy}") is None:
                    kept.add(f"{name}, {policy}", run_for_real(name, policy, Path(folder)))
                rows.append(kept.get(f"{name}, {policy}"))
                print(*rows[-1], sep=", ", flush=True)
        text = f"{machine()}.\n\n{table(rows)}"
    else:
        seeds = range(options.seeds)
        every = [(name, way, seed) for name in options.networks for way in WAYS for seed in seeds]
        cases = [case for case in every if not case[1].ring]
        found = all_trained(cases, options.processes, kept)
        for name, way, seed in set(every) - set(cases):
            found[name, way, seed] = timed(found[name, EVEN, seed], (name, way, seed))
        tables = [compared(name, found, seeds) for name in options.networks]
        text = "\n\n".join([f"{machine()}, {options.seeds} seeds.", *tables])
    print(text)
    if options.save:
        save_table("real" if options.real else "networks", text, PAGE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
