"""`pyps-plan` and the way every command ends: tables, JSON, exit codes, one clear line on stderr."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pyps.cli import main, main_plan
from pyps.formats import Device, ModelInfo, Point, Profile, read_plan, write_json

POINTS = {
    "m40": [(128, 0.08181), (167, 0.10494)],
    "gtx1070-a": [(128, 0.08149), (167, 0.10414)],
    "gtx1070-b": [(128, 0.08539), (158, 0.10346)],
    "gtx750": [(128, 0.39292), (20, 0.10441)],
}


@dataclass
class Done:
    code: int
    out: str
    err: str


Shell = Callable[..., Done]


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Runs an entry point in a folder that holds the published cluster (LBB, Table 2)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    text = "[job]\nglobal_batch = 512\n"
    for name, points in POINTS.items():
        measured = [Point(batch=b, seconds=s) for b, s in points]
        write_json(
            f"{name}.json", Profile(device=Device(name=name), model=ModelInfo(name="r18"), points=measured)
        )
        text += f'[[worker]]\nname = "{name}"\nprofile = "{name}.json"\n'
    Path("cluster.toml").write_text(text)

    def run(*arguments: str, entry: Callable[[], None] = main_plan) -> Done:
        monkeypatch.setattr(sys, "argv", ["pyps", *arguments])
        with pytest.raises(SystemExit) as stop:
            entry()
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return Done(int(stop.value.code or 0), out, err)

    return run


def edit(old: str, new: str) -> None:
    path = Path("cluster.toml")
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_the_published_cluster_is_planned_shown_and_written(shell: Shell) -> None:
    done = shell("cluster.toml", "-o", "plan.json")
    assert (done.code, done.err) == (0, "")
    plan = read_plan("plan.json")
    assert [w.batch for w in plan.workers] == [166, 167, 159, 20]
    assert plan.speedup_over_even == pytest.approx(0.39292 / 0.10441)
    for text in (
        "gtx750",
        "392.92 ms",
        "104.41 ms",
        "3.76x",
        "0.3242",
        "wrote plan.json",
        "warning: gtx1070-b",
    ):
        assert text in done.out


def test_json_is_alone_on_stdout_and_is_the_plan(shell: Shell) -> None:
    done = shell("cluster.toml", "--json", "-o", "plan.json", "--check")
    assert done.code == 0
    assert json.loads(done.out) == json.loads(Path("plan.json").read_text())
    assert "HiGHS finds the same optimum" in done.err
    assert "same optimum" in shell("cluster.toml", "--check").out


def test_pyps_plan_is_the_same_command(shell: Shell) -> None:
    assert shell("plan", "cluster.toml", "--json", entry=main).out == shell("cluster.toml", "--json").out


def test_an_even_split_that_does_not_fit_is_said(shell: Shell) -> None:
    edit('profile = "gtx750.json"\n', 'profile = "gtx750.json"\nmax_batch = 30\n')
    assert "even split not feasible" in shell("cluster.toml").out


@pytest.mark.parametrize(
    ("old", "new", "code", "said"),
    [
        ("global_batch = 512", "globl_batch = 512", 2, ["cluster.toml: job.globl_batch", "'global_batch'"]),
        ("global_batch = 512", "global_batch = -1", 2, ["cluster.toml: job.global_batch: found -1", ">= 1"]),
        ('"m40.json"', '"gone.json"', 2, ["cluster.toml: worker[0].profile", "gone.json"]),
        ('"m40.json"', '"m40.json"\nmax_batch = 1\nmin_batch = 2', 2, ["worker[0].min_batch: found 2"]),
        (
            "[job]",
            '[run]\npolicy = "bps"\n[job]',
            2,
            ["cluster.toml: run.policy: found 'bps'", "did you mean 'bsp'?"],
        ),
        (
            "[job]",
            '[run]\npolicy = "ssp:bond=2"\n[job]',
            2,
            ["run.policy: ssp: found 'bond=2'", "did you mean 'bound'?"],
        ),
        (
            "[job]",
            '[run]\npolicy = "bsp"\ndepth = "auto"\n[job]',
            2,
            ["cluster.toml: run.depth: found a pipeline"],
        ),
        (
            "[job]",
            '[run]\ncodec = "in8"\n[job]',
            2,
            ["run.codec: found 'in8'", "nf4, plan; did you mean 'int8'?"],
        ),
        ("[job]", '[sync]\nkind = "rings"\n[job]', 2, ["sync.kind: found 'rings'", "did you mean 'ring'?"]),
        ("[job]", "[sync]\nkind = 3\n[job]", 2, ["sync.kind: found 3; expected text"]),
        ("[job]", '[sync]\nkind = "ring"\n[run]\npolicy = "asp"\n[job]', 2, ["cluster.toml: run.policy"]),
        (
            '"m40.json"',
            '"m40.json"\nrequired = true\nmin_batch = 600',
            3,
            ["cluster.toml", "global_batch 512", "600"],
        ),
        ('.json"', '.json"\nmax_batch = 100', 3, ["cluster.toml", "maxima sum to 400", "largest feasible"]),
        ('.json"', '.json"\nbatch_multiple = 100', 3, ["cluster.toml", "500 or 600"]),
    ],
)
def test_what_is_wrong_is_said_in_one_line_and_nothing_is_written(
    shell: Shell, old: str, new: str, code: int, said: list[str]
) -> None:
    edit(old, new)
    before = sorted(path.name for path in Path().iterdir())
    done = shell("cluster.toml", "-o", "plan.json")
    assert done.code == code
    assert done.out == ""
    assert done.err.startswith("pyps-plan: ")
    assert done.err.count("\n") == 1
    assert all(text in done.err for text in said), done.err
    assert sorted(path.name for path in Path().iterdir()) == before


@pytest.mark.parametrize(
    ("content", "field"),
    [
        (b"", "damaged JSON"),
        (
            b'{"schema": "pyps.profile/9"}',
            "cluster.toml: worker[0].profile: found m40.json: schema: 'pyps.profile/9'; expected",
        ),
        (b"\xff\xfe\x00", "UTF-8"),
        (b'{"schema": "pyps.profile/1", "points": [{"batch": 1}]}', "points[0].seconds"),
    ],
)
def test_a_damaged_profile_is_named(shell: Shell, content: bytes, field: str) -> None:
    Path("m40.json").write_bytes(content)
    done = shell("cluster.toml")
    assert done.code == 2
    assert "m40.json" in done.err
    assert field in done.err


def test_a_profile_that_cannot_be_fitted_is_named(shell: Shell) -> None:
    one = Profile(device=Device(name="x"), model=ModelInfo(name="r18"), points=[Point(batch=1, seconds=1.0)])
    write_json("m40.json", one)
    done = shell("cluster.toml")
    assert done.code == 2
    assert "m40.json: points" in done.err


def test_inputs_are_never_overwritten(shell: Shell) -> None:
    for name in ("cluster.toml", "m40.json"):
        before = Path(name).read_bytes()
        done = shell("cluster.toml", "-o", name)
        assert done.code == 2
        assert "which is an input" in done.err
        assert Path(name).read_bytes() == before


def test_an_output_that_cannot_be_written_is_refused(shell: Shell) -> None:
    done = shell("cluster.toml", "-o", "no/such/plan.json")
    assert done.code == 2
    assert "--output: found no folder no/such" in done.err


@pytest.mark.parametrize(
    ("option", "arguments"),
    [("--output", ()), ("--timeline", ()), ("--ring", ()), ("--picture", ("pareto",))],
)
def test_outputs_are_checked_before_the_work(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, option: str, arguments: tuple[str, ...]
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the work began")

    monkeypatch.setattr("pyps.cli.plan.fitted_profiles", never)
    for path, found in (("no/a.png", "no folder no"), ("/proc/a.png", "/proc/a.png: "), (".", "., a folder")):
        done = shell(*arguments, "cluster.toml", option, path)
        assert done.code == 2
        assert f"{option}: found {found}" in done.err


def test_a_full_disk_behind_stdout_is_no_traceback(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", buffering=1) as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        done = shell("cluster.toml", "--json")
        patch.undo()
        with contextlib.suppress(OSError):
            full.close()
    assert done.code == 2
    assert "No space left" in done.err


@pytest.mark.parametrize("arguments", [["--nonsense"], [], ["nope"], ["plan"], ["plan", "a", "b"]])
def test_wrong_use_ends_2(shell: Shell, arguments: list[str]) -> None:
    assert shell(*arguments, entry=main).code == 2


def test_help_lists_every_command_without_importing_them(shell: Shell) -> None:
    done = shell("--help", entry=main)
    assert done.code == 0
    assert all(name in done.out for name in ("profile", "plan", "run", "shm"))


def test_a_check_prints_nothing_but_json(shell: Shell) -> None:
    """HiGHS is C, so what it prints passes by sys.stdout: only a process shows it."""
    assert shell("cluster.toml").code == 0
    program = (
        "import sys; sys.argv = ['pyps-plan', 'cluster.toml', '--check', '--json']; "
        "from pyps.cli import main_plan; main_plan()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["schema"] == "pyps.plan/1"


def test_planning_imports_neither_torch_nor_the_store(shell: Shell) -> None:
    assert shell("cluster.toml").code == 0
    program = (
        "import sys; sys.argv = ['pyps-plan', 'cluster.toml', '--json']\n"
        "from pyps.cli import main_plan\n"
        "try: main_plan()\n"
        "except SystemExit: pass\n"
        "unwanted = {'torch', 'cvxpy', 'pulp', 'pyps.store', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported {unwanted}' if unwanted else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
