"""Devices of a machine: alike ones share a profile, one that is slower has its own, and the order is kept."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence

import msgspec

from pyps.formats import Cluster, Device, ModelInfo, Point, Profile, check_cluster
from pyps.profiler import select_fit
from pyps.profiler.machine import cluster_text, measured_devices

SIZES = 1, 8, 32, 128
MOST_BRIEF = 2


class Machine:
    """Devices of known slowness; remembers which sizes it was asked for."""

    def __init__(self, slower: dict[str, float]) -> None:
        self.slower, self.asked = slower, list[tuple[str, bool]]()

    def __call__(self, device: str, sizes: Sequence[int] | None) -> Profile:
        self.asked.append((device, sizes is None))
        assert sizes is None or len(sizes) <= MOST_BRIEF
        points = [Point(batch=b, seconds=self.slower[device] * (0.01 + 0.001 * b)) for b in sizes or SIZES]
        model = ModelInfo(name="m")
        return Profile(device=Device(name=device), model=model, points=points, fit=select_fit(points))


def test_alike_devices_are_measured_once_and_confirmed() -> None:
    machine = Machine({"cuda:0": 1.0, "cuda:1": 1.03, "cuda:2": 0.98})
    groups = measured_devices([(name, "A100 80G") for name in machine.slower], machine)
    assert [(g.name, g.count) for g in groups] == [("a100-80g", 3)]
    assert machine.asked == [("cuda:0", True), ("cuda:1", False), ("cuda:2", False)]


def test_a_slower_device_of_a_kind_has_a_profile_of_its_own_and_the_order_is_kept() -> None:
    machine = Machine({"cuda:0": 1.0, "cuda:1": 1.2, "cuda:2": 1.0, "cuda:3": 1.2, "cuda:4": 4.0})
    kinds = ["A100", "A100", "A100", "A100", "T4"]
    groups = measured_devices(list(zip(machine.slower, kinds, strict=True)), machine)
    assert [(g.name, g.profile_name, g.count) for g in groups] == [
        ("a100", "a100", 1),
        ("a100-2", "a100-2", 1),
        ("a100-part2", "a100", 1),
        ("a100-2-part2", "a100-2", 1),
        ("t4", "t4", 1),
    ]
    assert [name for name, whole in machine.asked if whole] == ["cuda:0", "cuda:1", "cuda:4"]


def test_the_cluster_file_is_one() -> None:
    machine = Machine({"cuda:0": 1.0, "cuda:1": 1.0, "cuda:2": 2.0})
    kinds = ["A100", "A100", "T4"]
    text = cluster_text(measured_devices(list(zip(machine.slower, kinds, strict=True)), machine), 96)
    found = tomllib.loads(text)
    assert found["job"] == {"global_batch": 96}
    assert found["worker"] == [
        {"name": "a100", "count": 2, "profile": "a100.json"},
        {"name": "t4", "profile": "t4.json"},
    ]
    check_cluster("made", msgspec.convert(found, Cluster))
