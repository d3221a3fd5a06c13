"""The rounds of an epoch: every sample once, for any split, tail, ranks and loader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled import examples
from torch.utils.data import DataLoader, TensorDataset

from pyps.errors import InputError
from pyps.formats import EvenSplit, HpsEstimate, Plan, PlanWorker, R2spSchedule, write_json
from pyps.torch.checkpoint import trained_rounds
from pyps.torch.sampler import UnevenBatchSampler
from pyps.torch.schedule import micro_batches, proportional_split, read_split, round_sizes
from pyps.torch.stream import UnevenIterableDataset

torch.set_num_threads(1)
SPLITS = st.lists(st.integers(1, 40), min_size=1, max_size=5)


def samplers_of(length: int, split: list[int], **options: Any) -> list[UnevenBatchSampler]:
    """The samplers of all ranks."""
    return [UnevenBatchSampler(length, split, rank, **options) for rank in range(len(split))]


def drawn(samplers: list[UnevenBatchSampler]) -> list[list[list[int]]]:
    """By rank, the batches of the epoch."""
    return [list(sampler) for sampler in samplers]


@settings(derandomize=True, deadline=None)
@given(st.data(), SPLITS, st.integers(0, 300), st.booleans())
def test_an_epoch_is_every_sample_once(data: Any, split: list[int], more: int, drop_last: bool) -> None:
    parts = [data.draw(st.integers(1, min(b, 4))) for b in split]
    length = sum(parts) + more
    if drop_last and length < sum(split):
        with pytest.raises(InputError, match=r"expected at least .*, the global batch, with drop_last"):
            samplers_of(length, split, accumulate=parts, drop_last=True)
        return
    samplers = samplers_of(length, split, accumulate=parts, seed=3, drop_last=drop_last)
    epoch = drawn(samplers)
    for sampler, batches, part in zip(samplers, epoch, parts, strict=True):
        assert len(batches) == len(sampler) == sampler.rounds * part
        assert all(batches)
    seen = Counter(k for batches in epoch for batch in batches for k in batch)
    assert set(seen.values()) <= {1}
    whole = length // sum(split) * sum(split) if drop_last else length
    assert len(seen) == whole
    assert drop_last or set(seen) == set(range(length))
    full = length // sum(split) - 2
    for batches, batch, part in zip(epoch, split, parts, strict=True):
        for number in range(full):
            assert sum(map(len, batches[number * part : (number + 1) * part])) == batch


@settings(derandomize=True, deadline=None)
@given(SPLITS, st.integers(0, 500))
def test_a_share_is_near_its_proportion_and_every_rank_has_some(split: list[int], more: int) -> None:
    size = len(split) + more
    shares = proportional_split(size, tuple(split))
    assert sum(shares) == size
    assert min(shares) >= 1
    low = sum(2 for b in split if size * b < 2 * sum(split))  # what others give to ranks with less than two
    for batch, mine in zip(split, shares, strict=True):
        exact = size * batch / sum(split)
        assert exact - 1 - low < mine < max(exact, min(batch, 2)) + 1


@settings(derandomize=True, deadline=None)
@given(SPLITS, st.integers(0, 500))
def test_rounds_sum_to_the_epoch_and_serve_all(split: list[int], more: int) -> None:
    samples, total = len(split) + more, sum(split)
    sizes = round_sizes(samples, tuple(split))
    assert sum(sizes) == samples
    assert min(sizes) >= len(split)
    assert max(sizes) < total + 2 * len(split)
    assert all(size == total for size in sizes[:-2])


@settings(derandomize=True, deadline=None)
@given(st.data(), SPLITS, st.integers(0, 300), st.booleans())
def test_no_micro_batch_is_of_one_sample(data: Any, split: list[int], more: int, stream: bool) -> None:
    """Batch normalization cannot train on one, unless the split itself has such batches."""
    parts = [data.draw(st.integers(1, min(b, 3))) for b in split]
    length = sum(split) + more
    for rank, (batch, part) in enumerate(zip(split, parts, strict=True)):
        if stream:
            batches = list(UnevenIterableDataset(list(range(length)), split, rank, accumulate=parts))
        else:
            batches = list(UnevenBatchSampler(length, split, rank, accumulate=parts))
        assert min(map(len, batches)) >= (2 if batch >= 2 * part else 1)


def test_the_tail_as_an_example() -> None:
    assert round_sizes(402, (198, 2)) == [200, 101, 101]  # each rank needs two samples
    assert proportional_split(4, (198, 2)) == (2, 2)
    assert round_sizes(601, (199, 1)) == [200, 200, 101, 100]
    assert round_sizes(3, (198, 2)) == [3]
    assert round_sizes(150, (48, 16)) == [64, 64, 22]
    assert proportional_split(22, (48, 16)) == (17, 5)  # 16.5 and 5.5: the tie goes to the lower rank
    assert round_sizes(129, (48, 16)) == [64, 33, 32]  # one sample left over cannot be shared by two
    assert round_sizes(5, (1, 1)) == [2, 3]
    assert round_sizes(129, (48, 16), drop_last=True) == [64, 64]
    assert micro_batches(10, 17, 3) == [(10, 13), (13, 15), (15, 17)]


@settings(derandomize=True, deadline=None, max_examples=examples(18, 60))
@given(st.data(), SPLITS, st.integers(0, 400))
def test_a_state_goes_on_with_other_ranks_and_another_plan(data: Any, split: list[int], more: int) -> None:
    length = 10 + more
    samplers = samplers_of(max(length, len(split)), split, seed=1)
    length = samplers[0].length
    for sampler in samplers:
        sampler.set_epoch(2)
    stop = data.draw(st.integers(0, samplers[0].rounds))
    changed = data.draw(st.permutations(split))
    seen: list[int] = []
    walks = [iter(sampler) for sampler in samplers]
    edge = data.draw(st.integers(0, stop))
    for number in range(stop):
        if number == edge:
            for sampler in samplers:
                sampler.replan(changed)
        for sampler, walk in zip(samplers, walks, strict=True):
            seen += next(walk)
            sampler.end_step()
    states = [sampler.state_dict() for sampler in samplers]
    assert all(state == states[0] for state in states)
    if len(seen) == length:
        assert (states[0]["epoch"], states[0]["position"]) == (3, 0)
        return
    after = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    rest = samplers_of(length, after, seed=9)
    left = length - len(seen)
    if 0 < left < len(after):
        with pytest.raises(InputError, match="samples left"):
            rest[0].load_state_dict(states[0])
        return
    for sampler in rest:
        sampler.load_state_dict(states[0])
    seen += [k for batches in drawn(rest) for batch in batches for k in batch]
    assert sorted(seen) == list(range(length))


@pytest.mark.parametrize("kind", [UnevenBatchSampler, UnevenIterableDataset])
def test_a_loop_that_forgets_the_loaded_epoch_is_told(kind: Any) -> None:
    trained, resumed = kind(range(40), [6, 4], rank=0), kind(range(40), [5, 5], rank=0)
    trained.set_epoch(2)
    resumed.load_state_dict(trained.state_dict(1))
    with pytest.raises(InputError, match=r"epoch: found 0; expected 2 .*range\(sampler.epoch"):
        resumed.set_epoch(0)  # its samples would be trained again
    resumed.set_epoch(2)
    assert (resumed.epoch, resumed.position) == (2, 10)
    resumed.set_epoch(3)
    assert (resumed.epoch, resumed.position) == (3, 0)


def test_a_checkpoint_of_rounds_that_were_only_fetched_is_refused() -> None:
    sampler = UnevenBatchSampler(range(100), [10])
    rounds = iter(sampler)
    for _ in range(5):
        next(rounds)
    with pytest.raises(InputError, match="rounds: found batches that were computed, and no step"):
        trained_rounds(sampler, None)  # nothing counts them, and DataLoader workers fetch ahead
    assert trained_rounds(sampler, 3) == 3
    sampler.end_step()
    assert trained_rounds(sampler, None) == 5  # a loop that accumulates, or is late
    sampler.end_step()
    assert trained_rounds(sampler, None) == 5  # a second end of the same step
    sampler.set_epoch(1)
    assert trained_rounds(sampler, None) == 0


def test_a_replan_waits_for_its_round() -> None:
    samplers = samplers_of(100, [6, 4])
    for sampler in samplers:
        sampler.replan([3, 7], 0, 5)
        sampler.replan([5, 5], 1, 0)
    sizes = [[len(batch) for batch in batches] for batches in drawn(samplers)]
    assert sizes == [[6] * 5 + [3] * 5, [4] * 5 + [7] * 5]
    for sampler in samplers:
        sampler.set_epoch(1)
    assert [[len(batch) for batch in batches] for batches in drawn(samplers)] == [[5] * 10, [5] * 10]


@pytest.mark.parametrize("trained", [10, 3])
@pytest.mark.parametrize("start", [(0, 7), (1, 0)])
def test_a_replan_holds_in_the_next_pass_without_set_epoch(start: tuple[int, int], trained: int) -> None:
    """It is so in a loop of one long epoch that is never counted; also where each pass is left early."""
    sampler = UnevenBatchSampler(100, [6, 4], 0)
    walk = iter(sampler)
    for _ in range(trained):
        next(walk)
        sampler.end_step()
        if sampler.drawn == 2:
            sampler.replan([3, 7], *start)
    del walk
    assert [len(batch) for batch in stepped(sampler)] == [3] * 10
    assert sampler.split == (3, 7)


def test_another_global_batch_holds_in_the_next_pass_without_set_epoch() -> None:
    """It is the batch that AdaptiveBatch asks for, with the learning rate of that batch."""
    sampler = UnevenBatchSampler(20, [3, 2], 0, shuffle=False)
    assert [len(batch) for batch in sampler] == [3] * 4
    sampler.resize([6, 4])
    assert list(sampler) == [[*range(6)], [*range(10, 16)]]


def test_a_replan_of_a_later_epoch_waits_for_it() -> None:
    sampler = UnevenBatchSampler(100, [6, 4], 0)
    sampler.replan([3, 7], 2)
    assert [[len(batch) for batch in sampler] for _ in range(2)] == [[6] * 10] * 2
    sampler.set_epoch(2)
    assert sampler.split == (3, 7)


def test_a_sampler_of_batches_is_no_sampler_of_samples() -> None:
    loader = DataLoader(range(20), 4, sampler=UnevenBatchSampler(20, [3, 2], 0))  # type: ignore[arg-type]
    with pytest.raises(
        InputError, match=r"DataLoader: sampler: found an UnevenBatchSampler; expected batch_sampler="
    ):
        next(iter(loader))


def test_libraries_find_the_batch_of_all_ranks() -> None:
    assert UnevenBatchSampler(100, [6, 4], 0, accumulate=2).batch_size == 5


def test_a_replan_keeps_the_global_batch_and_the_past() -> None:
    sampler = UnevenBatchSampler(100, [6, 4], 0, accumulate=2)
    with pytest.raises(InputError, match=r"sum to 11.*10"):
        sampler.replan([7, 4])
    with pytest.raises(InputError, match=r"batches\[1\].*at least 2"):
        sampler.replan([9, 1])
    walk = iter(sampler)
    next(walk), next(walk), next(walk)
    sampler.end_step()
    with pytest.raises(InputError, match="handed out"):
        sampler.replan([5, 5], 0, 1)
    assert sampler.split == (6, 4)


def test_epochs_differ_and_the_seed_decides() -> None:
    first = [list(UnevenBatchSampler(50, [10], 0, seed=seed)) for seed in (0, 0, 1)]
    assert first[0] == first[1] != first[2]
    sampler = UnevenBatchSampler(50, [10], 0)
    before = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != before
    in_order = UnevenBatchSampler(50, [10], 0, shuffle=False)
    assert [k for batch in in_order for k in batch] == list(range(50))


def test_the_epoch_after_a_resumed_part_is_whole() -> None:
    sampler = UnevenBatchSampler(50, [10], 0)
    sampler.load_state_dict(sampler.state_dict() | {"position": 30})
    assert [sum(len(batch) for batch in stepped(sampler)) for _ in range(3)] == [20, 50, 50]
    assert sampler.epoch == 3


@pytest.mark.parametrize(("length", "parts"), [(9, 2), (10, 1), (11, 1), (16, 1)])
def test_a_stream_that_was_trained_to_its_end_has_nothing_left(length: int, parts: int) -> None:
    """Its last round may have the tail, too."""
    streams = [UnevenIterableDataset(range(length), [4], 0, collate=list, accumulate=parts) for _ in range(2)]
    seen = []
    for batch in streams[0]:
        seen += batch
        streams[0].end_step()
    streams[1].load_state_dict(streams[0].state_dict())
    assert seen + [k for batch in streams[1] for k in batch] == list(range(length))


def test_an_epoch_whose_rest_makes_no_round_is_over() -> None:
    """Resumed with a larger global batch, at once or later, where the last samples are left out."""
    sampler = UnevenBatchSampler(100, [50], 0, drop_last=True)
    sampler.load_state_dict(sampler.state_dict() | {"position": 60})
    assert (sampler.epoch, sampler.position) == (1, 0)
    smaller = UnevenBatchSampler(100, [30], 0, drop_last=True)
    smaller.load_state_dict(smaller.state_dict() | {"position": 60})
    smaller.resize([50], at_once=True)
    for one in (sampler, smaller):
        assert [len(list(stepped(one))) for _ in range(2)] == [2, 2]


def stepped(sampler: UnevenBatchSampler) -> Iterator[list[int]]:
    """A loop whose steps end."""
    for batch in sampler:
        yield batch
        sampler.end_step()


def test_a_loaded_state_forgets_what_was_read_past() -> None:
    sampler = UnevenBatchSampler(100, [3, 2], 0)
    sampler.read_past(4)
    assert len(list(sampler)) == len(sampler) - 4
    sampler.load_state_dict({**sampler.state_dict(0), "position": 50})
    assert len(list(sampler)) == len(sampler) == 10


def test_loader_workers_fetch_ahead_and_change_nothing() -> None:
    dataset = TensorDataset(torch.arange(103))
    values = []
    for rank in range(2):
        sampler = UnevenBatchSampler(dataset, [7, 3], rank)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2)
        assert len(loader) == 11
        for number, (batch,) in enumerate(loader):
            values += batch.tolist()
            if number == 2:
                sampler.end_step()
                state = sampler.state_dict()
                assert sampler.drawn > 3
                assert state["position"] == 30
    assert sorted(values) == list(range(103))


class Lines:
    """A stream that can only be read from its beginning; a deliberate one: its epochs differ."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch * 1000, self.epoch * 1000 + self.length))


