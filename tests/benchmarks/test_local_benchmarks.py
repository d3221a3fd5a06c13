"""The benchmarks of local steps: their tables, and what they try, at a small size."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import local_link
import local_samples
import local_steps
import pytest

from pyps.formats import read_plan


def test_the_plan_and_the_table_of_a_real_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Local steps that halve the time to the loss; the link is in the plan, not among emulated devices."""
    options = argparse.Namespace(seeds=2, samples=1000, sample_seconds=0.02, mbit=8.0, every=100, lr=0.01)
    plan = read_plan(local_link.planned(tmp_path, options, local_link.WAYS[3]))
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
    """A few short rounds, through pyps, bring the loss of an untrained model down."""
    for name, value in (("STEPS", 2), ("FIRST", 0), ("EVERY", 40), ("HELD_OUT", 16), ("LOSSES", (4.0,))):
        monkeypatch.setattr(local_samples, name, value)
    family, batch, outer = way
    made = local_samples.Way("", family, batch, outer, averages=outer is not None, lr=0.01)
    assert 0 < local_samples.train(made, 0, 600) <= 600
