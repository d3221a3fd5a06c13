"""Runs a cell: three workers in threads of this process, each with its own handle, on a store of its kind."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from cells import Cell, is_ordered
from conducting import Conductor, Progress, Simulated, simulated
from numpy.typing import NDArray
from threads import in_threads
from trained import BATCHES, CLIP_NORM, INPUTS, SAMPLES, SEED, Model, optimizer_of
from worker_tools import plan_with
from zygote import Zygote

import pyps
from pyps.checkpoint.state import save
from pyps.errors import PypsError
from pyps.formats.mode import Mode
from pyps.formats.records import StepRecord, read_run
from pyps.native.status import PushCounts
from pyps.native.values import Replay
from pyps.remote import open_store
from pyps.simulate import replay
from pyps.solver.links import LinkSpec
from pyps.solver.mode import ModeChoices
from pyps.solver.online.mode import ModeBalancer, ModeChange, TimedStep
from pyps.store.policies import Policy
from pyps.worker.run.settings import ThrottleSpec
from pyps.worker.step import attached

SPLITS = ((2, 4, 2), (4, 4, 0))  # that a rebalanced cell changes to; in the second one rank rests
SERVERS = {"link": 1, "shards": 2}
CLIENT_TIMEOUT_SECONDS = 2.0
FREE_SECONDS = 0.001  # a step of a run that follows no simulation takes this times the rank's number plus 1
ATTACH_SECONDS = 20.0
CHANGE_SAMPLES = (SAMPLES // 4, SAMPLES // 2)  # trained when a rebalanced cell changes its split
RESUME_SAMPLES = SAMPLES // 2  # trained when a run that is resumed ends
KILLED, KILLED_STEPS = 1, 1  # the rank that is killed, and the micro-batches that it has computed by then
LOOK_SECONDS = 0.001
CHANGE_TRANSFERS = 3, 6  # of each worker, when a cell changes its modes
LINK = LinkSpec(1e-4, 1e9)  # for a mode that changes there has to be one
Gate = Callable[[int], None]
Vector = NDArray[np.float32]
_numbers = itertools.count()


class Stopped(Exception):
    """The run ends here, to be resumed."""


@dataclass
class Outcome:
    """Hold what came of a cell. refusal: the line that refused it; late: when the workers trained. fault:
    where it left its simulation. there: the store where the simulation ended. parameters, ranks, records:
    at the run's end.
    """

    refusal: str = ""
    late: bool = False
    fault: str = ""
    simulated: Simulated | None = None
    there: tuple[list[PushCounts], Vector] | None = None
    ranks: list[PushCounts] = field(default_factory=list)
    parameters: Vector = field(default_factory=lambda: np.zeros(0, np.float32))
    records: list[StepRecord] = field(default_factory=list)
    journals: list[Replay] = field(default_factory=list)


def run_cell(cell: Cell, policy: Policy, folder: Path, seed: int, zygote: Zygote | None) -> Outcome:
    """Run a cell under its policy in an empty folder. seed: of the simulation's jitter. zygote: of the
    processes that are killed.
    """
    outcome = Outcome()
    try:
        _run(cell, policy, folder, seed, outcome, zygote)
    except PypsError as error:
        outcome.refusal = f"{type(error).__name__}: {error}"
    return outcome


def _run(
    cell: Cell, policy: Policy, folder: Path, seed: int, outcome: Outcome, zygote: Zygote | None
) -> None:
    kept: list[StepRecord] = []
    before = 0  # records of what ran before the run was resumed
    if cell.fault == "resume":
        with serving(cell.backend) as address:
            part = Part(cell, policy, address, folder, outcome, zygote, journal="journal-1")
            part.run(part.in_threads_until(RESUME_SAMPLES))
        (saved,) = (int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdigit())
        records = read_run(folder)
        kept, before = [record for record in records if record.version <= saved], len(records)
    with serving(cell.backend) as address:
        resumes = cell.fault == "resume"
        part = Part(cell, policy, address, folder, outcome, zygote, journal="journal-2", resumes=resumes)
        part.run(partial(part.conducted, seed) if is_ordered(cell) else part.free)
    outcome.records = kept + read_run(folder)[before:]  # not what was undone


@contextmanager
def serving(backend: str) -> Iterator[str]:
    """The name or address of a store of this kind that is still to be made."""
    name = f"matrix-{os.getpid()}-{next(_numbers)}"
    if backend == "local":
        yield name
        return
    from pyps.remote.server import Server

    with ExitStack() as stack:
        hosts, home = [], None
        for _ in range(SERVERS[backend]):
            options: dict[str, Any] = {"insecure": True, "client_timeout_seconds": CLIENT_TIMEOUT_SECONDS}
            server = stack.enter_context(Server(name, "tcp://127.0.0.1:*", home=home, **options))
            home = home or server.address
            hosts.append(server.address.removeprefix("tcp://").partition("/")[0])
        yield f"tcp://{','.join(hosts)}/{name}?insecure=1"


class Part:
    """A run of a cell's workers on one store, from the beginning or from the checkpoint in its folder."""

    def __init__(
        self, cell: Cell, policy: Policy, address: str, folder: Path, outcome: Outcome,
        zygote: Zygote | None, journal: str, resumes: bool = False,
    ) -> None:  # fmt: skip
        self.zygote = zygote
        self.cell, self.policy, self.address, self.folder, self.outcome = (
            cell,
            policy,
            address,
            folder,
            outcome,
        )
        self.journal = folder / journal if cell.backend == "local" else None
        self.resume = folder / "checkpoints" if resumes else None

    def run(self, train: Callable[[Sequence[Worker]], None]) -> None:
        """Attach all workers, train, and note what the store says at the end."""
        with ExitStack() as stack:
            workers = []
            for rank in range(len(BATCHES)):
                if rank == KILLED and self.cell.fault == "kill":
                    continue
                worker = Worker(self.cell, self.seat(rank))
                stack.callback(worker.worker.close)
                worker.attach()
                workers.append(worker)
            store = workers[0].worker.store
            try:
                train(workers)
            except PypsError:
                self.outcome.late = True
                raise
            if not store.closed:
                self.outcome.ranks = store.ranks()
                self.outcome.parameters, _ = store.pull(strict=True)
        if self.journal is not None:
            self.outcome.journals.append(replay(self.journal, self.policy))

    def seat(self, rank: int) -> Seat:
        return Seat(self.policy, self.address, rank, self.folder, self.journal, self.resume)

    @contextmanager
    def watching(self) -> Iterator[pyps.Store]:
        """A handle of its own, whose decisions are in the journal, too."""
        with open_store(self.address) as store:
            if self.journal is not None:
                store.journal(self.journal)
            yield store

    def conducted(self, seed: int, workers: Sequence[Worker]) -> None:
        """Train in the order of the simulation, as far as it says."""
        self.outcome.simulated = simulated(self.cell, self.policy, seed)
        with self.watching() as store:
            conductor = Conductor(self.outcome.simulated, self.looking(store), self.cell.depth > 1)

            def at_end() -> None:
                self.outcome.there = store.ranks(), store.pull(strict=True)[0]

            in_threads(
                *(partial(w.train, conductor.gate) for w in workers), partial(conductor.conduct, at_end)
            )
        self.outcome.fault = conductor.fault

    def looking(self, store: pyps.Store) -> Callable[[], Progress]:
        """Return what the store says of its ranks; pulls are counted by their bytes."""
        size = 4 * sum(tensor.elements for tensor in store.tensors)

        def look() -> Progress:
            pulls = [0] * len(BATCHES)
            if self.cell.depth > 1:
                for member in store.members():
                    if member.rank is not None:
                        pulls[member.rank] = member.bytes_pulled // size - 1  # the first: of attach()
            return Progress([rank.pushes for rank in store.ranks()], pulls)

        return look

    def free(self, workers: Sequence[Worker]) -> None:
        """Train as it comes; meanwhile a rebalanced cell changes its split twice, and one rank is killed."""
        meanwhile: list[Callable[[], None]] = [self.rebalance] if self.cell.rebalance else []
        gate: Gate = computing
        if self.cell.fault == "kill":
            gate = WaitingGate()
            assert self.zygote is not None
            seat = self.seat(KILLED)
            meanwhile.append(partial(killed_and_replaced, self.cell, seat, self.zygote, gate.open.set))
        in_threads(*(partial(w.train, gate) for w in workers), *meanwhile)

    def rebalance(self) -> None:
        steps = max(1, self.cell.local_steps)
        with self.watching() as store:
            store.join(role="observer")
            for split, samples in zip(SPLITS, CHANGE_SAMPLES, strict=True):
                _trained(store, samples)
                store.replan([steps * batch for batch in split])

    def in_threads_until(self, samples: int) -> Callable[[Sequence[Worker]], None]:
        """Train until a checkpoint of at least so many samples is written, then stop wherever each is."""
        ends = threading.Event()

        def gate(rank: int) -> None:
            computing(rank)
            if ends.is_set():
                raise Stopped

        def checkpoint() -> None:
            with self.watching() as store:
                _trained(store, samples)
                save(store.state(), self.folder / "checkpoints", seed=SEED)
                ends.set()

        def train(workers: Sequence[Worker]) -> None:
            in_threads(*(partial(w.train, gate) for w in workers), checkpoint)

        return train


