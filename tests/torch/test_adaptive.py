"""The global batch grows with the noise of the gradients, on all ranks at once; so does the learning rate."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import adaptive_jobs as jobs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import Ranks, run_script

from pyps.errors import InputError
from pyps.solver import Line
from pyps.solver.online.decide import Bounds, round_seconds
from pyps.solver.online.global_batch import BoundedCost, Rule, learning_rate_factor, next_split
from pyps.solver.systems.goodput import StatisticalEfficiency
from pyps.torch import AdaptiveBatch, UnevenBatchSampler

COSTS = [Line(0.02, 0.0005), Line(0.04, 0.001)]

torch.set_num_threads(1)


@given(st.integers(1, 512), st.integers(1, 64), st.floats(0, 1e6))
def test_adascale_lies_between_constant_and_linear(base: int, times: int, noise: float) -> None:
    found = learning_rate_factor("adascale", base, base * times, noise)
    assert 1 - 1e-12 <= found <= times * (1 + 1e-12)


@pytest.mark.parametrize(
    ("rule", "factor"), [("square-root", 2.0), ("linear", 4.0), ("constant", 1.0), ("adascale", 1.0)]
)
def test_rules_without_a_noise_scale(rule: Rule, factor: float) -> None:
    assert learning_rate_factor(rule, 16, 64, None) == factor


def test_a_batch_grows_as_far_as_it_pays() -> None:
    devices = [BoundedCost(cost, Bounds(most=4096)) for cost in COSTS]
    at: dict[float, int] = {}
    for noise in (1.0, 100.0, 10_000.0):
        split, efficiency = (20, 12), StatisticalEfficiency(noise, 32)
        for _ in range(12):
            after = next_split(split, devices, efficiency, 4096, 0.0, 0.0)
            assert sum(after) <= 2 * sum(split)
            split = after
        at[noise] = sum(split)
        goodputs = [
            efficiency.estimate(b, round_seconds(COSTS, (b - b // 3, b // 3))).goodput
            for b in range(32, 4096, 8)
        ]
        reached = efficiency.estimate(sum(split), round_seconds(COSTS, split)).goodput
        assert reached > 0.97 * max(goodputs)
    assert at[1.0] < at[100.0] < at[10_000.0]
    bounded = next_split((20, 12), devices, StatisticalEfficiency(100.0, 32), 4096, 0.0, 0.95)
    assert 32 < sum(bounded) <= (100 + 32) / 0.95 - 100


def test_a_batch_of_whole_multiples_stays_within_its_bounds() -> None:
    """The next multiple of 64 above 128 is 192: more than is allowed, or than learns enough."""
    devices, noisy = (
        [BoundedCost(cost, Bounds(64, 4096, 64)) for cost in COSTS],
        StatisticalEfficiency(10_000.0, 128),
    )
    assert sum(next_split((64, 64), devices, noisy, 192, 0.0, 0.0)) == 192
    assert next_split((64, 64), devices, noisy, 180, 0.0, 0.0) == (64, 64)
    assert next_split((64, 64), devices, noisy, 192, 0.0, 0.9945) == (64, 64)


def test_ranks_agree_and_see_every_sample_once(ranks: Ranks) -> None:
    found = ranks.run(2, jobs.trained, COSTS, [16, 16], 4, {"max_batch": 256})
    first, second = found
    assert first["batches"] == second["batches"]
    assert first["rates"] == second["rates"]
    assert first["batches"][0] == 32
    assert 32 < first["batches"][-1] <= 256
    assert jobs.RATE < first["rates"][-1] < jobs.RATE * first["batches"][-1] / 32
    for one, other in zip(first["samples"], second["samples"], strict=True):
        assert sorted(one + other) == list(range(jobs.LENGTH))


@pytest.mark.thorough
@pytest.mark.parametrize(("library", "module"), [("Accelerate", "accelerate"), ("Fabric", "lightning")])
def test_in_a_library_s_loop(library: str, module: str) -> None:
    pytest.importorskip(module)
    script = Path(__file__).resolve().parents[1] / "helpers" / "adaptive_train.py"
    epochs = json.loads(run_script(script, 2, LIBRARY=library, OMP_NUM_THREADS="1").splitlines()[-1])
    batches, samples, errors, rates = zip(*epochs, strict=True)
    assert batches[0] == 24 < batches[-1] <= 96
    assert set(samples) == {720}  # each once an epoch
    assert max(errors) < 1e-12
    assert all((b > 24) == (rate > 0.02) for b, rate in zip(batches, rates, strict=True))


def test_a_run_goes_on_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    options = {"max_batch": 256, "rule": "square-root", "overhead_seconds": 0.01}
    whole = ranks.run(2, jobs.trained, COSTS, [16, 16], 4, options, tmp_path)
    kept = sorted(path for path in tmp_path.iterdir() if path.name.isdigit())
    for path in kept[2:]:
        shutil.rmtree(path)
    (tmp_path / "latest").unlink(missing_ok=True)
    after = ranks.run(2, jobs.trained, COSTS, [16, 16], 4, options, kept[1], True)
    for rank in range(2):
        for part in ("batches", "rates", "samples"):
            assert whole[rank][part][2:] == after[rank][part]
        for one, other in zip(whole[rank]["model"], after[rank]["model"], strict=True):
            assert torch.equal(one, other)


def _balance(sampler: UnevenBatchSampler) -> Any:
    """A Rebalancer, as far as AdaptiveBatch reads one that measures nothing."""
    return SimpleNamespace(sampler=sampler)


def test_what_is_refused() -> None:
    sampler = UnevenBatchSampler(100, [8, 8], 0, accumulate=2)
    for options, said in (
        ({"max_batch": 32, "rule": "cubic"}, "rule: found 'cubic'"),
        ({"max_batch": 8}, "max_batch: found 8; expected at least the global batch, 16"),
    ):
        with pytest.raises(InputError, match=said):
            AdaptiveBatch(cast(Any, None), _balance(sampler), cast(Any, None), **cast(Any, options))
    with pytest.raises(InputError, match=r"batches\[1\]: found 1; expected at least 2, to accumulate"):
        sampler.resize([30, 1])
    sampler.resize([30, 20])  # no round of the epoch was handed out
    assert (sampler.global_batch, sampler.next_batch) == (50, 50)


class _Measured:
    scale = 1000.0


def _adaptive(split: list[int]) -> tuple[UnevenBatchSampler, AdaptiveBatch, torch.optim.Optimizer]:
    sampler = UnevenBatchSampler(600, split, 0)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    adaptive = AdaptiveBatch(cast(Any, _Measured), _balance(sampler), optimizer, max_batch=64)
    adaptive._devices = lambda: [BoundedCost(Line(0.05, 0.001), Bounds(most=64))] * len(split)  # type: ignore[method-assign]
    return sampler, adaptive, optimizer


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("begun", [False, True])
def test_a_batch_that_is_to_come_is_saved_with_its_rate(begun: bool, ranks: int) -> None:
    """Between epoch() and set_epoch(), or after both; with as many ranks and with others."""
    sampler, adaptive, optimizer = _adaptive([4, 4])
    adaptive.epoch()
    if begun:
        sampler.set_epoch(1)
    again, other, another = _adaptive([4, 4] if ranks == 2 else [4, 2, 2])
    again.load_state_dict(sampler.state_dict())
    other.load_state_dict(adaptive.state_dict())
    another.load_state_dict(optimizer.state_dict())
    assert again.global_batch == sampler.global_batch
    for one in (sampler, again):
        one.set_epoch(1)
    assert again.global_batch == sampler.global_batch == 16
    assert another.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] > 0.1
    assert len(again.split) == ranks
