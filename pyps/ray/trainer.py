"""Trainer: a run whose ranks are actors of a Ray cluster, wherever it has the resources that each one takes.

The launcher of `pyps run` (pyps.run) runs here, where `fit` is called, and the store is in this node's shared
memory, or spread over several nodes. So a run on Ray has the same events, restarts, re-planning, checkpoints
and report.
"""

from __future__ import annotations

import importlib
import inspect
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from pyps.errors import InputError
from pyps.formats.setup import RankSpec
from pyps.metrics import Reading, Sink
from pyps.native.decisions import SEVERAL_SERVERS, unmet
from pyps.ray.actors import Resources, Work, WorkerActor, actor_options, check_resources, connected_ray
from pyps.ray.servers import TRAINER, NearStore, ShardedStore, StoreActor, node_id
from pyps.remote.address import CLIENT_TIMEOUT_SECONDS
from pyps.report.report import Report
from pyps.run.launcher import OnNotice
from pyps.run.main import run_prepared
from pyps.run.options import RunOptions, StrPath
from pyps.run.process import RankProcess
from pyps.run.spec import RunSpec, prepare

ONE_CPU: Resources = {"CPU": 1}
PLACEMENT_SECONDS = 60.0
ASK_SECONDS = 1.0  # for all servers to say where they are, while the launcher waits
CLOSE_SECONDS = 20.0
NODE_ENVIRONMENT: dict[str, str] = {}  # of a server elsewhere: segments are where its node keeps them
NOT_HERE = ("connect", "ranks", "profile", "journal")  # options of runs without Ray


