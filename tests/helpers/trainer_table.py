"""The table of trainers and features in docs/how-to/exact.md: made by trying each cell.

python tests/helpers/trainer_table.py       # tries all, writes the page's table

What takes a run of its own is tried by a test of its own, which fails where it is not exact. Needs the extras
accelerate, lightning, fine-tune and torchft.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from ranks import run_script

HELPERS = Path(__file__).resolve().parent
PAGE = HELPERS.parents[1] / "docs" / "how-to" / "exact.md"
TRAINERS = ("DDP", "FSDP2", "Accelerate", "Fabric", "Lightning", "transformers")
EXACT, IN_FLOAT32 = 1e-12, 1e-6  # relative; the loss's own precision
FLOAT32 = (
    "plain loop",
    "micro-batches",
    "tied weights",
    "label smoothing",
    "train() twice",
    "auto_find_batch_size",
)
CHECKPOINTS, SHARDED, ADAPTERS = "test_torch_checkpoint.py", "test_fsdp.py", "test_trainers.py"
TESTED = {  # of tests/torch, by feature and trainer
    "save, resume: the same bits": {
        "DDP": f"{CHECKPOINTS}::test_a_run_goes_on_bit_for_bit",
        "FSDP2": f"{SHARDED}::test_a_run_goes_on_bit_for_bit",
        "Accelerate": f"{ADAPTERS}::test_accelerate",
        "Lightning": f"{ADAPTERS}::test_lightning",
        "transformers": f"{ADAPTERS}::test_transformers",
    },
    "resume with other ranks": {
        "DDP": f"{CHECKPOINTS}::test_another_number_of_ranks_goes_on_and_takes_every_sample_once",
        "FSDP2": f"{SHARDED}::test_other_ranks_go_on_and_take_every_sample_once",
    },
    "AdaptiveBatch": {
        "DDP": "test_adaptive.py::test_ranks_agree_and_see_every_sample_once",
        "Accelerate": "test_adaptive.py::test_in_a_library_s_loop[Accelerate-accelerate]",
        "Fabric": "test_adaptive.py::test_in_a_library_s_loop[Fabric-lightning]",
    },
    "replicas die (torchft)": {"DDP": "test_replicas.py"},
    "LoRA (PEFT, TRL)": {"transformers": "test_fine_tune.py::test_each_step_has_the_gradient_of_one_process"},
    "GRPO (TRL)": {
        "transformers": "test_fine_tune.py::test_prompts_stay_whole_and_the_gradient_is_one_process"
    },
    "a loop of diffusers": {"DDP": "test_fine_tune.py::test_a_loop_of_diffusers"},
}
TABLE = re.compile(r"(<!-- cells: begin -->\n).*?(<!-- cells: end -->)", re.DOTALL)
Found = dict[str, dict[str, float | str]]  # by trainer and feature: the error, or what refused it


def tried(trainer: str, features: list[str] | None = None) -> dict[str, float | str]:
    """The outcomes under one trainer, all of them by default."""
    chosen = {"FEATURES": "|".join(features)} if features else {}
    said = run_script(HELPERS / "trainer_cells.py", 2, TRAINER=trainer, OMP_NUM_THREADS="1", **chosen)
    found: dict[str, float | str] = json.loads(said.splitlines()[-1])
    return found


def tested(test: str) -> float:
    """0 after a test of tests/torch that passes. SystemExit if it fails, or its extra is not there."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", "--real-torch", f"tests/torch/{test}"]
    done = subprocess.run(command, cwd=PAGE.parents[2], capture_output=True, text=True)
    if done.returncode or "s" in done.stdout.split()[0]:
        sys.exit(f"{test} did not pass:\n{done.stdout[-2000:]}")
    return 0.0


def word_for(trainer: str, feature: str, outcome: float | str) -> str:
    """exact or refused; AssertionError for what is silently wrong."""
    if isinstance(outcome, str):
        return "refused"
    bound = IN_FLOAT32 if trainer == "transformers" and feature in FLOAT32 else EXACT
    assert outcome < bound, f"{trainer}, {feature}: {outcome} off, and nothing says so"
    return "exact"


def rendered(found: Found) -> str:
    """The table."""
    names = list(dict.fromkeys(name for cells in found.values() for name in cells))
    lines = ["| | " + " | ".join(found) + " |", "|---|" + "---|" * len(found)]
    for name in names:
        cells = (word_for(t, name, found[t][name]) if name in found[t] else "" for t in found)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def shown() -> dict[tuple[str, str], str]:
    """The page's cells, by trainer and feature."""
    table = TABLE.search(PAGE.read_text(encoding="utf-8"))
    assert table is not None
    rows = [line.strip("|\n").split("|") for line in table[0].splitlines()[1:-1]]
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
        rows = {feature: tests[trainer] for feature, tests in TESTED.items() if trainer in tests}
        found[trainer] |= {feature: tested(test) for feature, test in rows.items()}
        for feature, outcome in found[trainer].items():
            print(f"{trainer}, {feature}: {outcome}", flush=True)
    text = PAGE.read_text(encoding="utf-8")
    table = rendered(found)
    PAGE.write_text(TABLE.sub(lambda match: match[1] + table + match[2], text), encoding="utf-8")


if __name__ == "__main__":
    main()
