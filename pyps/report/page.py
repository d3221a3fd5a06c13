"""The page of a run: one HTML file that needs nothing else, neither a network nor other files."""

from __future__ import annotations

import html
import os
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

from pyps.formats.events import RunEvent
from pyps.report.report import RankReport, absences, rank_time
from pyps.report.ring import TurnsReport
from pyps.report.run_data import RunData
from pyps.report.sections import Section, sections
from pyps.report.steps import bottleneck

OUTCOMES = {"finished": "good", "interrupted": "warn", "failed": "bad", "unfinished": "warn"}
SHOWN_EVENTS = ("died", "left", "restarted", "replanned", "checkpoint", "resumed", "undone", "ended")
MOST_EVENTS = 200
MOST_FILES = 200


def make_page(run: RunData, path: str | os.PathLike[str]) -> str:
    """The page's text; links to files are relative to `path`, where it will be written."""
    title = f"pyps run: {Path(os.path.realpath(run.folders[0])).name}"
    parts = [_top(run, title), *map(_section, sections(run)), _events(run), _files(run, Path(path))]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>\n{_resource('page.css')}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + f"\n</main>\n<script>\n{_resource('page.js')}</script>\n</body>\n</html>\n"
    )


def _resource(name: str) -> str:
    return (files("pyps.report") / name).read_text(encoding="utf-8")


def _text(value: object) -> str:
    return html.escape(str(value))


def _section(section: Section) -> str:
    return f'<section id="{section.key}"><h2>{_text(section.title)}</h2>{section.body}</section>'


def _top(run: RunData, title: str) -> str:
    """The heading, the figures that matter, what was found, and a row for each rank."""
    report, setup = run.report, run.setup
    kind = OUTCOMES[report.outcome]
    devices = ", emulated devices" if report.emulated else ""
    batches = ", equal batches" if report.even else ""
    about = f"{Path(setup.script).name}, {report.policy}{batches}{devices}, on {setup.host}"
    outcome = f'<b class="{kind}">{report.outcome}</b>' + (f": {_text(report.error)}" if report.error else "")
    tiles = "".join(
        f'<div class="tile"><b>{_text(value)}</b><span>{_text(name)}</span></div>'
        for name, value in _tiles(run)
    )
    lines = "".join(f"<li>{_text(line)}</li>" for line in findings(run))
    found = f"<p>{_text(limit(run))}</p>" + (f"<ul>{lines}</ul>" if lines else "")
    return (
        f'<header id="summary"><h1>{_text(title)}</h1><p class="about">{_text(about)}</p><p>{outcome}</p>'
        f'<div class="tiles">{tiles}</div></header>'
        f'<section id="findings"><h2>What limits it</h2>{found}{_ranks(report.ranks)}</section>'
    )


def _tiles(run: RunData) -> Iterator[tuple[str, str]]:
    report = run.report
    times, predicted = report.iteration_seconds, report.predicted_iteration_seconds
    if times.count:
        yield "median step", f"{times.median * 1e3:,.1f} ms"
    if predicted:
        yield "planned step", f"{predicted * 1e3:,.1f} ms"
    if report.measured_over_predicted is not None:
        yield "measured over planned", f"{report.measured_over_predicted:.2f}"
    trained = report.samples.trained
    whole = trained + report.samples.elsewhere + report.samples.left
    yield "samples trained", f"{trained:,} of {whole:,}" if whole > trained else f"{trained:,}"
    if report.loss_last is not None:
        yield "last loss", f"{report.loss_last:.4g}"
    yield "time", f"{report.wall_seconds:,.1f} s"
    yield "waiting", f"{report.idle_share:.1%}"
    yield "versions", f"{report.versions:,}"
    yield "restarts", str(report.restarts)


