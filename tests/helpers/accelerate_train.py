"""Ranks under Accelerate, as a user would write it; prints what the test compares, as JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import trainer_checks as checks
from torch.utils.data import DataLoader

from pyps.torch.accelerate import UnevenAccelerator

PARTS, BATCH, EPOCHS = 3, 24, 8
SAVED = 4, 1  # the epoch and the rounds of it after which a checkpoint is written


class Script:
    """A training script's objects."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.accelerator = UnevenAccelerator(cpu=checks.ON_CPU, gradient_accumulation_steps=PARTS)
        model = checks.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader = DataLoader(checks.data(), batch_size=BATCH, shuffle=True)
        self.steps = EPOCHS * -(-len(loader) // PARTS)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        self.checks = checks.Checks(self.accelerator.unwrap_model(self.model))
        self.micros: list[int] = []

    def emulate(self) -> None:
        balance = self.accelerator.run.balance
        assert balance is not None
        balance.timer = checks.EmulatedTimer(self.accelerator.process_index)  # type: ignore[assignment]

    def epoch(self, epoch: int, folder: str, skipped: int = 0) -> None:
        accelerator, loader = self.accelerator, self.loader
        if skipped:
            loader = accelerator.skip_first_batches(loader, skipped * PARTS)
        for number, (inputs, targets, samples) in enumerate(loader, 1):
            with accelerator.accumulate(self.model):
                self.checks.saw(samples)
                accelerator.backward(checks.loss_of(self.model(inputs), targets))
                if accelerator.sync_gradients:
                    self.checks.before_step(self.scheduler.get_last_lr()[0])
                    accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            if (epoch, number) == (SAVED[0], SAVED[1] * PARTS) and not skipped:
                accelerator.save_state(folder)


def main() -> None:
    torch.set_num_threads(1)
    folder = os.environ["FOLDER"]
    script = Script()
    script.emulate()
    for epoch in range(EPOCHS):
        script.epoch(epoch, folder)
    evaluation = DataLoader(checks.data(50), batch_size=14)
    evaluated = []
    loader = script.accelerator.prepare(evaluation)
    script.model.eval()
    for inputs, _, samples in loader:
        script.model(inputs)
        evaluated += script.accelerator.gather_for_metrics(samples).tolist()
    script.model.train()
    rank = script.accelerator.process_index
    again = Script()
    again.emulate()
    again.accelerator.load_state(folder)
    again.epoch(SAVED[0], folder, skipped=SAVED[1])
    for epoch in range(SAVED[0] + 1, EPOCHS):
        again.epoch(epoch, folder)
    ends = [checks.state_of(one.accelerator.unwrap_model(one.model)) for one in (script, again)]
    found = script.checks
    planted = (Path(folder) / name for name in ("custom_checkpoint_0.pkl", "uneven.safetensors"))
    said = [checks.planted_runs(file, lambda: Script().accelerator.load_state(folder)) for file in planted]
    if rank == 0:
        balance = script.accelerator.run.balance
        assert balance is not None
        report = {
            "errors": found.errors,
            "rates": found.rates,
            "rounds": found.rounds,
            "steps": script.steps,
            "seconds": found.seconds,
            "even_seconds": found.even_seconds,
            "changes": [str(change) for change in balance.history],
            "evaluated": evaluated,
            "planted": said,
            "resumed": checks.same(*ends),
            "resumed_rounds": again.checks.rounds == found.rounds[-len(again.checks.rounds) :],
        }
        print(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
