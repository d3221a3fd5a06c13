"""Ranks under Lightning, as a user would write it; prints what the test compares, as JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
import trainer_checks as checks
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader

from pyps.torch.lightning import UnevenFabricStrategy, UnevenStrategy

PARTS, EACH, EPOCHS = 3, 12, 8  # two ranks: 72 samples a round, as in the other tests
SAVED = 13
RANKS = int(os.environ["WORLD_SIZE"])  # Lightning removes it
BACKEND = "gloo" if checks.ON_CPU else "nccl"


class Module(lightning.LightningModule):
    """The model, its data and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.network = checks.model()
        self.checks = checks.Checks(self.network)
        self.evaluated: list[int] = []

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        inputs, targets, samples = batch
        if self.trainer.training:
            self.checks.saw(samples)
        return checks.loss_of(self.network(inputs), targets)

    def validation_step(self, batch: Any, number: int) -> None:
        self.evaluated += batch[2].tolist()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.checks.before_step(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Emulated(Callback):
    """Gives the Rebalancer the times of an emulated device."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        balance = trainer.strategy.run.balance
        if not isinstance(balance.timer, checks.EmulatedTimer):
            balance.timer = checks.EmulatedTimer(trainer.global_rank)


def where() -> dict[str, Any]:
    """The Trainer's and Fabric's ranks: as many nodes where they share a GPU."""
    if checks.ON_CPU:
        return {"accelerator": "cpu", "devices": RANKS}
    return {"accelerator": "gpu", "devices": 1, "num_nodes": RANKS}


def train(resume: bool) -> tuple[lightning.Trainer, Module]:
    folder = os.environ["FOLDER"]
    module = Module()
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=SAVED, save_top_k=-1)
    trainer = lightning.Trainer(
        strategy=UnevenStrategy(process_group_backend=BACKEND),
        **where(),
        max_epochs=EPOCHS,
        accumulate_grad_batches=PARTS,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=EPOCHS,
        callbacks=[Emulated(), saver],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loaders = (
        DataLoader(checks.data(), batch_size=EACH, shuffle=True),
        DataLoader(checks.data(50), batch_size=7),
    )
    trainer.fit(module, *loaders, ckpt_path=f"{folder}/step={SAVED}.ckpt" if resume else None)
    return trainer, module


def train_with_fabric(plan: list[int], epochs: int, save_at: int = 0, resume: bool = False) -> checks.Checks:
    """The same loop by hand; it stops after the round at which it saves."""
    strategy = UnevenFabricStrategy(process_group_backend=BACKEND, accumulate=PARTS, plan=plan)
    fabric = lightning.Fabric(strategy=strategy, **where())
    fabric.launch()
    network = checks.model()
    found = checks.Checks(network)
    model, optimizer = fabric.setup(network, torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9))
    loader = fabric.setup_dataloaders(DataLoader(checks.data(), batch_size=EACH, shuffle=True))
    path, first, done = f"{os.environ['FOLDER']}/fabric.ckpt", 0, 0
    if resume:
        state = fabric.load(path, {"model": model, "optimizer": optimizer})
        strategy.run.load_state_dict(state["run"])
        first, done = state["epoch"], state["rounds"]
        strategy.run.skip(done)
    strategy.run.balance.timer = checks.EmulatedTimer(fabric.global_rank)
    for epoch in range(first, epochs):
        for number, (inputs, targets, samples) in enumerate(loader, 1):
            last = number % PARTS == 0
            with fabric.no_backward_sync(model, enabled=not last):
                found.saw(samples)
                fabric.backward(checks.loss_of(model(inputs), targets))
            if last:
                found.before_step(0.1)
                optimizer.step()
                optimizer.zero_grad()
                done += 1
            if last and len(found.rounds) == save_at:
                state = {"model": model, "optimizer": optimizer, "epoch": epoch, "rounds": done}
                fabric.save(path, state | {"run": strategy.run.state_dict()})
                return found
        done = 0
    return found


def main() -> None:
    torch.set_num_threads(1)
    trainer, module = train(resume=False)
    ended = checks.state_of(module.network)
    run, steps = trainer.strategy.run, trainer.global_step
    _, again = train(resume=True)
    found, resumed = module.checks, again.checks
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, module.evaluated)
    by_hand = train_with_fabric([50, 22], epochs=4)
    stopped = train_with_fabric([50, 22], epochs=4, save_at=7)  # in the third epoch, after a change
    went_on = train_with_fabric([50, 22], epochs=4, resume=True)
    file = Path(os.environ["FOLDER"], f"step={SAVED}.ckpt")
    planted = [checks.planted_runs(file, lambda: train(resume=True))]
    if trainer.global_rank == 0:
        report = {
            "planted": planted,
            "errors": found.errors,
            "rates": found.rates,
            "rounds": found.rounds,
            "steps": steps,
            "seconds": found.seconds,
            "even_seconds": found.even_seconds,
            "changes": [str(change) for change in run.balance.history],
            "evaluated": sorted({number for own in every for number in own}),
            "fabric_errors": by_hand.errors,
            "fabric_rounds": by_hand.rounds,
            "fabric_resumed": checks.same(checks.state_of(by_hand.model), checks.state_of(went_on.model)),
            "fabric_resumed_rounds": by_hand.rounds == stopped.rounds + went_on.rounds,
            "resumed": checks.same(ended, checks.state_of(again.network)),
            "resumed_rounds": resumed.rounds == found.rounds[-len(resumed.rounds) :],
        }
        print(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
