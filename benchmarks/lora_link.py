"""Fine-tuning between unlike hosts over a slow link: python benchmarks/lora_link.py [--seeds 0 1 2] [--docs].

Two hosts (network namespaces, so root), one device each, of speeds 4 and 1, and a link of 20 Mbit/s that tc
tbf shapes. A small GPT that knows Python's sources learns its documentation. Compared are the seconds to one
loss on text that was held out: that of plain DDP with LoRA at its end, so no other way can move it.

- Plain DDP over gloo, equal batches: of all parameters, and of a LoRA adapter.
- The fast host alone, with LoRA.
- DDP with LoRA, planned batches and int8, by GlobalMean.
- The store, with the adapter alone: a step each time, and planned local steps; int8 both ways.

Then the last way is killed whole in its middle, and resumed. Devices are emulated; a pass of all parameters
is given the time of one of an adapter, which favours it. --docs replaces the table and its verdict, between
the page's markers. Learning rates are the best of ladders, by a seed of their own: 0.001, 0.003, 0.01 for an
adapter, 0.0003, 0.0005, 0.001, 0.003 for all.

Needs peft and transformers: pip install '.[fine-tune]'.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import local_kill
import torch
from local_link import HERE, Found, Setting, Way, every_step, local_steps, spread, until
from lora_model import documentation, loss_of, make_base, model_of, trained
from numpy.typing import NDArray
from record import machine, others_share, table, write_section, write_whole
from shaped import Shaped, missing, shaped

SPEEDS, EQUAL, PLANNED = (4, 1), (8, 8), (13, 3)
LEAST = 5.0  # times as fast as plain DDP
FULL, PLAIN = "DDP, all parameters", "DDP, LoRA"


@dataclass(frozen=True)
class Row:
    """A way to train: of DDP, or through the store. lr: of AdamW. part: of the samples that suffice."""

    title: str
    lr: float
    batches: tuple[int, ...] = EQUAL
    full: bool = False
    wire: str = ""
    way: Way | None = None
    part: float = 1.0


LOCAL = Way("local steps", 10, global_batch=16, nesterov=(0.6, 0.5))
ROWS = (
    Row(FULL, 5e-4, full=True, part=0.4),
    Row(PLAIN, 3e-3),
    Row("the fast host alone, LoRA", 3e-3, (16,)),
    Row("DDP, LoRA, planned batches, int8", 3e-3, PLANNED, wire="int8"),
    Row("store, LoRA, int8", 3e-3, PLANNED, way=Way("every step", 0, global_batch=16)),
    Row("store, LoRA, int8, 10 local steps", 3e-3, PLANNED, way=LOCAL, part=1.3),
)


def setting(batches: tuple[int, ...] = EQUAL) -> Setting:
    """The two hosts; the held-out loss is of the adapter's tensors."""
    model, held_out = model_of(0), documentation()[1]

    def loss(tensors: dict[str, NDArray]) -> float:
        model.load_state_dict({name: torch.as_tensor(v) for name, v in tensors.items()}, strict=False)
        with torch.no_grad():
            return float(loss_of(model, held_out))

    parameters = sum(p.numel() for p in trained(model))
    hosts = len(batches)
    return Setting(SPEEDS[:hosts], (0, 1)[:hosts], batches, parameters, HERE / "lora_worker.py", loss)


def found(pair: Shaped, options: argparse.Namespace, row: Row, seed: int) -> Found:
    """One run of one way."""
    samples = round(row.part * options.samples)
    chosen = argparse.Namespace(
        **vars(options) | {"samples": samples, "local_samples": samples, "lr": row.lr}
    )
    if row.way is not None:
        return local_steps(pair, chosen, row.way, seed, setting(row.batches))
    return every_step(pair, chosen, seed, setting(row.batches), full=row.full, wire=row.wire)


def measured(options: argparse.Namespace) -> dict[str, dict[str, Found]]:
    """Every seed's rows, by title: those that --keep has, and the rest, which it gets."""
    kept: dict[str, dict[str, Found]] = {}
    if options.keep and options.keep.exists():
        text = json.loads(options.keep.read_text())
        kept = {seed: {title: Found(**one) for title, one in rows.items()} for seed, rows in text.items()}
    with shaped(f"{options.mbit:g}mbit") as pair:
        for seed in options.seeds:
            rows = kept.setdefault(str(seed), {})
            for row in ROWS:
                if row.title in rows:
                    continue
                rows[row.title] = found(pair, options, row, seed)
                print(f"seed {seed}, {row.title}: {rows[row.title].last:.3f}", file=sys.stderr, flush=True)
                if options.keep:
                    plain = {s: {title: vars(one) for title, one in r.items()} for s, r in kept.items()}
                    write_whole(options.keep, json.dumps(plain))
    return {seed: rows for seed, rows in kept.items() if int(seed) in options.seeds}


