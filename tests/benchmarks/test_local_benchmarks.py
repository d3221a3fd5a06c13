"""The benchmarks of local steps: their tables, and what they try, at a small size."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import local_link
import local_samples
import local_steps
import local_tried
import local_wide
import pytest
import torch
from local_tried import EVERY_STEP, FREE, PLANNED, Outer, Store, Training, replace

from pyps.formats import read_plan


def test_the_plan_and_the_table_of_a_real_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Local steps that halve the time to the loss; the link is in the plan, not among emulated devices."""
    options = argparse.Namespace(seeds=2, samples=1000, sample_seconds=0.02, mbit=8.0, every=100, lr=0.01)
    plan = read_plan(local_link.planned(tmp_path, options, local_link.WAYS[0]))
    assert [w.batch > 0 for w in plan.workers] == [True] * 4
    assert plan.workers[3].batch > plan.workers[0].batch
    assert "link" not in (tmp_path / "devices.toml").read_text().replace('name = "link"', "")

    def found(*arguments: object) -> local_link.Found:
        slow = 2.0 if len(arguments) == 3 else 1.0
        return local_link.Found([(0.0, 0, 4.0), (slow * 10.0, 1000, 2.0)], 64_000, slow * 0.2)

    class Pair:
        def __enter__(self) -> None:
            return None

        def __exit__(self, *_: object) -> None:
            return None

    for name, made in (("every_step", found), ("local_steps", found), ("shaped", lambda _: Pair())):
        monkeypatch.setattr(local_link, name, made)
    well, text = local_link.compare(options)
    assert not well
    assert "a step of int8 DDP is 90% on the link (threshold: 60%). Best: 2.00 times" in text
    assert text.count(" local steps") == len(local_link.WAYS)


def test_tables_of_virtual_time() -> None:
    """Targets are by seed; what never gets there is said."""
    cases = (local_steps.DDP, local_steps.SYNC, local_steps.MERGED)
    ends = {local_steps.DDP: 1.8, local_steps.SYNC: 1.9, local_steps.MERGED: 2.2}
    curves = {(c, s): [(0.0, 0, 3.0), (100.0, 1000, ends[c] + 0.1 * s)] for c in cases for s in (0, 1)}
    text = local_steps.losses(curves, cases, (0, 1))
    assert "Targets: 1.909, 2.010, by seed." in text
    assert "2 of 2 never" in text.splitlines()[-3]
    delayed = {(c, 0): [(0.0, 0, 3.0), (100.0 + k, 1000, 2.0)] for k, c in enumerate(local_steps.DELAYED)}
    pairs = (local_steps.DELAYED[:2], local_steps.DELAYED[2:])
    assert local_steps.delays(delayed, [0], pairs).count("1.00") == 2
    assert sum(local_steps.planned(10, 2)) == 80


@pytest.mark.parametrize("best", [-14, -15, -18])
def test_a_ladder_is_climbed_until_the_best_is_inside(best: int) -> None:
    """Whatever it begins with; a place that was given up is worse."""
    found = local_samples.climbed(lambda k, most: 100.0 + k - best if k >= best else math.inf, -14)
    assert min(found, key=lambda k: found[k]) == best
    assert {best - 1, best + 1} < found.keys()
    assert local_samples.interior(found)


def test_tuning_ends_with_the_first_batch_that_is_no_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins with the learning rate of the last."""
    samples = {20: 500.0, 10: 400.0, 5: 450.0, 2: 100.0}
    ladder = [local_samples.Way("DDP", "AdamW", batch) for batch in samples]
    monkeypatch.setattr(
        local_samples, "train", lambda way, *_: samples[way.batch] + abs(round(2 * math.log2(way.lr)) + 15)
    )
    best, tried = local_samples.tuned(ladder)
    assert (best.batch, best.lr) == (10, local_samples.rate(-15))
    assert [batch for batch, _ in tried] == [20, 10, 5]


@pytest.mark.parametrize("way", [("AdamW", 20, None), ("Muon", 2, local_samples.NESTEROV)])
def test_samples_of_ddp_and_of_local_steps(
    way: tuple[str, int, local_samples.Outer | None], shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round or two, through pyps, bring the loss of an untrained model down."""
    for name, value in (("FIRST", 0), ("EVERY", 200), ("HELD_OUT", 16), ("LOSSES", (4.0,))):
        monkeypatch.setattr(local_samples, name, value)
    family, batch, outer = way
    made = local_samples.Way("", family, batch, outer, averages=outer is not None, lr=0.01)
    assert 0 < local_samples.train(made, 0, 600) <= 600


