"""Faults of workers in virtual time: those that a cluster file names, and those of its churn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pyps.formats import Churn, Cluster, FaultSpec

NOTICED_SECONDS = 0.05  # until the others notice a death, where nothing is said of it


@dataclass(frozen=True)
class Fault:
    """A fault of one rank at time `at` (seconds). stop: the worker stands still for `seconds`.
    kill, leave: it dies or leaves, and a successor joins after `seconds` (0: never).
    """

    rank: int
    at: float
    kind: str  # stop, kill, leave
    seconds: float = 0.0


def stated_faults(cluster: Cluster, used: Sequence[str]) -> list[Fault]:
    """All faults that a cluster file states but slow steps and links. used: the names of the workers."""
    rank_of = {name: rank for rank, name in enumerate(used)}
    found = [one for spec in cluster.simulation.fault for one in _named(cluster, spec, rank_of)]
    churn = cluster.simulation.churn
    return found + (churn_faults(churn, len(used)) if churn is not None else [])


def churn_faults(churn: Churn, ranks: int) -> list[Fault]:
    """The deaths and arrivals of that many ranks; the same for equal arguments.

    A rank's lives are exponential, of mean `churn.every`. `churn.gone` of the ranks end for good at a random
    time; as many others are absent until one.
    """
    draw = np.random.default_rng(churn.seed)
    gone = round(churn.gone * ranks)
    chosen = draw.permutation(ranks)[: 2 * gone].tolist()
    times = draw.uniform(0.0, churn.until, 2 * gone).tolist()
    ends = dict(zip(chosen[:gone], times[:gone], strict=True))
    begins = dict(zip(chosen[gone:], times[gone:], strict=True))
    found = []
    for rank in range(ranks):
        at, end = 0.0, ends.get(rank, churn.until)
        if rank in begins:
            at = begins[rank]
            found.append(Fault(rank, 0.0, "leave", at))
        while (at := at + draw.exponential(churn.every)) < end:
            found.append(Fault(rank, at, "kill", churn.away))
            at += churn.away
        if rank in ends:
            found.append(Fault(rank, end, "kill"))
    return found


def _named(cluster: Cluster, h: FaultSpec, rank_of: dict[str, int]) -> list[Fault]:
    ranks = [rank_of[name] for name in cluster.named(h.worker) if name in rank_of]
    return [] if h.kind in ("slow", "link") else [Fault(rank, h.at, h.kind, h.seconds) for rank in ranks]
