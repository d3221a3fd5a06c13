"""A model over several servers is one store: one version, a push counts everywhere or nowhere."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from remote_tools import eventually, process
from shard_tools import (
    CHUNK,
    ONE,
    SILENCE,
    address_of,
    backend,
    make,
    only_value,
    push,
    push_claimed,
    serving,
    stage_parts,
)
from torch import nn

from pyps.checkpoint.state import save
from pyps.errors import (
    InputError,
    InvalidArgument,
    NotFinite,
    PushRejected,
    SegmentExists,
    ShardLost,
    StoreError,
)
from pyps.formats.events import Undone, read_undone
from pyps.native.state import StoreState
from pyps.native.transfer import Ask, TransferRequest
from pyps.native.values import Encoding, Hyper, PushRequest, PushResult
from pyps.remote import create_store, open_store
from pyps.remote.address import parse_servers
from pyps.remote.server import Server
from pyps.shards.verbs import COMMIT
from pyps.store import Store
from pyps.store.codec import as_codec, fed_back
from pyps.store.policies import policy_named
from pyps.store.segments import remove_all
from pyps.store.staging import push_request
from pyps.worker.device.attach import inspect, open_or_create
from pyps.worker.run.settings import Settings

PYPS = str(Path(sys.executable).parent / "pyps")


@pytest.mark.parametrize(
    ("servers", "policy", "optimizer", "codec", "master"),
    [
        (2, "asp", "adamw", "f32", "f32"),
        (3, "dynsgd", "momentum", "int8", "f32"),
        (2, "ssp:bound=3", "adagrad", "bf16", "f32"),
        (3, "asp", "sgd", "int4", "f32"),
        (2, "r2sp", "adam", "f32", "f32"),
    ],
)
def test_the_same_pushes_make_the_same_state_as_on_one_server(
    shm: Path, servers: int, policy: str, optimizer: str, codec: str, master: str
) -> None:
    """Bit for bit: parameters, averaged tensors, the optimizer's vectors, steps and constants."""

    def states(store: Store, other: Store) -> tuple[StoreState, list[PushResult]]:
        draw, results = np.random.default_rng(3), []
        with store, other:
            store.join(0), other.join(1)
            for step in range(8):
                one = other if step % 2 else store
                claim = one.start()
                one.pull()
                staging = one.stage()
                staging.flat[:] = 0.0
                for name in ("a", "b", "c", "mean"):
                    staging[name][:] = draw.normal(size=staging[name].shape)
                hypers = [Hyper(lr=0.1 / (step + 1)), Hyper(lr=0.2, weight_decay=0.1), Hyper(lr=0.5)]
                results.append(one.push(staging, claim.count, hypers, scale=0.5, encoding=fed_back(codec)))
                one.pull()
            return store.state(), results

    tensors = {
        "a": np.linspace(0, 1, 2100),
        "b": np.linspace(-1, 1, 3000).reshape(3, 1000),
        "c": np.ones((5, 7)),
        "mean": np.arange(1500.0),
    }
    options = {
        "batches": [4, 2],
        "groups": {"b": 1, "mean": 2},
        "averaged": ["mean"],
        "policy": policy,
        "optimizer": optimizer,
        "chunk_params": CHUNK,
        "master": master,
    }
    near, near_results = states(Store.create("near", tensors, **options), Store.open("near"))
    with serving(servers) as (address, _):
        far, far_results = states(create_store(address, tensors, **options), open_store(address))
    assert [(r.version, r.staleness) for r in far_results] == [(r.version, r.staleness) for r in near_results]
    assert (far.header.version, far.header.steps) == (near.header.version, near.header.steps)
    assert (far.header.tensors, far.header.hyper) == (near.header.tensors, near.header.hyper)
    for name, values in near.parameters.items():
        np.testing.assert_array_equal(far.parameters[name], values, err_msg=name)
        for vector, arrays in near.vectors.items():
            if name in arrays:
                np.testing.assert_array_equal(far.vectors[vector][name], arrays[name], err_msg=vector)


