"""A character GPT: two micro-batches a step, autocast, clipping, warm-up and cosine."""

import math
import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

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
    data, path = make_data(), os.path.join(sys.argv[1], "ckpt.pt")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
    model = DistributedDataParallel(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    begin, steps = 0, 0
    if os.path.exists(path):
        found = torch.load(path, weights_only=True)
        model.module.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        scheduler.load_state_dict(found["scheduler"])
        begin, steps = found["epoch"], found["steps"]
    for epoch in range(begin, EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            micro_batches = list(zip(*(part.chunk(MICRO_BATCHES) for part in batch), strict=True))
            for k, (x, y) in enumerate(micro_batches):
                with nullcontext() if k == len(micro_batches) - 1 else model.no_sync():
                    with torch.autocast("cpu", torch.bfloat16):
                        logits = model(x)
                    loss = cross_entropy(logits.flatten(0, 1), y.flatten())
                    (loss / len(micro_batches)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            steps += 1
            if steps % SAVE_EVERY == 0 and dist.get_rank() == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                state |= {"scheduler": scheduler.state_dict(), "epoch": epoch, "steps": steps}
                torch.save(state, path)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
