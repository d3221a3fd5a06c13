"""One worker of a real run of the comparisons: papers_worker.py STEP_SIZE.

The network, its first parameters, the samples and the rule of the step size are those of the simulations.
"""

from __future__ import annotations

import sys

import torch
from digits_mlp import CLASSES, HIDDEN, PIXELS, Digits, parts
from torch import nn

import pyps


def network(seed: int) -> nn.Sequential:
    """Digits' first parameters, as a torch model."""
    model = nn.Sequential(nn.Linear(PIXELS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))
    with torch.no_grad():
        for parameter, part in zip(model.parameters(), parts(Digits(seed).start()), strict=True):
            parameter.copy_(torch.from_numpy(part.T))
    return model


def main() -> None:
    torch.set_num_threads(1)
    lr = float(sys.argv[1])
    with pyps.join() as worker:
        settings = worker.settings
        data = Digits(settings.seed)
        images = torch.from_numpy(data.x).float(), torch.from_numpy(data.labels)
        model = network(settings.seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        worker.attach(model, optimizer)
        for inputs, targets in worker.batches(images):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            worker.backward(loss)
            worker.step(loss)


if __name__ == "__main__":
    main()
