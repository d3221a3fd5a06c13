"""pyps: train on devices that are not alike.

    worker = pyps.join()
    worker.attach(model, optimizer)
    for batch in worker.batches(dataset):
        loss(model, batch).backward()
        worker.step()

Names are loaded when first used, so that planning needs neither torch nor the store.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyps.attach import load_parameters as load_parameters
    from pyps.errors import Infeasible as Infeasible
    from pyps.errors import InputError as InputError
    from pyps.errors import PypsError as PypsError
    from pyps.errors import StoreError as StoreError
    from pyps.policy import ASP as ASP
    from pyps.policy import BSP as BSP
    from pyps.policy import DCASGD as DCASGD
    from pyps.policy import DSSP as DSSP
    from pyps.policy import HPS as HPS
    from pyps.policy import R2SP as R2SP
    from pyps.policy import SSP as SSP
    from pyps.policy import Backup as Backup
    from pyps.policy import ConSGD as ConSGD
    from pyps.policy import Custom as Custom
    from pyps.policy import DynSGD as DynSGD
    from pyps.policy import SaPS as SaPS
    from pyps.policy import Softsync as Softsync
    from pyps.store import Store as Store
    from pyps.values import Hyper as Hyper
    from pyps.values import Snapshot as Snapshot
    from pyps.worker import Worker as Worker
    from pyps.worker import join as join

_HOME = {
    "ASP": "pyps.policy",
    "BSP": "pyps.policy",
    "Backup": "pyps.policy",
    "ConSGD": "pyps.policy",
    "Custom": "pyps.policy",
    "DCASGD": "pyps.policy",
    "DSSP": "pyps.policy",
    "DynSGD": "pyps.policy",
    "HPS": "pyps.policy",
    "R2SP": "pyps.policy",
    "SSP": "pyps.policy",
    "SaPS": "pyps.policy",
    "Softsync": "pyps.policy",
    "Hyper": "pyps.values",
    "Infeasible": "pyps.errors",
    "InputError": "pyps.errors",
    "PypsError": "pyps.errors",
    "Snapshot": "pyps.values",
    "Store": "pyps.store",
    "StoreError": "pyps.errors",
    "Worker": "pyps.worker",
    "join": "pyps.worker",
    "load_parameters": "pyps.attach",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pyps' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
