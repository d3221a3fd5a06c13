"""A recommender: sparse embeddings with an optimizer of their own, and a dense part with another."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH, EPOCHS, USERS, ITEMS, SAVE_EVERY = 32, 3, 200, 300, 4


class TwoTowers(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.users = nn.Embedding(USERS, width, sparse=True)
        self.items = nn.EmbeddingBag(ITEMS, width, mode="mean", sparse=True)
        self.dense = nn.Sequential(nn.Linear(2 * width + 4, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, user, items, features):
        return self.dense(torch.cat([self.users(user), self.items(items), features], 1)).squeeze(1)


def make_data():
    draws = torch.Generator().manual_seed(4)
    user, items = (
        torch.randint(USERS, (320,), generator=draws),
        torch.randint(ITEMS, (320, 5), generator=draws),
    )
    features = torch.randn(320, 4, generator=draws)
    return TensorDataset(user, items, features, (features.sum(1) > 0).to(features.dtype))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data, path = make_data(), os.path.join(sys.argv[1], "towers.pt")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
    towers = TwoTowers()
    sparse = torch.optim.SparseAdam([towers.users.weight, towers.items.weight], lr=0.02)
    dense = torch.optim.Adam(towers.dense.parameters(), lr=0.01)
    model = DistributedDataParallel(towers)
    begin, steps = 0, 0
    if os.path.exists(path):
        found = torch.load(path, weights_only=True)
        towers.load_state_dict(found["model"])
        sparse.load_state_dict(found["sparse"])
        dense.load_state_dict(found["dense"])
        begin, steps = found["epoch"], found["steps"]
    for epoch in range(begin, EPOCHS):
        sampler.set_epoch(epoch)
        for user, items, features, clicked in loader:
            sparse.zero_grad()
            dense.zero_grad()
            loss = binary_cross_entropy_with_logits(model(user, items, features), clicked)
            loss.backward()
            sparse.step()
            dense.step()
            steps += 1
            if steps % SAVE_EVERY == 0 and dist.get_rank() == 0:
                state = {"model": towers.state_dict(), "sparse": sparse.state_dict()}
                torch.save({**state, "dense": dense.state_dict(), "epoch": epoch, "steps": steps}, path)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
