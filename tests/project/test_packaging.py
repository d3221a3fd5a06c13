"""Define what a user installs: the wheel's tag and contents, and that it works outside the source folder."""

from __future__ import annotations

import email
import os
import re
import runpy
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from pyps import native

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # the first test builds the wheel

ROOT = Path(__file__).resolve().parents[2]
ABI = native.abi_version()
PACKAGES = {"pyps": "pyps", "pyps.solver": "solver", "pyps.profiler": "profiler"}
EVERYTHING = """
import sys
import pyps, pyps.native, pyps.solver, pyps.profiler
for module in (pyps, pyps.native, pyps.solver, pyps.profiler):
    assert module.__file__.startswith(sys.argv[1]), module.__file__
assert pyps.native.abi_version() == int(sys.argv[2])
from pyps.formats import schema
assert schema("plan")
try:
    import solver
except ImportError:
    pass
else:
    raise SystemExit(f"a bare solver can be imported: {solver.__file__}")
"""


def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_one_wheel_for_all_pythons_of_a_platform(wheel: Path) -> None:
    assert wheel.name.startswith("pyps_train-")
    assert "-cp311-abi3-linux_" in wheel.name
    shared = sorted(name for name in names(wheel) if ".so" in name)
    assert shared == ["pyps/_native.abi3.so", "pyps/lib/libpyps.so", f"pyps/lib/libpyps.so.{ABI}"]


def links(page: str) -> list[str]:
    """Where links and pictures of a page lead, rendered as registries render it."""
    renderer = pytest.importorskip("readme_renderer.markdown")
    rendered = renderer.render(page)
    assert rendered
    assert "<table>" in rendered
    found = re.findall(r'(?:href|src)="([^"]*)"', rendered)
    return [
        target for target in found if not target.startswith("#user-content-")
    ]  # of each heading to itself


def test_its_page_works_on_a_registry(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(next(n for n in archive.namelist() if n.endswith("METADATA"))).decode()
    metadata = email.message_from_string(text)
    assert metadata["Description-Content-Type"] == "text/markdown"
    page = metadata.get_payload()
    assert page.startswith("# pyps")
    assert not [target for target in links(page) if not target.startswith("https://")]

    address = "https://example.org/pyps"
    project = (
        (ROOT / "pyproject.toml")
        .read_text()
        .replace("[project.scripts]", f'[project.urls]\nRepository = "{address}"\n\n[project.scripts]')
    )
    (tmp_path / "pyproject.toml").write_text(project)
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text())
    package_page = runpy.run_path(str(ROOT / "csrc" / "packaging" / "page.py"))["package_page"]
    found = links(package_page(tmp_path))
    assert len(found) > 30
    inside = [target.removeprefix(f"{address}/").split("/", 2) for target in found if address in target]
    assert {kind for kind, _, _ in inside} == {"raw", "blob"}
    assert all((ROOT / path.partition("#")[0]).exists() for _, _, path in inside)
    assert not [target for target in found if not target.startswith("https://")]


def test_nothing_but_pyps_at_the_top(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in names(wheel)}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"pyps", "pyps_commands.py"}
    with zipfile.ZipFile(wheel) as archive:
        top_level = next(n for n in archive.namelist() if n.endswith("top_level.txt"))
        assert archive.read(top_level).split() == [b"pyps", b"pyps_commands"]


@pytest.mark.parametrize("overwritten", [True, False])
def test_another_program_of_the_name(wheel: Path, tmp_path: Path, overwritten: bool) -> None:
    """Registries have one. Installed after this it replaces pyps/__init__.py; before, it loses its own."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    other = tmp_path / "pyps-0.6.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: pyps\nVersion: 0.6.0\n")
    (other / "RECORD").write_text("pyps/__init__.py,,\npyps/_des.py,,\n")
    if overwritten:
        (tmp_path / "pyps" / "__init__.py").write_text("from ._pyps import Connection\n")
    command = [sys.executable, "-c", "import pyps_commands; pyps_commands.main()", "--version"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert len(done.stderr.splitlines()) == 1
    assert "pyps 0.6.0" in done.stderr
    assert "Traceback" not in done.stderr
    if overwritten:
        assert done.returncode == 2
        assert "pip uninstall -y pyps; pip install --force-reinstall --no-deps" in done.stderr
    else:
        assert done.returncode == 0
        assert re.fullmatch(r"[0-9.]+\n", done.stdout)


def test_types_and_every_module_are_in_it(wheel: Path) -> None:
    inside = set(names(wheel))
    assert {"pyps/py.typed", "pyps/_native.pyi"} <= inside
    for package, folder in PACKAGES.items():
        for path in (ROOT / folder).rglob("*.py"):
            name = f"{package.replace('.', '/')}/{path.relative_to(ROOT / folder)}"
            assert name in inside, f"{name} is not in the wheel"


def test_declared_packages_are_the_folders() -> None:
    declared = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = set()
    for package, folder in PACKAGES.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join((package, *init.parent.relative_to(ROOT / folder).parts)))
    assert declared == found


def test_it_works_from_elsewhere(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "unpacked")
    unpacked = str((tmp_path / "unpacked").resolve())
    code = f"import sys; sys.path.insert(0, {unpacked!r})\n{EVERYTHING}"
    done = subprocess.run(
        [sys.executable, "-c", code, unpacked, str(ABI)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_constraints_pin_torch() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert sum(line.startswith("torch==") for line in lines) == 1
