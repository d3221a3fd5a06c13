# train.py
import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

from pyps.torch.lightning import UnevenStrategy  # new


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = torch.nn.Linear(16, 1)

    def training_step(self, batch, number):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.network(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02)


def main() -> None:
    inputs = torch.randn(2000, 16, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    trainer = lightning.Trainer(
        strategy=UnevenStrategy(),  # was: "ddp"
        devices=2,
        max_epochs=4,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Module(), DataLoader(dataset, batch_size=16, shuffle=True))
    if trainer.is_global_zero:
        loss = trainer.callback_metrics["loss"]
        print(f"loss {loss:.4f}", f"batches {trainer.strategy.run.sampler.split}")


if __name__ == "__main__":
    main()
