"""Runs on a real Ray cluster of raylets on this machine; skipped where ray is not installed.

Every gradient is 1 and the step 1, so that a push of b of B samples takes b / B from the parameter: numbers
that fp32 holds exactly. At the end the parameter tells how many samples counted: all of them, once.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray_train import SLOW_STEPS, fail, train, train_wide
from run_tools import make_plan
from safetensors.numpy import load_file

import pyps.ray
from pyps.errors import InputError
from pyps.formats import read_profile, write_json
from pyps.formats.events import RunEvent, read_events
from pyps.formats.records import read_run
from pyps.ray.profiles import device_kinds
from pyps.report.report import Report
from pyps.run.launcher import TrainingFailed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
B = 8
PATIENCE_SECONDS = 90.0
PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "ray.md"
HELPERS = str(Path(__file__).resolve().parents[1] / "helpers")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two raylets: this process's, and one that alone has the resource `far`. A server can be on each."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    temporary = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # short: Ray's sockets lie there
    segments = tempfile.mkdtemp(prefix="test-pyps-", dir="/dev/shm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYPS_SHM_DIR", segments)
        patch.setenv("RAY_TMPDIR", temporary)  # where Ray notes the cluster's address
        os.mkdir(f"{temporary}/ray")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", HELPERS, prepend=os.pathsep)
        head = {"num_cpus": 2, "resources": {"serve": 1}, "include_dashboard": False, "temp_dir": temporary}
        started = Cluster(initialize_head=True, head_node_args={**head, "object_store_memory": 80 << 20})
        try:
            started.add_node(num_cpus=0, resources={"far": 1, "serve": 1}, object_store_memory=80 << 20)
            ray.init(address=started.address, logging_level="error", log_to_driver=False)
            yield started
            assert not os.listdir(segments), "segments left behind"
        finally:
            ray.shutdown()
            started.shutdown()
            shutil.rmtree(temporary)
            shutil.rmtree(segments)


class Running:
    """A run under way in a thread, and what it has written."""

    def __init__(self, folder: Path, *arguments: Any, **options: Any) -> None:
        write_json(folder / "plan.json", make_plan([4, 4]))
        self.out = folder / "out"
        self.report: Report | None = None
        self.error: BaseException | None = None
        self.options = options = {"policy": "asp", "run_dir": self.out, "client_timeout": 2.0, **options}
        self._trainer = pyps.ray.Trainer(arguments[0], folder / "plan.json", *arguments[1:], **options)
        self._thread = threading.Thread(target=self._fit, daemon=True)
        self._thread.start()
        self.until(self.out.exists)

    def _fit(self) -> None:
        try:
            self.report = self._trainer.fit()
        except BaseException as error:
            self.error = error

    def events(self, kind: str, rank: int | None = None) -> list[RunEvent]:
        path = self.out / "run.jsonl"
        found = read_events(path) if path.exists() else []
        return [event for event in found if event.kind == kind and event.rank == rank]

    def checkpoints(self) -> list[int]:
        return [event.version or 0 for event in self.events("checkpoint")]

    def port(self, number: int) -> int:
        """Where this server listens."""
        noted = self.out / f"server-{number}.address"
        self.until(noted.exists)
        return int(noted.read_text().partition("/")[0].rpartition(":")[2])

    def server(self, number: int) -> psutil.Process:
        (found,) = [p for p in processes("ray::StoreActor") if self.port(number) in listening(p)]
        return found

    def joined(self, rank: int, times: int) -> int:
        """The process that joined as this rank that many times; waits for it."""
        self.until(lambda: len(self.events("joined", rank)) >= times)
        return self.events("joined", rank)[times - 1].pid or 0

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if self.error is not None:
                raise self.error
            assert self._thread.is_alive(), "the run has ended"
            assert time.monotonic() < deadline, "timed out"
            time.sleep(0.05)

    def go(self) -> None:
        """Let the ranks train at full speed to the end."""
        (self.out / "go").touch()

    def finish(self) -> Report:
        self.go()
        self._thread.join(PATIENCE_SECONDS)
        if self.error is not None:
            raise self.error
        assert self.report is not None, "timed out"
        return self.report

    def check_exact(self, samples: int) -> None:
        report = self.finish()
        assert report.samples.trained == samples
        (weight,) = load_file(self.out / "model.safetensors").values()
        by_rounds = self.options["policy"] == "bsp"  # a round takes 1, however many samples it has
        expected = (-report.versions if by_rounds else -samples / B) / len(weight)
        assert set(weight.flatten().tolist()) == {expected}


def processes(title: str) -> list[psutil.Process]:
    """Ray's processes that run an actor of this class."""
    return [p for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [""])[0].startswith(title)]


