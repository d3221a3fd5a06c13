"""`pyps-plan` beyond the split: options, what-if, pareto, pictures, and refusals."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from pyps.cli import main_plan
from pyps.formats import (
    Device,
    GradientNoiseRecord,
    ModelInfo,
    Point,
    Profile,
    read_plan,
    read_profile,
    write_json,
)
from pyps.solver.constrained import ConstrainedSolution
from pyps.solver.jobs.job import best_for_job

CLUSTER = """
[job]
global_batch = 600
[goodput]
noise_scale = 1000.0
base_batch = 64
[[worker]]
name = "fast"
count = 2
profile = "fast.json"
price_per_hour = 2.0
watts = 300
bandwidth = 1e9
max_batch = 128
max_accumulation = 2
[[worker]]
name = "slow"
count = 2
profile = "slow.json"
price_per_hour = 0.5
watts = 200
bandwidth = 1e9
max_batch = 256
"""


@dataclass
class Done:
    code: int
    out: str
    err: str


Shell = Callable[..., Done]


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Runs `pyps-plan` in a folder with a cluster of two kinds of workers, or of another text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    for name, a, scatter in (("fast", 0.001, 0.02), ("slow", 0.002, 0.3)):
        points = [
            Point(batch=b, seconds=[(0.01 + a * b) * (1 + f * scatter) for f in (-1, -0.5, 0, 0.5, 1)])
            for b in (16, 64, 256)
        ]
        model = ModelInfo(name="m", parameters=1_000_000)
        write_json(
            f"{name}.json", Profile(device=Device(name=name), model=model, points=points, max_batch=256)
        )

    def run(*arguments: str, text: str = CLUSTER) -> Done:
        Path("cluster.toml").write_text(text)
        monkeypatch.setattr(sys, "argv", ["pyps-plan", *arguments])
        with pytest.raises(SystemExit) as stop:
            main_plan()
        out, err = capsys.readouterr()
        return Done(int(stop.value.code or 0), out, err)

    return run


def test_a_worker_without_a_bandwidth_is_named_with_its_file(shell: Shell) -> None:
    text = CLUSTER.replace("bandwidth = 1e9\nmax_batch = 256", "max_batch = 256")
    done = shell("cluster.toml", text=text + '[sync]\nkind = "ring"\n')
    assert (done.code, "cluster.toml: slow.bandwidth: found nothing" in done.err) == (2, True)


def test_no_synchronisation_is_said_in_words(shell: Shell) -> None:
    done = shell("cluster.toml", text=CLUSTER + '[sync]\nkind = "none"\n')
    assert done.code == 0
    assert 'of it      no time to synchronise: [sync] kind is "none"' in done.out


def test_batches_above_the_maximum_are_accumulated(shell: Shell) -> None:
    done = shell("cluster.toml", "-o", "plan.json", "--check")
    assert done.code == 0
    assert "(2 x 128)" in done.out
    assert "HiGHS finds the same optimum" in done.out
    assert read_plan("plan.json").workers[0].accumulation == 2


def test_times_of_steps_in_micro_batches_are_refused(shell: Shell) -> None:
    known = read_profile("fast.json")
    model = msgspec.structs.replace(known.model, accumulate=2)
    write_json("fast.json", msgspec.structs.replace(known, model=model))
    done = shell("cluster.toml")
    assert (done.code, "fast.json: model.accumulate: found 2 micro-batches" in done.err) == (2, True)


def test_an_explanation_has_a_verdict(shell: Shell) -> None:
    done = shell("cluster.toml", "--explain")
    assert done.code == 0
    assert "set the pace" in done.out
    quiet = shell("cluster.toml", "--explain", "--json")
    assert json.loads(quiet.out)["global_batch"] == 600
    assert "set the pace" in quiet.err


def test_a_quantile_shows_both_plans(shell: Shell) -> None:
    done = shell("cluster.toml", "--quantile", "0.9", "--check", "-o", "plan.json")
    assert done.code == 0
    assert "nominal" in done.out
    assert "robust" in done.out
    made = read_plan("plan.json").noise
    assert made is not None
    assert made.robust.quantile_seconds <= made.nominal.quantile_seconds
    assert shell("cluster.toml", "--quantile", "1").code == 2


def test_the_global_batch_may_be_chosen(shell: Shell) -> None:
    assert shell("cluster.toml", "--global-batch", "auto", "-o", "auto.json").code == 0
    auto = read_plan("auto.json")
    assert auto.goodput is not None
    for batch in (auto.global_batch // 2, auto.global_batch + 50):
        assert shell("cluster.toml", "--global-batch", str(batch), "-o", "plan.json").code == 0
        other = read_plan("plan.json").goodput
        assert other is not None
        assert other.goodput <= auto.goodput.goodput * 1.001
    assert shell("cluster.toml", "--global-batch", "many").code == 2
    plain = CLUSTER.replace("[goodput]\nnoise_scale = 1000.0\nbase_batch = 64\n", "")
    done = shell("cluster.toml", "--global-batch", "auto", text=plain)
    assert done.code == 2
    assert "goodput" in done.err


def test_the_noise_may_come_from_a_run(shell: Shell) -> None:
    """From the file that GradientNoise has written; the table's own numbers come before."""
    Path("run").mkdir()
    write_json("run/noise.json", GradientNoiseRecord(noise_scale=1000.0, base_batch=64, steps=500))
    numbers = "noise_scale = 1000.0\nbase_batch = 64\n"
    assert shell("cluster.toml", "--global-batch", "auto", "-o", "own.json").code == 0
    for table in ('noise = "run/noise.json"\n', 'noise = "run/noise.json"\nbase_batch = 64\n'):
        text = CLUSTER.replace(numbers, table)
        assert shell("cluster.toml", "--global-batch", "auto", "-o", "measured.json", text=text).code == 0
        assert read_plan("measured.json") == read_plan("own.json")
    text = CLUSTER.replace(numbers, 'noise = "run/noise.json"\n')
    for path, said in (("fast.json", "pyps.noise/1"), ("no.json", "no file at no.json")):
        done = shell("cluster.toml", text=text.replace("run/noise.json", path))
        assert done.code == 2
        assert said in done.err
    done = shell("cluster.toml", text=CLUSTER.replace(numbers, "base_batch = 64\n"))
    assert done.code == 2
    assert "goodput.noise_scale: found nothing" in done.err


