"""A sentence classifier in the manner of GLUE without a trainer: padded batches, weights without decay."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from pyps.torch import uneven

GLOBAL_BATCH, EPOCHS, WORDS, PADDING, SAVE_EVERY = 32, 3, 50, 0, 4


class Sentences(Dataset):
    """Sentences of 4 to 12 words; each has the label 1 if its words are even more often than odd."""

    def __len__(self):
        return 320

    def __getitem__(self, k):
        draws = torch.Generator().manual_seed(k)
        length = int(torch.randint(4, 13, (1,), generator=draws))
        ids = torch.randint(1, WORDS, (length,), generator=draws)
        return ids, int((ids % 2 == 0).sum() * 2 > length)


def collate(rows):
    ids = pad_sequence([ids for ids, _ in rows], batch_first=True, padding_value=PADDING)
    return {"ids": ids, "mask": ids != PADDING, "labels": torch.tensor([label for _, label in rows])}


class Classifier(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, width), nn.LayerNorm(width)
        self.inner, self.head = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, ids, mask):
        x = self.norm(self.inner(self.embed(ids)).tanh()) * mask[..., None]
        return self.head(x.sum(1) / mask.sum(1, keepdim=True))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data, path, model = Sentences(), sys.argv[1], Classifier()
    plain = [p for name, p in model.named_parameters() if "norm" in name or "bias" in name]
    others = [p for name, p in model.named_parameters() if "norm" not in name and "bias" not in name]
    groups = [{"params": others, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=5e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=60)
    model, loader, step = uneven(model, data, GLOBAL_BATCH, optimizer=optimizer, collate_fn=collate)
    steps = 0
    if found := step.load(path, scheduler=scheduler):
        steps = found["steps"]
    for _ in range(step.sampler.epoch, EPOCHS):
        model.train()
        for batch in loader:
            labels = batch.pop("labels")
            loss = cross_entropy(model(**batch), labels)
            step.backward(loss)
            step()
            scheduler.step()
            optimizer.zero_grad()
            steps += 1
            if steps % SAVE_EVERY == 0:
                step.save(path, scheduler=scheduler, steps=steps)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