class Trainer:
    """A run on a Ray cluster.

    train: a function that calls pyps.join() and trains, or the path of such a script. plan: path of its
    pyps.plan/1 file; None: the resumed run's. resources: what a worker of the plan takes, by its name or its
    group's, as ray.cluster_resources() names them; {"CPU": 1} for those not named, if every name given is
    a worker's. strategy: of Ray's placement group: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD. servers: 1:
    the store is on the node that calls `fit`; more: it is spread over that many nodes, each with a server.
    server_resources: what each of several takes. client_timeout: a worker on another node that is silent for
    this number of seconds is dead. placement_timeout: seconds to wait for the resources. options: fields of
    pyps.run.RunOptions; `run_dir` is a folder that all nodes share.

    Raises InputError for a wrong plan, option or amount.
    """

    def __init__(
        self,
        train: Callable[[], object] | StrPath,
        plan: StrPath | None,
        resources: Mapping[str, Resources] | None = None,
        *,
        strategy: str = "PACK",
        servers: int = 1,
        server_resources: Resources = ONE_CPU,
        client_timeout: float = CLIENT_TIMEOUT_SECONDS,
        placement_timeout: float = PLACEMENT_SECONDS,
        **options: Any,
    ) -> None:
        fields = set(inspect.signature(RunOptions).parameters) - set(NOT_HERE)
        if unknown := options.keys() - fields:
            raise InputError(
                "pyps.ray", min(unknown), "no such option", f"one of {', '.join(sorted(fields))}"
            )
        if "samples" not in options:
            raise InputError("pyps.ray", "samples", "nothing", "the samples of the run")
        self._train, self._plan, self._options = train, plan, RunOptions(**options)
        self._resources = dict(resources or {})
        for name, amounts in self._resources.items():
            check_resources(f"resources[{name!r}]", amounts)
        check_resources("server_resources", server_resources)
        if servers < 1:
            raise InputError("pyps.ray", "servers", str(servers), "at least 1")
        self._strategy, self._servers, self._server_resources = strategy, servers, server_resources
        self._client_timeout, self._placement_timeout = client_timeout, placement_timeout

    def fit(self, on_notice: OnNotice = print) -> Report:
        """Train, and report. Connects to a cluster that runs, if this process is not connected.

        on_notice: called with a sentence for each worker that is started again, and other news. Raises
        InputError if the cluster has not the resources, TrainingFailed and Interrupted as pyps.run.run.
        """
        ray = connected_ray()
        spec = prepare(self._plan, _file_of(self._train), self._options)
        bundles = self._bundles(spec)
        stored = self._near(ray, spec) if self._servers == 1 else self._sharded(ray, spec)
        with stored as store, self._placed(ray, bundles, self._strategy, "resources") as group:
            if isinstance(store, ShardedStore):
                where = partial(store.address, TRAINER, ASK_SECONDS)
                spec = replace(spec, store=store.address(TRAINER), where=where)

            def start(spec: RunSpec, rank: RankSpec) -> RayProcess:
                index = spec.ranks.index(rank)
                strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, index)
                options = actor_options(bundles[index])
                actor = ray.remote(WorkerActor).options(scheduling_strategy=strategy, **options).remote()
                return RayProcess(actor, self._work(spec, rank, store), spec.command[1])

            return run_prepared(spec, on_notice=on_notice, sinks=[RaySink()], start=start)

    def _bundles(self, spec: RunSpec) -> list[dict[str, float]]:
        """Return what each rank takes.

        Raises InputError where a name fits no rank and a rank has no name: one is misspelt.
        """
        names = [(rank.name, rank.name.rpartition("-")[0]) for rank in spec.ranks]
        found = [next((self._resources[n] for n in pair if n in self._resources), None) for pair in names]
        if None in found and (unused := self._resources.keys() - {*chain(*names)}):
            expected = f"a name of the plan, such as {names[found.index(None)][0]}, which has none"
            raise InputError("pyps.ray", f"resources[{min(unused)!r}]", "no worker of that name", expected)
        return [dict(ONE_CPU if amounts is None else amounts) for amounts in found]

    def _work(self, spec: RunSpec, rank: RankSpec, store: NearStore | ShardedStore) -> Work:
        env = spec.settings(rank).to_env() | {"LOCAL_RANK": "0"}  # Ray shows a process its own GPUs alone
        if isinstance(store, NearStore):
            env |= _environment()
        train = self._train if callable(self._train) else os.path.abspath(self._train)
        return Work(rank.rank, train, spec.options.args, spec.folder, env, spec.run_dir, store)

    @contextmanager
    def _placed(self, ray: Any, bundles: list[dict[str, float]], strategy: str, field: str) -> Iterator[Any]:
        """A placement group of these bundles. field: the argument that asks for them."""
        try:
            group = ray.util.placement_group(bundles, strategy=strategy)
        except ValueError as error:
            raise InputError("pyps.ray", f"strategy, {field}", str(error), "what Ray can place") from None
        try:
            if not group.wait(self._placement_timeout):
                found = f"{bundles}, which the cluster has not had for {self._placement_timeout:g} s"
                expected = f"no more than it has: {_amounts(ray.cluster_resources())}"
                if strategy == "STRICT_SPREAD":
                    expected += ", each on a node of its own"
                raise InputError("pyps.ray", field, found, expected)
            yield group
        finally:
            ray.util.remove_placement_group(group)

    @contextmanager
    def _near(self, ray: Any, spec: RunSpec) -> Iterator[NearStore]:
        """The store on this node, with an actor that serves it to the others."""
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id(), soft=False)
        given = spec.store, str(spec.run_dir), _environment(), self._client_timeout
        server = _server(ray, here, {"num_cpus": 0}).remote(*given)
        try:
            yield NearStore(spec.store, node_id(), server)
        finally:
            ray.kill(server)

    @contextmanager
    def _sharded(self, ray: Any, spec: RunSpec) -> Iterator[ShardedStore]:
        """The store over several nodes, one server a node. Its shards go with it, however the run ends."""
        check_sharded(spec)
        bundles = [dict(self._server_resources)] * self._servers
        with self._placed(ray, bundles, "STRICT_SPREAD", "server_resources") as group:
            servers: list[Any] = []
            name = f"pyps-{spec.store}"
            for k in range(self._servers):
                place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, k)
                first = name if k else None
                options = actor_options(bundles[k]) | ({} if k else {"name": name})
                given = spec.store, str(spec.run_dir), NODE_ENVIRONMENT, self._client_timeout, k, first
                servers.append(_server(ray, place, options).remote(*given))
            try:
                yield ShardedStore(spec.store, tuple(servers))
            finally:
                with suppress(ray.exceptions.RayError, TimeoutError):  # a server may be without a place
                    ray.get([server.close.remote() for server in servers], timeout=CLOSE_SECONDS)
                for server in servers:
                    ray.kill(server)


