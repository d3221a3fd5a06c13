"""Prints plans, explanations, changes and Pareto fronts on a terminal."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.table import Table
from rich.text import Text

from pyps.cli.terminal import figures, plain_table, terminal
from pyps.formats import Plan, PlannedRun, PlanWorker, Unit
from pyps.formats.mode import CODEC_BITS
from pyps.solver.auto_batch import BatchPoint
from pyps.solver.constrained import even_batches
from pyps.solver.jobs.pareto import ParetoPoint
from pyps.solver.jobs.whatif import PlanSummary
from pyps.solver.report.explain import Explanation
from pyps.solver.report.measure import WORTH, NextSizes

ROWS_AT_MOST = 64  # the plan file has all rows
LIKE_AT_LEAST = 4  # workers with the same figures, one after another, that share a row
WORTH_SAYING = 0.98  # of the iteration: what another mode takes at most


def show_plan(plan: Plan, even_seconds: Sequence[float]) -> None:
    """Print the table of workers, then one line for each result of the plan."""
    console = terminal(highlight=True)
    console.print(_workers(plan, even_seconds))
    if any(worker.bytes is not None for worker in plan.workers):
        console.print(_memory(plan))
    for line in _summary(plan):
        console.print(line, soft_wrap=True)
    for warning in plan.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)


def _summary(plan: Plan) -> list[str]:
    bound = plan.lower_bound_seconds
    below = f" (no split can be below {ms(bound)})" if bound else ""
    lines = [f"iteration  {ms(plan.iteration_seconds)}{below}"]
    if plan.run:
        lines.append(f"mode       {mode_text(plan, plan.run)}")
    elif plan.sync is None:
        lines += _other_modes(plan)
    if plan.sync and plan.sync.kind == "none":
        lines.append('of it      no time to synchronise: [sync] kind is "none"')
    elif plan.sync:
        lines.append(f"of it      {ms(plan.sync.seconds)} to synchronise ({plan.sync.kind})")
    even = plan.even_split
    if even.seconds and plan.speedup_over_even:
        gain = plan.speedup_over_even
        said = f"the plan is {gain:.2f}x faster"
        if gain < 0.995:  # local steps that do not wait: solver.plan
            said = f"{1 / gain:.2f}x faster, but workers do not end together, and late ones learn less"
        lines.append(f"even split {ms(even.seconds)}: {said}")
    else:
        lines.append("even split not feasible: it breaks a minimum, a maximum, a batch multiple or a limit")
    if cost := plan.cost:
        if cost.price_per_hour is not None:
            million = f", {cost.price_per_million_samples:.4g} a million {plan.unit}"
            lines.append(f"price      {cost.price_per_hour:g} an hour{million}")
        if cost.watts is not None:
            kwh = cost.watts * plan.iteration_seconds / plan.global_batch / 3.6
            lines.append(f"power      {cost.watts:g} W, {kwh:.4g} kWh a million {plan.unit}")
    if noise := plan.noise:
        for name, made in (("nominal", noise.nominal), ("robust", noise.robust)):
            lines.append(
                f"{name:<10} {ms(made.seconds)} as fitted, {ms(made.quantile_seconds)} at the "
                f"{noise.quantile:g} quantile; done by {ms(noise.robust.quantile_seconds)} with probability "
                f"{made.chance:.3f}"
            )
    if good := plan.goodput:
        lines.append(
            f"goodput    {good.goodput:.4g}: {good.samples_per_second:.4g} {plan.unit} a second, each worth "
            f"{good.efficiency:.3f} of one in a batch of {good.base_batch}"
        )
    if target := plan.target:
        price = "" if target.price is None else f", for {target.price:.4g}"
        like = "" if target.base_batch is None else f" worth those of batches of {target.base_batch}"
        lines.append(f"target     {target.samples:g} {plan.unit}{like}: {_hours(target.seconds)}{price}")
        if (every := target.checkpoint_every_seconds) is not None:
            lines.append(
                f"spot       preemptions and checkpoints make it {target.lost:.3f} times as long; checkpoint "
                f"every {every / 60:.3g} minutes"
            )
        if (chance := target.deadline_chance) is not None:
            lines.append(f"deadline   kept with probability {chance:.3f}")
    return lines


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.4g} hours"


def _other_modes(plan: Plan) -> list[str]:
    """Return what pipelines, and the bits of the error budget, would make of these batches, if that is
    faster.
    """
    hps = plan.hps
    if hps.pipelined_seconds is None or hps.quantized_seconds is None:
        return []
    if min(hps.pipelined_seconds, hps.quantized_seconds) > plan.iteration_seconds * WORTH_SAYING:
        return []
    modes = [worker.mode for worker in plan.workers if worker.mode is not None]
    deep = max(mode.depth for mode in modes)
    bits = min(CODEC_BITS[codec] for mode in modes for codec in (mode.push, mode.pull))
    limit = f"{ms(hps.quantized_seconds)} with {bits} bits and {deep} steps under way"
    fewer = f", {limit}" if bits < 32 else ""
    return [
        f"transfers  {ms(hps.transfer_seconds or 0.0)} after {ms(hps.compute_seconds or 0.0)} of compute; "
        f"in a pipeline {ms(hps.pipelined_seconds)}{fewer} (--depth auto --codec plan)"
    ]


def mode_text(plan: Plan, run: PlannedRun) -> str:
    """A plan's mode in a line."""
    workers = [plan.mode_of(worker) for worker in plan.workers if worker.batch]
    pushes, pulls = ({getattr(w, way) for w in workers} for way in ("push", "pull"))
    depths = ", ".join(map(str, sorted({w.depth for w in workers})))
    text = f"{run.policy}; gradients {' and '.join(sorted(pushes))}, parameters {' and '.join(sorted(pulls))}"
    text = f"{text}; {depths} step{'s' * (depths != '1')} under way"
    if run.local_steps is None:
        return text
    moments = f", {run.average_moments} averaged with the parameters" if run.average_moments else ""
    if run.local_batch is not None:
        rounds = f"{run.local_steps} global batch{'es' * (run.local_steps > 1)} in a round"
        sizes = sorted({worker.micro_batch for worker in plan.workers if worker.batch})
        size = f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else f"{run.local_batch}"
        return f"{text}; {rounds}, local steps of {size}{moments}"
    return f"{text}; {run.local_steps} local steps on average{moments}"


