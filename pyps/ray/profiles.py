"""Profiles of a cluster's devices: a Ray task measures each kind of node with what one worker takes there."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyps.errors import InputError
from pyps.formats import encode
from pyps.ray.actors import Resources, actor_options, check_resources, connected_ray
from pyps.run.options import StrPath

ACCELERATOR = "accelerator_type:"
NAME = re.compile(r"[A-Za-z0-9._-]+")


def profile(
    model: str, kinds: Mapping[str, Resources] | None = None, folder: StrPath = "profiles", **options: Any
) -> dict[str, Path]:
    """Measure `model` once for each kind of device; the profiles' files, folder/KIND.json, by kind.

    model: as for `pyps-profile`; a script is a file that all nodes have. kinds: by name, the resources that
    one worker takes, as for Trainer; None: a GPU of each type that the cluster has, or a CPU. options: other
    arguments of pyps.profiler.measure.profile_model. One kind is measured after the other: two may share a
    node. Raises InputError, also for resources that the cluster does not have.
    """
    ray = connected_ray()
    wanted = dict(device_kinds(ray.nodes()) if kinds is None else kinds)
    for name, resources in wanted.items():
        if not NAME.fullmatch(name):
            raise InputError("pyps.ray.profile", "kinds", repr(name), "letters, digits, '.', '_' or '-'")
        check_resources(f"kinds[{name!r}]", resources)
        _check_there(ray, name, resources)
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    source = os.path.abspath(model) if model.endswith(".py") else model
    files = {}
    for name, resources in wanted.items():
        device = "cuda:0" if resources.get("GPU") else "cpu"
        task = ray.remote(measure).options(**actor_options(resources), max_retries=0)
        files[name] = out / f"{name}.json"
        files[name].write_bytes(ray.get(task.remote(source, device, options)))
    return files


def measure(model: str, device: str, options: Mapping[str, Any]) -> bytes:
    """The profile of this node's device, as JSON."""
    from pyps.profiler.measure import profile_model

    return encode(profile_model(model, device=device, notify=print, **options))


def device_kinds(nodes: list[dict[str, Any]]) -> dict[str, Resources]:
    """Return what one worker takes of each type of GPU among these nodes, as ray.nodes() shows them; a CPU if
    there is none.
    """
    found = {name for node in nodes if node["Alive"] for name in node["Resources"]}
    types = sorted(name for name in found if name.startswith(ACCELERATOR))
    kinds: dict[str, Resources] = {t.removeprefix(ACCELERATOR).lower(): {"GPU": 1.0, t: 0.001} for t in types}
    return kinds or {"cpu": {"CPU": 1.0}}


def _check_there(ray: Any, name: str, resources: Resources) -> None:
    """Raise InputError unless some node has as much: Ray would wait for one for ever."""
    for node in ray.nodes():
        has = node["Resources"] if node["Alive"] else {}
        if has and all(has.get(resource, 0.0) >= amount for resource, amount in resources.items()):
            return
    raise InputError("pyps.ray.profile", f"kinds[{name!r}]", f"{dict(resources)}", "what one node has")
