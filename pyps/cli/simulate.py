"""`pyps simulate`: compare synchronization policies on a cluster, in virtual time."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer
from rich.progress import track
from rich.table import Column

from pyps.cli.options import with_options
from pyps.cli.outputs import PICTURES, check_outputs, inputs_of
from pyps.cli.plan_mode import names_file
from pyps.cli.terminal import figures, plain_table, say, terminal
from pyps.errors import InputError
from pyps.formats import options, read_cluster
from pyps.formats.files import write_bytes
from pyps.formats.mode import FROM_PLAN
from pyps.formats.options import check_limits
from pyps.native.decisions import TIMES_ALONE, unmet
from pyps.native.values import OUTER, Hyper
from pyps.simulate import (
    LocalOptimizer,
    Logistic,
    Objective,
    Result,
    Scenario,
    TorchObjective,
    scenario_of,
    simulate,
)
from pyps.simulate.plot import draw, gantt, histogram, trace
from pyps.simulate.problem import NAME as QUADRATIC
from pyps.simulate.problem import quadratic_of
from pyps.solver.report.warnings import few_of
from pyps.store.policies import DEFAULT_POLICY, Policy, policy_named

LOGISTIC = "logistic"
LR = 0.1
LEARN_HELP = (
    "Compute real gradients; logistic or quadratic:d=100,noise=0.01 (NumPy), or a task as in `pyps profile`."
)
TASK_SAMPLES = 2048  # made by a torch task
ITERATIONS, UNLIMITED = 100, 1_000_000_000
GANTT_ITERATIONS = 3
STATED = "Default: what the plan or the file says, if anything."

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """The options of a run that a simulation takes. codec: "plan" alone; others stand in the plan. rebalance:
    each policy is simulated with and without.
    """

    even: options.EvenOption = False
    codec: options.CodecOption | None = None
    micro_batch: options.MicroBatchOption | None = None
    depth: options.DepthOption | None = None
    seed: options.SeedOption = 0
    round_timeout: options.RoundTimeoutOption | None = None
    rebalance: options.RebalanceOption = False


SimulatedCluster = Annotated[
    Path, typer.Argument(metavar="CLUSTER", show_default=False, help="Cluster file, TOML.")
]
PoliciesText = Annotated[
    str | None, typer.Option(help=f'"all", or policies separated by spaces: "bsp ssp:bound=4". {STATED}')
]
Iterations = Annotated[
    int | None,
    typer.Option(
        min=1,
        help=f"Global batches to train. Default: {ITERATIONS}; with --seconds, no limit.",
        show_default=False,
    ),
]
VirtualSeconds = Annotated[
    float | None, typer.Option(min=0.001, help="Stop after so much virtual time.", show_default=False)
]
PlanFile = Annotated[
    Path | None,
    typer.Option(
        help="The cluster's plan.json: its batches, bits, depths and turns, not those of a new plan.",
        show_default=False,
    ),
]
Learning = Annotated[str, typer.Option(help=LEARN_HELP)]
LearningRate = Annotated[
    float | None,
    typer.Option(help=f"Learning rate for one global batch. Default: {LR}; with local steps, {OUTER.lr}."),
]
InnerRate = Annotated[
    float | None, typer.Option(help="Learning rate of a local step, by plain SGD.", show_default=False)
]
TargetLoss = Annotated[float | None, typer.Option(help="Stop at this loss, and print the time it took.")]
MeasureEvery = Annotated[
    int | None,
    typer.Option(min=1, help="Samples between two measurements of the loss.", show_default=False),
]
Charts = Annotated[bool, typer.Option("--show", help="Print staleness and a Gantt chart of each policy.")]
TraceFile = Annotated[
    Path | None,
    typer.Option("--trace", help="Write a JSON trace for ui.perfetto.dev.", show_default=False),
]
PlotFile = Annotated[
    Path | None,
    typer.Option(help="Draw curves, staleness, idle shares and Gantt charts as PNG.", show_default=False),
]
ResultsAsJson = Annotated[bool, typer.Option("--json", help="Print only the results, as JSON.")]


@app.command("simulate")
@with_options(SimulateOptions)
def simulate_command(
    cluster: SimulatedCluster,
    policies: PoliciesText = None,
    iterations: Iterations = None,
    seconds: VirtualSeconds = None,
    plan: PlanFile = None,
    learn: Learning = "",
    lr: LearningRate = None,
    inner_lr: InnerRate = None,
    target_loss: TargetLoss = None,
    measure_every: MeasureEvery = None,
    show: Charts = False,
    trace_to: TraceFile = None,
    plot: PlotFile = None,
    as_json: ResultsAsJson = False,
    **given: Any,
) -> None:
    """Train in virtual time under each policy; the C core takes the decisions, as in a real run."""
    check_limits(SimulateOptions, given, "--")
    wanted = SimulateOptions(**given)
    read = [*inputs_of(cluster, read_cluster(cluster)), plan]
    check_outputs({"--trace": [trace_to], "--plot": [plot]}, read, {"--plot": PICTURES})
    scenario = _scenario(cluster, wanted, plan)
    depth = options.as_depth(wanted.depth, "--depth") or (options.AUTO if scenario.pipelined else 1)
    timeout = wanted.round_timeout or scenario.round_timeout
    chosen = _policies(policies or scenario.policy or "all", timeout, depth != 1, bool(learn))
    others = {"--lr": lr, "--target-loss": target_loss, "--measure-every": measure_every}
    _check_learning(learn, scenario, inner_lr, others)
    results = [
        simulate(
            scenario,
            policy,
            iterations=iterations or (ITERATIONS if seconds is None else UNLIMITED),
            seconds=seconds or math.inf,
            seed=wanted.seed,
            objective=_objective(learn, wanted.seed),
            lr=_constants(lr, local=scenario.local),
            optimizer="momentum" if scenario.local else "sgd",
            local=LocalOptimizer(lr=inner_lr) if inner_lr is not None else None,
            target_loss=target_loss,
            measure_every=measure_every or (0 if iterations or seconds is None else scenario.global_batch),
            timeline=show or plot is not None or trace_to is not None,
            depth=depth,
            rebalance=moves,
            codec=_codec(wanted),
        )
        for policy in _progress(chosen)
        for moves in (False, True)[: 1 + wanted.rebalance]
    ]
    if trace_to is not None:
        write_bytes(trace_to, msgspec.json.encode(trace(results)))
    if plot is not None:
        draw(results, plot, GANTT_ITERATIONS * max(r.iteration_seconds for r in results))
    if as_json:
        sys.stdout.write(msgspec.json.encode([_plain(r, target_loss) for r in results]).decode() + "\n")
    else:
        _print(scenario, results, target_loss, show)


def _scenario(cluster: Path, wanted: SimulateOptions, plan: Path | None) -> Scenario:
    """Return the scenario of the cluster file, or of its plan; warnings say where they differ, and what
    does not fit.
    """
    with names_file(cluster):
        scenario = scenario_of(cluster, even=wanted.even, plan_path=plan)
    if scenario.differences:
        say(f"warning: {plan} is not the plan of {cluster}: {'; '.join(scenario.differences)}", stderr=True)
    if scenario.too_large:
        say(f"warning: --even: more samples than fit: {few_of(scenario.too_large)}", stderr=True)
    if wanted.micro_batch is None:
        return scenario
    workers = tuple(replace(worker, micro_batch=wanted.micro_batch) for worker in scenario.workers)
    return replace(scenario, workers=workers)


def _check_learning(
    learn: str, scenario: Scenario, inner_lr: float | None, others: Mapping[str, float | None]
) -> None:
    """Raises InputError for an option that changes nothing without real gradients, or that these lack."""
    for option, value in {**others, "--inner-lr": inner_lr}.items():
        if value is not None and not learn:
            raise InputError(option, "", f"{value:g}", "--learn, too: without it there are only times")
    if learn and scenario.local != (inner_lr is not None):
        expected = "a learning rate of local steps" if scenario.local else "none: the plan has no local steps"
        raise InputError("--inner-lr", "", str(inner_lr), expected)


def _codec(wanted: SimulateOptions) -> Literal["plan"] | None:
    """Raises InputError for one that the plan does not name."""
    if wanted.codec not in (None, FROM_PLAN):
        raise InputError("--codec", "", repr(wanted.codec), "plan: codecs are the plan's, from [run]")
    return FROM_PLAN if wanted.codec is not None else None


def _progress(policies: Sequence[Policy]) -> Iterable[Policy]:
    """The policies, with a progress bar if stderr is a terminal."""
    console = terminal(stderr=True)
    return track(policies, "policies", console=console, transient=True, disable=not sys.stderr.isatty())


def _policies(text: str, round_timeout: float | None, overlaps: bool, learns: bool) -> list[Policy]:
    seconds = round_timeout or DEFAULT_POLICY.round_timeout_seconds
    needs = {name: kind().needs for name, kind in Policy.known.items()}
    able = [name for name, need in needs.items() if need.allows_pipeline or not overlaps]
    able = [name for name in able if learns or not unmet(needs[name], TIMES_ALONE)]
    names = able if text.strip() == "all" else text.split()
    if not names:
        raise InputError("--policies", "", repr(text), f'"all", or some of {", ".join(Policy.known)}')
    return [policy_named(name, seconds, "--policies") for name in names]


def _constants(lr: float | None, *, local: bool) -> Hyper:
    """The store's: of the outer step of local steps, or of SGD."""
    if local:
        return OUTER if lr is None else replace(OUTER, lr=lr)
    return Hyper(LR if lr is None else lr)


