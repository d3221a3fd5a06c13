"""Batches that follow the workers of a run: in virtual time, and in real processes."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import mean, median

import msgspec
import pytest
from run_tools import make_record, make_ring
from sampled import sampled
from virtual_rounds import VirtualRounds

from pyps.formats import EvenSplit, Fit, HpsEstimate, Plan, PlanWorker, write_json
from pyps.formats.records import RecordWriter, RunReader, StepRecord, read_run, record_path
from pyps.native.values import Claim
from pyps.report.steps import applied_steps
from pyps.run import RunOptions, run
from pyps.solver.costs import cost_of
from pyps.solver.online.balancer import Rules
from pyps.solver.online.decide import Bounds, Split, best_split, round_seconds
from pyps.worker.step.step import Step

Costs = tuple[tuple[float, float], ...]

COSTS = ((0.004, 0.0010), (0.004, 0.0014), (0.004, 0.0029))  # fixed and per-sample seconds
GLOBAL_BATCH = 60
LARGE_COSTS = ((0.02, 0.005), (0.02, 0.007), (0.02, 0.0145))  # steps of 0.16 s: 50 ms are a third of one
WINDOW = Rules().window
BALANCED = 0.1  # the longest step over the mean, less 1


def a_plan(caps: tuple[int | None, ...] = (None, None, None), costs_of: Costs = COSTS) -> Plan:
    fits = [
        Fit(kind="affine", fixed_seconds=c, per_sample_seconds=a, trusted_min_batch=1, trusted_max_batch=64)
        for c, a in costs_of
    ]
    costs = [cost_of(fit) for fit in fits]
    split = best_split(GLOBAL_BATCH, costs, [Bounds(most=cap or 1000, required=True) for cap in caps])
    workers = [
        PlanWorker(
            rank=k,
            name=f"w{k}",
            batch=b,
            micro_batch=b,
            accumulation=1,
            weight=b / GLOBAL_BATCH,
            predicted_seconds=cost.seconds(b),
            fit=fit,
            max_batch=cap,
        )
        for k, (b, cost, fit, cap) in enumerate(zip(split, costs, fits, caps, strict=True))
    ]
    return Plan(
        global_batch=GLOBAL_BATCH,
        iteration_seconds=round_seconds(costs, split),
        lower_bound_seconds=0,
        even_split=EvenSplit(feasible=True, seconds=1),
        speedup_over_even=1,
        workers=workers,
        r2sp=make_ring(3),
        hps=HpsEstimate(),
        warnings=[],
    )


class Run:
    """A run whose workers take as long as set."""

    def __init__(self, plan: Plan, noise: float = 0.0, costs: Costs = COSTS, depth: int = 1) -> None:
        self.slowdown, self.added = [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]
        self.loading = [0.0, 0.0, 0.0]  # seconds a sample
        self._costs = costs
        self._noise, self._luck = noise, random.Random(0)
        self.virtual = VirtualRounds(plan, self._measured, depths=[depth] * 3)

    def reseed(self, seed: int) -> None:
        self._luck = random.Random(seed)

    @property
    def split(self) -> Split:
        return self.virtual.split

    @property
    def reasons(self) -> list[str]:
        return [reason for replan in self.virtual.changes for reason in replan.change.reasons]

    def steps(self, count: int) -> int:
        """That many rounds; how many changes they brought."""
        for rank, found in enumerate(self.virtual.ranks):
            loading = self.loading[rank] * found.batch
            found.data_seconds = max(0.0, loading - self._compute(rank, found.batch))
        return len(self.virtual.steps(count))

    def _compute(self, rank: int, batch: int) -> float:
        c, a = self._costs[rank]
        return self.slowdown[rank] * (c + a * batch) + self.added[rank]

    def _measured(self, rank: int, batch: int) -> float:
        seconds = self._compute(rank, batch) * self._luck.lognormvariate(0, self._noise)
        return max(seconds, self.loading[rank] * batch)

    def times(self) -> list[float]:
        """How long a step of each worker takes now, without noise."""
        return [self._compute(rank, batch) for rank, batch in enumerate(self.split)]

    def seconds(self) -> float:
        return max(self.times())

    def imbalance(self) -> float:
        return self.seconds() / mean(self.times()) - 1


def record(rank: int, step: int, batch: int, seconds: float) -> StepRecord:
    return make_record(rank, step, batch, [("compute", step, step + seconds)])


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_nothing_moves_without_a_reason(tmp_path: Path, noise: float) -> None:
    assert Run(a_plan(), noise).steps(200) == 0


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_a_slowed_worker_gives_samples_away_once(tmp_path: Path, noise: float) -> None:
    run = Run(a_plan(), noise)
    run.steps(20)
    before = run.split
    run.slowdown[0] = 2.0
    slow = run.seconds()
    assert 1 <= run.steps(20) <= 2
    assert sum(run.split) == GLOBAL_BATCH
    assert run.split[0] < before[0]
    costs = [cost_of(w.fit) for w in a_plan().workers if w.fit]
    optimum = min(
        max(s * cost.seconds(b) for s, cost, b in zip(run.slowdown, costs, (x, y, 60 - x - y), strict=True))
        for x in range(1, 58)
        for y in range(1, 59 - x)
    )
    assert run.seconds() <= 1.05 * optimum < slow
    assert "rank 0 slowed by 2.0x" in run.reasons[0] or noise
    assert run.steps(100) <= 1, "it oscillates"
    run.slowdown[0] = 1.0
    assert run.steps(30) >= 1
    assert max(abs(a - b) for a, b in zip(run.split, before, strict=True)) <= 2


def test_a_worker_behind_a_slow_link_keeps_its_smaller_share(tmp_path: Path) -> None:
    plan = a_plan()
    split = [w.batch for w in plan.workers]
    moved = [split[0] - 12, split[1] + 8, split[2] + 4]
    link = [plan.iteration_seconds + 0.0115 - COSTS[0][0] - COSTS[0][1] * moved[0], 0.0, 0.0]
    workers = [
        msgspec.structs.replace(w, batch=b, link_seconds=x, predicted_seconds=w.predicted_seconds + x)
        for w, b, x in zip(plan.workers, moved, link, strict=True)
    ]
    assert Run(msgspec.structs.replace(plan, workers=workers)).steps(50) == 0


@pytest.mark.parametrize("seed", sampled(range(4)))
@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("late", range(3))
def test_fifty_milliseconds_more_cost_one_change(tmp_path: Path, noise: float, seed: int, late: int) -> None:
    run = Run(a_plan(costs_of=LARGE_COSTS), noise, LARGE_COSTS)
    run.reseed(seed)
    assert run.steps(30) == 0
    run.added[late] = 0.05
    assert run.imbalance() > BALANCED
    assert any(run.steps(1) for _ in range(2 * WINDOW))
    assert run.imbalance() < BALANCED, "one change is enough"
    assert run.steps(200) <= 1, "it oscillates"
    assert run.imbalance() < BALANCED
    assert sum(run.split) == GLOBAL_BATCH


def test_a_load_that_moves_to_another_rank_is_followed_at_once(tmp_path: Path) -> None:
    """Its old rank is quicker, which no hiccup explains."""
    run = Run(a_plan(), 0.01)
    run.slowdown[0] = 2.0
    assert run.steps(40) >= 1
    run.slowdown[:2] = [1.0, 1.6]
    assert run.steps(1) == 0  # the last look was before this round
    assert run.steps(1) == 1
    assert run.imbalance() < BALANCED


@pytest.mark.parametrize("early", range(WINDOW))
def test_two_slow_rounds_count_wherever_a_window_ends(tmp_path: Path, early: int) -> None:
    run = Run(a_plan())
    assert run.steps(20 + early) == 0
    run.slowdown[0] = 2.0
    assert run.steps(2) == 0  # the last look was before the second
    assert run.steps(1) == 1


@pytest.mark.parametrize("early", range(WINDOW))
def test_one_slow_round_moves_nothing(tmp_path: Path, early: int) -> None:
    run = Run(a_plan(), 0.01)
    assert run.steps(20 + early) == 0
    run.slowdown[0] = 3.0
    assert run.steps(1) == 0
    run.slowdown[0] = 1.0
    assert run.steps(20) == 0


@pytest.mark.parametrize("each", [0.002, 0.003, 0.005])
def test_a_slow_loader_gives_samples_away_though_it_never_shows_as_a_wait(
    tmp_path: Path, each: float
) -> None:
    """The rank's loader works while its rank waits for the others, so no wait for data is measured."""
    run = Run(a_plan())
    run.loading[0] = each

    def longest(split: tuple[int, ...]) -> float:
        seconds = [c + a * b for (c, a), b in zip(COSTS, split, strict=True)]
        return max(seconds[0], seconds[1], seconds[2], each * split[0])

    before = longest(run.split)
    run.steps(60)
    optimum = min(longest((x, y, 60 - x - y)) for x in range(1, 58) for y in range(1, 59 - x))
    assert longest(run.split) <= 1.06 * optimum < 0.9 * before
    assert "rank 0 is held up by its data" in " ".join(run.reasons)
    assert run.steps(100) == 0, "it oscillates"
    assert sum(run.split) == GLOBAL_BATCH


