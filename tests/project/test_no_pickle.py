"""No file is read as a pickle: SECURITY.md's first promise about files. The adapters' resume is tried with
planted ones in tests/torch/test_trainers.py.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from parsed import holding, nodes

ROOT = Path(__file__).resolve().parents[2]
PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
LOADERS = {"torch.load", "torch.jit.load", "np.load", "numpy.load", "pandas.read_pickle"}
SUSPECT = rf"\b({'|'.join(PICKLES)}|load|read_pickle|register_for_checkpointing)\b"


def sources() -> Iterator[Path]:
    for room in ("pyps", "profiler", "solver"):
        yield from (ROOT / room).rglob("*.py")


def pickles_in(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield what imports a pickle's module, or calls a loader that takes pickles unless it is forbidden."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.partition(".")[0] in PICKLES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PICKLES:
            yield str(node.module)
        elif isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in LOADERS:
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if given.get("weights_only") != "True":
                yield name
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("register_for_checkpointing"):
            yield "register_for_checkpointing"


@pytest.mark.promise("never with pickle")
def test_nothing_reads_pickles() -> None:
    found = {path: list(pickles_in(nodes(path))) for path in holding(SUSPECT, sources())}
    assert not {str(path): names for path, names in found.items() if names}


def test_the_search_finds_them() -> None:
    unsafe = "torch.load(p, weights_only=False)"
    for line in ("import pickle", "from dill import loads", "torch.load(p)", unsafe):
        assert list(pickles_in(ast.walk(ast.parse(line)))), line
    assert not list(pickles_in(ast.walk(ast.parse("torch.load(p, weights_only=True)"))))