def check_sharded(spec: RunSpec) -> None:
    """Raise InputError for a run whose store cannot be spread over several servers."""
    if why := unmet(spec.policy.needs, SEVERAL_SERVERS):
        expected = "with several servers one that takes each push by itself, such as asp, ssp or r2sp"
        raise InputError("pyps.ray", "policy", f"{spec.policy.name}, which {why}", expected)


def _server(ray: Any, place: Any, given: Mapping[str, Any]) -> Any:
    """A StoreActor there, still to be made; Ray starts it again whenever it dies."""
    options = {"max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": place}
    return ray.remote(StoreActor).options(**options, **given)


def _file_of(train: Callable[[], object] | StrPath) -> StrPath:
    """The file that reports and errors name: the script, or that of the function."""
    if not callable(train):
        return train
    function = train.func if isinstance(train, partial) else train
    found = getattr(getattr(function, "__code__", None), "co_filename", "")
    return found if os.path.isfile(found) else __file__


def _environment() -> dict[str, str]:
    """Where this node's segments are, for a process that did not inherit it."""
    return {name: os.environ[name] for name in ("PYPS_SHM_DIR",) if name in os.environ}


def _amounts(resources: Mapping[str, float]) -> str:
    named = {name: amount for name, amount in resources.items() if not ("_group_" in name or ":" in name)}
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(named.items()))


PREFIX = "pyps_"


class RaySink(Sink):
    """A gauge in Ray's own metrics for each figure, with the rank as its tag; "" for the whole run's."""

    def __init__(self) -> None:
        self._metrics = importlib.import_module("ray.util.metrics")
        self._gauges: dict[str, Any] = {}

    def write(self, step: int, readings: Iterable[Reading]) -> None:
        for reading in readings:
            name = PREFIX + reading.name
            if name not in self._gauges:
                self._gauges[name] = self._metrics.Gauge(name, tag_keys=("rank",))
            rank = "" if reading.rank is None else str(reading.rank)
            self._gauges[name].set(reading.value, tags={"rank": rank})

    def note(self, step: int, text: str) -> None:
        """Gauges are numbers alone."""

    def close(self) -> None:
        self._gauges.clear()


class RayProcess(RankProcess):
    """A rank's actor as the launcher sees it: a process on some node.

    Ray does not start an actor that has died again: the launcher does, which counts restarts and knows errors
    that would come again.
    """

    is_here = False

    def __init__(self, actor: Any, work: Work, script: str) -> None:
        """actor: a handle of a new WorkerActor. work: what it is to do. script: the file that errors name."""
        super().__init__(work.rank, script)
        self._ray = importlib.import_module("ray")
        self._actor, self._death = actor, ""
        self._pid, self._result = actor.pid.remote(), actor.train.remote(work)

    def poll(self) -> int | None:
        if self.exit_code is not None:
            return self.exit_code
        try:
            if not self.pid and self._is_there(self._pid):
                self.pid = self._ray.get(self._pid)
            if self._is_there(self._result):
                self.exit_code, text = self._ray.get(self._result)
                self.stderr_tail.extend(text.splitlines())
        except self._ray.exceptions.RayError as error:
            self._ray.kill(self._actor)  # it may only be out of reach
            self.exit_code, self._death, self.is_lost = -signal.SIGKILL, _reason(error), True
        return self.exit_code

    def _is_there(self, reference: Any) -> bool:
        return bool(self._ray.wait([reference], timeout=0)[0])

    def signal(self, number: int) -> None:
        """An actor takes one signal: it is killed."""
        if self.poll() is None and number != signal.SIGCONT:
            self._ray.kill(self._actor)

    def close(self) -> None:
        self._actor = None  # the last handle: Ray ends the actor in order

    def exit_reason(self) -> str:
        return f"its actor died ({self._death})" if self._death else super().exit_reason()


def _reason(error: BaseException) -> str:
    """Return what Ray says first, such as: The actor died unexpectedly before finishing this task."""
    return str(error).strip().partition("\n")[0].partition(":")[0].rstrip(".") or type(error).__name__
