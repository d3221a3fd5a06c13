"""A character GPT: two micro-batches a step, autocast, clipping, warm-up and cosine."""

import math
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from pyps.torch import uneven

GLOBAL_BATCH, MICRO_BATCHES, EPOCHS, LENGTH, SAVE_EVERY = 32, 2, 3, 12, 4


class GPT(nn.Module):
    def __init__(self, width=16, letters=20):
        super().__init__()
        self.embed, self.place = nn.Embedding(letters, width), nn.Embedding(LENGTH, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, letters)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=self.head.weight.dtype)
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        return self.head(self.block(x, src_mask=mask, is_causal=True))


def make_data():
    draws = torch.Generator().manual_seed(2)
    text = torch.randint(0, 20, (320, LENGTH + 1), generator=draws).cumsum(1) % 20
    return TensorDataset(text[:, :-1], text[:, 1:])


def decay(n):
    return min(1.0, (n + 1) / 5) * 0.5 * (1 + math.cos(math.pi * n / 60))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data, path = make_data(), sys.argv[1]
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    model, loader, step = uneven(model, data, GLOBAL_BATCH, optimizer=optimizer)
    steps = 0
    if found := step.load(path, scheduler=scheduler):
        steps = found["steps"]
    for _ in range(step.sampler.epoch, EPOCHS):
        for batch in loader:
            for x, y in step.mean.accumulate(batch, MICRO_BATCHES):
                with torch.autocast("cpu", torch.bfloat16):
                    logits = model(x)
                loss = cross_entropy(logits.flatten(0, 1), y.flatten())
                step.backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            step()
            scheduler.step()
            optimizer.zero_grad()
            steps += 1
            if steps % SAVE_EVERY == 0:
                step.save(path, scheduler=scheduler, steps=steps)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
