"""Formats: what is written comes back; what is wrong is refused with file, field, found and expected."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampled import examples

from pyps.cli.outputs import check_writable
from pyps.errors import InputError
from pyps.formats import (
    Cluster,
    Device,
    EvenSplit,
    Fit,
    HpsEstimate,
    Memory,
    ModelInfo,
    Plan,
    PlanWorker,
    Point,
    Profile,
    R2spSchedule,
    encode,
    read_cluster,
    read_plan,
    read_profile,
    schema,
    write_json,
)
from pyps.formats.files import write_bytes

PROFILE = Profile(
    device=Device(name="v100"),
    model=ModelInfo(name="mlp", parameters=1000),
    points=[Point(batch=1, seconds=0.1), Point(batch=4, seconds=[0.2, 0.21], peak_bytes=512)],
    max_batch=4096,
    memory=Memory(fixed_bytes=100, bytes_per_sample=2.5, budget_bytes=10_000),
    fit=Fit(kind="table", trusted_min_batch=1, trusted_max_batch=4, table=[(1, 0.1), (4, 0.2)]),
)
PLAN = Plan(
    global_batch=4,
    iteration_seconds=0.2,
    lower_bound_seconds=0.2,
    even_split=EvenSplit(feasible=False),
    speedup_over_even=None,
    workers=[
        PlanWorker(
            rank=0, name="a", batch=3, micro_batch=3, accumulation=1, weight=0.75, predicted_seconds=0.2
        ),
        PlanWorker(
            rank=1, name="b", batch=1, micro_batch=1, accumulation=1, weight=0.25, predicted_seconds=0.1
        ),
    ],
    r2sp=R2spSchedule(
        feasible=None, period_seconds=0.2, gap_seconds=0.1, order=[0, 1], offsets_seconds=[0.0, 0.1]
    ),
    hps=HpsEstimate(),
    warnings=["one"],
)
CLUSTER = """
[job]
global_batch = 768
[[worker]]
name = "v100"
count = 4
profile = "p.json"
[[worker]]
name = "t4"
profile = "p.json"
min_batch = 2
max_batch = 64
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_json(tmp_path / "p.json", PROFILE)
    return tmp_path


def test_profile_and_plan_come_back_as_written(tmp_path: Path) -> None:
    for value, read in ((PROFILE, read_profile), (PLAN, read_plan)):
        path = tmp_path / "file.json"
        write_json(path, value)
        assert read(path) == value
        assert json.loads(path.read_bytes()) == json.loads(msgspec.json.encode(value))


@pytest.mark.parametrize("run", ["accumulation = 2", "local_steps = 8"])
def test_a_smallest_batch_may_take_the_micro_batches_of_the_run(folder: Path, run: str) -> None:
    large = CLUSTER.replace("min_batch = 2", "min_batch = 100")
    (folder / "c.toml").write_text(f"{large}[run]\n{run}\n")
    assert read_cluster(folder / "c.toml").worker[1].min_batch == 100
    (folder / "c.toml").write_text(f"{large.replace('100', '129')}[run]\naccumulation = 2\n")
    with pytest.raises(InputError, match="129; expected at most max_batch = 64 times max_accumulation = 2"):
        read_cluster(folder / "c.toml")


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_cluster_is_read_with_its_defaults_and_resolved_profiles(folder: Path, mark: str) -> None:
    (folder / "c.toml").write_text(mark + CLUSTER)
    cluster = read_cluster(folder / "c.toml")
    assert cluster.job.global_batch == 768
    assert [group.profile for group in cluster.worker] == [str(folder / "p.json")] * 2
    assert cluster.worker[0].worker_names() == ["v100-0", "v100-1", "v100-2", "v100-3"]
    assert cluster.worker[1].worker_names() == ["t4"]
    assert (cluster.worker[1].batch_multiple, cluster.worker[1].required) == (1, False)


