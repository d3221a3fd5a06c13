"""Ray itself, imported when it is needed, and resources as Ray's calls take them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from pyps.errors import InputError

Resources = Mapping[str, float]  # as ray.cluster_resources() names them: CPU, GPU, and the cluster's own


def connected_ray() -> Any:
    """The ray module, connected to this process's cluster, or to RAY_ADDRESS's, or to this machine's.

    Starts none: its ports would be open to the network. Raises InputError without ray or a cluster, and
    outside its nodes.
    """
    try:
        ray = importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise InputError("ray", "", f"no {error.name}", "pip install 'pyps-train[ray]'") from None
    if not ray.is_initialized():
        try:
            ray.init(address="auto")
        except ConnectionError:
            expected = "a cluster: ray.init() starts one on this machine, `ray start` one of several"
            raise InputError("ray", "", "no cluster to connect to", expected) from None
    if importlib.import_module("ray.util.client").ray.is_connected():
        expected = "a process on a node of the cluster, as `ray job submit` starts"
        raise InputError("ray", "", "a connection of Ray Client (ray://)", expected)
    return ray


def check_resources(where: str, resources: Resources) -> None:
    """Raise InputError for an amount that is no positive number."""
    for name, amount in resources.items():
        if not (isinstance(amount, int | float) and amount > 0):
            raise InputError(where, name, repr(amount), "a number above 0")
    if not resources:
        raise InputError(where, "", "nothing", 'at least one resource, such as {"CPU": 1}')


def actor_options(resources: Resources) -> dict[str, Any]:
    """The options of an actor or a task that takes these."""
    own = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
    return {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0), "resources": own}
