"""How often something happens in a run: after a number of versions, or after some time."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pyps.errors import InputError

SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
EVERY = re.compile(r"(\d{1,18})|(\d{1,9}(?:\.\d{1,9})?)([smh])")


@dataclass(frozen=True)
class Interval:
    """A number of versions, or of seconds; neither: never."""

    versions: int = 0
    seconds: float = 0.0


def interval_of(every: int | str, field: str) -> Interval:
    """500 or "500": versions; "30s", "5m", "2h": a time; 0: never. Raises InputError, naming the field."""
    match = EVERY.fullmatch(str(every))
    if match is None:
        raise InputError(field, "", repr(every), "a number of versions (500) or a time (30s, 5m, 2h)")
    return Interval(int(match[1])) if match[1] else Interval(seconds=float(match[2]) * SECONDS[match[3]])
