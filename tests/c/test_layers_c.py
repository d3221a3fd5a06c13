"""The arrows of csrc hold: what a folder may include, what a file may call, where policies may be named."""

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
# Headers on no floor: of a few files, or of what needs no handle.
BESIDE = {"policy/saps_bound.h", "store/failpoint.h", "store/layout.h", "store/wait.h", "store/words.h"}
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
    """The headers of a folder's floors, the lowest first: each includes the one before it."""
    top = {"store": "store/stores.h", "policy": "policy/runs.h"}[folder]
    found = [top]
    while below := [i for i in includes(CSRC / found[0]) if i.startswith(folder) and i not in BESIDE]:
        assert len(below) == 1, f"{found[0]} includes {below}: a floor stands on one other"
        found.insert(0, below[0])
    return found


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
def test_each_file_includes_its_own_floor_alone(folder: str) -> None:
    """The compiler then refuses a call upwards: the core is compiled with -Wmissing-prototypes."""
    order = floors(folder)
    for path in sources(folder):
        if path.suffix == ".c":
            found = {included for included in includes(path) if included.startswith(folder)} - BESIDE
            assert not found or found in [{floor} for floor in order], f"{path.name} includes {found}"


@pytest.mark.parametrize("folder", ["kernels", "policy", "store"])
def test_files_call_in_no_circle(folder: str) -> None:
    used = uses(folder)
    while free := [name for name, others in used.items() if not others & set(used)]:
        used = {name: others for name, others in used.items() if name not in free}
    assert not used, f"csrc/{folder}: {sorted(used)} call each other in a circle"


@pytest.mark.parametrize("folder", ["policy", "store"])
def test_functions_are_declared_in_the_section_of_their_file(folder: str) -> None:
    homes = defined(folder)
    for header in (path for path in sources(folder) if path.suffix == ".h"):
        parts = SECTION.split(header.read_text(encoding="utf-8"))
        for name, part in zip(parts[1::2], parts[2::2], strict=True):
            included = set(includes(CSRC / folder / f"{name}.c"))
            assert f"{folder}/{header.name}" in included, f"{name}.c includes {included}, not {header.name}"
            for function, end in FUNCTION.findall(COMMENT.sub("", part)):
                assert end != ";" or homes.get(function) == name, (
                    f"{folder}: {function} stands under {name}.c; it is in {homes.get(function)}.c"
                )