def test_what_loading_adds_to_the_cost_of_a_step() -> None:
    def step(late: float, loader: float) -> Step:
        made = Step(Claim(0, 4, 4, 0, 0, 0.0, 0), None, 0, [("data", 0.0, 0.9)])  # type: ignore[arg-type]
        made.began, made.late_seconds, made.loader_seconds = 0.9, late, loader
        made.computed(1.0)
        return made

    alone, hidden, dropped = step(0.3, 0.3), step(0.0, 0.3), step(0.0, 0.05)
    assert [s.cost_seconds for s in (alone, hidden, dropped)] == pytest.approx([0.4, 0.3, 0.1])
    assert [s.data_seconds for s in (alone, hidden, dropped)] == pytest.approx([0.3, 0.2, 0.0])


def test_caps_hold(tmp_path: Path) -> None:
    run = Run(a_plan((36, 24, None)))
    run.slowdown[2] = 3.0
    run.steps(30)
    assert run.split[0] <= 36
    assert run.split[1] <= 24
    assert sum(run.split) == GLOBAL_BATCH


def test_minima_and_multiples_of_the_plan_hold() -> None:
    plan = a_plan()
    workers = [
        msgspec.structs.replace(w, batch=b, min_batch=8, batch_multiple=4)
        for w, b in zip(plan.workers, (28, 20, 12), strict=True)
    ]
    run = Run(msgspec.structs.replace(plan, workers=workers))
    for slowdown in ([3.0, 1.0, 1.0], [1.0, 1.0, 4.0], [1.0, 2.0, 1.0]):
        run.slowdown = slowdown
        run.steps(40)
        assert sum(run.split) == GLOBAL_BATCH
        assert all(b == 0 or (b >= 8 and b % 4 == 0) for b in run.split)
    assert run.virtual.changes


