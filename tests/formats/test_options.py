"""The options of a run: what takes one takes it by its name and type, and keeps its limits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

import pyps
from pyps.cli import run as run_command
from pyps.cli import simulate as simulate_command
from pyps.cli.simulate import SimulateOptions
from pyps.errors import InputError
from pyps.formats import RunTable, options
from pyps.formats.mode import PlannedRun
from pyps.formats.options import VARIABLES, check_limits, declared
from pyps.formats.setup import VARIABLE
from pyps.run import RunOptions
from pyps.worker.step.loop import join

ROOT = Path(__file__).resolve().parents[2]
HOLDERS = (RunTable, RunOptions, SimulateOptions, join)
DECLARED = {
    re.sub(r"(?<!^)(?=[A-Z])", "_", name.removesuffix("Option")).lower(): get_args(kind)[-1]
    for name, kind in vars(options).items()
    if isinstance((get_args(kind) or (None,))[-1], options.Meta) and name != "Name"
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_holder_has_options_under_their_names(holder: Any) -> None:
    for name, _, meta in declared(holder):
        assert DECLARED[name] is meta


def test_every_option_can_be_set() -> None:
    held = {name for holder in HOLDERS for name, _, _ in declared(holder)}
    assert held == DECLARED.keys()


def test_what_a_cluster_file_states_reaches_the_plan() -> None:
    """So "Default: as planned" is true. Workers have codecs and micro-batches of their own."""
    of_workers = {"codec", "pull_codec", "accumulation"}
    assert {*RunTable.__struct_fields__} - of_workers == {*PlannedRun.__struct_fields__}


def test_commands_show_what_is_declared() -> None:
    for command, holder in ((run_command, RunOptions), (simulate_command, SimulateOptions)):
        result = CliRunner().invoke(command.app, ["--help"], env={"COLUMNS": "1000"})
        shown = " ".join(result.output.split())
        for name, _, meta in declared(holder):
            if name != "args":
                assert f"--{name.replace('_', '-')} " in shown
                assert (meta.description or "").removesuffix(".") in shown


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"micro_batch": 0}, "micro_batch: found 0; expected 1 to"),
        ({"seed": -1}, "seed: found -1; expected 0 to 18446744073709551615"),
        ({"samples": -1}, "samples: found -1; expected 0 to"),
    ],
)
def test_limits_are_the_same_at_every_door(given: dict[str, int], said: str) -> None:
    with pytest.raises(InputError, match=said):
        pyps.join("store", 0, batches=[1], **given)
    with pytest.raises(InputError, match=said):
        RunOptions(**({"samples": 0} | given)).check()
    if {field for field, _, _ in declared(SimulateOptions)} >= given.keys():
        with pytest.raises(InputError, match="--" + said.replace("_", "-", 1)):
            check_limits(SimulateOptions, given, "--")


def test_the_list_of_variables_is_whole() -> None:
    """All that the C core and Python read from the environment is what the reference says, and PYPS_RUN."""
    read = re.compile(r"""(?:getenv\(|environ(?:\.get\(|\[)|env\.get\()\s*["'](PYPS_\w+)["']""")
    files = [
        path for room in ("csrc", "pyps", "profiler", "solver") for path in (ROOT / room).rglob("*.[cp]*")
    ]
    texts = [path.read_text(encoding="utf-8") for path in files if path.suffix in (".c", ".py")]
    found = {name for text in texts for name in read.findall(text)} - {"PYPS_FAILPOINTS"}
    assert found == VARIABLES.keys()
    assert VARIABLE not in VARIABLES
