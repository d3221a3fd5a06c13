"""`pyps-profile MODEL --all --cluster FILE -B N`: from the devices of this machine to a plan."""

from __future__ import annotations

from pathlib import Path

from pyps.cli.outputs import check_writable
from pyps.cli.plan import print_plan
from pyps.cli.profile_views import note
from pyps.errors import InputError
from pyps.formats import MAX_BATCH, write_json
from pyps.formats.files import write_bytes
from pyps.profiler.machine import Measure, cluster_text, measured_devices


def check_cluster_options(path: Path, global_batch: int | None, *, every: bool) -> int:
    """The global batch. Raises InputError where an option is missing, or the cluster file is there."""
    if not every:
        raise InputError("--cluster", "", "without --all", "--all, too: it measures every device")
    if global_batch is None or not 1 <= global_batch <= MAX_BATCH:
        found = "nothing" if global_batch is None else str(global_batch)
        raise InputError("--global-batch", "", found, f"samples of a step of all devices, 1 to {MAX_BATCH}")
    if path.exists():
        expected = "a new file; --for CLUSTER measures for one that is there"
        raise InputError("--cluster", "", f"{path}, which is there", expected)
    check_writable("--cluster", path)
    return global_batch


def plan_machine(path: Path, global_batch: int, devices: list[str], measure: Measure) -> None:
    """Measure the devices, write their profiles beside the cluster file, and this, and print the plan."""
    groups = measured_devices([(name, _kind(name)) for name in devices], measure)
    for file, profile in {g.profile_name: g.profile for g in groups}.items():
        write_json(path.with_name(f"{file}.json"), profile)
        note(f"wrote {path.with_name(f'{file}.json')}")
    write_bytes(path, cluster_text(groups, global_batch).encode())
    note(f"wrote {path}")
    print_plan(path)


def _kind(device: str) -> str:
    """A device's model and memory."""
    if device == "cpu":
        return device
    import torch

    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} {properties.total_memory / 2**30:.0f}G"
