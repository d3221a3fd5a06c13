"""Threads and the clock carry out the same actions: a run and its simulation, call by call."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from remote_tools import eventually
from worker_tools import X, Y, backward, loss_of, make_model

from pyps.simulate import Scenario, SimWorker, simulate
from pyps.simulate.run import replay
from pyps.step.events import Action, End, Event
from pyps.step.machine import StepMachine
from pyps.store.policies import Policy
from pyps.worker.step.loop import Worker, join
from pyps.worker.step.step import Step
from pyps.worker.step.transport import Transport

BATCH, CLAIMS, PART, LOCAL = 10, 6, 4, 2
FREE = [name for name, kind in Policy.known.items() if kind().needs.allows_pipeline]
CASES = [(name, 1, 0) for name in Policy.known]
CASES += [(name, depth, local) for name in FREE for depth in (2, 3) for local in (0, LOCAL)]


@pytest.fixture
def actions(monkeypatch: pytest.MonkeyPatch) -> list[Action]:
    """Every action of every machine. Transfers have ended before a worker goes on, as in virtual time."""
    found: list[Action] = []
    receive, begin = StepMachine.receive, Transport.begin

    def noted(machine: StepMachine, event: Event) -> Action:
        found.append(receive(machine, event))
        return found[-1]

    def begun(transport: Transport) -> Step | None:
        eventually(lambda: transport.idle)
        step = begin(transport)
        eventually(lambda: transport.idle)
        return step

    monkeypatch.setattr(StepMachine, "receive", noted)
    monkeypatch.setattr(Transport, "begin", begun)
    return found


def run_alone(policy: str, depth: int, local: int, journal: Path) -> None:
    model, batch = make_model(), BATCH // max(1, local)
    made = join(
        "run", 0, batches=[batch], samples=CLAIMS * BATCH, seed=5, policy=policy, depth=depth,
        micro_batch=PART,
    )  # fmt: skip
    with Worker(replace(made.settings, journal=journal)) as worker:
        options = {"local_steps": local} if local else {}
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.01), **options)
        for x, y in worker.batches((X, Y)):
            backward(loss_of(model, x, y))
            worker.step()


@pytest.mark.parametrize(("policy", "depth", "local"), CASES)
def test_a_run_and_its_simulation_make_the_same_calls(
    shm: Path, tmp_path: Path, actions: list[Action], policy: str, depth: int, local: int
) -> None:
    run_alone(policy, depth, local, tmp_path / "journal")
    ran = actions[: actions.index(End()) + 1]
    actions.clear()
    one = SimWorker("w", BATCH, lambda b: 0.1 * b, micro_batch=PART)
    # With a timeline each micro-batch is an event of its own.
    simulate(Scenario((one,), local=bool(local)), policy, iterations=CLAIMS, depth=depth, timeline=True)
    assert actions == ran
    again = replay(tmp_path / "journal")
    assert (again.differences, again.missing_events) == (0, 0), again.first
    assert again.decisions > 3 * CLAIMS