def test_every_pull_is_of_one_version_while_others_push(shm: Path) -> None:
    """Each push adds 1 everywhere, so at version v every parameter is v: in pulls, snapshots and states."""
    with ExitStack() as stack:
        address, _ = stack.enter_context(serving(3))
        one = stack.enter_context(make(address, batches=[1, 1]))
        two, watcher = (stack.enter_context(open_store(address)) for _ in range(2))
        one.join(0), two.join(1), watcher.join(role="observer")
        stop = threading.Event()

        def push_on(store: Store) -> None:
            while not stop.is_set():
                push(store)

        threads = [threading.Thread(target=push_on, args=(store,)) for store in (one, two)]
        for thread in threads:
            thread.start()
        versions = []
        try:
            for k in range(40):
                if k % 10 == 9:
                    state = watcher.state()
                    found = set(state.parameters["w"].tolist()), state.header.version
                elif k % 10 == 4:
                    snapshot = watcher.snapshot()
                    found = set(snapshot.parameters.tolist()), snapshot.version
                else:
                    flat, version = watcher.pull()
                    found = set(flat.tolist()), version
                assert found[0] == {float(found[1])}
                versions.append(found[1])
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert versions == sorted(versions)
        assert versions[-1] > versions[0]


def same(server: Server) -> str:
    """Its address, written otherwise."""
    return server.address.replace("127.0.0.1", "localhost")


def test_what_cannot_be_over_several_servers_is_refused(shm: Path) -> None:
    with serving(2) as (address, (home, far)):
        for policy in ("bsp", "softsync"):
            with pytest.raises(InvalidArgument, match="expected one that takes each push by itself"):
                make(address, policy=policy)
        with pytest.raises(InvalidArgument, match="found 1 chunks of 1024 parameters for 2 servers"):
            make(address, CHUNK)
        for wrong in (address_of(far.address, home.address), address_of(home.address, same(home))):
            with pytest.raises(InvalidArgument, match="expected `pyps serve` with it at all but the first"):
                make(wrong)
    with serving(2) as (address, (home, far)), make(address) as store:
        store.join(0)
        claim, staging = store.start(), store.stage()
        with pytest.raises(InvalidArgument, match="clip_norm: found 1"):
            store.push(staging, claim.count, Hyper(lr=1.0, clip_norm=1.0))
        with pytest.raises(InvalidArgument, match="ranges"):
            store.pull(ranges=[(0, 5)])
        with pytest.raises(InvalidArgument, match="expected the addresses of its 2 servers"):
            open_store(home.address)
        with pytest.raises(InvalidArgument, match="found it on 2 servers; expected the 3 of the address"):
            open_store(address_of(home.address, far.address, same(home)))
        assert push_claimed(store, claim, -1.0).version == 1


@pytest.mark.parametrize("codec", ["f32", "bf16", "int8", "int4", "nf4"])
def test_an_encoded_pull_is_in_the_codec_that_is_asked_for(shm: Path, codec: str) -> None:
    """Encoded from fp32 at each server, whatever codec the address says: the same bytes as from one store."""
    draw = np.random.default_rng(3)
    tensors = {"a": draw.normal(size=2100), "b": draw.normal(size=3000), "mean": draw.normal(size=1500)}
    options: dict[str, Any] = {"groups": {"b": 1, "mean": 2}, "averaged": ["mean"], "chunk_params": CHUNK}
    options |= {"batches": [1], "policy": "asp"}
    with (
        serving(3) as (address, _),
        make(f"{address}&pull=int4", tensors=tensors, **options) as store,
        Store.create("near", tensors, **options) as near,
    ):
        store.join(0), near.join(0)
        before = store.traffic.received
        codes, version = store.pull_encoded(codec)
        assert store.traffic.received - before < codes.size + 4000
        assert version == 0
        np.testing.assert_array_equal(codes, near.pull_encoded(codec)[0])


