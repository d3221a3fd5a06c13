"""A small transformer on texts of unlike length: torchrun --nproc-per-node 4 lengths.py

A rank's texts lie one behind the other in a row of letters, without padding, and attention looks at one text
at a time: so a step takes the sum of what its texts cost. uneven(lengths=) gives each rank those that it can
compute in the time of a round, and the gradient is that of one process with all texts.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from common import EmulatedDevice
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from pyps.torch import uneven

GLOBAL_BATCH, TEXTS, LONGEST, LETTERS, WIDTH, HEADS = 64, 1280, 256, 16, 32, 4


def texts() -> list[torch.Tensor]:
    """Letters of which each says the next but one, int64 [length], most of them short."""
    draws = torch.Generator().manual_seed(0)
    made = []
    for length in (torch.randn(TEXTS, generator=draws) + 3).exp().clamp(4, LONGEST).int().tolist():
        text = torch.randint(LETTERS, (length + 1,), generator=draws)
        for k in range(2, length + 1):
            text[k] = (text[k - 2] + 1) % LETTERS
        made.append(text)
    return made


def batch_of(chosen: list[torch.Tensor]) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    """All letters in a row, the length of each text, and the letter that follows each."""
    lengths = [len(text) - 1 for text in chosen]
    return torch.cat([t[:-1] for t in chosen]), lengths, torch.cat([t[1:] for t in chosen])


class Block(nn.Module):
    """Attention within each text, then a layer on each letter."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.mixed, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.each = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, row: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        found = []
        for part in self.mixed(self.before(row)).split(lengths):
            q, k, v = part.view(len(part), 3, HEADS, -1).permute(1, 2, 0, 3)
            found.append(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1))
        row = row + self.out(torch.cat(found))
        return row + self.each(row)


class Writer(nn.Module):
    """Letters [all] of texts of these lengths -> what follows each, [all, LETTERS]."""

    def __init__(self) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(LETTERS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(WIDTH, LETTERS)

    def forward(self, letters: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        row = self.letter(letters) + self.place(torch.cat([torch.arange(n) for n in lengths]))
        for block in self.blocks:
            row = block(row, lengths)
        return self.head(row)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    data, model = texts(), Writer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    lengths = [len(text) - 1 for text in data]
    model, loader, step = uneven(
        model, data, GLOBAL_BATCH, optimizer=optimizer, lengths=lengths, collate_fn=batch_of
    )
    device, losses = EmulatedDevice(model), []
    for _ in range(int(os.environ.get("EPOCHS", "3"))):
        for letters, own, following in loader:
            optimizer.zero_grad()
            step.backward(cross_entropy(model(letters, own), following))
            step()
            device.step()
            losses.append(float(step.mean.loss))
    shares = list(step.sampler.split)
    device.print_summary(tokens=shares, first_loss=losses[0], last_loss=losses[-1])


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