def compare(runs: Sequence[dict[str, Found]]) -> tuple[bool, str]:
    """The table of several seeds' rows, and whether the last way was fast enough beside plain DDP."""
    heading = ["", "ms a step", "bytes a step", "samples to the loss", "seconds to it"]
    cells = [[*heading, "times as fast as DDP, all", "as DDP, LoRA"]]
    goals = [rows[PLAIN].last for rows in runs]
    best = 0.0
    for row in ROWS:
        mine = [rows[row.title] for rows in runs]
        reached = [until(run.curve, goal) for run, goal in zip(mine, goals, strict=True)]

        def over(title: str, reached: Sequence[tuple[float, float]] = reached) -> list[float]:
            rivals = [until(rows[title].curve, goal)[0] for rows, goal in zip(runs, goals, strict=True)]
            return [rival / seconds for rival, (seconds, _) in zip(rivals, reached, strict=True)]

        best = statistics.median(over(FULL))
        cells.append(
            [
                row.title,
                f"{1000 * statistics.median(run.step_seconds for run in mine):.0f}",
                f"{statistics.median(run.crossed for run in mine) * sum(EQUAL):,.0f}",
                spread([samples for _, samples in reached], ".0f"),
                spread([seconds for seconds, _ in reached], ".1f"),
                spread(over(FULL), ".1f"),
                spread(over(PLAIN), ".1f"),
            ]
        )
    targets = ", ".join(f"{goal:.3f}" for goal in goals)
    verdict = "met" if best >= LEAST else "missed"
    said = f"The last way is {best:.1f} times as fast as {FULL} (bar: {LEAST:g}): **{verdict}**."
    return best >= LEAST, f"{table(cells)}\n\nTargets: {targets}, by seed. {said}"


def killed(options: argparse.Namespace) -> tuple[bool, str]:
    """The last way left alone, and killed whole in its middle and resumed: what came of both."""
    chosen = argparse.Namespace(**vars(options) | {"lr": ROWS[-1].lr, "local_samples": options.samples})
    ends = {}
    with tempfile.TemporaryDirectory() as folder, shaped(f"{options.mbit:g}mbit") as pair:
        for title, way in (("alone", local_kill.left_alone), ("killed", local_kill.killed_whole)):
            place = Path(folder) / title
            os.environ["PYPS_SHM_DIR"] = str(place / "shm")
            (place / "shm").mkdir(parents=True)
            hosts = local_kill.Hosts(pair, place, chosen, LOCAL, setting(PLANNED))
            way(hosts)
            ends[title] = hosts.ended()
    alone, again = ends["alone"], ends["killed"]
    same = all(torch.equal(again.weights[name], value) for name, value in alone.weights.items())
    bits = "the same bits" if same else "other bits"
    text = f"Killed whole in its middle, and resumed: {bits} as a run left alone (loss {again.loss:.4f} and "
    text += f"{alone.loss:.4f}), {again.samples} samples of {options.samples}."
    return same and again.samples == options.samples, text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--samples", type=int, default=1600, help="of DDP with LoRA")
    parser.add_argument("--every", type=int, default=80, help="samples between two measurements")
    parser.add_argument("--sample-seconds", type=float, default=0.008, help="at speed 1")
    parser.add_argument("--mbit", type=float, default=20.0, help="of the link")
    parser.add_argument(
        "--keep", type=Path, help="a file of runs: those in it are not run again, others go there"
    )
    parser.add_argument("--base", type=Path, help="a file of the base: trained into it if it is not there")
    parser.add_argument("--only", choices=["speed", "kill"], help="one half")
    parser.add_argument("--docs", action="store_true", help="write the table to docs/results/local-steps.md")
    options = parser.parse_args()
    if why := missing():
        print(f"no shaped link: {why}", file=sys.stderr)
        return 2
    halves: dict[str, Callable[[], tuple[bool, str]]] = {
        "speed": lambda: compare(list(measured(options).values())),
        "kill": lambda: killed(options),
    }
    with tempfile.TemporaryDirectory() as folder, others_share() as others:
        base = options.base or Path(folder) / "base.safetensors"
        os.environ["BASE"] = str(base)
        if not base.exists():
            make_base(base)
        ends = [half() for name, half in halves.items() if options.only in (None, name)]
    text = "\n\n".join(text for _, text in ends)
    print(text)
    if options.docs:
        meanwhile = f"Others kept {others[0]:.0%} of it busy meanwhile."
        write_section("lora-link", f"{text}\n\n{machine()}. {meanwhile}", "local-steps.md")
    return 0 if all(well for well, _ in ends) else 1


if __name__ == "__main__":
    sys.exit(main())
