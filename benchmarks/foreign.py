"""Training scripts of six kinds as strangers write them, and with pyps: python benchmarks/foreign.py

benchmarks/foreign/plain has a torchrun tutorial, a GPT with micro-batches and autocast, GLUE without a
trainer, segmentation with SyncBatchNorm, a recommender with sparse embeddings, and diffusion with a moving
average; benchmarks/foreign/uneven has them with pyps. For each: the lines that differ, how far two unlike
ranks are off one process in float64, how much faster a step is on two emulated devices of which one takes
three times as long, and how far a run that was stopped and resumed is off one that was not.

Ranks are forked with torch loaded. Each runs a script unchanged, as torchrun would; hooks on torch's
optimizers and DistributedDataParallel read the parameters, stop the run after some steps, and hold each
backward pass back until the emulated device is done.
"""

from __future__ import annotations

import argparse
import difflib
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from record import machine, save_table, table

HERE = Path(__file__).resolve().parent / "foreign"
NAMES = ("tutorial", "gpt", "glue", "segmentation", "recommender", "diffusion")
PACES = (1.0, 3.0)
FIXED_SECONDS, SAMPLE_SECONDS = 0.010, 0.004  # a backward pass of the device whose pace is 1
EXACT_STEPS, RESUMED_STEPS, STOPPED_AT = 13, 14, 7  # 10 are an epoch
SAVE_EVERY = 4  # steps, as in the scripts
PLAIN_STEPS, UNEVEN_STEPS, SETTLED = 11, 29, 10  # SETTLED: the last ones, whose median is taken but for saves
DEADLINE_SECONDS = 120.0
PRELOADED = ["torch.distributed.fsdp", "torch.utils.data", "torch.nn.parallel", "torch._dynamo", "pyps.torch"]
PRELOADED += ["torch.distributed.checkpoint", "torch.optim.swa_utils", "pyps.torch.checkpoint"]


class Stopped(Exception):
    """Raised in a script once it has made the steps that it is to make."""


@dataclass
class Run:
    """Hold what one rank saw: the parameters at the beginning and the end, and the seconds of each step."""

    before: Any
    after: Any
    seconds: list[float]


