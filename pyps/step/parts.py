"""How a claim's samples are divided: micro-batches, local steps, and the merges between these."""

from __future__ import annotations


def even_steps(samples: int, most: int) -> int:
    """The samples of the next local step if `samples` are left, at most `most` in one: all are alike."""
    return -(-samples // -(-samples // most))


def next_part(samples: int, most: int) -> int:
    """The samples of the next micro-batch if `samples` are left: what `most` allows, but one less where a
    single one would be left over, which batch normalization cannot train on.
    """
    return min(samples, most - (samples - most == 1 and most > 2))


def merges_after(before: int, done: int, count: int, merges: int) -> bool:
    """Whether a worker merges when `done` samples of a claim of `count` have had their local steps.

    before: samples at the last step. merges: in all, evenly spaced; never after the last step.
    """
    return done < count and done * (merges + 1) // count > before * (merges + 1) // count
