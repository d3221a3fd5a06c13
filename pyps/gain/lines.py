"""Find the lines of a DDP script that change for uneven batches, and say what becomes of them."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

GOES = "goes: uneven() makes it"


@dataclass(frozen=True)
class LineChange:
    """A line of the script, from 1, its text, and what becomes of it."""

    number: int
    text: str
    becomes: str


def changes(path: Path, global_batch: int) -> list[LineChange]:
    """Return the lines that change, in order; those of this file alone, if the loop is in another one."""
    text = path.read_text(errors="replace")
    lines = text.splitlines()
    found: dict[int, str] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and (becomes := _becomes(node, global_batch)):
            found.setdefault(node.lineno, becomes)
    return [LineChange(number, lines[number - 1].strip(), found[number]) for number in sorted(found)]


def _becomes(call: ast.Call, global_batch: int) -> str | None:
    """Return what becomes of a call; None: it stays."""
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            pass
        case _:
            return None
    named = {keyword.arg for keyword in call.keywords}
    if name in ("DistributedDataParallel", "DDP"):
        return f"model, loader, step = uneven(model, train, {global_batch}, optimizer=optimizer)"
    if name in ("DistributedSampler", "set_epoch") or (name == "DataLoader" and "sampler" in named):
        return GOES
    if not isinstance(call.func, ast.Attribute):
        return None
    if name == "backward" and not call.args:
        return f"step.backward({ast.unparse(call.func.value)})"
    if name == "step" and "optim" in ast.unparse(call.func.value).lower():
        return "step()"
    return None
