"""Workers over TCP train as local ones do, and each push counts once."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from remote_tools import process
from torch import nn

import pyps
from pyps.native.values import Codec, DataSet, Encoding, Hyper, Rounding
from pyps.remote import create_store, open_store
from pyps.remote.server import Server
from pyps.store import Store
from pyps.store.codec import decode, encode
from pyps.store.segments import collect_garbage

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = 60
torch.set_num_threads(1)


@pytest.mark.filterwarnings("ignore:the model's BatchNorm takes:UserWarning")
class TestTraining:
    """Synchronous training is bitwise reproducible: over the link the parameters are the local ones."""

    SPLIT = (11, 5)

    @staticmethod
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(self, name: str, rank: int, codec: str, found: dict[int, torch.Tensor]) -> None:
        x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0))
        y = torch.randn(SAMPLES, 2, generator=torch.Generator().manual_seed(1))
        model, optimizer = self.models[rank]
        options: dict[str, Any] = {"batches": list(self.SPLIT), "samples": 3 * SAMPLES, "seed": 5}
        worker = pyps.join(name, rank, codec=codec, **options)
        self.workers.append(worker)
        worker.attach(model, optimizer)
        for inputs, targets in worker.batches((x, y)):
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            worker.step(loss)
        found[rank] = torch.cat([value.detach().flatten() for value in model.state_dict().values()])

    def parameters(self, name: str, codec: str) -> torch.Tensor:
        self.models = [self.make() for _ in self.SPLIT]
        self.workers: list[pyps.Worker] = []
        found: dict[int, torch.Tensor] = {}
        threads = [
            threading.Thread(target=self.train, args=(name, rank, codec, found), daemon=True)
            for rank in range(len(self.SPLIT))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for worker in self.workers:
            worker.close()
        assert len(found) == 2
        assert torch.equal(found[0], found[1])
        return found[0]

    @pytest.mark.parametrize("codec", ["f32", "bf16", "int8", "int4", "nf4"])
    def test_training_over_the_link_equals_local_training(self, shm: Path, codec: str) -> None:
        local = self.parameters("local", codec)
        with Server("model") as server:  # rank 0 makes the store through it
            assert torch.equal(self.parameters(server.address, codec), local)
        assert not list(shm.iterdir()), "the server removes what was made through it"


SCRIPT = """
import sys, numpy as np
from pyps.errors import Ended
from pyps.remote import open_store
from pyps.native.values import Codec, Encoding, Hyper

x = np.random.default_rng(0).standard_normal((60, 6)).astype(np.float32)
y = np.random.default_rng(1).standard_normal((60, 2)).astype(np.float32)
how = Encoding(Codec.INT8, error_feedback=True)
with open_store(sys.argv[1]) as store:
    store.join(int(sys.argv[2]))
    flat, _ = store.pull()
    try:
        while True:
            claim = store.start()
            store.pull(flat)
            rows = np.arange(claim.first, claim.first + claim.count) % 60
            error = x[rows] @ store.views(flat)["w"] - y[rows]
            area = store.stage()
            area["w"][:] = x[rows].T @ error / claim.count
            store.push(area, claim.count, Hyper(lr=0.01), encoding=how)
    except Ended:
        print(store.pull(strict=True)[0].tobytes().hex())
