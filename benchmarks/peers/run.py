"""pyps and its peers on the same four emulated devices: seconds and samples to a loss, and a SIGKILL.

    python benchmarks/peers/run.py [--ways ddp,uneven_ddp] [--keep peers.json] [--save]

Ways whose package is not installed are left out: hivemind, torchft, Accelerate, Lightning. --keep: a file of
what was found, which later runs with other ways add to; --save keeps all of it in bench-out/.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib.util
import inspect
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
os.environ.setdefault("PACES", "1,1.4,2,2.9")
import rank as ranks  # noqa: E402
from record import company, machine, save_table, table, write_whole  # noqa: E402

PAGE, PACES = "peers.md", [float(x) for x in os.environ["PACES"].split(",")]
TARGET, KILLED, STEPS_AFTER = 0.1, len(PACES) - 1, 20
FORK = multiprocessing.get_context("fork")
START_SECONDS = 240.0  # imports and rendezvous, on a busy machine


@dataclass(frozen=True)
class Way:
    """title: of the row. function: of rank.py. needs: a package. run: options, where `pyps run` starts it."""

    title: str
    function: str
    needs: str = "torch"
    run: tuple[str, ...] | None = None
    local: bool = False


WAYS = {
    "ddp": Way("DDP, equal batches", "ddp"),
    "uneven_ddp": Way("**pyps**, uneven DDP", "uneven_ddp"),
    "accelerate": Way("Accelerate, equal batches", "accelerate", "accelerate"),
    "uneven_accelerate": Way("**pyps**, `UnevenAccelerator`", "uneven_accelerate", "accelerate"),
    "lightning": Way("Lightning, DDP", "lightning", "lightning"),
    "uneven_lightning": Way("**pyps**, `UnevenStrategy`", "uneven_lightning", "lightning"),
    "bsp": Way("**pyps**, store, `bsp`", "store", run=("--policy", "bsp")),
    "asp": Way("**pyps**, store, `asp`", "store", run=("--policy", "asp")),
    "hivemind": Way("hivemind, gradients averaged", "hivemind", "hivemind"),
    "hivemind_local": Way("hivemind, local updates", "hivemind", "hivemind", local=True),
    "local_sgd": Way("torchft, LocalSGD", "torchft", "torchft"),
    "diloco": Way("torchft, DiLoCo", "torchft_diloco", "torchft"),
    "local": Way("**pyps**, local steps", "store", run=("--policy", "bsp"), local=True),
    "local_asp": Way("**pyps**, local steps, `asp`", "store", run=("--policy", "asp"), local=True),
}


@dataclass
class Found:
    """Hold what a way did. after: the longest pause of the fastest rank after a SIGKILL of another, in
    seconds; None: it trains no longer. lines: that DDP's script has not.
    """

    seconds: float | None
    samples: int | None
    after: float | None
    lines: int


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def planned(folder: Path, way: Way) -> Path:
    """A plan for the emulated devices, whose times are known."""
    lines = [f"[job]\nglobal_batch = {ranks.BATCH}"]
    for k, pace in enumerate(PACES):
        points = [
            {"batch": b, "seconds": pace * (ranks.FIXED_SECONDS + ranks.SAMPLE_SECONDS * b)}
            for b in (1, 32, 128)
        ]
        profile = {"schema": "pyps.profile/1", "device": {"name": f"d{k}"}, "points": points}
        profile["model"] = {"name": "digits", "parameters": 10_000}
        (folder / f"d{k}.json").write_text(json.dumps(profile))
        lines.append(f'[[worker]]\nname = "d{k}"\nprofile = "d{k}.json"')
    (folder / "cluster.toml").write_text("\n".join(lines) + "\n")
    steps = ["--local-steps", str(ranks.LOCAL_STEPS)] if way.local else []
    command = [
        sys.executable,
        "-m",
        "pyps",
        "plan",
        folder / "cluster.toml",
        *steps,
        "-o",
        folder / "plan.json",
    ]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    return folder / "plan.json"


def forked(way: str, environment: dict[str, str], log: int) -> None:
    """A rank, as a copy of this process: what it has imported already costs nothing.

    It leads a group of its own: what a killed rank has started is found by it, as hivemind's daemons.
    """
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ranks.begin(way, environment)


@contextmanager
def processes(way: Way, folder: Path) -> Iterator[list[psutil.Process]]:
    """The ranks that were started here; all that was started ends with the block."""
    env = {"OUT": str(folder), "WAY": way.function, "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": str(free_port()), "WORLD_SIZE": str(len(PACES)), "OMP_NUM_THREADS": "1"}
    env |= {"LOCAL_WORLD_SIZE": str(len(PACES)), "LOCAL": "1" if way.local else ""}
    others, started = [], []
    with open(folder / "log.txt", "wb") as log:
        try:
            if way.needs == "torchft":
                port = free_port()
                env["TORCHFT_LIGHTHOUSE"] = f"http://127.0.0.1:{port}"
                code = "import time; from torchft.coordination import LighthouseServer as L; "
                code += (
                    f"l = L(bind='127.0.0.1:{port}', min_replicas=1, join_timeout_ms=200); time.sleep(1e6)"
                )
                others.append(subprocess.Popen([sys.executable, "-c", code], stdout=log, stderr=log))
            if way.run is not None:
                command = [sys.executable, "-m", "pyps", "run", "--plan", str(planned(folder, way)), *way.run]
                command += ["--samples", "1000000", "--run-dir", str(folder / "run"), str(HERE / "rank.py")]
                others.append(subprocess.Popen(command, env=os.environ | env, stdout=log, stderr=log))
            else:
                importlib.import_module(way.needs)
                for k in range(len(PACES)):
                    own = env | {"RANK": str(k), "LOCAL_RANK": str(k)}
                    rank = FORK.Process(target=forked, args=(way.function, own, log.fileno()))
                    rank.start()
                    started.append(psutil.Process(rank.pid))
            yield started
        finally:
            every = [psutil.Process(p.pid) for p in others if p.poll() is None] + started
            below = [child for p in every if p.is_running() for child in p.children(True)]
            for process in [*every, *below]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    if "guard" not in " ".join(process.cmdline()):  # it removes the store's memory
                        process.kill()
            for rank in started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)
            psutil.wait_procs(every)


def ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def steps_of(folder: Path, rank: int) -> list[tuple[float, int, float | None]]:
    """Return what a rank's processes have noted, in order of time."""
    lines = [line for p in folder.glob(f"rank-{rank}-*.jsonl") for line in p.read_text().splitlines(True)]
    return sorted((tuple(json.loads(line)) for line in lines if line.endswith("\n")), key=lambda x: x[0])


