"""How large the code is, and where it is tangled: one column for each version.

python benchmarks/size.py                    this working tree
python benchmarks/size.py REV .              a revision of git and a folder, side by side
python benchmarks/size.py REV . --details    also names what each figure counts, for the last column

Only pyps/, solver/, profiler/ and csrc/ count, and of these what is written by hand. Blank lines count.
`make reference` writes the working tree's figures and the rooms' budgets to a page.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tarfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TypeVar

from record import table

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("pyps", "solver", "profiler", "csrc")
# Lines that a room may have. One that has more takes nothing in until it is within its budget.
BUDGETS = {
    "pyps/agreement": 320,  # was in pyps/torch, which pyps/sharding cannot import
    "pyps/checkpoint": 600,
    "pyps/cli": 2_600,
    "pyps/formats": 2_100,
    "pyps/gain": 550,
    "pyps/metrics": 260,
    "pyps/native": 1_900,
    "pyps/ray": 700,
    "pyps/remote": 3_200,
    "pyps/report": 2_000,
    "pyps/run": 2_200,
    "pyps/sharding": 1_760,  # as torch's fully_shard, with its state dicts and norms; ZeRO-1; bytes held
    "pyps/shards": 2_300,
    "pyps/simulate": 2_200,
    "pyps/step": 900,
    "pyps/store": 2_000,
    "pyps/tasks": 400,
    "pyps/torch": 4_600,
    "pyps/worker": 5_000,
    "solver": 7_200,
    "profiler": 2_100,
    "csrc": 12_000,
}
MOST_FUNCTION_LINES = 60
MOST_FILE_LINES = 700
MOST_METHODS = 20
MOST_PARAMETERS = 8
FEW_LINES = 70  # of a module that only one other imports: it may belong to that one
# What a user sets of a run. A signature, class, call or dict with ENOUGH_OPTIONS of them is a list of them.
OPTIONS = frozenset(
    {"policy", "codec", "depth", "micro_batch", "samples", "seed", "round_timeout"}
    | {"allow_nonfinite", "run_dir", "resume", "journal"}
)
ENOUGH_OPTIONS = 5
BUILT = re.compile(r"pyps/(_native\.c|include/|lib/)")
GENERATED = re.compile(r"docs/reference/\w+\.md|pyps/formats/schemas/.+\.json")
ENVIRONMENT = re.compile(r"PYPS_[A-Z][A-Z0-9_]*")
C_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
C_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
# A definition as clang-format lays it out: its name in column 0's declaration, its end a brace in column 0.
C_FUNCTION = re.compile(
    r"^(?!typedef|struct \w+ \{|enum|union|#)[A-Za-z][^;{}#]*?\b(\w+)\([^;{}]*\) \{\n", re.M
)

Tree = Mapping[str, str]  # path -> text
Node = TypeVar("Node", bound=ast.AST)
Measure = Callable[[Tree], list[str]]  # the names of what it counts


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="*", default=["."], metavar="REV|FOLDER")
    parser.add_argument(
        "--details", action="store_true", help="name what each figure of the last column counts"
    )
    given = parser.parse_args()
    trees = {version: read_tree(version) for version in given.versions}
    text = table([["", *trees], *rows(list(trees.values()))])
    print(text)
    if given.details:
        for name, measure in MEASURES.items():
            print(f"\n{name}:", *measure(trees[given.versions[-1]]), sep="\n  ")


def page() -> str:
    """The working tree's figures and its rooms' budgets, as a page of the reference."""
    tree = read_tree(str(ROOT))
    lines = lines_by_room(tree)
    rooms = [[f"`{room}`", f"{lines[room]:,}", f"{budget:,}"] for room, budget in BUDGETS.items()]
    figures = [[name, f"{len(measure(tree)):,}"] for name, measure in MEASURES.items()]
    by_room, others = table([["room", "lines", "budget"], *rooms]), table([["what", "how many"], *figures])
    return f"# Sizes\n\n{by_room}\n\n{others}\n"


def read_tree(version: str) -> Tree:
    """The files of a folder, or else of a revision of this repository. Exits if it is neither."""
    if Path(version).is_dir():
        return {path: (Path(version) / path).read_text("utf-8") for path in files_of(Path(version))}
    found = subprocess.run(["git", "archive", version, *ROOMS, "docs"], cwd=ROOT, capture_output=True)
    if found.returncode:
        raise SystemExit(f"{version}: neither a folder nor a revision: {found.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
        members = {m.name: archive.extractfile(m) for m in archive if m.isfile() and counts(m.name)}
        return {name: file.read().decode() for name, file in members.items() if file}


def files_of(folder: Path) -> Iterator[str]:
    """The paths that count; in a git working tree without those that git ignores."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    inside = listed.stdout.splitlines() if listed.returncode == 0 else []
    paths = inside or (path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    yield from sorted(path for path in set(paths) if counts(path) and (folder / path).is_file())


def counts(path: str) -> bool:
    """Return whether a path is of the code, or generated from it."""
    is_source = path.endswith((".py", ".c", ".h")) and path.startswith(tuple(f"{room}/" for room in ROOMS))
    return (is_source and not BUILT.match(path)) or bool(GENERATED.fullmatch(path))


def rows(trees: list[Tree]) -> list[list[str]]:
    """A row for each figure, lines by room first."""
    lines = [lines_by_room(tree) for tree in trees]
    found = [
        [f"lines of {room}", *(f"{c[room]:,}" for c in lines)]
        for room in sorted(set().union(*lines), key=order)
    ]
    return found + [
        [name, *(f"{len(measure(tree)):,}" for tree in trees)] for name, measure in MEASURES.items()
    ]


def order(room: str) -> tuple[int, str]:
    """Rooms in the order of ROOMS, each before its parts."""
    return ROOMS.index(room.split("/")[0]), room


def lines_by_room(tree: Tree) -> Counter[str]:
    """Lines of each room, and of each package of pyps."""
    found: Counter[str] = Counter()
    for path, text in sources(tree):
        top, *rest = path.split("/")
        found[top] += text.count("\n")
        if top == "pyps" and len(rest) > 1:
            found[f"pyps/{rest[0]}"] += text.count("\n")
    return found


def sources(tree: Tree, *suffixes: str) -> Iterator[tuple[str, str]]:
    """The code's files: path and text."""
    for path, text in sorted(tree.items()):
        if path.endswith(suffixes or (".py", ".c", ".h")):
            yield path, text


@cache
def parse(text: str) -> ast.Module:
    """A Python file's tree, made once."""
    return ast.parse(text)


@cache
def walked(text: str) -> tuple[ast.AST, ...]:
    """All nodes of a Python file, walked once."""
    return tuple(ast.walk(parse(text)))


def nodes(tree: Tree, *kinds: type[Node]) -> Iterator[tuple[str, Node]]:
    """Each node of these kinds, of each Python file."""
    for path, text in sources(tree, ".py"):
        for node in walked(text):
            if isinstance(node, kinds):
                yield path, node


def modules(tree: Tree) -> list[str]:
    """Python files."""
    return [path for path, _ in sources(tree, ".py")]


def c_files(tree: Tree) -> list[str]:
    """C files and headers."""
    return [path for path, _ in sources(tree, ".c", ".h")]


def long_functions(tree: Tree) -> list[str]:
    """Functions past MOST_FUNCTION_LINES, decorators apart."""
    found = [
        f"{path}: {node.name}: {(node.end_lineno or 0) - node.lineno + 1}"
        for path, node in nodes(tree, ast.FunctionDef, ast.AsyncFunctionDef)
        if (node.end_lineno or 0) - node.lineno + 1 > MOST_FUNCTION_LINES
    ]
    for path, text in sources(tree, ".c", ".h"):
        for name, body in c_functions(text):
            if (lines := body.count("\n") + 1) > MOST_FUNCTION_LINES:
                found.append(f"{path}: {name}: {lines}")
    return found


def c_functions(text: str) -> Iterator[tuple[str, str]]:
    """Each function that C code defines: its name, and its text from the declaration to the last brace."""
    for found in C_FUNCTION.finditer(text):
        end = text.find("\n}", found.end() - 1)
        yield found[1], text[found.start() : end + 2]


def long_files(tree: Tree) -> list[str]:
    """Files past MOST_FILE_LINES."""
    return [f"{path}: {n}" for path, text in sources(tree) if (n := text.count("\n")) > MOST_FILE_LINES]


def wide_classes(tree: Tree) -> list[str]:
    """Classes past MOST_METHODS public methods and properties."""
    found = []
    for path, node in nodes(tree, ast.ClassDef):
        methods = {n.name for n in node.body if isinstance(n, ast.FunctionDef) and n.name[0] != "_"}
        if len(methods) > MOST_METHODS:
            found.append(f"{path}: {node.name}: {len(methods)}")
    return found


def wide_constructors(tree: Tree) -> list[str]:
    """`__init__` methods past MOST_PARAMETERS parameters, without self."""
    return [
        f"{path}: {kind.name}: {len(names) - 1}"
        for path, kind in nodes(tree, ast.ClassDef)
        for node in kind.body
        if isinstance(node, ast.FunctionDef)
        and node.name == "__init__"
        and len(names := parameters(node)) - 1 > MOST_PARAMETERS
    ]


def parameters(node: ast.FunctionDef) -> list[str]:
    """The names of a function's parameters."""
    return [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]


def option_lists(tree: Tree) -> list[str]:
    """Places that list what a user may set of a run."""
    return [
        f"{path}:{getattr(node, 'lineno', 1)}"
        for path, node in nodes(tree, ast.FunctionDef, ast.ClassDef, ast.Call, ast.Dict)
        if len(OPTIONS & {name.lower() for name in names_in(node)}) >= ENOUGH_OPTIONS
    ]


def names_in(node: ast.AST) -> Iterable[str]:
    """The names that a signature, a class body, a call or a dict lists."""
    if isinstance(node, ast.FunctionDef):
        return parameters(node)
    if isinstance(node, ast.ClassDef):
        targets = [
            target for n in node.body for target in getattr(n, "targets", [getattr(n, "target", None)])
        ]
        return [target.id for target in targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.Call):
        return [keyword.arg or "" for keyword in node.keywords]
    if isinstance(node, ast.Dict):
        return [ast.unparse(key).rpartition(".")[2].strip("'") for key in node.keys if key]
    return ()


def environment(tree: Tree) -> list[str]:
    """PYPS_* variables of the environment that the code reads or writes."""
    constants = set(
        ENVIRONMENT.findall("".join(C_STRING.sub("", text) for _, text in sources(tree, ".c", ".h")))
    )
    found = {
        node.value
        for _, node in nodes(tree, ast.Constant)
        if isinstance(node.value, str) and ENVIRONMENT.fullmatch(node.value)
    } - constants
    in_c = re.compile(r'getenv\("(PYPS_\w+)"\)')
    return sorted(found.union(*(in_c.findall(text) for _, text in sources(tree, ".c", ".h"))))


def python_circles(tree: Tree) -> list[str]:
    """Python files that import each other in a circle, also inside functions or for type checkers only."""
    names = {module_name(path): path for path in modules(tree)}
    return circles({path: imported(text, names) - {path} for path, text in sources(tree, ".py")})


def module_name(path: str) -> str:
    """pyps.solver.plan for solver/plan.py."""
    parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(parts if parts[0] == "pyps" else ["pyps", *parts])


def imported(text: str, names: Mapping[str, str]) -> set[str]:
    """The files that a module imports, out of those named: of a package and its module, the module."""
    found: set[str] = set()
    for node in walked(text):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inner & names.keys()) or {node.module}
    return {names[name] for name in found & names.keys()}


