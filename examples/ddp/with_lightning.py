"""Uneven batches under Lightning, exactly: python with_lightning.py (it starts its own ranks)

UnevenStrategy stands for "ddp"; the rest is a usual script. The last rank takes at most 16 samples.
"""

from __future__ import annotations

import os

import lightning
import torch
from common import accuracy, digits, network
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from pyps.torch.lightning import UnevenStrategy


class Digits(lightning.LightningModule):
    """The network, its data and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> torch.Tensor:
        images, labels = batch
        return cross_entropy(self.network(images), labels)

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        return DataLoader(digits()[0], batch_size=48, shuffle=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


def main() -> None:
    torch.set_num_threads(1)
    module = Digits()
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = lightning.Trainer(
        max_epochs=int(os.environ.get("EPOCHS", "5")),
        devices=2,
        strategy=UnevenStrategy(max_batch=16 if os.environ.get("LOCAL_RANK") == "1" else None),
        accelerator="auto" if torch.cuda.device_count() > 1 else "cpu",
        **dict.fromkeys(quiet, False),
    )
    trainer.fit(module)
    if trainer.is_global_zero:
        print(f"accuracy {accuracy(module.network, digits()[1]):.1%}")


if __name__ == "__main__":
    main()