def test_what_if_says_gain_or_loss(shell: Shell) -> None:
    done = shell("what-if", "cluster.toml", "--add", "fast*2", "--drop", "slow")
    assert done.code == 0
    assert "With the change" in done.out
    Path("other.json").write_bytes(Path("slow.json").read_bytes())
    found = json.loads(shell("what-if", "cluster.toml", "--add", "other.json*3", "--json").out)
    assert found["after"]["iteration_seconds"] < found["before"]["iteration_seconds"]
    assert shell("what-if", "cluster.toml", "--drop", "unknown").code == 2
    assert shell("what-if", "cluster.toml", "--drop", "fast", "--drop", "slow*1").code == 3


@pytest.mark.parametrize("command", ["what-if", "pareto", "measure-next"])
def test_a_pipeline_under_a_policy_that_allows_none_is_refused_everywhere(shell: Shell, command: str) -> None:
    done = shell(command, "cluster.toml", text=CLUSTER + '[run]\ndepth = "auto"\n')
    assert (done.code, "cluster.toml: run.depth: found a pipeline under bsp" in done.err) == (2, True)


def test_what_if_with_other_values(shell: Shell) -> None:
    found = json.loads(
        shell(
            "what-if",
            "cluster.toml",
            "--set",
            "job.global_batch=300",
            "--set",
            "slow.bandwidth=1e8",
            "--json",
        ).out
    )
    assert found["after"]["iteration_seconds"] != found["before"]["iteration_seconds"]
    known = json.loads(
        shell(
            "cluster.toml",
            "--json",
            text=CLUSTER.replace("600", "300").replace(
                "bandwidth = 1e9\nmax_batch = 256", "bandwidth = 1e8\nmax_batch = 256"
            ),
        ).out
    )
    assert found["after"]["iteration_seconds"] == known["iteration_seconds"]
    for wrong in (
        "slow.bandwidht=1",
        "nothing.count=1",
        "job.global_batch=0",
        "job.global_batch",
        "slow.count=x",
    ):
        refused = shell("what-if", "cluster.toml", "--set", wrong)
        assert refused.code == 2
        assert "--set" in refused.err
    typed = shell("what-if", "cluster.toml", "--set", "slow.count=x").err
    assert "--set: slow.count: found 'x'; expected a whole number" in typed
    mistyped = shell("what-if", "cluster.toml", "--set", "job.globalbatch=300").err
    assert "--set: job.globalbatch: found an unknown key; expected 'global_batch'" in mistyped
    alone = shell("what-if", "cluster.toml", "--set", "job.global_batch=90000")
    assert (alone.code, alone.err.count("cluster.toml: ")) == (3, 1), alone.err


