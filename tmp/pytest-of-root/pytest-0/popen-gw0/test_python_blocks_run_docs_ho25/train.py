# train.py
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from pyps.torch import Rebalancer, UnevenBatchSampler, agreed_split, weighted_hook  # new


def main() -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    torch.manual_seed(0)
    inputs = torch.randn(2000, 16)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    sampler = UnevenBatchSampler(dataset, agreed_split(64))  # was DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2)  # not sampler=
    model = DistributedDataParallel(torch.nn.Linear(16, 1).to(device))
    hook = weighted_hook(model, sampler)  # new
    balance = Rebalancer(sampler, hook)  # new
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for epoch in range(sampler.epoch, 2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            balance.step()  # new
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.4f}", f"batches {sampler.split}", *balance.history, sep="\n")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
