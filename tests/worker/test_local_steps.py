"""Local steps against torch alone: one worker takes its steps, several those of a reference."""

from __future__ import annotations

import random
import threading
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device import DEVICE
from sampled import sampled
from torch import nn
from worker_tools import (
    RELATIVE,
    SAMPLES,
    X,
    Y,
    backward,
    distance,
    loss_of,
    make_model,
    run_threads,
    train,
    train_alone,
)

from pyps import Hyper, Store, load_parameters
from pyps.errors import Diverged, InputError
from pyps.native.values import Codec
from pyps.step.machine import even_steps
from pyps.store.policies import Policy, policy_named
from pyps.worker.data.sampling import indices
from pyps.worker.local.local_steps import LocalSteps, with_local_steps
from pyps.worker.run.settings import Settings
from pyps.worker.step.loop import Worker, join

SEED = 5
INNER: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.005),  # the store has no such optimizer
    "amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True),
}
pytestmark = pytest.mark.usefixtures("shm")


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the rest."""
    parts = [[p for p in model.parameters() if (p.ndim == 2) is flat] for flat in (True, False)]
    return [torch.optim.Muon(parts[0], lr=0.01), torch.optim.AdamW(parts[1], lr=0.01)]


class Together:
    """Several optimizers as one, for a loop of plain torch."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()


def whole(model: nn.Module, lr: float = 1.0) -> torch.optim.Optimizer:
    """The outer optimizer that takes a pseudo-gradient as it is."""
    return torch.optim.SGD(model.parameters(), lr=lr)


def alone(batch: int = 5, **options: Any) -> Worker:
    return join("run", 0, batches=[batch], samples=3 * SAMPLES, seed=SEED, **options)


@pytest.mark.parametrize("kind", INNER)
def test_one_worker_takes_the_steps_of_plain_torch(kind: str) -> None:
    model, rival = make_model(), make_model()
    with alone() as worker:
        worker.attach(model, INNER[kind](model), local_steps=4, outer=whole(model))
        assert train(worker, model) == 36, "local steps"
        assert worker.steps == 9, "pushes"
        assert worker.store.status().samples_assigned == 3 * SAMPLES
    train_alone(rival, INNER[kind](rival), 5)
    assert distance(model, rival) < 10 * RELATIVE


@pytest.mark.parametrize("options", [{}, {"depth": 2, "policy": "asp"}, {"policy": "saps"}])
def test_several_optimizers_share_the_parameters(options: dict[str, Any]) -> None:
    model, rival = make_model(), make_model()
    with alone(**options) as worker:
        worker.attach(model, muon(model), local_steps=4, outer=whole(model), merges=2)
        assert train(worker, model) == 36
        assert worker.steps == 9
    train_alone(rival, Together(muon(rival)), 5)  # type: ignore[arg-type]
    assert distance(model, rival) < 10 * RELATIVE


def test_a_schedule_of_each_of_several_optimizers(worker: Worker) -> None:
    model = make_model()
    optimizers = muon(model)
    halved = [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in optimizers]
    worker.attach(model, optimizers, local_steps=3, scheduler=halved)
    train(worker, model)
    rates = [one.param_groups[0]["lr"] for one in optimizers]
    assert rates == [0.01 * 0.5**worker.position.global_batches] * 2
    assert rates[0] < 0.01


def test_several_optimizers_that_cannot_work_are_refused(worker: Worker) -> None:
    model, other = make_model(), make_model()
    first = next(model.parameters())
    cases: list[tuple[Any, str]] = [
        ([], "optimizer: found 0 of them; expected one"),
        ([*muon(model), torch.optim.SGD([first])], "optimizer: found 0.weight in two optimizers"),
        ([torch.optim.LBFGS(model.parameters())], "optimizer: found LBFGS, which needs a closure"),
        ((p for p in muon(model)), "found generator; expected a torch.optim.Optimizer, or several"),
        ([muon(model)[0], model], "optimizer: found Sequential; expected a torch.optim.Optimizer"),
        ([muon(model)[0], muon(other)[1]], "that the model does not have"),
    ]
    for given, message in cases:
        with pytest.raises(InputError, match=message):
            worker.attach(model, given, local_steps=2)
    with pytest.raises(InputError, match="2 of them: Muon, AdamW; expected one; with local steps"):
        worker.attach(model, muon(model))


