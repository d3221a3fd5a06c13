# train.py
import torch

import pyps


def main() -> None:
    torch.manual_seed(0)  # every worker builds the same model; rank 0's values go into the store
    inputs, targets = torch.randn(512, 16), torch.randn(512, 4)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with pyps.join() as worker:
        worker.attach(model, optimizer)
        for x, y in worker.batches((inputs, targets)):
            loss = torch.nn.functional.mse_loss(model(x), y)  # the mean over the batch
            loss.backward()
            worker.step(loss)


if __name__ == "__main__":
    main()
