"""The planner's pages: the Python blocks run, the cluster file is one, every field is in the tables."""

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
    Limits,
    Mode,
    NoiseForecast,
    Plan,
    PlannedRun,
    PlanWorker,
    Quantization,
    R2spRemedies,
    R2spSchedule,
    RunTable,
    Sharding,
    Shared,
    SyncCost,
    SyncEstimate,
    TargetEstimate,
    WorkerGroup,
)

DOCS = Path(__file__).parents[2] / "docs"
IDEAS, TASK = DOCS / "concepts" / "planning.md", DOCS / "how-to" / "plan.md"


KINDS = (
    *(WorkerGroup, RunTable, SyncCost, Sharding, Limits, Shared, GoodputInfo, Quantization),
    *(
        Plan,
        PlanWorker,
        PlannedRun,
        Mode,
        R2spSchedule,
        R2spRemedies,
        HpsEstimate,
        SyncEstimate,
        CostEstimate,
    ),
    *(NoiseForecast, Forecast, GoodputEstimate, TargetEstimate),
)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("page", "count"), [(IDEAS, 6), (TASK, 2)], ids=["ideas", "task"])
def test_the_page_runs(page: Path, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    found = blocks(page, "python")
    assert len(found) >= count
    for block in found:
        exec(compile(block, str(page), "exec"), names)


def test_the_cluster_file_is_one() -> None:
    text, run, *_ = blocks(TASK, "toml")
    cluster = msgspec.convert(tomllib.loads(f"{run}\n{text}"), Cluster)
    assert cluster.job.global_batch == 768
    assert cluster.run.policy == "hps"


def test_every_field_is_in_the_tables(reference: Path) -> None:
    text = (reference / "formats.md").read_text()
    for kind in KINDS:
        missing = [field for field in kind.__struct_fields__ if f"`{field}`" not in text]
        assert not missing, kind
