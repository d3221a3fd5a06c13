"""Measurements made elsewhere: what is accepted, and what is refused with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyps.errors import InputError
from pyps.formats import Profile
from pyps.profiler import import_points


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "v100.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_rows_become_points_with_a_fit(tmp_path: Path) -> None:
    path = write(tmp_path, "batch,seconds\n64,0.1\n1,0.01\n16,0.03\n")
    profile = import_points(path, max_batch=128)
    assert [(p.batch, p.seconds) for p in profile.points] == [(1, 0.01), (16, 0.03), (64, 0.1)]
    assert (profile.device.name, profile.device.kind, profile.device.emulated) == ("v100", "imported", False)
    assert profile.max_batch == 128
    assert profile.fit is not None


@pytest.mark.parametrize(
    "text",
    [
        "\ufeffbatch,seconds\r\n1,0.5\r\n\r\n2,1.0\r\n2,3.0\r\n",
        '\n Seconds , note, BATCH \n0.5,"a, b",1\n\n1.0,,2\n3.0,x,2\n\n',
        "batch,seconds\n1,5e-1\n,\n2,1.0\n2,3.0",
        "batch,seconds,note\r1,0.5,a\u2028b\x0cc\r2,1.0,\r2,3.0,\r",
        "batch,seconds\n1,0.5,\n2,1.0, ,\n2,3.0\n",
    ],
)
def test_accepts_what_spreadsheets_write(tmp_path: Path, text: str) -> None:
    profile = import_points(write(tmp_path, text), name="mine", model="resnet")
    assert [(p.batch, p.seconds) for p in profile.points] == [(1, 0.5), (2, [1.0, 3.0])]
    assert (profile.device.name, profile.model.name, profile.max_batch) == ("mine", "resnet", None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: found an empty file"),
        ("1,0.5\n2,0.6\n", "line 1: found '1,0.5'; expected a header with the columns batch,seconds"),
        ("batch,batch,seconds\n", "line 1: found 'batch,batch,seconds'"),
        ('{"points": ' + "[1]," * 99999, f'line 1: found \'{{"points": {"[1]," * 16}[...; expected a header'),
        ("batch,seconds\n1,0.5\n\n-2,0.6\n", "line 4: batch: found '-2'"),
        ("batch,seconds\n1.5,0.5\n", "line 2: batch: found '1.5'"),
        ("batch,seconds\n99999999999,0.5\n", "line 2: batch: found '99999999999'"),
        ("batch,seconds\n\u0663,0.5\n", "line 2: batch: found '\u0663'"),
        ("batch,seconds\n1,nan\n", "line 2: seconds: found 'nan'"),
        ("batch,seconds\n1,0\n", "line 2: seconds: found '0'"),
        ("batch,seconds\n1,fast\n", "line 2: seconds: found 'fast'"),
        ("batch,seconds\n1\n", "line 2: found '1'; expected 2 columns"),
        ("batch,seconds\n8,1,5\n", "line 2: found '8,1,5'; expected 2 columns, as the header has"),
        ("batch,seconds\n1,0.5\n1,0.6\n", "batch: found 1 distinct batch;"),
        ("batch,seconds\n1,0.5\n300,0.6\n", "batch: found 300; expected at most the max_batch given, 256"),
        (b"batch,seconds\n\xff\xfe1,0.5\n", "found byte 0xff at offset 14; expected UTF-8 text"),
    ],
)
def test_refuses_with_file_and_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InputError) as refused:
        import_points(path, max_batch=256)
    assert str(refused.value).startswith(str(path))
    assert message in str(refused.value)


def test_refuses_what_is_no_file(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.csv", tmp_path):
        with pytest.raises(InputError, match="expected a readable file"):
            import_points(path)
    with pytest.raises(InputError, match="max_batch: found 0"):
        import_points(write(tmp_path, "batch,seconds\n1,1\n2,2\n"), max_batch=0)


def test_memory_and_traffic_come_from_their_columns(tmp_path: Path) -> None:
    rows = ["1,0.01,1000,,", "2,0.02,1100,4000,0.005", "4,0.04,1300,8000,0.009", "4,0.041,1290,,"]
    profile = imported(tmp_path, "batch,seconds,peak_bytes,link_bytes,link_seconds\n" + "\n".join(rows))
    assert profile.memory is not None
    assert profile.memory.bytes_per_sample == pytest.approx(100)
    assert (profile.memory.fixed_bytes, profile.memory.budget_bytes) == (900, 1300)
    assert [point.peak_bytes for point in profile.points] == [1000, 1100, 1300]
    assert profile.link is not None
    assert profile.link.latency_seconds == pytest.approx(0.001)
    assert profile.link.bytes_per_second == pytest.approx(1e6)
    once = imported(tmp_path, "batch,seconds,link_bytes,link_seconds\n1,1,500,0.5\n2,2,500,0.5\n")
    assert once.link is not None
    assert (once.link.latency_seconds, once.link.bytes_per_second) == (0.0, 1000.0)


def test_a_budget_below_a_constant_peak_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "batch,seconds,peak_bytes\n1,1,1000\n2,2,1000\n")
    assert import_points(path, budget_bytes=1000).memory is None
    with pytest.raises(
        InputError, match="peak_bytes: found up to 1000, whatever the batch; expected at most 999"
    ):
        import_points(path, budget_bytes=999)


@pytest.mark.parametrize(
    ("header", "row", "said"),
    [
        ("batch,seconds,link_bytes", "1,1,5", "both link_bytes and link_seconds, or neither"),
        ("batch,seconds,link_bytes,link_seconds", "1,1,5,", "line 2: found one of link_bytes"),
        ("batch,seconds,peak_bytes", "1,1,-5", "line 2: peak_bytes: found '-5'"),
        ("batch,seconds,peak_bytes,peak_bytes", "1,1,5,6", "at most one column peak_bytes"),
        ("batch,seconds,link_seconds,link_bytes", "1,1,nan,6", "line 2: link_seconds: found 'nan'"),
    ],
)
def test_a_wrong_column_is_named(tmp_path: Path, header: str, row: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        imported(tmp_path, f"{header}\n{row}\n2,2,7,8\n")


def imported(tmp_path: Path, text: str) -> Profile:
    path = tmp_path / "points.csv"
    path.write_text(text)
    return import_points(path)