def test_each_local_step_is_clipped(worker: Worker) -> None:
    model, rival = make_model(), make_model()
    worker.attach(model, INNER["momentum"](model), local_steps=3, outer=whole(model), clip_norm=0.2)
    train(worker, model)
    optimizer = INNER["momentum"](rival)

    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(rival.parameters(), 0.2)

    optimizer.register_step_pre_hook(clip)
    train_alone(rival, optimizer, 10)
    assert distance(model, rival) < 10 * RELATIVE


class Reference:
    """Rounds of local steps by torch alone: each rank's own optimizer, and a Nesterov step outside."""

    def __init__(self, batches: list[int], steps: int, lr: float, momentum: float) -> None:
        self.batches, self.steps = batches, steps
        self.model = make_model()
        self.outer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=momentum, nesterov=momentum > 0)
        self.locals = [make_model() for _ in batches]
        self.inner = [INNER["adamw"](model) for model in self.locals]

    def train(self) -> None:
        first = 0
        while first < 3 * SAMPLES:
            start = [p.detach().clone() for p in self.model.parameters()]
            moved = [torch.zeros_like(p) for p in start]
            claims = [self.steps * b for b in self.batches]
            for rank, claim in enumerate(claims):
                self._local(rank, first, claim, start)
                first += claim
                for d, p, s in zip(moved, self.locals[rank].parameters(), start, strict=True):
                    d += (s - p.detach()) * claim / sum(claims)
            for p, d in zip(self.model.parameters(), moved, strict=True):
                p.grad = d
            self.outer.step()

    def _local(self, rank: int, first: int, claim: int, start: list[torch.Tensor]) -> None:
        model, size = self.locals[rank], self.batches[rank]
        with torch.no_grad():
            for p, s in zip(model.parameters(), start, strict=True):
                p.copy_(s)
        for at in range(first, first + claim, size):
            index = torch.from_numpy(indices(at, size, SAMPLES, SEED))
            self.inner[rank].zero_grad()
            backward(loss_of(model, X[index], Y[index]))
            self.inner[rank].step()


def test_unequal_workers_are_the_rounds_of_the_reference() -> None:
    """A pseudo-gradient counts by its samples: 9, 3 and 6 local samples in a step, two steps each."""
    split, steps = [5, 2, 3], 2
    models = [make_model() for _ in split]
    workers = [join("r", k, batches=split, samples=3 * SAMPLES, seed=SEED) for k in range(len(split))]

    def body(rank: int) -> None:
        workers[rank].attach(models[rank], INNER["adamw"](models[rank]), local_steps=steps)
        train(workers[rank], models[rank])

    run_threads(len(split), body)
    reference = Reference(split, steps, 0.6, 0.5)  # by default
    reference.train()
    for model, worker in zip(models, workers, strict=True):
        assert distance(model, reference.model) < 10 * RELATIVE
        assert worker.steps == 3 * SAMPLES / (steps * sum(split))
        worker.close()


def test_a_worker_that_merges_goes_on_from_what_others_made() -> None:
    """After two of four local steps: from the newest parameters, less the way of the two steps."""
    model, rival = make_model(), make_model()
    inner = INNER["adamw"](rival)

    def step(first: int) -> None:
        index = torch.from_numpy(indices(first, 5, SAMPLES, SEED))
        inner.zero_grad()
        backward(loss_of(rival, X[index], Y[index]))
        inner.step()

    with join("r", 0, batches=[5, 5], samples=40, seed=SEED, policy="asp") as worker, ExitStack() as stack:
        worker.attach(model, INNER["adamw"](model), local_steps=4, outer=whole(model), merges=1)
        other = stack.enter_context(Store.open("r"))
        other.join(1)
        claim = other.start()
        for number, (x, y) in enumerate(worker.batches((X, Y))):
            if number == 1:  # before the second step ends
                area = other.stage()
                area.flat[:] = 0.1
                other.push(area, claim.count, Hyper(lr=1.0))
            backward(loss_of(model, x, y))
            worker.step()
        newest = [p - 0.05 for p in make_model().parameters()]  # half of the samples
        step(20)
        step(25)
        with torch.no_grad():
            for p, s, n in zip(rival.parameters(), make_model().parameters(), newest, strict=True):
                p.copy_(n - (s - p))
        step(30)
        step(35)
        with torch.no_grad():
            for p, n in zip(rival.parameters(), newest, strict=True):
                p.copy_(n - 0.5 * (n - p))
        assert distance(model, rival) < 10 * RELATIVE


