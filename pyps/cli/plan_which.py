"""`pyps-plan which`: what to run on a cluster: the ways to train, ranked, and a pilot to tell them apart."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.table import Column
from rich.text import Text

from pyps.cli.terminal import figures, plain_table, terminal
from pyps.errors import InputError
from pyps.formats import Cluster, Profile, RunTable, encode
from pyps.simulate.which import Ranked, Ranking, after_pilot, ranked_ways


def answer(
    cluster: Cluster, profiles: Sequence[Profile], losses: Sequence[str] | None, as_json: bool
) -> None:
    """Print the ranking, and, after a pilot, the way to go on with."""
    given = dict(_loss(text) for text in losses or ())
    ranking = ranked_ways(cluster, profiles)
    chosen = after_pilot(ranking, given) if given else None
    if as_json:
        sys.stdout.write(encode({"ranking": ranking, "chosen": chosen}).decode())
        return
    _show(ranking)
    if chosen is not None:
        terminal().print(f"after the pilot: {chosen.name}, {_options(chosen)}", soft_wrap=True)


def _loss(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    try:
        return name, float(value)
    except ValueError:
        raise InputError("--loss", "", repr(text), "NAME=LOSS, as asp=0.412") from None


def _show(ranking: Ranking) -> None:
    console = terminal(highlight=True)
    table = plain_table(Column("way", no_wrap=True), *figures("used", "us/sample", "samples", "to the loss"))
    for one in ranking.ways:
        low, middle, high = (_micro(seconds) for seconds in one.to_loss)
        samples = one.samples
        exact, to = samples.low == samples.high, "to >" if samples.over else "to "
        table.add_row(
            one.name,
            str(one.workers),
            _micro(one.seconds_per_sample),
            "1" if exact else f"{samples.low:.3g} {to}{samples.high:.3g}",
            middle if exact else f"{middle} ({low} {to}{high})",
        )
    console.print(table, soft_wrap=True)
    for line in _verdict(ranking):
        console.print(Text(line), soft_wrap=True)


def _verdict(ranking: Ranking) -> list[str]:
    """Return what each way needs and where its range is from; then what to run, why, and how to know
    better.
    """
    lines = []
    for title, told in (("needs", _needs), ("samples", _source)):
        for text in dict.fromkeys(told(one) for one in ranking.ways):
            names = "; ".join(one.name for one in ranking.ways if told(one) == text)
            lines.append(f"{title:<10} {text} ({names})")
    lines += [f"left out   {name}: {reason}" for name, reason in ranking.left_out.items()]
    best = ranking.ways[0]
    lines += [f"run        {best.name}: {_options(best)}", f"why        {best.why}"]
    if ranking.level:
        lines.append(f"level      it cannot be told from {'; '.join(ranking.level)}")
    lines += [f"measure    {what}" for what in ranking.measure]
    ways = {one.name: one for one in ranking.ways}
    for name, count in ranking.pilot.items():
        lines.append(f"pilot      {name}: {count} samples ({_options(ways[name])})")
    return lines


def _micro(seconds: float) -> str:
    """Microseconds, in three digits."""
    return f"{float(f'{1e6 * seconds:.3g}'):g}"


def _needs(one: Ranked) -> str:
    return one.needs


def _source(one: Ranked) -> str:
    return one.samples.source


def _options(one: Ranked) -> str:
    """Return how to run a way."""
    if one.run is None:
        return 'torchrun, with the plan of [sync] kind = "ring"'
    defaults = RunTable()
    given = [
        f"--{key.replace('_', '-')}" + ("" if value is True else f" {value}")
        for key in RunTable.__struct_fields__
        if (value := getattr(one.run, key)) != getattr(defaults, key)
    ]
    return f"pyps-plan {' '.join(given)}"