def test_a_rank_that_goes_leaves_minima_and_multiples_in_force() -> None:
    plan = a_plan()
    workers = [
        msgspec.structs.replace(w, batch=b, batch_multiple=6)
        for w, b in zip(plan.workers, (30, 18, 12), strict=True)
    ]
    run = Run(msgspec.structs.replace(plan, workers=workers))
    run.steps(10)
    run.virtual.leave(0)
    run.steps(10)
    assert run.split[0] == 0
    assert sum(run.split) == GLOBAL_BATCH
    assert all(b % 6 == 0 for b in run.split)


def test_half_a_line_is_read_later(tmp_path: Path) -> None:
    reader = RunReader(tmp_path)
    path = record_path(tmp_path, 0, 1)
    with RecordWriter(path) as writer:
        writer.write(record(0, 0, 4, 0.1))
    line = path.read_bytes()
    with path.open("ab") as file:
        file.write(line[:20])
        file.flush()
        assert len(reader.new()) == 1
        assert reader.new() == []
        file.write(line[20:])
    assert len(reader.new()) == 1


SCRIPT = """
import time
import torch, pyps
COSTS = {costs}
torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
with pyps.join() as worker:
    worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
    c, a = COSTS[worker.settings.rank]
    for step, (x, y) in enumerate(worker.batches((torch.zeros(600, 4), torch.zeros(600, 1)))):
        slow = 2.0 if worker.settings.rank == 0 and step >= 30 else 1.0
        time.sleep(slow * (c + a * len(x)))
        torch.nn.functional.mse_loss(model(x), y).backward()
        worker.step()
"""