@pytest.mark.parametrize("merges", [-1, 1.5, True])
def test_wrong_merges_are_refused(merges: Any) -> None:
    model = make_model()
    with alone(policy="asp") as worker, pytest.raises(InputError, match="merges: found"):
        worker.attach(model, local_steps=2, merges=merges)


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_in_a_pipeline_one_worker_takes_the_steps_of_plain_torch(depth: int) -> None:
    """It is where its own steps have brought it, whenever its transfers arrive."""
    model, rival = make_model(), make_model()
    with alone(depth=depth, policy="asp") as worker:
        worker.attach(model, INNER["adamw"](model), local_steps=4, outer=whole(model))
        train(worker, model)
        assert worker.steps == 9
    train_alone(rival, INNER["adamw"](rival), 5)
    assert distance(model, rival) < 10 * RELATIVE


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_look_at_the_newest_parameters_neither_loses_nor_doubles_steps(depth: int, place: str) -> None:
    """Validating within a claim, when another worker has pushed meanwhile. The gradients are constant."""
    model = nn.Linear(6, 2, bias=False).to(DEVICE)
    with torch.no_grad():
        wanted = model.weight - 0.5 * 0.125  # the other worker's; each has half of the samples
    options: dict[str, Any] = {"depth": depth} if depth > 1 else {}
    with (
        join("r", 0, batches=[5, 5], samples=100, seed=SEED, policy="asp", **options) as worker,
        ExitStack() as stack,
    ):
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.5), local_steps=4, outer=whole(model))
        other = stack.enter_context(Store.open("r"))
        other.join(1)
        for number, (x, y) in enumerate(worker.batches((X, Y))):
            if number == 5:
                claim, area = other.start(), other.stage()
                area.flat[:] = 0.125
                other.push(area, claim.count, Hyper(lr=1.0))
            if place == "before" and number in (2, 6):
                worker.refresh()
            backward((model(x) * y).mean())
            assert model.weight.grad is not None
            wanted -= 0.5 * 0.5 * model.weight.grad
            worker.step()
            if place == "after" and number in (2, 6):
                version = worker.refresh()
                assert version == other.status().version
                newest = torch.from_numpy(other.snapshot().tensors["weight"])
                assert torch.equal(model.weight.cpu(), newest)
        assert number == 15
    torch.testing.assert_close(model.weight.detach(), wanted)


@pytest.mark.parametrize("taken", [0, 2])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_local_steps_that_are_given_up_leave_nothing(depth: int, taken: int) -> None:
    """A loop that ends before its claim's last local step, while others travel: the next takes it anew."""
    model, rival = make_model(), make_model()
    with alone(policy="asp", **({"depth": depth} if depth > 1 else {})) as worker:
        worker.attach(model, whole(model, 0.05), local_steps=4, outer=whole(model))

        def part(steps: int) -> None:
            for number, (x, y) in enumerate(worker.batches((X, Y))):
                if number == steps:
                    break
                backward(loss_of(model, x, y))
                worker.step()

        for _ in range(2):
            part(12)
            part(taken)
            part(taken)
        train(worker, model)
        assert worker.steps == 9
    train_alone(rival, whole(rival, 0.05), 5)
    assert distance(model, rival) < 10 * RELATIVE


class _NoState:
    """Where a worker's optimizer state is not kept."""

    def load(self, pushes: int) -> None: ...

    def save(self, pushes: int) -> None: ...

    def move_up(self, first: int, last: int) -> None: ...

    def remove_old(self, pushes: int, saved: int) -> None: ...


def test_a_residual_is_kept_under_the_number_of_its_push() -> None:
    """Encoded in another thread, perhaps after later pseudo-gradients have been collected."""
    kept: list[int] = []
    state: Any = _NoState()
    state.save_residual = lambda pushes, _: kept.append(pushes)
    state.residual = lambda _: None
    p = nn.Parameter(torch.zeros(3))
    local = LocalSteps((torch.optim.SGD([p], lr=1.0),), [p], 0.0, state, 7, overlaps=True)
    keeps: list[Callable[[int, Any], None]] = []
    store: Any = SimpleNamespace(servers=1, keep_residual=lambda _, keep: keeps.append(keep))
    local.keep_residual(store, Codec.INT8)
    for staging in (1, 0, 2):
        local.begin()
        local.collect(staging)
    for staging in (1, 0, 2):
        keeps[0](staging, None)
    assert kept == [8, 9, 10]


