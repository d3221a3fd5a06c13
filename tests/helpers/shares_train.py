"""Ranks under Accelerate, transformers or Lightning with shares; prints JSON.

LIBRARY: which. STAGE: what is shared. A run with shares, one without, and ones with other shares that go on
from a checkpoint.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import trainer_checks as checks
from torch.utils.data import DataLoader

from pyps.errors import InputError

SHARES, OTHERS, SPLIT, PARTS, EPOCHS = [0.75, 0.25], [0.1, 0.9], [32, 16], 2, 3
SAVED = 4  # the step after which a checkpoint is written, at the end of an epoch
WITHIN = 6  # the same, in the midst of one
EVERY = 2  # steps, of which both are multiples
RANKS = int(os.environ.get("WORLD_SIZE", "1"))  # Lightning removes it
STAGE = int(os.environ.get("STAGE", "1"))
EVALUATED = 50  # samples, after training
# Parameters and the loss of an evaluation; the elements that this rank holds.
Run = tuple[list[torch.Tensor], float]


def _held(optimizer: Any, model: Any = None) -> float:
    """Return the elements of AdamW's state on this rank, at stage 3 of the parameters, too."""
    found = [v.numel() for values in optimizer.state.values() for v in values.values() if v.ndim]
    if STAGE == 3:
        found += [p.numel() for p in model.parameters()]
    return float(sum(found))


class Tied(torch.nn.Module):
    """Layers of which two share their weights, and blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.blocks = torch.nn.Linear(6, 6), torch.nn.ModuleList([checks.model()])
        self.last = torch.nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.blocks[0](self.last(torch.tanh(self.first(x))))
        return found


def _options(shares: list[float] | None) -> dict[str, Any]:
    stage = {"stage": STAGE} if shares is not None and STAGE != 1 else {}
    return {"plan": SPLIT, "rebalance": False, "shares": shares, **stage}


def accelerate(shares: list[float] | None, folder: str, loads: int) -> Run:
    from pyps.torch.accelerate import UnevenAccelerator

    accelerator = UnevenAccelerator(cpu=True, gradient_accumulation_steps=PARTS, **_options(shares))
    torch.manual_seed(3)
    model = Tied() if STAGE == 3 else checks.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    loader = DataLoader(
        checks.data(), batch_size=24, shuffle=True, generator=torch.Generator().manual_seed(3)
    )
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if loads:
        accelerator.load_state(folder)
    steps = loads
    for _ in range(EPOCHS - steps // SAVED):
        for inputs, targets, _ in loader:
            with accelerator.accumulate(model):
                accelerator.backward(checks.loss_of(model(inputs), targets))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            steps += accelerator.sync_gradients
        if steps == SAVED and shares == SHARES:
            accelerator.save_state(folder)
    even = accelerator.prepare(DataLoader(checks.data(EVALUATED), batch_size=16))
    with torch.no_grad():
        parts = [
            accelerator.gather_for_metrics((model(inputs) - targets).square()) for inputs, targets, _ in even
        ]
    state = accelerator.get_state_dict(model)
    return [*state.values(), torch.cat(parts).mean()], _held(optimizer.optimizer, model)


def transformers(shares: list[float] | None, folder: str, loads: int) -> Run:
    from transformers import TrainingArguments
    from transformers_train import Mean, Rows

    from pyps.torch.transformers import UnevenTrainer

    arguments = TrainingArguments(
        output_dir=folder if shares else f"{folder}-plain",
        use_cpu=True,
        per_device_train_batch_size=12,
        gradient_accumulation_steps=PARTS,
        num_train_epochs=EPOCHS,
        learning_rate=0.1,
        max_grad_norm=0.5,
        save_steps=SAVED,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = UnevenTrainer(
        Mean(), arguments, train_dataset=Rows(), eval_dataset=Rows(EVALUATED), **_options(shares)
    )
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{loads}" if loads else None)
    evaluated = torch.tensor(trainer.evaluate()["eval_loss"], dtype=torch.float64)
    state = trainer.accelerator.get_state_dict(trainer.model)
    return [*state.values(), evaluated], _held(trainer.optimizer.optimizer, trainer.model)


def _refused(folder: str) -> str:
    """Return what is said of a Trainer that generates, with stage=3."""
    from transformers import Seq2SeqTrainingArguments
    from transformers_train import Mean, Rows

    from pyps.torch.transformers import UnevenTrainer

    arguments = Seq2SeqTrainingArguments(folder, use_cpu=True, predict_with_generate=True, report_to="none")
    try:
        UnevenTrainer(Mean(), arguments, train_dataset=Rows(), shares=SHARES, stage=3).train()
    except InputError as error:
        return str(error)
    return ""


def in_lightning(shares: list[float] | None, folder: str, loads: int) -> Run:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from pyps.torch.lightning import UnevenStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.network = checks.model()

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            return checks.loss_of(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=EVERY, save_top_k=-1)
    module = Module()
    trainer = lightning.Trainer(
        strategy=UnevenStrategy(process_group_backend="gloo", **_options(shares)),
        accelerator="cpu",
        devices=RANKS,
        max_epochs=EPOCHS,
        accumulate_grad_batches=PARTS,
        gradient_clip_val=0.5,
        callbacks=[saver] if shares == SHARES else [],
        enable_checkpointing=shares == SHARES,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(checks.data(), batch_size=12, shuffle=True)
    trainer.fit(module, loader, ckpt_path=f"{folder}/step={loads}.ckpt" if loads else None)
    return checks.state_of(module.network), _held(trainer.strategy.optimizers[0])


def main() -> None:
    torch.set_num_threads(1)
    ways = {"accelerate": accelerate, "transformers": transformers, "lightning": in_lightning}
    train = ways[os.environ["LIBRARY"]]
    folder = str(Path(os.environ["FOLDER"], "states"))
    (whole, every), (first, held) = train(None, folder, 0), train(SHARES, folder, 0)
    steps = [SAVED, WITHIN] if train is in_lightning else [SAVED]
    again, others = zip(*(train(OTHERS, folder, step) for step in steps), strict=True)
    found: dict[str, Any] = {
        "off": max(float((a - b).abs().max()) for a, b in zip(whole, first, strict=True)),
        "resumed": max(float((a - b).abs().max()) for run in again for a, b in zip(whole, run, strict=True)),
        "held": [held / every, others[0] / every],
    }
    if train is transformers and STAGE == 3:
        found["refused"] = _refused(folder)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, found)
    if dist.get_rank() == 0:
        print(json.dumps(ranks))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