Change = Callable[[Any], object]
BAD_PROFILES: list[tuple[str, Change, str, str, str]] = [
    ("negative", lambda p: p["points"][1].update(seconds=-1), "points[1].seconds", "-1", "> 0"),
    ("none", lambda p: p["points"][1].update(seconds=[]), "points[1].seconds", "[]", "length >= 1"),
    ("in list", lambda p: p["points"][1].update(seconds=[1, 0]), "points[1].seconds[1]", "0", "> 0"),
    ("zero batch", lambda p: p["points"][0].update(batch=0), "points[0].batch", "0", ">= 1"),
    ("huge batch", lambda p: p["points"][0].update(batch=10**40), "points[0].batch", "1000", "<= 2147483647"),
    ("half", lambda p: p["points"][0].update(batch=1.5), "points[0].batch", "1.5", "whole number"),
    ("text", lambda p: p["points"][0].update(batch="8"), "points[0].batch", "'8'", "whole number"),
    ("empty", lambda p: p.update(points=[]), "points", "[]", "length >= 1"),
    ("infinite", lambda p: p["points"][0].update(seconds=1e999), "", "damaged JSON", "pyps.profile/1"),
    ("typo", lambda p: p["points"][0].update(secnds=1), "points[0].secnds", "unknown key", "'seconds'"),
    ("odd key", lambda p: p.update(zzzzz=1), "zzzzz", "unknown key", "device"),
    ("missing", lambda p: p.pop("device"), "device", "nothing", "required"),
    ("missing inside", lambda p: p["model"].pop("name"), "model.name", "nothing", "required"),
    ("version", lambda p: p.update(schema="pyps.profile/2"), "schema", "pyps.profile/2", "pyps.profile/1"),
    ("other", lambda p: p.update(schema="pyps.plan/1"), "schema", "pyps.plan/1", "pyps.profile/1"),
    ("no schema", lambda p: p.pop("schema"), "schema", "nothing", "pyps.profile/1"),
    ("kind", lambda p: p["fit"].update(kind="cubic"), "fit.kind", "'cubic'", "one of affine, "),
    (
        "falling",
        lambda p: p["fit"].update(table=[[1, 2.0], [2, 1.0]]),
        "fit.table[1][1]",
        "1.0",
        "at least 2.0",
    ),
    ("twice", lambda p: p["fit"].update(table=[[2, 1.0], [2, 1.0]]), "fit.table[1][0]", "2", "above 2"),
    ("no table", lambda p: p["fit"].update(table=None), "fit.table", "nothing", "list of"),
    ("no cost", lambda p: p["fit"].update(kind="affine"), "fit.fixed_seconds", "0.0", "positive"),
    ("trust", lambda p: p["fit"].update(trusted_min_batch=9), "fit.trusted_max_batch", "4", "at least 9"),
    ("throttle", lambda p: p["device"].update(throttle=0.5), "device.throttle", "0.5", ">= 1"),
]


@pytest.mark.parametrize(
    ("change", "field", "found", "expected"), [c[1:] for c in BAD_PROFILES], ids=[c[0] for c in BAD_PROFILES]
)
def test_a_bad_profile_is_refused_by_field(
    tmp_path: Path, change: Change, field: str, found: str, expected: str
) -> None:
    plain = copy.deepcopy(msgspec.to_builtins(PROFILE))
    change(plain)
    path = tmp_path / "v100.json"
    path.write_text(json.dumps(plain))
    with pytest.raises(InputError) as refusal:
        read_profile(path)
    error = refusal.value
    assert (error.where, error.field) == (str(path), field)
    assert found in error.found
    assert expected in error.expected
    assert "\n" not in str(error)


