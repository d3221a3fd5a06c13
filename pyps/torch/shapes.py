"""Whether what a model gets and gives differs between ranks in its samples alone.

Without count=, a hook takes the first dimension of forward()'s first tensor for samples. That is an
assumption: a sequence may come first, a batch may be packed, and a loss may be a mean over tokens. Where it
holds, two ranks' shapes differ in that dimension alone. So each pass has a fingerprint of all the others, and
ranks whose fingerprints differ do not know what to count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial
from typing import Any
from zlib import crc32

import torch

from pyps.torch.weighting import IGNORED

NODES = 32  # of a loss's graph that are looked at
MEAN, SUM = 1, 2  # torch's numbers of reductions
SUMMED = "SumBackward0"
REDUCTIONS = SUMMED, "MeanBackward0"  # of all that a tensor holds
BITS = (1 << 24) - 1  # of a fingerprint: whole numbers that float32 holds
Shape = tuple[int, ...]


class Shapes:
    """Those of a pass. inputs, outputs: its tensors, in order. labels: what has that name, or None."""

    def __init__(self, inputs: Iterable[torch.Tensor], outputs: Iterable[torch.Tensor], labels: Any) -> None:
        self._inputs = tuple(tuple(one.shape) for one in inputs if one.dim())
        outputs = list(outputs)
        self._outputs = tuple(tuple(one.shape) for one in outputs if one.dim())
        whole = isinstance(labels, torch.Tensor) and labels.dim() > 0 and not labels.is_floating_point()
        self._labels = labels if whole else None
        self._divisors: list[tuple[Any, int | None]] = []  # of what a backward pass came through: no metric's
        self._of_targets: int | None = None
        for loss in outputs:
            if not loss.dim() and (found := _divisors_of(loss)):
                assert loss.grad_fn is not None
                loss.grad_fn.register_prehook(partial(self._met, found))

    def _met(self, found: list[tuple[Any, int | None]], _: Any) -> None:
        self._divisors += found

    def fingerprint(self, knows_rows: bool, tables: set[tuple[int, Shape]], means: bool = True) -> int | None:
        """From 0 to 2^24 - 1, the same on ranks that differ in samples alone; None if there are none here.

        knows_rows: whether a sampler says how many samples there are, so that only targets are unknown.
        tables: outputs, by place and shape, that once had other rows; this pass adds its own. A table stays
        one in a pass with as many samples as it has rows. means: the loss is a mean; of a sum, targets that
        are left out change no weight.
        """
        rows = self._inputs[0][0] if self._inputs else 0
        if not rows:
            return None
        places = list(enumerate(self._outputs))
        tables.update((k, shape) for k, shape in places if shape[0] != rows)
        by_rows = tuple(shape for k, shape in places if (k, shape) not in tables)
        of_shapes = 0 if knows_rows else _of(rows, self._inputs, self._outputs, by_rows)
        return (of_shapes + (self._targets(rows) if means else 0)) & BITS

    def _targets(self, rows: int) -> int:
        """Of the targets by row, where some are left out: a mean over those is none over samples."""
        if self._of_targets is None:
            self._of_targets = self._targets_of(rows)
            self._labels, self._divisors = None, []  # they need memory
        return self._of_targets

    def _targets_of(self, rows: int) -> int:
        if self._divisors:
            unlike = {
                float(one) / rows if n is None else float(one) * (n / rows) for one, n in self._divisors
            }
            return crc32(repr(sorted(unlike)).encode()) & BITS
        if self._labels is None:
            return 0
        kept = self._labels.ne(IGNORED)
        shifted = kept[..., 1:] if kept.dim() > 1 else kept  # one label for each row is not shifted
        numbers = torch.stack([kept.sum(), shifted.sum()]).tolist()
        if numbers[0] == kept.numel():
            return 0
        return crc32(repr([number / rows for number in numbers]).encode()) & BITS


def _divisors_of(loss: torch.Tensor) -> list[tuple[Any, int | None]]:
    """What a loss, or each that it is made of, is divided by: the targets that a cross entropy or a masked
    mean is over. With it: a mean of how many numbers is.
    """
    found: list[tuple[Any, int | None]] = []
    ways: list[tuple[Any, Any]] = [(loss.grad_fn, None)] if loss.grad_fn is not None else []
    for node, divisor in ways:
        name = node.name()
        if name.startswith("NllLoss"):
            found += [(one, None) for one in [_divisor_of(node, divisor)] if one is not None]
        elif divisor is not None and name in REDUCTIONS and not _joins(node) and not _is_number(divisor):
            found.append((divisor, None if name == SUMMED else node._saved_self_sym_numel))
        elif len(ways) < NODES:
            other = _plain(node, "other") if name == "DivBackward0" else None
            divisor = divisor if other is None or other.numel() > 1 else other
            ways += [(before, divisor) for before, _ in node.next_functions if before is not None]
    return found


def _joins(node: Any) -> bool:
    """Whether it reduces several losses, not one by sample."""
    before = node.next_functions[0][0]
    return before is not None and before.name().startswith(("Stack", "Cat"))


def _is_number(divisor: torch.Tensor) -> bool:
    """Whether it was one of Python's, by whose type torch changes none: a constant, not a mask's sum."""
    if divisor.requires_grad:  # a parameter
        return True
    other = {torch.int64: torch.int8, torch.float64: torch.float16}.get(divisor.dtype)
    return other is not None and torch.result_type(divisor, torch.zeros((), dtype=other)) == other


def _divisor_of(node: Any, of_sum: Any) -> Any:
    """None where it is not known. of_sum: what a sum is divided by; None if by nothing."""
    targets = _plain(node, "target")
    if node._saved_reduction != MEAN:
        return of_sum if node._saved_reduction == SUM else None
    if targets is None:
        return None
    ignored = node._saved_ignore_index  # without its sign
    kept = targets.ne(ignored - (1 << 64) if ignored >> 63 else ignored)
    weights = _plain(node, "weight")
    return kept.sum() if weights is None else weights.double()[targets[kept]].sum()


def _plain(node: Any, name: str) -> torch.Tensor | None:
    """A tensor that a node has saved; None for one that a checkpoint would have to compute again."""
    saved = getattr(node, f"_raw_saved_{name}", None)
    return saved.data if saved is not None and getattr(saved, "unpack_hook", ...) is None else None


@lru_cache(1024)
def _of(rows: int, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], by_rows: tuple[Shape, ...]) -> int:
    """Of all dimensions but the samples': of the outputs, from which a loss is computed, if there are any.

    by_rows: the outputs whose first dimension the samples may be.
    """
    every: list[Shape] = [shape[1:] for shape in inputs]
    if outputs:
        every = [shape[1:] for k, shape in enumerate(by_rows) if k == 0 or shape[1:]]
    if not every:  # outputs of other rows: as many for each sample, or none that are known
        whole = next((shape for shape in outputs if shape[0] and shape[0] % rows == 0), None)
        every = [(rows,), *outputs] if whole is None else [(whole[0] // rows, *whole[1:])]
    return crc32(repr(every).encode()) & BITS


def attached(value: Any, depth: int) -> Iterator[torch.Tensor]:
    """Those that have a gradient, in tuples, lists, dicts and objects."""
    if isinstance(value, torch.Tensor):
        if value.grad_fn is not None:
            yield value
        return
    inside: Any = ()
    if isinstance(value, dict):
        inside = value.values()
    elif isinstance(value, list | tuple | set):
        inside = value
    elif is_dataclass(value) and not isinstance(value, type):
        inside = [getattr(value, field.name, None) for field in fields(value)]
    elif hasattr(value, "__dict__") and not isinstance(value, type | torch.nn.Module):
        inside = list(vars(value).values())
    if depth:
        for one in inside:
            yield from attached(one, depth - 1)
