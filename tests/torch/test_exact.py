"""Exact without a hook, and with BatchNorm: loss_scale on DDP and FSDP2, statistics over unequal batches."""

from __future__ import annotations

import ddp_more_jobs as jobs
import pytest
import torch
from device import DEVICE
from ranks import Ranks
from torch import nn

from pyps.errors import InputError
from pyps.torch import UnevenSyncBatchNorm, loss_scale

FP32, FP64_AFTER_30 = 1e-6, 1e-10

torch.set_num_threads(1)

shards = pytest.mark.skipif(DEVICE.type == "cuda", reason="FSDP2 on a GPU needs NCCL")


@pytest.mark.parametrize(
    ("batches", "parts", "sharded"),
    [
        ([48, 16], [1, 1], False),
        ([5, 30, 1, 8], [2, 3, 1, 1], False),
        pytest.param([48, 16], [1, 1], True, marks=shards),
        # Each micro-batch gathers the parameters, on all ranks together.
        pytest.param([5, 30, 2, 8], [2, 2, 2, 2], True, marks=shards),
    ],
)
def test_the_loss_carries_its_weight(
    ranks: Ranks, batches: list[int], parts: list[int], sharded: bool
) -> None:
    for errors in ranks.run(len(batches), jobs.scaled_errors, batches, parts, sharded):
        assert max(errors) < FP32


@pytest.mark.parametrize("way", ["hook", "sum", "scale"])
@pytest.mark.parametrize(("batches", "momentum"), [([48, 16], 0.1), ([1, 9, 2], None), ([9, 0, 4], 0.1)])
def test_batch_norm_is_the_one_of_one_process(
    ranks: Ranks, batches: list[int], momentum: float | None, way: str
) -> None:
    for errors in ranks.run(len(batches), jobs.norm_errors, batches, way, 30, momentum):
        assert max(errors) < FP64_AFTER_30


def test_a_converted_model_is_the_same_alone() -> None:
    model, inputs = jobs.normed(torch.float32), torch.randn(6, 8).to(DEVICE)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = model(inputs)
    model.load_state_dict(before)
    converted = UnevenSyncBatchNorm.convert(model)
    assert sum(isinstance(module, UnevenSyncBatchNorm) for module in converted.modules()) == 2
    assert torch.equal(converted(inputs), expected)
    assert set(converted.state_dict()) == set(before)
    assert UnevenSyncBatchNorm.convert(converted) is converted
    with pytest.raises(InputError, match=r"shape \[3\].*n, channels"):
        UnevenSyncBatchNorm(3)(torch.zeros(3))


class Activated(nn.BatchNorm1d):
    """As timm's, which follow the normalization by a dropout and an activation."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.ReLU()

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
        return self.act(self.drop(super().forward(input)))  # type: ignore[no-any-return]


def test_a_layer_with_a_forward_of_its_own_does_not_lose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="convert: found Activated; expected a class without a forward"):
        UnevenSyncBatchNorm.convert(Activated(3))
    monkeypatch.setattr(Activated, "__module__", "timm.layers")
    inputs = torch.randn(6, 3)
    assert torch.equal(UnevenSyncBatchNorm.convert(Activated(3))(inputs), Activated(3)(inputs))


def test_the_scale_of_a_loss() -> None:
    assert float(loss_scale(3, 12)) == 0.25  # of one process: N = 1
    assert float(loss_scale(3, 12, ranks=2)) == 0.5
    assert float(loss_scale(3)) == 1.0
    assert float(loss_scale(0, 0)) == 0.0
    assert isinstance(UnevenSyncBatchNorm.convert(nn.BatchNorm2d(3, affine=False)), UnevenSyncBatchNorm)


@pytest.mark.parametrize(
    ("case", "cause"),
    [
        ("plain", "EQUAL_WEIGHTS"),
        ("weighted", "NONE"),
        ("norm", "BATCH_NORM"),
        ("synced norm", "NONE"),
        ("targets", "NOT_SAMPLES"),
        ("sum", "SUM_LOSS"),
        ("sum, said", "NONE"),
        ("dropout", "RANDOM"),
    ],
)
def test_a_check_names_the_cause(ranks: Ranks, case: str, cause: str) -> None:
    for found, error, untouched in ranks.run(2, jobs.cause_reported, [48, 16], case):
        assert found == cause
        assert error < FP32 if cause == "NONE" else error > 0.01
        assert untouched
