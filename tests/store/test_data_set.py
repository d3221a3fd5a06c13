"""Which data set each rank reads: a rank with another one is refused, and both are named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pyps.checkpoint.state import load, save
from pyps.errors import InvalidArgument
from pyps.native.values import DataSet
from pyps.store import Store


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (DataSet(61, 7, 0.5, 0.1), "rank 1 has 61 samples, {} has 60"),
        (
            DataSet(60, 8, 0.5, 0.1),
            r"rank 1 and {} read different types, labels or texts \(digests 8, 7\)",
        ),
        (DataSet(60, 7, 0.71, 0.1), r"rank 1 and {} read different values \(mean 0.71, 0.5\)"),
        (DataSet(60, 7, 0.69, 0.1), None),
    ],
)
def test_another_data_set_is_refused(shm: Path, other: DataSet, says: str | None) -> None:
    with Store.create("data", {"w": np.zeros(3)}, batches=[1, 1]) as store, Store.open("data") as peer:
        store.join(0)
        peer.join(1)
        store.set_data_set(DataSet(60, 7, 0.5, 0.1))
        store.set_data_set(DataSet(60, 7, 0.5, 0.1))
        if says is None:
            peer.set_data_set(other)
            return
        with pytest.raises(InvalidArgument, match=says.format("rank 0")):
            peer.set_data_set(other)
        peer.set_data_set(DataSet(60, 7, 0.5, 0.1))
        store.leave()
        store.join(0)
        before = says.format("this run before").replace("rank 1", "rank 0")
        with pytest.raises(InvalidArgument, match=f"{before}; expected the data set that the run began"):
            store.set_data_set(other)


@pytest.mark.parametrize("wrong", [DataSet(1, 0, float("nan")), DataSet(1, 0, 0.0, -1.0)])
def test_numbers_that_compare_with_nothing_are_refused(shm: Path, wrong: DataSet) -> None:
    with Store.create("data", {"w": np.zeros(3)}, batches=[1]) as store:
        store.join()
        with pytest.raises(InvalidArgument, match="finite"):
            store.set_data_set(wrong)


def test_a_checkpoint_knows_its_data_set(shm: Path, tmp_path: Path) -> None:
    data = DataSet(60, 2**55 + 7, 0.5, 0.1)
    with Store.create("data", {"w": np.zeros(3)}, batches=[1, 1]) as store:
        store.join(1)
        store.set_data_set(data)
        save(store.state(), tmp_path)
    saved = load(tmp_path).state
    assert [rank.data_set for rank in saved.header.ranks] == [None, data]
    with Store.create("again", state=saved) as store:
        store.join(0)
        with pytest.raises(InvalidArgument, match="rank 0 has 61 samples, rank 1 has 60"):
            store.set_data_set(DataSet(61, data.digest, 0.5, 0.1))
        store.set_data_set(data)
        store.leave()
        store.join(1)
        with pytest.raises(InvalidArgument, match="rank 1 has 61 samples, this run before has 60; expected"):
            store.set_data_set(DataSet(61, data.digest, 0.5, 0.1))
    broken = replace(saved.header.ranks[1], data_set=DataSet(60, 7, float("nan")))
    header = replace(saved.header, ranks=(saved.header.ranks[0], broken))
    with pytest.raises(InvalidArgument, match="rank 1: data_set"):
        Store.create("broken", state=replace(saved, header=header))
