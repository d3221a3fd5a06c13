"""The picture of a profile: drawn whole or not at all."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from pyps.errors import InputError, PypsError
from pyps.formats import Device, Fit, ModelInfo, Point, Profile
from pyps.profiler.plot import describe_fit, plot_profile

PNG = b"\x89PNG\r\n\x1a\n"


def profile(fit: Fit | None = None) -> Profile:
    points = [Point(batch=b, seconds=[0.01 + 0.001 * b, 0.012 + 0.001 * b]) for b in (1, 8, 64)]
    return Profile(device=Device(name="box"), model=ModelInfo(name="net"), points=points, fit=fit)


def test_draws_with_and_without_a_fit(tmp_path: Path) -> None:
    table = Fit(kind="table", table=[(1, 0.01), (64, 0.1)], trusted_min_batch=1, trusted_max_batch=64)
    for k, each in enumerate((profile(), profile(table))):
        path = tmp_path / f"{k}.png"
        plot_profile(each, path)
        assert path.read_bytes().startswith(PNG)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0.png", "1.png"]


def test_formulas() -> None:
    line = Fit(
        kind="affine",
        fixed_seconds=0.01,
        per_sample_seconds=0.001,
        trusted_min_batch=1,
        trusted_max_batch=8,
    )
    knee = msgspec.structs.replace(line, kind="knee", floor_seconds=0.02)
    assert describe_fit(line) == "T(b) = 10 + 1 b ms"
    assert describe_fit(knee) == "T(b) = max(20, 10 + 1 b) ms"


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file or directory"):
        plot_profile(profile(), tmp_path / "absent" / "p.png")


def test_without_matplotlib_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PypsError, match=r"pip install '.*\[plot\]'"):
        plot_profile(profile(), tmp_path / "p.png")
    assert list(tmp_path.iterdir()) == []
