"""No misuse of uneven DDP hangs: each ends in an error that names the rank and the cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ddp_misuse_jobs as jobs
import pytest
import torch
from device import DEVICE
from ranks import Ranks

from pyps.errors import InputError
from pyps.torch import Rebalancer, UnevenBatchSampler, loss_scale

SEEN_AFTER = 2 if DEVICE.type == "cpu" else 8  # rounds: no rank waits for what lies on a GPU

torch.set_num_threads(1)


def pair(ranks: Ranks, job: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What the two ranks that a job uses say."""
    return ranks.run(4, job, *arguments)[:2]


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([1, 0], "found 0 on rank 1, 1 on rank 0; expected one call after each gradient, on every rank"),
        ([1, 2], "found 1 on rank 0, 2 on rank 1"),
        ([2, 2], "Rebalancer: step: found 2 calls since the last gradient"),
        ([1, 1], ""),
    ],
)
def test_calls_of_step_that_differ(ranks: Ranks, calls: list[int], expected: str) -> None:
    for (said, steps), own in zip(pair(ranks, jobs.steps, calls), calls, strict=True):
        assert (expected in said) if expected else not said
        assert steps <= SEEN_AFTER * own or not expected


def test_data_sets_of_unlike_lengths(ranks: Ranks) -> None:
    for said in pair(ranks, jobs.unlike_data, [60, 57]):
        assert "samples of the data set: found 57 on rank 1, 60 on rank 0" in said


def test_a_profile_that_one_rank_cannot_read(ranks: Ranks) -> None:
    for said in pair(ranks, jobs.unread_profile, [None, "/nowhere/v100.json"]):
        assert all("/nowhere/v100.json" in one and "on rank 1" in one for one in said)


@pytest.mark.parametrize(("accumulate", "normalized", "least"), [(1, False, 1), (1, True, 2), (2, True, 4)])
def test_batch_normalization_keeps_two_samples(
    ranks: Ranks, accumulate: int, normalized: bool, least: int
) -> None:
    assert pair(ranks, jobs.least_batch, accumulate, normalized) == [least, least]


def test_a_global_batch_that_is_no_number(ranks: Ranks) -> None:
    for said in pair(ranks, jobs.no_number, ["64", 64]):
        assert "agreed_split: global_batch on rank 0: found '64'; expected a whole number from 1" in said
    for said in pair(ranks, jobs.no_number, [0, 0]):
        assert "global_batch on rank 0 (and 1 more): found 0" in said


@pytest.mark.parametrize("call", ["agreed_split", "Rebalancer"])
def test_a_call_on_one_rank_only(ranks: Ranks, call: str) -> None:
    _, said = pair(ranks, jobs.alone, call, 0.3)
    assert f"{call}: ranks, on rank 1: found no call on ranks [0]; expected a call on all 2 ranks" in said


@pytest.mark.parametrize(
    ("how", "shards", "expected"),
    [
        ("two forwards", False, "found forward passes of 4 and 6 samples"),
        ("two forwards", True, "found forward passes of 4 and 6 samples"),
        ("no forward", False, "found a gradient of samples that no forward() of this model has counted"),
        ("left over", False, "found those of an earlier round"),
        ("left over", True, "found those of an earlier round"),
        ("no reduction", True, "found a pass that does not reduce"),
        ("met late", True, "found forward passes of 4 and 6 samples"),
        (
            "loss_scale",
            False,
            "loss_scale(): found one between forward() and backward(); expected the plain loss",
        ),
        ("divide factor", True, "set_gradient_divide_factor(): found 1; expected no call of it"),
        ("set once", False, "set_weight(): found it for some micro-batches only"),
        ("set once", True, "set_weight(): found it for some micro-batches only"),
    ],
)
@pytest.mark.parametrize("rounds", [1, 3])
def test_what_one_rank_refuses_all_do(
    ranks: Ranks, how: str, shards: bool, expected: str, rounds: int
) -> None:
    """Or the others would wait for its gradients."""
    if shards and DEVICE.type == "cuda":
        pytest.skip("FSDP2 on a GPU needs NCCL")
    other, own = pair(ranks, jobs.refused_alone, how, rounds, shards)
    assert expected in own
    assert "found gradients that rank 1 refused" in other


@pytest.mark.skipif(DEVICE.type == "cuda", reason="on a GPU that rank alone")
def test_a_pass_that_is_met_when_a_part_is_on_its_way(ranks: Ranks) -> None:
    (errors, other), (_, own) = pair(ranks, jobs.met_late, [6, 4], False)
    assert len(errors) == 3
    assert max(errors) < 1e-12
    assert "found forward passes of 3 and 4 samples" in own
    assert "found gradients that rank 1 refused" in other


