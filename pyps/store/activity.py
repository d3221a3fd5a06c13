"""Define what each rank of a store does now, and which ranks the others wait for, in words.

All of it is read from the store's view (a StoreActivity); nothing joins the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pyps.native.status import Member, MemberState, PushCounts, Status, WaitKind
from pyps.native.values import Role
from pyps.store.store import Store

Doing = Literal[
    "computing", "waiting", "resting", "between steps", "stopped", "dead", "fenced", "left", "absent"
]
HOLDS_UP: tuple[Doing, ...] = ("computing", "between steps", "stopped", "dead", "fenced", "absent")
LATE_STEPS = 2.0  # of its own usual step time: then a rank that others wait for is a straggler
LATE_SECONDS = 0.5  # and no sooner
WAITS = {
    WaitKind.START: "waits to start",
    WaitKind.STAGING: "waits for a staging buffer",
    WaitKind.TURN: "waits for its turn",
    WaitKind.ROUND: "waits for the round",
}


@dataclass(frozen=True, slots=True)
class StoreActivity:
    """One look at a store: its counters, its participants, and its ranks' counters."""

    status: Status
    members: tuple[Member, ...]
    ranks: tuple[PushCounts, ...]


def look(store: Store) -> StoreActivity:
    """The present state of an open store. Raises StoreError."""
    return StoreActivity(store.status(), tuple(store.members()), tuple(store.ranks()))


@dataclass(frozen=True, slots=True)
class Activity:
    """Hold what a rank does: since `seconds` ago, said by `text`. `straggler`: others wait for it."""

    rank: int
    doing: Doing
    seconds: float
    text: str
    member: Member | None
    straggler: bool = False


def activities(state: StoreActivity, *, local: bool = False) -> list[Activity]:
    """One for each rank, in order. local: the members' processes are on this machine."""
    newest: dict[int, Member] = {}
    for member in state.members:
        if member.role is Role.WORKER and member.rank is not None:
            before = newest.get(member.rank)
            if before is None or member.id > before.id:
                newest[member.rank] = member
    found = [_activity(rank, newest.get(rank), state, local) for rank in range(len(state.ranks))]
    waited_for = any(a.doing == "waiting" for a in found)
    return [_marked(activity, waited_for) for activity in found]


def explain(found: Sequence[Activity], names: Mapping[int, str]) -> str:
    """One sentence on what holds a run up; names: of the ranks."""
    waiting = {a.text for a in found if a.doing == "waiting"}
    blocking = [a for a in found if a.doing in HOLDS_UP]
    parts = [f"rank {a.rank}{_name(names, a.rank)} {a.text}" for a in blocking]
    for text in sorted(waiting):
        ranks = [a.rank for a in found if a.doing == "waiting" and a.text == text]
        noun, verb = ("rank", text) if len(ranks) == 1 else ("ranks", text.replace("waits", "wait", 1))
        parts.append(f"{noun} {_listed(ranks)} {verb}")
    return "; ".join(parts)


def _activity(rank: int, member: Member | None, state: StoreActivity, local: bool) -> Activity:
    if member is None:
        text = "is away: it has left or died" if state.ranks[rank].pushes else "has not joined"
        return Activity(rank, "absent", 0.0, text, None)
    if member.state is MemberState.LEFT:
        return Activity(rank, "left", 0.0, "has left", member)
    if member.state is MemberState.DEAD:
        return Activity(rank, "dead", 0.0, "is dead", member)
    if member.state is MemberState.FENCED:
        return Activity(rank, "fenced", member.claim_seconds, "is fenced", member)
    if local and (condition := _condition(member.pid)) is not None:
        return Activity(rank, condition, member.claim_seconds, f"is {condition}", member)
    if not state.ranks[rank].batch and not member.claim_count:
        return Activity(rank, "resting", member.wait_seconds, "rests: it would hold the others up", member)
    if member.waits_for is not WaitKind.NOT:
        text = WAITS[member.waits_for]
        if member.waits_for is WaitKind.START and not state.status.all_joined:
            text = "waits for all ranks to join"
        return Activity(rank, "waiting", member.wait_seconds, text, member)
    if member.claim_count and not member.staged:
        text = f"has been computing for {member.claim_seconds:.1f} s"
        return Activity(rank, "computing", member.claim_seconds, text, member)
    return Activity(rank, "between steps", 0.0, "is between two steps", member)


def _marked(activity: Activity, waited_for: bool) -> Activity:
    """The activity as a straggler's, if the rank holds others up."""
    if activity.doing in ("dead", "fenced", "stopped"):
        late = True
    elif activity.doing == "computing" and activity.member is not None:
        usual = activity.member.step_seconds
        late = waited_for and usual > 0.0 and activity.seconds > max(LATE_STEPS * usual, LATE_SECONDS)
    else:
        late = False
    if not late:
        return activity
    return Activity(
        activity.rank, activity.doing, activity.seconds, activity.text, activity.member, straggler=True
    )


def _condition(pid: int) -> Literal["stopped", "dead"] | None:
    """Tell whether a process of this machine cannot go on; None if it can, or is of another PID namespace."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state = text[text.rindex(")") + 2 :][:1]
    if state in ("T", "t"):
        return "stopped"
    return "dead" if state in ("Z", "X") else None


def _name(names: Mapping[int, str], rank: int) -> str:
    return f" ({names[rank]})" if rank in names else ""


def _listed(ranks: Iterable[int]) -> str:
    texts = [str(rank) for rank in ranks]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
