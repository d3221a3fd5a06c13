"""The parts import in one direction. Parsed, not run, so that lazy imports inside functions count too."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from parsed import tree

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"pyps": ROOT / "pyps", "pyps.solver": ROOT / "solver", "pyps.profiler": ROOT / "profiler"}

# Upwards: a part may import those of its layer and of layers below it. A module that is not named here fails
# the test.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"pyps._native"}),
    frozenset({"pyps.errors"}),
    frozenset({"pyps.formats"}),
    frozenset({"pyps.agreement", "pyps.tasks", "pyps.metrics"}),
    frozenset({"pyps.native", "pyps.solver", "pyps.profiler", "pyps.step"}),
    frozenset({"pyps.store"}),
    frozenset({"pyps.remote"}),
    frozenset({"pyps.shards"}),  # a wing: see WINGS
    frozenset({"pyps.checkpoint"}),
    frozenset({"pyps.worker", "pyps.report"}),
    frozenset({"pyps.sharding"}),
    frozenset({"pyps.run", "pyps.simulate", "pyps.torch"}),
    frozenset({"pyps.gain"}),
    frozenset({"pyps.ray"}),
    frozenset({"pyps.cli"}),
    frozenset({"pyps.__main__"}),
    frozenset({"pyps"}),  # the front: names loaded when first used
)
# No other part imports these: a module of a part below knows the wing by its name alone, in this constant.
WINGS = {"pyps.shards": "pyps.remote.site.WING"}
MAX_TOP_FILES = 10
HEIGHT = {part: height for height, parts in enumerate(LAYERS) for part in parts}

# What a part must not import, wherever its layer is.
BANNED = {
    "pyps.simulate": ("pyps.store.store", "pyps.worker.step.loop", "pyps.run", "pyps.torch"),
    "pyps.torch": ("pyps.store", "pyps.native", "pyps.worker.step.loop", "pyps.run", "pyps.simulate"),
    "pyps.run": ("torch", "pyps.worker.step.loop", "pyps.simulate", "pyps.torch"),
    "pyps.sharding": ("pyps.store", "pyps.native", "pyps.worker", "pyps.run", "pyps.simulate"),
    "pyps.solver": ("torch", "pyps.native", "pyps.profiler.measure"),
    "pyps.profiler": ("pyps.native", "pyps.solver"),
    "pyps.native": ("torch", "pyps.solver", "pyps.profiler"),
    "pyps.remote": ("torch",),
    "pyps.step": ("torch", "numpy", "threading", "socket"),
    "pyps.report": ("torch", "pyps.worker"),
    "pyps.formats": ("numpy", "torch"),
    "pyps.errors": ("numpy", "torch", "msgspec"),
}


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the three packages: its dotted name and file."""
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join((package, *(p for p in parts if p != "__init__")))
            yield name, path


@cache
def imports(name: str, path: Path, functions: bool = True) -> frozenset[str]:
    """The modules that a file imports, save those for type checkers only; functions: also within them."""
    found: set[str] = set()
    for node in _outside_type_checking(tree(path), functions):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative imports hide what is imported"
            module = node.module or ""
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def _outside_type_checking(node: ast.AST, functions: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.FunctionDef) and not functions:
            continue
        yield child
        yield from _outside_type_checking(child, functions)


def first_imports(name: str, path: Path) -> set[str]:
    """The modules of ours that have to be there before this one: its imports outside functions.

    A package's __init__ comes before its modules, except before those that it imports itself.
    """
    found = set(imports(name, path, functions=False))
    found |= {module.rpartition(".")[0] for module in found}
    found |= {module.rpartition(".")[0] for module in found}
    return {m for m in found if m in MODULES and m != name and not name.startswith(m + ".")}


def part_of(module: str) -> str | None:
    """The longest named part that a module belongs to; None for what is not pyps."""
    while module not in HEIGHT or module == "pyps":
        if "." not in module:
            return "pyps" if module == "pyps" else None
        module = module.rpartition(".")[0]
    return module


MODULES = dict(modules())


def test_every_module_has_a_layer() -> None:
    unplaced = [name for name in MODULES if name != "pyps" and part_of(name) == "pyps"]
    assert not unplaced, "say in LAYERS where these belong"


@pytest.mark.parametrize("name", sorted(set(MODULES) - {"pyps"}))
def test_no_part_imports_one_above_it(name: str) -> None:
    part = part_of(name)
    assert part is not None
    for imported in sorted(imports(name, MODULES[name])):
        other = part_of(imported)
        if other is not None and other != part:
            assert HEIGHT[other] <= HEIGHT[part], f"{name} imports {imported}, which is above it"


@pytest.mark.parametrize("part", sorted(BANNED))
def test_what_a_part_must_not_import(part: str) -> None:
    mine = [name for name in MODULES if name == part or name.startswith(part + ".")]
    assert mine, f"no module {part}"
    for name in mine:
        for imported in imports(name, MODULES[name]):
            for banned in BANNED[part]:
                assert not (imported + ".").startswith(banned + "."), f"{name} imports {imported}"


@pytest.mark.parametrize("wing", sorted(WINGS))
def test_no_part_imports_a_wing(wing: str) -> None:
    outside = {name: path for name, path in MODULES.items() if not (name + ".").startswith(wing + ".")}
    for name, path in outside.items():
        found = {imported for imported in imports(name, path) if (imported + ".").startswith(wing + ".")}
        assert not found, f"{name} imports {found}: {wing} is found by its name, in {WINGS[wing]}"
    module, _, constant = WINGS[wing].rpartition(".")
    named = {name for name, path in outside.items() if f'"{wing}.' in path.read_text(encoding="utf-8")}
    assert named == {module}, "one place names it"
    assert getattr(importlib.import_module(module), constant) in MODULES


def test_no_command_waits_for_torch() -> None:
    """Its import takes a second and 300 MB; a launcher needs none of it."""
    needed = {name for name in MODULES if part_of(name) in ("pyps.cli", "pyps.run")}
    assert "pyps.run.main" in needed
    while more := {m for name in needed for m in first_imports(name, MODULES[name])} - needed:
        needed |= more
    first = {name: imports(name, MODULES[name], functions=False) for name in needed}
    assert not {name for name, found in first.items() if "torch" in {i.partition(".")[0] for i in found}}


def test_the_top_of_pyps_has_few_files() -> None:
    """A module belongs to a room, not to the top; built files count too."""
    files = sorted(path.name for path in (ROOT / "pyps").iterdir() if path.is_file())
    assert len(files) <= MAX_TOP_FILES, files


def test_native_alone_imports_the_extension() -> None:
    importers = {
        name for name, path in MODULES.items() if any("_native" in i.split(".") for i in imports(name, path))
    }
    assert importers == {"pyps.native.compiled"}


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Which module is imported first decides whether such a circle works."""
    graph = {name: first_imports(name, path) for name, path in MODULES.items()}
    while leaves := {name for name, needed in graph.items() if not needed}:
        graph = {name: needed - leaves for name, needed in graph.items() if name not in leaves}
    assert not graph, "these are in a circle, or need one that is"