def test_shares_that_are_met_when_a_part_is_on_its_way(ranks: Ranks) -> None:
    """What the first buckets were weighted by is not all of it."""
    for errors, said in pair(ranks, jobs.met_late, [6, 4], True):
        assert max(errors, default=0) < 1e-12
        assert "samples when its reduction began; expected hook.set_weight(n) before it" in said


def test_a_second_hook(ranks: Ranks) -> None:
    for said in pair(ranks, jobs.second_hook):
        assert "found one with a communication hook" in said


def test_a_split_that_never_changes_says_why(ranks: Ranks) -> None:
    for said in pair(ranks, jobs.idle):
        assert len(said) == 1
        assert "nothing moved in 5 windows of 5: no round of the epoch is left" in said[0]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((None, [1]), "sampler: dataset: found NoneType; expected one with a length"),
        ((iter([1]), [1]), "dataset: found list_iterator.*UnevenIterableDataset is for streams"),
        ((10, None), "plan: found None; expected a plan, its file, or the batches by rank"),
        ((10, 5), "plan: found 5"),
    ],
)
def test_samplers_of_nothing(arguments: tuple[Any, Any], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        UnevenBatchSampler(*arguments, rank=0)


def test_rebalancers_of_nothing() -> None:
    with pytest.raises(InputError, match=r"sampler: found NoneType; expected an UnevenBatchSampler"):
        Rebalancer(None, None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"hook: found NoneType; expected what weighted_hook"):
        Rebalancer(UnevenBatchSampler(10, [2], rank=0), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("arguments", [(-1,), (float("nan"), 3), (1, -3), (1, 3, None)])
def test_scales_of_nothing(arguments: Any) -> None:
    if len(arguments) == 3:
        assert float(loss_scale(*arguments)) == pytest.approx(1 / 3)
        return
    with pytest.raises(InputError, match="a number from 0"):
        loss_scale(*arguments)


def test_where_one_rank_alone_could_not_tell_that_models_weigh_unlike(ranks: Ranks) -> None:
    """The last one has a third of the samples, and of the prompts."""
    said = ranks.run(4, jobs.one_loss_of_two_models, [8, 4, 6], 5)[:3]
    assert "one loss of two models, of 8 and 5 samples" in said[0] or "of 5 and 8 samples" in said[0]
    assert "one loss of two models, of unlike samples on other ranks" in said[2]


def test_models_over_unlike_groups(ranks: Ranks) -> None:
    """Of three ranks two have both models: they ask each other, and not the third."""
    assert ranks.run(4, jobs.one_loss_over_unlike_groups, [6, 7]) == [""] * 4
    said = ranks.run(4, jobs.one_loss_over_unlike_groups, [6, 5])
    assert "one loss of two models, of unlike samples on other ranks" in said[0]
    assert "one loss of two models, of 5 and 7 samples" in said[1]
    assert said[2:] == ["", ""]


def test_chunks_of_a_batch_are_not_its_samples(ranks: Ranks) -> None:
    """Each of 4, and of unlike numbers: both ranks would count 4."""
    for said in pair(ranks, jobs.in_chunks, [8, 12], 4):
        assert "unlike numbers of forward passes in a loss; expected weighted_hook(model, count=" in said


@pytest.mark.parametrize("masked", [False, True])
def test_a_mean_over_targets_in_the_model_is_none_over_rows(ranks: Ranks, masked: bool) -> None:
    for said in pair(ranks, jobs.targets_in_the_model, [6, 3], masked):
        assert "unlike targets by row" in said


def test_a_copy_computes_and_is_not_trained(ranks: Ranks) -> None:
    for distance, said in ranks.run(4, jobs.copied):
        assert distance == 0
        assert "found a copy of the model, without its hook; expected DistributedDataParallel(" in said


@pytest.mark.parametrize("bits", [torch.bfloat16, torch.float16])
def test_a_weight_of_16_bits_is_rounded(ranks: Ranks, bits: torch.dtype) -> None:
    with pytest.raises(InputError, match=r"float32 or whole numbers: sum\(dtype=torch.float32\)"):
        loss_scale(torch.ones(300, dtype=bits).sum(), 300)
    for said in pair(ranks, jobs.counted_in_bits, bits):
        assert f"count: found {bits}; expected float32" in said[0]
        assert f"set_weight: weight: found {bits}" in said[1]
        assert "set_weight: weight: found -1; expected a number from 0" in said[2]
