"""How a pipelined worker notices that it has run ahead of the others.

All take the same time for a round. A worker that goes on while another is killed or stands still would stay
ahead for good, and compute on parameters that are as many rounds old.
"""

from __future__ import annotations


def may_run_ahead(depth: int, *, local: bool, in_rounds: bool) -> bool:
    """Whether a worker's parameters may become older than its pipeline makes them: not if there are two steps
    under way, of which one is one version late in any case; local steps need not be.

    depth: steps under way. local: they are rounds of local steps. in_rounds: workers wait for each other's
    gradients.
    """
    return in_rounds and (local or depth > 2)


def has_run_ahead(waited: float, way: float, step: float) -> bool:
    """Whether a gradient waited for the others so long that its step might have begun a step later.

    waited, way, step: for its round, on its way to the store and back, and of computing it; in one unit.
    """
    return waited > way + step
