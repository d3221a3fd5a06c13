"""Ranks of SFTTrainer with LoRA: how far each step's gradient of the adapter is from one process's."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import get_peft_model
from transformers import TrainerCallback

sys.path.insert(
    0, os.environ.get("FOLDER", str(Path(__file__).resolve().parents[2] / "examples" / "fine_tune"))
)
from sft import LORA, UnevenSFTTrainer, network, trainer

IGNORED = -100


class Compared(TrainerCallback):  # type: ignore[misc]
    """At each step: the gradient of the mean over all targets of all ranks, by the model alone."""

    def __init__(self, run: UnevenSFTTrainer) -> None:
        self.run, self.alone = run, get_peft_model(network(), LORA)
        self.own: list[Any] = []
        self.worst, self.steps = 0.0, 0
        step = run.training_step

        def noted(model: Any, inputs: Any, items: Any = None) -> Any:
            self.own.append(
                {name: inputs[name].clone() for name in ("input_ids", "labels", "attention_mask")}
            )
            return step(model, inputs, items)

        run.training_step = noted

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, self.own)
        self.own = []
        batches = [batch for own in every for batch in own]
        self.alone.load_state_dict(self.run.model.state_dict())
        self.alone.zero_grad()
        targets = sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)
        for batch in batches:
            self.alone(**batch, num_items_in_batch=torch.tensor(targets)).loss.backward()
        pairs = list(zip(self.run.model.parameters(), self.alone.parameters(), strict=True))
        found, right = (
            torch.cat([pair[k].grad.flatten() for pair in pairs if pair[1].grad is not None]) for k in (0, 1)
        )
        limit = 1.0  # Trainer clips
        right = right * min(1.0, limit / float(right.norm()))
        self.worst = max(self.worst, float((found - right).norm() / right.norm()))
        self.steps += 1


def main() -> None:
    run = trainer(os.environ["OUT"], plan=[22, 10], rebalance=False)
    seen = Compared(run)
    run.add_callback(seen)
    run.train()
    if dist.get_rank() == 0:
        print(f"{seen.worst:.3g} after {seen.steps} steps of {run.run.sampler.split}")


main()
dist.destroy_process_group()