def test_a_server_looks_at_halves_once(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When its part comes, not again when that is applied."""
    with serving(2) as (address, (_, far)), make(address) as store:
        store.join(0)
        applier, looked = far._shards.shard._applier, list[object]()
        apply = applier.push

        def pushed(request: PushRequest) -> PushResult:
            looked.append(None if request.looked is None else request.looked.tolist())
            return apply(request)

        monkeypatch.setattr(applier, "push", pushed)
        push(store, encoding="bf16")
        assert only_value(store) == (1.0, 1)
        assert looked == [[[0, 2 * CHUNK]]]
        claim, staging = store.start(), store.stage()
        codes = np.full(4 * CHUNK, 0xBF80, np.uint16)
        codes[-1] = 0x7F80
        with pytest.raises(NotFinite):
            store.push(staging, claim.count, ONE, encoding="bf16", gradient=codes.view(np.uint8))
        assert len(looked) == 1


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("codec", ["f32", "int8"])
def test_an_average_that_is_not_finite_is_refused_before_it_is_sent(
    shm: Path, servers: int, codec: str
) -> None:
    """A worker skips that step; behind a transfer that failed none counts. Or it leaves what is there."""
    tensors = {"a": np.zeros(2100), "mean": np.ones(1500)}
    with (
        serving(servers) as (address, _),
        make(address, tensors=tensors, groups={"mean": 1}, averaged=["mean"]) as store,
    ):
        store.join(0)
        claim, staging = store.start(), store.stage()
        staging["a"][:], staging["mean"][:] = -1.0, 3.0
        staging["mean"][7] = np.nan
        sent = store.traffic.sent
        request = push_request(staging, claim.count, ONE, groups=2, encoding=codec)
        with pytest.raises(NotFinite):
            store.begin_transfer(TransferRequest(request, ask=Ask(alone=True)))
        assert store.traffic.sent == sent
        skips = Encoding(as_codec(codec), nonfinite="skip")
        assert store.push(staging, claim.count, ONE, encoding=skips).version == 1
        mean = store.views(store.pull()[0])["mean"]
        assert mean[6:9].tolist() == [3.0, 1.0, 3.0]


def test_a_nan_in_one_part_refuses_the_push_at_every_server(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the client, or by the server whose part has it: the same."""
    with serving(2) as (address, servers), make(address) as store:
        store.join(0)
        claim, staging = store.start(), store.stage()
        staging.flat[:] = -1.0
        staging.flat[-1] = np.nan
        with pytest.raises(NotFinite):
            store.push(staging, claim.count, ONE)
        monkeypatch.setattr("pyps.remote.away.check_finite", lambda *_: None)
        with pytest.raises(NotFinite):
            store.push(staging, claim.count, ONE)
        assert store.status().version == 0
        staging.flat[:] = -1.0
        assert store.push(staging, claim.count, ONE).version == 1
        assert only_value(store) == (1.0, 1)
        nothing_staged(servers)


def nothing_staged(servers: list[Server]) -> None:
    eventually(lambda: not any(server._shards.shard._staged.tags() for server in servers))


def test_a_rejected_push_leaves_nothing_anywhere(shm: Path) -> None:
    with ExitStack() as stack:
        address, servers = stack.enter_context(serving(2))
        store = stack.enter_context(
            make(address, policy="saps:threshold=fixed,bound=1,scaling=none", batches=[1, 1])
        )
        other = stack.enter_context(open_store(address))
        store.join(0), other.join(1)
        stale = other.start()
        other.pull()
        for _ in range(4):
            push(store)
            store.pull()
        with pytest.raises(PushRejected):
            push_claimed(other, stale, -100.0)
        assert only_value(store) == (4.0, 4)
        nothing_staged(servers)


def test_a_state_goes_on_over_another_number_of_servers(shm: Path) -> None:
    with serving(2) as (address, _), make(address, optimizer="momentum") as store:
        store.join(0)
        for _ in range(3):
            push(store)
        state = store.state()
    with serving(3) as (address, _), create_store(address, state=state) as store:
        store.join(0)
        assert only_value(store) == (3.0, 3)
        push(store)
        assert only_value(store) == (4.0, 4)


KILLED = """
import sys
address, helpers = sys.argv[1:]
sys.path.insert(0, helpers)
from pyps.remote import open_store
from pyps.shards.verbs import COMMIT
from shard_tools import backend, stage_parts
stores = [open_store(address) for _ in range(2)]
for rank, store in enumerate(stores, 1):
    store.join(rank)
_, commit = [stage_parts(store, -5.0) for store in stores]
backend(stores[1]).client.post(COMMIT(commit))
print("staged", flush=True)
sys.stdin.read()
"""


def test_a_worker_killed_before_its_commit_pushes_nowhere_and_after_it_everywhere(shm: Path) -> None:
    helpers = str(Path(__file__).parents[1] / "helpers")
    with serving(3) as (address, servers), make(address, batches=[1, 1, 1]) as store:
        store.join(0)
        with process(KILLED, address, helpers) as worker:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "staged\n"
            eventually(lambda: store.status().version == 1)
            worker.kill()
        nothing_staged(servers)
        push(store)
        assert only_value(store) == (6.0, 2)


def test_where_a_shard_is_lost_a_state_replaces_all_and_says_what_is_undone(shm: Path) -> None:
    with serving(2) as (address, (_, far)), make(address) as store:
        store.join(0)
        push(store)
        state = store.state()
        with pytest.raises(SegmentExists):
            create_store(address, state=state)
        for _ in range(2):
            push(store)
        far._shards.shard.close(remove=True)  # its host was started anew
        far._shards._shard = None
        with pytest.raises(ShardLost, match="found no shard of it at this server"):
            open_store(address)
        with pytest.warns(UserWarning, match="all go back to version 1, and 2 pushes are undone"):
            other = create_store(address, state=state)
        with other:
            other.join(0)
            push(other)
            assert only_value(other) == (2.0, 2)
        with pytest.raises(StoreError):
            push(store)


@pytest.mark.parametrize("lost_one", ["far", "all"])
def test_rank_0_brings_a_lost_store_back_to_the_last_checkpoint(
    shm: Path, tmp_path: Path, lost_one: str
) -> None:
    model = nn.Linear(300, 300)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.0)
    attachment = inspect(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with ExitStack() as stack:
        address, (_, far) = stack.enter_context(serving(2))
        settings = Settings(store=address, rank=0, policy=policy_named("asp:scaling=none"), run_dir=tmp_path)
        settings = replace(settings, batches=(1,), launched=True)
        store = stack.enter_context(open_or_create(settings, attachment, 5.0))
        store.join(0)
        push(store)
        save(store.state(), tmp_path / "checkpoints")
        push(store)
        store.leave()
        if lost_one == "far":
            far._shards.shard.close(remove=True)
            far._shards._shard = None
            with pytest.warns(UserWarning, match="all go back to version 1, and 1 pushes are undone"):
                again = stack.enter_context(open_or_create(settings, attachment, 5.0))
        else:
            stack.close()
            address, _ = stack.enter_context(serving(2))
            again = stack.enter_context(open_or_create(replace(settings, store=address), attachment, 5.0))
        again.join(0)
        values, version = again.pull()
        assert (set(values[:90_000].tolist()), version) == ({1.0}, 1)
        assert read_undone(tmp_path) == ([Undone(1, 1)] if lost_one == "far" else [])


def test_servers_of_one_machine_take_up_their_own_shards(shm: Path) -> None:
    """The one that is free, and none that another server holds."""
    with serving(3) as (address, servers), make(address) as store:
        store.join(0)
        push(store)
        killed = servers[2]._shards
        killed.shard.close(remove=False)
        killed._shard = None
        with Server("model", "tcp://127.0.0.1:*", insecure=True, home=servers[0].address) as again:
            assert again._shards.shard.name == "model.shard-2-of-3"
            eventually(lambda: again._shards.shard.version == 1)
    remove_all("model")


def test_what_servers_leave_of_a_store_is_removed_and_nothing_else(shm: Path) -> None:
    with serving(2) as (address, servers), make(address) as store:
        store.join(0)
        stage_parts(store, -1.0)
        others = ("model-2", "model.shard-0-of-2x")
        for name in others:
            Store.create(name, {"w": np.zeros(4)}, batches=[1], keep=True).close()
        assert len(list(shm.glob("*.staged-*"))) == 2
        for server in servers:
            server._shards.close(remove=False)
        remove_all("model")
        assert {path.name for path in shm.iterdir()} == {f"pyps-{name}" for name in others}
        for name in others:
            remove_all(name)


class Served:
    """A `pyps serve` process on a port of its own, which can be killed and started again."""

    def __init__(self, folder: Path, *options: str) -> None:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = one.getsockname()[1]
        folder.mkdir()
        self._environment = {**os.environ, "PYPS_SHM_DIR": str(folder)}
        self._options = options
        self.start()

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}/model?insecure=1"

    def start(self) -> None:
        bind = ("--bind", f"tcp://127.0.0.1:{self.port}", "--insecure", "--client-timeout", str(SILENCE))
        self.process = subprocess.Popen(
            [PYPS, "serve", "model", *bind, *self._options],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith(b"serving")

    def end(self, number: int) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.send_signal(number)
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Served, Served]]:
    home = Served(tmp_path / "home")
    far = Served(tmp_path / "far", "--home", home.address)
    try:
        yield home, far
    finally:
        for one in (far, home):
            one.end(signal.SIGINT)  # after a SIGTERM it would wait for workers to leave