@pytest.mark.timed
def test_a_run_moves_samples_while_it_trains(
    tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_json(Path("plan.json"), a_plan())
    Path("train.py").write_text(SCRIPT.format(costs=COSTS))
    options = RunOptions(samples=100 * GLOBAL_BATCH, run_dir="run", rebalance=True)
    report = run("plan.json", "train.py", options)
    assert report.replans
    assert any("rank 0 slowed by" in why for why in report.replans)
    assert report.samples.trained == 100 * GLOBAL_BATCH
    rounds: dict[int, list[StepRecord]] = {}
    for one in read_run("run"):
        rounds.setdefault(one.round, []).append(one)
    assert all(sum(r.samples for r in steps) == GLOBAL_BATCH for steps in rounds.values())
    first = {n: next(r.samples for r in steps if r.rank == 0) for n, steps in rounds.items()}
    assert first[max(first)] < first[0]
    # Not how long rounds last: a busy machine keeps processes waiting between their steps.
    late = [r for n, steps in rounds.items() if n > max(rounds) - 20 for r in steps]
    longest = max(median(r.seconds("compute") for r in late if r.rank == rank) for rank in range(3))
    slowed = 2 * (COSTS[0][0] + COSTS[0][1] * first[0])
    assert longest < 0.9 * slowed, "what slowed is not made good"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_pipeline_s_transfers_overlap(tmp_path: Path, depth: int) -> None:
    """After a change of pace, what a transfer adds to a serial step is hidden in a pipelined one."""
    plan = a_plan()
    links = [0.5 * plan.iteration_seconds, 0.0, 0.0]
    workers = [
        msgspec.structs.replace(worker, link_seconds=seconds)
        for worker, seconds in zip(plan.workers, links, strict=True)
    ]
    one = Run(msgspec.structs.replace(plan, workers=workers), depth=depth)
    one.slowdown[2] = 2.0
    one.steps(30)
    steps = [time + (link if depth == 1 else 0.0) for time, link in zip(one.times(), links, strict=True)]
    assert max(steps) / mean(steps) < 1.1, one.split


@pytest.mark.timed
def test_turns_go_on_while_samples_move(tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring's order, the staleness of every turn and the global batch stay when batches change."""
    monkeypatch.chdir(tmp_path)
    plan = a_plan()
    write_json(Path("plan.json"), plan)
    Path("train.py").write_text(SCRIPT.format(costs=COSTS))
    options = RunOptions(samples=80 * GLOBAL_BATCH, run_dir="run", rebalance=True, policy="r2sp:patience=50")
    report = run("plan.json", "train.py", options)
    assert report.replans
    assert report.samples.trained == 80 * GLOBAL_BATCH
    pushed = applied_steps(read_run("run"))
    plans = sorted({r.plan for r in pushed})
    for number in plans:
        split = {r.rank: r.samples for r in pushed if r.plan == number}
        assert len(split) < 3 or sum(split.values()) == GLOBAL_BATCH or number == plans[-1]
    full = pushed[: 3 * (len(pushed) // 3) - 3]  # the last samples are fewer than a batch
    assert plan.r2sp is not None
    order = plan.r2sp.order
    first = order.index(full[0].rank)
    assert [r.rank for r in full] == [order[(first + k) % 3] for k in range(len(full))]
    assert {r.staleness for r in full[3:]} == {2}
    assert report.turns is not None
    assert report.turns.gap_seconds is not None, "compared with the plan until it changed"
    of_zero = [r.samples for r in full if r.rank == 0]
    assert of_zero[-1] < of_zero[0]
