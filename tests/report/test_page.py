"""The page of a run: what it says, how large it gets, and how it looks in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from browser import Browser, find_browser
from run_tools import make_plan, make_record, make_setup
from typer.testing import CliRunner

from pyps.cli.report import app
from pyps.errors import InputError
from pyps.formats import write_json
from pyps.formats.events import RunEvent
from pyps.formats.records import RecordWriter, Span, StepRecord, record_path
from pyps.formats.setup import SETUP_FILE, RankSpec, RunSetup
from pyps.report.page import limit, make_page
from pyps.report.report import StoreTotals, make_report
from pyps.report.run_data import load_run

BATCHES = (7, 3)
NAMES = ("fast", "slow & <old>")
MOST_BYTES = 3_000_000
CHARTS = {"timeline", "loss", "steps"}
CLOCK = 1000.0  # of this host, when the run begins


def setup_of(ranks: tuple[int, ...] = (0, 1), **changes: object) -> RunSetup:
    return make_setup({k: BATCHES[k] for k in ranks}, NAMES, **changes)


def steps(count: int, staleness: int = 0, absent: tuple[float, float] = (0.0, 0.0)) -> Iterator[StepRecord]:
    """Rounds of 0.12 s; rank 1 takes no part between the rounds that begin in the two times."""
    for k in range(count):
        begin = 0.12 * k
        for rank in (0, 1):
            if rank == 1 and absent[0] <= begin < absent[1]:
                continue
            t, compute = CLOCK + begin, (0.1, 0.08)[rank]
            spans: list[Span] = [
                ("wait", t, t + 0.002),
                ("pull", t + 0.002, t + 0.004),
                ("data", t + 0.004, t + 0.01),
                ("compute", t + 0.01, t + 0.01 + compute),
                ("push", t + 0.01 + compute, t + 0.115),
            ]
            record = make_record(rank, k + 1, BATCHES[rank], spans, loss=5.0 / (k + 1))
            alone = absent[0] <= begin < absent[1]
            yield msgspec.structs.replace(record, staleness=staleness, sources=2 - alone)


def make_run(folder: Path, records: list[StepRecord], setup: RunSetup | None = None) -> Path:
    """A run's folder with these records and a report."""
    folder.mkdir(parents=True, exist_ok=True)
    setup = setup or setup_of()
    write_json(folder / SETUP_FILE, setup)
    write_json(folder / "plan.json", make_plan(BATCHES))
    writers: dict[tuple[int, int], RecordWriter] = {}
    for record in records:
        key = (record.rank, record.pid)
        if key not in writers:
            writers[key] = RecordWriter(record_path(folder, *key))
        writers[key].write(record)
    for writer in writers.values():
        writer.close()
    last = max((r.spans[-1][2] for r in records), default=CLOCK)
    events = [
        RunEvent("started", CLOCK - 1.0, 1.7e9, 0, 100),
        RunEvent("died", CLOCK + 1.0, 1.7e9 + 2.0, 1, 101, detail="killed by <SIGKILL>"),
        RunEvent("undone", CLOCK + 2.0, 1.7e9 + 3.0, version=40, pushes=1234),
        RunEvent("ended", last, 1.7e9 + last - CLOCK + 1.0, detail="finished"),
    ]
    (folder / "run.jsonl").write_bytes(b"".join(msgspec.json.encode(e) + b"\n" for e in events))
    write_json(folder / "report.json", make_report(setup, records, events, StoreTotals(), "finished"))
    return folder


