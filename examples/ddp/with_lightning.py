"""Uneven batches under Lightning, exactly: python with_lightning.py (it starts its own ranks)

use_distributed_sampler=False leaves the loader as it is: its sampler knows the ranks already. The loss
carries its weight (loss_scale), as Lightning's averaging expects.
"""

from __future__ import annotations

import os

import lightning
import torch
from common import accuracy, digits, network
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from pyps.torch import UnevenBatchSampler, agreed_split, loss_scale


class Digits(lightning.LightningModule):
    """The network, its data and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> torch.Tensor:
        images, labels = batch
        return cross_entropy(self.network(images), labels) * loss_scale(len(labels)).to(images.device)

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        train, _ = digits()
        # Made here, where the process group is. The last rank takes at most 16.
        last = self.trainer.global_rank == self.trainer.world_size - 1
        split = agreed_split(96, max_batch=16 if last else None)
        return DataLoader(train, batch_sampler=UnevenBatchSampler(train, split))

    def on_train_epoch_start(self) -> None:
        self.trainer.train_dataloader.batch_sampler.set_epoch(self.current_epoch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


def main() -> None:
    torch.set_num_threads(1)
    module = Digits()
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = lightning.Trainer(
        max_epochs=int(os.environ.get("EPOCHS", "5")),
        devices=2,
        strategy="ddp",
        use_distributed_sampler=False,
        accelerator="auto" if torch.cuda.device_count() > 1 else "cpu",
        **dict.fromkeys(quiet, False),
    )
    trainer.fit(module)
    if trainer.is_global_zero:
        print(f"accuracy {accuracy(module.network, digits()[1]):.1%}")


if __name__ == "__main__":
    main()
