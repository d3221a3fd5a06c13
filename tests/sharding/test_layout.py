"""PieceLayout: cut by shares to one element, against brute force."""

from __future__ import annotations

import itertools
from fractions import Fraction
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from run_tools import make_plan

from pyps.errors import InputError
from pyps.formats import write_json
from pyps.sharding.flat import Slot
from pyps.sharding.layout import PieceLayout, boxes, cut, read_shares

WEIGHTS = st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any)


def shares_of(weights: list[int]) -> list[float]:
    return [weight / sum(weights) for weight in weights]


@given(st.integers(0, 12), WEIGHTS)
def test_no_other_cut_is_nearer_to_the_shares(count: int, weights: list[int]) -> None:
    shares = shares_of(weights)
    exact = [Fraction(share) * count / sum(map(Fraction, shares)) for share in shares]

    def far(lengths: tuple[int, ...]) -> Fraction:
        return sum((abs(a - b) for a, b in zip(lengths, exact, strict=True)), Fraction())

    every = itertools.product(range(count + 1), repeat=len(shares) - 1)
    cuts = [(*some, count - sum(some)) for some in every if sum(some) <= count]
    found = cut(count, shares)
    assert far(found) == min(map(far, cuts))
    assert all(length == 0 for length, share in zip(found, shares, strict=True) if share == 0)


@given(st.integers(0, 10**12), WEIGHTS)
def test_a_part_is_off_its_share_by_less_than_an_element(count: int, weights: list[int]) -> None:
    shares = shares_of(weights)
    lengths = cut(count, shares)
    assert sum(lengths) == count
    for length, share in zip(lengths, shares, strict=True):
        assert abs(length - Fraction(share) * count / sum(map(Fraction, shares))) < 1


@given(st.lists(st.integers(0, 12), max_size=6), WEIGHTS)
def test_pieces_are_those_of_each_element(sizes: list[int], weights: list[int]) -> None:
    """Against a vector in which each element says its tensor and place."""
    layout = PieceLayout.by_shares(sizes, shares_of(weights))
    vector = [(k, at) for k, size in enumerate(sizes) for at in range(size)]
    owners = [rank for rank, length in enumerate(layout.lengths) for _ in range(length)]
    assert layout.count == len(vector) == len(owners)
    for rank in range(len(weights)):
        mine = [place for place, owner in zip(vector, owners, strict=True) if owner == rank]
        assert vector[layout.part(rank)] == mine
        pieces = layout.pieces(rank)
        assert [(k, at) for k, p in enumerate(pieces) for at in range(p.start, p.stop)] == mine
        assert all(piece == slice(0, 0) for piece in pieces if piece.start == piece.stop)
    places = list(layout.places())
    assert [vector[place] for place in places] == [[(k, a) for a in range(n)] for k, n in enumerate(sizes)]


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_boxes_hold_a_piece_in_its_order(shape: list[int], data: st.DataObject) -> None:
    count = prod(shape)
    start = data.draw(st.integers(0, count))
    piece = slice(start, data.draw(st.integers(start, count)))
    numbers = np.arange(count).reshape(shape)
    found = boxes(shape, piece)
    parts = [
        numbers[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))].reshape(-1)
        for offsets, sizes in found
    ]
    assert [int(x) for part in parts for x in part] == list(range(piece.start, piece.stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ([2, 1], "shares: found a sum of 3; expected a sum of 1, such as [0.666667, 0.333333]"),
        ([1.5, -0.5], "shares[1]: found -0.5; expected a number from 0 to 1"),
        ([0.5, 0.25, 0.25], "shares: found 3 of them; expected 2, one for each rank"),
        ([0, 0], "a sum of 0; expected a sum of 1, such as [1]"),
        ([float("nan"), 1], "shares[0]: found nan"),
        ([True, 0.0], "shares[0]: found True"),
        ([0.5, "0.5"], "shares[1]: found '0.5'"),
        (0.5, "found 0.5; expected a plan, its file, or one number for each rank"),
    ],
)
def test_shares_that_are_refused(shares: object, said: str) -> None:
    with pytest.raises(InputError) as caught:
        read_shares(shares, 2)  # type: ignore[arg-type]
    assert said in str(caught.value)


def test_shares_that_were_rounded() -> None:
    assert read_shares([0.666667, 0.333333], 2) == (0.666667, 0.333333)
    assert read_shares([0, 1], 2) == (0.0, 1.0)


def test_a_plan_without_shares_says_what_to_write(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_json(path, make_plan())
    with pytest.raises(
        InputError, match=r"workers\[0\].share: found none; expected \[sharding\] with"
    ) as caught:
        read_shares(path, 2)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("memory", ["contiguous_format", "channels_last", "gaps"])
def test_a_slot_keeps_the_order_of_memory(memory: str) -> None:
    tensor = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
    tensor = tensor[..., ::2] if memory == "gaps" else tensor.to(memory_format=getattr(torch, memory))
    slot = Slot.of("a", tensor)
    vector = slot.flat(tensor)
    assert torch.equal(slot.shaped(vector), tensor)
    assert (vector.data_ptr() == tensor.data_ptr()) == (memory != "gaps")
    assert memory == "gaps" or slot.shaped(vector).stride() == tensor.stride()


def test_a_plan_with_shares(tmp_path: Path) -> None:
    plan = make_plan()
    shares = [1 / (k + 2) for k in range(len(plan.workers))]
    shares = [share / sum(shares) for share in shares]
    workers = [replace(worker, share=s) for worker, s in zip(plan.workers, shares, strict=True)]
    write_json(tmp_path / "plan.json", replace(plan, workers=workers))
    assert read_shares(tmp_path / "plan.json", len(shares)) == tuple(shares)
    assert read_shares(replace(plan, workers=workers), len(shares)) == tuple(shares)


def test_a_layout_holds_all_elements() -> None:
    with pytest.raises(InputError, match="found parts of 3 elements; expected 5"):
        PieceLayout((2, 3), (1, 2))


def test_what_fits_is_what_the_page_says() -> None:
    """Billions of parameters: 16 bytes each are shared and 2 of 32 blocks are whole, of 4 bytes; of LoRA's
    frozen base 2 and 2. Cards keep 3 GB.
    """
    page = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "unlike-memory.md"
    rows = [line.strip("| ").split(" | ") for line in page.read_text("utf-8").splitlines() if line[:1] == "|"]
    assert len(rows) == 5
    for cards, *said in rows[2:]:
        free = [int(gib) * 2**30 / 1e9 - 3 for gib in cards.split(" + ")]
        for held, (shared, whole) in zip((said[:3], said[3:]), ((16, 4), (2, 2)), strict=True):
            each = shared + len(free) * whole * 2 / 32
            right = [max(free) / shared, len(free) * min(free) / each, sum(free) / each]
            assert [float(one) for one in held] == pytest.approx(right, rel=0.01)
