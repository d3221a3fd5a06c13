"""A segmentation network with SyncBatchNorm and pixels that no class is known of."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

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
    data, path = make_data(), os.path.join(sys.argv[1], "model.pt")
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
    model = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(make_model()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
    begin, steps = 0, 0
    if os.path.exists(path):
        found = torch.load(path, weights_only=True)
        model.module.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        begin, steps = found["epoch"], found["steps"]
    for epoch in range(begin, EPOCHS):
        sampler.set_epoch(epoch)
        for images, classes in loader:
            loss = cross_entropy(model(images), classes, ignore_index=UNKNOWN)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
            if steps % SAVE_EVERY == 0 and dist.get_rank() == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "epoch": epoch, "steps": steps}, path)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