@settings(derandomize=True, deadline=None)
@given(st.data(), SPLITS, st.integers(0, 200), st.booleans())
def test_a_stream_is_every_sample_once(data: Any, split: list[int], more: int, drop_last: bool) -> None:
    parts = [data.draw(st.integers(1, min(b, 3))) for b in split]
    length = sum(parts) + more
    too_short = drop_last and length < sum(split)
    streams = [
        UnevenIterableDataset(Lines(length), split, rank, accumulate=parts, collate=list, drop_last=drop_last)
        for rank in range(len(split))
    ]
    if too_short:
        with pytest.raises(InputError, match="found no round; expected at least"):
            list(streams[0])
        return
    epoch = [list(stream) for stream in streams]
    for batches, batch, part in zip(epoch, split, parts, strict=True):
        assert len(batches) % part == 0
        assert len(batches) // part == len(epoch[0]) // parts[0]
        for number in range(len(batches) // part - 1):
            assert sum(map(len, batches[number * part : (number + 1) * part])) == batch
    seen = sorted(k for batches in epoch for batch in batches for k in batch)
    assert seen == list(range(length // sum(split) * sum(split) if drop_last else length))


def double(value: int) -> int:
    return value * 2


def test_a_stream_through_loader_workers_is_in_order_and_resumes() -> None:
    alone = UnevenIterableDataset(Lines(59), [6, 4], 1, transform=double, accumulate=2)
    alone.set_epoch(3)
    expected = [batch.tolist() for batch in alone]
    shared = UnevenIterableDataset(Lines(59), [6, 4], 1, transform=double, accumulate=2)
    shared.set_epoch(3)
    loader = DataLoader(shared, batch_size=None, num_workers=2)
    assert [batch.tolist() for batch in loader] == expected
    assert expected[0] == [6012, 6014]
    state = shared.state_dict(rounds=2)
    again = UnevenIterableDataset(Lines(59), [6, 4], 1, transform=double, accumulate=2)
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == expected[4:]


def sizes_of(loader: DataLoader[Any], replans: dict[int, tuple[Any, ...]]) -> list[int]:
    """The batches of a walk, in samples; before the batch of a number, the stream is replanned."""
    sizes = []
    for number, batch in enumerate(loader):
        sizes.append(len(batch))
        if number in replans:
            loader.dataset.replan(*replans[number])  # type: ignore[attr-defined]
    return sizes


@pytest.mark.parametrize("workers", [0, 2])
def test_a_new_split_reaches_a_stream_in_any_loader(workers: int) -> None:
    stream = UnevenIterableDataset(Lines(200), [6, 4], 0)
    loader = DataLoader(stream, batch_size=None, num_workers=workers)
    assert stream.max_drawn() == 0
    assert sizes_of(loader, {1: ([2, 8], 0, 12), 12: ([3, 7], 0, 30)}) == [6] * 12 + [2] * 8
    assert stream.latest_split == (3, 7)
    assert stream.round_samples(13) == (10, 2)
    # The round 30 never came: the split is in force when the stream is read again.
    assert sizes_of(loader, {2: ([5, 5], 0, 15)}) == [3] * 15 + [5] * 5
    late = sizes_of(loader, {} if workers == 0 else {19: ([1, 9],)})
    assert late == [5] * 20
    if workers:
        assert sizes_of(loader, {}) == [1] * 20


def test_a_stream_says_what_came_too_late() -> None:
    stream = UnevenIterableDataset(Lines(200), [6, 4], 0)
    with pytest.raises((InputError, RuntimeError), match=r"round: found 2.*handed out"):  # of a worker
        sizes_of(DataLoader(stream, batch_size=None, num_workers=1), {3: ([2, 8], 0, 2)})
    with pytest.raises(InputError, match=r"round.*1.*3 or later"):
        sizes_of(DataLoader(stream, batch_size=None), {2: ([2, 8], 0, 1)})
    with pytest.raises(InputError, match=r"epoch.*1.*0, this one"):
        stream.replan([2, 8], 1, 5)
    again = DataLoader(stream, batch_size=None, num_workers=1, persistent_workers=True)
    assert len(sizes_of(again, {})) == 20
    with pytest.raises((InputError, RuntimeError), match="persistent_workers"):
        sizes_of(again, {})


def test_a_stream_refuses_what_cannot_be() -> None:
    with pytest.raises(InputError, match=r"2 samples.*at least 3"):
        list(UnevenIterableDataset(Lines(2), [5, 3, 1], 0))
    stream = UnevenIterableDataset(Lines(20), [5, 3], 0, collate=list)
    walk = iter(stream)
    assert len(next(walk)) == 5
    stream.replan([2, 6])
    assert len(next(walk)) == 2
    with pytest.raises(InputError, match="sum to 9"):
        stream.replan([5, 4])


def plan(batches: list[int]) -> Plan:
    workers = [
        PlanWorker(
            rank=k,
            name=f"gpu{k}",
            batch=b,
            micro_batch=b,
            accumulation=1,
            weight=b / sum(batches),
            predicted_seconds=0.1,
        )
        for k, b in enumerate(batches)
    ]
    turns = R2spSchedule(feasible=None, period_seconds=1, gap_seconds=1, order=[0], offsets_seconds=[0])
    return Plan(
        global_batch=sum(batches),
        iteration_seconds=1,
        lower_bound_seconds=1,
        even_split=EvenSplit(feasible=False),
        speedup_over_even=None,
        workers=workers,
        r2sp=turns,
        hps=HpsEstimate(),
        warnings=[],
    )


def test_a_plan_file_gives_the_ranks_that_it_uses(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    write_json(file, plan([5, 0, 3]))
    assert read_split(file) == read_split(str(file)) == read_split(plan([5, 0, 3])) == (5, 3)
    assert UnevenBatchSampler(16, file, 1).batch == 3
    with pytest.raises(InputError, match=r"2 with a batch \(it leaves out gpu1\).*3, as many"):
        read_split(file, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan": []}, "none"),
        ({"plan": [4, 0]}, r"batches\[1\].*0.*from 1"),
        ({"plan": [4, True]}, r"batches\[1\].*True"),
        ({"rank": 2}, "rank.*2.*0 to 1"),
        ({"dataset": 0}, "no samples"),
        ({"dataset": 1}, "1 samples left.*at least 2"),
        ({"seed": -1}, "seed.*-1"),
        ({"accumulate": 3}, "accumulate.*1 up to the rank's batch"),
        ({"accumulate": [1]}, "accumulate.*each of 2 ranks"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        UnevenBatchSampler(**({"dataset": 20, "plan": [4, 2], "rank": 0} | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 21}, "length.*21.*20"),
        ({"shuffle": False}, "shuffle.*False.*True"),
        ({"epoch": -1}, "epoch"),
        ({"position": 21}, "position.*21.*0 to 20"),
        ({"position": 19}, "1 samples left"),
    ],
)
def test_a_state_that_is_refused_changes_nothing(change: dict[str, Any], message: str) -> None:
    sampler = UnevenBatchSampler(20, [4, 2], 0)
    before = sampler.state_dict()
    with pytest.raises(InputError, match=message):
        sampler.load_state_dict(before | change)
    assert sampler.state_dict() == before


def test_the_changes_of_an_epoch_are_not_those_of_the_one_before() -> None:
    """A checkpoint between set_epoch() and the epoch's first round has only its split."""
    sampler = UnevenBatchSampler(40, [5, 3], 0)
    for number, _ in enumerate(sampler):
        sampler.end_step()
        if number == 1:
            sampler.replan([4, 4])
            break
    assert len(sampler.changes(0)) == 2
    sampler.set_epoch(1)
    assert sampler.changes(0) == [(1, 0, (4, 4))]
