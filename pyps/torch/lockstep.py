"""Whether all ranks do the same: what each did since its last gradient travels with W, and all compare.

A rank that leaves out a call, makes it twice, or has another data set would let the others wait for it later,
without a word. Every round sums a number over the ranks anyway, W; the numbers of each rank go with it. In
the next round all ranks compare them, and all raise the same InputError. A rank's request for a decision goes
the same way, so all ranks learn of it in the same round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pyps.errors import InputError
from pyps.torch.rounds import Rounds

UNKNOWN = -1.0  # a number that a rank does not have
REFUSED = -2  # in place of a rank's gradients: it refuses them, and says why
# Calls of Rebalancer.step() since the last gradient; samples and rounds of the epoch; a request; gradients
# that a script adds up itself; the fingerprint of its shapes.
COLUMNS = 6
ASKS = 3  # the request's
MOST_TABLES = 64  # kept at a time
LAG = 2  # rounds until a GPU's table is compared: it is there by then, mostly


class Lockstep:
    """A table with a row for each rank. calls: this rank's; None without a Rebalancer. sampler: its data.
    asks: whether this rank asks for a decision.
    """

    def __init__(self, rank: int, ranks: int, sampler: Rounds | None) -> None:
        self.calls: int | None = None
        self.sampler = sampler
        self.asks = False
        self._rank, self._ranks = rank, ranks
        self._data_set: list[float] = []
        self._tables: dict[tuple[float, ...], torch.Tensor] = {}  # a GPU has those of most rounds already
        self._summed: torch.Tensor | None = None  # the latest round's
        self._is_compared = False  # whether that was
        self._is_first = True  # whether no round is over yet
        self._alike: list[float] = []  # the latest table in which the ranks did the same
        self._copies: list[tuple[torch.Tensor, Any]] = []  # of earlier ones, on their way from a GPU
        self._request: tuple[torch.Tensor, Any] | None = None  # the same, of the round before

    def row(
        self, device: torch.device, added: int | None = 1, fingerprint: int | None = None
    ) -> torch.Tensor:
        """This rank's row among zeros, float64 [COLUMNS * ranks], for the sum over all ranks; see sent().

        added: gradients of the round that were added up as they are; None if this rank has none, or REFUSED.
        fingerprint: of the round's shapes, where its weight is an assumption.
        """
        if not self._data_set:
            found = (getattr(self.sampler, "length", None), getattr(self.sampler, "rounds", None))
            self._data_set = [UNKNOWN if x is None else float(x) for x in found]
        calls = UNKNOWN if self.calls is None else float(self.calls)
        if self.calls is not None:
            self.calls = 0
        asks, self.asks = self.asks, False
        last = [UNKNOWN if x is None else float(x) for x in (added, fingerprint)]
        key = (calls, float(asks), *last)
        if key not in self._tables:
            if len(self._tables) >= MOST_TABLES:
                self._tables.clear()
            before = COLUMNS * self._rank
            row = [0.0] * before + [calls, *self._data_set, float(asks), *last]
            row += [0.0] * (COLUMNS * self._ranks - len(row))
            self._tables[key] = torch.tensor(row, dtype=torch.float64).to(device)
        return self._tables[key]

    def sent(self, table: torch.Tensor) -> None:
        """Where the sum of the rows will be, [COLUMNS * ranks] of floats."""
        self._summed, self._is_compared = table, False

    def is_due(self) -> bool:
        """A round is over: whether to compare it now. A GPU would have to be waited for: only its first."""
        first, self._is_first = self._is_first, False
        return first or self._summed is None or self._summed.device.type == "cpu"

    def compare(self, now: bool = False) -> None:
        """Raise InputError where ranks differ, after the round is over; on a GPU some rounds later, unless
        `now`.
        """
        table = self._summed
        if table is None or self._is_compared:
            return
        self._is_compared = True
        if table.device.type == "cuda" and not now and (table := self._from_gpu(table)) is None:
            return
        if (flat := table.tolist()) == self._alike:
            return
        rows = [flat[k : k + COLUMNS] for k in range(0, len(flat), COLUMNS)]
        if refused := [rank for rank, row in enumerate(rows) if row[4] == REFUSED]:
            raise refused_by(refused)
        _same("samples of the data set", [row[1] for row in rows], "as many on every rank")
        _same("rounds of an epoch", [row[2] for row in rows], "as many on every rank")
        calls = [row[0] for row in rows]
        expected = "one call after each gradient, on every rank"
        _same("calls of Rebalancer.step() since the last gradient", calls, expected)
        expected_shares = "as many on every rank, or each loss times hook.share(len(micro), len(batch))"
        _same("micro-batches in no_sync()", [row[4] for row in rows if row[4] != UNKNOWN], expected_shares)
        if len({row[5] for row in rows} - {UNKNOWN}) > 1:
            found = "unlike shapes on the ranks, not in the first dimension alone, unlike targets by row, or "
            found += "unlike numbers of forward passes in a loss"
            expected = "weighted_hook(model, count=lambda x, *_, **__: len(x)) for a mean over rows, or "
            expected += "hook.set_weight(n) before backward() for one over n others, such as mask.sum()"
            raise InputError("weighted_hook", "samples", found, expected)
        if max(calls) > 1:
            raise InputError(
                "Rebalancer", "step", f"{max(calls):.0f} calls since the last gradient", expected
            )
        self._alike = flat

    def asked(self) -> bool:
        """Whether a rank asks for a decision, the same on all ranks. Call it once a round, after backward().

        On a GPU it is the round before's, so that no rank waits for what its device has still to do.
        """
        table = self._summed
        if table is not None and table.device.type == "cuda":
            before, self._request = self._request, _copied(table)
            table = None
            if before is not None:
                table, event = before
                event.synchronize()
        return table is not None and bool(table.view(-1, COLUMNS)[:, ASKS].any())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _from_gpu(self, table: torch.Tensor) -> torch.Tensor | None:
        """The table of LAG rounds ago: each one, and in the same round on all ranks, so that all raise."""
        self._copies.append(_copied(table))
        if len(self._copies) <= LAG:
            return None
        found, event = self._copies.pop(0)
        event.synchronize()
        return found


def refused_by(ranks: Sequence[int]) -> InputError:
    """What the other ranks raise."""
    found = f"gradients that rank{'s' * (len(ranks) > 1)} {_listed(ranks)} refused"
    return InputError("weighted_hook", "backward()", found, "what that rank's message says")


def _copied(table: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """A copy on its way from a GPU, and the event after which it is there."""
    copy = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
    copy.copy_(table, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()  # torch.compile traces this, and takes no event of an earlier call
    return copy, event


def _same(field: str, numbers: Sequence[float], expected: str) -> None:
    """Raise InputError that names the ranks by number, if these differ."""
    if len(set(numbers)) <= 1:
        return
    ranks: dict[float, list[int]] = {}
    for rank, number in enumerate(numbers):
        ranks.setdefault(number, []).append(rank)
    found = ", ".join(
        f"{'none' if number == UNKNOWN else f'{number:.0f}'} on rank{'s' * (len(own) > 1)} {_listed(own)}"
        for number, own in sorted(ranks.items())
    )
    raise InputError("ranks differ", field, found, expected)


def _listed(ranks: Sequence[int], most: int = 8) -> str:
    return ", ".join(map(str, ranks[:most])) + (f" and {len(ranks) - most} more" if len(ranks) > most else "")
