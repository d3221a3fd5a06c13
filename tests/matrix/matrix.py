"""The cells that are run, each judged against its twin, and the table of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from cells import AXES, POLICIES, Cell, Verdict, expected, policy_of
from covering import Covering, Row, covering
from judging import faults
from running import run_cell
from zygote import Zygote

SEED = 1
DISTURBANCES = ("rebalance", "fault")
SAMPLED = 6  # of the disturbed cells in pairs every sixth is sampled

NAMED = (
    Cell("asp", clip=True, backend="shards"),  # refused, although its pairs are not
    Cell("bsp", optimizer="adamw", codec="int8", fault="resume"),  # the same bits, residuals and moments too
    Cell("hps", depth=2, modes=True),
    Cell("hps", "momentum", codec="int8", depth=2, rebalance=True, modes=True),
    Cell("hps", "adamw", depth=4, backend="link", modes=True),
    Cell("hps", depth=2, fault="kill", modes=True),
    Cell("asp", depth=2, fault="kill", modes=True),
)


@dataclass(frozen=True)
class Judged:
    """A cell, what it had to do, and what was wrong."""

    cell: Cell
    verdict: Verdict
    faults: tuple[str, ...]


def judged(cell: Cell, folder: Path, zygote: Zygote) -> Judged:
    """Run a cell, and its twin, in folders in this one."""
    wanted, policy = expected(cell), policy_of(cell)
    outcomes = []
    for number, one in enumerate(filter(None, (cell, wanted.twin))):
        (own := folder / str(number)).mkdir()
        outcomes.append(run_cell(one, policy, own, SEED, zygote))
    return Judged(cell, wanted.verdict, tuple(faults(cell, *outcomes)))


def sampled() -> list[Cell]:
    """All pairs of what a run combines that nothing disturbs, some that something does, each option alone
    (only there parameters are compared to the last digits: judging.OFF), and NAMED.
    """
    disturbed = _cells(_array(AXES, 2))[::SAMPLED]
    alone = [
        Cell("bsp", **{name: value})
        for name, values in _plain().items()
        if name != "policy"
        for value in values[1:]
    ]
    return list(dict.fromkeys([*_cells(_array(_plain(), 2)), *disturbed, *alone, *NAMED]))


@lru_cache(maxsize=1)
def whole() -> list[Cell]:
    """All triples of what can be combined, with and without disturbances; none that is sampled."""
    before = set(sampled())
    cells = [*_cells(_array(_plain(), 3)), *_cells(_array(AXES, 3))]
    return [cell for cell in dict.fromkeys(cells) if cell not in before]


def _plain() -> Mapping[str, tuple[object, ...]]:
    return {name: values for name, values in AXES.items() if name not in DISTURBANCES}


def _array(axes: Mapping[str, tuple[object, ...]], strength: int) -> Covering:
    return covering(axes, strength, SEED, _is_allowed)


def _is_allowed(row: Row) -> bool:
    return expected(Cell(**row)).verdict is not Verdict.REFUSED


def _cells(array: Covering) -> list[Cell]:
    return [Cell(**row) for row in (*array.barred, *array.rows)]


def table(all_judged: Iterable[Judged]) -> Iterator[str]:
    """Lines of Markdown: the cells of each policy by what they had to do, and how many were wrong."""
    counts = {policy: Counter[str]() for policy in POLICIES}
    for one in all_judged:
        counts[one.cell.policy]["wrong" if one.faults else one.verdict.value] += 1
    columns = [verdict.value for verdict in Verdict] + ["wrong"]
    yield f"| policy | cells | {' | '.join(columns)} |"
    yield f"|---|{'---:|' * (len(columns) + 1)}"
    for policy, found in counts.items():
        if found:
            yield _row(f"`{policy}`", found, columns)
    yield _row("all", sum(counts.values(), Counter()), columns)


def _row(name: str, found: Counter[str], columns: list[str]) -> str:
    return f"| {name} | {found.total()} | {' | '.join(str(found[column] or '') for column in columns)} |"
