"""Workers whose parameters lie behind a bus train as those whose parameters lie in host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_bus import Emulated
from torch import nn
from worker_tools import OPTIMIZERS, SAMPLES, X, Y, backward, loss_of

from pyps.native import local
from pyps.native.values import PushRequest, PushResult
from pyps.worker.device import binding
from pyps.worker.device.binding import Binding
from pyps.worker.device.bus import Bus, greatest_of
from pyps.worker.step import attached
from pyps.worker.step.loop import Worker, join
from pyps.worker.step.step import Step
from pyps.worker.step.transport import Transport

RATE = 1e9  # bytes a second
WIDE = 400  # two chunks of parameters, and a tensor that is in both


def network(kind: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 90), nn.BatchNorm1d(90), nn.Tanh(), nn.Linear(90, WIDE), nn.Linear(WIDE, 2)
    ).to(kind)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> list[Bus]:
    """Workers attach to a bus that is emulated."""
    made: list[Bus] = []

    def bus(device: torch.device) -> Bus:
        made.append(Emulated(RATE))
        return made[-1]

    monkeypatch.setattr(binding, "bus_of", bus)
    monkeypatch.setattr(local, "ARRIVAL_ELEMENTS", 1)  # a range is a chunk
    return made


def assert_arrived(worker: Worker, model: nn.Module, flat: Any) -> None:
    """A step's parameters are those that came last, whichever way they took."""
    came = worker.store.views(flat)
    for name, p in model.named_parameters():
        assert torch.equal(p, torch.from_numpy(came[name]).to(p.dtype)), name


def run(kind: torch.dtype = torch.float32, case: str = "sgd", **options: Any) -> tuple[bytes, bytes]:
    """The store's parameters after a run of one worker, and the model's."""
    model = network(kind)
    clip_norm = options.pop("clip_norm", None)
    chosen: dict[str, Any] = {"batches": [10], "samples": 2 * SAMPLES, "seed": 5} | options
    bound: list[Binding] = []
    made = attached.Binding

    def noted(*arguments: Any, **more: Any) -> Binding:
        bound.append(made(*arguments, **more))
        return bound[-1]

    with join("run", 0, **chosen) as worker, pytest.MonkeyPatch.context() as patch:
        patch.setattr(attached, "Binding", noted)
        worker.attach(model, OPTIMIZERS[case](model), clip_norm=clip_norm)
        for x, y in worker.batches((X.to(kind), Y.to(kind))):
            assert_arrived(worker, model, bound[0].flat)
            backward(loss_of(model, x, y))
            worker.step()
        worker.refresh()
        state = [value.float() for value in model.state_dict().values()]
        return worker.store.pull()[0].tobytes(), b"".join(value.numpy().tobytes() for value in state)


CASES = [
    {"policy": "asp"},
    {"policy": "bsp"},
    {"policy": "ssp", "case": "adamw"},
    {"policy": "asp", "depth": 2},
    {"policy": "hps", "depth": 2, "case": "nesterov"},
    {"policy": "hps", "depth": 2, "case": "adamw"},
    {"policy": "asp", "depth": 2, "codec": "int8"},
    {"policy": "asp", "codec": "int8"},
    {"policy": "asp", "micro_batch": 3},
    {"policy": "r2sp"},
]


@pytest.mark.parametrize("options", CASES, ids=lambda o: "-".join(map(str, o.values())))
def test_it_is_the_plain_worker_bit_for_bit(
    shm: Path, request: pytest.FixtureRequest, options: dict[str, Any]
) -> None:
    plain = run(**options)
    request.getfixturevalue("emulated")
    assert run(**options) == plain


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_a_deep_pipeline_computes_on_what_came_last(
    shm: Path, emulated: list[Bus], kind: torch.dtype
) -> None:
    for policy in ("asp", "hps"):
        run(kind, policy=policy, depth=4, case="adamw", samples=6 * SAMPLES)
    assert len(emulated) == 2


HALF_CASES = [
    {"policy": "asp"},
    {"policy": "bsp", "case": "adamw"},
    {"policy": "asp", "depth": 2},
    {"policy": "asp", "micro_batch": 3},
    {"policy": "softsync"},
    {"policy": "asp", "clip_norm": 0.1},
    {"policy": "bsp", "clip_norm": 0.1},
    {"policy": "saps:threshold=ringmaster"},
]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("options", HALF_CASES, ids=lambda o: "-".join(map(str, o.values())))
def test_halves_cross_the_bus_and_nothing_else_changes(
    shm: Path, request: pytest.FixtureRequest, kind: torch.dtype, options: dict[str, Any]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(binding, "HALVES", {})
        plain = run(kind, **options)
    sent: list[PushRequest] = []
    send = Transport.send

    def noted(transport: Transport, step: Step, request: PushRequest) -> PushResult | None:
        sent.append(request)
        return send(transport, step, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transport, "send", noted)
        assert run(kind, **options) == plain, "copied at once"
    assert {push.encoding.codec for push in sent} == {binding.HALVES[kind]}
    request.getfixturevalue("emulated")
    assert run(kind, **options) == plain


def test_halves_that_are_not_finite_are_refused_as_ever(shm: Path) -> None:
    model = network(torch.bfloat16)
    with join("run", 0, batches=[10], samples=60, seed=5, policy="asp", allow_nonfinite=True) as worker:
        worker.attach(model, OPTIMIZERS["sgd"](model))
        for k, (x, y) in enumerate(worker.batches((X.bfloat16(), Y.bfloat16()))):
            backward(loss_of(model, x * float("nan") if k == 2 else x, y))
            assert (worker.step() is None) == (k == 2)
        assert (worker.steps, worker.skipped) == (5, 1)
        assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_a_look_finds_every_value_that_is_not_finite(kind: torch.dtype) -> None:
    values = torch.full((70_000,), torch.finfo(kind).max, dtype=kind)
    values[::2] = -torch.finfo(kind).tiny
    assert greatest_of(values) == 0.0
    for bad in (torch.inf, -torch.inf, torch.nan):
        for at in (0, 65_536, 69_999):
            one = values.clone()
            one[at] = bad
            assert greatest_of(one) == torch.inf
    assert greatest_of(values[:0]) == 0.0