def listening(process: psutil.Process) -> dict[int, str]:
    """The ports at which it listens, and the address of each."""
    found = [c.laddr for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return {address.port: address.ip for address in found}


@contextmanager
def hosts(cluster: Any, count: int) -> Iterator[tuple[Callable[[Path | None], None], dict[Path, Any]]]:
    """Nodes that can have a shard each, by the folder of their segments, and what adds another.

    Without a folder its memory is a new one's. The nodes and the folders are gone at the end.
    """
    nodes: dict[Path, Any] = {}
    folders: list[Path] = []

    def add(folder: Path | None = None) -> None:
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="test-pyps-", dir="/dev/shm"))
            folders.append(folder)
        env = {"PYPS_SHM_DIR": str(folder)}
        options = {"num_cpus": 0, "object_store_memory": 80 << 20, "env_vars": env}
        nodes[folder] = cluster.add_node(resources={"shard": 1}, **options)

    try:
        for _ in range(count):
            add()
        yield add, nodes
        assert not [path for folder in nodes for path in folder.iterdir()], "segments left behind"
    finally:
        for node in nodes.values():
            cluster.remove_node(node)
        for folder in folders:
            shutil.rmtree(folder)


def test_ranks_on_one_node_use_its_memory_and_nothing_listens(cluster: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nfrom ray_train import train\nassert sys.argv[1] == 'now'\ntrain()\n")
    run = Running(tmp_path, script, samples=40 * B, policy="bsp", args=["now"])
    run.check_exact(40 * B)
    assert run.report is not None
    assert run.report.versions == 40
    assert not (run.out / "keys").exists()
    again = pyps.ray.Trainer(script, None, samples=50 * B, resume=run.out, args=["now"])
    assert again.fit().versions == 50


def test_killed_workers_and_servers_lose_nothing(cluster: Any, tmp_path: Path) -> None:
    """Rank 1 is on the other node, with a key of its own; its server dies too."""
    samples = 2000 * B
    run = Running(tmp_path, train, {"device-1": {"far": 1}}, samples=samples)
    near, far = run.joined(0, 1), run.joined(1, 1)
    assert (run.out / "keys" / "rank-1.key").exists()
    assert not (run.out / "keys" / "rank-0.key").exists()
    server = run.server(0)
    assert listening(server)[run.port(0)] == cluster.head_node.node_ip_address
    os.kill(near, signal.SIGKILL)
    assert run.joined(0, 2) != near
    os.kill(far, signal.SIGKILL)
    assert run.joined(1, 2) != far
    server.send_signal(signal.SIGKILL)
    run.joined(1, 3)
    run.check_exact(samples)
    assert [len(run.events("died", rank)) for rank in (0, 1)] == [1, 2]
    assert run.events("died", 0)[0].detail.startswith("its actor died")


def test_killed_servers_of_a_store_over_two_nodes_lose_nothing(cluster: Any, tmp_path: Path) -> None:
    """Each is started again where its shard is, and found there."""
    samples = 800 * B
    shards = {"servers": 2, "server_resources": {"serve": 1}, "max_restarts": 9}
    run = Running(tmp_path, train_wide, {"device-1": {"far": 1}}, samples=samples, **shards)
    near, far = run.joined(0, 1), run.joined(1, 1)
    servers = {number: run.server(number) for number in (0, 1)}
    assert sorted(path.name for path in (run.out / "keys").glob("*.key")) == [
        *("client.key", "rank-0.key", "rank-1.key", "server-1.key", "server.key", "trainer.key")
    ]
    for number, server in servers.items():
        assert listening(server)[run.port(number)] == cluster.head_node.node_ip_address
    os.kill(near, signal.SIGKILL)
    assert run.joined(0, 2) != near
    for times, number in enumerate((1, 0), 1):
        servers[number].send_signal(signal.SIGKILL)
        assert run.joined(1, 1 + times) != far
    run.check_exact(samples)
    assert run.report is not None
    assert run.report.undone == 0


@pytest.mark.parametrize(("number", "survives"), [(0, False), (1, False), (1, True)])
def test_a_lost_node_of_a_server_takes_all_shards_back_to_the_checkpoint(
    cluster: Any, tmp_path: Path, number: int, survives: bool
) -> None:
    """Every rank waits after its slow steps, so that the pushes are known. Where the host's memory survives,
    as if Ray alone was killed there, nothing is undone.
    """
    with hosts(cluster, 2) as (add, nodes):
        options = {"servers": 2, "server_resources": {"shard": 1}, "checkpoint_every": 150}
        run = Running(tmp_path, train_wide, {"device-1": {"far": 1}}, samples=800 * B, **options)
        pushes = 2 * SLOW_STEPS
        run.until(lambda: run.checkpoints() and len(read_run(run.out)) == pushes)
        (host,) = [folder for folder in nodes if list(folder.glob(f"*.shard-{number}-of-2"))]
        cluster.remove_node(nodes.pop(host), allow_graceful=False)
        add(host if survives else None)
        kept = run.checkpoints()[-1]
        run.check_exact(800 * B)
        assert run.report is not None
        assert run.report.undone == (0 if survives else pushes - kept)
        assert [event.version for event in run.events("undone")] == ([] if survives else [kept])


def test_a_lost_node_leaves_and_another_one_joins(cluster: Any, tmp_path: Path) -> None:
    lost = cluster.add_node(num_cpus=0, resources={"spot": 1}, object_store_memory=80 << 20)
    samples = 2000 * B
    run = Running(tmp_path, train, {"device-1": {"spot": 1}}, samples=samples, policy="bsp")
    run.joined(1, 1)
    cluster.remove_node(lost, allow_graceful=False)
    run.until(lambda: run.events("restarted", 1))
    another = cluster.add_node(num_cpus=0, resources={"spot": 1}, object_store_memory=80 << 20)
    try:
        run.joined(1, 2)
        run.check_exact(samples)
        changes = [event.detail for event in read_events(run.out / "run.jsonl") if event.kind == "replanned"]
        assert changes[0] == "rank 1 is away: [4, 4] -> [8, 0]"
        assert changes[1].startswith("all ranks are back: [8, 0] -> ")
    finally:
        cluster.remove_node(another)


def test_a_drained_node_is_left_in_time(cluster: Any, tmp_path: Path) -> None:
    """The worker finishes its step. When the node is gone, another one has its place."""
    spot = {"num_cpus": 0, "resources": {"spot": 1}, "object_store_memory": 80 << 20}
    lost = cluster.add_node(**spot)
    samples = 2000 * B
    run = Running(tmp_path, train, {"device-1": {"spot": 1}}, samples=samples, policy="bsp")
    first = run.joined(1, 1)
    preemption = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"]
    address = ["--address", cluster.address, "--node-id", lost.node_id, "--deadline-remaining-seconds", "60"]
    command = [Path(sys.executable).parent / "ray", "drain-node", *address, *preemption]
    subprocess.run(command, check=True, capture_output=True)
    run.until(lambda: run.events("left", 1))
    assert run.events("left", 1)[0].pid == first
    cluster.remove_node(lost, allow_graceful=False)
    another = cluster.add_node(**spot)
    try:
        run.joined(1, 2)
        assert not run.events("died", 1)
        run.check_exact(samples)
    finally:
        cluster.remove_node(another)


def test_a_rank_without_a_place_does_not_hold_up_the_end(cluster: Any, tmp_path: Path) -> None:
    lost = cluster.add_node(num_cpus=0, resources={"spot": 1}, object_store_memory=80 << 20)
    run = Running(tmp_path, train, {"device-1": {"spot": 1}}, samples=600 * B)
    run.joined(1, 1)
    cluster.remove_node(lost, allow_graceful=False)
    run.check_exact(600 * B)


def test_an_error_of_the_function_ends_the_run(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(TrainingFailed, match="ValueError: of my own"):
        Running(tmp_path, fail, samples=2 * B, max_restarts=0).finish()


def test_resources_that_the_cluster_has_not(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="far 1"):
        Running(tmp_path, train, {"device-1": {"far": 2}}, samples=B, placement_timeout=0.2).finish()


def test_a_misspelt_kind_is_not_a_worker_with_one_cpu(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"resources\['devcie'\].*no worker.*device-0"):
        Running(tmp_path, train, {"devcie": {"far": 1}}, samples=B).finish()


def test_the_how_to_page_runs(cluster: Any, tmp_path: Path) -> None:
    """It runs as it is written, on kinds of devices that are here."""
    (page,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    here = 'KINDS = {"device-0": {"CPU": 1}, "device-1": {"far": 1}}'
    script = tmp_path / "on_ray.py"
    script.write_text(re.sub("^KINDS = .*$", here, page, flags=re.M).replace("10_000", "2_000"))
    write_json(tmp_path / "plan.json", make_plan([4, 4]))
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90
    )
    assert "trained=2000" in done.stdout, done.stderr


def test_profiles_of_each_kind(cluster: Any, tmp_path: Path) -> None:
    kinds = {"near": {"CPU": 1}, "far": {"far": 1}}
    files = pyps.ray.profile("mlp", kinds, tmp_path / "profiles", batches=[2, 4], repeats=2)
    assert [len(read_profile(files[kind]).points) for kind in kinds] == [2, 2]
    with pytest.raises(InputError, match="what one node has"):
        pyps.ray.profile("mlp", {"moon": {"moon": 1}}, tmp_path)


class TestWithoutACluster:
    @pytest.mark.parametrize(
        ("resources", "options", "message"),
        [
            ({"device-1": {"far": 0}}, {"samples": 8}, "far: found 0; expected a number above 0"),
            ({"device-1": {}}, {"samples": 8}, "at least one resource"),
            (None, {}, "samples: found nothing"),
            (None, {"samples": 8, "connect": "tcp://10.0.0.1:5555/model"}, "connect: found no such option"),
        ],
    )
    def test_misuse(self, resources: Any, options: dict[str, Any], message: str) -> None:
        with pytest.raises(InputError, match=message):
            pyps.ray.Trainer(train, "plan.json", resources, **options)

    def test_ray_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "ray", None)
        with pytest.raises(InputError, match=r"pip install '.*\[ray\]'"):
            pyps.ray.profile("mlp")

    def test_kinds_of_devices(self) -> None:
        v100, cpu = {"GPU": 4.0, "accelerator_type:V100": 1.0}, {"CPU": 8.0}
        nodes = [{"Alive": True, "Resources": one} for one in (cpu, v100, v100)]
        assert device_kinds(nodes) == {"v100": {"GPU": 1.0, "accelerator_type:V100": 0.001}}
        assert device_kinds([*nodes[:1], {"Alive": False, "Resources": v100}]) == {"cpu": {"CPU": 1.0}}
