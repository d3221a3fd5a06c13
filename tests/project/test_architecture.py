"""docs/architecture.md leads to the code: it answers questions, and every file says what it is."""

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
    ("Where is a snapshot of one version taken?", "csrc/store/snapshot.c", "int pyps_snapshot("),
    ("Where does a restored store begin?", "csrc/policy/view_state.c", "int view_restore("),
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
NAME = re.compile(r"`((?:csrc|pyps|solver|profiler|tests)/[\w./-]+\.(?:py|c|h|pml))`")
FILES = (ROOT / "docs" / "reference" / "files.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("question", "file", "symbol"), QUESTIONS, ids=[q[0] for q in QUESTIONS])
def test_a_question_leads_to_its_file(question: str, file: str, symbol: str) -> None:
    assert f"| {question} | `{file}` |" in PAGE
    assert symbol in (ROOT / file).read_text(encoding="utf-8"), f"{file} no longer answers: {question}"


def test_every_file_that_the_page_names_exists() -> None:
    assert not {name for name in NAME.findall(PAGE) if not (ROOT / name).is_file()}


def test_every_source_file_says_what_it_is() -> None:
    """docs/reference/files.md has the first sentence of each; tests/project/test_reference.py keeps it so."""
    entries = re.findall(r"^- \[`[\w.]+`\]\(../../([\w/.]+)\)(: .+)?$", FILES, re.MULTILINE)
    assert len(entries) > 100
    assert not {name for name, title in entries if not title}
