"""Runs on a Ray cluster: Ray places and watches the processes, pyps trains in them.

    report = pyps.ray.Trainer(train, "plan.json", {"v100": {"GPU": 1}}, samples=100_000, policy="asp").fit()

trainer.py says what to run and where, shows an actor to the launcher (pyps.run) and fills Ray's dashboard,
actors.py and servers.py are what Ray runs on a node, profiles.py measures the cluster's devices.
"""

from pyps.ray.profiles import profile
from pyps.ray.trainer import Trainer

__all__ = ["Trainer", "profile"]
