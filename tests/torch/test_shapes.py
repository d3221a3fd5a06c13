"""Fingerprints of passes: alike on ranks whose passes differ in samples alone."""

from __future__ import annotations

import torch

from pyps.torch.shapes import Shape, Shapes


def passed(rows: int, *outputs: tuple[int, ...], tables: set[tuple[int, Shape]] | None = None) -> int | None:
    shapes = Shapes([torch.zeros(rows, 3)], [torch.zeros(one) for one in outputs], None)
    return shapes.fingerprint(False, set() if tables is None else tables)


def test_samples_alone_may_differ() -> None:
    assert passed(16, (16, 10)) == passed(8, (8, 10)) is not None
    assert passed(16, (16, 7, 10)) != passed(8, (8, 9, 10)), "tokens of unlike rows"
    assert passed(0, (0, 10)) is None


def test_a_table_stays_one_where_a_rank_has_as_many_samples_as_it_has_rows() -> None:
    tables: set[tuple[int, Shape]] = set()
    before = passed(8, (8, 10), (16, 64), tables=tables)
    assert passed(16, (16, 10), (16, 64), tables=tables) == before


def test_an_output_by_rows_stays_one() -> None:
    tables: set[tuple[int, Shape]] = set()
    found = [passed(rows, (rows, 10), (rows, 4), tables=tables) for rows in (8, 16, 8)]
    assert len(set(found)) == 1
    assert passed(8, (8, 10), (8, 5), tables=tables) != found[0]


def test_rows_without_a_target_are_seen_where_each_has_one_label() -> None:
    def labelled(*labels: int, means: bool = True) -> int | None:
        x = torch.zeros(len(labels), 3)
        return Shapes([x], [x], torch.tensor(labels)).fingerprint(True, set(), means)

    assert labelled(1, 2, 0, 4) == labelled(1, 2) == 0
    assert labelled(1, 2, -100, 4) != labelled(1, 2)
    assert labelled(1, 2, -100, 4, means=False) == 0, "of a sum they change no weight"
    assert labelled(1, -100, 2, -100) == labelled(-100, 2) != 0, "the same share of the rows on both ranks"
