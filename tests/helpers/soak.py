"""Eight workers, half over a breaking link, killed, stopped and restarted: python tests/helpers/soak.py.

    [--seconds 1800] [--policy saps:threshold=fixed,bound=24] [--seed 1]

Even ranks map the store, odd ones reach it over TCP, each with a key that is bound to its rank, through a
relay that is cut and falls silent. A guest, whose key is bound to ranks beyond the plan, tries what is not
its own, and joins until the memory that its key may have is used up. Stores take the names of others.

Held all the time: versions come (no hang), and every rank that is left alone pushes; the guest is refused;
whoever ends removes its own store and no other of its name. Held at the end: each rank's pushes count once in
the parameters, in the counters and in what its workers know; staleness keeps its bound; memory, descriptors
and threads of the server and the size of the segment have not grown.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from remote_tools import Relay

from pyps.errors import Busy, InvalidArgument, OutOfSpace, PypsError, SegmentExists
from pyps.native import unlink
from pyps.remote import create_store, open_store
from pyps.remote.keys import KeyFolder
from pyps.remote.server import Server
from pyps.store import Store
from pyps.store.policies import policy_named

RANKS = 8
CHUNK = 1024
SAMPLES_A_PUSH = 4
CLIENT_TIMEOUT_SECONDS = 0.5
ROUND_TIMEOUT_SECONDS = 1.0
BREAKS_EVERY = 400  # of the server's pieces that pass the relay
MOST_AWAY = 5  # ranks that are stopped or gone at once: some must be left to make progress
BEGIN_SECONDS = 60.0
HANG_SECONDS = 20.0  # without a version: a round timeout, a death and a loaded machine take less
RANK_HANG_SECONDS = 60.0  # without a push of a rank that nothing was done to
LEAVE_SECONDS = 20.0
TICK_SECONDS = 0.02
SAMPLE_SECONDS = 1.0
GROWTH_MIB = 16.0  # of private memory from the first quarter to the last: the server keeps 256 last replies
GROWTH_COUNT = 16  # of descriptors and threads: of sessions that are just ending
FOLDER = Path(__file__).parent
POLICIES = ("saps:threshold=fixed,bound=24", "ssp:bound=4", "r2sp", "dssp:bound=2,extra=4", "asp")
GUESTS = 3  # new workers that the guest's key may have at least, while all ranks are gone
GUEST = "guest"
EXPECTED_EXITS = (0, 3, 4, -signal.SIGKILL, -signal.SIGTERM)  # see soak_worker.py; SIGTERM: before it listens


class Failed(AssertionError):
    """Hold what must never happen did."""


@dataclass
class Memory:
    """MiB that are private to the server and to this process, MiB of the segment, and small counts."""

    server: list[float] = field(default_factory=list)
    here: list[float] = field(default_factory=list)
    segment: list[float] = field(default_factory=list)
    descriptors: list[float] = field(default_factory=list)
    threads: list[float] = field(default_factory=list)

    def sample(self, server: psutil.Process, segment: Path) -> None:
        for values, process in ((self.server, server), (self.here, psutil.Process())):
            info = process.memory_info()
            values.append((info.rss - info.shared) / 2**20)
        self.segment.append(segment.stat().st_blocks * 512 / 2**20)
        self.descriptors.append(server.num_fds() + psutil.Process().num_fds())
        self.threads.append(server.num_threads())

    def quarters(self) -> dict[str, list[float]]:
        """The median of each quarter of the run, by what was measured."""
        found = {}
        for name, values in vars(self).items():
            edges = [len(values) * k // 4 for k in range(5)]
            found[name] = [statistics.median(values[a : max(b, a + 1)]) for a, b in itertools.pairwise(edges)]
        return found

    def check(self) -> None:
        for name, (first, *_, last) in self.quarters().items():
            most = GROWTH_COUNT if name in ("descriptors", "threads") else GROWTH_MIB
            if last - first > most:
                raise Failed(
                    f"{name} grew from {first:.1f} to {last:.1f}; at most {most:g} more were allowed"
                )


class Fleet:
    """The ranks' processes; what they say of their pushes goes to a file for each process."""

    def __init__(self, store: str, address: str, keys: Path, folder: Path) -> None:
        self._store, self._address, self._keys, self._folder = store, address, keys, folder
        self.started = 0
        self.logs: dict[int, list[Path]] = {rank: [] for rank in range(RANKS)}
        self.up: dict[int, subprocess.Popen[bytes]] = {}
        self.back_at: dict[int, float] = {}  # ranks that are gone
        self.until: dict[int, float] = {}  # ranks that are stopped
        self.leaving: list[tuple[subprocess.Popen[bytes], float]] = []
        self.exits: Counter[int] = Counter()

    def start(self, rank: int) -> None:
        log = self._folder / f"rank-{rank}-{self.started}"
        self.logs[rank].append(log)
        codec = "bf16" if rank % 4 == 1 else "f32"  # 1 is exact in both
        pace = 0.005 * (1 + rank)  # unlike workers
        where = keyed(self._address, self._keys, key_of(rank)) if rank % 2 else self._store
        command = [sys.executable, str(FOLDER / "soak_worker.py"), where]
        with open(log, "wb") as out, open(f"{log}.err", "wb") as err:
            self.up[rank] = subprocess.Popen([*command, str(rank), str(pace), codec], stdout=out, stderr=err)
        self.started += 1

    def kill(self, rank: int) -> None:
        self.up[rank].kill()
        self._ended(self.up.pop(rank))
        self.until.pop(rank, None)

    def leave(self, rank: int) -> None:
        worker = self.up.pop(rank)
        worker.terminate()
        self.leaving.append((worker, time.monotonic() + LEAVE_SECONDS))

    def stop(self, rank: int, seconds: float) -> None:
        self.up[rank].send_signal(signal.SIGSTOP)
        self.until[rank] = time.monotonic() + seconds

    def tend(self) -> list[int]:
        """Wake who has been stopped for long enough, bring back who was gone; the ranks that ended."""
        now = time.monotonic()
        for rank in [r for r, at in self.until.items() if now >= at]:
            del self.until[rank]
            self.up[rank].send_signal(signal.SIGCONT)
        for rank in [r for r, at in self.back_at.items() if now >= at]:
            del self.back_at[rank]
            self.start(rank)
        for worker, deadline in list(self.leaving):
            if worker.poll() is not None:
                self.leaving.remove((worker, deadline))
                self._ended(worker)
            elif now > deadline:
                raise Failed(f"a worker that was asked to leave is there {LEAVE_SECONDS:g} s later")
        ended = [rank for rank, worker in self.up.items() if worker.poll() is not None]
        for rank in ended:
            self._ended(self.up.pop(rank))
            self.back_at[rank] = now
        return ended

    def _ended(self, worker: subprocess.Popen[bytes]) -> None:
        code = worker.wait()
        self.exits[code] += 1
        if code not in EXPECTED_EXITS:
            said = [p.read_text() for p in self._folder.glob("*.err") if p.stat().st_size]
            raise Failed(f"a worker ended with {code}:\n{''.join(said)[-2000:]}")

    def retire(self) -> None:
        """Everybody leaves, and does so in time."""
        for rank in list(self.until):
            self.up[rank].send_signal(signal.SIGCONT)
        self.until.clear()
        self.back_at.clear()
        for rank in list(self.up):
            self.leave(rank)
        while self.leaving:
            self.tend()
            time.sleep(TICK_SECONDS)

    def end(self) -> None:
        """Whatever has happened: no process is left."""
        for worker in [*self.up.values(), *(w for w, _ in self.leaving)]:
            with contextlib.suppress(ProcessLookupError):
                worker.kill()
            worker.wait()

    def said(self, rank: int) -> tuple[int, int]:
        """Pushes that this rank's workers know were taken, and those they never heard of."""
        marks = [log.read_bytes().replace(b"j", b"") for log in self.logs[rank]]
        return sum(m.count(b".") for m in marks), sum(m.endswith(b"(") for m in marks)


