"""Workers over TCP: trained as beside the store, each push once, whoever dies, stops or goes away."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from remote_tools import process
from torch import nn

import pyps
from pyps.remote import open_store
from pyps.remote.calls import Calls
from pyps.remote.server import Server
from pyps.remote.store import RemoteStore
from pyps.store import Store
from pyps.values import Hyper

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = 60
SILENCE = 0.6
HYPER = Hyper(lr=0.5)
SIZE = 3000
torch.set_num_threads(1)


@pytest.fixture
def store(shm: Path) -> Iterator[Store]:
    """Two ranks, asynchronous: a push is a step of its own."""
    with Store.create("model", {"w": np.zeros(SIZE)}, batches=[4, 2], policy="asp", samples=60) as one:
        yield one


@pytest.fixture
def server(store: Store) -> Iterator[Server]:
    with Server("model", silence_seconds=SILENCE) as one:
        yield one


def open_remote(address: str) -> RemoteStore:
    store = open_store(address)
    assert isinstance(store, RemoteStore)
    return store


def push_ones(store: Store, samples: int) -> pyps.store.PushResult:
    area = store.stage()
    area["w"][:] = 1.0
    return store.push(area, samples, HYPER)


def test_all_that_a_store_does_goes_over_the_link() -> None:
    tree = ast.parse((ROOT / "pyps" / "store.py").read_text())
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "self._call"]
    names = {ast.unparse(call.args[0]).removeprefix("native.") for call in calls}
    assert len(names) > 15
    assert not {name for name in names if not hasattr(Calls, name)}


class TestTraining:
    """Synchronous training is bitwise reproducible: over the link the parameters are the local ones."""

    SPLIT = (11, 5)

    @staticmethod
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
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
        found[rank] = torch.cat([p.detach().flatten() for p in model.parameters()])

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

    @pytest.mark.parametrize("codec", ["f32", "bf16", "int8", "int4"])
    def test_over_the_link_is_as_beside_the_store(self, shm: Path, codec: str) -> None:
        beside = self.parameters("local", codec)
        with Server("model") as server:  # rank 0 makes the store through it
            assert torch.equal(self.parameters(server.address, codec), beside)
        assert not list(shm.iterdir()), "the server removes what was made through it"


SCRIPT = """
import sys, numpy as np
from pyps.errors import Ended
from pyps.remote import open_store
from pyps.values import Codec, Encoding, Hyper

x = np.random.default_rng(0).standard_normal((60, 6)).astype(np.float32)
y = np.random.default_rng(1).standard_normal((60, 2)).astype(np.float32)
how = Encoding(Codec.INT8, feedback=True)
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
