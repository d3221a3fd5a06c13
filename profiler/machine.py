"""Measures all devices of a machine for a cluster file: of those that are alike one, the others briefly.

Devices of one kind may still differ: in cooling, in what else runs on them, in their power caps. So each is
timed at two sizes; one that is not as fast as the first of its kind gets a profile of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pyps.formats import Profile
from pyps.profiler.curve import fit_of
from pyps.profiler.fit import medians_of, point_seconds, predict_seconds

ALIKE = 0.05  # relative: the difference in times up to which devices of a kind share a profile

Measure = Callable[[str, Sequence[int] | None], Profile]  # device, sizes; None: all that are needed


@dataclass(frozen=True)
class Devices:
    """Devices that follow one another and share a profile. name: for a group of a cluster file and a file."""

    name: str
    profile_name: str
    profile: Profile
    count: int = 1


def measured_devices(devices: Sequence[tuple[str, str]], measure: Measure) -> list[Devices]:
    """The groups of a machine's devices, in their order.

    devices: the name and the kind of each. measure: makes the profile of a device.
    """
    known: dict[str, list[tuple[str, Profile]]] = {}
    groups: list[Devices] = []
    for device, kind in devices:
        base = re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")
        alike = known.setdefault(base, [])
        found = _alike(device, alike, measure)
        if found is None:
            found = base if not alike else f"{base}-{len(alike) + 1}", measure(device, None)
            alike.append(found)
        name, profile = found
        if groups and groups[-1].profile_name == name:
            groups[-1] = replace(groups[-1], count=groups[-1].count + 1)
            continue
        again = sum(group.profile_name == name for group in groups)
        groups.append(Devices(f"{name}-part{again + 1}" if again else name, name, profile))
    return groups


def _alike(device: str, known: Sequence[tuple[str, Profile]], measure: Measure) -> tuple[str, Profile] | None:
    """The profile, with its name, that this device's times at two of its sizes agree with."""
    if not known:
        return None
    sizes = sorted(point.batch for point in known[0][1].points)
    brief = measure(device, sorted({sizes[len(sizes) // 2], sizes[-1]} if len(sizes) > 2 else set(sizes)))
    batches, seconds = medians_of([(p.batch, s) for p in brief.points for s in point_seconds(p)])
    for name, profile in known:
        fit = fit_of(profile)
        expected = [predict_seconds(fit, int(batch)) for batch in batches]
        if all(abs(s / e - 1) <= ALIKE for s, e in zip(seconds, expected, strict=True)):
            return name, profile
    return None


def cluster_text(groups: Sequence[Devices], global_batch: int) -> str:
    """The cluster file of a machine, in TOML."""
    tables = [f"[job]\nglobal_batch = {global_batch}\n"]
    for group in groups:
        count = f"count = {group.count}\n" if group.count > 1 else ""
        tables.append(f'[[worker]]\nname = "{group.name}"\n{count}profile = "{group.profile_name}.json"\n')
    return "\n".join(tables)
