"""Define what `make demo` installs, and what it says meanwhile; where an error sends those who lack an
extra.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import pyps_commands
from pyps.errors import PypsError, how_to_install, needed

ROOT = Path(__file__).resolve().parents[2]
INSTALL = runpy.run_path(str(ROOT / "csrc" / "packaging" / "install.py"))


def names(extra: str) -> set[str]:
    return {requirement.partition(">")[0] for requirement in INSTALL["requirements"](extra)}


def test_the_demo_installs_what_it_needs_and_no_more() -> None:
    """The solvers, torch, pictures and its data; neither trainers nor documentation tools."""
    assert names("demo") >= {"cffi", "setuptools", "numpy", "scipy", "torch", "matplotlib", "scikit-learn"}
    assert not names("demo") & {"lightning", "mkdocs-material", "pytest", "transformers", "pyps-train[plan]"}
    assert names("dev") >= {"pulp", "pytest", "lightning"}


@pytest.mark.parametrize(
    ("line", "doing"),
    [
        ("Collecting torch==2.13.0", "looks for torch"),
        (
            "Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (192.1 MB)",
            "downloads torch (192.1 MB)",
        ),
        ("Using cached numpy-2.4.6-cp311-cp311-linux_x86_64.whl (16 MB)", "has numpy (16 MB)"),
        ("Processing /opt/wheels/torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl", "reads torch"),
        ("Requirement already satisfied: numpy>=1.26", "looks for packages"),
        ("Installing collected packages: mpmath, sympy, torch", "unpacks 3 packages: 0 MB so far"),
    ],
)
def test_what_is_said_of_pip(line: str, doing: str, capsys: Any) -> None:
    progress = INSTALL["Progress"](0.0, every=0.0)
    progress.read(line)
    progress.show()
    assert capsys.readouterr().out.endswith(f" s  pip {doing}\n")


def test_folders_may_vanish_while_they_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such are those of a package that pip replaces."""
    (tmp_path / "gone").mkdir()
    (tmp_path / "kept").write_bytes(bytes(1000))
    scan = os.scandir

    def scandir(path: Any) -> Any:
        if Path(path).name == "gone":
            os.rmdir(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert INSTALL["megabytes"](tmp_path) == 0.001


@pytest.mark.parametrize(
    ("noted", "source"),
    [
        (None, "pyps-train"),
        ('{"url": "file:///home/a%20b/pyps", "dir_info": {"editable": true}}', "/home/a b/pyps"),
        (
            '{"url": "file:///tmp/pyps_train-0.2.0-py3-none-any.whl"}',
            "/tmp/pyps_train-0.2.0-py3-none-any.whl",
        ),
        ('{"url": "https://example.org/pyps.git"}', "pyps-train"),
    ],
)
def test_an_error_says_how_to_install(
    noted: str | None, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return noted

    monkeypatch.setattr(pyps_commands, "distribution", lambda name: Installed())
    assert how_to_install("torch") == f"pip install '{source}[torch]'"
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.delitem(sys.modules, "scipy.optimize", raising=False)
    with pytest.raises(PypsError, match=r"scipy cannot be imported .* pip install '.*\[plan\]'"):
        needed("scipy.optimize", "plan")
