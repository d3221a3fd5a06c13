"""An image classifier in the manner of torchrun's tutorials: a Trainer that writes snapshots."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn import Flatten, Linear, ReLU, Sequential
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH, EPOCHS, SAVE_EVERY = 32, 3, 4


def make_data():
    draws = torch.Generator().manual_seed(1)
    images = torch.randn(320, 1, 8, 8, generator=draws)
    return TensorDataset(images, images.flatten(1)[:, :10].argmax(1))


class Trainer:
    def __init__(self, model, data, optimizer, folder):
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, GLOBAL_BATCH // dist.get_world_size(), sampler=self.sampler)
        self.model = DistributedDataParallel(model)
        self.optimizer, self.path, self.epoch, self.steps = optimizer, os.path.join(folder, "last.pt"), 0, 0
        if os.path.exists(self.path):
            found = torch.load(self.path, weights_only=True)
            self.model.module.load_state_dict(found["model"])
            self.optimizer.load_state_dict(found["optimizer"])
            self.epoch, self.steps = found["epoch"], found["steps"]

    def save(self):
        if dist.get_rank() == 0:
            state = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save({**state, "epoch": self.epoch, "steps": self.steps}, self.path)

    def run_batch(self, images, labels):
        self.optimizer.zero_grad()
        cross_entropy(self.model(images), labels).backward()
        self.optimizer.step()
        self.steps += 1
        if self.steps % SAVE_EVERY == 0:
            self.save()

    def train(self):
        while self.epoch < EPOCHS:
            self.sampler.set_epoch(self.epoch)
            for images, labels in self.loader:
                self.run_batch(images, labels)
            self.epoch += 1


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Sequential(Flatten(), Linear(64, 32), ReLU(), Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    Trainer(model, make_data(), optimizer, sys.argv[1]).train()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
