"""Which verb of the link each role may call, as a table made from the verbs' own `by`.

python tests/helpers/roles_table.py      writes it into SECURITY.md
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from pyps.remote import verbs as link
from pyps.remote.verbs import Caller, LinkVerb
from pyps.shards import verbs as shards

PAGE = Path(__file__).resolve().parents[2] / "SECURITY.md"
MARKED = re.compile(r"(<!-- roles: begin -->\n).*?(<!-- roles: end -->)", re.DOTALL)
VERBS: dict[str, LinkVerb[Any, Any]] = {**link.VERBS, **shards.VERBS}
OPENED = Caller.STRANGER | Caller.OBSERVER
# What the sessions of a key can be, one after the other.
ROLES = {
    "revoked": Caller(0),
    "admitted": Caller.STRANGER,
    "observer": OPENED,
    "worker, bound": OPENED | Caller.WORKER,
    "worker": OPENED | Caller.WORKER | Caller.PLANNER | Caller.REMOVER,
    "maker": OPENED | Caller.WORKER | Caller.PLANNER | Caller.REMOVER | Caller.CREATOR,
    "server": OPENED | Caller.SERVER,
}


def table() -> str:
    """Verbs that the same roles may call share a row."""
    rows: dict[tuple[bool, ...], list[str]] = {}
    for name, verb in VERBS.items():
        rows.setdefault(tuple(bool(verb.by & role) for role in ROLES.values()), []).append(f"`{name}`")
    lines = [f"| | {' | '.join(ROLES)} |", "|---|" + ":-:|" * len(ROLES)]
    for marks, names in sorted(rows.items(), key=lambda row: -sum(row[0])):
        lines.append(f"| {', '.join(names)} | {' | '.join('yes' if one else '' for one in marks)} |")
    return "\n".join(lines) + "\n"


def filled(text: str) -> str:
    """The page with the table as it is now."""
    return MARKED.sub(lambda found: found[1] + table() + found[2], text)


if __name__ == "__main__":
    sys.exit(not PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8"))