def _objective(name: str, seed: int) -> Objective | None:
    """A new one for each policy: a torch model keeps the parameters that were last loaded into it."""
    if not name:
        return None
    if name == LOGISTIC:
        return Logistic(seed=seed)
    if name.partition(":")[0] == QUADRATIC:
        return quadratic_of(name, seed)
    from pyps.tasks import load_task

    task = load_task(name)
    inputs, targets = task.make_batch(TASK_SAMPLES)
    return TorchObjective(task, inputs, targets, seed)


def _plain(result: Result, target: float | None) -> dict[str, Any]:
    plain = asdict(result)
    del plain["timeline"], plain["pushed_at"]
    plain["staleness"] = {str(k): v for k, v in result.staleness.items()}
    more = {"idle_share": result.idle_share, "staleness_mean": result.staleness_mean}
    more["useful_share"] = result.useful_share
    if target is not None:
        more |= {"seconds_to_target": result.seconds_to(target)}  # type: ignore[dict-item]
    return plain | more


def _print(scenario: Scenario, results: Sequence[Result], target: float | None, show: bool) -> None:
    console = terminal()
    learned = bool(results[0].curve)
    faulty = bool(scenario.faults)
    columns = ["ms", "gain", "idle", *["useful"] * faulty, "stale", "95%", "max", "dropped", "MB"]
    columns += ["loss"] * learned + ["to target"] * (target is not None)
    table = plain_table(Column("policy", overflow="fold"), *figures(*columns))
    table.title = f"{len(scenario.workers)} workers, global batch {scenario.global_batch}"
    for result in results:
        name = result.policy if result.replans is None else f"{result.policy}, rebalanced"
        cells = _cells(result, results[0], learned, target, scenario.global_batch)
        table.add_row(name, *cells[:3], *[f"{result.useful_share:.1%}"] * faulty, *cells[3:])
    console.print(table)
    console.print(
        "ms, MB: per global batch; gain: over the first; stale, 95%, max: versions, mean, quantile, maximum"
    )
    if faulty:
        console.print(
            "useful: of the time of the workers that were there, what they computed and was not lost"
        )
    for result in results:
        for line in _replans(result):
            console.print(line, soft_wrap=True)
    for result in results if show else ():
        console.print(f"\n{result.policy}")
        for line in histogram(result) + gantt(result, 0.0, GANTT_ITERATIONS * result.iteration_seconds):
            console.print(line, soft_wrap=True)