def test_64_workers_learn() -> None:
    result = local_wide.learned(10, local_wide.WAYS[1], 0.016, 0, count=2)
    assert result.samples == 2 * local_wide.scenario(10, True).global_batch == 2 * 64 * 50
    assert result.curve[-1][2] < result.curve[0][2]
    assert len(local_wide.seconds_to(result)) == len(local_wide.LOSSES)


def test_the_best_rate_has_slower_ones_on_both_sides() -> None:
    tried: list[float] = []

    def cost(rate: float) -> float:
        tried.append(rate)
        return abs(math.log2(rate / 0.064))

    assert local_wide.best_rate(cost) == pytest.approx(0.064)
    assert sorted(tried) == pytest.approx([0.008, 0.016, 0.032, 0.064, 0.128])
    assert local_wide.best_rate(lambda rate: math.inf) == local_wide.FIRST_RATE


class Bowl:
    """A task: gradients of |w|^2 / 2, whatever the samples."""

    sizes = (3, 2)
    flat = torch.ones(5)

    def gradient(self, w: torch.Tensor, first: int, count: int) -> torch.Tensor:
        return w.clone()

    def loss(self, w: torch.Tensor) -> float:
        return 3.0 + float(w @ w)


@pytest.mark.parametrize(
    "way",
    [
        EVERY_STEP,
        PLANNED,
        FREE,
        replace(FREE, merges=3),
        replace(FREE, outer=Outer(0.75, 0.3, 4, look=1.0)),
        replace(FREE, outer=Outer(align=0.2)),
        replace(PLANNED, begin=0.25, shared="mv", steps=(2, 20), average=0.5),
    ],
)
def test_every_way_goes_down(way: local_tried.Way) -> None:
    curve = Training(way, Bowl(), 2000).run()  # type: ignore[arg-type]
    assert curve[-1][1] >= 2000
    assert curve[-1][2] < 0.9 * curve[0][2]
    assert all(math.isfinite(loss) for _, _, loss in curve)


def test_delayed_momentum_comes_to_as_much_as_momentum_each_time() -> None:
    """Of a constant difference, once the momentum has come to rest; in between there are plain steps."""
    way, ends = torch.tensor([1.0, -2.0]), []
    for outer in (Outer(0.5, 0.5), Outer(0.5, 0.5, 4)):
        store = Store(torch.zeros(2), outer, [2])
        for _ in range(80):
            store.push(way, 0.25)
        before = store.w.clone()
        for _ in range(4):
            store.push(way, 0.25)
        ends.append(store.w - before)
    assert torch.allclose(ends[0], -way)
    assert torch.allclose(ends[0], ends[1])


@pytest.mark.parametrize(("cosine", "kept"), [(1.0, True), (0.1, False), (-0.5, False)])
def test_a_difference_against_the_momentum_is_corrected(cosine: float, kept: bool) -> None:
    store = Store(torch.zeros(2), Outer(align=0.3), [2])
    store.m = torch.tensor([2.0, 0.0])
    way = torch.tensor([cosine, math.sqrt(1.0 - cosine**2)])
    changed = store.aligned(way)
    assert torch.allclose(changed, way) == kept
    assert float(changed[0]) >= float(way[0])
    assert float(changed.norm()) <= 1.0 + 1e-6