def c_circles(tree: Tree) -> list[str]:
    """C files that call each other's functions in a circle."""
    texts = {path: C_STRING.sub('""', C_COMMENT.sub("", text)) for path, text in sources(tree, ".c", ".h")}
    homes = {
        name: path for path, text in texts.items() for name, body in c_functions(text) if body[:6] != "static"
    }
    calls = {path: homes.keys() & re.findall(r"\b(\w+)\(", text) for path, text in texts.items()}
    return circles({path: {homes[name] for name in found} - {path} for path, found in calls.items()})


def circles(graph: Mapping[str, set[str]]) -> list[str]:
    """The nodes of a graph that can reach themselves."""
    return [node for node in sorted(graph) if node in reached(graph, node)]


def reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """The nodes that a path of at least one arrow leads to."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def public_front(tree: Tree) -> list[str]:
    """The names that `pyps` offers."""
    return public_names(tree.get("pyps/__init__.py", ""))


def public_packages(tree: Tree) -> list[str]:
    """The names that the packages below `pyps` offer."""
    packages = [(path, text) for path, text in sources(tree, "/__init__.py") if path != "pyps/__init__.py"]
    return [f"{module_name(path)}.{name}" for path, text in packages for name in public_names(text)]


def public_names(text: str) -> list[str]:
    """The `__all__` of a module: a list, or the sorted keys of a dict."""
    values = {
        ast.unparse(node.targets[0]): node.value for node in parse(text).body if isinstance(node, ast.Assign)
    }
    names = values.get("__all__")
    if isinstance(names, ast.Call):
        names = values[ast.unparse(names.args[0])]
    listed = getattr(names, "keys", None) or getattr(names, "elts", [])
    return [ast.literal_eval(name) for name in listed]


def public_c(tree: Tree) -> list[str]:
    """The functions that C's public headers declare."""
    declared = re.compile(r"^PYPS_API [^;(]*?(pyps_\w+)\(", re.MULTILINE)
    return [name for _, text in sources(tree, ".h") for name in declared.findall(text)]


