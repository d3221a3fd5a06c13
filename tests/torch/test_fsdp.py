"""FSDP2 and HSDP with uneven batches: exact, rebalanced by the ranks' own times, resumed bit for bit."""

from __future__ import annotations

from pathlib import Path

import fsdp_jobs as jobs
import pytest
import torch
from device import DEVICE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import Ranks
from sampled import sampled

EXACT = 1e-12
NEAR, IN_STEPS = 1.07, 30  # of the best split's time, so many steps after a device has slowed
SPEEDS = (1.0, 1.4, 2.0, 2.9)

# On a GPU FSDP2 orders its collectives by CUDA's streams, as NCCL's are, and fails over these tests' gloo.
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cuda",
    reason="FSDP2 on a GPU needs NCCL: tests/helpers/nccl_on_one_gpu.py runs these jobs",
)
torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("batches", "parts", "replicas"),
    [
        ([48, 16], 1, 1),
        ([5, 30, 2, 8], 1, 2),
        ([26, 10, 3], [4, 3, 1], 1),
        ([26, 10, 3], 4, 1),  # the last rank has fewer samples than micro-batches
        ([5, 30, 2, 8], [1, 4, 2, 2], 2),
    ],
)
def test_the_gradient_is_the_one_of_one_process(
    ranks: Ranks, batches: list[int], parts: int | list[int], replicas: int
) -> None:
    for errors in ranks.run(len(batches), jobs.gradient_errors, batches, parts, replicas):
        assert max(errors) < EXACT


@pytest.mark.parametrize(
    ("batches", "parts", "replicas"),
    [
        ([26, 10], [3, 3], 0),
        ([26, 10], 2, 0),
        ([26, 10], [2, 2], 1),
        ([26, 10], 2, 1),
        ([5, 9, 2, 8], [2, 2, 2, 2], 2),
    ],
)
def test_a_round_that_a_script_leaves_is_forgotten(
    ranks: Ranks, batches: list[int], parts: int | list[int], replicas: int
) -> None:
    """replicas: none under DDP."""
    for errors in ranks.run(len(batches), jobs.errors_after_rounds_left, batches, parts, replicas):
        assert max(errors) < EXACT


def test_a_pass_after_one_that_failed_has_its_own_weight(ranks: Ranks) -> None:
    assert max(ranks.run(2, jobs.error_after_a_failed_pass, [26, 9])) < EXACT


def test_parts_by_what_memory_holds_are_as_many_on_each_rank(ranks: Ranks) -> None:
    for errors in ranks.run(3, jobs.gradient_errors, [26, 10, 3], 0, 1, False, [8, 5, 40]):
        assert max(errors) < EXACT


@settings(
    derandomize=True,
    deadline=None,
    max_examples=6,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the ranks are meant to be used again
)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 4)), min_size=2, max_size=4), st.booleans())
def test_whatever_the_split(ranks: Ranks, drawn: list[tuple[int, int]], by_rank: bool) -> None:
    batches, parts = [b for b, _ in drawn], [p for _, p in drawn]
    for errors in ranks.run(len(drawn), jobs.gradient_errors, batches, parts if by_rank else parts[0], 1):
        assert max(errors) < EXACT


@pytest.mark.thorough
def test_compiled(ranks: Ranks) -> None:
    for errors in ranks.run(2, jobs.gradient_errors, [48, 16], [3, 1], 1, True):
        assert max(errors) < EXACT


def test_a_loss_from_within_the_model(ranks: Ranks) -> None:
    assert max(ranks.run(2, jobs.error_of_outputs, [26, 9])) < EXACT


@pytest.mark.parametrize(("parts", "said"), [([1, 1, 1], False), ([1, 1, 1], True), ([2, 1, 3], False)])
def test_weights_by_targets(ranks: Ranks, parts: list[int], said: bool) -> None:
    for errors in ranks.run(3, jobs.token_errors, [20, 3, 9], parts, said):
        assert max(errors) < EXACT


def test_with_batch_norm(ranks: Ranks) -> None:
    assert max(ranks.run(2, jobs.norm_error, [26, 9])) < EXACT


@pytest.mark.parametrize(("parts", "normalized"), [(3, False), (1, True)])
def test_a_loss_that_is_a_sum(ranks: Ranks, parts: int, normalized: bool) -> None:
    for errors in ranks.run(2, jobs.summed_errors, [26, 9], parts, normalized):
        assert max(errors) < EXACT


