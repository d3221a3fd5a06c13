"""benchmarks/papers/papers.py runs, small and untimed: rows, criteria, plots, and a replay that agrees."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import acceptance
import null
import numpy as np
import papers
import pytest
import ringmaster
import tuning

Quick = Callable[[str], str]


@pytest.fixture
def quick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Quick:
    """Runs one part and returns its output."""

    def run(part: str) -> str:
        papers.main(["--quick", "--only", part, "--out", str(tmp_path)])
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize(("part", "competitors"), [("boa", 7), ("r2sp", 4 * 2), ("saps", 5)])
def test_competitors(part: str, competitors: int, tmp_path: Path, quick: Quick) -> None:
    text = quick(part)
    tables = text.count("\n|--")
    assert sum(line.startswith("| ") for line in text.splitlines()) == competitors + tables
    assert "(threshold: " in text
    assert text.count("'s time over ") >= competitors // 2
    assert "Copies, tuned and timed with other seeds." in text
    assert (tmp_path / f"results-{part}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("best", [1, 3, 24])
def test_what_is_tuned_lies_inside_what_was_tried(monkeypatch: pytest.MonkeyPatch, best: int) -> None:
    """A rival whose best number of backup workers and step size are far from where the search begins."""
    tried: set[int] = set()

    def seconds(trial: tuning.Trial, lr: float, seed: int, limit: float = math.inf) -> float:
        k = int(trial.policy.removeprefix("backup:k="))
        tried.add(k)
        return 1.0 + abs(math.log2(k / best)) + abs(math.log2(lr / 128.0))

    monkeypatch.setattr(tuning.Trial, "seconds", seconds)
    monkeypatch.setattr(tuning.Trial, "run", lambda *_: None)
    found = tuning.tune(
        tuning.TuningScenario("many"), acceptance.BACKUP, tuning.Budget(seeds=(1,), tuning=(2,))
    )
    assert (found.policy, found.lr) == (f"backup:k={best}", pytest.approx(128.0))
    assert max(tried) > best


@pytest.mark.parametrize("reached", [(1, 2, 3), (1, 2), (3,), ()])
def test_a_median_is_that_over_all_seeds(monkeypatch: pytest.MonkeyPatch, reached: tuple[int, ...]) -> None:
    """And no seed is trained with once it is known to be infinite."""
    tried: list[int] = []

    def seconds(trial: tuning.Trial, lr: float, seed: int, limit: float = math.inf) -> float:
        tried.append(seed)
        return float(seed) if seed in reached else math.inf

    monkeypatch.setattr(tuning.Trial, "seconds", seconds)
    scenario = tuning.TuningScenario("uniform")
    trial = tuning.Trial(scenario, tuning.cluster_of(scenario, planned=False), "bsp")
    tuner = tuning.Tuner(trial, (1, 2, 3), start=4.0)
    expected = sorted(float(s) if s in reached else math.inf for s in (1, 2, 3))[1]
    assert tuner.best()[1] == expected
    assert tuner.trials == len(tried)
    assert tried[:3] == ([1, 2, 3] if 2 in reached else [1, 2, 1])


def test_a_part_of_the_global_batch_is_planned_too() -> None:
    whole = tuning.cluster_of(tuning.TuningScenario("five"), planned=True)
    assert tuning.smaller(whole, 1.0, planned=True).batches == whole.batches
    half = tuning.smaller(whole, 0.5, planned=True)
    assert half.global_batch == 48
    ends = [w.cost(w.batch) for w in half.workers]
    assert max(ends) <= min(w.cost(w.batch + 1) for w in half.workers)
    assert tuning.smaller(whole, 0.5, planned=False).batches == (10, 10, 10, 9, 9)
    few = tuning.smaller(
        tuning.cluster_of(tuning.TuningScenario("three-types"), planned=True), 0.12, planned=True
    )
    assert (few.global_batch, len(few.workers)) == (15, 3)


@pytest.mark.parametrize("share", [1.0, 0.25, 0.125])
def test_each_count_has_its_own_best_share(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """The best pair lies where neither number is the best with the first value of the other."""

    def seconds(trial: tuning.Trial, lr: float, seed: int, limit: float = math.inf) -> float:
        policy, _, part = trial.policy.partition("@")
        k = int(policy.removeprefix("backup:k="))
        here = 1.0 + abs(math.log2(k / 2)) + k * abs(math.log2(float(part or 1.0) / share))
        return here + abs(math.log2(lr))

    monkeypatch.setattr(tuning.Trial, "seconds", seconds)
    monkeypatch.setattr(tuning.Trial, "run", lambda *_: None)
    scenario = tuning.TuningScenario("eight")
    found = tuning.tune(scenario, acceptance.BACKUP_FEWER, tuning.Budget(seeds=(1,), tuning=(2,)))
    chosen = "backup:k=2" if share == 1.0 else f"backup:k=2@{share:g}"
    assert (found.policy, found.place) == (chosen, "inside")


def test_an_end_of_what_was_tried_is_the_policys_own_or_counts_as_missed() -> None:
    backup, ssp = acceptance.BACKUP, acceptance.SSP
    assert [backup.place(f"backup:k={k}", 8) for k in (1, 2, 6, 7)] == [
        *("natural end", "inside", "inside", "natural end")
    ]
    assert [ssp.place(f"ssp:bound={b}", 8) for b in (0, 1, 233)] == ["natural end", "inside", "edge"]
    assert ssp.place("ssp:bound=233", 234) == "edge", "only a k ends with the workers"
    shares = acceptance.FEWER.rungs("bsp")
    assert [acceptance.FEWER.place(shares[k], 8) for k in (0, 1, -1)] == ["edge", "inside", "edge"]
    assert tuning.Competitor("one", ("asp",)).place("asp", 8) == "inside"


def test_the_setting_of_ringmaster(quick: Quick) -> None:
    rows = [line for line in quick("ringmaster").splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 2 * 4


def test_a_step_size_is_climbed_to_from_afar() -> None:
    found = ringmaster.climb(0.016, lambda step: (abs(math.log2(step / 0.256)), 0.0, 0.0))
    assert found == pytest.approx(0.256)


@pytest.mark.parametrize("overflowed", [math.nan, 1e307, math.inf])
def test_a_step_size_that_diverges_is_left_for_smaller_ones(overflowed: float) -> None:
    """However it diverges: at 1.0 the loss overflows to a smaller number than at 0.5."""

    def score(step: float) -> ringmaster.Score:
        if step < 0.01:
            return ringmaster.score_of(ringmaster.Outcome(10.0 + abs(math.log2(step * 256)), 0.9, 1.0), step)
        return ringmaster.score_of(ringmaster.Outcome(math.inf, overflowed / step, 1.0), step)

    assert ringmaster.climb(0.5, score) == pytest.approx(1 / 256)


def results(title: str, seconds: list[float]) -> tuning.TuningResult:
    """A competitor and its copy with these times, by seed."""

    class Run:
        def __init__(self, took: float) -> None:
            self.took = took

        def seconds_to(self, _: float) -> float | None:
            return self.took if self.took < math.inf else None

    scenario, competitor = tuning.TuningScenario("link"), tuning.Competitor(title, ("asp",))
    runs = tuple(map(Run, seconds))
    return tuning.TuningResult(scenario, competitor, "asp", 1.0, 1, 1, runs)  # type: ignore[arg-type]


def drawn(title: str, mean: float, seed: int) -> tuning.TuningResult:
    draw = np.random.default_rng(seed)
    return results(title, [mean * math.exp(0.1 * x) for x in draw.standard_normal(14)])


def test_a_copy_is_a_tie_and_twice_the_time_a_win() -> None:
    found = [drawn(f"c{k}", 10.0, k) for k in range(20)]
    limits = null.Null.of(found)
    verdicts = [null.Claim.of(found[0], other, limits).verdict for other in found[1:]]
    assert verdicts == ["tie"] * 19
    assert 1.0 < limits.within < 1.3
    assert null.Claim.of(found[0], drawn("slow", 20.0, 99), limits).verdict == "win"
    assert null.Claim.of(drawn("slow", 20.0, 99), found[0], limits).verdict == "loss"


def test_a_rival_that_never_arrives_is_a_win_and_one_lost_seed_a_tie() -> None:
    ours, never = drawn("ours", 10.0, 1), results("never", [math.inf] * 14)
    once = results("once", [20.0] * 13 + [math.inf])
    limits = null.Null.of([ours, once])
    assert 1.0 < limits.within < 1.3, "nor does one lost seed make its copy infinitely slower"
    assert null.Claim.of(ours, never, limits).verdict == "win"
    assert null.Claim.of(ours, once, limits).verdict == "tie"


def test_backup_workers_leave_someone_to_wait_for() -> None:
    assert acceptance.BACKUP.ladder(4) == ("backup:k=1", "backup:k=2", "backup:k=3")


def test_task_sizes_bits_and_the_pipeline(quick: Quick) -> None:
    text = quick("hps")
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 9
    assert [cell.split()[-1] for cell in rows[1][2:-1]] == ["1.00x"] * 3
    assert "met: plain over all three: " in text


@pytest.mark.timed
@pytest.mark.thorough
def test_a_straggler(quick: Quick, shm: Path) -> None:
    text = quick("straggler")
    assert "imbalance after one re-solve: " in text
    assert "rank 1 slowed by " in text
    assert not list(shm.iterdir())


@pytest.mark.thorough
def test_processes(quick: Quick, shm: Path) -> None:
    """The simulator makes the same versions of the same gradients, the core decides the same."""
    rows = [line.split("|") for line in quick("real").splitlines() if line.startswith("| `bsp`")]
    assert [(row[7].strip(), row[8].split()[0]) for row in rows] == [("100%", "0")]
    assert not list(shm.iterdir())


@pytest.mark.thorough
def test_the_same_loss(quick: Quick, shm: Path) -> None:
    """Turns leave nothing to chance: processes that look ahead reach the simulator's loss."""
    row = next(line for line in quick("agreement").splitlines() if line.startswith("| `r2sp`"))
    assert float(row.split("|")[4].strip(" %")) <= 0.5, "only the first pulls depend on who starts first"
    assert not list(shm.iterdir())
