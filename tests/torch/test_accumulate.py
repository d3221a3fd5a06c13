"""Micro-batches: a batch is cut by samples, or refused; never by channels."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from pyps.errors import InputError
from pyps.torch.accumulate import cut, samples_of

IMAGES = [torch.randn(3, 4 + k, 5) for k in range(3)]  # as many as they have channels
BOXES = [{"boxes": torch.randn(k + 1, 4)} for k in range(3)]


def shapes(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return tuple(batch.shape)
    if isinstance(batch, Mapping):
        return {key: shapes(one) for key, one in batch.items()}
    return type(batch)(shapes(one) for one in batch) if isinstance(batch, list | tuple) else batch


@pytest.mark.parametrize(
    ("batch", "first"),
    [
        ((torch.zeros(4, 2), torch.zeros(4)), ((1, 2), (1,))),
        ([torch.zeros(4, 2), torch.zeros(4)], [(1, 2), (1,)]),  # as DataLoader's default gives them
        (
            {"x": torch.zeros(4, 2), "names": ["a", "b", "c", "d"], "scale": 2.0},
            {"x": (1, 2), "names": ["a"], "scale": 2.0},
        ),
        ((IMAGES[:2], BOXES[:2]), ([(3, 4, 5)], [{"boxes": (1, 4)}])),
        ((torch.zeros(2, 2), torch.zeros(())), ((1, 2), ())),
        (UserDict(x=torch.zeros(4, 2)), {"x": (1, 2)}),  # as a tokenizer of transformers gives it
    ],
)
def test_a_sample_of_a_batch(batch: Any, first: Any) -> None:
    assert shapes(cut(batch, samples_of(batch), 0, 1)) == first


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (
            (torch.zeros(7, 4), torch.zeros(4)),
            r"batch\[1\]: found a first dimension of 4; expected 7, the samples",
        ),
        ((torch.zeros(4, 2), IMAGES), r"batch\[1\]: found a list of 3; expected one of 4"),
        ((torch.zeros(3, 2), IMAGES), r"batch\[1\]: found a list of 3 tensors that may be fields or samples"),
        ([torch.zeros(2, 5), torch.zeros(2, 5)], "found a list of 2 tensors that may be fields or samples"),
        (3, "batch: found int; expected tensors with samples in the first dimension"),
    ],
)
def test_what_cannot_be_cut_by_samples(batch: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        cut(batch, samples_of(batch), 0, 1)


def test_a_batch_without_samples_is_refused_where_their_number_is_known() -> None:
    with pytest.raises(InputError, match="batch: found object"):
        cut(object(), 4, 0, 1)


def test_a_list_of_samples_that_are_no_tensors() -> None:
    assert samples_of(BOXES) == 3
    assert samples_of(["a", "b"]) == 2
