"""The mode that a run is launched in: as its plan says, apart from what an option or argument says instead.

The plan's prediction holds in the mode that the plan was made for. A plan that names none was made for serial
steps at 32 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyps.errors import InputError
from pyps.formats import Plan, PlanWorker, options
from pyps.formats.mode import FROM_PLAN, Mode
from pyps.formats.options import AUTO, MAX_DEPTH, CodecName, as_depth
from pyps.native.values import Codec
from pyps.solver.constrained import paced_seconds
from pyps.solver.mode import ModeChoices, choices_while_running
from pyps.solver.online.mode import may_change
from pyps.store.codec import as_codec, name_of
from pyps.store.policies import DEFAULT_POLICY, Policy, check_pipeline, policy_named


@dataclass(frozen=True, kw_only=True)
class ModeOptions:
    """The options of a run that its plan answers where they are None.

    codec: of pushes alone, or "plan". depth: "auto": as planned, or 2. round_timeout: for a policy given
    as text.
    """

    policy: Policy | options.PolicyOption | None = None
    codec: Codec | str | options.CodecOption | None = None
    depth: options.DepthOption | None = None
    round_timeout: options.RoundTimeoutOption | None = None


def launched_policy(wanted: ModeOptions, plan: Plan | None, where: str = "plan") -> Policy:
    """The policy of a run; where: the plan's file. Raises InputError for a text that names none."""
    if isinstance(wanted.policy, Policy):
        return wanted.policy
    run = plan.run if plan is not None else None
    text = wanted.policy or (run.policy if run else DEFAULT_POLICY.name)
    seconds = wanted.round_timeout or (run.round_timeout if run else None)
    source = "policy" if wanted.policy else f"{where}: run.policy"
    return policy_named(text, seconds or DEFAULT_POLICY.round_timeout_seconds, source)


def launched_mode(
    wanted: ModeOptions, policy: Policy, plan: Plan | None, worker: PlanWorker | None, where: str = "plan"
) -> Mode:
    """Return the mode of one rank.

    wanted: what was asked for. policy: of the run. plan, worker: what was planned, and for which worker;
    None: nothing. where: the plan's file, for errors.

    Raises InputError if the plan has no bits and is asked for them, or the policy allows no pipeline.
    """
    planned = Mode() if plan is None or worker is None else plan.mode_of(worker)
    push, pull, depth = planned.push, planned.pull, planned.depth
    if wanted.codec == FROM_PLAN:
        push, pull = _planned_codecs(plan, worker, where)
    elif wanted.codec is not None and (asked_codec := name_of(as_codec(wanted.codec))) != push:
        push, pull = asked_codec, "f32"
    asked = as_depth(wanted.depth)
    if asked == AUTO:
        depth = depth if depth > 1 else _useful_depth(worker)
    elif asked is not None:
        depth = asked
    if depth > 1:
        check_pipeline(policy)
    return Mode(push=push, pull=pull, depth=depth)


def choices_of(plan: Plan, policy: Policy) -> ModeChoices:
    """The codecs and depths that the workers of a pipelined run may change to."""
    modes = [plan.mode_of(worker) for worker in plan.workers if worker.batch > 0]
    return choices_while_running(modes, policy.pace)


def adapts(wanted: ModeOptions, policy: Policy, mode: Mode, plan: Plan) -> bool:
    """Return whether a rank's codecs and depth follow its link, in a run that is rebalanced."""
    local = plan.run is not None and bool(plan.run.local_steps)
    return wanted.codec == FROM_PLAN and mode.depth > 1 and may_change(policy.pace, local=local)


def _useful_depth(worker: PlanWorker | None) -> int:
    """The depth of a pipeline that the plan, made for none, gives a worker; 2 where it gives none."""
    planned = worker.mode if worker is not None else None
    return 2 if planned is None else max(2, min(planned.depth, MAX_DEPTH))


def _planned_codecs(plan: Plan | None, worker: PlanWorker | None, where: str) -> tuple[CodecName, CodecName]:
    """A worker's codecs for pushes and for pulls. Raises InputError where the plan has none."""
    if plan is None or worker is None:
        raise InputError("join", "codec", "'plan' without a plan", "a codec's name, or a run by a plan")
    if worker.mode is None:
        expected = "codecs: plan again with --codec plan and bandwidths"
        raise InputError(where, f"workers[{worker.rank}].mode", "nothing", expected)
    return worker.mode.push, worker.mode.pull


def departures(plan: Plan, policy: Policy, modes: dict[int, Mode]) -> list[str]:
    """In what the launched mode is not the plan's, if that changes how long an iteration takes.

    plan: with the mode that it was made for. policy: of the run. modes: of each of the plan's workers in use,
    by rank.
    """
    if plan.run is None:
        counted = any(worker.link_seconds for worker in plan.workers)
        serial = all(mode == Mode() for mode in modes.values())
        found = ["codec or depth: the plan names none"] if counted and not serial else []
        if paced_seconds(plan, policy.pace) is None:
            found.append(f"policy: {policy}, and the plan is of {DEFAULT_POLICY}")
        return found
    found = []
    if str(policy) != plan.run.policy:
        found.append(f"policy: {policy} instead of {plan.run.policy}")
    for key in ("push", "pull", "depth"):
        pairs = [(getattr(plan.mode_of(plan.workers[k]), key), getattr(m, key)) for k, m in modes.items()]
        changed = sorted({(str(was), str(now)) for was, now in pairs if was != now})
        found += [f"{key}: {now} instead of {was}" for was, now in changed]
    return found
