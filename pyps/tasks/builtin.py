"""The built-in tasks: small networks on random data, for profiling, examples and tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pyps.tasks.task import TrainingTask, random_images

if TYPE_CHECKING:
    import torch


def mlp(seed: int = 0) -> TrainingTask:
    """784-512-512-10 with ReLU (669,706 parameters), on images of MNIST's shape."""
    from torch import nn

    with _seeded(seed):
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        )
    return _classification(model, (1, 28, 28), classes=10)


def cnn(seed: int = 0) -> TrainingTask:
    """Four 3x3 convolutions with GroupNorm (94,122 parameters), on images of CIFAR-10's shape."""
    from torch import nn

    def stage(channels_in: int, channels_out: int) -> list[nn.Module]:
        return [
            nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
            nn.GroupNorm(8, channels_out),
            nn.ReLU(),
        ]

    with _seeded(seed):
        model = nn.Sequential(
            *stage(3, 32),
            nn.MaxPool2d(2),
            *stage(32, 64),
            nn.MaxPool2d(2),
            *stage(64, 64),
            *stage(64, 64),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 10),
        )
    return _classification(model, (3, 32, 32), classes=10)


def transformer(seed: int = 0) -> TrainingTask:
    """A causal language model: 2 pre-norm blocks, width 128, 4 heads, 64 tokens of a vocabulary of 512."""
    import torch
    from torch import nn

    vocabulary, tokens = 512, 64
    with _seeded(seed):
        model = _causal_transformer(vocabulary, tokens, width=128, heads=4, blocks=2)

    def make_batch(batch: int, length: int = tokens) -> tuple[torch.Tensor, torch.Tensor]:
        text = torch.randint(vocabulary, (batch, length + 1), generator=torch.Generator().manual_seed(seed))
        return text[:, :-1], text[:, 1:]

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return TrainingTask(model, make_batch, loss)


def digits_mlp(seed: int = 0) -> TrainingTask:
    """64-256-256-10 with ReLU, on scikit-learn's 8x8 digits, shape (1, 8, 8), scaled to [0, 1]."""
    from torch import nn

    with _seeded(seed):
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        )
    return _classification(model, (1, 8, 8), classes=10)


def digits_cnn(seed: int = 0) -> TrainingTask:
    """Three 3x3 convolutions and two linear layers, on scikit-learn's 8x8 digits, shape (1, 8, 8)."""
    from torch import nn

    with _seeded(seed):
        model = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 64, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )
    return _classification(model, (1, 8, 8), classes=10)


BUILTIN: dict[str, Callable[[], TrainingTask]] = {
    "mlp": mlp,
    "cnn": cnn,
    "transformer": transformer,
    "digits_mlp": digits_mlp,
    "digits_cnn": digits_cnn,
}


def _classification(model: torch.nn.Module, shape: tuple[int, ...], classes: int) -> TrainingTask:
    """A task of cross entropy on random images."""
    import torch

    return TrainingTask(model, random_images(shape, classes), torch.nn.functional.cross_entropy)


def _causal_transformer(vocabulary: int, tokens: int, width: int, heads: int, blocks: int) -> torch.nn.Module:
    """Token ids (batch, tokens) -> logits (batch, tokens, vocabulary); position i sees positions 0..i."""
    import torch
    from torch import nn

    class CausalTransformer(nn.Module):
        mask: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(vocabulary, width)
            self.position = nn.Parameter(torch.zeros(tokens, width))
            layer = nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            self.blocks = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, vocabulary, bias=False)
            mask = nn.Transformer.generate_square_subsequent_mask(tokens)
            self.register_buffer("mask", mask, persistent=False)

        def forward(self, text: torch.Tensor) -> torch.Tensor:
            length = text.shape[1]
            hidden = self.embed(text) + self.position[:length]
            hidden = self.blocks(hidden, mask=self.mask[:length, :length], is_causal=True)
            logits: torch.Tensor = self.head(self.norm(hidden))
            return logits

    return CausalTransformer()


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Initialise from `seed`; the caller's random state stays as it was."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
