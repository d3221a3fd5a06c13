"""Gradients that are looked at as backward makes them: what is said to be finite, and what no more is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from worker_tools import backward, distance

from pyps.errors import Diverged, InputError
from pyps.native.values import PushRequest, PushResult, Tensor
from pyps.store.staging import StagingBuffer
from pyps.worker.device.buckets import LEAST_ELEMENTS, DirectGradients
from pyps.worker.step.loop import Worker, join
from pyps.worker.step.step import Step
from pyps.worker.step.transport import Transport

WIDE = LEAST_ELEMENTS // 64
X = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
Y = torch.randn(40, 2, generator=torch.Generator().manual_seed(1))
WHOLE = [[0, 64 * WIDE]]  # the first weight: the others are small


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, WIDE, bias=False), nn.Tanh(), nn.Linear(WIDE, 2))


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]] | None]:
    """Return what each push said to be finite."""
    found: list[list[list[int]] | None] = []
    send = Transport.send

    def noted(transport: Transport, step: Step, request: PushRequest) -> PushResult | None:
        found.append(None if request.looked is None else request.looked.tolist())
        return send(transport, step, request)

    monkeypatch.setattr(Transport, "send", noted)
    return found


def joined(**options: object) -> Worker:
    return join("run", 0, batches=[8], samples=40, seed=5, **{"policy": "asp", **options})  # type: ignore[arg-type]


def steps(
    worker: Worker,
    model: nn.Module,
    after: Callable[[int], object],
    seen: torch.dtype = torch.float32,
    before: Callable[[], object] = lambda: None,
) -> None:
    for k, (x, y) in enumerate(worker.batches((X.to(seen), Y.to(seen)))):
        before()
        backward(nn.functional.mse_loss(model(x), y))
        after(k)
        worker.step()


def first(model: nn.Module) -> torch.Tensor:
    gradient = next(model.parameters()).grad
    assert gradient is not None
    return gradient


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "clipped": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1e-3),
    "scaled": lambda m: first(m).mul_(0.5),
    "all at once": lambda m: torch._foreach_mul_([p.grad for p in m.parameters()], 0.5),
    "a part": lambda m: first(m)[0].zero_(),
    "through a view": lambda m: first(m).view(-1)[3:5].fill_(1.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_gradient_that_changes_is_not_said_to_be_finite(
    shm: Path, sent: list[list[list[int]] | None], change: str
) -> None:
    model = make_model()
    with joined() as worker:
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        steps(worker, model, lambda k: CHANGES[change](model) if k == 1 else None)
    assert sent == [WHOLE, None, WHOLE, WHOLE, WHOLE]


def test_another_object_is_looked_at_as_it_is_taken(shm: Path, sent: list[list[list[int]] | None]) -> None:
    model = make_model()

    def put(k: int) -> None:
        if k % 2:
            next(model.parameters()).grad = first(model) * (float("nan") if k == 3 else 2.0)

    with joined(allow_nonfinite=True) as worker:
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        steps(worker, model, put)
        assert worker.skipped == 1
        assert np.isfinite(worker.store.pull()[0]).all()
    assert sent == [WHOLE, WHOLE, WHOLE, None, WHOLE]


def test_a_hook_of_the_script_that_changes_a_gradient_is_seen(
    shm: Path, sent: list[list[list[int]] | None]
) -> None:
    model = make_model()
    with joined() as worker:
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        weight = next(model.parameters())

        def change(_: torch.Tensor) -> None:
            first(model).mul_(3.0)

        weight.register_post_accumulate_grad_hook(change)
        steps(worker, model, lambda _: None)
    assert sent == [None] * 5


def test_what_is_not_finite_is_refused_by_name(shm: Path, sent: list[list[list[int]] | None]) -> None:
    model = make_model()
    with joined() as worker:
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(Diverged, match="gradient is not finite"):
            steps(worker, model, lambda k: k == 2 and first(model).view(-1)[7].fill_(float("inf")))
        assert worker.store.status().version == 2
        assert np.isfinite(worker.store.pull()[0]).all()


@pytest.mark.parametrize(
    ("options", "clip", "looks"),
    [
        ({"policy": "bsp"}, None, True),
        ({"policy": "bsp"}, 1.0, True),
        ({"policy": "asp"}, 1.0, False),
        ({"policy": "softsync"}, None, False),
        ({"codec": "int8"}, None, False),
        ({"depth": "auto"}, None, True),
    ],
)
def test_a_push_that_does_not_read_it_needs_no_look(
    shm: Path,
    sent: list[list[list[int]] | None],
    options: dict[str, object],
    clip: float | None,
    looks: bool,
) -> None:
    model = make_model()
    with joined(**options) as worker:
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), clip_norm=clip)
        steps(worker, model, lambda _: None)
    assert sent == [WHOLE if looks else None] * 5


def test_copies_are_looked_at_too(shm: Path, sent: list[list[list[int]] | None]) -> None:
    """Gradients of half precision, all of them: what is copied in one piece is looked at in one."""
    model = make_model().bfloat16()
    with joined() as worker:
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        places = {t.name: (t.offset, t.elements) for t in worker.store.tensors}
        steps(worker, model, lambda _: None, torch.bfloat16)
    covered = [list(range(a, a + n)) for a, n in sent[0] or []]
    assert sent == [sent[0]] * 5
    assert {k for run in covered for k in run} == {k for a, n in places.values() for k in range(a, a + n)}


class Buffer:
    """A staging buffer without a store."""

    index = 0

    def __init__(self, elements: int) -> None:
        self.flat = np.full(elements, 7.0, np.float32)


def direct(
    sizes: tuple[int, ...], *, checks_finite: bool = True, hooks: bool = True
) -> tuple[list[nn.Parameter], DirectGradients, Buffer]:
    parameters, places, offset = [], [], 0
    for k, size in enumerate(sizes):
        parameters.append(nn.Parameter(torch.ones(size)))
        places.append(Tensor(f"p{k}", (size,), 0, offset, size))
        offset += size
    made = DirectGradients(
        list(zip(parameters, places, strict=True)), checks_finite=checks_finite, hooks=hooks
    )
    return parameters, made, Buffer(offset)


BIG = LEAST_ELEMENTS


def begin(gradients: DirectGradients, buffer: Buffer) -> None:
    kept = {place.name for place in gradients.overwritten}
    for place in gradients.places:
        if place.name not in kept:
            buffer.flat[place.offset : place.offset + place.elements] = 0.0
    as_staging: StagingBuffer = buffer  # type: ignore[assignment]
    gradients.begin(as_staging)


def test_micro_batches_add_up_and_the_last_is_looked_at() -> None:
    (big, small), gradients, buffer = direct((BIG, 5))
    for step in range(2):
        begin(gradients, buffer)
        backward((2.0 * big).sum() + (3.0 * small).sum())
        assert not gradients.finite_ranges()
        gradients.last_backward()
        backward((big * big).sum() + small.sum())
        gradients.collect(unscaled=False)
        assert gradients.finite_ranges() == [(0, BIG)]
        assert (buffer.flat == [4.0] * BIG + [4.0] * 5).all(), step
        gradients.release()
        assert big.grad is None
    gradients.close()
    backward(big.sum())
    assert big.grad is not None


def test_a_gradient_that_never_came_counts_as_zero() -> None:
    (one, two), gradients, buffer = direct((BIG, BIG))
    begin(gradients, buffer)
    gradients.last_backward()
    backward(one.sum())
    gradients.collect(unscaled=False)
    assert gradients.finite_ranges() == [(0, BIG), (BIG, BIG)]
    assert (buffer.flat == [1.0] * BIG + [0.0] * BIG).all()
    assert two.grad is None


def test_what_a_scaler_changed_is_not_known() -> None:
    (one,), gradients, buffer = direct((BIG,))
    begin(gradients, buffer)
    gradients.last_backward()
    backward(one.sum())
    gradients.collect(unscaled=True)
    assert gradients.finite_ranges() == []


def test_gradients_cleared_between_micro_batches_are_noticed(shm: Path) -> None:
    model = make_model()
    with joined(micro_batch=4) as worker:
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(InputError, match="gradients cleared"):
            steps(worker, model, lambda _: None, before=lambda: model.zero_grad(set_to_none=True))


def test_sparse_gradients_and_those_of_a_graph() -> None:
    (one, two), gradients, buffer = direct((BIG, BIG))
    begin(gradients, buffer)
    gradients.last_backward()
    rows = torch.sparse_coo_tensor(torch.tensor([[3]]), torch.tensor([5.0]), (BIG,))
    torch.autograd.backward([one], [rows])
    (two * two).sum().backward(create_graph=True)  # type: ignore[no-untyped-call]
    assert two.grad is not None
    assert two.grad.requires_grad
    backward(two.grad.sum())
    gradients.collect(unscaled=False)
    assert buffer.flat[3] == 5.0
    assert np.count_nonzero(buffer.flat[:BIG]) == 1
    assert (buffer.flat[BIG:] == 4.0).all()


def test_a_run_with_hooks_ends_where_torch_does(shm: Path) -> None:
    model, rival = make_model(), make_model()
    optimizer = torch.optim.SGD(rival.parameters(), lr=0.1)
    with joined(micro_batch=3) as worker:
        worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        batch: list[tuple[torch.Tensor, torch.Tensor]] = []
        for x, y in worker.batches((X, Y)):
            batch.append((x, y))
            backward(nn.functional.mse_loss(model(x), y))
            if worker.step() is not None:
                xs, ys = (torch.cat(parts) for parts in zip(*batch, strict=True))
                optimizer.zero_grad()
                backward(nn.functional.mse_loss(rival(xs), ys))
                optimizer.step()
                batch.clear()
    assert distance(model, rival) < 1e-6