def _trained(store: pyps.Store, samples: int) -> None:
    """Wait until so many samples are trained."""
    while sum(rank.samples for rank in store.ranks()) < samples:
        time.sleep(LOOK_SECONDS)


def computing(rank: int) -> None:
    """In place of a gate: compute for a while."""
    time.sleep(FREE_SECONDS * (1 + rank))


@dataclass(frozen=True)
class Seat:
    """Where a worker joins: the run's policy and store, its rank, the folder of its records, its journal, and
    the checkpoint that the run goes on from.
    """

    policy: Policy
    address: str
    rank: int
    folder: Path
    journal: Path | None
    resume: Path | None


class Changing(ModeBalancer):
    """In place of what decides by a link: to the coarsest and deepest mode, and back."""

    def __init__(self, choices: ModeChoices, mode: Mode, *_: Any) -> None:
        self.mode, self._heard = mode, 0
        self._modes = dict(zip(CHANGE_TRANSFERS, (choices.options()[-1], mode), strict=True))

    def hear(self, one: TimedStep) -> ModeChange | None:
        self._heard += 1
        if self._heard not in self._modes:
            return None
        before, self.mode = self.mode, self._modes[self._heard]
        return ModeChange(self._heard, before, self.mode, (0.0, 0.0), 0.0)


