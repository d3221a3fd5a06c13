"""The mode that `pyps-plan` plans for: a cluster file's [run], and the options that override it.

The policies are imported only where a mode needs them: planning as such works without the store.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pyps.errors import Infeasible, InputError, one_of
from pyps.formats import Cluster, Pace
from pyps.formats.cluster import CLUSTER_FILE
from pyps.formats.mode import CODEC_BITS, FROM_PLAN, ROUND, RunTable, check_run_table
from pyps.formats.options import AUTO, as_depth, check_limits
from pyps.solver.mode import stated_policy

if TYPE_CHECKING:
    from pyps.store.policies import Policy


def with_mode(path: Path, read: Cluster, options: Mapping[str, Any]) -> Cluster:
    """The cluster with the given options instead of those of its [run].

    path: its file. read: the cluster. options: keys of [run]; None: not given.

    Raises InputError if one is out of range, or the policy allows no pipeline.
    """
    for key in ("codec", "pull_codec"):
        name = options[key]
        if name is not None and name != FROM_PLAN and name not in CODEC_BITS:
            flag = f"--{key.replace('_', '-')}"
            raise InputError(flag, "", repr(name), one_of(name, (*CODEC_BITS, FROM_PLAN)))
    check_limits(RunTable, options, "--")
    given = {key: value for key, value in options.items() if value is not None}
    if (local := given.get("local_batch")) is not None and local != AUTO:
        if not re.fullmatch(r"[1-9]\d{0,8}", local):
            raise InputError("--local-batch", "", repr(local), "a number of samples, or auto")
        given["local_batch"] = int(local)
    policy, depth = options["policy"], as_depth(options["depth"], "--depth")
    run: RunTable = msgspec.structs.replace(read.run, **given | ({} if depth is None else {"depth": depth}))
    check_run_table("pyps-plan", run)
    if run.policy is not None or run.depths[1] > 1:
        source = f"{path}: run.policy" if policy is None else "--policy"
        pipelined = f"{path}: run.depth" if depth is None else "--depth"
        run = msgspec.structs.replace(run, policy=str(_checked_policy(run, source, pipelined)))
    return msgspec.structs.replace(read, run=run)


@contextmanager
def names_file(path: Path) -> Iterator[None]:
    """Errors of the solver about the cluster file, and Infeasible, name it."""
    try:
        yield
    except InputError as error:
        if error.where != CLUSTER_FILE:
            raise
        raise InputError(str(path), error.field, error.found, error.expected) from None
    except Infeasible as error:
        if error.reason.startswith(f"{path}: "):  # within another of these
            raise
        raise Infeasible(f"{path}: {error.reason}", error.nearest) from None


def _checked_policy(run: RunTable, source: str, pipelined: str) -> Policy:
    """The policy. Raises InputError if there is none, or it allows no pipeline.

    source: where the policy stands. pipelined: what asks for a pipeline.
    """
    from pyps.store.policies import check_pipeline, policy_named

    policy = policy_named(stated_policy(run), source=source)
    if run.depths[1] > 1:
        check_pipeline(policy, pipelined)
    return policy


def pace_of(path: Path, cluster: Cluster) -> Pace:
    """The pace of the policy to plan for. Raises InputError if there is none of that name, or it allows no
    pipeline.

    path: the cluster's file.
    """
    run = cluster.run
    if run.policy is None and run.depths[1] == 1:
        return ROUND
    return _checked_policy(run, f"{path}: run.policy", f"{path}: run.depth").pace