def _workers(plan: Plan, even_seconds: Sequence[float]) -> Table:
    even = even_batches(plan.global_batch, len(plan.workers))

    def cells(worker: PlanWorker) -> tuple[str, ...]:
        parts = f" ({worker.accumulation} x {worker.micro_batch})" if worker.accumulation > 1 else ""
        return (
            str(even[worker.rank]),
            ms(even_seconds[worker.rank]),
            f"{worker.batch}{parts}" if worker.batch else "out",
            ms(worker.predicted_seconds) if worker.batch else "-",
            f"{worker.weight:.4f}",
        )

    return _by_rank(plan, ("even", "time", "planned", "time", "weight"), cells)


def _memory(plan: Plan) -> Table:
    """Return the GiB that each rank of a sharded model holds, by kind, and the GiB of its card."""
    kinds = ("fixed", "parameters", "gradients", "optimizer", "activations", "total", "memory")

    def cells(worker: PlanWorker) -> tuple[str, ...]:
        share = "-" if worker.share is None else f"{worker.share:.4f}"
        return share, *(f"{getattr(worker.bytes, kind, 0) / 2**30:.2f}" for kind in kinds)

    return _by_rank(plan, ("share", "fixed", "params", "grads", "state", "acts", "held", "of GiB"), cells)


def _by_rank(plan: Plan, titles: Sequence[str], cells: Callable[[PlanWorker], tuple[str, ...]]) -> Table:
    """The cells of each rank under their titles: many like workers, one after another, share a row."""
    table = plain_table(*figures("rank"), "worker", *figures(*titles))

    def kind(worker: PlanWorker) -> tuple[str, tuple[str, ...]]:
        return re.sub(r"-\d+$", "", worker.name), cells(worker)

    rows: list[tuple[int, int, tuple[str, ...]]] = []
    for (_, shown), like in itertools.groupby(plan.workers, kind):
        ranks = [worker.rank for worker in like]
        one_row = len(ranks) >= LIKE_AT_LEAST
        rows += [(ranks[0], ranks[-1], shown)] if one_row else [(rank, rank, shown) for rank in ranks]
    for first, last, shown in rows[:ROWS_AT_MOST]:
        names = plan.workers[first].name, plan.workers[last].name
        label = str(first) if first == last else f"{first}..{last}"
        table.add_row(label, Text(" .. ".join(dict.fromkeys(names))), *shown)
    if len(rows) > ROWS_AT_MOST:
        table.caption = f"(and {len(rows) - ROWS_AT_MOST} more rows; --json prints all workers)"
        table.caption_justify = "left"
    return table


