"""A small transformer on text that it makes itself, weighted by tokens: torchrun --nproc-per-node 4 text.py

Sentences are of unlike length, so a rank's share of a step is its targets and not its sentences: the loss is
their mean, and its graph tells how many there are. The exact mean over all targets is what is trained.
"""

from __future__ import annotations

import os
import random

import torch
import torch.distributed as dist
from common import EmulatedDevice
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from pyps.torch import GlobalMean, Rebalancer, UnevenBatchSampler, agreed_split

GLOBAL_BATCH, SENTENCES, LONGEST = 64, 1280, 24
NAMES, VERBS = ("ada", "bob", "cleo", "dan"), ("sees", "hears", "likes", "calls")
LETTERS = "\n abcdefghijklmnopqrstuvwxyz."
PADDING = -100


def sentences() -> list[str]:
    """A sentence: a subject, a verb and an object, at times more than once."""
    luck = random.Random(0)
    made = []
    for _ in range(SENTENCES):
        words = [luck.choice(NAMES)]
        for _ in range(luck.choice((1, 1, 2))):
            words += [luck.choice(VERBS), luck.choice(NAMES)]
        made.append(" ".join(words)[: LONGEST - 1] + ".")
    return made


def batch_of(texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Letters, int64 [n, LONGEST], and the letter that follows each, PADDING after the end."""
    letters = torch.zeros(len(texts), LONGEST, dtype=torch.int64)
    targets = torch.full_like(letters, PADDING)
    for row, text in enumerate(texts):
        codes = torch.tensor([LETTERS.index(letter) for letter in text])
        letters[row, 1 : len(codes)] = codes[:-1]
        targets[row, : len(codes)] = codes
    return letters, targets


class Writer(nn.Module):
    """Letters [n, LONGEST] and their targets -> the mean loss over the targets; it does not look ahead."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(len(LETTERS), width), nn.Embedding(LONGEST, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, len(LETTERS))
        self.register_buffer("ahead", nn.Transformer.generate_square_subsequent_mask(LONGEST))

    def forward(self, letters: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.letter(letters) + self.place.weight, mask=self.ahead, is_causal=True)
        return cross_entropy(self.out(hidden).flatten(0, 1), targets.flatten(), ignore_index=PADDING)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    texts = sentences()
    sampler = UnevenBatchSampler(texts, agreed_split(GLOBAL_BATCH))
    loader = DataLoader(texts, batch_sampler=sampler, collate_fn=batch_of)
    model = DistributedDataParallel(Writer())
    mean = GlobalMean(model, sampler)
    device, balance = EmulatedDevice(model), Rebalancer(sampler, mean)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for epoch in range(int(os.environ.get("EPOCHS", "3"))):
        sampler.set_epoch(epoch)
        for letters, targets in loader:
            optimizer.zero_grad()
            loss = model(letters, targets)
            mean.backward(loss)
            optimizer.step()
            balance.step()
            device.step()
            losses.append(float(mean.loss))
    history = [str(change) for change in balance.history]
    device.print_summary(batches=sampler.split, history=history, first_loss=losses[0], last_loss=losses[-1])


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