def generated(tree: Tree) -> list[str]:
    """Files in git that the build or a script can make."""
    return sorted(path for path in tree if GENERATED.fullmatch(path))


def small_and_lonely(tree: Tree) -> list[str]:
    """Modules of fewer than FEW_LINES lines, with one importer, apart from `__init__` files."""
    names = {module_name(path): path for path in modules(tree)}
    importers: dict[str, set[str]] = defaultdict(set)
    for path, text in sources(tree, ".py"):
        for other in imported(text, names) - {path}:
            importers[other].add(path)
    return [
        f"{path}: {text.count(chr(10))} lines, for {min(importers[path])}"
        for path, text in sources(tree, ".py")
        if len(importers[path]) == 1 and text.count("\n") < FEW_LINES and not path.endswith("/__init__.py")
    ]


MEASURES: dict[str, Measure] = {
    "Python files": modules,
    "C files": c_files,
    f"functions past {MOST_FUNCTION_LINES} lines": long_functions,
    f"files past {MOST_FILE_LINES} lines": long_files,
    f"classes past {MOST_METHODS} public methods": wide_classes,
    f"constructors past {MOST_PARAMETERS} parameters": wide_constructors,
    "places that list a run's options": option_lists,
    "PYPS_* variables": environment,
    "Python files in circles of imports": python_circles,
    "C files in circles of calls": c_circles,
    "public names of pyps": public_front,
    "public names of its packages": public_packages,
    "functions of pyps.h": public_c,
    "generated files in git": generated,
    f"modules under {FEW_LINES} lines with one importer": small_and_lonely,
}

if __name__ == "__main__":
    main()
