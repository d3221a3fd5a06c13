"""`pyps run`: real processes through the store, what is refused before they start, and their settings."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from run_scripts import (
    BATCHES,
    LENGTH,
    ROUNDS,
    SAMPLES,
    B,
    options_for,
    pyps_run,
    script,
)
from run_tools import make_plan
from safetensors.numpy import load, load_file

from pyps.checkpoint.folder import checkpoints
from pyps.cli import call_command
from pyps.errors import InputError
from pyps.formats import Fit, Mode, write_json
from pyps.formats.events import read_events
from pyps.formats.mode import PlannedRun
from pyps.formats.setup import VARIABLE
from pyps.native.values import Codec, Encoding
from pyps.run import RunOptions, run
from pyps.run.ranks import even_plan, rank_specs, throttles
from pyps.run.spec import prepare, write_setup
from pyps.store.policies import BSP
from pyps.worker.run.settings import Settings, ThrottleSpec


def reference() -> dict[str, torch.Tensor]:
    """The same training by one process, with full batches and torch's own optimizer."""
    from pyps.worker.data.sampling import indices

    draws = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(LENGTH, 4, generator=draws), torch.randn(LENGTH, 1, generator=draws)
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for k in range(ROUNDS):
        chosen = torch.from_numpy(np.array(indices(k * B, B, LENGTH, 7)))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs[chosen]), targets[chosen]).backward()
        optimizer.step()
    return dict(model.state_dict())


def test_a_run_from_the_command_line(shm: Path, plan: Path, tmp_path: Path) -> None:
    """JSON alone on stdout, the workers' lines on stderr, and what one process would have trained."""
    options = [
        *options_for(plan, SAMPLES, tmp_path),
        "--seed",
        "7",
        "--checkpoint-every",
        "1",
        "--keep-checkpoints",
        "99",
        "--json",
    ]
    done = pyps_run(*options, script(tmp_path), "--width", "3")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["samples"] == {
        "requested": SAMPLES,
        "trained": SAMPLES,
        "skipped": 0,
        "returned": 0,
        "dropped": 0,
        "elsewhere": 0,
    }
    assert report["versions"] == ROUNDS
    assert [rank["samples"] for rank in report["ranks"]] == [5 * ROUNDS, 3 * ROUNDS]
    assert "[0] attached --width 3" in done.stderr
    assert "[1] attached --width 3" in done.stderr
    arrays = load_file(tmp_path / "out" / "model.safetensors")
    for name, expected in reference().items():
        np.testing.assert_allclose(arrays[name], expected.numpy(), rtol=1e-5, atol=1e-6)
    kinds = [event.kind for event in read_events(tmp_path / "out" / "run.jsonl")]
    assert kinds.count("started") == kinds.count("joined") == kinds.count("finished") == 2
    found = checkpoints(tmp_path / "out" / "checkpoints")
    assert len(found) == kinds.count("checkpoint") >= 1
    assert found[-1].name == report["checkpoint"] == f"{ROUNDS:09d}"
    last = (found[-1] / "model.safetensors").read_bytes()
    assert load(last).keys() == arrays.keys()
    trace = json.loads((tmp_path / "out" / "trace.json").read_text())
    assert sum(e["ph"] == "X" and e["name"] == "compute" for e in trace["traceEvents"]) == 2 * ROUNDS


def test_a_script_that_leaves_early_is_said(shm: Path, plan: Path, tmp_path: Path) -> None:
    """A script may do so: the run has finished, but not with all of its samples."""
    options = options_for(plan, SAMPLES, tmp_path)
    done = pyps_run(*options, script(tmp_path, within="if step == 4: break"))
    assert done.returncode == 0, done.stderr
    assert f"trained {4 * B} of {SAMPLES} samples: the script left its loop before the end" in done.stdout


@pytest.mark.thorough
def test_the_demos_script_has_one_rate_in_each_round(shm: Path, plan: Path, tmp_path: Path) -> None:
    """Its rate falls from round to round. A store warns of ranks whose rates differ within one."""
    train = Path(__file__).parents[2] / "examples" / "digits" / "train.py"
    done = pyps_run(*options_for(plan, 10 * B, tmp_path), train)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr


# -- What is refused before anything starts --


