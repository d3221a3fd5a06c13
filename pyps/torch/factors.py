"""Factors of a loss's terms: the shares of the ranks, and the hooks that multiply gradients by them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from pyps.errors import InputError
from pyps.worker.step.terms import Number, Term

ALIKE = 1e-9  # relative: shares that are this close are one number, divided in two ways
NO_COUNT = math.nan  # a sum that is divided by nothing
MICRO = "micro-batches under no_sync()"


Counts = list[float] | torch.Tensor  # of a term, by rank: what the host knows, or [ranks] on a device


def shares_of(counts: Counts) -> Counts:
    """Each rank's share of a term's items; of bare sums 1 for each; zeros where no rank has any."""
    if isinstance(counts, torch.Tensor):
        whole = counts.sum()
        return torch.where(whole > 0, counts / torch.where(whole > 0, whole, 1.0), 0.0)
    if any(math.isnan(count) for count in counts):
        return [1.0] * len(counts)
    total = sum(counts)
    return [count / total if total > 0 else 0.0 for count in counts]


def as_tensor(counts: Counts) -> torch.Tensor:
    return torch.as_tensor(counts, dtype=torch.float64)


def alike(one: Counts, other: Counts) -> bool:
    """Tell whether shares are the same; the host reads those of a device."""
    return torch.allclose(as_tensor(one).cpu(), as_tensor(other).cpu(), rtol=ALIKE, atol=0)


def power_of_two(number: torch.Tensor) -> Number:
    """The one next to a number of at least 1."""
    found = torch.exp2(torch.round(torch.log2(number.clamp(min=1))))
    return float(found) if found.device.type == "cpu" else found


def alone_of(term: Term, factor: Number) -> Number:
    """The gradient of a sum that this rank has divided by 0: that is no number any more."""
    return is_sum(term) * term.constant * factor


def is_any(count: Number | None) -> Number:
    """1 where there are items, else 0."""
    if isinstance(count, torch.Tensor):
        return (count > 0).to(count.dtype)
    return 1.0 if count is None or count > 0 else 0.0


def is_sum(term: Term) -> float:
    """1 for a sum that the script has divided by a count, else 0."""
    return float(not term.is_mean and term.count is not None)


def inverse(counts: Counts) -> Number:
    """1 over their sum; 0 of 0, and of what are no counts."""
    total: Any = counts.sum() if isinstance(counts, torch.Tensor) else sum(counts)
    if isinstance(total, torch.Tensor):
        return torch.where(total > 0, 1 / total, 0.0)
    return 1 / total if total > 0 else 0.0


def times(
    factor: Number, alone: Number, entered: list[torch.Tensor]
) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A hook that multiplies gradients. Where the factor is 0 it gives `alone` times the loss's own gradient,
    which has `entered`, in their place: they may be NaN, as a mean over nothing has.
    """

    def multiplied(gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        is_zero = not entered or (not isinstance(alone, torch.Tensor) and alone == 0)
        instead = alone if is_zero else alone * entered[0].reshape(())
        return tuple(None if one is None else product_of(one, factor, instead) for one in gradients)

    return multiplied


def product_of(gradient: torch.Tensor, factor: Number, alone: Number) -> torch.Tensor:
    if not isinstance(factor, torch.Tensor):
        if factor == 0:
            there = torch.as_tensor(alone, device=gradient.device, dtype=gradient.dtype)
            return there.expand_as(gradient)
        return gradient if factor == 1 else gradient * factor
    wide = factor.to(gradient.device)
    scaled = (gradient.to(wide.dtype) * wide).to(gradient.dtype)
    return torch.where(wide > 0, scaled, torch.as_tensor(alone, device=gradient.device, dtype=gradient.dtype))


def on_host(number: Number | None) -> float:
    """The number in a row of the host's: nothing of one that is on a device."""
    if number is None:
        return NO_COUNT
    return 0.0 if isinstance(number, torch.Tensor) else float(number)


def is_on_device(term: Term) -> bool:
    return isinstance(term.count, torch.Tensor) or isinstance(term.divisor, torch.Tensor)


def bare(term: Term) -> Term:
    """A sum over samples that is divided by a constant, which the ranks compare."""
    if isinstance(term.count, torch.Tensor):
        return replace(term, count=None, divisor=term.count)
    return replace(term, count=None, constant=1.0 if term.count is None else 1 / term.count)


def root_of(loss: torch.Tensor) -> Any:
    if loss.grad_fn is None:
        expected = "a loss that the model has computed with gradients enabled"
        raise InputError("backward", "loss", "a tensor without a graph", expected)
    return loss.grad_fn


def number_of(n: Any) -> Number:
    """The count that a script gives. Raises InputError for less than 0, and for a type that rounds it."""
    expected = "a number from 0, float32 or whole: sum(dtype=torch.float32)"
    if isinstance(n, torch.Tensor):
        if n.numel() != 1 or (n.is_floating_point() and n.element_size() < 4) or n.is_complex():
            raise InputError("backward", "n", f"{n.dtype} of shape {list(n.shape)}", expected)
        if n.device.type != "cpu":
            return n.detach().reshape(()).double()
        n = n.item()
    if isinstance(n, bool) or not isinstance(n, int | float) or not 0 <= n < math.inf:
        raise InputError("backward", "n", repr(n), expected)
    return float(n)


def unlike_micro_batches() -> InputError:
    found = "terms whose counts are in another proportion in each"
    return InputError("backward", MICRO, found, "a loss of one mean, or of means over as many items each")
