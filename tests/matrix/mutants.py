"""Puts faults of earlier versions back, one at a time, into a copy of the sources, and says which the sampled
cells of the matrix find, or the tests of what no cell can see.

    python tests/matrix/mutants.py [NUMBER ...]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 900
ENDED_WELL, TESTS_FAILED = 0, 1  # of pytest
PARTS = ("pyps", "csrc", "solver", "profiler", "tests", "docs", "pyproject.toml", "setup.py", "README.md")


@dataclass(frozen=True)
class Mutant:
    """A fault: what it does, and the text that it replaces, which stands once in its file.

    tests: that have to find it, as pytest takes them.
    """

    what: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...] = ("tests/matrix", "-k", "test_a_cell")


MUTANTS = (
    Mutant(
        "over a link the staleness of a pipelined push is that of the last pull",
        "pyps/remote/handlers.py",
        'nonfinite=header.encoding.nonfinite), "ranges": None}',
        'nonfinite=header.encoding.nonfinite), "ranges": None, "base_version": None}',
    ),
    Mutant(
        "local steps: the store takes the workers' mean instead of Nesterov momentum",
        "pyps/worker/local/local_steps.py",
        "SGD(parameters, lr=OUTER.lr, momentum=OUTER.momentum, nesterov=OUTER.nesterov)",
        "SGD(parameters, lr=1.0)",
    ),
    Mutant(
        "clip_norm over several servers is refused at the first push",
        "pyps/worker/device/attach.py",
        "if attachment.clip_norm and is_sharded(settings.store):",
        "if False and is_sharded(settings.store):",
    ),
    Mutant(
        "a restored store loses the samples that were to be assigned again",
        "pyps/native/create.py",
        "len(header.ranges), ranges",
        "0, ranges",
    ),
    Mutant(
        "a restored store loses the residuals of encoded gradients",
        "pyps/native/create.py",
        "ranks[r].has_residual = int(r in state.residuals)",
        "ranks[r].has_residual = 0",
    ),
    Mutant(
        "the claims that a dead worker had made ahead are lost",
        "csrc/policy/view_samples.c",
        "for (uint32_t i = 0; i < m->ahead; i++) give_back(v, slot, ahead[i].first, ahead[i].count);",
        "(void)ahead;",
    ),
    Mutant(
        "where no round waits for all, each push is a whole step of the optimizer",
        "csrc/policy/view_round.c",
        "v->policy_params.scaling == PYPS_SCALE_NONE ? 1 : share;",
        "1;",
    ),
    Mutant(
        "a simulated worker whose plan gives it one step under way has two",
        "pyps/simulate/scenario.py",
        "depth=_pipeline_depth(plan, planned),",
        "depth=max(2, _pipeline_depth(plan, planned)),",
        # No cell takes its depth from a plan.
        ("tests/cli/test_cli_simulate.py", "-k", "steps_under_way"),
    ),
    Mutant(
        "local steps in a pipeline begin without the worker's last ones",
        "pyps/worker/local/local_steps.py",
        "        for ways in self._travelling:\n            for p, way in zip(self._parameters, ways",
        "        for ways in ():\n            for p, way in zip(self._parameters, ways",
        # When parameters come between local steps is up to the machine: no simulation says what comes of it.
        ("tests/worker/test_local_steps.py", "-k", "in_a_pipeline_one_worker"),
    ),
)


def mutated(mutant: Mutant, root: Path) -> None:
    """Put the fault into the tree at `root`. Raises ValueError if its text does not stand there once."""
    path = root / mutant.path
    text = path.read_text()
    if (count := text.count(mutant.old)) != 1:
        raise ValueError(f"{mutant.path}: found {mutant.old!r} {count} times; expected it once")
    path.write_text(text.replace(mutant.old, mutant.new))


def found_by(mutant: Mutant) -> str:
    """The first cell or test that finds it, twice; empty: none does."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        for part in PARTS:
            source = ROOT / part
            shutil.copytree(source, copy / part, symlinks=True) if source.is_dir() else shutil.copy(
                source, copy / part
            )
        mutated(mutant, copy)
        if mutant.path.startswith("csrc/"):
            build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
            subprocess.run(build, cwd=copy, check=True, capture_output=True)
        left_out: list[str] = []
        while cell := _first_failure(copy, [*mutant.tests, *(f"--deselect={one}" for one in left_out)]):
            if _first_failure(copy, [cell]):  # again: a machine that stalls may fail a cell once
                return cell.rpartition("::")[2].removeprefix("test_a_cell")
            left_out.append(cell)
        return ""


def _first_failure(copy: Path, chosen: list[str]) -> str:
    """The first of the chosen tests that fails in a copy; empty: none."""
    tests = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *chosen]
    env = {**os.environ, "PYTHONPATH": str(copy)}
    limits = {"cwd": copy, "env": env, "timeout": LIMIT_SECONDS, "text": True, "capture_output": True}
    done = subprocess.run([sys.executable, *tests], **limits)  # type: ignore[call-overload]
    failed = [line.split(" ", 1)[1] for line in done.stdout.splitlines() if line.startswith("FAILED")]
    if done.returncode not in (ENDED_WELL, TESTS_FAILED) or bool(failed) != bool(done.returncode):
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    return failed[0].partition(" - ")[0] if failed else ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("number", type=int, nargs="*", help="from 0; by default all")
    chosen = parser.parse_args().number or range(len(MUTANTS))
    found = 0
    for number in chosen:
        cell = found_by(MUTANTS[number])
        found += bool(cell)
        came = f"found by {cell}" if cell else "not found"
        print(f"{number}. {MUTANTS[number].what}: {came}", flush=True)
    print(f"{found} of {len(chosen)} found")


if __name__ == "__main__":
    main()
