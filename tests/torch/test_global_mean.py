"""GlobalMean: an uneven round's gradient is that of one process with all samples, or all ranks refuse it."""

from __future__ import annotations

import mean_jobs
import pytest
from ranks import Ranks

EXACT = 1e-12  # relative, in float64


@pytest.mark.parametrize("count", [2, 3])
def test_losses(ranks: Ranks, count: int) -> None:
    names = [*mean_jobs.LOSSES, *mean_jobs.SUMS]
    for found in ranks.run(count, mean_jobs.losses, names):
        assert found.keys() == set(names)
        assert {name: far for name, far in found.items() if not far < EXACT} == {}


def test_losses_of_a_sharded_model(ranks: Ranks) -> None:
    for found in ranks.run(2, mean_jobs.losses, ["two terms", "a sum", "class weights"], "fsdp"):
        assert max(found.values()) < EXACT


def test_losses_of_a_hybrid_sharded_model(ranks: Ranks) -> None:
    for found in ranks.run(4, mean_jobs.losses, ["two terms", "a sum", "class weights"], "hsdp"):
        assert max(found.values()) < EXACT
    for found in ranks.run(4, mean_jobs.micro_batches, "hsdp", "class weights", True):
        assert max(found.values()) < EXACT


def test_what_is_no_mean_is_refused_on_all_ranks(ranks: Ranks) -> None:
    for found in ranks.run(2, mean_jobs.refusals):
        for name, (_, what) in mean_jobs.REFUSED.items():
            assert what in found[name], name


MODES = ["time first", "queries first", "a list of images", "checkpoint", *mean_jobs.WRAPPERS]
MODES.remove("hsdp")  # of four ranks


def test_shapes_and_wrappers_say_nothing(ranks: Ranks) -> None:
    for found in ranks.run(2, mean_jobs.modes, MODES):
        assert {name: far for name, far in found.items() if not far < EXACT} == {}


@pytest.mark.parametrize("mode", ["time first", "a list of images"])
def test_shapes_say_nothing_after_the_split_has_moved(ranks: Ranks, mode: str) -> None:
    found = ranks.run(4, mean_jobs.moved, mode)
    assert [[samples for samples, _ in steps[:3]] for steps in found] == [[3, k, k] for k in (6, 1, 3, 2)]
    assert max(far for steps in found for _, far in steps) < EXACT


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_micro_batches_of_unlike_sizes_and_numbers(ranks: Ranks, wrapper: str, alike: bool) -> None:
    for found in ranks.run(2, mean_jobs.micro_batches, wrapper, "class weights", alike):
        assert max(found.values()) < EXACT


def test_a_rank_without_targets(ranks: Ranks) -> None:
    for found in ranks.run(2, mean_jobs.without_targets):
        assert {name: far for name, far in found.items() if not far < EXACT} == {}


def test_samples_that_are_added_up_first_are_refused(ranks: Ranks) -> None:
    for found in ranks.run(2, mean_jobs.of_samples):
        for name, (_, refused) in mean_jobs.OF_SAMPLES.items():
            far, said = found[name]
            assert far < EXACT, name
            assert refused in said if refused else said == "nothing", name


@pytest.mark.parametrize("how", ["stack", "sum"])
def test_losses_of_single_samples_are_refused(ranks: Ranks, how: str) -> None:
    for found in ranks.run(2, mean_jobs.per_sample, how):
        assert "a loss of each of 3 samples" in found
        assert "n=count" in found


def test_losses_of_single_samples_with_their_number(ranks: Ranks) -> None:
    assert all(float(found) < EXACT for found in ranks.run(2, mean_jobs.per_sample, "n="))


def test_a_count_that_may_be_clamped_is_refused(ranks: Ranks) -> None:
    for found in ranks.run(2, mean_jobs.focal_without_positives):
        assert "loss on rank 0: found a sum divided by 1, which may be a count of 0" in found


def test_penalties(ranks: Ranks) -> None:
    for found in ranks.run(3, mean_jobs.penalties):
        assert {name: far for name, far in found.items() if not far < EXACT} == {}


def test_a_loss_scale(ranks: Ranks) -> None:
    assert max(ranks.run(2, mean_jobs.scaled, False)) < EXACT
    for said in ranks.run(2, mean_jobs.scaled, True):
        assert "on rank 0, 1024 on rank 1" in said or "type of the loss" in said


def test_ranks_may_compute_in_unlike_precisions(ranks: Ranks) -> None:
    off = ranks.run(3, mean_jobs.precisions, "compute")
    assert 1e-6 < max(off) < 0.02  # bf16 rounds to 2**-8
    assert len(set(off)) == 1


@pytest.mark.parametrize("field", ["lr", "weight_decay"])
def test_ranks_with_another_rule(ranks: Ranks, field: str) -> None:
    for found in ranks.run(2, mean_jobs.unlike_rule, field):
        assert f"optimizer's {field} of group 0: found 0.5 on rank 0, 0." in found


def test_losses_are_of_one_type(ranks: Ranks) -> None:
    said = "type of the loss: found 'torch.bfloat16' on rank 0, 'torch.float16' on rank 1"
    assert all(said in found for found in ranks.run(3, mean_jobs.precisions, "loss"))


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("wire=", "GlobalMean: wire: found 'bf16' on rank 0, 'same' on rank 1"),
        ("an option that is unknown", "GlobalMean: wire on rank 0: found 'bf8'"),
        ("a frozen layer", "trained parameters"),
        ("another kind of loss", "terms of the loss"),
        ("a loss that is unknown", "loss on rank 0: found SqrtBackward0"),
        ("another dtype", "type of the loss: found 'torch.float32' on rank 0, 'torch.float64' on rank 1"),
    ],
)
def test_ranks_that_differ(ranks: Ranks, what: str, said: str) -> None:
    for found in ranks.run(2, mean_jobs.unlike, what):
        assert said in found


def test_a_rank_that_calls_less_often_is_named(ranks: Ranks) -> None:
    _, found = ranks.run(2, mean_jobs.unlike, "fewer calls")
    assert "no call 1 on ranks [0], on rank 1; expected as many calls on all ranks, within 3 s" in found


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("unfrozen", "a.weight: found a parameter that trains and that nothing reduces"),
        ("added", "c.weight: found a parameter that trains and that nothing reduces"),
        ("optimizer in backward", "expected optimizer.step() after backward()"),
        ("join", "join(): found a model in it"),
        ("plain", "loss.backward(): found a gradient without its weight; expected mean.backward(loss)"),
        ("another model", "that is in none of the models"),
        ("divided micro-batches", "a loss divided by the number of micro-batches under no_sync(), 2"),
        ("step without a reduction", "1 that were not reduced"),
    ],
)
def test_misuse(ranks: Ranks, what: str, said: str) -> None:
    for found in ranks.run(2, mean_jobs.misuse, what):
        assert said in found


def test_one_loss_of_two_models(ranks: Ranks) -> None:
    assert max(ranks.run(2, mean_jobs.two_models)) < EXACT
