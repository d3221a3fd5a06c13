"""An image classifier in the manner of torchrun's tutorials: a Trainer that writes snapshots."""

import sys

import torch
import torch.distributed as dist
from torch.nn import Flatten, Linear, ReLU, Sequential
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from pyps.torch import uneven

GLOBAL_BATCH, EPOCHS, SAVE_EVERY = 32, 3, 4


def make_data():
    draws = torch.Generator().manual_seed(1)
    images = torch.randn(320, 1, 8, 8, generator=draws)
    return TensorDataset(images, images.flatten(1)[:, :10].argmax(1))


class Trainer:
    def __init__(self, model, data, optimizer, folder):
        self.model, self.loader, self.step = uneven(model, data, GLOBAL_BATCH, optimizer=optimizer)
        self.optimizer, self.path, self.steps = optimizer, folder, 0
        if found := self.step.load(self.path):
            self.steps = found["steps"]

    def save(self):
        self.step.save(self.path, steps=self.steps)

    def run_batch(self, images, labels):
        self.optimizer.zero_grad()
        self.step.backward(cross_entropy(self.model(images), labels))
        self.step()
        self.steps += 1
        if self.steps % SAVE_EVERY == 0:
            self.save()

    def train(self):
        for _ in range(self.step.sampler.epoch, EPOCHS):
            for images, labels in self.loader:
                self.run_batch(images, labels)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Sequential(Flatten(), Linear(64, 32), ReLU(), Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    Trainer(model, make_data(), optimizer, sys.argv[1]).train()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
