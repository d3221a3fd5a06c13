"""Workers of the decision core that take their steps in whatever order they are called."""

from __future__ import annotations

from hypothesis import strategies as st

from pyps.errors import Ended, Fenced, PushRejected
from pyps.native.core import Core
from pyps.native.decisions import EventKind
from pyps.native.values import Config, Optimizer
from pyps.store.policies import (
    ASP,
    BSP,
    DSSP,
    HPS,
    R2SP,
    SSP,
    Backup,
    DynSGD,
    Policy,
    Quorum,
    SaPS,
    Softsync,
)

COMMITTED, UNCHANGED, WAIT, REFUSED = range(4)
SECOND = 10**9
STEP = 10**6  # nanoseconds between two events
POLICIES: list[Policy] = [
    BSP(), ASP(), Backup(k=1), Backup(k=2), Softsync(n=1), Softsync(n=2), SSP(bound=0), SSP(bound=2), DSSP(),
    DynSGD(), SaPS(), SaPS(threshold="quantile"), SaPS(threshold="fixed", bound=2),
    SaPS(late="drop", noise=1.0), SaPS(threshold="ringmaster", late="weigh"),
    SaPS(threshold="fixed", bound=3, abort=True), R2SP(slack=0.0), R2SP(), HPS(),
    Quorum(k=1), Quorum(k=2, grace=0.0),
]  # fmt: skip
orders = st.lists(st.integers(0, 3), min_size=30, max_size=250)


def cost_nanoseconds(k: int, samples: int) -> int:
    """Return what a worker says that a step cost it."""
    return 1_000_000 * (k + 1) * samples


class Drive:
    """Workers that take their steps in whatever order they are called, and what came of it."""

    def __init__(self, policy: Policy, batches: list[int], samples: int = 0) -> None:
        self.policy, self.n = policy, len(batches)
        config = Config(
            (), (), tuple(batches), 1, Optimizer.SGD, policy.number, policy.round_timeout_seconds,
            samples, 0, 0, 0, 2, policy.params(),
        )  # fmt: skip
        self.core = Core(config)
        self.now = SECOND
        self.version = self.round = 0
        self.pulled = [0] * self.n
        self.claims: dict[int, tuple[int, int]] = {}
        self.asked: dict[int, int] = {}  # when a gradient was first offered
        self.waiting: dict[int, int] = {}  # staged: worker -> the round it waits for
        self.staging_buffers: list[list[int]] = [[] for _ in batches]
        self.trained: list[tuple[int, int]] = []
        self.pushes: list[tuple[int, int, float]] = []  # worker, staleness, scale
        self.sources: list[list[tuple[int, int, int, float]]] = []
        self.owes_pull: set[int] = set()  # in its turn
        self.fresh: set[int] = set()  # has pulled in its turn
        self.ended: set[int] = set()
        for k in range(self.n):
            self.core.step(EventKind.JOIN, k, self.now, rank=k)

    def start(self, k: int) -> bool:
        """Claims, and pulls; False: has to wait, or is done."""
        self.now += STEP
        try:
            d = self.core.step(EventKind.START, k, self.now)
        except Ended:
            self.ended.add(k)
            return False
        if d.verdict == WAIT:
            return False
        self.claims[k] = (d.first, d.count)
        self.see()
        if k not in self.fresh:
            self.pull(k)
        self.fresh.discard(k)
        return True

    def pull(self, k: int) -> None:
        self.now += STEP
        self.pulled[k] = self.version
        self.owes_pull.discard(k)
        self.core.step(EventKind.PULL, k, self.now, version=self.version)
        self.see()

    def push(
        self, k: int, samples: int | None = None, compute_nanoseconds: int = STEP, norm: float = 0.0
    ) -> int:
        """The verdict; REFUSED: the gradient was dropped."""
        self.now += STEP
        first, count = self.claims[k]
        chosen = count if samples is None else samples
        if len(self.staging_buffers[k]) == 2:
            return WAIT
        staging = 1 if 0 in self.staging_buffers[k] else 0
        before, waited = self.version, self.now - self.asked.setdefault(k, self.now)
        try:
            more = compute_nanoseconds, norm, 0, waited, 0, cost_nanoseconds(k, chosen)
            d = self.core.push(k, self.now, staging, chosen, *more)
            while d.verdict == WAIT and 0 < d.at <= self.now:
                d = self.core.push(k, self.now, staging, chosen, *more)
        except PushRejected:
            del self.claims[k], self.asked[k]
            self.see()
            return REFUSED
        if d.verdict == WAIT:
            return WAIT
        del self.claims[k], self.asked[k]
        self.trained.append((first, chosen))
        self.pushes.append((k, d.staleness, d.scale))
        assert d.staleness == before - self.pulled[k]
        if d.ticket == 0:
            self.staging_buffers[k].append(staging)
            if d.until:
                self.waiting[k] = d.until
        elif self.policy.needs.uses_turns:
            self.owes_pull.add(k)
        self.see()
        return COMMITTED

    def see(self) -> None:
        """Follow what the last decision says of versions and rounds."""
        d = self.core.last
        if d.round != self.round:
            self.round = d.round
            self.staging_buffers = [[] for _ in self.staging_buffers]
            if d.version != self.version:
                self.sources.append(self.core.sources())
        assert d.version in (self.version, self.version + 1)
        self.version = d.version
        self.waiting = {k: until for k, until in self.waiting.items() if until > d.progress}

    def turn(self, k: int) -> bool:
        """Whatever worker k does next; whether anything came of it."""
        if k in self.ended or k in self.waiting:
            return False
        try:
            if k in self.owes_pull:
                self.pull(k)
                self.fresh.add(k)
                return True
            if k in self.claims:
                return self.push(k) != WAIT
            return self.start(k) or k in self.ended
        except Fenced:
            self.claims.pop(k, None)
            self.asked.pop(k, None)
            self.core.step(EventKind.REJOIN, k, self.now)
            return True

    def tick(self) -> None:
        """Do what waiting workers do when a round timeout has passed."""
        timeout = int(self.policy.round_timeout_seconds * SECOND) + 1
        self.now += timeout
        self.core.step(EventKind.TICK, 0, self.now, waited=timeout)
        self.see()

    def finish(self) -> None:
        """Until all have ended; fails if they never do."""
        for _ in range(200 * self.n):
            if len(self.ended) == self.n:
                return
            moved = [self.turn(k) for k in range(self.n)]
            self.now += SECOND // 10
            if not any(moved):
                self.tick()
        raise AssertionError(f"{self.policy} hangs: {len(self.ended)} of {self.n} have ended")


def partition(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges in order, adjoining ones joined."""
    joined: list[tuple[int, int]] = []
    for first, count in sorted(r for r in ranges if r[1]):
        if joined and joined[-1][0] + joined[-1][1] == first:
            joined[-1] = (joined[-1][0], joined[-1][1] + count)
        else:
            joined.append((first, count))
    return joined
