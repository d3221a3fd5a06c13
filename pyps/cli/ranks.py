"""Ranks in the text of an option."""

from __future__ import annotations

from pyps.errors import InputError


def rank_list(text: str) -> list[int]:
    """The ranks of "0,2". Raises InputError."""
    if not all(part.isascii() and part.isdigit() for part in text.split(",")):
        raise InputError("--ranks", "", repr(text), "ranks separated by commas, such as 0,2")
    return [int(part) for part in text.split(",")]
