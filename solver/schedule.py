"""What a plan says about turns and transfers: R2SP's even gaps, H-PS's overlap of transfer and compute.

R2SP (Chen, Wang, Li, INFOCOM 2019): workers update the server in an evenly gapped round-robin, so that
transfers do not collide. Ours: the period is the slowest worker's iteration with its own transfer, each of
the N turns is a push and a pull, and the schedule is feasible if all N fit into a period one after another.

H-PS (Xian et al., IEEE Access 9, 2021): a pipeline keeps workers computing while parameters are in transfer.
Ours: with double buffers an iteration takes max(compute, transfer) instead of their sum.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyps.formats import HpsEstimate, R2spSchedule

BYTES_PER_PARAMETER = 4  # fp32 both ways, before any quantization


def transfer_seconds(parameters: int | None, bandwidth: float | None, latency: float | None) -> float | None:
    """Push and pull of the whole model: 2 (latency + bytes / bandwidth); None where a figure is missing."""
    if parameters is None or bandwidth is None:
        return None
    return 2 * ((latency or 0.0) + BYTES_PER_PARAMETER * parameters / bandwidth)


def r2sp_schedule(
    ranks: Sequence[int], compute_seconds: Sequence[float], transfers: Sequence[float | None]
) -> R2spSchedule:
    """The ring of the ranks that take part, in rank order, one gap of period / N apart.

    Without transfer times for all, the period is that of the computation and feasible is None.
    """
    known = [x for x in transfers if x is not None]
    complete = len(known) == len(ranks)
    alone = max(t + (x or 0.0) for t, x in zip(compute_seconds, transfers, strict=True))
    period = max(alone, sum(known)) if complete else max(compute_seconds)
    gap = period / len(ranks)
    return R2spSchedule(
        feasible=sum(known) <= alone if complete else None,
        period_seconds=period,
        gap_seconds=gap,
        order=list(ranks),
        offsets_seconds=[k * gap for k in range(len(ranks))],
    )


def hps_estimate(compute_seconds: Sequence[float], transfers: Sequence[float | None]) -> HpsEstimate:
    """The slowest worker's iteration with and without overlap; empty where a transfer time is missing."""
    pairs = [(t, x) for t, x in zip(compute_seconds, transfers, strict=True) if x is not None]
    if len(pairs) < len(compute_seconds):
        return HpsEstimate()
    return HpsEstimate(
        compute_seconds=max(compute_seconds),
        transfer_seconds=max(x for _, x in pairs),
        serial_seconds=max(t + x for t, x in pairs),
        pipelined_seconds=max(max(t, x) for t, x in pairs),
    )
