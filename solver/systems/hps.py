"""Designs H-PS's pipelines: the depth of each worker's pipeline, its bits each way, and the resulting period.

H-PS (Xian et al., IEEE Access 9, 2021): a pipeline keeps workers computing while parameters are in transfer,
and quantization shrinks the traffic in both directions. Our model: with d iterations in flight, one of them
computing (C seconds) and d - 1 in transfer (M seconds, for W of which the busier direction of the link is
occupied),

    period = C + M for d = 1,  max(C, W, M / (d - 1)) for d > 1;   staleness grows by d - 1

Two buffers reach max(C, M). More help where M is longer than both C and W: while one transfer waits for its
latency, or uses one direction of the link, others use the rest. Among the bits
that keep the error of a push and of a pull within the budget, every worker takes the most exact ones that
make it no slower than the slowest worker's best period.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pyps.formats import Bits, HpsEstimate
from pyps.formats.options import MAX_DEPTH
from pyps.solver.links import ERROR, LinkCost
from pyps.solver.mode import SAME, error_of


@dataclass(frozen=True)
class PipelineDesign:
    """Bits each way, iterations in flight (depth), and the seconds of a period."""

    push_bits: Bits
    pull_bits: Bits
    depth: int
    period_seconds: float

    @property
    def error(self) -> tuple[float, float, float]:
        """Sort key, as pyps.solver.mode has it."""
        return error_of(self.push_bits, self.pull_bits)


def design_pipeline(
    compute_seconds: float, link: LinkCost, push: Bits = 32, pull: Bits = 32, within: float = 0.0
) -> PipelineDesign:
    """The shallowest pipeline whose period is within a limit, or else the shortest that MAX_DEPTH steps under
    way allow.

    compute_seconds: of a step. link: its transfers cross it. push, pull: bits of a number. within: seconds.
    """
    transfer, floor = link.seconds(push, pull), max(compute_seconds, link.busy_seconds(push, pull))
    if transfer == 0:
        return PipelineDesign(push, pull, 1, compute_seconds)
    in_transfer = min(math.ceil(transfer / max(floor, within) / SAME), MAX_DEPTH - 1)
    return PipelineDesign(push, pull, 1 + in_transfer, max(floor, transfer / in_transfer))


def hps_estimate(
    compute_seconds: Sequence[float], links: Sequence[LinkCost | None], designs: Sequence[PipelineDesign]
) -> HpsEstimate:
    """The slowest worker's iteration with and without overlap; empty if a link is unknown.

    compute_seconds, links: of each worker. designs: their pipelines, as `hps_designs` gives them.
    """
    known = [link for link in links if link is not None]
    if not designs:
        return HpsEstimate()
    pairs = [(t, link.seconds()) for t, link in zip(compute_seconds, known, strict=True)]
    return HpsEstimate(
        compute_seconds=max(compute_seconds),
        transfer_seconds=max(x for _, x in pairs),
        serial_seconds=max(t + x for t, x in pairs),
        pipelined_seconds=max(
            design_pipeline(t, x).period_seconds for t, x in zip(compute_seconds, known, strict=True)
        ),
        quantized_seconds=max(design.period_seconds for design in designs),
    )


def hps_designs(
    compute_seconds: Sequence[float], links: Sequence[LinkCost | None], error_budget: float = 0.0
) -> list[PipelineDesign]:
    """Each worker's pipeline, with the most exact bits that make none slower; empty if a link is unknown."""
    known = [link for link in links if link is not None]
    return _chosen(compute_seconds, known, error_budget) if len(known) == len(links) else []


def _chosen(
    compute_seconds: Sequence[float], links: Sequence[LinkCost], error_budget: float
) -> list[PipelineDesign]:
    allowed = [bits for bits, error in ERROR.items() if error <= error_budget]
    options = [
        [design_pipeline(t, link, push, pull) for push in allowed for pull in allowed]
        for t, link in zip(compute_seconds, links, strict=True)
    ]
    period = max(min(design.period_seconds for design in mine) for mine in options)
    found = []
    for t, link, mine in zip(compute_seconds, links, options, strict=True):
        fitting = (design for design in mine if design.period_seconds <= period * SAME)
        best = min(fitting, key=lambda design: design.error)
        found.append(design_pipeline(t, link, best.push_bits, best.pull_bits, period))
    return found