BAD_CLUSTERS = [
    ("[job]\nglobl_batch = 3\n", "job.globl_batch", "unknown key", "'global_batch'"),
    (CLUSTER.replace("profile", "profil", 1), "worker[0].profil", "unknown key", "'profile'"),
    (CLUSTER.replace("768", "-768"), "job.global_batch", "-768", ">= 1"),
    (CLUSTER.replace("768", "0"), "job.global_batch", "0", ">= 1"),
    (CLUSTER.replace("768", "nan"), "job.global_batch", "nan", "finite"),
    (CLUSTER.replace("768", "1979-05-27"), "job.global_batch", "1979", "whole number"),
    (
        CLUSTER.replace("count = 4", "").replace('"t4"', '"v100"'),
        "worker[1].name",
        "'v100' a second time",
        "unique name",
    ),
    (CLUSTER.replace('"t4"', '"v100-2"'), "worker[1].name", "'v100-2' a second time", "unique name"),
    (CLUSTER.replace("max_batch = 64", "max_batch = 1"), "worker[1].min_batch", "2", "at most max_batch = 1"),
    (CLUSTER.replace("count = 4", "count = 0"), "worker[0].count", "0", ">= 1"),
    (CLUSTER.replace("count = 4", "quantum = 8"), "worker[0].quantum", "unknown key", "'batch_multiple'"),
    (CLUSTER.replace("count = 4", "bandwidth = inf"), "worker[0].bandwidth", "inf", "finite"),
    (CLUSTER.replace('"p.json"', '"gone.json"', 1), "worker[0].profile", "gone.json", "path of a profile"),
    ("[job]\nglobal_batch = 3\n", "worker", "nothing", "required"),
    ("[job\n", "", "not TOML", "TOML"),
    ("x = " + "[" * 5000, "", "not TOML", "TOML"),
    ("x = " + "1" * 5000, "", "not TOML", "TOML"),
]


@pytest.mark.parametrize(("text", "field", "found", "expected"), BAD_CLUSTERS)
def test_a_bad_cluster_is_refused_by_field(
    folder: Path, text: str, field: str, found: str, expected: str
) -> None:
    path = folder / "c.toml"
    path.write_text(text)
    with pytest.raises(InputError) as refusal:
        read_cluster(path)
    assert (refusal.value.where, refusal.value.field) == (str(path), field)
    assert found in refusal.value.found
    assert expected in refusal.value.expected


BAD_PLANS: list[tuple[Change, str]] = [
    (lambda p: p.update(global_batch=5), "workers[0].weight"),
    (lambda p: p["workers"].pop(), "global_batch"),
    (lambda p: p["workers"][1].update(rank=5), "workers[1].rank"),
    (lambda p: p["workers"][1].update(name="a"), "workers[1].name"),
    (lambda p: p["workers"][1].update(micro_batch=2), "workers[1].micro_batch"),
    (lambda p: p["workers"][1].update(weight=0.5), "workers[1].weight"),
    (lambda p: p["workers"][1].update(batch=-1), "workers[1].batch"),
    (lambda p: p["r2sp"].update(gap=1), "r2sp.gap"),
]


@pytest.mark.parametrize(("change", "field"), BAD_PLANS)
def test_a_plan_that_contradicts_itself_is_refused(tmp_path: Path, change: Change, field: str) -> None:
    plain = copy.deepcopy(msgspec.to_builtins(PLAN))
    change(plain)
    (tmp_path / "plan.json").write_text(json.dumps(plain))
    with pytest.raises(InputError) as refusal:
        read_plan(tmp_path / "plan.json")
    assert refusal.value.field == field


@pytest.mark.parametrize("read", [read_profile, read_plan, read_cluster])
def test_what_is_no_file_of_text_is_refused(tmp_path: Path, read: Callable[[Path], object]) -> None:
    (tmp_path / "latin").write_bytes(b'{"a": "\xe9"}')
    for path in (
        tmp_path,
        tmp_path / "gone",
        tmp_path / "latin",
        Path("nul\0byte"),
        tmp_path / "latin" / "x",
    ):
        with pytest.raises(InputError) as refusal:
            read(path)
        assert refusal.value.where == str(path)


