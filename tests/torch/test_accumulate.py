"""Micro-batches of any sizes give the gradient of one process; a loop that weights them wrongly is named."""

from __future__ import annotations

import ddp_accumulate_jobs as jobs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import Ranks
from sampled import examples

EXACT = 1e-12

torch.set_num_threads(1)


@settings(
    derandomize=True,
    deadline=None,
    max_examples=examples(6, 15),
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the ranks are meant to be used again
)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 5)), min_size=2, max_size=4),
    st.booleans(),
    st.booleans(),
)
def test_whatever_the_split(ranks: Ranks, drawn: list[tuple[int, int]], clip: bool, scaled: bool) -> None:
    batches, parts = [b for b, _ in drawn], [p for _, p in drawn]
    for errors in ranks.run(len(drawn), jobs.accumulated_errors, batches, parts, clip, scaled):
        assert max(errors) < EXACT


@pytest.mark.thorough
def test_compiled(ranks: Ranks) -> None:
    for errors in ranks.run(2, jobs.accumulated_errors, [7, 10], [2, 3], True, True, "aot_eager"):
        assert max(errors) < EXACT


@pytest.mark.parametrize("parts", [[4, 3, 1], [1, 1, 2]])
def test_rounds_of_a_loader(ranks: Ranks, parts: list[int]) -> None:
    for errors in ranks.run(3, jobs.rounds_errors, [26, 10, 3], parts):
        assert len(errors) == 3
        assert max(errors) < EXACT


@pytest.mark.parametrize("said", [False, True])
def test_by_targets(ranks: Ranks, said: bool) -> None:
    for errors in ranks.run(2, jobs.token_rounds_errors, [26, 9], 4, said):
        assert max(errors) < EXACT


@pytest.mark.parametrize("shares", [False, True])
def test_with_batch_norm(ranks: Ranks, shares: bool) -> None:
    for error in ranks.run(2, jobs.norm_rounds_error, [26, 9], 4, shares):
        assert error < EXACT


@pytest.mark.parametrize(
    ("idiom", "batch", "expected"),
    [
        ("loss / k", 26, "found weights of 7, 7, 6, 6: loss / 4 would count them alike"),
        ("share of the parts", 26, "found shares that add up to 0.8, not 1"),
        ("loss / k", 28, "nothing"),
        ("share", 26, "nothing"),
        ("accumulate", 26, "nothing"),
    ],
)
def test_a_wrong_loop_is_refused(ranks: Ranks, idiom: str, batch: int, expected: str) -> None:
    for said in ranks.run(2, jobs.said_of, batch, 4, idiom):
        assert expected in said


@pytest.mark.parametrize(("normed", "parts"), [(False, [4, 2]), (True, [4, 4])])
def test_as_few_parts_as_memory_holds(ranks: Ranks, normed: bool, parts: list[int]) -> None:
    """As many on each rank only where they wait for each other in each."""
    found = ranks.run(2, jobs.most_errors, [26, 9], [8, 5], normed)
    assert [count for _, count in found] == parts
    assert max(error for error, _ in found) < EXACT


def test_what_one_rank_refuses_all_do(ranks: Ranks) -> None:
    """Or the others would wait for its gradients."""
    other, own = ranks.run(2, jobs.said_alone)
    assert "gradients that rank 1 refused" in other
    assert "weights of 7, 7, 6, 6" in own


@pytest.mark.parametrize("parts", [1, 3])
def test_a_model_in_eval_mode_trains_with_its_own_weights(ranks: Ranks, parts: int) -> None:
    """Without dropout, say. What is only looked at, with other samples, weighs nothing."""
    for errors in ranks.run(2, jobs.eval_mode_errors, [26, 9], parts):
        assert len(errors) == 3
        assert max(errors) < EXACT


def test_misuse(ranks: Ranks) -> None:
    for said in ranks.run(2, jobs.misused):
        assert "accumulate: parts: found 0; expected a whole number from 1" in said[0]
        assert "rounds: sampler: found None" in said[1]
        assert "rounds: micro-batches of a round: found some that are left" in said[2]
        assert "accumulate: micro-batches: found 1; expected 2 in this round" in said[3]
        assert "share: weight, total: found -1, 4" in said[4]
        assert "share: weight, total: found 5, 4" in said[5]
        assert "rounds: micro-batches: found (2, 1); expected as many on every rank" in said[6]
        assert "accumulate: micro-batches: found (2, 1); expected as many on every rank" in said[7]
        assert "accumulate: micro-batches: found (" in said[8]
        assert "accumulate: micro-batches: found a last one without backward()" in said[9]
        assert "weighted_hook: gradients: found none of earlier micro-batches" in said[10]
        assert said[11] == "exact"


def test_what_a_library_drops_weighs_nothing(ranks: Ranks) -> None:
    assert max(ranks.run(2, jobs.error_after_dropped, [9, 4])) < EXACT


@pytest.mark.parametrize("how", ["cut", "counted", "own"])
def test_a_batch_in_parts_is_one_round(ranks: Ranks, how: str) -> None:
    assert ranks.run(2, jobs.rounds_trained, how) == [2, 2]
