"""`pyps run` takes the mode from the plan, and says when the plan's prediction does not hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from run_tools import make_plan

import pyps
from pyps.errors import InputError
from pyps.formats import Mode, Plan, PlannedRun, read_plan, read_profile, write_json
from pyps.formats.setup import VARIABLE
from pyps.native.values import Codec
from pyps.profiler.curve import fit_of
from pyps.run import RunOptions
from pyps.run.spec import RunSpec, prepare, write_setup
from pyps.worker.run.settings import Settings

PYPS = str(Path(sys.executable).parent / "pyps")
TRAIN = """
import torch, pyps
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
with pyps.join() as worker:
    worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for x, y in worker.batches((torch.randn(40, 4), torch.randn(40, 1))):
        torch.nn.functional.mse_loss(model(x), y).backward()
        worker.step()
"""
INT8 = Mode(push="int8", pull="bf16", depth=2)


def in_mode(plan: Plan, policy: str = "hps", first: Mode = INT8) -> Plan:
    """A plan of three workers for pipelines in which each has a mode of its own."""
    modes = [first, Mode(), Mode(push="int4")]
    workers = [replace(w, mode=mode) for w, mode in zip(plan.workers, modes, strict=True)]
    return replace(plan, workers=workers, run=PlannedRun(policy=policy, round_timeout=7.5, depth="auto"))


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """A plan of three workers, of which rank 1 of the plan is left out."""
    made = in_mode(make_plan((5, 0, 3)))
    write_json(tmp_path / "plan.json", made)
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path / "plan.json"


def spec_of(plan: Path, **options: Any) -> RunSpec:
    folder = plan.parent / f"run-{len(list(plan.parent.iterdir()))}"
    return prepare(plan, plan.parent / "train.py", RunOptions(samples=8, run_dir=folder, **options))


def test_the_plan_says_how_to_run(plan: Path) -> None:
    spec = spec_of(plan)
    assert (str(spec.policy), spec.policy.round_timeout_seconds) == ("hps", 7.5)
    assert spec.modes == (INT8, Mode(push="int4"))
    assert spec.departures == ()
    settings = [spec.settings(rank) for rank in spec.ranks]
    assert [(s.encoding.codec, s.pull_codec, s.depth) for s in settings] == [
        (Codec.INT8, Codec.BF16, 2),
        (Codec.INT4, Codec.F32, 1),
    ]
    assert spec.setup.predicted_iteration_seconds == read_plan(plan).iteration_seconds


def test_a_plan_of_other_devices_does_not_hold(tmp_path: Path) -> None:
    """Emulated ones without their throttle, and a profile that was replaced after planning."""
    (tmp_path / "train.py").touch()
    path, cluster = tmp_path / "plan.json", tmp_path / "cluster.toml"
    write_json(path, make_plan(throttle=3.0))
    (found,) = spec_of(path).departures
    assert "--throttle-from plan" in found
    assert spec_of(path, throttle_from="plan").departures == ()
    worker = "[[worker]]\nname = 'device'\ncount = 2\nprofile = 'p.json'\n"
    cluster.write_text(f"[job]\nglobal_batch = 8\n{worker}")
    for factor, words in (
        (1.0, []),
        (2.0, [f"device-{k}'s profile has changed since: 2.00" for k in (0, 1)]),
    ):
        points = [{"batch": b, "seconds": factor * (0.1 + 0.01 * b)} for b in (1, 10, 20, 40)]
        profile = {
            "schema": "pyps.profile/1",
            "device": {"name": "d"},
            "model": {"name": "m"},
            "points": points,
        }
        (tmp_path / "p.json").write_text(json.dumps(profile))
        if factor == 1.0:
            fit = fit_of(read_profile(tmp_path / "p.json"))
            plan = make_plan()
            workers = [msgspec.structs.replace(w, fit=fit) for w in plan.workers]
            write_json(path, msgspec.structs.replace(plan, workers=workers))
        spec = spec_of(path, throttle_from=cluster)
        assert [text.partition(" times")[0] for text in spec.departures] == words
        assert (spec.setup.predicted_iteration_seconds is None) == bool(words)


def test_a_worker_takes_the_plan_s_mode_and_its_arguments_win(
    plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(plan)
    write_setup(spec)
    monkeypatch.setenv(VARIABLE, spec.settings(spec.ranks[0]).to_env()[VARIABLE])
    found = Settings.from_env()
    assert (str(found.policy), found.encoding.codec, found.pull_codec, found.depth) == (
        "hps",
        Codec.INT8,
        Codec.BF16,
        2,
    )
    other = pyps.join(policy="asp", codec="f32", depth=1).settings
    assert (str(other.policy), other.encoding.codec, other.pull_codec, other.depth) == (
        "asp",
        Codec.F32,
        Codec.F32,
        1,
    )


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"policy": "asp"}, ["policy: asp instead of hps"]),
        (
            {"codec": "f32"},
            ["push: f32 instead of int4", "push: f32 instead of int8", "pull: f32 instead of bf16"],
        ),
        ({"depth": 1}, ["depth: 1 instead of 2"]),
        ({"depth": "auto"}, ["depth: 2 instead of 1"]),
        ({"codec": "plan", "policy": "hps"}, []),
    ],
)
def test_what_an_option_says_otherwise(plan: Path, options: dict[str, Any], found: list[str]) -> None:
    spec = spec_of(plan, **options)
    assert list(spec.departures) == found
    setup = spec.setup
    assert (setup.predicted_iteration_seconds is None) == bool(found)
    assert (setup.ranks[0].predicted_seconds is None) == bool(found)


def test_a_policy_that_cannot_overlap_is_refused(plan: Path) -> None:
    with pytest.raises(InputError, match="depth: found a pipeline under bsp"):
        spec_of(plan, policy="bsp")
    assert spec_of(plan, policy="bsp", depth=1).modes[0].depth == 1
    with pytest.raises(InputError, match="depth: found 9"):
        spec_of(plan, depth=9)


@pytest.mark.parametrize("sink", ["tensorbord", "prometheus:x"])
def test_an_unknown_sink_is_refused_before_anything_is_made(plan: Path, sink: str) -> None:
    before = sorted(plan.parent.iterdir())
    with pytest.raises(InputError, match=f"metrics: found '{sink}'; expected"):
        spec_of(plan, metrics=(sink,))
    assert sorted(plan.parent.iterdir()) == before


def test_the_even_split_runs_in_the_same_mode(plan: Path) -> None:
    spec = spec_of(plan, even=True)
    assert [rank.batch for rank in spec.ranks] == [3, 3, 2]
    assert [mode.depth for mode in spec.modes] == [2, 1, 1]
    assert spec.departures == ()
    assert spec.setup.predicted_iteration_seconds == 0.2


def test_a_plan_without_a_mode_is_run_as_the_options_say(plan: Path) -> None:
    made = read_plan(plan)
    workers = [replace(w, mode=None, predicted_seconds=0.1 * max(1, w.rank)) for w in made.workers]
    bare = replace(made, run=None, workers=workers, iteration_seconds=0.2)
    write_json(plan, bare)
    spec = spec_of(plan, policy="asp", codec="int8", depth="auto")
    assert (str(spec.policy), spec.modes) == ("asp", (Mode(push="int8", depth=2),) * 2)
    assert spec.departures == ()  # it counts no transfers
    assert spec.setup.predicted_iteration_seconds == pytest.approx(8 / (5 / 0.1 + 3 / 0.2))  # no step waits
    workers = [msgspec.structs.replace(w, link_seconds=0.01) for w in bare.workers]
    write_json(plan, msgspec.structs.replace(bare, workers=workers))
    assert spec_of(plan, policy="ssp").departures == ()
    assert spec_of(plan, policy="asp").departures == ("policy: asp, and the plan is of bsp",)
    assert spec_of(plan, policy="ssp", depth="auto").setup.predicted_iteration_seconds is None
    with pytest.raises(InputError, match=r"workers\[0\]\.mode: found nothing"):
        spec_of(plan, codec="plan")


@pytest.mark.thorough
def test_a_run_in_another_mode_warns_and_predicts_nothing(shm: Path, plan: Path) -> None:
    made = read_plan(plan)
    write_json(plan, in_mode(made, first=Mode(push="int8")))
    command = [PYPS, "run", "--plan", str(plan), "--samples", "80", "--json"]
    runs: list[tuple[Plan, str]] = []
    for name, options in (("as", []), ("other", ["--policy", "asp"])):
        folder = plan.parent / name
        done = subprocess.run(
            [*command, *options, "--run-dir", str(folder), str(plan.parent / "train.py")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        runs.append((json.loads(done.stdout), done.stderr))
    (report, said), (other, warned) = runs
    assert report["policy"] == "hps"
    assert report["predicted_iteration_seconds"] == made.iteration_seconds
    assert "predictions" not in said
    assert other["predicted_iteration_seconds"] is other["measured_over_predicted"] is None
    assert "plan.json: its predictions do not hold for this run (policy: asp instead of hps)" in warned