def refused(default: Path, tmp_path: Path, **changes: object) -> InputError:
    """Return what run() says; nothing may have been started or left."""
    path = changes.pop("plan", default)
    train = changes.pop("script", None) or script(tmp_path)
    options = {"samples": SAMPLES, "run_dir": tmp_path / "out", **changes}
    with pytest.raises(InputError) as caught:
        run(path, train, RunOptions(**options))  # type: ignore[arg-type]
    assert not (tmp_path / "out" / "run.jsonl").exists()
    return caught.value


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policy": "bulk"}, ("policy", "bulk", "bsp")),
        ({"script": "nowhere.py"}, ("script", "nowhere.py")),
        ({"samples": -1}, ("samples", "-1")),
        ({"seed": -1}, ("seed", "-1")),
        ({"max_restarts": -1}, ("max_restarts", "-1")),
        ({"throttle_from": "plan"}, ("plan.json", "throttle", "emulated")),
        ({"throttle_from": "nowhere.toml"}, ("nowhere.toml",)),
        ({"plan": "nowhere.json"}, ("nowhere.json", "no such file")),
    ],
)
def test_refusals(plan: Path, tmp_path: Path, changes: dict[str, object], words: tuple[str, ...]) -> None:
    text = str(refused(plan, tmp_path, **changes))
    for word in words:
        assert word in text


def test_an_even_split_that_breaks_a_bound_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_json(path, make_plan(feasible=False))
    error = refused(path, tmp_path, even=True)
    assert (error.where, error.field) == (str(path), "even_split.feasible")