def _ranks(ranks: Sequence[RankReport]) -> str:
    """A table: what was planned and what was measured."""
    phases = ("compute", "data", "push", "pull", "wait", "overlapped")
    shown = [p for p in phases if any(getattr(r, p, None) and getattr(r, p).mean for r in ranks)]
    absent = any(r.absent_seconds for r in ranks)
    heads = ["rank", "batch", "planned ms", *(f"{p} ms" for p in shown), "idle", "staleness", "steps"]
    heads += ["absent s"] if absent else []
    rows = []
    for r in ranks:
        cells = [f"{r.rank} {r.name}", f"{r.batch:,}"]
        cells.append("-" if r.predicted_seconds is None else f"{r.predicted_seconds * 1e3:,.1f}")
        cells += [f"{getattr(r, p).median * 1e3:,.1f}" for p in shown]
        cells += [f"{r.idle_share:.1%}", f"{r.staleness_mean:.1f}", f"{r.steps:,}"]
        cells += [f"{r.absent_seconds:,.1f}"] if absent else []
        rows.append("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{_text(h)}</th>" for h in heads)
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _events(run: RunData) -> str:
    """Return what happened to the processes; joins and starts are left out."""
    shown = [event for event in run.events if event.kind in SHOWN_EVENTS]
    if not shown:
        return ""
    origin = run.events[0].monotonic_seconds
    rows = "".join(_event(event, origin) for event in shown[:MOST_EVENTS])
    more = f"<p>and {len(shown) - MOST_EVENTS:,} more, in run.jsonl</p>" if len(shown) > MOST_EVENTS else ""
    head = '<tr><th>seconds</th><th>rank</th><th class="text">event</th><th></th></tr>'
    table = f'<div class="scroll"><table>{head}{rows}</table></div>{more}'
    return _section(Section("events", "Events", table))


def _event(event: RunEvent, origin: float) -> str:
    detail = event.detail if event.version is None else f"version {event.version} {event.detail}"
    if event.pushes is not None:
        detail = f"back at version {event.version or 0}, without {event.pushes:,} versions after it"
    rank = "" if event.rank is None else event.rank
    seconds = f"{event.monotonic_seconds - origin:,.1f}"
    cells = f'<td>{seconds}</td><td>{rank}</td><td class="text">{_text(event.kind)}</td>'
    return f'<tr>{cells}<td class="text">{_text(detail)}</td></tr>'


def _files(run: RunData, path: Path) -> str:
    items = []
    for folder in run.folders:
        for file in sorted(folder.iterdir()):
            if not file.name.startswith(".") and os.path.realpath(file) != os.path.realpath(path):
                link = os.path.relpath(os.path.realpath(file), os.path.dirname(os.path.realpath(path)))
                items.append(f'<li><a href="{_text(Path(link).as_posix())}">{_text(file.name)}</a></li>')
    return _section(Section("files", "Files", f'<ul class="files">{"".join(items[:MOST_FILES])}</ul>'))


def limit(run: RunData) -> str:
    """Where the ranks' time goes apart from compute."""
    times = [rank_time(rank) for rank in run.report.ranks if rank.steps]
    return bottleneck(times) or "No rank has finished a step."


def findings(run: RunData) -> Iterator[str]:
    """Yield what the medians hide."""
    report = run.report
    yield from (f"{line[0].upper()}{line[1:]}." for line in (*absences(report), *report.stragglers))
    s = report.samples
    if s.returned or s.skipped or s.dropped:
        rest = f"{s.skipped:,} skipped, {s.dropped:,} dropped"
        yield f"{s.returned:,} samples were returned and assigned again, {rest}."
    if report.turns is not None and report.turns.turns:
        yield turns_kept(report.turns)
    yield from (f"{advice[0].upper()}{advice[1:]}." for advice in report.advice)
    yield from (f"Rebalanced: {why}." for why in report.replans)


def turns_kept(found: TurnsReport) -> str:
    """Say whether the ring's order and its gaps were those of the plan."""
    text = f"{found.turns - found.out_of_order:,} of {found.turns:,} turns followed the plan's order"
    if found.gap_seconds is None:
        return f"{text}."
    took, planned = found.gap_seconds * 1e3, found.planned_gap_seconds * 1e3
    return (
        f"{text}; from one to the next it took {took:,.1f} ms (median), where the plan has {planned:,.1f} ms."
    )
