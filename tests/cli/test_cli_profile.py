"""pyps-profile from its arguments to its files, exit codes and words."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

import pyps.cli.profile as command
from pyps.cli import main_profile
from pyps.cli.profile_files import merged_profile
from pyps.errors import InputError
from pyps.formats import Device, Memory, ModelInfo, Point, Profile, encode, read_cluster, read_profile
from pyps.profiler import select_fit
from pyps.worker import link_speed

pytestmark = pytest.mark.slow

CSV = "batch,seconds\n128,0.08181\n167,0.10494\n"
QUICK = ["--batches", "1,8,64", "--repeats", "2", "--threads", "1"]


@dataclass
class Done:
    code: int
    out: str
    err: str


class Shell:
    """Runs pyps-profile in an empty folder, as a user would."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch

    def __call__(self, *arguments: str) -> Done:
        self._monkeypatch.setattr(sys, "argv", ["pyps-profile", *arguments])
        code: object = 0
        try:
            code = main_profile()
        except SystemExit as stop:
            code = stop.code
        out, err = self._capsys.readouterr()
        assert "Traceback" not in out + err
        return Done(code if isinstance(code, int) else 0, out, err)


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    return Shell(capsys, monkeypatch)


def files() -> list[str]:
    return sorted(p.name for p in Path().iterdir())


def test_progress_without_a_terminal_is_a_line_every_few_seconds() -> None:
    lines: list[str] = []
    advance = command.progress_lines("cpu", lines.append, iter([0.0, 0.0, 2.0, 4.0, 6.0, 6.0]).__next__)
    for gone in range(0, 8, 2):
        advance(gone, 90.0)
    assert lines == ["timing cpu: 0 s, at most 90 s left", "timing cpu: 6 s, at most 84 s left"]


@pytest.mark.parametrize("absolute", [False, True])
def test_a_cluster_says_what_to_measure(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, absolute: bool
) -> None:
    """Steps get dearer from 100 samples on, which the first sizes do not show; however the file is named."""
    asked: list[list[int]] = []

    def timed(model: str, *, batches: list[int], **given: object) -> Profile:
        asked.append(batches)
        points = [Point(batch=b, seconds=0.004 + 3e-4 * b + 5e-4 * max(0, b - 100)) for b in batches]
        device = Device(name="here")
        return Profile(device=device, model=ModelInfo(name=model), points=points, max_batch=max(batches))

    monkeypatch.setattr(command, "profile_model", timed)
    line = [Point(batch=b, seconds=0.010 + 8e-4 * b) for b in (1, 15, 32, 64, 100, 160, 200, 256)]
    other = Profile(device=Device(name="there"), model=ModelInfo(name="m"), points=line, max_batch=256)
    Path("line.json").write_bytes(encode(other))
    groups = "".join(f'[[worker]]\nname = "{k}"\nprofile = "{k}.json"\n' for k in ("tail", "line"))
    Path("two.toml").write_text(f"[job]\nglobal_batch = 300\n{groups}")
    first = ["m", "--batches", "1,15,256", "--no-plot"]
    output = str(Path("tail.json").absolute()) if absolute else "tail.json"
    done = shell(*first, "--for", "two.toml", "-o", output)
    assert done.code == 0, done.err
    assert "measuring" in done.err
    assert "no split can save more than 1 %" in done.err
    known = [point.batch for point in read_profile("tail.json").points]
    assert {1, 15, 256} < set(known)
    looked = len(asked)
    assert shell(*first, "--for", "two.toml", "-o", output).code == 0
    assert len(asked) == looked  # all is known
    wanted = ["m", "--batches", "1,17,256", "--no-plot", "--for", "two.toml", "-o", output]
    assert shell(*wanted).code == 0
    assert asked[looked] == [15, 17]  # what the profile lacks, and a size again, to compare
    assert {1, 15, 17, 256} < {point.batch for point in read_profile("tail.json").points}
    before = Path("tail.json").read_bytes()
    for option, value in (("--batches", "8,512"), ("--max-batch", "64")):
        done = shell("m", option, value, "--no-plot", "--for", "two.toml", "-o", output)
        assert (done.code, Path("tail.json").read_bytes()) == (2, before)
        assert f"{option}: found {value.rpartition(',')[2]}; expected " in done.err
        assert "256" in done.err.replace("\n", " ")
    refused = shell(*first, "--for", "two.toml")
    assert refused.code == 2
    assert "--output: found nothing; expected this device's profile: " in refused.err


