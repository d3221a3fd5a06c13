# train.py
import torch

import pyps

draws = torch.Generator().manual_seed(0)
inputs, targets = torch.randn(64, 16, generator=draws), torch.randn(64, 4, generator=draws)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
with pyps.join() as worker:
    worker.attach(model, optimizer)
    for x, y in worker.batches((inputs, targets)):
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        worker.step(loss)