def wait_for_step(folder: Path, count: int) -> None:
    """Until the first rank has taken so many steps. Raises SystemExit."""
    deadline = time.monotonic() + START_SECONDS
    while len(steps_of(folder, 0)) <= count:
        if time.monotonic() > deadline:
            sys.exit(f"no {count} steps:\n{(folder / 'log.txt').read_text()[-2000:]}")
        time.sleep(0.2)


def measured(way: Way, limit: float) -> Found:
    """Train to the target, for `limit` seconds at most; then kill the slowest rank, and watch the fastest."""
    folder = Path(tempfile.mkdtemp(prefix="peers-"))
    found = Found(None, None, None, lines(way))
    try:
        with processes(way, folder) as started:
            wait_for_step(folder, 1)
            own, deadline = steps_of(folder, 0), time.monotonic() + limit
            while found.seconds is None and time.monotonic() < deadline:
                time.sleep(0.5)
                own = steps_of(folder, 0)
                if reached := next((at for at, _, loss in own if loss is not None and loss <= TARGET), None):
                    every = [step for k in range(len(PACES)) for step in steps_of(folder, k)]
                    found.samples = sum(n for at, n, _ in every if at <= reached)
                    found.seconds = reached - own[0][0]
            found.after = after_kill(folder, limit, started)
        if found.seconds is None:
            print(f"last loss {own[-1][2]}\n{(folder / 'log.txt').read_text()[-1500:]}", file=sys.stderr)
        return found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def after_kill(folder: Path, limit: float, started: list[psutil.Process]) -> float | None:
    """Kill the slowest rank; the longest pause of the fastest one in its next steps, in seconds; None: it
    does not take them in `limit`.

    started: the ranks' processes, if this one started them; the first of them may end.
    """
    (path,) = folder.glob(f"rank-{KILLED}-*.jsonl")
    os.kill(int(path.stem.rpartition("-")[2]), signal.SIGKILL)
    killed = time.monotonic()
    while time.monotonic() < killed + limit:
        time.sleep(0.2)
        later = [killed, *(at for at, _, _ in steps_of(folder, 0) if at > killed)]
        if len(later) > STEPS_AFTER:
            return max(b - a for a, b in pairwise(later))
        if started and ended(started[0]):
            return None
    return None


def lines(way: Way) -> int:
    """Lines of the way's script that DDP's has not."""
    function = {"torchft_diloco": "torchft", "uneven_lightning": "lightning"}.get(way.function, way.function)
    plain, own = (inspect.getsource(getattr(ranks, name)).splitlines() for name in ("ddp", function))
    return sum(line.startswith("+ ") and len(line) > 2 for line in difflib.ndiff(plain, own)) - (own != plain)


def text_of(found: dict[str, Found], others: str) -> str:
    rows = [["", f"seconds to {TARGET:g}", "samples to it", "new lines", "a rank is killed"]]
    for key, one in found.items():
        time_, samples = (
            ("not reached", "-") if one.seconds is None else (f"{one.seconds:.1f}", f"{one.samples:,}")
        )
        after = "the run ends" if one.after is None else f"a pause of {one.after:.1f} s"
        rows.append([WAYS[key].title, time_, samples, str(one.lines), after])
    return f"{table(rows)}\n\n{machine()}{others}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", default=",".join(WAYS), help="default: all whose packages are there")
    parser.add_argument("--limit", type=float, default=100.0, help="seconds that a way may take")
    parser.add_argument("--keep", type=Path, help="a JSON file that results are added to")
    parser.add_argument("--save", action="store_true", help="keep the table in bench-out/")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # no process stays behind
    others = company()
    found: dict[str, Found] = {}
    if options.keep and options.keep.exists():
        found = {key: Found(**one) for key, one in json.loads(options.keep.read_text()).items()}
    for key in filter(None, options.ways.split(",")):
        way = WAYS[key]
        if importlib.util.find_spec(way.needs) is None:
            print(f"{way.title}: no {way.needs}", file=sys.stderr)
            continue
        found[key] = measured(way, options.limit)
        print(key, found[key], file=sys.stderr, flush=True)
        if options.keep:
            write_whole(options.keep, json.dumps({k: asdict(one) for k, one in found.items()}))
    text = text_of({key: found[key] for key in WAYS if key in found}, others)
    print(text)
    if options.save:
        save_table("peers", text, PAGE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
