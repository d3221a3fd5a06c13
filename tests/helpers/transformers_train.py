"""Ranks under transformers.Trainer, as a user would write it; prints what the test compares, as JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import trainer_checks as checks
from torch import nn
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainingArguments

from pyps.torch.transformers import UnevenTrainer

PARTS, EACH, EPOCHS = 3, 12, 8  # two ranks: 72 samples a round, as in the other tests
SAVED = 13


class Rows(Dataset[dict[str, torch.Tensor]]):
    """The samples by name."""

    def __init__(self, samples: int = checks.SAMPLES) -> None:
        self.data = checks.data(samples)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return dict(zip(("inputs", "labels", "samples"), self.data[index], strict=True))


class Mean(nn.Module):
    """A loss that is the mean over its samples: Trainer divides it by the number of micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.network = checks.model()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor, samples: torch.Tensor) -> dict[str, Any]:
        found = self.network(inputs)
        return {"loss": checks.loss_of(found, labels), "logits": samples}


class ByTargets(Mean):
    """A loss that Trainer tells the number of targets on all ranks."""

    def forward(self, inputs: Any, labels: Any, samples: Any, **more: Any) -> dict[str, Any]:
        found = self.network(inputs)
        total = more.get("num_items_in_batch")
        square = (found - labels).square().sum()
        return {"loss": square / (labels.numel() if total is None else total), "logits": samples}


class Observed(UnevenTrainer):
    """Notes what is trained."""

    checks: checks.Checks

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        self.checks.saw(inputs["samples"])
        found = super().training_step(model, inputs, num_items_in_batch)
        if self.run.balance is not None:
            timer = self.run.balance.timer
            if not isinstance(timer, checks.EmulatedTimer):
                self.run.balance.timer = checks.EmulatedTimer(self.args.process_index)  # type: ignore[assignment]
        return found


class Step(TrainerCallback):
    """Checks the gradient before it is used."""

    def __init__(self, trainer: Observed) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.trainer.checks.before_step(self.trainer.lr_scheduler.get_last_lr()[0])


def train(kind: type[Mean], resume: str | None) -> Observed:
    folder = os.environ["FOLDER"] + "/" + kind.__name__
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=checks.ON_CPU,
        per_device_train_batch_size=EACH,
        per_device_eval_batch_size=7,
        gradient_accumulation_steps=PARTS,
        num_train_epochs=EPOCHS,
        learning_rate=0.1,
        lr_scheduler_type="cosine",
        max_grad_norm=0,
        save_steps=SAVED,
        save_total_limit=3,
        logging_steps=5,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        optim="sgd",
    )
    trainer = Observed(kind(), arguments, train_dataset=Rows(), eval_dataset=Rows(50))
    trainer.checks = checks.Checks(trainer.model)
    trainer.checks.whole = lambda module, x, y: module.network(x)
    trainer.add_callback(Step(trainer))
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{SAVED}" if resume else None)
    return trainer


def report_of(kind: type[Mean]) -> dict[str, Any]:
    trainer = train(kind, None)
    again = train(kind, "checkpoint")
    found, resumed = trainer.checks, again.checks
    balance = trainer.run.balance
    assert balance is not None
    evaluated = trainer.predict(Rows(50)).predictions
    return {
        "errors": found.errors,
        "rates": found.rates,
        "rounds": found.rounds,
        "steps": trainer.state.max_steps,
        "seconds": found.seconds,
        "even_seconds": found.even_seconds,
        "changes": [str(change) for change in balance.history],
        "evaluated": [int(k) for k in evaluated],
        "resumed": checks.same(checks.state_of(trainer.model), checks.state_of(again.model)),
        "resumed_rounds": resumed.rounds == found.rounds[-len(resumed.rounds) :],
    }


def main() -> None:
    torch.set_num_threads(1)
    reports: dict[str, Any] = {kind.__name__: report_of(kind) for kind in (Mean, ByTargets)}
    folder = Path(os.environ["FOLDER"], "Mean", f"checkpoint-{SAVED}")
    planted = (folder / name for name in ("uneven.safetensors", "uneven.pt"))
    reports["planted"] = [checks.planted_runs(file, lambda: train(Mean, "checkpoint")) for file in planted]
    if dist.get_rank() == 0:
        print(json.dumps(reports))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
