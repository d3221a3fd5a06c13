"""Three networks that people know, small enough for a CPU, with their data: ResNet-20, a VGG and a GPT.

ResNet-20 is that of He et al. (arXiv 1512.03385, section 4.2), the VGG configuration A of Simonyan and
Zisserman (arXiv 1409.1556) with a quarter of the channels and batch normalization, both on scikit-learn's
digits enlarged to 16 x 16 pixels. The GPT has two blocks and reads the characters of Python's own help texts.
A network's normalization uses the statistics of the batch at hand, in training and in validation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor, nn

from pyps import Hyper

PIXELS, HELD_OUT = 16, 400
CONTEXT, WIDTH, HEADS, BLOCKS = 64, 64, 4, 2
TEXT_CHARACTERS = 400_000
VGG_A = (16, 0, 32, 0, 64, 64, 0, 128, 128, 0)  # channels of a convolution; 0: halve the image


@dataclass(frozen=True)
class Network:
    """Hold what is trained, and how. batches: global batches. data: inputs and targets to train on, and
    others.
    """

    title: str
    make: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor, Tensor, Tensor]]
    optimizer: str
    hyper: Hyper
    batches: int

    def model(self, seed: int) -> nn.Module:
        """A new network; the seed makes its first parameters."""
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        return self.make()


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, the mean over samples: windows of text all have as many characters."""
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


class Block(nn.Module):
    """Two convolutions and a way past them, without parameters of its own (option A of the paper)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.stride = 1 if inputs == outputs else 2
        self.added = outputs - inputs
        self.way = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, self.stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        past = x[:, :, :: self.stride, :: self.stride]
        return torch.relu(self.way(x) + nn.functional.pad(past, (0, 0, 0, 0, 0, self.added)))


def resnet20() -> nn.Module:
    widths = [16, *[16] * 3, *[32] * 3, *[64] * 3]
    first = [nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    blocks = [Block(a, b) for a, b in pairwise(widths)]
    return nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def vgg() -> nn.Module:
    layers: list[nn.Module] = []
    inputs = 1
    for outputs in VGG_A:
        if not outputs:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(inputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        inputs = outputs
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(inputs, 10))


class Gpt(nn.Module):
    """Blocks of causal attention, each normalized first; outputs are scores of the next character."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, BLOCKS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.register_buffer(
            "mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.characters(x) + self.places.weight
        h = self.blocks(h, mask=self.mask, is_causal=True)
        return h @ self.characters.weight.T / WIDTH**0.5


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    small = torch.tensor(x / 8 - 1, dtype=torch.float32).reshape(-1, 1, 8, 8)
    images = nn.functional.interpolate(small, (PIXELS, PIXELS), mode="bilinear", align_corners=False)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))  # writers are mixed
    images, labels = images[order], torch.tensor(y)[order]
    return images[:-HELD_OUT], labels[:-HELD_OUT], images[-HELD_OUT:], labels[-HELD_OUT:]


@cache
def text() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    codes = torch.tensor([_CODES[c] for c in _characters()])
    windows = codes[: len(codes) // CONTEXT * CONTEXT].reshape(-1, CONTEXT)
    x, y = windows[:-1], codes[1 : (len(windows) - 1) * CONTEXT + 1].reshape(-1, CONTEXT)
    return x[:-HELD_OUT], y[:-HELD_OUT], x[-HELD_OUT:], y[-HELD_OUT:]


def _characters() -> str:
    from pydoc_data.topics import topics

    return "".join(topics[name] for name in sorted(topics))[:TEXT_CHARACTERS]


_CODES = {c: k for k, c in enumerate(sorted(set(_characters())))}
NETWORKS = {
    "resnet20": Network("ResNet-20", resnet20, digits, "momentum", Hyper(lr=0.02, momentum=0.9), 120),
    "vgg": Network("VGG", vgg, digits, "momentum", Hyper(lr=0.01, momentum=0.9), 120),
    "gpt": Network("GPT", lambda: Gpt(len(_CODES)), text, "adamw", Hyper(lr=0.003, weight_decay=0.01), 240),
}