@pytest.mark.parametrize("seed", sampled(range(20), *range(6)))
def test_a_worker_is_at_the_newest_parameters_and_what_they_do_not_have(seed: int) -> None:
    """Local steps, pushes that travel, up to three of them, and arrivals in any order, in whole numbers."""
    draws = random.Random(seed)
    p = nn.Parameter(torch.zeros(3))
    local = LocalSteps((torch.optim.SGD([p], lr=1.0),), [p], 0.0, _NoState(), 0, overlaps=True)  # type: ignore[arg-type]
    newest, own, under_way = torch.zeros(3), torch.zeros(3), deque[torch.Tensor]()

    def arrive() -> int:
        """The oldest push has been applied, and others': the model gets the newest parameters."""
        newest.copy_(torch.randint(-9, 9, (3,)).float())
        under_way.popleft()
        local.pushed(None)
        with torch.no_grad():
            p.copy_(newest)
        return 0

    for _ in range(12):
        local.begin()
        own = torch.zeros(3)
        for _ in range(draws.randint(1, 4)):
            p.grad = torch.randint(-9, 9, (3,)).float()
            own -= p.grad
            local.step()
            if under_way and draws.random() < 0.3:
                local.merge(arrive)
            assert torch.equal(p.detach(), newest - sum(under_way, torch.zeros(3)) + own)
        local.collect()
        assert p.grad is not None
        assert torch.equal(p.grad, -own)
        assert torch.equal(p.detach(), newest), "as it came from the store"
        under_way.append(-own)
        while under_way and (len(under_way) > 3 or draws.random() < 0.3):
            arrive()


def test_a_round_has_more_local_steps_than_samples_fit_at_once() -> None:
    """H-PS sizes rounds by speed, and memory bounds a local step alone."""
    model = make_model()
    with join("r", 0, batches=[5, 5], samples=80, seed=SEED, policy="hps") as worker, ExitStack() as stack:
        worker.settings = replace(worker.settings, max_batch=5)
        worker.attach(model, INNER["adamw"](model), local_steps=4, outer=whole(model))
        other = stack.enter_context(Store.open("r"))
        other.join(1)
        x, _ = next(worker.batches((X, Y)))
        assert worker.claim is not None
        assert (len(x), worker.claim.count, other.start().count) == (5, 20, 20)


@pytest.mark.parametrize("policy", sorted(Policy.known))
def test_every_policy_trains_each_sample_once(policy: str) -> None:
    split = [4, 2]
    models = [make_model() for _ in split]
    workers = [
        join("r", k, batches=split, samples=3 * SAMPLES, seed=SEED, policy=policy, codec="int8")
        for k in range(len(split))
    ]

    def body(rank: int) -> None:
        workers[rank].attach(models[rank], INNER["adamw"](models[rank]), local_steps=3)
        train(workers[rank], models[rank])

    run_threads(len(split), body)
    status = workers[0].store.status()
    assert status.samples_assigned == 3 * SAMPLES
    assert status.samples_dropped == 0 or workers[0].rejected + workers[1].rejected > 0
    assert float(loss_of(models[0], X, Y).detach()) < float(loss_of(make_model(), X, Y).detach())
    for worker in workers:
        worker.close()


@pytest.mark.parametrize("momentum", [0.1, None])
def test_averaged_buffers_move_as_by_each_local_step(momentum: float | None) -> None:
    def normed() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=momentum), nn.Linear(8, 2)).to(
            DEVICE
        )

    model, rival = normed(), normed()
    with alone(10) as worker:
        worker.attach(model, INNER["momentum"](model), local_steps=3, outer=whole(model))
        train(worker, model)
    train_alone(rival, INNER["momentum"](rival), 10)
    norm, other = model[1], rival[1]
    for name, value in other.named_buffers():
        if name != "num_batches_tracked":
            assert torch.allclose(dict(norm.named_buffers())[name], value, rtol=1e-4)


