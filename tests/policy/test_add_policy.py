"""docs/how-to/add-policy.md: a copy of the tree that follows it has the policy, in three places."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "add-policy.md").read_text(encoding="utf-8")
USED = """
import numpy as np
import pyps
from pyps.store import Store

assert pyps.__file__.startswith({root!r}), pyps.__file__
policy = pyps.store.policies.policy_named("fedasync:alpha=1,lookahead=false")
initial = {{"w": np.zeros(4)}}
with Store.create("added", initial, batches=[2, 2], policy=policy) as one, Store.open("added") as two:
    one.join(0), two.join(1)
    flats = [np.empty(store.layout.flat_elements, np.float32) for store in (one, two)]
    for store, flat in zip((one, two), flats, strict=True):
        store.start(), store.pull(flat)
    for store in (one, two):
        staging = store.stage()
        staging.flat[:] = 1
        store.push(staging, 2, [pyps.Hyper(1.0)])
    flat = two.pull(flats[1])[0]
# Two pushes of half a global batch: half a step, and of the one of staleness 1 half of that.
assert np.allclose(flat[:4], -0.75), flat[:4]
"""


def block(language: str, index: int = 0) -> str:
    found = re.findall(rf"^    ```{language}\n(.*?)^    ```$", PAGE, re.M | re.S)
    return textwrap.dedent(found[index])


@pytest.mark.thorough
def test_the_page_adds_a_policy(tmp_path: Path, shm: Path) -> None:
    for name in ("csrc", "pyps", "tests/c"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so*", "__pycache__", "lib")
        )
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "csrc/policy/policy_fedasync.c").write_text(block("c"), encoding="utf-8")
    rows, classes = tmp_path / "csrc/policy/policy.h", tmp_path / "pyps/store/policies.py"
    last = "row(quorum, PYPS_QUORUM)"
    assert rows.read_text().count(last) == 1
    rows.write_text(rows.read_text().replace(last, block("c", 1).strip()), encoding="utf-8")
    before = "@dataclass(frozen=True, kw_only=True)\nclass Custom(Policy):"
    assert classes.read_text().count(before) == 1
    classes.write_text(classes.read_text().replace(before, f"{block('py')}\n\n{before}"), encoding="utf-8")

    def run(*command: str) -> None:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    run(sys.executable, "setup.py", "-q", "build_ext", "--inplace")
    run(sys.executable, "-c", USED.format(root=str(tmp_path)))
    run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/c/test_layers_c.py")