def test_a_folder_that_holds_a_run_is_refused(plan: Path, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "run.json").write_text("")
    assert "holds a run" in str(refused(plan, tmp_path, run_dir=tmp_path / "old"))
    assert sorted(p.name for p in (tmp_path / "old").iterdir()) == ["run.json"]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return what `pyps run` says before it exits with 2, in this process."""
    with pytest.raises(SystemExit) as ended:
        call_command("run", "pyps run", [*map(str, arguments)])
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("global_batch", 9, ("workers[0].weight", "0.625", "global_batch")),
        ("schema", "pyps.plan/2", ("schema", "pyps.plan/2", "pyps.plan/1")),
        ("iteration_seconds", -1.0, ("iteration_seconds", "-1.0")),
    ],
)
def test_a_bad_plan_is_exit_2_and_one_message(
    plan: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    field: str,
    value: object,
    words: tuple[str, ...],
) -> None:
    raw = json.loads(plan.read_text())
    plan.write_text(json.dumps({**raw, field: value}))
    said = refusal(capsys, *options_for(plan, 8, tmp_path), script(tmp_path))
    assert "Traceback" not in said
    for word in (str(plan), *words):
        assert word in said.replace("\n", "")
    assert not (tmp_path / "out").exists()


def test_how_long_has_to_be_said(plan: Path, tmp_path: Path) -> None:
    done = pyps_run("--plan", plan, script(tmp_path))
    assert done.returncode == 2
    assert "--samples" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ((), "pyps run: --samples: found nothing; expected --samples N, or --epochs E --dataset-size N"),
        (("--epochs", "1"), "pyps run: --dataset-size: found nothing"),
        (("--dataset-size", "8"), "pyps run: --epochs: found nothing"),
        (("--samples", "8"), "pyps run: script: found no file at gone.py"),
    ],
)
def test_an_error_names_what_is_missing(
    plan: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], error: str
) -> None:
    assert refusal(capsys, "--plan", plan, *options, "gone.py").startswith(error)


# -- Ranks and settings --


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any))
@settings(derandomize=True, deadline=None)
def test_even_batches_keep_the_sum_and_differ_by_one(batches: list[int]) -> None:
    plan = make_plan(batches)
    if len(batches) > plan.global_batch:
        with pytest.raises(InputError):
            even_plan(plan, "plan.json")
        return
    even = [worker.batch for worker in even_plan(plan, "plan.json").workers]
    assert sum(even) == sum(batches)
    assert max(even) - min(even) <= 1
    assert sorted(even, reverse=True) == even


def test_even_batches_predict_with_the_fits() -> None:
    fit = Fit(
        kind="affine", fixed_seconds=0.1, per_sample_seconds=0.01, trusted_min_batch=1, trusted_max_batch=99
    )
    even = even_plan(make_plan(), "plan.json", [fit, None])
    assert even.workers[0].predicted_seconds == pytest.approx(0.1 + 0.01 * B / 2)
    assert even.workers[1].predicted_seconds == 0.0
    assert even.iteration_seconds == 0.2


def test_even_batches_have_the_transfers_of_the_plan() -> None:
    fit = Fit(kind="affine", per_sample_seconds=0.01, trusted_min_batch=1, trusted_max_batch=99)
    plan = make_plan()
    before = [
        replace(w, fit=fit, link_seconds=0.5, predicted_seconds=0.5 + 0.01 * w.batch) for w in plan.workers
    ]
    even = even_plan(replace(plan, workers=before), "plan.json", [fit, fit])
    for worker in even.workers:
        assert worker.predicted_seconds == pytest.approx(0.5 + 0.01 * worker.batch)
    deep = [replace(w, mode=Mode(depth=3), predicted_seconds=0.5) for w in before]
    run = PlannedRun(policy="hps", depth="auto")
    even = even_plan(replace(plan, run=run, workers=deep), "plan.json", [fit, fit])
    assert [worker.predicted_seconds for worker in even.workers] == [0.5, 0.5]


def test_workers_without_a_batch_do_not_run() -> None:
    specs = rank_specs(make_plan([5, 0, 3]), [None] * 3)
    assert [(s.rank, s.name, s.batch) for s in specs] == [(0, "device-0", 5), (1, "device-2", 3)]


def test_throttles_come_from_the_plan_or_from_the_clusters_profiles(tmp_path: Path) -> None:
    emulated = make_plan(throttle=3.0)
    assert throttles(emulated, "plan.json", None) == [None, None]
    assert throttles(emulated, "plan.json", "plan") == [ThrottleSpec(factor=3.0)] * 2
    points = [{"batch": b, "seconds": 0.1 + 0.01 * b} for b in (1, 10, 20, 40)]
    profile = {"schema": "pyps.profile/1", "device": {"name": "d"}, "model": {"name": "m"}, "points": points}
    (tmp_path / "p.json").write_text(json.dumps(profile))
    cluster = "[job]\nglobal_batch = 8\n[[worker]]\nname = 'device'\ncount = 2\nprofile = 'p.json'\n"
    (tmp_path / "cluster.toml").write_text(cluster)
    found = throttles(emulated, "plan.json", tmp_path / "cluster.toml")
    assert all(spec is not None and spec.fit is not None for spec in found)
    assert found[0].fit.per_sample_seconds == pytest.approx(0.01)
    with pytest.raises(InputError, match=r"workers\[2\]\.name.*device-2"):
        throttles(make_plan([2, 3, 3]), "plan.json", tmp_path / "cluster.toml")


@pytest.mark.parametrize("codec", ["int8", "f32"])
@pytest.mark.parametrize("throttle", [None, "plan"])
def test_the_worker_reads_what_the_launcher_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, throttle: str | None, codec: str
) -> None:
    of_another_run = Settings("other", 7, BSP(), throttle=ThrottleSpec(factor=99.0), journal=tmp_path)
    monkeypatch.setenv(VARIABLE, of_another_run.to_env()[VARIABLE])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    write_json(tmp_path / "plan.json", make_plan(throttle=2.5))
    options = RunOptions(
        samples=80,
        policy=BSP(round_timeout_seconds=7.5),
        seed=11,
        dataset_size=40,
        codec=codec,
        run_dir=tmp_path / "out",
        throttle_from=throttle,
        micro_batch=3 if throttle else None,
    )
    spec = prepare(tmp_path / "plan.json", script(tmp_path), options)
    write_setup(spec)
    written = spec.settings(spec.ranks[1])
    env = spec.environment(spec.ranks[1])
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    found = Settings.from_env()
    assert found == written
    assert (found.store, found.rank, found.batches) == (spec.store, 1, BATCHES)
    assert (found.policy, found.samples, found.seed) == (options.policy, 80, 11)
    assert found.micro_batch == 3 or not throttle
    assert found.encoding == Encoding(Codec[codec.upper()], error_feedback=codec == "int8")
    assert found.throttle == (ThrottleSpec(factor=2.5) if throttle else None)
    assert (found.run_dir, found.journal, found.launched) == (tmp_path / "out", None, True)
    cores = max(1, len(os.sched_getaffinity(0)) // len(spec.ranks))
    assert env["OMP_NUM_THREADS"] == ("1" if throttle else str(cores))
