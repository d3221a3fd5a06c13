"""Figures of a Rebalancer's ranks for TensorBoard and Prometheus, where these are installed.

    balance.observers.append(to_tensorboard(SummaryWriter()))      # on one rank
    balance.observers.append(to_prometheus())

An observer is called with the Rebalancer whenever a window's result is known on this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pyps.errors import InputError

if TYPE_CHECKING:
    from pyps.torch.rebalance import Rebalancer

Observer = Callable[["Rebalancer"], None]


def to_tensorboard(writer: Any, prefix: str = "pyps/") -> Observer:
    """Scalars at the training step; changes of the split as text. writer: a SummaryWriter."""
    written = 0

    def observe(balance: Rebalancer) -> None:
        nonlocal written
        for name, value in balance.scalars().items():
            writer.add_scalar(prefix + name, value, balance.steps)
        for change in balance.history[written:]:
            writer.add_text(prefix + "replan", str(change), change.step)
        written = len(balance.history)

    return observe


def to_prometheus(registry: Any = None) -> Observer:
    """Gauges pyps_batch, _seconds, _slowdown and _waiting by rank; pyps_imbalance and pyps_replans.

    Raises InputError if prometheus_client is not installed.
    """
    try:
        import prometheus_client
    except ImportError:
        missing = "to_prometheus", "prometheus_client", "no such package"
        raise InputError(*missing, "pip install prometheus-client") from None
    gauges: dict[str, Any] = {}

    def gauge(name: str, labels: tuple[str, ...]) -> Any:
        if name not in gauges:
            where = registry or prometheus_client.REGISTRY
            gauges[name] = prometheus_client.Gauge(f"pyps_{name}", f"pyps: {name}", labels, registry=where)
        return gauges[name]

    def observe(balance: Rebalancer) -> None:
        for name, value in balance.scalars().items():
            rank, _, field = name.rpartition("/")
            if rank:
                gauge(field, ("rank",)).labels(rank.removeprefix("rank")).set(value)
            else:
                gauge(field, ()).set(value)

    return observe