def run(script: Path, folder: str, paces: tuple[float, ...], steps: int, *, exact: bool) -> list[Run]:
    """Run a script on as many ranks as paces; 0.0 emulates nothing. exact: in float64."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    pipes, ranks = [], []
    for rank, pace in enumerate(paces):
        mine, theirs = context.Pipe()
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": len(paces), "MASTER_PORT": port}
        given = (theirs, str(script), folder, pace, steps, exact, {k: str(v) for k, v in place.items()})
        ranks.append(context.Process(target=_rank, args=given, daemon=True))
        ranks[-1].start()
        theirs.close()
        pipes.append(mine)
    try:
        return [_taken(pipe, script) for pipe in pipes]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def _taken(pipe: Connection, script: Path) -> Run:
    if not pipe.poll(DEADLINE_SECONDS):
        raise TimeoutError(f"{script}: a rank does not answer")
    found = pipe.recv()
    if not isinstance(found, Run):
        raise RuntimeError(f"{script}: {found}")
    return found


def _rank(
    pipe: Connection, script: str, folder: str, pace: float, steps: int, exact: bool, place: dict[str, str]
) -> None:
    """Run the script in this process, and send what was seen."""
    import traceback

    import torch

    os.environ.update(place, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64 if exact else torch.float32)
    sys.argv = [script, folder]
    if not torch.cuda.is_available():  # on CPUs torch has none; the times are those of BatchNorm
        torch.nn.SyncBatchNorm.convert_sync_batchnorm = staticmethod(lambda module: module)
    seen = _Seen(steps, pace)
    try:
        runpy.run_path(script, run_name="__main__")
        found: Any = f"it ended after {len(seen.seconds)} of {steps} steps"
    except Stopped:
        found = Run(seen.before, seen.parameters(), seen.seconds)
    except BaseException:
        found = traceback.format_exc()
    pipe.send(found)
    pipe.recv()  # kept until all ranks have answered


class _Seen:
    """Hooks into torch that watch a script's steps, and make them last as long as on the emulated device."""

    def __init__(self, steps: int, pace: float) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.seconds: list[float] = []
        self.before: Any = None
        self._steps, self._pace, self._samples = steps, pace, 0
        self._model: Any = None
        self._begun = self._last = time.monotonic()
        register_optimizer_step_post_hook(self._stepped)
        made = DistributedDataParallel.__init__

        def make(ddp: Any, module: Any, *given: Any, **options: Any) -> None:
            made(ddp, module, *given, **options)
            self._model = module
            ddp.register_forward_pre_hook(self._begins, with_kwargs=True)
            next(module.parameters()).register_hook(self._hold)

        DistributedDataParallel.__init__ = make  # type: ignore[method-assign]
        self._flat = lambda: torch.cat([p.detach().double().flatten() for p in self._model.parameters()])

    def parameters(self) -> Any:
        return self._flat().numpy()

    def _begins(self, _: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._begun = time.monotonic()
        self._samples = len(next(iter((*inputs, *named.values()))))
        if self.before is None:
            self.before = self.parameters()

    def _hold(self, _: Any) -> None:
        seconds = self._pace * (FIXED_SECONDS + SAMPLE_SECONDS * self._samples)
        time.sleep(max(0.0, self._begun + seconds - time.monotonic()))

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        if self.before is None:  # a checkpoint that is loaded makes an optimizer's state by a step
            return
        *_, last = self._model.parameters()  # of several optimizers the one of the last parameter counts
        if all(p is not last for group in optimizer.param_groups for p in group["params"]):
            return
        now = time.monotonic()
        self.seconds.append(now - self._last)
        self._last = now
        if len(self.seconds) == self._steps:
            raise Stopped


def lines_changed(name: str) -> tuple[int, int]:
    """Lines that the script loses, and that it gains, blank ones apart."""
    plain, uneven = ((HERE / kind / f"{name}.py").read_text().splitlines() for kind in ("plain", "uneven"))
    diff = list(difflib.unified_diff(plain, uneven, n=0))[2:]
    return tuple(sum(line[0] == sign and bool(line[1:].strip()) for line in diff) for sign in "-+")  # type: ignore[return-value]


def off(found: Run, right: Run) -> float:
    """How far the parameters moved apart from where they should be, over how far they should have moved."""
    import numpy as np

    norm = np.linalg.norm
    return float(norm(found.after - right.after) / norm(right.after - right.before))


def exactness(name: str) -> float:
    """Two ranks, of which one is slower, so that batches become uneven, against one process."""
    script = HERE / "uneven" / f"{name}.py"
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        (right,) = run(script, one, (0.0,), EXACT_STEPS, exact=True)
        both = run(script, two, PACES, EXACT_STEPS, exact=True)
    return max(off(found, right) for found in both)


def resumed(name: str) -> float:
    """A run that is stopped between two checkpoints, and resumed, against one that is not."""
    script = HERE / "uneven" / f"{name}.py"
    saved = STOPPED_AT // SAVE_EVERY * SAVE_EVERY
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        (right,) = run(script, one, (0.0,), RESUMED_STEPS, exact=True)
        run(script, two, PACES, STOPPED_AT, exact=True)
        found = run(script, two, PACES, RESUMED_STEPS - saved, exact=True)[0]
    found.before = right.before
    return off(found, right)


def step_seconds(name: str) -> tuple[float, float]:
    """The median step of the plain script with equal batches, and with pyps once batches have settled."""
    found = []
    for kind, steps in (("plain", PLAIN_STEPS), ("uneven", UNEVEN_STEPS)):
        with tempfile.TemporaryDirectory() as folder:
            seen = run(HERE / kind / f"{name}.py", folder, PACES, steps, exact=False)[0]
        plain_steps = [x for k, x in enumerate(seen.seconds, 1) if (k - 1) % SAVE_EVERY]  # no save before it
        found.append(median(plain_steps[-SETTLED:]))
    return found[0], found[1]


def row(name: str) -> list[str]:
    """One script's figures, as text."""
    lost, gained = lines_changed(name)
    plain, uneven = step_seconds(name)
    times = [f"{1e3 * plain:.0f} ms", f"{1e3 * uneven:.0f} ms", f"{plain / uneven:.2f}x"]
    return [name, f"-{lost} +{gained}", *times, f"{exactness(name):.0e}", f"{resumed(name):.0e}"]


def main(arguments: list[str] | None = None) -> None:
    """Print the table; --save keeps it for docs/results/benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=NAMES, nargs="*", default=NAMES)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args(arguments)
    head = ["script", "lines", "equal batches", "pyps", "faster", "off one process", "resumed, off"]
    text = table([head, *(row(name) for name in given.only)])
    print(text, machine(), sep="\n\n")
    if given.save:
        save_table("foreign", text)


if __name__ == "__main__":
    main()
