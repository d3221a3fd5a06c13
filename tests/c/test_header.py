"""Define what csrc/pyps.h promises of structs: those that callers pass begin with `size`, and parts keep
theirs.
"""

from __future__ import annotations

import re
from pathlib import Path

from pyps.native import ffi

HEADER = (Path(__file__).resolve().parents[2] / "csrc" / "pyps.h").read_text(encoding="utf-8")
STRUCT = re.compile(r"typedef struct(?: \w+)? \{\s*(.*?)\} (pyps_\w+);", re.S)
PASSED = re.compile(r"const (?:struct )?(pyps_\w+)\s*\*(\w+)")
PARTS = re.compile(r"gives them.*?: (.*?); a `size`", re.S)


def test_structs_that_callers_pass_begin_with_size() -> None:
    """Elements of arrays, and what the library itself passes, are not such structs."""
    fields = {name: body for body, name in STRUCT.findall(HEADER)}
    arrays = {"ranges", "looked", "hyper", "tensor", "turns", "rank", "range"}
    opaque = {"pyps_core", "pyps_store"}
    library = {"pyps_policy_context"}
    passed = {kind for kind, name in PASSED.findall(HEADER) if name not in arrays} - opaque - library
    assert {"pyps_config", "pyps_push_args", "pyps_ticket", "pyps_event", "pyps_custom"} <= passed
    assert not {kind for kind in passed if not fields[kind].startswith("uint32_t size;")}


def test_parts_have_the_sizes_that_the_header_says() -> None:
    said = re.findall(r"(pyps_\w+) (\d+)", PARTS.search(HEADER)[1].replace(" bytes", ""))
    assert len(said) == 6
    assert {name: int(size) for name, size in said} == {name: ffi.sizeof(name) for name, _ in said}
