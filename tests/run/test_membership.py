"""While a rank is away the others take over its samples; when it is back the split is as before."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_tools import make_plan

from pyps.formats import write_json
from pyps.formats.records import read_run
from pyps.run import RunOptions, run
from pyps.run.membership import reason, split_without
from pyps.solver.costs import Line

SCRIPT = """
import os, signal, time
from pathlib import Path
import torch, pyps
run_dir = Path(os.environ["PYPS_RUN_DIR"])
if (run_dir / "killed").exists():
    time.sleep(0.5)
torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
with pyps.join() as worker:
    worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for step, (x, y) in enumerate(worker.batches((torch.zeros(600, 4), torch.zeros(600, 1)))):
        time.sleep(0.02)
        torch.nn.functional.mse_loss(model(x), y).backward()
        if worker.settings.rank == 1 and step == 5 and not (run_dir / "killed").exists():
            (run_dir / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        worker.step()
"""
BATCHES = (20, 28, 16)
B = sum(BATCHES)


@pytest.mark.timed
def test_the_others_take_over_the_samples_of_a_killed_rank(tmp_path: Path, shm: Path) -> None:
    write_json(tmp_path / "plan.json", make_plan(BATCHES))
    (tmp_path / "train.py").write_text(SCRIPT)
    options = RunOptions(samples=150 * B, run_dir=tmp_path / "run")
    report = run(tmp_path / "plan.json", tmp_path / "train.py", options)
    assert report.restarts == 1
    assert "rank 1 is away: [20, 28, 16] -> " in report.replans[0]
    assert "all ranks are back: " in report.replans[-1]
    records = [r for r in read_run(tmp_path / "run") if not r.rejected]
    samples, sources = Counter[int](), Counter[int]()
    for record in records:
        samples[record.version] += record.samples
        sources[record.version] += 1
    short = [v for v, n in samples.items() if n < B]
    alone = [v for v, n in sources.items() if n == 2]
    assert len(alone) > 20, "rank 1 was away for half a second and its start"
    assert len(short) <= 12, "steps until the launcher has noticed, and the last one"
    assert sum(samples.values()) == 150 * B


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 20), st.floats(0.5, 4.0)), min_size=2, max_size=4),
    st.data(),
)
def test_the_split_without_some_is_the_exact_one(
    ranks: list[tuple[int, int, float]], data: st.DataObject
) -> None:
    split = tuple(batch for batch, _, _ in ranks)
    caps = [max(batch, cap) for batch, cap, _ in ranks]
    costs = [Line(0.1, slope) for _, _, slope in ranks]
    away = frozenset(data.draw(st.sets(st.sampled_from(range(len(ranks))), max_size=len(ranks) - 1)))
    there = [k for k in range(len(ranks)) if k not in away]
    after = split_without(away, split, costs, caps)
    assert all(after[k] == split[k] for k in away)
    if not away:
        assert after == split
        return
    total = min(sum(split), sum(caps[k] for k in there))
    assert sum(after[k] for k in there) == total
    possible = (
        parts for parts in itertools.product(*(range(1, caps[k] + 1) for k in there)) if sum(parts) == total
    )
    best = min(max(costs[k].seconds(b) for k, b in zip(there, parts, strict=True)) for parts in possible)
    assert max(costs[k].seconds(after[k]) for k in there) <= best * (1 + 1e-12)


def test_a_reason_names_the_ranks() -> None:
    assert reason(frozenset({1}), (4, 4), (8, 4)) == "rank 1 is away: [4, 4] -> [8, 4]"
    assert reason(frozenset({2, 0}), (1, 1, 2), (1, 4, 2)).startswith("ranks 0, 2 are away")
    assert reason(frozenset(), (8, 4), (4, 4)) == "all ranks are back: [8, 4] -> [4, 4]"
