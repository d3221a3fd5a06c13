"""Samples shared by what their lengths cost: each once, ranks that end together, and the gradient of one
process.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import length_jobs
import msgspec
import numpy as np
import pytest
from ranks import Ranks

from pyps.errors import InputError
from pyps.formats import (
    Cluster,
    Device,
    Job,
    LengthCost,
    LengthMoments,
    Lengths,
    ModelInfo,
    Plan,
    Point,
    Profile,
    WorkerGroup,
    write_json,
)
from pyps.profiler import select_fit
from pyps.solver.plan import make_plan
from pyps.torch.sampler import UnevenBatchSampler

COUNT = 64 * 5 + 20  # the last round is smaller
TOKENS = np.clip(np.random.default_rng(0).lognormal(6, 1, COUNT), 16, 2048).astype(int)
LATEST, EXACT = 1.05, 1e-12
FAST = LengthCost(fixed_seconds=1e-4, per_token_seconds=1e-6, per_square_seconds=1e-9)
SLOW = LengthCost(fixed_seconds=4e-4, per_token_seconds=2e-6, per_square_seconds=4e-9)


def profile(cost: LengthCost, tokens: int = 256) -> Profile:
    """Return that of a device whose steps cost as much, measured with samples of so many tokens."""
    each = float(cost.seconds(tokens))
    points = [Point(batch=b, seconds=1e-3 + b * each) for b in (1, 2, 4, 8, 16, 32, 64, 128)]
    known = Point(tokens=tokens, batch=1, seconds=each, peak_bytes=1)
    lengths = Lengths(
        cost=cost, step_seconds=1e-3, fixed_bytes=1, per_token_bytes=0, per_square_bytes=0, points=[known]
    )
    model = ModelInfo(name="m", tokens_per_sample=tokens)
    return Profile(
        device=Device(name="d"), model=model, points=points, fit=select_fit(points), lengths=lengths
    )


def plan(batch: int = 64) -> Plan:
    moments = LengthMoments(mean=float(TOKENS.mean()), mean_square=float((TOKENS.astype(float) ** 2).mean()))
    job = Job(global_batch=round(batch * moments.mean), unit="tokens", lengths=moments)
    groups = [WorkerGroup(name="fast", profile="f"), WorkerGroup(name="slow", profile="s", count=2)]
    return make_plan(Cluster(job=job, worker=groups), [profile(FAST), profile(SLOW)])


def samplers(given: Plan, **more: object) -> list[UnevenBatchSampler]:
    return [UnevenBatchSampler(COUNT, given, rank, lengths=TOKENS, **more) for rank in range(3)]


def rounds(found: list[UnevenBatchSampler]) -> list[list[list[int]]]:
    """Return the samples of each rank, for each round."""
    return [list(one) for one in zip(*[list(iter(sampler)) for sampler in found], strict=True)]


def seconds(found: list[list[int]]) -> np.ndarray:
    return np.array(
        [cost.seconds(TOKENS[part]).sum() for cost, part in zip((FAST, SLOW, SLOW), found, strict=True)]
    )


def test_rounds_have_the_planned_samples_and_ranks_end_together() -> None:
    found = samplers(plan())
    assert [one.global_batch for one in found] == [64] * 3
    plain = UnevenBatchSampler(COUNT, [64], 0)
    for by_cost, one in zip(rounds(found), plain, strict=True):
        assert sorted(chain(*by_cost)) == sorted(one)
        took = seconds(by_cost) + 1e-3
        assert took.max() <= LATEST * took.mean()


def test_a_plan_in_tokens_needs_lengths(tmp_path: Path) -> None:
    write_json(tmp_path / "plan.json", plan())
    with pytest.raises(InputError, match='unit: found "tokens"; expected lengths='):
        UnevenBatchSampler(COUNT, tmp_path / "plan.json", 0)
    assert UnevenBatchSampler(COUNT, tmp_path / "plan.json", 0, lengths=TOKENS).global_batch == 64


def test_a_plan_in_samples_and_batches_in_tokens() -> None:
    each = round(TOKENS.mean())
    given = plan()
    by_samples = msgspec.structs.replace(
        given,
        unit="samples",
        workers=[
            msgspec.structs.replace(w, batch=b) for w, b in zip(given.workers, (32, 16, 16), strict=True)
        ],
    )
    for one in (by_samples, [32 * each, 16 * each, 16 * each]):
        assert samplers(one)[1].split == (32 * each, 16 * each, 16 * each)
    with pytest.raises(InputError, match="64 tokens, as lengths= is given"):
        samplers([32, 16, 16])


def test_a_resumed_epoch_and_a_new_split_have_each_sample_once() -> None:
    begun = samplers(plan(), seed=3)
    seen = [k for ranks in rounds(begun)[:2] for part in ranks for k in part]
    resumed = samplers(plan(), seed=3)
    total = sum(resumed[0].split)
    moved = [total // 2, total // 4, total - total // 2 - total // 4]
    for sampler in resumed:
        sampler.load_state_dict(begun[0].state_dict(2))
        sampler.replan(moved, number=1)
    rest = rounds(resumed)
    assert sorted(chain(seen, *chain(*rest))) == list(range(COUNT))
    before, after = seconds(rest[0]), seconds(rest[1])
    assert after[1] / after[0] > 1.05 * before[1] / before[0], "the slow rank has more"


def test_micro_batches_are_of_about_equal_cost() -> None:
    for sampler, cost in zip(samplers(plan(), accumulate=4), (FAST, SLOW, SLOW), strict=True):
        for part in zip(*[iter(sampler)] * 4, strict=True):
            took = [cost.seconds(TOKENS[micro]).sum() for micro in part]
            longest = cost.seconds(max(TOKENS[k] for micro in part for k in micro))
            assert max(took) <= sum(took) / 4 + longest
            joined = list(chain(*part))
            assert joined == sorted(joined, key=lambda k: -TOKENS[k])


def test_work_is_counted_in_tokens_of_average_cost() -> None:
    found = samplers(plan())
    for sampler, part in zip(found, rounds(found)[0], strict=True):
        assert sampler.round_samples(0) == (64, len(part))
    work = [one.round_work(0) or (0, 0, 0.0) for one in found]
    assert [(size, batch) for size, batch, _ in work] == [(64, batch) for batch in found[0].split]
    factors = [factor for *_, factor in work]
    assert factors == pytest.approx([factors[0]] * 3, rel=0.02), (
        "this round's samples are cheap or dear for all"
    )
    assert factors[0] != pytest.approx(1, rel=0.02)


def test_wrong_lengths_and_costs_are_refused() -> None:
    for lengths in (TOKENS[1:], TOKENS - TOKENS.min(), TOKENS / 2, [["a"]]):
        with pytest.raises(InputError, match="lengths"):
            UnevenBatchSampler(COUNT, plan(), 0, lengths=lengths)
    for cost in ([FAST, SLOW], [FAST, SLOW, None]):
        with pytest.raises(InputError, match="cost"):
            UnevenBatchSampler(COUNT, plan(), 0, lengths=TOKENS, cost=cost)


def test_ranks_compare_lengths_and_costs() -> None:
    one, same = samplers(plan())[:2]
    assert one.position_now() == same.position_now()
    for other in (
        UnevenBatchSampler(COUNT, plan(), 1, lengths=TOKENS + 1),
        UnevenBatchSampler(COUNT, plan(), 1, lengths=TOKENS, cost=FAST),
    ):
        found = other.position_now()
        assert found["lengths and their costs"] != one.position_now()["lengths and their costs"]


def test_the_gradient_is_that_of_one_process(ranks: Ranks) -> None:
    for far, counts in ranks.run(3, length_jobs.trained):
        assert max(far) < EXACT
        assert len({tuple(one) for one in counts}) > 1, "ranks have other numbers of samples in other rounds"


def test_uneven_splits_by_the_cost_of_lengths_on_each_rank(ranks: Ranks) -> None:
    costs = [FAST, SLOW, SLOW, SLOW]
    found = ranks.run(4, length_jobs.planned, [profile(cost, tokens=16) for cost in costs])
    lengths = length_jobs.TOKENS.astype(float)
    moments = lengths.mean(), (lengths**2).mean()
    for split, known, batch in found:
        assert (known, batch) == (costs, length_jobs.BATCH)
        took = [
            1e-3 + tokens / moments[0] * cost.mean(*moments)
            for tokens, cost in zip(split, known, strict=True)
        ]
        assert took == pytest.approx([took[0]] * 4, rel=0.05)