class Soak:
    """One run under one policy; `run` raises Failed."""

    def __init__(
        self, store: Store, server: psutil.Process, segment: Path, fleet: Fleet, relay: Relay, guest: str
    ) -> None:
        self.store, self.fleet, self.relay, self._guest = store, fleet, relay, guest
        self.memory, self.harms = Memory(), Counter[str]()
        self._beside = ThreadPoolExecutor(1)  # for what takes longer than a look may wait
        self._visit: Future[None] | None = None
        self.silence = 0.0
        self._server, self._segment = server, segment
        self._seen = dict.fromkeys(range(RANKS), (0, time.monotonic()))  # log size, since when
        self._version, self._since = 0, time.monotonic()

    def begin(self) -> None:
        for rank in range(RANKS):
            self.fleet.start(rank)
        deadline = time.monotonic() + BEGIN_SECONDS
        while not self.store.status().all_joined or self.store.status().version < RANKS:
            if time.monotonic() > deadline:
                raise Failed("they never began")
            time.sleep(TICK_SECONDS)
        self._since = time.monotonic()

    def run(self, seconds: float, rng: random.Random, report: bool) -> None:
        began = time.monotonic()
        harm_at, sample_at, say_at = began, began, began + 60.0
        self._intrude()
        while (now := time.monotonic()) < began + seconds:
            for rank in self.fleet.tend():
                self._touch(rank)
                self.harms["lost"] += 1
            if now >= harm_at:
                self._harm(rng)
                harm_at = now + rng.uniform(0.1, 0.9)
            if now >= sample_at:
                if not self._busy:
                    self.memory.sample(self._server, self._segment)
                self._look_at_ranks()
                sample_at = now + SAMPLE_SECONDS
            if report and now >= say_at:
                say_at += 60.0
                print(f"{now - began:.0f} s: {self.summary()}", flush=True)
            self._look()
            time.sleep(TICK_SECONDS)
        self.relay.deaf.clear()
        self.end_visit()
        self.fleet.retire()

    def _touch(self, rank: int) -> None:
        self._seen[rank] = (self._seen[rank][0], time.monotonic())

    def _harm(self, rng: random.Random) -> None:
        fleet = self.fleet
        away = len(fleet.back_at) + len(fleet.until)
        healthy = sorted(fleet.up.keys() - fleet.until.keys())
        rank, draw = rng.choice(healthy), rng.random()
        if draw < 0.15:
            self.relay.cut()
            self.harms["cut"] += 1
            return
        if draw < 0.25:
            self._silence_link(rng)
            return
        if draw < 0.35:
            self._intrude()
            return
        if away >= MOST_AWAY:
            return
        self._touch(rank)
        if draw < 0.5:
            fleet.kill(rank)
            fleet.back_at[rank] = time.monotonic() + rng.choice((0.0, 1.0))
            self.harms["kill"] += 1
        elif draw < 0.7:
            fleet.leave(rank)
            fleet.back_at[rank] = time.monotonic() + rng.uniform(0.1, 2.0)
            self.harms["leave"] += 1
        else:
            fleet.stop(rank, rng.choice((0.05, 0.3, 2.0 * CLIENT_TIMEOUT_SECONDS, 2.5)))
            self.harms["stop"] += 1

    def _intrude(self) -> None:
        """Let the guest come, and stores take names, by turns. Raises what went wrong in the last one."""
        if self._busy:
            return
        self.end_visit()
        how = "name" if self.harms["visit"] > self.harms["name"] else "visit"
        act = (trespass, self._guest) if how == "visit" else (take_name, self._segment.parent)
        self._visit = self._beside.submit(*act)
        self.harms[how] += 1

    @property
    def _busy(self) -> bool:
        """Return whether a side job runs, which holds descriptors and memory of this process."""
        return self._visit is not None and not self._visit.done()

    def end_visit(self) -> None:
        """Wait for the side jobs. Raises Failed."""
        if self._visit is not None:
            self._visit.result()

    def _silence_link(self, rng: random.Random) -> None:
        """Drop what the server says for a moment; then end the connections."""
        self.relay.deaf.set()
        time.sleep(rng.uniform(0.05, 0.8 * CLIENT_TIMEOUT_SECONDS))
        self.relay.deaf.clear()
        self.relay.cut()
        self.harms["silence"] += 1

    def _look(self) -> None:
        version, now = self.store.status().version, time.monotonic()
        quiet = now - self._since
        self.silence = max(self.silence, quiet)
        if version != self._version:
            self._version, self._since = version, now
        elif quiet > HANG_SECONDS:
            raise Failed(f"no version for {quiet:.0f} s, at {version}: {self.store.members()}")

    def _look_at_ranks(self) -> None:
        now = time.monotonic()
        for rank, (size, since) in self._seen.items():
            found = self.fleet.logs[rank][-1].stat().st_size
            if found != size or rank in self.fleet.until or rank in self.fleet.back_at:
                self._seen[rank] = (found, now)
            elif now - since > RANK_HANG_SECONDS:
                raise Failed(f"rank {rank} has said nothing for {now - since:.0f} s: {self.store.members()}")

    def check(self, bound: int | None) -> None:
        """Every push once, in the parameters, in the counters and in the workers' own words."""
        flat, ranks = self.store.snapshot().tensors, self.store.ranks()
        for rank, counted in enumerate(ranks[:RANKS]):
            values = set(flat[f"rank-{rank}"].tolist())
            if fault := miscount(counted.pushes, values, *self.fleet.said(rank)):
                raise Failed(f"rank {rank}: {fault}")
            if bound is not None and counted.staleness_max > bound:
                raise Failed(f"rank {rank}: staleness {counted.staleness_max}; the bound is {bound}")
        version = self.store.status().version
        if sum(r.pushes for r in ranks) != version:
            raise Failed(f"version {version} of {sum(r.pushes for r in ranks)} pushes")
        self.memory.check()

    def summary(self) -> str:
        ranks, harms = self.store.ranks(), self.harms
        quarters = {
            name: " ".join(f"{v:.3g}" for v in values) for name, values in self.memory.quarters().items()
        }
        return (
            f"{sum(r.pushes for r in ranks)} pushes "
            f"(least heard rank {min(r.pushes for r in ranks[:RANKS])}), "
            f"{self.fleet.started} processes, {harms['kill']} kills, {harms['stop']} stops, "
            f"{harms['leave']} leaves and joins, {harms['cut']} cuts, {harms['silence']} silences, "
            f"{harms['visit']} visits of a guest, {harms['name']} names taken, "
            f"{harms['lost']} gave up; largest staleness {max(r.staleness_max for r in ranks)}, "
            f"without a version at most {self.silence:.2f} s; medians of the quarters: "
            f"server {quarters['server']} MiB, watcher {quarters['here']} MiB, "
            f"segment {quarters['segment']} MiB, {quarters['descriptors']} descriptors, "
            f"{quarters['threads']} threads"
        )


