"""A process of benchmarks/peers/run.py: trains the digits in one way until it is ended.

Every way has the same model, data, optimizer and emulated device: a step of b samples lasts pace * (20 + 2 b)
ms, in the forward pass. What differs from `ddp` is what a user changes to get there.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from pyps.profiler.throttle import sleep_until

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "ddp"))
from common import digits, network

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "4"))
FIXED_SECONDS, SAMPLE_SECONDS = 0.020, 0.002
BATCH, RATE, MOMENTUM, LOCAL_STEPS = 128, 0.05, 0.9, 8
TIMEOUT = timedelta(seconds=15)


class Log:
    """Writes [seconds, samples of this step, loss on all training data or null] after each step."""

    def __init__(self, model: torch.nn.Module, rank: int) -> None:
        self._model, self._rank = model, rank
        self._images, self._labels = digits()[0].tensors
        pace = float(os.environ["PACES"].split(",")[rank])
        folder = Path(os.environ["OUT"])
        self._file = open(folder / f"rank-{rank}-{os.getpid()}.jsonl", "w", buffering=1)  # noqa: SIM115

        def lasts(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            if torch.is_grad_enabled():
                seconds = pace * (FIXED_SECONDS + SAMPLE_SECONDS * len(inputs[0]))
                sleep_until(time.monotonic_ns() + round(1e9 * seconds))

        model.register_forward_pre_hook(lasts)
        self._note(0, None)

    def step(self, samples: int) -> None:
        loss = None
        if self._rank == 0:
            with torch.no_grad():
                loss = float(cross_entropy(self._model(self._images), self._labels))
        self._note(samples, loss)

    def _note(self, samples: int, loss: float | None) -> None:
        self._file.write(json.dumps([time.monotonic(), samples, loss]) + "\n")


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM)


def shares() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Equal batches of this rank's part of the data, without end, for ways without a process group."""
    data = digits()[0]
    sampler: DistributedSampler[Any] = DistributedSampler(data, WORLD, RANK, drop_last=True)
    loader = DataLoader(data, BATCH // WORLD, sampler=sampler, drop_last=True)
    for epoch in range(10**9):
        sampler.set_epoch(epoch)
        yield from loader


def ddp() -> None:
    dist.init_process_group("gloo")
    data, inner = digits()[0], network()
    log = Log(inner, RANK)
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader = DataLoader(data, BATCH // WORLD, sampler=sampler)
    model = DistributedDataParallel(inner)
    optimizer = sgd(model.parameters())
    for epoch in range(10**9):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
            log.step(len(images))


def uneven_ddp() -> None:
    from pyps.torch import uneven

    dist.init_process_group("gloo")
    data, inner = digits()[0], network()
    log = Log(inner, RANK)
    optimizer = sgd(inner.parameters())
    model, loader, step = uneven(inner, data, BATCH, optimizer=optimizer)
    for _ in range(10**9):
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            step()
            log.step(len(images))


def accelerate() -> None:
    """Its `join_uneven_inputs` has no effect without GPUs; so the last batches repeat samples."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    data, inner = digits()[0], network()
    log = Log(inner, RANK)
    loader = DataLoader(data, BATCH // WORLD, shuffle=True)
    model, optimizer, loader = accelerator.prepare(inner, sgd(inner.parameters()), loader)
    for _ in range(10**9):
        for images, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model(images), labels))
            optimizer.step()
            log.step(len(images))


def uneven_accelerate() -> None:
    from pyps.torch.accelerate import UnevenAccelerator

    accelerator = UnevenAccelerator(cpu=True)
    data, inner = digits()[0], network()
    log = Log(inner, RANK)
    loader = DataLoader(data, BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(inner, sgd(inner.parameters()), loader)
    for _ in range(10**9):
        for images, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model(images), labels))
            optimizer.step()
            log.step(len(images))


def lightning(strategy: Any = "ddp") -> None:
    import lightning as pl

    class Digits(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()
            self.log_file = Log(self.network, RANK)

        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> torch.Tensor:
            return cross_entropy(self.network(batch[0]), batch[1])

        def on_train_batch_end(self, outputs: Any, batch: Any, number: int) -> None:
            self.log_file.step(len(batch[0]))

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(digits()[0], BATCH // WORLD, shuffle=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self.parameters())

    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options: dict[str, Any] = dict.fromkeys(quiet, False)
    trainer = pl.Trainer(max_epochs=-1, devices=WORLD, accelerator="cpu", strategy=strategy, **options)
    trainer.fit(Digits())


def uneven_lightning() -> None:
    from pyps.torch.lightning import UnevenStrategy

    lightning(UnevenStrategy())


def hivemind() -> None:
    """Its defaults but for the time of matchmaking, whose 15 s are for the internet."""
    import hivemind as hm

    first = Path(os.environ["OUT"]) / "address"
    while RANK and not (first.exists() and first.read_text()):
        time.sleep(0.1)
    dht = hm.DHT(initial_peers=first.read_text().split() if RANK else [], start=True)
    if not RANK:
        first.write_text(" ".join(map(str, dht.get_visible_maddrs())))
    inner = network()
    own = BATCH // WORLD
    local = {"use_local_updates": True} if os.environ.get("LOCAL") else {}
    optimizer = hm.Optimizer(
        dht=dht,
        run_id="digits",
        batch_size_per_step=own,
        target_batch_size=BATCH * (LOCAL_STEPS if local else 1),
        params=inner.parameters(),
        optimizer=sgd,
        matchmaking_time=0.5,
        averaging_timeout=15.0,
        **local,
    )
    log = Log(inner, RANK)
    for images, labels in shares():
        optimizer.zero_grad()
        cross_entropy(inner(images), labels).backward()
        optimizer.step()
        log.step(len(images))


def torchft(outer: bool = False) -> None:
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo, LocalSGD

    inner = network()
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    optimizer = sgd(inner.parameters())
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=lambda state: inner.load_state_dict(state["model"]),
        state_dict=lambda: {"model": inner.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        replica_id=f"{socket.gethostname()}-{RANK}-",
    )
    log = Log(inner, RANK)
    # pyps' own: with DiLoCo's 0.7 and 0.9 the loss is 2.3 after 50 s.
    nesterov = torch.optim.SGD(inner.parameters(), lr=0.6, momentum=0.5, nesterov=True)
    way: Any = DiLoCo(manager, [inner], optimizer, nesterov, LOCAL_STEPS) if outer else None
    with way or LocalSGD(manager, inner, optimizer, LOCAL_STEPS):
        for images, labels in shares():
            optimizer.zero_grad()
            cross_entropy(inner(images), labels).backward()
            optimizer.step()
            log.step(len(images))


def torchft_diloco() -> None:
    torchft(outer=True)


def store() -> None:
    """pyps' store: a push a step, or local steps where the plan says so."""
    import pyps

    inner = network()
    optimizer = sgd(inner.parameters())
    with pyps.join() as worker:
        worker.attach(inner, optimizer)
        log = Log(inner, worker.rank)
        for images, labels in worker.batches(digits()[0].tensors):
            loss = cross_entropy(inner(images), labels)
            worker.backward(loss)
            worker.step(loss)
            log.step(len(images))


def begin(way: str, environment: dict[str, str]) -> None:
    """Train in this process, whose environment becomes that."""
    global RANK, WORLD
    os.environ.update(environment)
    RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    globals()[way]()


if __name__ == "__main__":
    begin(os.environ["WAY"], {})
