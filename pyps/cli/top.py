"""`pyps top`: what every rank of a store does, on this machine or behind a server, without joining it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from typing import Annotated

import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pyps.cli.progress import clock, done, figures
from pyps.cli.terminal import Shown, terminal
from pyps.errors import InputError
from pyps.report.live import LiveRank
from pyps.report.top import StoreTop, TopStore, find_stores
from pyps.store.stragglers import Straggler

app = typer.Typer(add_completion=False)
SECOND_LOOK_SECONDS = 0.5  # with --once: rates are of that time
NARROW = 126  # cells: a narrower terminal gets fewer columns
PIPED_WIDTH = 160
STYLES = {
    "computing": "green",
    "waiting": "blue",
    "stopped": "red",
    "dead": "red",
    "fenced": "red",
    "absent": "bright_black",
    "resting": "bright_black",
    "left": "bright_black",
}


@app.command("top")
def top_command(
    target: Annotated[
        str | None, typer.Argument(metavar="[STORE|ADDRESS|RUN]", help="By default all stores in use here.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print it once.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print it once, as JSON.")] = False,
) -> None:
    """Show the ranks of a store: state, version, batch, step time, staleness, idle share, bytes, and which
    ranks the others wait for. Ctrl-C ends it.
    """
    if not 0.05 <= interval <= 3600.0:
        raise InputError("--interval", "", str(interval), "0.05 to 3600 seconds")
    # A file or a pipe has no width: the whole table, unless COLUMNS says one.
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    console = terminal(width=PIPED_WIDTH if piped else None)
    with ExitStack() as stack:
        stores = [stack.enter_context(closing(store)) for store in find_stores(target)]
        if once or as_json or not console.is_terminal:
            _show_once(console, stores, as_json)
        else:
            _show_live(console, stores, target, interval)


def _show_once(console: Console, stores: Sequence[StoreTop], as_json: bool) -> None:
    found = [store.look() for store in stores]
    if found and any(store.run.ranks for store in found):
        time.sleep(SECOND_LOOK_SECONDS)
        found = [store.look() for store in stores]
    if as_json:
        sys.stdout.write(msgspec.json.encode({"stores": found}).decode() + "\n")
    elif not found:
        console.print("no stores in use")
    else:
        console.print(screen(found, console.width))


def _show_live(console: Console, stores: list[StoreTop], target: str | None, interval: float) -> None:
    """Until Ctrl-C; without a target, stores that appear meanwhile are shown too."""
    known = {store.name: store for store in stores}
    with (
        suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False) as live,
        ExitStack() as stack,
    ):
        while True:
            if target is None:
                present = {store.name: store for store in find_stores(None)}
                known = {name: known.get(name, store) for name, store in present.items()}
                for name in known.keys() - {store.name for store in stores}:
                    stack.callback(known[name].close)
            found = [store.look() for store in known.values()]
            live.update(Shown(screen(found, console.width)) if found else "no stores in use", refresh=True)
            time.sleep(interval)


def screen(found: Sequence[TopStore], width: int) -> RenderableType:
    """A heading and a table for each store, for a terminal of `width` cells."""
    parts: list[RenderableType] = []
    for store in found:
        parts += [heading(store), "" if store.error else table(store, width), ""]
    return Group(*parts[:-1])


def heading(store: TopStore) -> Text:
    """Return what is known of the whole store: how far it is, its figures, what holds it up or limits it."""
    text = Text(store.name, style="bold", no_wrap=True, overflow="ellipsis")
    if store.error:
        text.no_wrap, text.overflow = False, "fold"
        return text.append(f": {store.error}", style="not bold red")
    now = store.run
    parts = [store.policy, f"version {now.versions:,}", done(now)]
    if now.eta_seconds is not None and not now.stalled:
        parts.append(f"{clock(now.eta_seconds)} left")
    if store.turn_rank is not None and store.gap_seconds is not None:
        parts.append(f"turn of rank {store.turn_rank}, gap {store.gap_seconds * 1e3:.1f} ms")
    below = filter(None, [", ".join(figures(now)), now.stalled or now.limit])
    return text.append("\n".join(["  " + ", ".join(parts), *below]), style="not bold")


def table(store: TopStore, width: int) -> Table:
    """A row for each rank; the reason stands last."""
    wide = width >= NARROW
    view = Table(box=None, header_style="bold", pad_edge=False, expand=False)
    view.add_column("rank", no_wrap=True)
    headings = ["pid"] * wide + ["batch", "steps"] + ["samples"] * wide + ["behind", "stale", "step ms"]
    headings += ["data ms"] if wide and any(r.phases.get("data") for r in store.run.ranks) else []
    headings += ["idle"] + (["pushed", "pulled", "MB/s"] if wide else [])
    for name in headings:
        view.add_column(name, justify="right", no_wrap=True)
    view.add_column("now", overflow="fold")
    for rank in store.run.ranks:
        cells = _cells(rank)
        style = "yellow" if rank.straggler else STYLES.get(rank.doing, "")
        view.add_row(
            f"{rank.rank} {rank.name}".strip(), *(cells[name] for name in headings), Text(_now(rank), style)
        )
    return view


def _cells(rank: LiveRank) -> dict[str, str]:
    return {
        "pid": "-" if rank.pid is None else str(rank.pid),
        "batch": f"{rank.batch:,}",
        "steps": f"{rank.steps:,}",
        "samples": f"{rank.samples:,}",
        "behind": "-" if rank.behind is None else f"{rank.behind:,}",
        "stale": f"{rank.staleness:.1f}",
        "step ms": "-" if rank.step_seconds is None else f"{rank.step_seconds * 1e3:,.1f}",
        "data ms": f"{rank.phases['data'] * 1e3:,.1f}" if rank.phases else "-",
        "idle": "-" if rank.idle_share is None else f"{rank.idle_share:.0%}",
        "pushed": f"{rank.bytes_pushed / 1e6:,.1f}",
        "pulled": f"{rank.bytes_pulled / 1e6:,.1f}",
        "MB/s": "-" if rank.bytes_per_second is None else f"{rank.bytes_per_second / 1e6:,.2f}",
    }


def _now(rank: LiveRank) -> str:
    """Return what it does, that others wait for it, and what kind of straggler it is."""
    text = rank.reason.removeprefix("is ").removeprefix("has been ")
    if rank.straggler and rank.doing == "computing":
        text = f"{text}: others wait for it"
    kind = str(Straggler(rank.late_by_version, rank.late_by_time))
    return f"{text}; {kind}" if kind else text