def test_a_scaler_skips_a_local_step_that_overflowed(worker: Worker) -> None:
    model, rival = make_model(), make_model()
    optimizer, other = INNER["momentum"](model), INNER["momentum"](rival)
    worker.attach(model, optimizer, local_steps=3, outer=whole(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for k, (x, y) in enumerate(worker.batches((X, Y))):
        backward(scaler.scale(loss_of(model, x, y)))
        if k == 4:
            next(model.parameters()).grad.view(-1)[0] = float("inf")  # type: ignore[union-attr]
        worker.step(scaler=scaler)
        if not worker.accumulating:
            scaler.update()
    steps = iter(range(18))
    train_alone(rival, _Skipping(other, steps, 4), 10)
    assert distance(model, rival) < 10 * RELATIVE


class _Skipping:
    """An optimizer that leaves one step out."""

    def __init__(self, optimizer: torch.optim.Optimizer, steps: Any, skipped: int) -> None:
        self.zero_grad, self._step, self._steps = optimizer.zero_grad, optimizer.step, steps
        self._skipped = skipped

    def step(self) -> None:
        if next(self._steps) != self._skipped:
            self._step()


def test_a_script_may_clear_gradients_but_not_step(worker: Worker) -> None:
    model, rival = make_model(), make_model()
    optimizer = INNER["adamw"](model)
    worker.attach(model, optimizer, local_steps=3, outer=whole(model))
    for x, y in worker.batches((X, Y)):
        optimizer.zero_grad()
        backward(loss_of(model, x, y))
        worker.step()
    train_alone(rival, INNER["adamw"](rival), 10)
    assert distance(model, rival) < 10 * RELATIVE
    with pytest.raises(InputError, match=r"found a call of optimizer\.step\(\)"):
        optimizer.step()


def test_a_loss_that_is_not_finite_ends_the_run_before_its_push(worker: Worker) -> None:
    model = make_model()
    worker.attach(model, INNER["adamw"](model), local_steps=3)

    def diverge() -> None:
        for k, (x, y) in enumerate(worker.batches((X, Y))):
            loss = loss_of(model, x, y)
            backward(loss)
            worker.step(loss if k < 4 else float("nan"))

    with pytest.raises(Diverged):
        diverge()
    assert worker.store.status().version == 1


@pytest.mark.parametrize(("samples", "most", "sizes"), [(12, 4, [4, 4, 4]), (17, 16, [9, 8]), (3, 16, [3])])
def test_local_steps_are_even(samples: int, most: int, sizes: list[int]) -> None:
    found = []
    while samples:
        found.append(even_steps(samples, most))
        samples -= found[-1]
    assert found == sizes


@pytest.mark.parametrize("steps", [0, -1, True, 1.5, "planned"])
def test_no_number_of_local_steps(worker: Worker, steps: Any) -> None:
    model = make_model()
    with pytest.raises(InputError, match=r"local_steps: found .*; expected a number of steps"):
        worker.attach(model, INNER["adamw"](model), local_steps=steps)


def test_under_pyps_run_the_plan_says_how_many() -> None:
    settings = Settings("s", 0, policy_named("bsp"), batches=(4, 2), launched=True)
    assert with_local_steps(settings, "plan") is settings
    with pytest.raises(InputError, match=r"found 4 under pyps run; expected \"plan\", .*--local-steps"):
        with_local_steps(settings, 4)


def test_misuse_is_refused(worker: Worker, tmp_path: Path) -> None:
    model = make_model()
    with pytest.raises(InputError, match=r"outer: found SGD; expected nothing without local steps"):
        worker.attach(model, INNER["adamw"](model), outer=whole(model))
    with pytest.raises(InputError, match=r"optimizer: found RMSprop"):
        worker.attach(model, INNER["adamw"](model), local_steps=2, outer=INNER["rmsprop"](model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        worker.attach(model, INNER["adamw"](model), local_steps=2)


def averaged(workers: int, count: int, kind: Callable[[nn.Module], Any]) -> list[list[torch.optim.Optimizer]]:
    """Return those of workers after four rounds whose moments are averaged; a step has 2 samples."""
    models = [make_model() for _ in range(workers)]
    optimizers = [kind(model) for model in models]
    batches = [2 * (k + 1) * count for k in range(workers)]

    def body(rank: int) -> None:
        with join("r", rank, batches=batches, samples=4 * sum(batches), seed=SEED) as worker:
            worker.settings = replace(worker.settings, local_steps=count, micro_batch=2)
            worker.attach(models[rank], optimizers[rank], average_moments=True)
            train(worker, models[rank])

    run_threads(workers, body)
    return optimizers


@pytest.mark.parametrize("kind", [INNER["adamw"], INNER["momentum"], muon])
def test_moments_are_averaged_with_the_parameters(kind: Callable[[nn.Module], Any]) -> None:
    """At the end each worker has the same; Adam's counts too, of 4 rounds of 3 and of 6 steps."""
    made = averaged(2, 3, lambda m: kind(m) if kind is muon else [kind(m)])
    for one, two in zip(*made, strict=True):
        first, second = (o.state_dict()["state"] for o in (one, two))
        assert first.keys() == second.keys()
        for place, state in first.items():
            assert state.keys() == second[place].keys()
            for key, value in state.items():
                assert torch.equal(value, second[place][key])
                assert value.abs().max() > 0
                if key == "step":
                    assert float(value) == pytest.approx(4 * (3 * 1 / 3 + 6 * 2 / 3))


def test_averaged_moments_are_the_mean_by_samples() -> None:
    """After one round, of each worker's own: 2 and 4 of 6 samples."""
    torch.manual_seed(0)
    models = [make_model() for _ in range(3)]
    optimizers = [INNER["adamw"](model) for model in models]
    own: dict[int, torch.Tensor] = {}

    def body(rank: int) -> None:
        with join("r", rank, batches=[2, 4], samples=6, seed=SEED) as worker:
            worker.settings = replace(worker.settings, local_steps=1, average_moments=2, micro_batch=2)
            worker.attach(models[rank], optimizers[rank])  # as planned
            for x, y in worker.batches((X, Y)):
                backward(loss_of(models[rank], x, y))
                optimizers[rank].register_step_post_hook(
                    lambda o, *_: own.update({rank: next(iter(o.state.values()))["exp_avg"].clone()})
                )
                worker.step()

    run_threads(2, body)
    found = next(iter(optimizers[0].state.values()))["exp_avg"]
    torch.testing.assert_close(found, own[0] / 3 + own[1] * 2 / 3)


def test_one_worker_that_averages_takes_the_steps_of_plain_torch() -> None:
    model, rival = make_model(), make_model()
    with alone() as worker:
        worker.attach(model, muon(model), local_steps=4, outer=whole(model), average_moments=True)
        train(worker, model)
        target = make_model()
        load_parameters(worker.store, target)
        assert distance(target, model) == 0.0
    train_alone(rival, Together(muon(rival)), 5)  # type: ignore[arg-type]
    assert distance(model, rival) < 10 * RELATIVE


def test_moments_that_cannot_be_averaged_are_refused(worker: Worker) -> None:
    model = make_model()
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (INNER["adamw"](model), {}, "average_moments: found True without local steps"),
        (INNER["rmsprop"](model), {"local_steps": 2}, "average_moments: found RMSprop; expected SGD, Adam"),
        (INNER["amsgrad"](model), {"local_steps": 2}, "average_moments: found Adam with amsgrad"),
        (whole(model), {"local_steps": 2}, "average_moments: found optimizers without moments"),
    ]
    for given, options, message in cases:
        with pytest.raises(InputError, match=message):
            worker.attach(model, given, average_moments=True, **options)
    with alone(depth=2, policy="asp") as deep, pytest.raises(InputError, match="found True in a pipeline"):
        deep.attach(model, INNER["adamw"](model), average_moments=True, local_steps=2)


def test_a_quorum_goes_on_without_a_late_worker_and_merges_its_work() -> None:
    """The late one takes its local steps while the others end three rounds; its moments come with them."""
    models, rounds_went_on = [make_model() for _ in range(3)], threading.Event()
    found = {}

    def body(rank: int) -> None:
        model = models[rank]
        with join("r", rank, batches=[4] * 3, samples=120, seed=SEED, policy="quorum:grace=0.1") as worker:
            worker.settings = replace(worker.settings, local_steps=2, micro_batch=2)
            worker.attach(model, INNER["adamw"](model), average_moments=True)
            for x, y in worker.batches((X, Y)):
                if worker.steps >= 3:
                    rounds_went_on.set()
                if rank == 2:
                    assert rounds_went_on.wait(20)
                backward(loss_of(model, x, y))
                worker.step()
            found[rank] = worker.store.ranks()

    run_threads(3, body)
    ranks = found[0]
    assert sum(rank.samples for rank in ranks) == 120
    assert [rank.returned for rank in ranks] == [0, 0, 0]
    assert ranks[2].staleness_max >= 2
    assert all(bool(p.isfinite().all()) for model in models for p in model.parameters())
