"""pyps.checkpoint/1: checkpoint.json, which says what a checkpoint's folder holds.

The folder's other files are tensors (safetensors). checkpoint.json has the size and SHA-256 of each of them,
and a digest of itself.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from pyps.errors import InputError
from pyps.formats.kinds import Bytes, Name
from pyps.formats.plan import Plan

CHECKPOINT_SCHEMA = "pyps.checkpoint/1"
Counter = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class TensorFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Size and digest of one of the folder's files."""

    bytes: Bytes
    sha256: Sha256


class Checkpoint(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run's state at one version, without its tensors.

    made_with: the version of pyps. unix_seconds: when. version: the store's; for DDP its step. policy, seed,
    plan: of the run; null where unknown. state: the rest of the state, as pyps.checkpoint.state or pyps.torch
    reads it. files: by name. sha256: of the file's other values.
    """

    schema: Literal["pyps.checkpoint/1"] = "pyps.checkpoint/1"
    made_with: str
    unix_seconds: Annotated[float, Meta(ge=0)]
    version: Counter
    policy: str | None = None
    seed: Counter | None = None
    plan: Plan | None = None
    state: dict[str, Any]
    files: dict[Name, TensorFile]
    sha256: Sha256 | Literal[""] = ""


def signed(checkpoint: Checkpoint) -> dict[str, Any]:
    """The checkpoint as plain data, with the digest of its values."""
    raw: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(checkpoint))
    return {**raw, "sha256": _digest(raw)}


def check_signature(where: str, raw: dict[str, Any]) -> None:
    """Raises InputError, naming the file `where`, if the values are not those that were written."""
    found, expected = raw.get("sha256"), _digest(raw)
    if found != expected:
        wanted = f"{expected[:12]}... of its other values: the file is damaged"
        raise InputError(where, "sha256", repr(found)[:16], wanted)


def _digest(raw: dict[str, Any]) -> str:
    values = {key: value for key, value in raw.items() if key != "sha256"}
    return hashlib.sha256(msgspec.json.encode(values, order="sorted")).hexdigest()
