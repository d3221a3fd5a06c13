"""Plans of earlier versions: codecs and depths stood in `run.workers`, bits and depths in `hps.workers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from run_tools import make_plan

from pyps.errors import InputError
from pyps.formats import Mode, PlannedRun, encode, read_plan

OFFERED = [
    {"rank": 0, "depth": 3, "push_bits": 8, "pull_bits": 16, "period_seconds": 0.1},
    {"rank": 2, "depth": 2, "push_bits": 32, "pull_bits": 4, "period_seconds": 0.1},
]


def earlier(run: dict[str, Any] | None, offered: list[Any]) -> dict[str, Any]:
    """A plan of three workers, of which the second is left out."""
    plain: dict[str, Any] = json.loads(encode(make_plan((5, 0, 3))))
    for worker in plain["workers"]:
        del worker["mode"]
        worker["fit_error"] = 0.01
    return plain | {"run": run, "hps": plain["hps"] | {"workers": offered}}


def read(path: Path, plain: dict[str, Any]) -> Any:
    path.write_text(json.dumps(plain))
    return read_plan(path)


def test_without_a_mode_the_offer_is_each_worker_s(tmp_path: Path) -> None:
    plan = read(tmp_path / "plan.json", earlier(None, OFFERED))
    assert [worker.mode for worker in plan.workers] == [
        Mode(push="int8", pull="bf16", depth=3),
        None,
        Mode(pull="int4", depth=2),
    ]
    assert [plan.mode_of(worker) for worker in plan.workers] == [Mode()] * 3


@pytest.mark.parametrize("depth", [1, 4])
def test_a_mode_that_was_stated_holds(tmp_path: Path, depth: int) -> None:
    stated = [{"rank": k, "push_codec": "int8", "pull_codec": "f32", "depth": depth} for k in range(3)]
    run = {"policy": "asp", "round_timeout": None, "workers": stated, "local_steps": None}
    plan = read(tmp_path / "plan.json", earlier(run, OFFERED))
    assert plan.run == PlannedRun(policy="asp", depth="auto" if depth > 1 else 1)
    assert [plan.mode_of(w) for w in plan.workers] == [Mode(push="int8", depth=depth)] * 3
    offered = [3, 1, 2]  # of a pipeline, if the run is to have one
    assert [worker.mode.depth for worker in plan.workers] == (offered if depth == 1 else [4] * 3)


@pytest.mark.parametrize("workers", [3, [3], [{"rank": 0, "depth": "x"}], [{"rank": []}], {"rank": 0}])
def test_what_is_no_plan_is_refused(tmp_path: Path, workers: Any) -> None:
    with pytest.raises(InputError, match=r"plan\.json: "):
        read(tmp_path / "plan.json", earlier(None, []) | {"run": {"policy": "asp", "workers": workers}})


@pytest.mark.parametrize(("pipeline", "depth"), [(True, "auto"), (False, 1)])
def test_a_plan_said_only_whether_there_is_a_pipeline(tmp_path: Path, pipeline: bool, depth: Any) -> None:
    plain: dict[str, Any] = json.loads(encode(make_plan((5, 0, 3))))
    deep = {"push_codec": "int8", "pull_codec": "f32", "depth": 3}
    plain["workers"][0]["mode"] = deep
    plan = read(tmp_path / "plan.json", plain | {"run": {"policy": "asp", "pipeline": pipeline}})
    assert plan.run == PlannedRun(policy="asp", depth=depth)
    assert plan.mode_of(plan.workers[0]) == Mode(push="int8", depth=3 if pipeline else 1)
