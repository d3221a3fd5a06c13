# train.py
import os

import torch
from net import loss, make_batch, make_model

import pyps


def main() -> None:
    torch.manual_seed(0)  # every worker builds the same model and the same data
    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    inputs, targets = (data.to(device) for data in make_batch(6000))
    model = make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with pyps.join() as worker:
        worker.attach(model, optimizer)
        for x, y in worker.batches((inputs, targets)):
            error = loss(model(x), y)
            error.backward()
            worker.step(error)


if __name__ == "__main__":
    main()
