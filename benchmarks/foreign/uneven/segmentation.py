"""A segmentation network with SyncBatchNorm and pixels that no class is known of."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from pyps.torch import UnevenSyncBatchNorm, uneven

GLOBAL_BATCH, EPOCHS, UNKNOWN, SAVE_EVERY = 32, 3, 255, 4


def make_data():
    draws = torch.Generator().manual_seed(3)
    images = torch.randn(320, 3, 8, 8, generator=draws)
    classes = images.argmax(1)
    classes[torch.rand(classes.shape, generator=draws) < 0.3] = UNKNOWN
    return TensorDataset(images, classes)


def make_model():
    layers = []
    for before, after in ((3, 8), (8, 8)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(8, 3, 1))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data, path = make_data(), sys.argv[1]
    model = UnevenSyncBatchNorm.convert(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
    model, loader, step = uneven(model, data, GLOBAL_BATCH, optimizer=optimizer)
    steps = 0
    if found := step.load(path):
        steps = found["steps"]
    for _ in range(step.sampler.epoch, EPOCHS):
        for images, classes in loader:
            loss = cross_entropy(model(images), classes, ignore_index=UNKNOWN)
            optimizer.zero_grad()
            step.backward(loss)
            step()
            steps += 1
            if steps % SAVE_EVERY == 0:
                step.save(path, steps=steps)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