def test_the_time_for_a_device_is_kept_under_a_throttle(shell: Shell) -> None:
    began = time.monotonic()
    done = shell(
        "digits_mlp", "--batches", "1,64,512,4096", "--throttle", "32", "--seconds", "2", "-o", "p.json"
    )
    assert done.code == 0, done.err
    assert time.monotonic() - began < 20.0  # on a machine of any load
    assert "2 s were too few for" in done.err
    assert "give more with --seconds" in done.err
    assert 2 <= len(read_profile("p.json").points) <= 4


def test_a_model_is_measured_and_written(shell: Shell) -> None:
    done = shell("digits_mlp", *QUICK, "--throttle", "2", "-o", "p.json")
    assert done.code == 0, done.err
    assert files() == ["p.json", "p.png"]
    profile = read_profile("p.json")
    assert [p.batch for p in profile.points] == [1, 8, 64]
    assert (profile.device.throttle, profile.device.emulated) == (2.0, True)
    for text in (
        "digits_mlp on",
        "throttle 2",
        "samples/s",
        "T(b) = ",
        "leave-one-out",
        "do not trust beyond",
        "optimizer: SGD with momentum 0.9",
    ):
        assert text in done.out
    assert "wrote p.json" in done.err


def test_measure_may_be_said_and_options_may_come_first(shell: Shell) -> None:
    for arguments in (["measure", "digits_mlp", *QUICK], [*QUICK, "digits_mlp"]):
        done = shell(*arguments, "--no-plot")
        assert done.code == 0, done.err
        assert files() == ["profile.json"]
        Path("profile.json").unlink()


def test_json_stands_alone_on_stdout_and_no_file_is_written(shell: Shell) -> None:
    Path("points.csv").write_text(CSV)
    done = shell("import", "points.csv", "--max-batch", "512", "--json")
    assert done.code == 0, done.err
    profile = json.loads(done.out)
    assert (profile["schema"], profile["max_batch"]) == ("pyps.profile/1", 512)
    assert files() == ["points.csv"]


def test_import_writes_a_profile_and_its_picture(shell: Shell) -> None:
    Path("points.csv").write_text(CSV)
    device = ["--max-batch", "512", "--name", "m40", "--parameters", "1000"]
    done = shell("import", "points.csv", *device, "-o", "m40.json", "--plot", "x.png")
    assert done.code == 0, done.err
    assert files() == ["m40.json", "points.csv", "x.png"]
    profile = read_profile("m40.json")
    assert (profile.device.name, profile.max_batch, profile.model.parameters) == ("m40", 512, 1000)
    assert "not defined for two batches" in done.out


def test_a_poor_profile_is_called_so(shell: Shell) -> None:
    Path("noisy.csv").write_text("batch,seconds\n1,1\n1,2\n1,3\n8,1\n8,2\n8,3\n64,2\n64,9\n64,2\n")
    done = shell("import", "noisy.csv", "--no-plot")
    assert done.code == 0, done.err
    assert "the times of a batch differ by up to 175%: measure again when nothing else runs" in done.out
    Path("odd.csv").write_text("batch,seconds\n1,1\n8,5\n64,1\n512,7\n")
    odd = shell("import", "odd.csv", "--no-plot").out
    assert "does not describe this device" in odd
    assert "batch 64 takes less time than batch 8, 1000 ms against 5000 ms: measure both again" in odd
    Path("bent.csv").write_text("batch,seconds\n1,6.4\n8,11.9\n32,21.9\n64,60\n256,133.9\n")
    bent = shell("import", "bent.csv", "--no-plot").out
    assert "in gaps twice as wide" in bent
    assert "between these batches the curve is a guess" in bent
    assert "R2" not in bent
    Path("flat.csv").write_text("batch,seconds\n1,0.041\n8,0.0425\n32,0.0405\n64,0.0435\n128,0.042\n")
    flat = shell("import", "flat.csv", "--no-plot").out
    assert "does not describe this device" not in flat
    assert "takes less time" not in flat
    assert "milliseconds" not in flat
    Path("ms.csv").write_text("batch,seconds\n1,50\n8,400\n")
    long = shell("import", "ms.csv", "--no-plot").out
    assert "a step of 8 takes 400 s: is that in milliseconds?" in long


