"""Hold what one server has of a model over several: its shard, and at the first the log of decisions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from pyps.errors import (
    Busy,
    InvalidArgument,
    LinkLost,
    LinkRefused,
    SegmentExists,
    SegmentNotFound,
    StoreClosed,
    StoreError,
    TimedOut,
)
from pyps.native.interrupt import check_waits
from pyps.native.local import LocalBackend
from pyps.native.state import StoreState
from pyps.native.values import Config, Layout, Tag, Tensor
from pyps.remote.address import parse_address
from pyps.remote.client import Client
from pyps.remote.site import Home
from pyps.remote.verbs import HELLO
from pyps.remote.wire import PROTOCOL
from pyps.shards.decisions import DecisionLog, Decisions
from pyps.shards.proofs import receipt, same
from pyps.shards.shard import ShardStore, create_shard
from pyps.shards.verbs import ENTRIES, FOLLOW, Following, LogEntry
from pyps.store.marks import run_and_servers, seal_of, sealed
from pyps.store.segments import PREFIX, SHARD, STAGED, folder, shard_name

LOOK_SECONDS = 0.05  # between two looks for a lost shard


class ShardHost:
    """For a server of this store. home: the first server's address, or what gives it each time that it is
    needed; None: this is the first.

    opened: called with the layout of a shard that is here. Thread-safe.
    """

    def __init__(self, store: str, home: Home | None, opened: Callable[[Layout], None]) -> None:
        self._store, self._home, self._opened = store, home, opened
        if isinstance(home, str):
            parse_address(home)
        self._lock = threading.Lock()
        self._log: DecisionLog | None = None
        self._shard: ShardStore | None = None
        self._read_at: dict[int, float] = {}  # when each other server last read the log
        self._closed = False

    def open_existing(self) -> None:
        """Go on with what an earlier server has left here. Raises StoreError."""
        if self._home is None:
            self.created()
        for path in sorted(folder().glob(f"{PREFIX}{self._store}.shard-*")):
            name = path.name.removeprefix(PREFIX)
            found = SHARD.fullmatch(name)
            if STAGED in name or found is None or found["store"] != self._store:
                continue
            if (found["index"] == "0") == (self._home is None):
                try:
                    self._open_shard(name)
                    return
                except Busy:  # another server's, on this machine too
                    if self._home is None:
                        raise  # this would be a second first one

    def created(self) -> None:
        """Begin the log if the store is a head."""
        try:
            found = LocalBackend.open(self._store)
        except StoreError:
            return  # none yet, or a damaged one: clients that open it get the error
        marked = run_and_servers(found.tensors)
        found.close()
        with self._lock:
            if marked is not None and self._log is None and not self._closed:
                self._log = DecisionLog(self._store)

    def note_read(self, index: int) -> None:
        """The server of shard `index` reads the log, as each does several times a second."""
        self._read_at[index] = time.monotonic()

    def check_receipts(self, tag: Tag, receipts: tuple[bytes, ...]) -> None:
        """Raise InvalidArgument unless these are those of all shards for their parts of a gradient."""
        shard = self.shard
        expected = [receipt(shard.seal, index, tag) for index in range(shard.servers)]
        if len(receipts) != len(expected) or not all(map(same, receipts, expected)):
            found = f"receipts: found {len(receipts)}, or wrong ones"
            raise InvalidArgument("push", f"{found}; expected those of all {len(expected)} servers")

    def await_lost(self, run: int, seconds: float) -> None:
        """Wait so long for each shard to read the log. Raises InvalidArgument once all have."""
        began, log = time.monotonic(), self._log_of(run)
        while self._shard is None or self._shard.fault is not None or self._readers(began) < log.servers - 1:
            if time.monotonic() >= began + seconds:
                return
            check_waits()
            time.sleep(LOOK_SECONDS)
        raise InvalidArgument("remove", f"found all {log.servers} shards; expected one that is lost")

    def _readers(self, since: float) -> int:
        """How many other servers have read the log since then."""
        return sum(at >= since for at in list(self._read_at.values()))

    def _log_of(self, run: int) -> DecisionLog:
        if self._log is None or self._log.run != run:
            raise InvalidArgument("remove", f"store {self._store!r}: found no head of run {run:016x}")
        return self._log

    def remove_head(self, run: int) -> None:
        """Raises InvalidArgument unless the head is of this run. Its clients' calls fail from now on."""
        with self._lock:
            log = self._log_of(run)
            log.remove()
            log.close()
            self._log = None

    @property
    def log(self) -> DecisionLog:
        """Raises InvalidArgument where there is none."""
        if self._log is None:
            found = "found a store on one server, or another than the first of several"
            raise InvalidArgument("decisions", f"store {self._store!r}: {found}")
        return self._log

    @property
    def is_head(self) -> bool:
        return self._log is not None

    @property
    def shard(self) -> ShardStore:
        """Raises SegmentNotFound where there is none."""
        if self._shard is None:
            raise SegmentNotFound("shard", f"store {self._store!r}: found no shard of it at this server")
        return self._shard

    def check_place(self, index: int) -> None:
        """Raise InvalidArgument unless this server is one for shard `index`."""
        if (self._home is None) != (index == 0):
            found = f"server {index + 1} of the address: found {'no ' * (self._home is None)}--home"
            raise InvalidArgument("create", f"{found}; expected `pyps serve` with it at all but the first")

    def create(self, index: int, config: Config, state: StoreState | None) -> ShardStore:
        """Make the shard of this server. Raises InvalidArgument, SegmentExists, OutOfSpace."""
        marked = run_and_servers(config.tensors)
        if marked is None or not index < marked[1]:
            raise InvalidArgument("create", f"index: found {index}; expected a shard's, and its tensors")
        self.check_place(index)
        self._check_seal(seal_of(config.tensors))
        name = shard_name(self._store, index, marked[1])
        with self._lock:
            if self._closed:
                raise LinkLost("create", "the server is ending")
            if self._shard is not None and self._shard.run == marked[0] and self._shard.fault is None:
                raise SegmentExists("create", f"{name!r}: found it here")
            if self._shard is not None:  # of an earlier run
                self._shard.close(remove=True)
                self._shard = None
            create_shard(name, config, state)
        self._open_shard(name)
        return self.shard

    def _check_seal(self, seal: bytes) -> None:
        """Raise InvalidArgument unless it is that of the head, which the shards' maker has made."""
        tensors: Sequence[Tensor] = ()
        if self._home is not None:
            tensors = head_tensors(self._home)
        elif self._log is not None:
            tensors = self._log.tensors
        if not same(seal_of(tensors), sealed(seal)):
            raise InvalidArgument("create", "found a shard of another model than the first server's")

    def _open_shard(self, name: str) -> None:
        source = HomeLog(self) if self._home is None else FarLog(self._home)
        with self._lock:
            found = SHARD.fullmatch(name)
            assert found is not None
            self._shard = ShardStore(name, int(found["index"]), source)
            self._opened(self._shard.layout)

    def close(self, remove: bool) -> None:
        """End; remove: the shard's segment. Idempotent."""
        with self._lock:
            self._closed = True
            if self._log is not None:
                self._log.close()
            if self._shard is not None:
                self._shard.close(remove)