def test_a_deadline_a_budget_and_the_check(shell: Shell) -> None:
    done = shell("cluster.toml", "--target", "1e7", "--deadline", "2", "--check")
    assert done.code == 0, done.err
    assert "hours" in done.out
    assert "same optimum" in done.out
    assert shell("cluster.toml", "--deadline", "2").code == 2
    assert shell("cluster.toml", "--target", "1e7", "--budget", "1e-3").code == 3


def test_a_check_allows_for_the_steps_of_a_front(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets of many unlike workers are searched to within 1 %."""

    def coarse(*given: Any) -> tuple[ConstrainedSolution, list[str]]:
        best, notes = best_for_job(*given)
        batches, slowest = best.batches.copy(), int(best.step_seconds.argmax())
        other = next(k for k, batch in enumerate(batches.tolist()) if batch > 1 and k != slowest)
        batches[[slowest, other]] += [1, -1]
        return replace(best, batches=batches), notes

    monkeypatch.setattr("pyps.solver.plan.best_for_job", coarse)
    done = shell("cluster.toml", "--target", "1e7", "--deadline", "2", "--check")
    assert done.code == 0, done.err
    assert "searched to within 1%" in done.out


def test_two_outputs_are_two_files(shell: Shell) -> None:
    Path("curves").mkdir()
    for given, option in (
        (("-o", "a.png", "--timeline", "./a.png"), "--timeline"),
        (("--timeline", "a.png", "--ring", "curves/../a.png"), "--ring"),
        (("--curves", "curves", "--ring", "curves/fast.png"), "--curves"),
    ):
        done = shell("cluster.toml", *given)
        assert (done.code, done.out, list(Path().glob("**/*.png"))) == (2, "", []), (
            "before anything is written"
        )
        assert f"{option}: found " in done.err
    assert shell("cluster.toml", "-o", "a.json", "--timeline", "a.png", "--curves", "curves").code == 0


def test_what_to_measure_next(shell: Shell) -> None:
    done = shell("measure-next", "cluster.toml")
    assert done.code == 0
    assert "% of an iteration" in done.out
    assert json.loads(shell("measure-next", "cluster.toml", "--json").out)["may_win"] >= 0


def test_prices_fall_along_the_pareto_front(shell: Shell) -> None:
    done = shell(
        "pareto", "cluster.toml", "--json", "--picture", "front.svg", text=CLUSTER.replace("600", "250")
    )
    assert done.code == 0
    points = json.loads(done.out)
    assert len(points) > 2
    times = [point["iteration_seconds"] for point in points]
    prices = [point["price_per_hour"] for point in points]
    assert times == sorted(times)
    assert prices == sorted(prices, reverse=True)
    assert "<svg" in Path("front.svg").read_text()
    assert "fast x 2" in shell("pareto", "cluster.toml").out
    silent = shell("pareto", "cluster.toml", text=CLUSTER.replace("price_per_hour = 0.5\n", ""))
    assert silent.code == 2
    assert "worker[1].price_per_hour" in silent.err


def test_a_front_over_global_batches(shell: Shell) -> None:
    small = CLUSTER.replace("max_batch = 128", "max_batch = 20").replace("max_batch = 256", "max_batch = 20")
    done = shell("pareto", "cluster.toml", "--batches", "--json", text=small)
    assert done.code == 0, done.err
    points = json.loads(done.out)
    seconds = [point["seconds_per_million_useful"] for point in points]
    assert seconds == sorted(seconds)
    assert all(sum(point["batches"]) == point["global_batch"] for point in points)
    assert "hours/million" in shell("pareto", "cluster.toml", "--batches", text=small).out
    without = shell("pareto", "cluster.toml", "--batches", text=small.replace("[goodput]", "[spot]", 1))
    assert without.code == 2
    drawn = shell("pareto", "cluster.toml", "--batches", "--picture", "a.png", text=small)
    assert (drawn.code, "--picture" in drawn.err) == (2, True)
    local = shell("pareto", "cluster.toml", "--batches", text=f"{small}\n[run]\nlocal_steps = 4\n")
    assert (local.code, "local steps" in local.err) == (2, True)


def test_pictures_are_of_the_size_they_say(shell: Shell) -> None:
    done = shell("cluster.toml", "--timeline", "time.png", "--ring", "ring.svg", "--curves", "c")
    assert done.code == 0
    assert "wrote time.png" in done.out
    assert {path.name for path in Path("c").iterdir()} == {"fast.png", "slow.png"}
    with Image.open("time.png") as picture:
        assert min(picture.size) > 400
        red, green, blue = picture.convert("RGB").split()
        assert red.tobytes() == green.tobytes() == blue.tobytes(), "colours that would be lost in grey"
        assert red.getextrema() == (0, 255)
    assert "fast-0" in Path("ring.svg").read_text() or "<path" in Path("ring.svg").read_text()
    assert shell("cluster.toml", "--ring", "RING.SVG").code == 0
    for option, wrong in (("--timeline", "time.gif"), ("--ring", "ring.pdf"), ("--curves", "fast.json")):
        done = shell("cluster.toml", "-o", "no.json", option, wrong)
        assert (done.code, done.out, Path("no.json").exists()) == (2, "", False), "before anything is written"
        assert option in done.err
    assert "--picture" in shell("pareto", "cluster.toml", "--picture", "front.gif").err
    assert shell("cluster.toml", "--timeline", "fast.json").code == 2


def test_a_budget_for_samples_is_kept_and_confirmed(shell: Shell) -> None:
    text = CLUSTER.replace("600", "250")
    free = json.loads(shell("cluster.toml", "--json", text=text).out)["cost"]["price_per_million_samples"]
    limits = f"[limits]\nprice_per_million_samples = {0.8 * free}\n[[worker]]"
    done = shell("cluster.toml", "--check", "-o", "plan.json", text=text.replace("[[worker]]", limits, 1))
    assert done.code == 0
    assert "same optimum" in done.out
    cost = read_plan("plan.json").cost
    assert cost is not None
    assert cost.price_per_million_samples is not None
    assert cost.price_per_million_samples <= 0.8 * free


@pytest.mark.parametrize(
    ("old", "new", "way_out"),
    [
        (
            "= 600",
            "= 2000",
            "is 1024, or allow every worker max_accumulation = 3",
        ),
        ("watts = 300", "watts = 300\nbatch_multiple = 7", "the nearest feasible global_batch is"),
        ("[[worker]]", "[limits]\nwatts = 300\n[[worker]]", "raise limits.watts from 300 to 700"),
        (
            "[[worker]]",
            "[limits]\nprice_per_hour = 1.5\n[[worker]]",
            "raise limits.price_per_hour from 1.5 to 3",
        ),
        ("max_batch = 256", "required = true\nmin_batch = 300", "raise max_accumulation of 'slow' to 2"),
    ],
)
def test_what_cannot_be_is_refused_with_the_smallest_change(
    shell: Shell, old: str, new: str, way_out: str
) -> None:
    text = CLUSTER.replace(old, new, 1)
    if "batch_multiple" in new:
        text = text.replace("watts = 200", "watts = 200\nbatch_multiple = 14")
    done = shell("cluster.toml", text=text)
    assert done.code == 3
    assert way_out in done.err
    assert done.err.count("\n") == 1


def test_what_if_adds_up_what_is_given_twice(shell: Shell) -> None:
    both = ["--drop", "slow*1", "--drop", "slow"]
    twice = shell("what-if", "cluster.toml", "--add", "fast", "--add", "fast", *both)
    assert twice.out == shell("what-if", "cluster.toml", "--add", "fast*2", "--drop", "slow").out
    few = shell("what-if", "cluster.toml", "--add", "fast", "--drop", "slow*1", "--drop", "slow*1")
    assert few.out == shell("what-if", "cluster.toml", "--add", "fast", "--drop", "slow").out


def test_workers_that_wait_for_nothing_compute_all_the_time(shell: Shell) -> None:
    slower = CLUSTER.replace("bandwidth = 1e9\nmax_batch = 256", "bandwidth = 1e6\nmax_batch = 256")
    found = json.loads(shell("what-if", "cluster.toml", "--set", "run.policy=asp", "--json", text=slower).out)
    assert 0 < found["before"]["utilisation"] <= found["after"]["utilisation"] == 1


def test_the_batch_that_is_chosen_is_that_of_the_quantile(shell: Shell) -> None:
    """It is the same where the file states it."""
    options = ["--global-batch", "auto", "--json"]
    by_option = json.loads(shell("cluster.toml", *options, "--quantile", "0.99").out)
    text = CLUSTER.replace("global_batch = 600", "global_batch = 600\nquantile = 0.99")
    by_file = json.loads(shell("cluster.toml", *options, text=text).out)
    assert by_option["global_batch"] == by_file["global_batch"]
