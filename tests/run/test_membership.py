"""Ranks that come and go, on one host or several: the samples of a step stay those of the global batch."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_tools import make_plan
from sampled import examples
from virtual_rounds import VirtualRounds

from pyps.formats import write_json
from pyps.formats.records import read_run
from pyps.native.status import MemberState
from pyps.native.values import CostModel
from pyps.run import RunOptions, run
from pyps.solver.costs import Line
from pyps.solver.online.decide import Bounds
from pyps.solver.online.members import share_out
from pyps.store.policies import ASP, BSP, HPS, R2SP, Backup, Policy

SCRIPT = """
import json, os, signal, time
from pathlib import Path
import torch, pyps
run_dir = Path(json.loads(os.environ["PYPS_RUN"])["run_dir"])
def wait_for(name):  # events order the run, not its speed
    end = time.monotonic() + 60
    while not (run_dir / name).exists() and time.monotonic() < end:
        time.sleep(0.005)
restarted = (run_dir / "killed").exists()
if restarted:
    wait_for("alone")
torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
with pyps.join() as worker:
    worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
    if restarted:
        (run_dir / "back").touch()
    for step, (x, y) in enumerate(worker.batches((torch.zeros(600, 4), torch.zeros(600, 1)))):
        time.sleep(0.02)
        if worker.settings.rank != 1 and step == 60:
            (run_dir / "alone").touch()
            wait_for("back")
        torch.nn.functional.mse_loss(model(x), y).backward()
        if worker.settings.rank == 1 and step == 5 and not (run_dir / "killed").exists():
            (run_dir / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        worker.step()
"""
BATCHES = (20, 28, 16)
B = sum(BATCHES)
ROUNDS: list[Policy] = [BSP(), Backup(k=1)]


@pytest.mark.thorough
def test_the_others_take_over_the_samples_of_a_killed_rank(tmp_path: Path, shm: Path) -> None:
    write_json(tmp_path / "plan.json", make_plan(BATCHES))
    (tmp_path / "train.py").write_text(SCRIPT)
    options = RunOptions(samples=150 * B, run_dir=tmp_path / "run")
    report = run(tmp_path / "plan.json", tmp_path / "train.py", options)
    assert report.restarts == 1
    assert "rank 1 is away: [20, 28, 16] -> " in report.replans[0]
    assert "all ranks are back: " in report.replans[-1]
    assert report.replans[-1].endswith("-> [20, 28, 16]")
    records = [r for r in read_run(tmp_path / "run") if not r.rejected]
    samples, sources = Counter[int](), Counter[int]()
    for record in records:
        samples[record.version] += record.samples
        sources[record.version] += 1
    alone = [v for v, n in sources.items() if n == 2]
    whole = [v for v in alone if samples[v] == B]
    assert whole, "the others had its share while it was away"
    short = [v for v, n in samples.items() if n < B and v > whole[0]]
    assert set(short) <= {max(samples)}, "a step was short after the launcher had noticed"
    assert max(samples.values()) == B, "the rank that came back had no samples before the others gave them"
    assert sum(samples.values()) == 150 * B


@given(
    st.lists(st.tuples(st.integers(1, 12), st.floats(0.5, 4.0), st.booleans()), min_size=1, max_size=4),
    st.integers(1, 20),
    st.data(),
)
def test_samples_are_shared_out_exactly(
    ranks: list[tuple[int, float, bool]], samples: int, data: st.DataObject
) -> None:
    caps = [cap for cap, _, _ in ranks]
    costs = [Line(0.1, slope) for _, slope, _ in ranks]
    among = data.draw(st.sets(st.sampled_from(range(len(ranks))), min_size=1))
    required = {k for k in among if ranks[k][2]}
    after = share_out(samples, among, costs, [Bounds(most=cap) for cap in caps], required)
    total = min(samples, sum(caps[k] for k in among))
    assert sum(after) == total
    assert not any(after[k] for k in range(len(ranks)) if k not in among)
    if len(required) <= total:
        assert all(after[k] for k in required)
    else:
        required = set()
    each = [range(k in required, caps[k] + 1) if k in among else (0,) for k in range(len(ranks))]
    possible = [parts for parts in itertools.product(*each) if sum(parts) == total]

    def longest(split: tuple[int, ...]) -> float:
        return max(costs[k].seconds(b) for k, b in enumerate(split) if b)

    assert longest(after) <= min(map(longest, possible)) * (1 + 1e-12)


def equal(rank: int, batch: int) -> float:
    return 0.005 * batch  # as make_plan predicts for 20


HOSTS = ((0,), (1, 2))


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("policy", ROUNDS, ids=str)
@pytest.mark.parametrize("hosts", [((0, 1, 2),), HOSTS], ids=["one host", "two hosts"])
def test_a_rank_is_away_and_comes_back(
    hosts: tuple[tuple[int, ...], ...], policy: Policy, moves: bool
) -> None:
    store = VirtualRounds(make_plan(BATCHES), lambda rank, batch: 0.1, hosts, policy=policy, moves=moves)
    assert not store.steps(5)
    store.leave(1)
    assert len(store.steps(3)) == 1
    assert store.split[1] == 0
    assert sum(store.split) == B
    store.join(1)
    assert store.assigned[-1] == B
    assert str(store.steps(1)[0].change).startswith("all ranks are back")
    assert store.split == BATCHES
    assert set(store.assigned) == {B}, "no round had another number of samples"


@pytest.mark.parametrize("who", range(3))
def test_the_next_launcher_goes_on_when_one_dies(who: int) -> None:
    hosts = ((0,), (1,), (2,))
    store = VirtualRounds(make_plan(BATCHES), equal, hosts)
    store.steps(3)
    store.kill_host((who,))
    store.steps(30)
    assert store.split[who] == 0
    assert sum(store.split) == B
    store.start_host((who,))
    store.steps(30)
    assert all(store.split)
    assert sum(store.split) == B
    assert set(store.assigned) == {B}


def test_a_launcher_dies_between_its_decision_and_the_stores() -> None:
    """The decision is lost; the next launcher takes it."""
    store = VirtualRounds(make_plan(BATCHES), equal, HOSTS)
    store.steps(3)
    store.leave(2)
    first = store.launchers[0][1]
    decided = first.update(store.state(), store.costs())
    assert decided is not None
    store.kill_host((0,))
    store.steps(2)
    assert store.split == (0, B, 0)
    assert decided.plan != store.plans, "the store would refuse it"


@pytest.mark.parametrize("policy", [ASP(), R2SP(), HPS()], ids=str)
def test_where_no_step_waits_for_it_an_absent_rank_keeps_its_share(policy: Policy) -> None:
    store = VirtualRounds(make_plan(BATCHES), equal, HOSTS, policy=policy, moves=False)
    store.steps(3)
    store.leave(1)
    assert not store.steps(20)
    store.join(1)
    assert not store.steps(20)


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("model", [CostModel(0.0, 0.005), None], ids=["profile", "measured"])
@pytest.mark.parametrize("policy", [*ROUNDS, ASP(), R2SP(), HPS()], ids=str)
def test_a_rank_joins_beyond_the_plan_and_leaves(
    policy: Policy, model: CostModel | None, moves: bool
) -> None:
    store = VirtualRounds(make_plan((20, 20, 20)), equal, HOSTS, policy=policy, moves=moves)
    store.steps(3)
    store.start_host((3,), model)
    store.steps(20)
    assert sum(store.split) == 60
    assert max(store.split) - min(store.split) <= 2, store.split
    assert any("rank 3 has joined" in str(replan.change) for replan in store.changes)
    store.leave(3, MemberState.LEFT)
    store.steps(3)
    assert store.split == (20, 20, 20, 0)
    assert set(store.assigned) == {60}


def test_a_new_rank_takes_what_its_cap_and_speed_allow() -> None:
    store = VirtualRounds(make_plan((20, 20, 20)), lambda rank, batch: 0.1)
    store.start_host((5,), CostModel(0.0, 0.001, 0.0, 8))
    store.steps(5)
    assert store.split == (18, 17, 17, 0, 0, 8)


def test_only_a_new_rank_is_left() -> None:
    store = VirtualRounds(make_plan((20, 20)), equal, ((0, 1),))
    store.start_host((2,))
    store.kill_host((0, 1))
    store.steps(10)
    assert store.split == (0, 0, 40)


@settings(deadline=None, max_examples=examples(12, 40))
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(1, 12)), max_size=12))
def test_whatever_comes_and_goes_a_round_has_the_global_batch(events: list[tuple[int, int, int]]) -> None:
    """Each rank is a host's; ranks 3 and 4 are not planned. A host may be killed, started or slowed."""
    pace = [1.0] * 5
    store = VirtualRounds(make_plan((8, 8, 8)), lambda r, b: pace[r] * 0.01 * (1 + b), [(0,), (1,), (2,)])
    for what, rank, rounds in events:
        there = [k for k, found in enumerate(store.ranks) if found.there]
        if what == 0 and len(there) > 1 and rank in there:
            store.kill_host((rank,))
        elif what == 1 and rank not in there:
            store.start_host((rank,), CostModel(0.01, 0.01) if rounds % 2 else None)
        else:
            pace[rank] = (0.5, 1.0, 3.0, 40.0)[what - 2]
        store.steps(rounds)
    store.steps(3)
    assert set(store.assigned) <= {24}
    for number, found in enumerate(store.ranks):
        assert found.there or not found.batch, f"rank {number} is away and has samples"
    store.steps(40)
    assert any(found.batch for found in store.ranks)
