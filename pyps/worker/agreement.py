"""Say what all workers of a run have alike, wherever they start: the plan, the seed, the policy, the samples.

The worker that creates the store brings them, and every other one is compared with the store. A plan is known
by the batches of its ranks: what it predicts may differ between hosts.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields

from pyps.errors import InputError
from pyps.native.decisions import PolicyParams
from pyps.native.values import Agreement
from pyps.store.policies import Policy
from pyps.store.store import Store
from pyps.worker.settings import Settings


def agreement_of(settings: Settings) -> Agreement:
    """Return what a store is created with."""
    if not settings.batches:
        return Agreement()
    text = ",".join(map(str, settings.batches)).encode()
    return Agreement(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()), settings.seed)


def check_agreed(store: Store, settings: Settings) -> None:
    """Raise InputError, naming what differs, if the store belongs to a run with other settings than these."""
    layout, mine = store.layout, agreement_of(settings)
    if layout.plan and mine.plan and layout.plan != mine.plan:
        found = f"batches {', '.join(map(str, settings.batches))}"
        _refuse(store, "plan", found, "the plan of the host that created it")
    if layout.plan and layout.seed != settings.seed:
        _refuse(store, "seed", str(settings.seed), f"{layout.seed}, as in the store")
    if (settings.launched or settings.samples) and layout.samples != settings.samples:
        _refuse(store, "samples", str(settings.samples), f"{layout.samples}, as in the store")
    if settings.launched and (expected := _other_policy(store, settings.policy)):
        _refuse(store, "policy", str(settings.policy), f"{expected}, as in the store")


def _other_policy(store: Store, mine: Policy) -> str:
    """Return what the store's policy has where `mine` has something else; empty: they are the same."""
    number = store.layout.policy
    if mine.number != number:
        names = [name for name, kind in Policy.known.items() if kind.number == number]
        return names[0] if names else "the policy that its creator wrote"
    params = store.policy_params()
    for field in fields(PolicyParams):
        theirs = getattr(params, field.name)
        if theirs != getattr(mine.params(), field.name):
            return f"{mine.name} with {field.name.rstrip('_')} {theirs}"
    return ""


def _refuse(store: Store, field: str, found: str, expected: str) -> None:
    give = "give all hosts and workers of a run the same plan, seed, policy and samples"
    raise InputError(f"store {store.name!r}", field, found, f"{expected}; {give}")