@pytest.mark.parametrize(("profiled", "most"), sampled([(False, 64), (True, 64), (True, 20)], 0))
def test_the_split_follows_the_devices(ranks: Ranks, profiled: bool, most: int) -> None:
    """Given costs; the first rank takes twice as long from step 30 on."""
    found = ranks.run(4, jobs.balanced, SPEEDS, 30, 64, profiled, most)
    rounds = list(zip(*(one["seconds"] for one in found), strict=True))
    seconds, (before, after) = [max(step) for step in rounds], found[0]["best"]
    assert most < 64 or seconds[29] / before < NEAR
    assert seconds[30 + IN_STEPS] / after < NEAR
    assert sorted(k for one in found for k in one["seen"]) == list(range(jobs.BATCH * 64 + 20))
    assert any("rank 0 slowed by 2.0x" in change for change in found[0]["history"])
    assert found[0]["split"][0] <= most


@pytest.mark.timed
def test_the_wait_between_layers_is_not_a_rank_s_own_time(ranks: Ranks) -> None:
    slow, quick = ranks.run(2, jobs.timed, 0.01, 5, 0.0)
    assert min(slow) >= 0.2  # five layers, both ways, twice
    assert min(quick) < 0.1


@pytest.mark.timed
def test_the_time_between_passes_is_a_rank_s_own(ranks: Ranks) -> None:
    for own in ranks.run(2, jobs.timed, 0.0, 5, 0.05):
        assert min(own) >= 0.05


@pytest.mark.parametrize(
    ("case", "cause"),
    [("plain", "EQUAL_WEIGHTS"), ("weighted", "NONE"), ("sum", "SUM_LOSS"), ("sum, said", "NONE")],
)
def test_a_check_names_the_cause(ranks: Ranks, case: str, cause: str) -> None:
    for found, error, untouched in ranks.run(2, jobs.cause_reported, [48, 16], case):
        assert found == cause
        assert error < 1e-6 if cause == "NONE" else error > 0.01
        assert untouched


@pytest.mark.parametrize(("split", "replicas"), sampled([([5, 3, 2], 1), ([4, 3, 2, 3], 2)], 1))
def test_a_run_goes_on_bit_for_bit(ranks: Ranks, tmp_path: Path, split: list[int], replicas: int) -> None:
    count = len(split)
    whole = ranks.run(count, jobs.train, tmp_path / "a", 9, split, replicas)
    before = ranks.run(count, jobs.train, tmp_path / "b", 6, split, replicas, 4)
    after = ranks.run(count, jobs.train, tmp_path / "b", 9, split, replicas, 0, True)
    for rank in range(count):
        assert whole[rank]["taken"] == before[rank]["taken"][:4] + after[rank]["taken"]
        for one, other in zip(whole[rank]["model"], after[rank]["model"], strict=True):
            assert torch.equal(one, other)


def test_other_ranks_go_on_and_take_every_sample_once(ranks: Ranks, tmp_path: Path) -> None:
    before = ranks.run(3, jobs.train, tmp_path, 2, [5, 3, 2], 1, 2)
    after = ranks.run(2, jobs.train, tmp_path, 5, [6, 4], 1, 0, True)
    epoch = [k for rank in (*before, *after) for chosen in rank["taken"] for k in chosen]
    assert sorted(epoch) == list(range(jobs.LENGTH))


def test_a_ddp_run_goes_on_sharded_and_back(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, jobs.from_ddp, tmp_path, [5, 3]) == [True, True]


def test_misuse(ranks: Ranks) -> None:
    for said in ranks.run(2, jobs.misused):
        assert "backward(): found a pass that does not reduce; expected hook.accumulate" in said[0]
        assert "model: found one with a hook" in said[1]
        assert "wire: found 'int8'; expected same: fully_shard's MixedPrecisionPolicy" in said[2]
        assert "accumulate: parts: found 0" in said[3]
        assert "rounds: sampler: found None" in said[4]
        assert (
            "GradientNoise: hook: found FSDPSequential; expected what weighted_hook(model) gives" in said[5]
        )
        for one in said[6:]:
            assert "micro-batches: found a last one without backward()" in one


@pytest.mark.parametrize(
    ("batches", "parts", "replicas"),
    [([20, 7], 1, 1), ([5, 30, 2, 8], 1, 2), ([12, 9], 3, 1), ([20, 9, 6], [4, 3, 1], 1)],
)
def test_the_noise_scale_is_that_of_the_gradients(
    ranks: Ranks, batches: list[int], parts: int | list[int], replicas: int
) -> None:
    """Where all cut alike, each micro-batch is reduced at once, and counts as a gradient of its own."""
    for (by_ddp, by_fsdp), expected, batch in ranks.run(
        len(batches), jobs.noise_found, batches, parts, replicas
    ):
        assert by_fsdp == pytest.approx(expected, rel=1e-9)
        assert parts == 3 or by_ddp == pytest.approx(expected, rel=1e-9)
        assert batch == sum(batches)