def test_help_names_both_ways(shell: Shell) -> None:
    for arguments in (["--help"], []):
        done = shell(*arguments)
        assert done.code == 0
        for text in ("pyps-profile [OPTIONS]", "MODEL", "--max-batch", "--throttle", "pyps-profile import"):
            assert text in done.out
    assert "CSV" in shell("import", "--help").out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resnet9000"], "model: found 'resnet9000'; expected a built-in model"),
        (["no_such_module_here:make"], "No module named 'no_such_module_here'"),
        (["pyps.tasks.builtin:absent"], "factory: found no 'absent'"),
        (["mlp", "--device", "tpu"], "device: found 'tpu'"),
        (["mlp", "--max-batch", "-4"], "max_batch: found -4"),
        (["mlp", "--batches", "1,-4"], "batches: found 1,-4"),
        (["mlp", "--batches", "1,two"], "--batches: found '1,two'"),
        (["mlp", "--batches", ""], "--batches: found ''"),
        (["mlp", "--throttle", "0.5"], "throttle: found 0.5"),
        (["mlp", "-o", "absent/p.json"], "--output: found no folder absent"),
        (["mlp", "-o", "."], "--output: found ., a folder"),
        (["mlp", "--plot", "p.png", "--no-plot"], "--plot: found --no-plot as well"),
        (["mlp", "-o", "p", "--plot", "p"], "--plot: found p, the file of --output"),
        (["mlp", "--bogus"], "--bogus"),
        (["mlp", "--repeats", "x"], "'x'"),
        (["mlp", "--throttle=fast"], "'fast'"),
        (["mlp", "--throttle", "fast"], "Try 'pyps-profile --help'"),
        (["import", "--max-batch", "many", "c.csv"], "'many'"),
        (["import"], "CSV"),
        (["import", "absent.csv"], "absent.csv: found no such file or directory"),
    ],
)
def test_wrong_use_is_one_message_exit_2_and_no_file(
    shell: Shell, arguments: list[str], message: str
) -> None:
    done = shell(*arguments)
    assert done.code == 2
    assert message in done.err
    assert done.out == ""
    assert files() == []


def test_a_damaged_csv_names_its_line(shell: Shell) -> None:
    Path("points.csv").write_text(CSV + "-3,0.1\n")
    done = shell("import", "points.csv")
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert "points.csv: line 4: batch: found '-3'" in done.err
    assert files() == ["points.csv"]


