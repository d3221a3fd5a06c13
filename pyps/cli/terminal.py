"""The terminal: all that a command prints passes here, with control characters of foreign text shown.

Names, paths and keys come from files and from other hosts. Escape sequences in them could change what the
terminal shows, or what it does.
"""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.segment import Segment
from rich.table import Column, Table

from pyps.errors import shown


class Shown:
    """A renderable whose texts are shown; its own styles and line breaks stay."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for text, style, control in console.render(self._inner, options):
            yield Segment(text if control else shown(text, keep="\n\t"), style, control)


class _Hook(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [Shown(one) for one in renderables]


def terminal(*, stderr: bool = False, width: int | None = None, highlight: bool = False) -> Console:
    """A console that shows foreign text; no text is markup. highlight: whether numbers are coloured."""
    console = Console(stderr=stderr, width=width, highlight=highlight, markup=False)
    console.push_render_hook(_Hook())
    return console


def say(text: str, *, stderr: bool = False) -> None:
    """Print a line as it is, but for control characters."""
    print(shown(text), file=sys.stderr if stderr else sys.stdout)


def figures(*headings: str) -> list[Column]:
    """Columns of figures, to the right under their headings."""
    return [Column(heading, justify="right", no_wrap=True) for heading in headings]


def plain_table(*columns: Column | str) -> Table:
    """A table without a frame."""
    return Table(*columns, box=None, header_style="bold")
