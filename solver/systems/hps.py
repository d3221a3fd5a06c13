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

from collections.abc import Sequence

from pyps.formats import HpsEstimate
from pyps.formats.mode import ROUND, Mode
from pyps.formats.options import MAX_DEPTH
from pyps.solver.links import LinkCost, step_seconds
from pyps.solver.mode import SAME, ModeChoices, codecs_within, step_of


def hps_modes(
    compute_seconds: Sequence[float], links: Sequence[LinkCost | None], error_budget: float = 0.0
) -> list[Mode]:
    """Each worker's pipeline, the shallowest with the most exact bits that make none slower; empty if a link
    is unknown.

    compute_seconds, links: of each worker.
    """
    known = [link for link in links if link is not None]
    if len(known) < len(links):
        return []
    codecs = codecs_within(error_budget)
    choices = ModeChoices(ROUND, codecs, codecs, (2, MAX_DEPTH), 2)
    pairs, options = list(zip(compute_seconds, known, strict=True)), choices.options()
    period = max(step_of(t, [link], choices.fastest) for t, link in pairs)
    return [
        next(one for one in options if step_of(t, [link], one) <= period * SAME) if link.seconds() else Mode()
        for t, link in pairs
    ]


def hps_estimate(
    compute_seconds: Sequence[float], links: Sequence[LinkCost | None], modes: Sequence[Mode]
) -> HpsEstimate:
    """The slowest worker's iteration with and without overlap; empty if a link is unknown.

    compute_seconds, links: of each worker. modes: their pipelines, as `hps_modes` gives them.
    """
    if not modes:
        return HpsEstimate()
    pairs = [(t, [x]) for t, x in zip(compute_seconds, links, strict=True) if x is not None]
    return HpsEstimate(
        compute_seconds=max(compute_seconds),
        transfer_seconds=max(x[0].seconds() for _, x in pairs),
        serial_seconds=max(step_seconds(t, x) for t, x in pairs),
        pipelined_seconds=max(step_seconds(t, x, depth=MAX_DEPTH) for t, x in pairs),
        quantized_seconds=max(step_of(*pair, mode) for pair, mode in zip(pairs, modes, strict=True)),
    )
