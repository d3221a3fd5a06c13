"""The JSON schemas tell right files from wrong ones."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import tomllib
from typing import Any

import jsonschema
import msgspec
import pytest

from pyps.formats import FORMATS, Cluster, Fit, GradientNoiseRecord, Profile, encode, schema
from pyps.formats.checkpoint import Checkpoint, TensorFile, signed
from pyps.solver.plan import make_plan

CLUSTER = """
[job]
global_batch = 300
quantile = 0.9
[sync]
kind = "ring"
bandwidth = 1e9
[limits]
price_per_hour = 20
[[shared]]
name = "rack"
bandwidth = 1e9
[goodput]
noise_scale = 1000.0
base_batch = 64
[quantization]
error_budget = 0.01
[[worker]]
name = "fast"
count = 2
profile = "fast.json"
price_per_hour = 2.0
bandwidth = 1e8
shares = ["rack"]
together = "node"
max_batch = 64
max_accumulation = 4
[[worker]]
name = "slow"
profile = "slow.json"
price_per_hour = 1.0
"""


def whole() -> dict[str, dict[str, Any]]:
    """A cluster file that uses every table, its plan, and the profile of both groups, as plain data.

    Before them a checkpoint of a run by the plan; after them what a run has measured of its gradients' noise.
    """
    raw = tomllib.loads(CLUSTER)
    fit = Fit(kind="affine", per_sample_seconds=0.001, trusted_min_batch=1, trusted_max_batch=99)
    plain = {"device": {"name": "d"}, "model": {"name": "m", "parameters": 1000}}
    profile = msgspec.convert(
        {**plain, "schema": "pyps.profile/1", "points": [{"batch": 1, "seconds": 0.001}]}, Profile
    )
    profile = msgspec.structs.replace(profile, fit=fit)
    plan = make_plan(msgspec.convert(raw, Cluster), [profile, profile])
    file = TensorFile(bytes=3, sha256="0" * 64)
    checkpoint = Checkpoint(
        made_with="1", unix_seconds=1.0, version=3, plan=plan, state={"round": 1}, files={"a": file}
    )
    noise = json.loads(encode(GradientNoiseRecord(noise_scale=1000.0, base_batch=64, steps=10)))
    plain_plan, plain_profile = json.loads(encode(plan)), json.loads(encode(profile))
    return {
        "checkpoint": signed(checkpoint),
        "cluster": raw,
        "plan": plain_plan,
        "profile": plain_profile,
        "noise": noise,
    }


@pytest.mark.parametrize("name", FORMATS)
def test_a_command_prints_them(name: str) -> None:
    printed = subprocess.run([sys.executable, "-m", "pyps.formats", name], capture_output=True, check=True)
    assert json.loads(printed.stdout) == schema(name)
    jsonschema.Draft202012Validator.check_schema(schema(name))


def test_files_conform() -> None:
    for name, value in whole().items():
        jsonschema.validate(value, schema(name))
    assert whole().keys() == FORMATS.keys()


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("job", "global_batch"), 0),
        (("job", "globel"), 1),
        (("sync", "kind"), "star"),
        (("worker", 0, "max_accumulation"), 0),
        (("worker", 1, "profile"), 3),
    ],
)
def test_wrong_clusters_do_not(place: tuple[str | int, ...], value: object) -> None:
    raw: Any = copy.deepcopy(whole()["cluster"])
    at = raw
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(raw, schema("cluster"))


def test_wrong_plans_do_not() -> None:
    made = whole()["plan"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**made, "schema": "pyps.plan/2"}, schema("plan"))
    del made["workers"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(made, schema("plan"))
