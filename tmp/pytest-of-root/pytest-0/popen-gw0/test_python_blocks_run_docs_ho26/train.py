# train.py
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import pyps.torch
from pyps.torch import Rebalancer, UnevenBatchSampler, agreed_split, weighted_hook  # new


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(2000, 16)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    sampler = UnevenBatchSampler(dataset, agreed_split(64))  # was DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_sampler=sampler)  # not sampler=
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # "cuda" with NCCL
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    hook = weighted_hook(model, sampler)  # new
    balance = Rebalancer(sampler, hook)  # new
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    state = {"hook": hook, "balance": balance}
    pyps.torch.load("checkpoints", model, optimizer, sampler, **state)
    for epoch in range(sampler.epoch, 2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            balance.step()  # new
        sampler.set_epoch(epoch + 1)
        pyps.torch.save("checkpoints", model, optimizer, sampler, **state)
        if dist.get_rank() == 0:
            print(f"loss {loss.item():.4f}", f"batches {sampler.split}", *balance.history, sep="\n")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