def lost(call: Callable[[], object]) -> None:
    """Do what a server that has gone may refuse or leave unanswered."""
    with suppress(StoreError):
        call()


def test_a_server_killed_after_the_decision_loses_no_part_of_it(pair: tuple[Served, Served]) -> None:
    """The far server has its part and not yet the decision, as it stands still; then one is killed."""
    home, far = pair
    address = address_of(home.address, far.address)
    make(address).close()
    value, version = 0.0, 0
    for dies in (far, home):
        with open_store(address) as store:
            store.join(0)
            push(store)
            value, version = value + 1.0, version + 1
            assert only_value(store) == (value, version)
            commit = stage_parts(store, -5.0)
            far.process.send_signal(signal.SIGSTOP)
            backend(store).client.call(COMMIT(commit))
            value, version = value + 5.0, version + 1
            dies.end(signal.SIGKILL)
            far.process.send_signal(signal.SIGCONT)
            dies.start()
            lost(store.close)
    with open_store(address) as store:
        store.join(0)
        assert only_value(store) == (value, version) == (12.0, 4)


def test_addresses_of_several_servers() -> None:
    servers = parse_servers("tcp://a:1,[::1]:2/model?keys=x.key,y.key&pull=int8")
    assert [(s.host, s.port, s.keys, s.store) for s in servers] == [
        ("a", 1, "x.key", "model"),
        ("::1", 2, "y.key", "model"),
    ]
    assert {s.keys for s in parse_servers("tcp://a:1,b:2/model?keys=x.key")} == {"x.key"}
    assert len(parse_servers("tcp://a:1/model?insecure=1")) == 1
    for wrong in ("tcp://a:1,a:1/m?insecure=1", "tcp://a:1,b/m?insecure=1", "tcp://a:1,b:2/m?keys=x,y,z"):
        with pytest.raises(InputError):
            parse_servers(wrong)
