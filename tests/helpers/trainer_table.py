"""The table of trainers and features in docs/how-to/exact.md: made by trying each cell.

python tests/helpers/trainer_table.py       # tries all, writes the page's table
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from ranks import run_script

HELPERS = Path(__file__).resolve().parent
PAGE = HELPERS.parents[1] / "docs" / "how-to" / "exact.md"
TRAINERS = ("DDP", "FSDP2", "Accelerate", "Fabric", "Lightning", "transformers")
EXACT, IN_FLOAT32, IN_16_BITS = 1e-12, 1e-6, 1e-2  # relative; the loss's own precision
FLOAT32 = {("transformers", name) for name in ("plain loop", "micro-batches", "tied weights")}
TABLE = re.compile(r"(<!-- cells: begin -->\n).*?(<!-- cells: end -->)", re.DOTALL)
Found = dict[str, dict[str, float | str]]  # by trainer and feature: the error, or what refused it


def tried(trainer: str, features: list[str] | None = None) -> dict[str, float | str]:
    """The outcomes under one trainer, all of them by default."""
    chosen = {"FEATURES": "|".join(features)} if features else {}
    said = run_script(HELPERS / "trainer_cells.py", 2, TRAINER=trainer, OMP_NUM_THREADS="1", **chosen)
    found: dict[str, float | str] = json.loads(said.splitlines()[-1])
    return found


def word_for(trainer: str, feature: str, outcome: float | str) -> str:
    """exact or refused; AssertionError for what is silently wrong."""
    if isinstance(outcome, str):
        return "refused"
    bound = IN_FLOAT32 if (trainer, feature) in FLOAT32 or "count_targets" in feature else EXACT
    bound = IN_16_BITS if feature == "autocast" else bound
    assert outcome < bound, f"{trainer}, {feature}: {outcome} off, and nothing says so"
    return "exact"


def rendered(found: Found) -> str:
    """The table, and the message of each feature that is refused somewhere."""
    names = list(dict.fromkeys(name for cells in found.values() for name in cells))
    lines = ["| | " + " | ".join(found) + " |", "|---|" + "---|" * len(found)]
    for name in names:
        cells = (word_for(t, name, found[t][name]) if name in found[t] else "" for t in found)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "| refused | message |", "|---|---|"]
    for name in names:
        said = [cells[name] for cells in found.values() if isinstance(cells.get(name), str)]
        if said:
            lines.append(f"| {name} | {str(said[0]).replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def shown() -> dict[tuple[str, str], str]:
    """The page's cells, by trainer and feature."""
    table = TABLE.search(PAGE.read_text(encoding="utf-8"))
    assert table is not None
    rows = [line.strip("|\n").split("|") for line in table[0].split("\n\n")[0].splitlines()[1:]]
    trainers = [name.strip() for name in rows[0][1:]]
    return {
        (trainer, row[0].strip()): cell.strip()
        for row in rows[2:]
        for trainer, cell in zip(trainers, row[1:], strict=True)
        if cell.strip()
    }


def main() -> None:
    found: Found = {}
    for trainer in TRAINERS:
        found[trainer] = tried(trainer)
        for feature, outcome in found[trainer].items():
            print(f"{trainer}, {feature}: {outcome}", flush=True)
    text = PAGE.read_text(encoding="utf-8")
    table = rendered(found)
    PAGE.write_text(TABLE.sub(lambda match: match[1] + table + match[2], text), encoding="utf-8")


if __name__ == "__main__":
    main()
