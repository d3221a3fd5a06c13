"""How the ranks do, to TensorBoard and Prometheus, where these are installed.

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
    told = 0

    def observe(balance: Rebalancer) -> None:
        nonlocal told
        for name, value in balance.scalars().items():
            writer.add_scalar(prefix + name, value, balance.steps)
        for change in balance.history[told:]:
            writer.add_text(prefix + "replan", str(change), change.step)
        told = len(balance.history)

    return observe


def to_prometheus(registry: Any = None) -> Observer:
    """Gauges pyps_batch, _seconds, _slowdown and _waiting by rank; pyps_imbalance and pyps_replans.

    Raises InputError if prometheus_client is not installed.
    """
    try:
        import prometheus_client
    except ImportError:
        raise InputError(
            "to_prometheus", "prometheus_client", "no such package", "pip install prometheus-client"
        ) from None
    known: dict[str, Any] = {}

    def gauge(name: str, labels: tuple[str, ...]) -> Any:
        if name not in known:
            where = registry or prometheus_client.REGISTRY
            known[name] = prometheus_client.Gauge(f"pyps_{name}", f"pyps: {name}", labels, registry=where)
        return known[name]

    def observe(balance: Rebalancer) -> None:
        for name, value in balance.scalars().items():
            rank, _, field = name.rpartition("/")
            if rank:
                gauge(field, ("rank",)).labels(rank.removeprefix("rank")).set(value)
            else:
                gauge(field, ()).set(value)

    return observe