def test_a_gpu_that_is_not_there(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = shell("mlp", "--device", "cuda:0")
    assert done.code == 2
    assert "sees no CUDA device" in done.err


def test_an_interrupt_leaves_the_old_profile_alone(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("p.json").write_text("the old one")

    def interrupted(*_: object, **__: object) -> Profile:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "profile_model", interrupted)
    done = shell("mlp", "-o", "p.json")
    assert done.code != 0
    assert "interrupted: nothing of this measurement was written" in done.err
    assert Path("p.json").read_text() == "the old one"
    assert files() == ["p.json"]


def test_what_was_written_is_said_where_the_picture_fails(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("points.csv").write_text(CSV)

    def full(*_: object) -> None:
        raise InputError("p.png", "", "no space left on device", "a place to write to")

    monkeypatch.setattr(command, "plot_profile", full)
    done = shell("import", "points.csv", "-o", "p.json")
    assert (done.code, files()) == (2, ["p.json", "points.csv"])
    assert done.err.splitlines() == [
        "wrote p.json",
        "pyps-profile: p.png: found no space left on device; expected a place to write to",
    ]


# What is done with profiles that are there.


MEASURED: dict[tuple[str, ...], bytes] = {}  # by options: one measurement serves all tests


def measured(shell: Shell, name: str, *more: str) -> None:
    if more not in MEASURED:
        assert shell("digits_mlp", *QUICK, "--no-plot", "-o", name, *more).code == 0
        MEASURED[more] = Path(name).read_bytes()
    Path(name).write_bytes(MEASURED[more])


def test_show_and_compare(shell: Shell) -> None:
    measured(shell, "a.json")
    measured(shell, "b.json", "--throttle", "2")
    done = shell("show", "a.json", "--plot", "a.svg", "--chosen", "20")
    assert done.code == 0, done.err
    assert "optimizer: SGD with momentum 0.9\n" in done.out
    assert "where the time goes" in done.out
    assert "█" in done.out
    assert Path("a.svg").read_text().startswith("<?xml")
    done = shell("compare", "a.json", "b.json")
    assert done.code == 0, done.err
    assert "second / first" in done.out
    assert "throttle 2" in done.out


def test_merge_pools_runs_of_one_device(shell: Shell) -> None:
    measured(shell, "a.json")
    measured(shell, "b.json", "--batches", "1,32")
    done = shell("merge", "a.json", "b.json", "-o", "ab.json")
    assert done.code == 0, done.err
    merged, runs = read_profile("ab.json"), [read_profile("a.json"), read_profile("b.json")]
    assert [p.batch for p in merged.points] == [1, 8, 32, 64]
    ones = [p.points[0].seconds for p in runs]
    assert merged.points[0].seconds == [*ones[0], *ones[1]]  # type: ignore[misc]
    measured(shell, "c.json", "--throttle", "2")
    done = shell("merge", "a.json", "c.json", "-o", "ac.json")
    assert done.code == 2
    assert "c.json" in done.err
    assert "device" in done.err
    assert not Path("ac.json").exists()


def test_a_merged_profile_allows_no_more_than_any_of_its_runs() -> None:
    free = Memory(fixed_bytes=0, bytes_per_sample=10.0, budget_bytes=1000)  # 100 samples
    busy = Memory(fixed_bytes=900, bytes_per_sample=5.0, budget_bytes=1000)  # 20
    none = Memory(fixed_bytes=0, bytes_per_sample=5.0, budget_bytes=0)
    for memories, least in (((free, busy), busy), ((busy, free), busy), ((free, none), none)):
        runs = [
            Profile(
                device=Device(name="gpu"),
                model=ModelInfo(name="mlp"),
                points=[Point(batch=1, seconds=1.0)],
                memory=memory,
            )
            for memory in memories
        ]
        assert merged_profile(["a.json", "b.json"], runs).memory == least


def test_link_completes_a_profile(shell: Shell, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_speed, "probe_store", partial(link_speed.probe_store, (4096, 65536)))
    measured(shell, "a.json")
    before = read_profile("a.json")
    done = shell("link", "a.json")
    assert done.code == 0, done.err
    after = read_profile("a.json")
    assert after.link is not None
    assert after.link.via == "store"
    assert after.points == before.points
    assert "link by store" in shell("show", "a.json").out
    assert shell("link", "a.json", "--via", "pigeon").code == 2
    assert shell("link", "a.json", "--to", "x:1").code == 2
    assert shell("link", "absent.json").code == 2


def test_every_device_in_turn(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    done = shell("digits_mlp", *QUICK, "--all", "-o", "p.json")
    assert done.code == 0, done.err
    assert files() == ["p-cpu.json", "p-cpu.png"]
    assert shell("digits_mlp", *QUICK, "--all", "--device", "cuda:0").code == 2


def test_how_a_step_is_taken_is_in_the_profile(shell: Shell) -> None:
    measured(shell, "a.json", "--autocast", "bf16", "--accumulate", "2")
    model = read_profile("a.json").model
    assert (model.autocast, model.accumulate, model.compiled) == ("bf16", 2, False)
    assert shell("digits_mlp", *QUICK, "--autocast", "f8").code == 2
    assert shell("digits_mlp", *QUICK, "--accumulate", "0").code == 2
    assert "expected 1 with --for" in shell("digits_mlp", *QUICK, "--accumulate", "2", "--for", "c.toml").err


def test_a_budget_limits_the_batch(shell: Shell) -> None:
    done = shell("cnn", *QUICK, "--memory-budget", "0.0001", "--no-plot", "-o", "a.json")
    assert done.code == 2
    assert "memory" in done.err
    assert files() == []


def test_one_command_measures_the_machine_writes_the_cluster_file_and_plans(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(model: str, *, device: str, batches: list[int] | None, **_: object) -> Profile:
        points = [Point(batch=b, seconds=0.01 + 0.001 * b) for b in batches or (1, 8, 64)]
        info = ModelInfo(name=model)
        return Profile(device=Device(name=device), model=info, points=points, fit=select_fit(points))

    monkeypatch.setattr(command, "profile_model", measured)
    machine = ["m", "--all"]
    done = shell(*machine, "--cluster", "cluster.toml", "-B", "48")
    assert done.code == 0, done.err
    assert "iteration  58.00 ms" in done.out
    assert "wrote cluster.toml" in done.err
    assert read_profile(read_cluster("cluster.toml").worker[0].profile).points[-1].batch == 64
    for more, said in (
        (["--cluster", "cluster.toml", "-B", "48"], "which is there"),
        (["--cluster", "new.toml"], "--global-batch: found nothing"),
        (["--cluster", "new.toml", "-B", "48", "--batches", "1,2"], "--batches as well"),
    ):
        refused = shell(*machine, *more)
        assert refused.code == 2
        assert said in " ".join(refused.err.split())
    assert "--all, too" in shell("m", "--cluster", "new.toml", "-B", "48").err
    assert not Path("new.toml").exists()
