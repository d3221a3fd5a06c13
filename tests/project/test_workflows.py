"""The workflows run what there is: targets of the Makefile, files of tests; and hold no password."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)  # `on` is no boolean
    return found


def steps(workflow: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job["steps"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_jobs_have_a_form_that_github_takes(path: Path) -> None:
    workflow = read(path)
    assert set(workflow) <= {"name", "on", "permissions", "concurrency", "jobs"}
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert {"runs-on", "steps"} <= set(job), name
        assert set(job.get("needs", "").split()) <= set(workflow["jobs"]), name
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step), step
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step.get("uses", "a/b@v1")), step


def test_commands_exist() -> None:
    targets = set(re.findall(r"^([\w-]+)(?= ?[\w.-]* ?:)", (ROOT / "Makefile").read_text(), re.M))
    named = set()
    for path in WORKFLOWS:
        for step in steps(read(path)):
            named |= set(re.findall(r"make ([\w-]+)", step.get("run", "")))
            for file in re.findall(r"tests/[\w/]+\.py", step.get("run", "")):
                assert (ROOT / file).is_file(), file
    assert named >= {"test", "test-oldest", "test-gpu", "wheels"}
    assert named <= targets


def test_the_makefile_defines_what_it_uses() -> None:
    """A variable that is gone would leave a command without its first words."""
    goals = sorted(set(re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), re.M)))
    command = ["make", "-n", "-B", "--warn-undefined-variables", *goals]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "undefined variable" not in done.stderr


def test_only_the_upload_may_ask_for_a_token() -> None:
    for path in WORKFLOWS:
        text = path.read_text(encoding="utf-8")
        assert "secrets." not in text
        assert "password:" not in text
        for name, job in read(path)["jobs"].items():
            assert ("permissions" in job) == (name == "publish")
    publish = read(ROOT / ".github" / "workflows" / "release.yml")["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["needs"] == "check"
