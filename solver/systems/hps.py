"""H-PS's pipeline: how deep, with how many bits each way, and the period that makes.

H-PS (Xian et al., IEEE Access 9, 2021): a pipeline keeps workers computing while parameters are in transfer,
and quantization shrinks the traffic in both directions. Ours: with d iterations in flight, one of them
computing (C seconds) and d - 1 in transfer (M seconds, W of them on the wire),

    period = C + M for d = 1,  max(C, W, M / (d - 1)) for d > 1;   staleness grows by d - 1

so two buffers reach max(C, M), and more help only where latency makes M longer than both C and W. Of the bits
that keep the error of a push and of a pull within the budget, every worker takes the most exact ones with
which it is no later than the slowest worker has to be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pyps.formats import Bits, HpsEstimate, HpsWorker
from pyps.solver.links import ERROR, Link

SAME = 1 + 1e-12  # relative: what rounding may add to a period


@dataclass(frozen=True)
class Choice:
    """Bits each way and the pipeline that they make: iterations in flight and seconds a period."""

    push: Bits
    pull: Bits
    depth: int
    period: float

    @property
    def error(self) -> tuple[float, float, float]:
        """The larger error first; of equals, the one with exact pulls: pushes have error feedback."""
        push, pull = ERROR[self.push], ERROR[self.pull]
        return max(push, pull), push + pull, pull


def pipeline(compute_seconds: float, link: Link, push: Bits = 32, pull: Bits = 32) -> Choice:
    """The shallowest pipeline with the shortest period."""
    transfer, floor = link.seconds(push, pull), max(compute_seconds, link.wire_seconds(push, pull))
    if transfer == 0:
        return Choice(push, pull, 1, compute_seconds)
    in_transfer = math.ceil(transfer / floor)
    return Choice(push, pull, 1 + in_transfer, max(floor, transfer / in_transfer))


def hps_estimate(
    ranks: Sequence[int],
    compute_seconds: Sequence[float],
    links: Sequence[Link | None],
    error_budget: float = 0.0,
) -> HpsEstimate:
    """The slowest worker's iteration with and without overlap; empty where a link is not known."""
    known = [link for link in links if link is not None]
    if len(known) < len(ranks):
        return HpsEstimate()
    pairs = [(t, link.seconds()) for t, link in zip(compute_seconds, known, strict=True)]
    chosen = _chosen(compute_seconds, known, error_budget)
    return HpsEstimate(
        compute_seconds=max(compute_seconds),
        transfer_seconds=max(x for _, x in pairs),
        serial_seconds=max(t + x for t, x in pairs),
        pipelined_seconds=max(max(t, x) for t, x in pairs),
        quantized_seconds=max(choice.period for choice in chosen),
        workers=[
            HpsWorker(
                rank=rank,
                depth=choice.depth,
                push_bits=choice.push,
                pull_bits=choice.pull,
                period_seconds=choice.period,
            )
            for rank, choice in zip(ranks, chosen, strict=True)
        ],
    )


def _chosen(compute_seconds: Sequence[float], links: Sequence[Link], error_budget: float) -> list[Choice]:
    allowed = [bits for bits, error in ERROR.items() if error <= error_budget]
    options = [
        [pipeline(t, link, push, pull) for push in allowed for pull in allowed]
        for t, link in zip(compute_seconds, links, strict=True)
    ]
    period = max(min(choice.period for choice in mine) for mine in options)
    return [
        min((choice for choice in mine if choice.period <= period * SAME), key=lambda choice: choice.error)
        for mine in options
    ]
