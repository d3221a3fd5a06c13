"""pyps: train on devices of unequal speed.

    worker = pyps.join()
    worker.attach(model, optimizer)
    for batch in worker.batches(dataset):
        loss(model, batch).backward()
        worker.step()

Names are imported when first used, so that planning needs neither torch nor the store.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyps.errors import Infeasible as Infeasible
    from pyps.errors import InputError as InputError
    from pyps.errors import PypsError as PypsError
    from pyps.errors import StoreError as StoreError
    from pyps.native.values import Hyper as Hyper
    from pyps.native.values import Snapshot as Snapshot
    from pyps.store import Store as Store
    from pyps.store.policies import ASP as ASP
    from pyps.store.policies import BSP as BSP
    from pyps.store.policies import DSSP as DSSP
    from pyps.store.policies import HPS as HPS
    from pyps.store.policies import R2SP as R2SP
    from pyps.store.policies import SSP as SSP
    from pyps.store.policies import Backup as Backup
    from pyps.store.policies import Custom as Custom
    from pyps.store.policies import DynSGD as DynSGD
    from pyps.store.policies import Quorum as Quorum
    from pyps.store.policies import SaPS as SaPS
    from pyps.store.policies import Softsync as Softsync
    from pyps.worker.arrays import ArrayModel as ArrayModel
    from pyps.worker.device.attach import load_parameters as load_parameters
    from pyps.worker.step.loop import Worker as Worker
    from pyps.worker.step.loop import join as join

_HOME = {
    "ArrayModel": "pyps.worker.arrays",
    "ASP": "pyps.store.policies",
    "BSP": "pyps.store.policies",
    "Backup": "pyps.store.policies",
    "Custom": "pyps.store.policies",
    "DSSP": "pyps.store.policies",
    "DynSGD": "pyps.store.policies",
    "HPS": "pyps.store.policies",
    "Quorum": "pyps.store.policies",
    "R2SP": "pyps.store.policies",
    "SSP": "pyps.store.policies",
    "SaPS": "pyps.store.policies",
    "Softsync": "pyps.store.policies",
    "Hyper": "pyps.native.values",
    "Infeasible": "pyps.errors",
    "InputError": "pyps.errors",
    "PypsError": "pyps.errors",
    "Snapshot": "pyps.native.values",
    "Store": "pyps.store",
    "StoreError": "pyps.errors",
    "Worker": "pyps.worker.step.loop",
    "join": "pyps.worker.step.loop",
    "load_parameters": "pyps.worker.device.attach",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pyps' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
