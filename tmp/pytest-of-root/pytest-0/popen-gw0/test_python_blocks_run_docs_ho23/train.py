# train.py
import torch
from torch.utils.data import DataLoader, TensorDataset

from pyps.torch.accelerate import UnevenAccelerator  # was: from accelerate import Accelerator


def main() -> None:
    cpu = not torch.cuda.is_available()
    accelerator = UnevenAccelerator(cpu=cpu, gradient_accumulation_steps=2)  # was: Accelerator(...)
    torch.manual_seed(0)
    inputs = torch.randn(2000, 16)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(dataset, batch_size=64, shuffle=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for _ in range(4):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    if accelerator.is_main_process:
        print(f"loss {loss.item():.4f}", f"batches {accelerator.run.sampler.split}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
