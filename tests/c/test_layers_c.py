"""The arrows of csrc hold: what each folder may include, and where policies may be named."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"

# Outside its own folder, a file of the folder includes only these; "" is csrc itself.
ALLOWED = {
    "": set(),
    "kernels": {"pyps.h", "error.h"},
    "policy": {"pyps.h", "error.h"},
    "store": {"pyps.h", "error.h", "kernels/", "policy/"},
}
POLICY = re.compile(r"\bPYPS_(BSP|ASP|BACKUP|SOFTSYNC|SSP|DSSP|DYNSGD|CONSGD|DCASGD|SAPS|R2SP|HPS)\b")


def sources(folder: str) -> list[Path]:
    found = sorted(p for p in (CSRC / folder).glob("*.[ch]"))
    assert found, f"no sources in csrc/{folder}"
    return found


def includes(path: Path) -> Iterator[str]:
    yield from re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(encoding="utf-8"), re.M)


def test_every_folder_has_its_arrows() -> None:
    folders = {path.parent.relative_to(CSRC).as_posix() for path in CSRC.rglob("*.[ch]")}
    assert {"" if folder == "." else folder for folder in folders} == set(ALLOWED)


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_includes_point_one_way(folder: str) -> None:
    for path in sources(folder):
        for included in includes(path):
            assert (CSRC / included).is_file(), f"{path.name} includes {included}: write the path from csrc"
            home = Path(included).parent.as_posix().replace(".", "")
            allowed = home == folder or included in ALLOWED[folder] or f"{home}/" in ALLOWED[folder]
            assert allowed, f"{folder}/{path.name} includes {included}"


def test_policies_are_named_in_their_own_folder_only() -> None:
    for folder in set(ALLOWED) - {"policy"}:
        for path in sources(folder):
            if path.name != "pyps.h":
                named = POLICY.findall(path.read_text(encoding="utf-8"))
                assert not named, f"{path.name} asks for {named}: ask pyps_get_policy_needs instead"