def key_of(rank: int) -> str:
    return f"rank-{rank}"


def keyed(address: str, keys: Path, name: str) -> str:
    """The address with a client's keys."""
    return f"{address.partition('?')[0]}?keys={keys / name}.key"


def make_keys(keys: Path) -> None:
    """One for each rank that comes over the link, bound to it, and one for the guest."""
    folder = KeyFolder.open(keys)
    for rank in range(1, RANKS, 2):
        folder.add(key_of(rank), ranks=[rank])
    folder.add(GUEST, ranks=range(RANKS, RANKS + 4 * GUESTS))


def refused(error: type[PypsError], what: str, act: Callable[[], object]) -> None:
    """Raise Failed unless this is such an error."""
    try:
        act()
        found = "no error"
    except error:
        return
    except PypsError as other:
        found = repr(other)
    raise Failed(f"{what}: found {found}; expected {error.__name__}")


def trespass(guest: str) -> None:
    """Try what belongs to others, and join until the guest's key has all the memory that it may have."""
    with contextlib.ExitStack() as stack:
        joined: list[Store] = []
        while len(joined) <= GUESTS + RANKS // 2:
            one = stack.enter_context(open_store(guest))
            refused(InvalidArgument, "joining as another key's rank", lambda one=one: one.join(0))
            try:
                one.join(RANKS + len(joined), "new_worker")
            except OutOfSpace:
                break
            joined.append(one)
            one.stage()
            refused(InvalidArgument, "planning", lambda one=one: one.replan([1] * RANKS))
        if not GUESTS <= len(joined) <= GUESTS + RANKS // 2:
            raise Failed(f"the guest's key had {len(joined)} new workers")


