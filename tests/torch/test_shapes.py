"""Fingerprints of passes: alike on ranks whose passes differ in samples alone."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

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
    shapes = Shapes([torch.zeros(2, 3)], [], torch.tensor([1, -100]))
    assert shapes.fingerprint(True, set()) == shapes.fingerprint(True, set()), "it keeps no labels"


def test_a_cross_entropy_counts_by_what_it_is_divided_by() -> None:
    def of(labels: list[int], divisor: int | None = None, **options: Any) -> int | None:
        x = torch.zeros(len(labels), 4, requires_grad=True)
        loss = cross_entropy(x, torch.tensor(labels), **options)
        loss = 2 * loss if divisor is None else loss / divisor
        shapes = Shapes([x], [loss], None)
        loss.backward()
        return shapes.fingerprint(True, set())

    whole, half = of([1, 2, 3, 1]), of([1, 2, 0, 0], ignore_index=0)
    assert whole == of([1, 2]) == of([1, 2], ignore_index=-1, label_smoothing=0.1)
    assert half == of([1, -1], ignore_index=-1) == of([-100, 3], label_smoothing=0.1) != whole
    weights = torch.tensor([1.0, 1.0, 0.5, 0.5])
    assert of([0, 1], weight=weights) == whole != of([2, 3], weight=weights) == half
    assert of([1, 2, 3], 3, reduction="sum") == whole != of([1, 2, 3, 0], 2, reduction="sum") == half


def test_a_masked_mean_counts_by_its_mask() -> None:
    def of(mask: Any, form: Any) -> int | None:
        kept = torch.as_tensor(mask)
        x = torch.ones(len(kept), requires_grad=True)
        loss, metric = form(x, kept), x.sum() / kept.exp().sum()
        shapes = Shapes([x], [loss, metric], None)
        loss.backward()
        return shapes.fingerprint(True, set())

    third = [1.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0]
    for form in (
        lambda x, kept: 2 * (x * kept).sum() / kept.sum(),
        lambda x, kept: (x * kept).sum() / kept.bool().sum().clamp(min=1) + x.mean(),
        lambda x, kept: (x * kept).mean() / kept.mean(),
        lambda x, kept: torch.stack([x.mean(), (x * kept).sum() / kept.sum()]).sum() / torch.tensor(2.0),
    ):
        assert of(third[0], form) == of(third[1], form) != of(third[2], form)
    scale = torch.tensor(2.0, requires_grad=True)
    for form in (
        lambda x, kept: x.mean() / torch.tensor(0.1) + scale.square().sum() / 2 + scale.sum() / 2.5,
        lambda x, kept: torch.stack([x.mean(), scale.square()]).mean() / torch.tensor(2),
        lambda x, kept: scale.sum() / scale,
    ):
        assert len({of([1.0] * rows, form) for rows in range(3, 12)}) == 1, "no divisor here is a mask's"


def test_what_a_checkpoint_would_compute_again_is_left_alone() -> None:
    x, calls = torch.zeros(2, 4, requires_grad=True), []

    def loss(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return cross_entropy(x, torch.tensor([1, -100]))

    found = checkpoint(loss, x, use_reentrant=False)
    assert Shapes([x], [found], None).fingerprint(True, set()) == 0
    assert len(calls) == 1
