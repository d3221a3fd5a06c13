"""Emulated links: a message takes its latency and bytes; workers of a shared link take turns."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from run_tools import make_plan
from threads import in_threads

from pyps.formats import Fit, write_json
from pyps.run.ranks import throttles
from pyps.store.policies import ASP, BSP
from pyps.worker.emulated_link import EmulatedLinks, LinkSpec
from pyps.worker.loop import Worker
from pyps.worker.settings import Settings, ThrottleSpec

CHUNK = 32_768  # numbers: what a small model fills up to, and so what travels
PROFILE = {
    "schema": "pyps.profile/1",
    "device": {"name": "d"},
    "model": {"name": "m", "parameters": 1000},
    "points": [{"batch": 1, "seconds": 0.01}, {"batch": 9, "seconds": 0.02}],
}
CLUSTER = """
[job]
global_batch = 8
[[shared]]
name = "rack/1"
bandwidth = 1e6
latency = 0.01
[[worker]]
name = "device-0"
profile = "p.json"
bandwidth = 5e6
latency = 0.02
[[worker]]
name = "device-1"
profile = "p.json"
shares = ["rack/1"]
bandwidth = 5e6
"""


def test_a_message_takes_its_latency_and_its_bytes() -> None:
    began = time.monotonic()
    EmulatedLinks((LinkSpec(0.02, 1e6), LinkSpec(0.0, 2e6))).carry(20_000)
    assert time.monotonic() - began >= 0.02 + 0.02 + 0.01
    EmulatedLinks().carry(10**12)


def test_workers_take_turns_on_a_shared_link(tmp_path: Path) -> None:
    shared = LinkSpec(0.0, 1e6, "rack/1")
    began = time.monotonic()
    in_threads(*(lambda: EmulatedLinks((shared,), tmp_path).carry(30_000) for _ in range(3)))
    assert time.monotonic() - began >= 0.09


def test_a_cluster_file_says_which_links_to_emulate(tmp_path: Path) -> None:
    write_json(tmp_path / "p.json", PROFILE)
    (tmp_path / "c.toml").write_text(CLUSTER)
    own, shared = throttles(make_plan(), "plan.json", tmp_path / "c.toml")
    assert own is not None
    assert shared is not None
    assert own.links == (LinkSpec(0.02, 5e6),)
    assert shared.links == (LinkSpec(0.01, 1e6, "rack/1"),)


def test_the_worker_learns_of_its_links(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = Fit(kind="affine", per_sample_seconds=0.001, trusted_min_batch=1, trusted_max_batch=9)
    spec = ThrottleSpec(fit=fit, links=(LinkSpec(0.02, 5e6, "rack"),))
    settings = Settings(store="s", rank=0, policy=BSP(), throttle=spec, launched=True)
    for name, value in settings.to_env().items():
        monkeypatch.setenv(name, value)
    assert Settings.from_env() == settings


@pytest.mark.parametrize(("depth", "transfers"), [(1, 2), (2, 1)])
def test_pushes_and_pulls_cross_it(shm: Path, depth: int, transfers: int) -> None:
    """A step takes a push and a pull; in a pipeline they overlap with the emulated compute."""
    one_way, steps = 0.03, 6
    model = torch.nn.Linear(10, 1, bias=False)
    fit = Fit(kind="affine", fixed_seconds=2 * one_way, trusted_min_batch=1, trusted_max_batch=99)
    link = LinkSpec(0.0, 4 * CHUNK / one_way)
    settings = Settings(
        store="run",
        rank=0,
        policy=BSP() if depth == 1 else ASP(),
        samples=4 * steps,
        batches=(4,),
        throttle=ThrottleSpec(fit=fit, links=(link,)),
        depth=depth,
    )
    with Worker(settings) as worker:
        worker.attach(model)
        began = time.monotonic()
        for x, y in worker.batches((torch.randn(8, 10), torch.randn(8, 1))):
            torch.nn.functional.mse_loss(model(x), y).backward()
            worker.step()
        lasted = time.monotonic() - began
    assert lasted >= steps * one_way * 2 * transfers
    assert worker.steps == steps