def show_explanation(found: Explanation, err: bool = False) -> None:
    """Print one row a group, then the verdict."""
    table = plain_table("group", *figures("workers", "batch", "waits", "share", "saved by room"), "")
    for group in found.groups[:ROWS_AT_MOST]:
        saved = group.seconds_saved_per_sample
        room = f"{1e3 * saved:.3g} ms/sample" if saved > 1e-9 else "-"
        cells = str(group.workers), str(group.batch), ms(group.waits_seconds), f"{group.share:.2f}"
        table.add_row(Text(group.name), *cells, room, group.binds)
    if len(found.groups) > ROWS_AT_MOST:
        table.caption = f"(and {len(found.groups) - ROWS_AT_MOST} more rows)"
        table.caption_justify = "left"
    console = terminal(stderr=err, highlight=True)
    console.print(table)
    console.print(Text(found.verdict))


def show_change(before: PlanSummary, after: PlanSummary, sentence: str, unit: Unit) -> None:
    """Print the figures before and after in two columns, then a sentence. unit: what batches count."""
    table = plain_table("", *figures("now", "then"))
    table.add_row("iteration", ms(before.iteration_seconds), ms(after.iteration_seconds))
    table.add_row(f"{unit}/s", f"{before.samples_per_second:.4g}", f"{after.samples_per_second:.4g}")
    table.add_row("utilisation", f"{before.utilisation:.1%}", f"{after.utilisation:.1%}")
    table.add_row("price/hour", _or_dash(before.price_per_hour), _or_dash(after.price_per_hour))
    million = before.price_per_million_samples, after.price_per_million_samples
    table.add_row(f"price/million {unit}", _or_dash(million[0]), _or_dash(million[1]))
    if before.hours is not None:
        table.add_row("hours to the target", _or_dash(before.hours), _or_dash(after.hours))
        table.add_row("price of the target", _or_dash(before.price), _or_dash(after.price))
    console = terminal(highlight=True)
    console.print(table)
    console.print(Text(sentence))


def show_pareto(points: Sequence[ParetoPoint], names: Sequence[str], unit: Unit) -> None:
    """Print one row a point, fastest first, with the number of workers in use by group.

    names: of each worker's group. unit: what batches count.
    """
    table = plain_table(*figures("iteration", "price/hour", f"price/million {unit}"), "workers")
    for point in points:
        prices = f"{point.price_per_hour:.4g}", f"{point.price_per_million_samples:.4g}"
        table.add_row(ms(point.solution.iteration_seconds), *prices, _used(point, names))
    terminal(highlight=True).print(table)


def show_batches(front: Sequence[BatchPoint], names: Sequence[str], unit: Unit) -> None:
    """Do as `show_pareto` does, for a front over global batches; both figures are of useful samples."""
    titles = "global batch", "iteration", f"hours/million {unit}", f"price/million {unit}"
    table = plain_table(*figures(*titles), "workers")
    for one in front:
        prices = f"{one.seconds_per_million / 3600:.4g}", f"{one.price_per_million:.4g}"
        seconds = ms(one.point.solution.iteration_seconds)
        table.add_row(str(one.global_batch), seconds, *prices, _used(one.point, names))
    terminal(highlight=True).print(table)


def _used(point: ParetoPoint, names: Sequence[str]) -> Text:
    """The number of workers in use, by group."""
    counts: dict[str, int] = {}
    for name, batch in zip(names, point.solution.batches.tolist(), strict=True):
        if batch:
            counts[name] = counts.get(name, 0) + 1
    return Text(", ".join(f"{name} x {count}" for name, count in counts.items()))


def show_next(found: NextSizes) -> None:
    """Print `lines_of_next`."""
    console = terminal(highlight=True)
    for line in lines_of_next(found):
        console.print(Text(line), soft_wrap=True)


def lines_of_next(found: NextSizes) -> list[str]:
    """A line for each size to measure, what may be won, and the multiples that were noticed."""
    lines = [f"measure {one.batch:>6}  {one.group} ({one.profile}): {one.why}" for one in found.sizes]
    for group, multiple in found.multiples.items():
        lines.append(f"set batch_multiple = {multiple} for {group}: other sizes take longer")
    if found.may_win > WORTH:
        return [*lines, f"another split may save up to {found.may_win:.1%} of an iteration"]
    return [*lines, "no split can save more than 1 % of an iteration, as far as the profiles' bands hold"]


@contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner with a text on stderr if that is a terminal; yields a function that changes the text."""
    console = terminal(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status(text) as status:
        yield lambda text: status.update(text)


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def ms(seconds: float) -> str:
    """Milliseconds, or a dash for 0 and infinity."""
    return "-" if seconds in (0.0, float("inf")) else f"{1000 * seconds:.2f} ms"
