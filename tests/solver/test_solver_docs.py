"""docs/planning.md is executed: its Python blocks in order, and its cluster file is read."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from pyps.formats import (
    Cluster,
    CostEstimate,
    Forecast,
    GoodputEstimate,
    GoodputInfo,
    HpsEstimate,
    HpsWorker,
    Limits,
    NoiseForecast,
    Plan,
    PlanWorker,
    Quantization,
    R2spRemedies,
    R2spSchedule,
    Shared,
    SyncCost,
    SyncEstimate,
    WorkerGroup,
)

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"


KINDS = (
    *(WorkerGroup, SyncCost, Limits, Shared, GoodputInfo, Quantization),
    *(Plan, PlanWorker, R2spSchedule, R2spRemedies, HpsEstimate, HpsWorker, SyncEstimate, CostEstimate),
    *(NoiseForecast, Forecast, GoodputEstimate),
)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    found = blocks("python")
    assert len(found) >= 6
    for block in found:
        exec(compile(block, str(PAGE), "exec"), names)


def test_the_cluster_file_is_one() -> None:
    (text,) = blocks("toml")
    assert msgspec.convert(tomllib.loads(text), Cluster).job.global_batch == 768


def test_every_field_is_in_the_tables() -> None:
    text = PAGE.read_text()
    for kind in KINDS:
        missing = [field for field in kind.__struct_fields__ if f"`{field}`" not in text]
        assert not missing, kind