class Parsed(HTMLParser):
    """The ids, the links and the text of a page; refuses what would need a network."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert not self.open, "not closed"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        assert "src" not in values
        assert tag != "link"
        if values.get("id"):
            self.ids.add(str(values["id"]))
        if tag == "a":
            self.links.append(str(values["href"]))
        if tag not in ("meta", "path", "rect", "!doctype"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("path", "rect"):
            assert self.open.pop() == tag


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", list(steps(100, staleness=1, absent=(4.0, 8.0))))


@pytest.mark.promise("show the run's text escaped")
@pytest.mark.promise("load nothing from the network")
def test_sections_findings_and_links(folder: Path) -> None:
    page = make_page(load_run([folder]), folder / "report.html")
    parsed = Parsed(page)
    assert parsed.ids >= {"summary", "findings", "events", "files"} | CHARTS
    assert all((folder / link).exists() for link in parsed.links)
    assert {"report.json", "plan.json", "run.jsonl"} <= set(parsed.links)
    assert "Rank 1 (slow &amp; &lt;old&gt;) was absent for 4." in page
    assert re.search(
        r"3\d of 100 rounds \(version [^)]*, \.\.\.\) had fewer samples than the global batch of 10", page
    )
    assert "killed by &lt;SIGKILL&gt;" in page
    assert ">undone<" in page
    assert "back at version 40, without 1,234 versions after it" in page
    assert "<old>" not in page
    assert not re.search(r"https?://", page)


def test_transfers_during_compute_limit_nothing(tmp_path: Path) -> None:
    overlapped = []
    for record in steps(30):
        kind, begin, end = record.spans[-1]
        spans = [*record.spans[:-1], (kind, begin, end + 0.5)]
        overlapped.append(msgspec.structs.replace(record, depth=2, spans=spans))
    found = limit(load_run([make_run(tmp_path / "run", overlapped)]))
    assert found.startswith("Compute limits it"), found


def test_report_has_loss_and_absence(folder: Path) -> None:
    report = load_run([folder]).report
    assert report.loss_first == pytest.approx(5.0)
    assert report.loss_last == pytest.approx(0.05)
    assert len(report.loss) == report.samples.trained // 10
    assert [round(r.absent_seconds) for r in report.ranks] == [0, 4]
    assert json.loads((folder / "report.json").read_bytes())["loss"][0][2] == pytest.approx(5.0, rel=0.3)


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    run = load_run([make_run(tmp_path / "long", list(steps(3_000)))])
    page = make_page(run, tmp_path / "long" / "report.html")
    assert len(page.encode()) < MOST_BYTES / 5
    assert len(run.report.loss) <= 200


def test_many_ranks_stay_small(tmp_path: Path) -> None:
    ranks = tuple(RankSpec(k, f"device-{k}", 4, 0.1) for k in range(100))
    one = [r for r in steps(30) if r.rank == 0]
    records = [msgspec.structs.replace(r, rank=k, pid=k) for k in range(100) for r in one[:20]]
    folder = make_run(tmp_path / "many", records, msgspec.structs.replace(setup_of(), ranks=ranks))
    page = make_page(load_run([folder]), folder / "report.html")
    assert len(page.encode()) < MOST_BYTES
    assert "The first 64 of 100 ranks." in page


def test_runs_without_steps_or_a_report(tmp_path: Path) -> None:
    empty = make_run(tmp_path / "empty", [])
    Parsed(make_page(load_run([empty]), empty / "report.html"))
    trains = make_run(tmp_path / "trains", list(steps(5)))
    (trains / "report.json").unlink()
    page = make_page(load_run([trains]), trains / "report.html")
    assert "unfinished" in page
    one = make_run(tmp_path / "one", list(steps(1)))
    Parsed(make_page(load_run([one]), one / "report.html"))


def test_the_command(folder: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [str(folder)])
    assert done.exit_code == 0
    assert done.stdout == f"wrote {folder / 'report.html'}\n"
    assert CliRunner().invoke(app, [str(folder), "-o", str(tmp_path / "page.html")]).exit_code == 0
    assert 'href="run/report.json"' in (tmp_path / "page.html").read_text()
    with pytest.raises(InputError, match="the folder of a run"):
        CliRunner().invoke(app, [str(tmp_path)], catch_exceptions=False)
    with pytest.raises(InputError, match="no folder"):
        CliRunner().invoke(
            app, [str(folder), "-o", str(tmp_path / "no" / "page.html")], catch_exceptions=False
        )
    assert not list(tmp_path.glob(".*tmp"))


@pytest.mark.slow
def test_in_a_browser(folder: Path) -> None:
    """No error, every chart has a size, nothing is wider than the window, read-outs follow the pointer."""
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium on PATH: apt-get install chromium")
    (folder / "report.html").write_text(make_page(load_run([folder]), folder / "report.html"))
    with Browser(program) as browser:
        for width, dark in ((1400, False), (400, True)):
            browser.open(folder / "report.html", width, dark=dark)
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            sizes = browser.evaluate(
                "[...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect())"
                ".map(r => [r.width, r.height])"
            )
            assert len(sizes) == 4 + 2  # the ranks' timelines; the loss, and the time of steps
            assert all(w > 0.3 * width and h >= 20 for w, h in sizes), sizes
        plot = "document.querySelector('#loss .plot')"
        move = "dispatchEvent(new PointerEvent('pointermove', {clientX: 200, clientY: 0}))"
        browser.evaluate(f"{plot}.{move}")
        assert "loss" in browser.evaluate(f"{plot}.querySelector('.readout').textContent")
        background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == "rgb(20, 20, 19)"
        assert browser.errors == []
