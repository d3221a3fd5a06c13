"""docs/architecture.md leads to the code: it answers a newcomer's questions and names every source file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")

# Question, the file that answers it, and a symbol that the answer is about.
QUESTIONS = (
    ("Where is a push admitted, and given its version?", "csrc/policy/view_round.c", "void admit("),
    ("Where is a push applied to a chunk?", "csrc/store/apply.c", "int chunk_advance("),
    ("Where is staleness computed?", "csrc/policy/view_round.c", "out->staleness ="),
    ("Where do I add a policy?", "csrc/policy/policy.c", "policy_find("),
    ("Where are samples handed out?", "csrc/policy/view_samples.c", "samples_left("),
    ("Where is a dead worker detected?", "csrc/store/participant.c", "bool slot_is_dead("),
    ("Where is a late worker fenced?", "csrc/policy/view.c", "enum verdict tick("),
    ("Where is a snapshot of one version taken?", "csrc/store/pull.c", "int pyps_snapshot("),
    ("Where are gradients encoded?", "csrc/kernels/codec_template.h", "NAME(encode"),
    ("Where is the optimizer's arithmetic?", "csrc/kernels/kernels_template.h", "NAME(adam"),
    ("Where do C codes become exceptions?", "pyps/native/__init__.py", "def check("),
    ("Where is the training loop of a worker?", "pyps/worker/loop.py", "def batches("),
    ("Where does a transfer overlap with compute?", "pyps/worker/pipeline.py", "class PipelinedTransport"),
    ("Where are `PYPS_*` variables read and written?", "pyps/worker/settings.py", "def from_env("),
    ("Where is the throttle that emulates a slower device?", "profiler/throttle.py", "class Throttle"),
    ("Where does the launcher restart a worker?", "pyps/run/launcher.py", "_restart_at"),
    ("Where is `plan.json` defined?", "pyps/formats/plan.py", "class Plan("),
    ("Where is a checkpoint written?", "pyps/checkpoint/folder.py", "def write_folder("),
    ("Where is the exact split computed?", "solver/exact/minmax.py", "def solve("),
    ("Where is a new split decided while training?", "solver/online/decide.py", "def decide("),
    ("Where is the cost model fitted?", "profiler/fit.py", "def fit_points("),
    ("Where are messages of the TCP link defined?", "pyps/remote/wire.py", "class Verb"),
    ("Where is DDP's gradient weighted?", "pyps/torch/hook.py", "def weighted_hook("),
    ("Where does virtual time advance?", "pyps/simulate/clock.py", "class Clock"),
)
ROOMS = ("csrc", "pyps", "solver", "profiler")
FOLDER = re.compile(r"^Files in `([\w/]+)/`:")
NAME = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|pyi|c|h|pml))`")


def named_files() -> set[str]:
    """The paths that the page names. In a list below "Files in `x/`:" the names before an item's colon are
    relative to x/, and a name without a folder is in the folder of the name before it.
    """
    found, folder = set(), None
    for line in PAGE.splitlines():
        if heading := FOLDER.match(line):
            folder = heading[1]
        elif line and not line.startswith(("- ", "  ")):
            folder = None
        listed = line.partition(": ")[0] if folder and line.startswith("- ") else ""
        inner = ""
        for name in NAME.findall(listed):
            if "/" in name:
                inner = name.rpartition("/")[0] + "/"
            found.add(f"{folder}/{name if '/' in name else inner + name}")
        found |= {name for name in NAME.findall(line.removeprefix(listed)) if "/" in name}
    return found


def source_files() -> set[str]:
    """The sources in the four rooms, without packages' build products."""
    paths = [
        p for room in ROOMS for kind in ("*.py", "*.pyi", "*.c", "*.h") for p in (ROOT / room).rglob(kind)
    ]
    names = {p.relative_to(ROOT).as_posix() for p in paths}
    return {name for name in names if not name.startswith("pyps/include/") and name != "pyps/_native.c"}


@pytest.mark.parametrize(("question", "file", "symbol"), QUESTIONS, ids=[q[0] for q in QUESTIONS])
def test_a_question_leads_to_its_file(question: str, file: str, symbol: str) -> None:
    assert f"| {question} | `{file}` |" in PAGE
    assert symbol in (ROOT / file).read_text(encoding="utf-8"), f"{file} no longer answers: {question}"


def test_every_file_that_the_page_names_exists() -> None:
    assert not {name for name in named_files() if not (ROOT / name).is_file()}


def test_the_page_names_every_source_file() -> None:
    assert not source_files() - named_files(), "give each of these a place on docs/architecture.md"
