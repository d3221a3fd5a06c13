"""Micro-batches whose gradients are not reduced yet: their counts, their loss, and how each is weighed.

Under no_sync() no rank knows the others' counts. So a micro-batch's gradient enters times its own count; the
last one of a step divides by all ranks'.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from pyps.errors import InputError
from pyps.torch.factors import ALIKE, MICRO, alone_of, is_any, unlike_micro_batches
from pyps.worker.step.terms import Number, Term


@dataclass
class Unreduced:
    """The micro-batches of a step so far.

    filled: of them, those with samples of their own. counts: of each term, summed; None: nothing divides it.
    loss: the sum of losses times counts. before: gradients of earlier reductions, to be added afterwards.
    ratios: of each term's count to the first one's. error: what this rank refuses of them.
    """

    batches: int = 0
    filled: int = 0
    counts: list[Number | None] = field(default_factory=list)
    loss: Any = 0.0
    ratios: list[float] = field(default_factory=list)
    before: list[tuple[torch.nn.Parameter, torch.Tensor]] = field(default_factory=list)
    error: InputError | None = None
    first: torch.nn.Parameter | None = None  # with a gradient, and the version that the latest pass gave it
    version: int = 0

    def note_gradient(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Note what the script changes if it zeroes gradients before the next pass."""
        self.first = next((p for p in parameters if p.grad is not None), None)
        if self.first is not None and self.first.grad is not None:
            self.version = self.first.grad._version

    def whole_loss(self) -> Any:
        """The mean of the losses by their counts, 0 without items; of sums that nothing divides their sum."""
        first = self.counts[0] if self.counts else float(self.filled)
        if first is None:
            return self.loss
        total = torch.as_tensor(first, dtype=torch.float64, device=self.loss.device)
        return torch.where(total > 0, self.loss / torch.where(total > 0, total, 1.0), 0.0)

    def add(self, loss: torch.Tensor, terms: list[Term], repeated: bool) -> InputError | None:
        """Add a micro-batch; what this rank refuses of it. repeated: another one counts its samples."""
        counts = [term.count for term in terms]
        if len({count is None for count in counts}) > 1:
            found = "sums and means in one loss"
            return InputError("backward", MICRO, found, "means alone, or sums alone")
        self.filled += not repeated
        first = first_count(terms, repeated)
        is_filled = torch.as_tensor(first, device=loss.device) > 0
        self.loss = self.loss + torch.where(is_filled, loss.detach().double() * first, 0.0)
        if not self.counts:
            self.counts = counts
        elif len(self.counts) != len(counts):
            return InputError("backward", MICRO, "losses of unlike terms", "the same terms in each")
        else:
            both = zip(self.counts, counts, strict=True)
            self.counts = [None if a is None or b is None else a + b for a, b in both]
        known = [count for count in counts if count is not None]
        if len(known) > 1 and float(first) > 0:  # the host reads counts of a device here
            ratios = [float(count) / float(first) for count in known]
            self.ratios = self.ratios or ratios
            pairs = zip(ratios, self.ratios, strict=True)
            if not all(math.isclose(a, b, rel_tol=ALIKE) for a, b in pairs):
                return unlike_micro_batches()
        return None


def first_count(terms: list[Term], repeated: bool) -> Number:
    """Return a micro-batch's own: its first term's, or 1 where nothing is divided."""
    count = terms[0].count if terms else None
    return float(not repeated) if count is None else count


def whole_factor(terms: list[Term], repeated: bool, unit: Number, once: float) -> Number:
    """Return the factor of a micro-batch's whole loss: its count. Of sums, that have none, only what is no
    sum over samples is left, as a penalty on weights: it enters `once`.
    """
    return once if terms and terms[0].count is None else first_count(terms, repeated) / unit


def term_factors(terms: list[Term], unit: Number) -> list[tuple[Term, Number, Number]]:
    """Return those of a micro-batch's terms, whose whole loss is multiplied by its count. A sum that nothing
    divides has none: its gradient is put in place, whatever the whole loss is multiplied by.
    """
    return [
        (term, 0.0, term.constant if term.divisor is None else term.constant / term.divisor)
        if term.count is None
        else (term, is_any(term.count), alone_of(term, 1 / unit))
        for term in terms
    ]