def take_name(segments: Path) -> None:
    """A store that has a server's name when that server ends stays; one that is open keeps its name."""
    name = f"soak-name-{os.getpid()}"
    path, away, tensors = segments / f"pyps-{name}", segments / f"pyps-{name}-away", {"w": np.zeros(8)}
    with Server(name) as server, create_store(server.address, tensors, batches=[1]):
        refused(SegmentExists, "a store of this name", lambda: Store.create(name, tensors, batches=[1]))
        path.rename(away)
        with Store.create(name, tensors, batches=[1], keep=True) as other:
            inode = path.stat().st_ino
            refused(Busy, "removing an open store", lambda: unlink(name))
            other.join()
    if not path.exists() or path.stat().st_ino != inode:
        raise Failed("a server that ended has removed another store of its name")
    path.unlink()
    away.unlink(missing_ok=True)


def miscount(counted: int, values: set[float], taken: int, unknown: int) -> str:
    """Return what is wrong if the store counts so many pushes, the rank's parameters are these, and its
    workers know that `taken` were taken and never heard of `unknown`; nothing if all agree.
    """
    if values != {-float(counted)}:
        return f"{counted} pushes, and the parameters say {sorted(values)[:4]}"
    if not taken <= counted <= taken + unknown:
        return f"{counted} pushes; its workers know of {taken} to {taken + unknown}"
    return ""


