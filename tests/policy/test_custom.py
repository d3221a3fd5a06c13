"""A policy written in Python: in virtual time, in stores, in processes; and what it may get wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import MutableSequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from halving import Halving
from hypothesis import given, settings
from policy_drive import COMMITTED, REFUSED, Drive, orders, partition
from run_scripts import script
from run_tools import make_plan
from sampled import examples

from pyps.errors import InputError, TimedOut, UnknownPolicy
from pyps.formats import write_json
from pyps.native import core
from pyps.native.decisions import PolicyContext
from pyps.native.values import Hyper
from pyps.simulate import Logistic, Scenario, SimWorker, simulate
from pyps.store import Store
from pyps.store.policies import Custom, policy_named, register_policy

PYPS = str(Path(sys.executable).parent / "pyps")


@dataclass(frozen=True, kw_only=True)
class Broken(Custom):
    """Raises when it is asked."""

    when: str = "start"

    def may_start(self, context: PolicyContext, shared_state: MutableSequence[int]) -> bool:
        shared_state[0] = 7
        if self.when == "start":
            raise ValueError("the cat sat on it")
        return self.when != "never"

    def scale(self, context: PolicyContext, shared_state: MutableSequence[int]) -> float | None:
        raise ValueError("the cat sat on it")


@settings(max_examples=examples(10, 25), deadline=None)
@given(order=orders)
def test_it_decides_in_virtual_time(order: list[int]) -> None:
    policy = Halving(bound=1, most=3)
    register_policy(policy)
    drive = Drive(policy, [5, 3, 2, 7])
    clocks = [0] * 4
    for k in order:
        if k in drive.claims:
            staleness = drive.version - drive.pulled[k]
            assert drive.push(k) == (COMMITTED if staleness <= 3 else REFUSED)
            clocks[k] = clocks[k] + (staleness <= 3)
        else:
            assert drive.start(k) == (clocks[k] - min(clocks) <= 1)
    for _, staleness, scale in drive.pushes:
        assert scale == 0.5**staleness


def test_every_sample_is_trained_in_a_simulation() -> None:
    workers = tuple(SimWorker(f"w{k}", 4, lambda b, k=k: 0.1 + 0.05 * k) for k in range(4))  # type: ignore[misc]
    result = simulate(Scenario(workers), Halving(bound=1), iterations=30, objective=Logistic())
    assert result.samples == 30 * 16
    assert max(result.staleness) <= 4
    assert result.idle_share > 0
    assert result == simulate(Scenario(workers), Halving(bound=1), iterations=30, objective=Logistic())


def test_it_decides_in_stores(shm: Path) -> None:
    made = Store.create("own", {"w": np.zeros(10)}, batches=[1, 1], policy=Halving(bound=1))
    with made as one, Store.open("own") as two:
        one.join(0)
        two.join(1)
        for store in (one, two):
            store.start()
            store.pull()
        for store, expected in (
            (one, -0.5),
            (two, -0.75),
        ):  # half a step each; the second one is a version late
            staging = store.stage()
            staging.flat.fill(1.0)
            store.push(staging, 1, Hyper(lr=1.0))
            assert one.pull()[0][0] == expected
        for _ in range(2):
            one.start()
            one.pull()
            one.push(one.stage(), 1, Hyper(lr=0.0))
        with pytest.raises(TimedOut):
            one.start(timeout=0.05)


def test_who_does_not_know_it_may_look_but_not_join(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.create("own", {"w": np.zeros(10)}, batches=[1], policy=Halving(most=9)):
        monkeypatch.setattr(core, "_known", {})
        with Store.open("own") as other:
            assert other.status().version == 0
            other.join(role="observer")
            other.leave()
            with pytest.raises(UnknownPolicy, match="has not registered"):
                other.join()


def one_step(store: Store) -> None:
    store.start()
    store.push(store.stage(), 1, Hyper(lr=0.0))


@pytest.mark.parametrize("when", ["start", "push"])
def test_what_it_raises_is_the_cause_of_a_typed_error(shm: Path, when: str) -> None:
    with Store.create("own", {"w": np.zeros(10)}, batches=[1], policy=Broken(when=when)) as store:
        store.join()
        with pytest.raises(UnknownPolicy, match="failed to decide") as caught:
            one_step(store)
        assert isinstance(caught.value.__cause__, ValueError)
        assert store.status().version == 0


def test_a_wait_changes_no_words(shm: Path) -> None:
    policy = Broken(when="never")
    register_policy(policy)
    drive = Drive(policy, [1])
    assert not drive.start(0)
    assert not drive.start(0), "and still the answer is to the same view"


@pytest.mark.promise("`--policy a.B`: imports module")
def test_text_leads_to_it_and_to_nothing_else() -> None:
    assert policy_named("halving.Halving:bound=1") == Halving(bound=1)
    assert str(Halving(most=7)) == "halving.Halving:most=7"
    assert Halving(bound=1).params() != Halving(bound=2).params()
    for text in ("halving.Sight", "halving.Nothing", "nowhere.Halving"):
        with pytest.raises(InputError, match="policy"):
            policy_named(text)


@pytest.mark.thorough
def test_pyps_run_trains_with_it(shm: Path, tmp_path: Path) -> None:
    write_json(tmp_path / "plan.json", make_plan())
    command = [PYPS, "run", "--plan", str(tmp_path / "plan.json"), "--policy", "halving.Halving:bound=1"]
    command += ["--samples", "96", "--json", "--run-dir", str(tmp_path / "run"), str(script(tmp_path))]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "helpers")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["samples"]["trained"] == 96


@settings(max_examples=10, deadline=None)
@given(order=orders)
def test_every_sample_is_trained_once(order: list[int]) -> None:
    policy = Halving()
    register_policy(policy)
    drive = Drive(policy, [5, 3, 2, 7], samples=100)
    for k in order:
        drive.turn(k)
    drive.finish()
    assert partition(drive.trained) == [(0, 100)]
