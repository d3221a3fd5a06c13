"""The arrows of csrc hold: what a folder may include, what a file may call, where policies may be named."""

from __future__ import annotations

import fnmatch
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
POLICY = re.compile(r"\bPYPS_(BSP|ASP|BACKUP|SOFTSYNC|SSP|DSSP|DYNSGD|SAPS|R2SP|HPS)\b")


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


COMMENT = re.compile(r"/\*.*?\*/", re.S)
FLOOR = re.compile(r"^ \*   \w+ {2,}(\w+\*?(?:, \w+\*?)*)$", re.M)
SECTION = re.compile(r"^/\* (\w+)\.c(?:: [^*]*)? \*/\n", re.M)
FUNCTION = re.compile(
    r"^(?!static|typedef|return)[A-Za-z_][\w \*]*?\b(\w+)\([^;{}]*?\)\s*(?:__attribute__[^;{]*)?([{;])", re.M
)
TABLE = re.compile(r"^const struct \w+ (\w+) = \{", re.M)
STATIC = re.compile(r"^static [^;{=]*?\b(\w+)\([^;{]*\)\s*\{", re.M)


def code(path: Path) -> str:
    """The file without comments and strings."""
    return re.sub(r'"(?:\\.|[^"\\\n])*"', '""', COMMENT.sub("", path.read_text(encoding="utf-8")))


def floors(folder: str) -> list[str]:
    """The files of a folder in the order that its header says: each may call those before it."""
    header = {"store": "store.h", "policy": "policy.h"}[folder]
    head = (CSRC / folder / header).read_text(encoding="utf-8").split("WHICH FILE CALLS WHICH", 1)[1]
    listed = head.split("*/", 1)[0]
    names = [name for line in FLOOR.findall(listed) for name in line.split(", ")]
    others = sorted({path.stem for path in sources(folder) if path.suffix == ".c"} - set(names))
    return [file for name in names for file in (fnmatch.filter(others, name) if "*" in name else [name])]


def defined(folder: str) -> dict[str, str]:
    """The file that defines each function, and each table, that other files of the folder may use."""
    found: dict[str, str] = {}
    for path in sources(folder):
        if path.suffix == ".c":
            names = [name for name, end in FUNCTION.findall(code(path)) if end == "{"] + TABLE.findall(
                code(path)
            )
            assert not (both := set(names) & set(found)), f"{path.name} defines {both} a second time"
            found |= dict.fromkeys(names, path.stem)
    return found


def uses(folder: str) -> dict[str, set[str]]:
    """The other files of a folder whose functions and tables each file uses."""
    homes, found = defined(folder), {}
    for path in sources(folder):
        if path.suffix == ".c":
            calls = set(re.findall(r"(?<![.>\w])(\w+)\(|&(\w+)", code(path)))
            names = {name for call in calls for name in call} - set(STATIC.findall(code(path)))
            found[path.stem] = {homes[name] for name in names & set(homes)} - {path.stem}
    return found


@pytest.mark.parametrize("folder", ["policy", "store"])
def test_files_call_only_the_floors_below(folder: str) -> None:
    order = floors(folder)
    used = uses(folder)
    assert sorted(order) == sorted(used), f"csrc/{folder}: the floors in its header name other files"
    for name, others in used.items():
        above = sorted(other for other in others if order.index(other) >= order.index(name))
        assert not above, f"{folder}/{name}.c calls {above}, which stand above it"


def test_kernels_call_in_no_circle() -> None:
    used = uses("kernels")
    while free := [name for name, others in used.items() if not others & set(used)]:
        used = {name: others for name, others in used.items() if name not in free}
    assert not used, f"csrc/kernels: {sorted(used)} call each other in a circle"


@pytest.mark.parametrize("folder", ["policy", "store"])
def test_functions_are_declared_in_the_section_of_their_file(folder: str) -> None:
    homes, declared = defined(folder), {}
    for path in sources(folder):
        parts = SECTION.split(path.read_text(encoding="utf-8")) if path.suffix == ".h" else []
        for name, part in zip(parts[1::2], parts[2::2], strict=True):
            declared |= {
                function: name for function, end in FUNCTION.findall(COMMENT.sub("", part)) if end == ";"
            }
    for function, name in declared.items():
        assert homes.get(function) == name, (
            f"{folder}: {function} stands under {name}.c; it is in {homes.get(function)}.c"
        )
    public = set(re.findall(r"\b(pyps_\w+)\(", code(CSRC / "pyps.h")))
    tables = {name for name in homes if name.startswith("policy_") and name not in declared}
    own_headers = {name for name in homes if (CSRC / folder / f"{homes[name]}.h").is_file()}
    lost = set(homes) - set(declared) - public - tables - own_headers
    assert not lost, f"csrc/{folder}: {sorted(lost)} are in no section; make them static, or declare them"