class Worker:
    """A worker with its model, and its loop."""

    def __init__(self, cell: Cell, seat: Seat) -> None:
        micro = BATCHES[seat.rank] // cell.accumulation if cell.accumulation > 1 else None
        self.worker = pyps.join(
            seat.address, seat.rank, batches=list(BATCHES), policy=seat.policy, samples=SAMPLES, seed=SEED,
            run_dir=seat.folder, micro_batch=micro, codec=cell.codec, depth=cell.depth,
        )  # fmt: skip
        self.worker.settings = replace(self.worker.settings, journal=seat.journal)
        if cell.modes:
            plan = seat.folder / f"plan-{seat.rank}.json"
            plan.write_text(json.dumps(plan_with(list(BATCHES))))
            throttle = ThrottleSpec(factor=1.0, links=(LINK,)) if cell.backend == "local" else None
            self.worker.settings = replace(
                self.worker.settings,
                adapts=True,
                plan_path=plan,
                throttle=throttle,
                staging_buffers=max(3, cell.depth),
            )
        self.cell, self.seat, self.model = cell, seat, Model()

    def attach(self) -> None:
        cell = self.cell
        with patch.object(attached, "ModeBalancer", Changing):
            self.worker.attach(
                self.model,
                optimizer_of(cell, self.model),
                clip_norm=CLIP_NORM if cell.clip else None,
                local_steps=cell.local_steps or "plan",
                master=None if cell.master == "f32" else cell.master,
                resume=self.seat.resume,
                timeout=ATTACH_SECONDS,
            )

    def train(self, gate: Gate) -> None:
        """To the run's end; passes the gate with each micro-batch. All but rank 0, which made the store,
        leave it then.
        """
        torch.set_num_threads(1)
        worker = self.worker
        try:
            for (chosen,) in worker.batches((INPUTS,)):
                loss = self.model(chosen)
                loss.backward()
                gate(worker.rank)
                worker.step()
        except Stopped:
            worker.close()
        finally:
            if worker.rank:
                worker.close()


class WaitingGate:
    """Lets every rank compute one micro-batch more than the one that is killed, until it is dead."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self._steps = [0] * len(BATCHES)

    def __call__(self, rank: int) -> None:
        self._steps[rank] += 1
        if self._steps[rank] > KILLED_STEPS + 1:
            self.open.wait(ATTACH_SECONDS)
        computing(rank)


def killed_and_replaced(cell: Cell, seat: Seat, zygote: Zygote, when_dead: Callable[[], None]) -> None:
    """A process with the seat's rank that is killed with a gradient in hand, and one that takes its place."""
    for steps, wanted in ((KILLED_STEPS, -signal.SIGKILL), (None, 0)):
        try:
            found = zygote.run((cell, seat, os.environ["PYPS_SHM_DIR"], steps))
            assert found == wanted, f"a worker's process ended with {found}"
        finally:
            when_dead()


def work_in_a_process(cell: Cell, seat: Seat, segments: str, steps: int | None) -> None:
    """steps: micro-batches after which it is killed; None: it is not."""
    os.environ["PYPS_SHM_DIR"] = segments
    left = itertools.count() if steps is None else itertools.chain(range(steps), [None])
    worker = Worker(cell, seat)
    worker.attach()

    def gate(rank: int) -> None:
        if next(left) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        computing(rank)

    worker.train(gate)
