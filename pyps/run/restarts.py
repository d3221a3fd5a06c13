"""Whether a rank whose process died is started again, and when.

A process that was killed may be unlucky. One that failed with an exit code has an error of its own: misuse,
as with a data set unlike the others', and divergence are final, and the same error twice, soon after the
start, would come a third time. So does one that all ranks of this machine meet before their first step.
"""

from __future__ import annotations

from collections import Counter

from pyps.errors import Diverged, InputError, InvalidArgument, LinkLost, OtherABI, UnknownPolicy
from pyps.run.process import RankProcess

BACKOFF_SECONDS = 0.2  # before the first restart of a rank; doubled for each further one
MAX_BACKOFF_SECONDS = 5.0
STARTUP_BACKOFF_SECONDS = 1.0  # after an error before the first step: meanwhile the others may fail alike
MAX_STARTUP_FAILURES = 1  # of a rank in a row: the next one ends the run
SOON_SECONDS = 60.0  # an error that comes back later than this after the start may be another one
OWN_ERRORS = "pyps.errors."
LINK_LOST = f"{LinkLost.__module__}.{LinkLost.__qualname__}"  # of its server, which may come back
FINAL_ERRORS = frozenset(
    f"{kind.__module__}.{kind.__qualname__}"
    for kind in (InputError, Diverged, InvalidArgument, UnknownPolicy, OtherABI)
)


class Restarts:
    """Counts the restarts of each of `ranks` ranks; `most` are allowed."""

    def __init__(self, most: int, ranks: int = 0) -> None:
        self.counts: Counter[int] = Counter()
        self._most, self._ranks = most, ranks
        self._at_startup: dict[int, str] = {}  # by rank, errors before any step
        self._startup_failures: Counter[int] = Counter()
        self._last_error: dict[int, str] = {}

    def refusal(self, process: RankProcess, has_steps: bool) -> str | None:
        """Why the rank of a dead process is not started again, as the end of a sentence; None: it is.

        has_steps: the process has reported a step.
        """
        rank, count = process.rank, self.counts[process.rank]
        after = f" after {count} restart{'s' * (count != 1)}" if count else ""
        error = process.error
        if (process.exit_code or 0) > 0:
            if error.partition(":")[0] in FINAL_ERRORS:
                return after
            again = error == self._last_error.get(rank) and error.partition(":")[0] not in ("", LINK_LOST)
            self._last_error[rank] = error
            if again and process.lived_seconds < SOON_SECONDS:
                return f"{after}, with the same error"
            if not has_steps and not error.startswith(OWN_ERRORS):
                self._at_startup[rank] = error
                if list(self._at_startup.values()) == [error] * self._ranks:
                    return f"{after}, as all ranks did before their first step"
        if has_steps:
            self._at_startup.pop(rank, None)
        if has_steps or (process.exit_code or 0) <= 0:
            self._startup_failures[rank] = 0
        else:
            self._startup_failures[rank] += 1
        if self._startup_failures[rank] > MAX_STARTUP_FAILURES or count >= self._most:
            return after
        return None

    def count(self, rank: int) -> float:
        """The rank is started again: the seconds to wait before."""
        least = STARTUP_BACKOFF_SECONDS if rank in self._at_startup else 0.0
        backoff: float = max(least, self._backoff(rank))
        self.counts[rank] += 1
        return backoff

    def _backoff(self, rank: int) -> float:
        return min(MAX_BACKOFF_SECONDS, BACKOFF_SECONDS * 2.0 ** self.counts[rank])
