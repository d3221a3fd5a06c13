"""Through the store a round is one process with the whole batch, whatever a loss was divided by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everyone writes it
from worker_tools import DEVICE, RELATIVE, SAMPLES, backward, distance, run_threads

from pyps.errors import InputError
from pyps.worker.data.sampling import indices
from pyps.worker.step.loop import Worker, join

TOKENS, CLASSES, ROUNDS = 7, 4, 6
SPLIT = (9, 2, 4)
_made = torch.Generator().manual_seed(2)
X = torch.randn(SAMPLES, TOKENS, 6, generator=_made).to(DEVICE)
Y = torch.randint(CLASSES, (SAMPLES, TOKENS), generator=_made).to(DEVICE)
LENGTHS = torch.randint(1, TOKENS + 1, (SAMPLES,), generator=_made).to(DEVICE)
Y[torch.arange(TOKENS, device=DEVICE)[None, :] >= LENGTHS[:, None]] = -100
FIRST = Y[:, 0]
CLASS_WEIGHTS = torch.tensor([0.1, 1.0, 5.0, 2.0], device=DEVICE)
Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def tokens(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def class_weights(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x[:, 0]), y[:, 0], weight=CLASS_WEIGHTS)


def masked(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    mask = (y >= 0).float()
    return (model(x).square().sum(-1) * mask).sum() / mask.sum()


def by_a_number(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    chosen = model(x)[y >= 0]
    return chosen.square().sum() / len(chosen)


def samples(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x[:, 0]), y[:, 0])


def penalized(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return tokens(model, x, y) + 0.03 * sum(p.square().sum() for p in model.parameters())


def two_terms(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The sum of means over 1 and over 28 values a sample."""
    return samples(model, x, y) + 0.3 * model(x).square().mean()


def make(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)).to(DEVICE)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def through_the_store(
    loss_of: Loss,
    *,
    by: Callable[[Worker, torch.Tensor], None] = lambda worker, loss: worker.backward(loss),
    policy: str = "bsp",
    micro_batch: int = 0,
    scaler: Callable[[Worker], torch.amp.GradScaler | None] = lambda worker: None,
) -> nn.Module:
    """The model after ROUNDS rounds of SPLIT."""
    models = [make() for _ in SPLIT]
    options = {"micro_batch": micro_batch} if micro_batch else {}
    rounds = {"samples": ROUNDS * sum(SPLIT), "seed": 5, "policy": policy, **options}
    workers = [join("weighs", rank, batches=list(SPLIT), **rounds) for rank in range(len(SPLIT))]

    def body(rank: int) -> None:
        workers[rank].attach(models[rank], sgd(models[rank]))
        for x, y in workers[rank].batches((X, Y)):
            loss = loss_of(models[rank], x, y)
            by(workers[rank], loss)
            workers[rank].step(loss, scaler(workers[rank]))

    try:
        run_threads(len(SPLIT), body)
    finally:
        for worker in workers:
            worker.close()
    return models[0]


def alone(loss_of: Loss) -> nn.Module:
    model, batch = make(), sum(SPLIT)
    optimizer = sgd(model)
    for first in range(0, ROUNDS * batch, batch):
        rows = torch.from_numpy(indices(first, batch, SAMPLES, 5))
        optimizer.zero_grad()
        backward(loss_of(model, X[rows], Y[rows]))
        optimizer.step()
    return model


@pytest.mark.parametrize(
    "loss_of", [tokens, class_weights, masked, by_a_number, samples, penalized, two_terms]
)
def test_a_round_is_one_process(shm: Path, loss_of: Loss) -> None:
    assert distance(through_the_store(loss_of), alone(loss_of)) < 10 * RELATIVE


@pytest.mark.parametrize("loss_of", [tokens, class_weights])
def test_micro_batches_weigh_by_their_loss_too(shm: Path, loss_of: Loss) -> None:
    assert distance(through_the_store(loss_of, micro_batch=2), alone(loss_of)) < 10 * RELATIVE


def test_a_count_that_is_given_is_taken(shm: Path) -> None:
    def hidden(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return tokens(model, x, y).square().sqrt()  # which no walk goes through

    def by(worker: Worker, loss: torch.Tensor) -> None:
        claim = worker.claim
        assert claim is not None
        rows = torch.from_numpy(indices(claim.first, claim.count, SAMPLES, 5))
        worker.backward(loss, n=int((Y[rows] >= 0).sum()))

    assert distance(through_the_store(hidden, by=by), alone(tokens)) < 10 * RELATIVE
    with pytest.raises(InputError, match=r"SqrtBackward0.*n="):
        through_the_store(hidden)


def test_a_rank_without_targets_counts_for_nothing(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of such a rank is NaN."""
    few = Y.clone()
    few[torch.rand(SAMPLES, generator=torch.Generator().manual_seed(1)) < 0.7] = -100
    monkeypatch.setitem(globals(), "Y", few)
    ranks = [range(first, first + count) for first, count in ((0, 9), (9, 2), (11, 4))]
    without = [
        bool((few[torch.from_numpy(indices(k * 15 + r.start, len(r), SAMPLES, 5))] < 0).all())
        for k in range(ROUNDS)
        for r in ranks
    ]
    assert any(without)
    assert distance(through_the_store(tokens), alone(tokens)) < 10 * RELATIVE


def test_terms_with_unlike_divisors_are_refused_in_a_round(shm: Path) -> None:
    def unlike(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return tokens(model, x, y) + class_weights(model, x, y)

    with pytest.raises(InputError, match="divisor"):
        through_the_store(unlike)
    through_the_store(unlike, policy="asp")


@pytest.mark.parametrize("loss_of", [tokens, class_weights])
def test_a_plain_backward_is_refused_where_the_freed_graph_shows_that_samples_are_no_measure(
    shm: Path, loss_of: Loss
) -> None:
    with pytest.raises(InputError, match=r"worker\.backward\(loss\)"):
        through_the_store(loss_of, by=lambda _, loss: backward(loss))


@pytest.mark.parametrize("loss_of", [samples, two_terms])
def test_a_plain_backward_counts_by_samples(shm: Path, loss_of: Loss) -> None:
    plain = through_the_store(loss_of, by=lambda _, loss: backward(loss))
    assert distance(plain, alone(loss_of)) < 10 * RELATIVE


def test_both_ways_in_one_run_are_refused(shm: Path) -> None:
    def by(worker: Worker, loss: torch.Tensor) -> None:
        if worker.steps == 2:
            backward(loss)
        else:
            worker.backward(loss)

    with pytest.raises(InputError, match="for all of them"):
        through_the_store(samples, by=by)


@pytest.mark.parametrize("loss_of", [tokens, masked])
def test_gradient_scalers_need_not_have_one_scale(shm: Path, loss_of: Loss) -> None:
    scalers: dict[int, torch.amp.GradScaler] = {}

    def by(worker: Worker, loss: torch.Tensor) -> None:
        scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0 ** (10 + 2 * worker.rank))
        scalers[worker.rank] = scaler
        worker.backward(scaler.scale(loss))

    found = through_the_store(loss_of, by=by, scaler=lambda worker: scalers[worker.rank])
    assert distance(found, alone(loss_of)) < 10 * RELATIVE
