"""Tests look at pyps as its users do, through public members. Each exception has its reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from parsed import holding, nodes

TESTS = Path(__file__).resolve().parents[1]
OWN = {"self", "cls", "os", "torch"}  # their private members are not pyps's

FAULT = "a fault is put in that no call of a user can cause at this place"
WITHIN = "what attach() made: its buffers, its transport, its step"
HOSTILE = "a hostile client uses what an honest one keeps to itself"
EXCEPTIONS = {
    "helpers/ddp_balance_jobs.py": "ranks that serve all tests forget that an earlier one weighted",
    "helpers/ranks.py": "torch names groups by a count that it gives no other way to set",
    "helpers/replica_jobs.py": "emulated devices take the place of measured ones",
    "helpers/shard_tools.py": FAULT,
    "helpers/trainer_kits.py": "one process makes many Accelerators, which are one in a user's",
    "remote/test_connections.py": FAULT,
    "remote/test_hostile.py": FAULT,
    "remote/test_hostile_keys.py": HOSTILE,
    "remote/test_one_key.py": HOSTILE,
    "remote/test_pipelined_staleness.py": WITHIN,
    "shards/test_identities.py": HOSTILE,
    "shards/test_shard_faults.py": FAULT,
    "shards/test_shards.py": FAULT,
    "torch/test_adaptive.py": "emulated devices take the place of measured ones",
    "worker/test_buckets.py": WITHIN,
    "worker/test_exchange.py": WITHIN,
    "worker/test_on_gpu.py": WITHIN,
    "worker/test_pipeline.py": WITHIN,
    "worker/test_plan_bits.py": WITHIN,
}


def private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def root(node: ast.expr) -> str:
    """The name that a chain of attributes, calls and indices begins with."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def private_members(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """The private members of pyps's objects and modules that a file reads, sets, imports or replaces."""
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    defined |= {node.attr for node in attributes if root(node) in ("self", "cls")}
    for node in nodes:
        if isinstance(node, ast.Attribute) and root(node) not in OWN and node.attr not in defined:
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pyps."):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and re.fullmatch(r"pyps(\.\w+)+", str(node.value)):
            names = str(node.value).split(".")[2:]
        else:
            continue
        yield from filter(private, names)


def test_it_sees_them() -> None:
    text = "store._x\na.b()[0]._y = 1\nfrom pyps.store.store import _z\nm.setattr('pyps.run.main._w', 0)"
    assert sorted(private_members([*ast.walk(ast.parse(text))])) == ["_w", "_x", "_y", "_z"]
    text = "torch._C\nself._x\none._x\nstore.__class__\nfrom pyps import Store"
    assert not list(private_members([*ast.walk(ast.parse(text))]))


def test_through_public_members() -> None:
    """But in the exceptions, where there are some: the list has no entry that is needed no more."""
    found = {}
    for path in holding(r"\._[A-Za-z]|\bimport .*\b_[A-Za-z]|^\s+_\w+,$", TESTS.rglob("*.py")):
        if path.parent.name != "quick_start" and (names := set(private_members(nodes(path)))):
            found[str(path.relative_to(TESTS))] = names
    assert {file: names for file, names in found.items() if file not in EXCEPTIONS} == {}
    assert set(EXCEPTIONS) <= set(found)