def _replans(result: Result) -> Iterable[str]:
    """A line for each change of the split, or of a worker's mode: when, what, why, and what it gained."""
    if result.replans is None:
        return
    noun = "change" if len(result.replans) == 1 else "changes"
    yield f"\n{result.policy}, rebalanced: {len(result.replans)} {noun} of the split"
    for one in result.replans:
        (was, will), (before, after) = one.expected_seconds, one.iteration_seconds
        expected, found = (
            f"{was * 1e3:.1f} -> {will * 1e3:.1f} ms",
            f"{before * 1e3:.1f} -> {after * 1e3:.1f} ms",
        )
        yield f"{one.at:8.2f} s  {'; '.join(one.reasons)} (a round: expected {expected}, found {found})"
    yield from (f"{one.at:8.2f} s  {one}" for one in result.mode_changes)


def _cells(r: Result, first: Result, learned: bool, target: float | None, batch: int) -> list[str]:
    iterations = r.samples / batch
    cells = [
        f"{1000 * r.iteration_seconds:.1f}",
        f"{first.iteration_seconds / r.iteration_seconds:.2f}x",
        f"{r.idle_share:.1%}",
        f"{r.staleness_mean:.2f}",
        str(r.staleness_quantile(0.95)),
        str(max(r.staleness, default=0)),
        str(r.rejected + r.aborted),
        f"{r.moved_bytes / 1e6 / iterations:.1f}" if iterations else "-",
    ]
    if learned:
        cells.append(f"{r.loss:.4f}")
    if target is not None:
        reached = r.seconds_to(target)
        cells.append(f"{reached:.2f} s" if reached is not None else "never")
    return cells