def staleness_bound(policy: str) -> int | None:
    """Return what the policy promises of every rank, whatever happens; None: nothing."""
    return int(policy.rpartition("=")[2]) if policy.startswith("saps:threshold=fixed") else None


def soak(seconds: float, policy: str, seed: int, folder: Path, report: bool = False) -> str:
    """A whole run with its logs in `folder`; the summary. Segments go where PYPS_SHM_DIR says."""
    name = f"soak-{os.getpid()}"
    tensors = {f"rank-{rank}": np.zeros(CHUNK) for rank in range(RANKS)}
    rules = replace(policy_named(policy), round_timeout_seconds=ROUND_TIMEOUT_SECONDS, scaling="none")
    options: dict[str, Any] = {"batches": [SAMPLES_A_PUSH] * RANKS, "policy": rules, "chunk_params": CHUNK}
    segments, keys = Path(os.environ.get("PYPS_SHM_DIR", "/dev/shm")), folder / "keys"
    make_keys(keys)
    with Store.create(name, tensors, max_participants=8 * RANKS, **options) as store:
        (segment,) = segments.glob(f"*{name}*")
        worker = 4 * store.layout.flat_elements * store.layout.staging_buffers
        command = [sys.executable, str(FOLDER / "soak_server.py"), name, str(CLIENT_TIMEOUT_SECONDS)]
        command += [str(keys), str(worker * (RANKS + 2 * GUESTS))]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdin is not None
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            with Relay(keyed(address, keys, GUEST), breaks_every=BREAKS_EVERY) as relay:
                fleet, guest = Fleet(name, relay.address, keys, folder), keyed(address, keys, GUEST)
                try:
                    run = Soak(store, psutil.Process(server.pid), segment, fleet, relay, guest)
                    run.begin()
                    run.run(seconds, random.Random(seed), report)
                    run.check(staleness_bound(policy))
                    server.stdin.close()
                    repeated = int(server.stdout.readline())
                    if server.wait(LEAVE_SECONDS):
                        raise Failed(f"the server ended with {server.returncode}")
                finally:
                    fleet.end()
                    server.kill()
                return f"{policy}, {seconds:.0f} s: {run.summary()}; {repeated} calls came twice"


def main() -> int:
    """Half an hour by default; exit code 1 if anything was lost, doubled, stuck or grew."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", help="default: one of five, by the seed")
    chosen = parser.parse_args()
    policy = chosen.policy or POLICIES[chosen.seed % len(POLICIES)]
    with tempfile.TemporaryDirectory() as folder:
        try:
            print(soak(chosen.seconds, policy, chosen.seed, Path(folder), report=True))
        except Failed as failure:
            print(f"failed: {failure}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
