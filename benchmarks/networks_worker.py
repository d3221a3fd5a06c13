"""One worker of a real run of networks.py: networks_worker.py NETWORK."""

from __future__ import annotations

import sys

import torch
from known_networks import NETWORKS, loss_of

import pyps


def main() -> None:
    network = NETWORKS[sys.argv[1]]
    with pyps.join() as worker:
        model = network.model(worker.settings.seed)
        inputs, targets, *_ = network.data()
        if network.optimizer == "adamw":
            hyper = network.hyper
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(
                model.parameters(), lr=hyper.lr, weight_decay=hyper.weight_decay
            )
        else:
            optimizer = torch.optim.SGD(
                model.parameters(), lr=network.hyper.lr, momentum=network.hyper.momentum
            )
        worker.attach(model, optimizer)
        for x, y in worker.batches((inputs, targets)):
            loss = loss_of(model(x), y)
            worker.backward(loss)
            worker.step(loss)


if __name__ == "__main__":
    main()