@settings(
    derandomize=True,
    deadline=None,
    max_examples=examples(22, 150),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_damaged_files_never_give_anything_but_an_input_error(tmp_path: Path, data: st.DataObject) -> None:
    whole = encode(data.draw(st.sampled_from([PROFILE, PLAN])))
    cut = data.draw(st.integers(0, len(whole) - 2))
    noise = data.draw(st.binary(max_size=20))
    path = tmp_path / "damaged"
    for content in (whole[:cut], noise, whole[:cut] + noise + whole[cut + len(noise) :], b"[" * 100_000):
        path.write_bytes(content)
        for read in (read_profile, read_plan, read_cluster):
            try:
                value = read(path)
            except InputError as error:
                named = error.where
            else:
                named = str(path) if isinstance(value, Profile | Plan | Cluster) else ""
            assert named == str(path)


def test_a_file_of_another_kind_is_named(folder: Path) -> None:
    (folder / "c.toml").write_text(CLUSTER)
    write_json(folder / "plan.json", PLAN)
    write_json(folder / "profile.json", PROFILE)
    (folder / "poem").write_text("The cat sat\n")
    for read, name, said in (
        (read_plan, "c.toml", "this looks like a cluster file (TOML)"),
        (read_profile, "c.toml", "this looks like a cluster file (TOML)"),
        (read_cluster, "plan.json", "this looks like a plan (JSON)"),
        (read_cluster, "profile.json", "this looks like a profile (JSON)"),
        (read_cluster, "poem", ""),
        (read_plan, "poem", ""),
    ):
        with pytest.raises(InputError) as refusal:
            read(folder / name)
        assert said in refusal.value.found
        assert said or "looks like" not in refusal.value.found


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_json(path, PLAN)
    before = path.read_bytes()
    with pytest.raises(InputError, match=r"workers\[0\]\.weight"):
        write_json(
            path,
            msgspec.structs.replace(
                PLAN, workers=[msgspec.structs.replace(PLAN.workers[0], weight=math.nan)]
            ),
        )
    with pytest.raises(InputError):
        write_json(tmp_path / "no" / "folder.json", PLAN)
    with pytest.raises(InputError, match="plain file"):
        write_json(tmp_path, PLAN)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["plan.json"]


def test_two_writers_of_one_file_have_no_temporary_file_in_common(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads; or processes with one pid on two hosts or in two containers, over a network file system."""
    path, sync = tmp_path / "plan.json", os.fsync

    def other_first(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        write_bytes(path, b"the other's")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", other_first)
    write_bytes(path, b"mine")
    assert path.read_bytes() == b"mine"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_file_may_have_the_longest_name(tmp_path: Path) -> None:
    """In bytes: the name of the temporary file is no longer."""
    path = tmp_path / f"{'é' * 125}.json"
    check_writable("--output", path)
    write_bytes(path, b"{}")
    assert os.listdir(tmp_path) == [path.name]
    with pytest.raises(InputError, match="a place to write to"):
        write_bytes(path / "plan.json", b"{}")


def test_schemas_are_published_for_every_format() -> None:
    for name in ("profile", "cluster", "plan"):
        definitions = schema(name)["$defs"]
        assert definitions[name.capitalize()]["type"] == "object"
    assert schema("profile")["$defs"]["Point"]["properties"]["batch"]["minimum"] == 1
    with pytest.raises(InputError, match="profile, cluster, plan"):
        schema("plam")


READ_IN_THREADS = """
import sys, threading, types
from pyps.formats.files import typed

STRUCTS = '''
from __future__ import annotations
from typing import Literal
from msgspec import Struct
class Inner(Struct, kw_only=True):
    size: int = 0
    share: float | None = None
    names: list[str] = []
class Middle(Struct, kw_only=True):
    inner: Inner | None = None
    several: dict[str, Inner] = {}
    kind: Literal["a", "b"] = "a"
class Outer(Struct, kw_only=True):
    middle: Middle | None = None
    all: list[Middle] = []
    pairs: list[tuple[int, Inner]] = []
'''
sys.setswitchinterval(1e-6)
kinds = []
for k in range(30):
    module = sys.modules[f"made{k}"] = types.ModuleType(f"made{k}")
    exec(STRUCTS, module.__dict__)
    kinds.append(module.Outer)
together = threading.Barrier(8)
def read():
    for kind in kinds:
        together.wait()
        typed("a file", {"middle": {"inner": {"size": 3}}}, kind, lambda *_: None)
threads = [threading.Thread(target=read) for _ in range(8)]
[one.start() for one in threads]
[one.join() for one in threads]
"""


def test_threads_read_the_first_file_of_a_kind_together() -> None:
    """Where two threads made msgspec learn a type at once, the process died."""
    done = subprocess.run([sys.executable, "-c", READ_IN_THREADS], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