class HomeLog:
    """The log of the same server, once there is one."""

    def __init__(self, host: ShardHost) -> None:
        self._host = host

    def connect(self) -> Decisions:
        if not self._host.is_head:
            raise TimedOut("shard", "it has no head yet")
        return _Local(self._host.log)

    def stop(self) -> None:
        pass  # the log ends with the server

    def close(self) -> None:
        pass


class _Local:
    """A log that ends as one at another server does: with LinkLost."""

    def __init__(self, log: DecisionLog) -> None:
        self._log = log

    def follow(self, seal: bytes, index: int, version: int) -> Following:
        return self._log.follow(seal, index, version)

    def entries(self, index: int, timeout: float) -> list[LogEntry]:
        try:
            return self._log.entries(index, timeout)
        except StoreClosed as error:
            raise LinkLost("decisions", str(error)) from None


def head_tensors(home: Home) -> tuple[Tensor, ...]:
    """Return the tensors of the store at the first server. Raises StoreError where that cannot be asked."""
    address = parse_address(home if isinstance(home, str) else home())
    client = Client(address)
    try:
        return client.call(HELLO(PROTOCOL, address.store)).tensors
    except (LinkLost, LinkRefused) as error:  # to the caller it is not its own link
        raise StoreError("create", f"the first server: {error}") from None
    finally:
        client.close()


class FarLog:
    """The log at the first server."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._closed = False

    def connect(self) -> Decisions:
        """A new session; the one before is over."""
        self.close()
        address = parse_address(self._home if isinstance(self._home, str) else self._home())
        client = Client(address)
        with self._lock:
            if self._closed:
                client.close()
                raise LinkLost("shard", "the server is ending")
            self._client = client
        try:
            reply = client.call(HELLO(PROTOCOL, address.store))
        except SegmentNotFound as error:
            raise TimedOut("shard", str(error)) from None
        client.set_server(reply.server, reply.client_timeout_seconds)
        return _Far(client)

    def stop(self) -> None:
        with self._lock:
            self._closed = True
            if self._client is not None:
                self._client.give_up("the server is ending")

    def close(self) -> None:
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()


class _Far:
    """A log at the other end of a session."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def follow(self, seal: bytes, index: int, version: int) -> Following:
        return self._client.call(FOLLOW(seal, index, version))

    def entries(self, index: int, timeout: float) -> list[LogEntry]:
        return self._client.call(ENTRIES(index, timeout))
