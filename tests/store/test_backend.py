"""Each kind of store has every verb of pyps.store.backend, and each verb of the link a server's answer."""

from __future__ import annotations

import inspect
from typing import get_type_hints

import pytest

import pyps.remote.verbs
import pyps.shards.verbs
from pyps.errors import InvalidArgument
from pyps.native.local import LocalBackend
from pyps.remote.handlers import HANDLERS
from pyps.remote.link import LinkBackend
from pyps.remote.verbs import Caller, Handlers, LinkVerb
from pyps.shards.sharded import ShardedBackend
from pyps.shards.wing import WING
from pyps.store.backend import Backend

VERBS = [name for name, value in vars(Backend).items() if not name.startswith("_") and callable(value)]
FACTS = [name for name, value in vars(Backend).items() if isinstance(value, property)]
HERE = {"close", "stage", "unstage", "staging", "keep_residual", "journal"}  # the client does them itself
SENT = {"begin_transfer": "transfer", "pull_encoded": "pull"}  # by these calls
TABLE = {**pyps.remote.verbs.VERBS, **pyps.shards.verbs.VERBS}


def signature_of(function: object) -> list[tuple[str, object]]:
    """The arguments by name, each with its type, and the result's."""
    assert callable(function)
    hints = get_type_hints(function)
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    return [(name, hints[name]) for name in names] + [("return", hints["return"])]


@pytest.mark.parametrize("kind", [LocalBackend, LinkBackend, ShardedBackend])
@pytest.mark.parametrize("verb", VERBS)
def test_a_backend_has_the_verb_as_the_list_says(kind: type, verb: str) -> None:
    assert verb in {name for base in kind.__mro__ for name in vars(base)}, f"{kind.__name__} has no {verb}"
    assert signature_of(getattr(kind, verb)) == signature_of(getattr(Backend, verb))


def test_the_list_is_short_enough_to_be_read() -> None:
    assert len(VERBS) <= 31
    assert FACTS == ["layout", "tensors", "policy_params", "policy_needs", "servers", "undone", "traffic"]


def test_every_verb_goes_over_the_link() -> None:
    sent = set(pyps.remote.verbs.VERBS)
    assert {SENT.get(verb, verb) for verb in VERBS} - sent == HERE
    assert sent - {SENT.get(verb, verb) for verb in VERBS} == {"hello", "create"}


@pytest.mark.parametrize(
    ("verbs", "signatures", "handlers"),
    [
        (pyps.remote.verbs.VERBS, pyps.remote.verbs.Calls, HANDLERS),
        (pyps.shards.verbs.VERBS, pyps.shards.verbs.ShardCalls, WING.handlers),
    ],
    ids=["link", "shards"],
)
def test_a_server_answers_every_verb(
    verbs: dict[str, LinkVerb[..., object]], signatures: type, handlers: Handlers
) -> None:
    assert {name: handler.verb for name, handler in handlers.items()} == verbs
    assert {name for name in vars(signatures) if not name.startswith("_")} <= set(verbs)
    assert not HANDLERS.keys() & WING.handlers.keys()


@pytest.mark.parametrize("verb", TABLE)
@pytest.mark.parametrize("caller", Caller)
def test_a_verb_is_for_the_sessions_that_the_table_names(verb: str, caller: Caller) -> None:
    entry = TABLE[verb]
    assert entry.by, "some session may"
    if caller in entry.by:
        entry.check_caller(caller)
    else:
        with pytest.raises(InvalidArgument, match=f"{verb}: session: found that of a {caller}; expected"):
            entry.check_caller(caller)
