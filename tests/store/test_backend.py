"""Each kind of store has every verb of pyps.store.backend, with its arguments and types."""

from __future__ import annotations

import inspect
from typing import get_type_hints

import pytest

from pyps.native.local import LocalBackend
from pyps.remote.link import LinkBackend
from pyps.shards.sharded import ShardedBackend
from pyps.store.backend import Backend

VERBS = [name for name, value in vars(Backend).items() if not name.startswith("_") and callable(value)]


@pytest.mark.parametrize("kind", [LocalBackend, LinkBackend, ShardedBackend])
@pytest.mark.parametrize("verb", VERBS)
def test_a_backend_has_the_verb_as_the_list_says(kind: type, verb: str) -> None:
    wanted, found = getattr(Backend, verb), getattr(kind, verb)
    assert len(inspect.signature(found).parameters) == len(inspect.signature(wanted).parameters)
    assert get_type_hints(found)["return"] == get_type_hints(wanted)["return"]
