"""Passes of a step: every loss in any parts has one process's gradient, or all ranks refuse it."""

from __future__ import annotations

import micro_batch_jobs
import pytest
from micro_batch_jobs import Parts
from ranks import Ranks

EXACT = 1e-12  # relative, in float64
UNLIKE = {"two terms", "four losses of a detector"}  # whose terms are over unlike items


@pytest.mark.parametrize(
    ("wrapper", "parts", "penalized"),
    [
        ("ddp", 2, True),
        ("ddp", [1, 5], False),
        ("ddp", [3, 1], True),
        ("fsdp", 4, False),  # the first rank has three samples: it computes one of them again
        ("fsdp", 2, False),
    ],
)
def test_every_loss_in_parts(ranks: Ranks, wrapper: str, parts: Parts, penalized: bool) -> None:
    for found in ranks.run(2, micro_batch_jobs.in_parts, wrapper, parts, penalized):
        wrong = {name: far for name, far in found.items() if isinstance(far, str) or not far < EXACT}
        assert {name: far for name, far in wrong.items() if "another proportion" not in str(far)} == {}
        assert wrong.keys() <= UNLIKE


def test_a_pass_that_repeats_does_not_count(ranks: Ranks) -> None:
    for found in ranks.run(2, micro_batch_jobs.of_one_rank):
        assert {name: far for name, far in found.items() if not far < EXACT} == {}


@pytest.mark.parametrize(
    ("how", "wrapper", "parts"),
    [(how, "ddp", 3) for how in ("error", "break", "kept", "no_sync", "zeroed")]
    + [(how, "fsdp", parts) for how in ("error", "break", "kept") for parts in (3, [3, 4])],
)
def test_a_loop_that_is_left_leaves_no_trace(ranks: Ranks, how: str, wrapper: str, parts: Parts) -> None:
    assert max(ranks.run(2, micro_batch_jobs.left, how, wrapper, parts)) < EXACT


@pytest.mark.parametrize("what", ["scaled", "n=", "a sum", "ignore_index"])
def test_a_loss_divided_by_the_number_of_its_parts_is_refused(ranks: Ranks, what: str) -> None:
    for said in ranks.run(2, micro_batch_jobs.divided, what):
        assert "a loss divided by the number of micro-batches" in said


def test_two_losses_of_each_part_are_refused(ranks: Ranks) -> None:
    for said in ranks.run(2, micro_batch_jobs.divided, "two losses"):
        assert "found 3 or more backward() calls in 2; expected one for each, of the losses' sum" in said


@pytest.mark.parametrize("wire", ["int8", "int4", "bf16"])
def test_what_the_wire_rounds_off_is_sent_in_the_next_step_s_unit(ranks: Ranks, wire: str) -> None:
    whole, _ = ranks.run(2, micro_batch_jobs.on_the_wire, wire, [1] * 5)
    in_parts, _ = ranks.run(2, micro_batch_jobs.on_the_wire, wire, [2, 3, 1, 2, 2])
    assert in_parts < 1.5 * whole


def test_a_constant_is_no_count_where_ranks_have_unlike_numbers_of_parts(ranks: Ranks) -> None:
    for said in ranks.run(2, micro_batch_jobs.divided, "a constant"):
        assert "a sum (SumBackward0) divided by 999 on all ranks" in said
