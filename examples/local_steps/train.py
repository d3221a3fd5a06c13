"""A character-level transformer on the sources of Python's own library, with local steps.

    pyps-plan cluster.toml --local-steps 10 -o plan.json
    pyps run --plan plan.json --samples 20000 examples/local_steps/train.py

Each worker takes the steps of its own AdamW that the plan gives it, then pushes the difference they made.
Rank 0 prints the loss on text that was held out.
"""

from __future__ import annotations

import torch
from text import CONTEXT, LETTERS, load
from torch import nn
from torch.nn import functional as F  # noqa: N812

import pyps

WIDTH, HEADS, LAYERS = 64, 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(n, t, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Logits of the next character, [n, t, LETTERS], from characters int64 [n, t]."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(LETTERS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, LETTERS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.token(x) + self.place.weight[: x.shape[1]])))


def loss_of(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of each next character. text: int64 [n, CONTEXT + 1]."""
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def main() -> None:
    torch.manual_seed(0)
    training, held_out = load()
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with pyps.join() as worker:
        worker.attach(model, optimizer)  # the plan says how many local steps
        for (text,) in worker.batches((training,)):
            loss = loss_of(model, text)
            worker.backward(loss)
            worker.step(loss)
        if worker.rank == 0:
            with torch.no_grad():
                print(f"held-out loss {float(loss_of(model, held_out)):.4f}")


if __name__ == "__main__":
    main()