"""


def test_two_processes_over_the_link_get_what_local_ones_get(shm: Path) -> None:
    results, options = [], {"batches": [7, 3], "optimizer": "adamw", "samples": 200}
    for k in range(2):
        with (
            Store.create(f"model-{k}", {"w": np.ones((6, 2))}, **options) as store,
            Server(store.name) as server,
        ):
            name = server.address if k else store.name
            with process(SCRIPT, name, "0") as one, process(SCRIPT, name, "1") as two:
                results += [one.communicate(timeout=60)[0], two.communicate(timeout=60)[0]]
                assert one.returncode == two.returncode == 0
            assert store.status().version == 20
            assert (server.counters.calls > 0) == bool(k)
    assert len(results[0]) > 50
    assert len(set(results)) == 1


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("given", [False, True], ids=["staged", "given"])
def test_what_lies_between_the_parameters_is_not_sent(shm: Path, rounding: Rounding, given: bool) -> None:
    """Rubbish in a chunk's padding changes no scale, and a caller's own gradient is left as it was."""
    how = Encoding(Codec.INT8, rounding, error_feedback=True, seed=3)
    found = []
    for k in range(2):
        tensors = {"a": np.zeros(100), "b": np.zeros(300)}
        options = {"batches": [1], "policy": "asp", "groups": {"b": 1}}
        with Store.create(f"model-{k}", tensors, **options) as store, Server(store.name) as server:
            with open_store(server.address if k else store.name) as worker:
                worker.join()
                rng = np.random.default_rng(5)
                for _ in range(3):
                    worker.start()
                    staging = worker.stage()
                    gradient = np.full(staging.flat.size, 1e6, np.float32) if given else staging.flat
                    gradient[:] = 1e6
                    for view in worker.views(gradient).values():
                        view[:] = rng.standard_normal(view.size)
                    before = gradient.copy()
                    own = gradient if given else None
                    worker.push(staging, 1, [Hyper(lr=0.1)] * 2, scale=0.5, encoding=how, gradient=own)
                    assert not given or np.array_equal(before, gradient)
            found.append(store.snapshot().tensors)
    assert np.any(found[0]["a"])
    for name in ("a", "b"):
        assert np.array_equal(found[0][name], found[1][name])


def test_codes_made_elsewhere_travel_as_they_are(shm: Path) -> None:
    with (
        Store.create("model", {"w": np.zeros(5000)}, batches=[1], policy="asp") as store,
        Server("model") as server,
        open_store(server.address + "?pull=bf16") as far,
    ):
        far.join()
        far.start()
        codes, _ = encode(np.full(far.layout.flat_elements, -2.0, np.float32), "int4")
        out = np.zeros(far.layout.flat_elements, np.float32)
        result, version = far.exchange(far.stage(), 1, Hyper(lr=1.0), out, encoding="int4", gradient=codes)
        assert (result.version, version) == (1, 1)
        assert np.all(far.views(out)["w"] == 2.0)
        data, _ = far.pull_encoded("int8")
        assert np.allclose(far.views(decode(data, "int8", out.size))["w"], 2.0, atol=1e-6)
        snapshot, here = far.snapshot(), store.snapshot()
        assert np.array_equal(far.pull(strict=True)[0], here.parameters)
        assert snapshot.version == here.version
        assert np.array_equal(snapshot.steps, here.steps)


@pytest.mark.parametrize(
    "policy", [p for p in sorted(pyps.store.policies.Policy.known) if p not in ("custom",)]
)
def test_every_policy_decides_over_the_link_as_locally(shm: Path, policy: str) -> None:
    """One worker, whose pushes are stale now and then."""
    found = []
    for k in range(2):
        tensors, name = {"w": np.ones(5)}, f"model-{k}"
        with (
            Store.create(name, tensors, batches=[4], samples=24, policy=policy) as store,
            Server(name) as server,
            open_store(server.address if k else name) as one,
        ):
            one.join()
            flat, _ = one.pull()
            for turn in range(6):
                claim = one.start()
                staging = one.stage()
                staging["w"][:] = flat[:5] + turn
                one.set_max_samples(4)
                one.set_data_set(DataSet(60, 7, 0.5, 0.1))
                assert one.should_continue(0, claim.count) is pyps.native.decisions.Advice.CONTINUE
                one.push(staging, claim.count, Hyper(lr=0.1), grad_norm_squared=1.0)
                if turn % 2 or policy == "r2sp":
                    one.pull(flat)
            found.append(store.snapshot().parameters.copy())
    assert np.array_equal(found[0], found[1])
    assert not np.array_equal(found[0][:5], np.ones(5))


def test_a_server_keeps_the_memory_of_gradients_but_not_of_a_new_store(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each gradient's frames come page by page from the kernel, which took a third of an exchange."""
    calls: list[str] = []
    for name in ("server.disable_malloc_trim", "session.trim_malloc"):
        monkeypatch.setattr(f"pyps.remote.{name}", partial(calls.append, name))
    with Server("model") as one:
        assert calls == ["server.disable_malloc_trim"]
        with create_store(one.address, {"w": np.ones(2)}, batches=[1], policy="asp") as store:
            store.join()
            store.start()
            staging = store.stage()
            staging.flat.fill(1.0)
            store.push(staging, 1, Hyper(lr=0.5))
            assert store.pull()[0][0] == 0.5
    assert calls == ["server.disable_malloc_trim", "session.trim_malloc"]


@pytest.mark.parametrize("made_by", ["client", "another server"])
def test_a_served_store_without_clients_is_no_garbage(shm: Path, made_by: str) -> None:
    """Between two runs, or while all hosts start again, only the server holds it."""
    tensors = {"w": np.full(8, 3.0, np.float32)}
    if made_by != "client":
        Store.create("idle", tensors, batches=[1], policy="asp", keep=True).close()
    with Server("idle") as server:
        if made_by == "client":
            create_store(server.address, tensors, batches=[1], policy="asp").close()
        removed, kept = collect_garbage()
        assert ([s.name for s in removed], [s.name for s in kept]) == ([], ["idle"])
        with open_store(server.address) as far:
            assert far.snapshot().tensors["w"][0] == 3.0
    removed, _ = collect_garbage()
    assert [s.name for s in removed] == ([] if made_by == "client" else ["idle"])


def test_numbers_of_numpy_travel_as_pythons(shm: Path) -> None:
    with Server("numpy", "tcp://127.0.0.1:*", insecure=True) as server:
        batches = np.array([4])
        with create_store(server.address, {"w": np.ones(3)}, batches=batches, samples=np.int64(9)) as store:
            store.join(np.int64(0))
            assert store.start(np.float32(1.0)).count == 4
            gradient = np.ones(store.layout.flat_elements, np.float32)
            assert store.push(None, np.int64(4), Hyper(np.float32(0.5)), gradient=gradient).version == 1
            assert store.views(store.pull()[0])["w"].tolist() == [0.5, 0.5, 0.5]
            store.set_max_samples(np.int64(2))
