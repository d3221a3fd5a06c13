"""Micro-batches: a rank's batch, or a loader's, in the passes of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from pyps.errors import InputError
from pyps.torch.norm import UnevenSyncBatchNorm
from pyps.torch.schedule import micro_batches

if TYPE_CHECKING:
    from pyps.torch.rounds import Rounds
    from pyps.torch.wrapped import Wrapped


class MicroBatches:
    """The loops over a step's passes, whose losses are plain means; only the last pass reduces. A
    GlobalMean has the attributes.
    """

    models: list[Wrapped]
    group: dist.ProcessGroup
    device: torch.device
    sampler: Rounds | None
    calls: int  # backward passes that reduced since the last step
    _empty = False  # the next pass computes no samples of its own
    _loop: object = None  # the loop over passes that is under way
    micro_batches = 0  # of that loop

    def accumulate(
        self, batch: Any, parts: int | Sequence[int] | None = None, *, most: int | None = None
    ) -> Iterator[Any]:
        """Cut this rank's batch into micro-batches, for a loop that calls backward() for each.

        batch: tensors with samples in the first dimension, lists with an entry for each sample, and tuples
        and dicts of them. parts: how many, or how many on each rank. most: in place of parts, the samples of
        a micro-batch that fit this rank's memory. Each loss is the plain mean over its micro-batch, not
        divided by their number. Raises InputError for fewer than one part or sample, and for a batch that
        cannot be cut by samples.
        """
        if (parts is None) == (most is None):
            raise InputError("accumulate", "parts, most", f"{parts}, {most}", "one of them")
        whole, known = isinstance(parts, Sequence), self.samples_now()
        rows = samples_of(batch) if known is None else known
        if most is not None:
            _check_number("most", most)
            parts = max(1, -(-rows // most))
            parts = self._largest(parts) if self._meets_in_passes() else parts
        if isinstance(parts, Sequence):
            self._check_alike("accumulate", parts)
            parts = parts[dist.get_rank(self.group)]
        assert parts is not None
        _check_number("parts", parts)
        number = parts if not whole and self._meets_in_passes() else min(parts, rows)
        cuts = micro_batches(0, rows, max(1, number))
        cut(batch, rows, 0, 1)  # what cannot be cut is refused before the first pass
        source = (cut(batch, rows, *(ends if ends[0] < ends[1] else (0, 1))) for ends in cuts)
        return self._passes(source, len(cuts), whole, min(rows, len(cuts)))

    def rounds(self, loader: Any) -> Iterator[Iterator[Any]]:
        """Each round's micro-batches, of a loader whose sampler accumulates; as in accumulate().

        Raises InputError without a sampler, and for a round whose micro-batches were not all taken.
        """
        if self.sampler is None:
            raise InputError("rounds", "sampler", "None", "GlobalMean(model, sampler)")
        parts = self.sampler.accumulations
        self._check_alike("rounds", parts)
        return self._rounds(loader, parts[dist.get_rank(self.group)], len(set(parts)) > 1)

    def repeats(self, empty: bool) -> None:
        """Set whether the next pass computes samples that another one counts: its gradient counts 0 times."""
        self._empty = empty

    def give_up(self) -> None:
        """Forget the passes that are not reduced; a GlobalMean does."""

    def samples_now(self) -> int | None:
        """This rank's samples of the batch that is computed now; None where no sampler tells."""
        sampler = self.sampler
        return None if sampler is None or sampler.accumulation > 1 else sampler.samples_now()

    def _rounds(self, loader: Any, own: int, whole: bool) -> Iterator[Iterator[Any]]:
        source = iter(loader)
        for first in source:
            passes = self._passes(chain([first], source), own, whole, own)
            yield passes
            if next(passes, None) is not None:
                expected = "a loop over all of them"
                raise InputError("rounds", "micro-batches of a round", "some that are left", expected)

    def _passes(self, source: Iterator[Any], count: int, whole: bool, filled: int) -> Iterator[Any]:
        """`count` micro-batches out of a source, of which the first `filled` have samples of their own."""
        if self._loop is not None:  # it was left, and something still refers to it
            self.give_up()
        loop, self.micro_batches = object(), count
        self._loop = loop
        number, calls = 0, self.calls
        try:
            for number, micro in enumerate(islice(source, count), 1):
                self.repeats(number > filled)
                with ExitStack() as stack:
                    for one in self.models:
                        stack.enter_context(one.micro_batch(number == count, whole))
                    yield micro
            self._loop = None
        finally:
            self.repeats(False)
            if self._loop is loop:  # left before its end
                self._loop = None
                self.give_up()
            if self._loop is None:
                self.micro_batches = 0
        if number < count:
            raise InputError("accumulate", "micro-batches", f"{number}", f"{count} in this round")
        if self.calls == calls:
            found = "a last one without mean.backward(), which reduces the gradients of all"
            raise InputError("accumulate", "micro-batches", found, "mean.backward() for each")

    def _meets_in_passes(self) -> bool:
        """Return whether ranks wait for each other within each pass."""
        return any(not one.is_ddp for one in self.models) or self._waits_in_layers()

    def _waits_in_layers(self) -> bool:
        layers = (layer for one in self.models for layer in one.model.modules())
        return any(isinstance(layer, UnevenSyncBatchNorm) for layer in layers)

    def _check_alike(self, where: str, parts: Sequence[int]) -> None:
        """Raise InputError where ranks would wait for a pass that does not come."""
        if len(set(parts)) > 1 and self._waits_in_layers():
            expected = "as many on every rank: UnevenSyncBatchNorm waits for all ranks in each"
            raise InputError(where, "micro-batches", f"{tuple(parts)}", expected)

    def _largest(self, own: int) -> int:
        """Return the largest of all ranks."""
        found = torch.tensor(own, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return int(found)


def samples_of(batch: Any) -> int:
    """How many samples a batch has: the length of its first tensor, or list of samples.

    Raises InputError for a batch without either.
    """
    lengths: list[int] = []
    _with_parts(batch, None, lambda part, _: lengths.append(len(part)))
    return lengths[0] if lengths else _refuse(batch)


def cut(batch: Any, rows: int, low: int, high: int) -> Any:
    """Some samples of a batch. Raises InputError for what has another number of them or none, and what may be
    both a list of fields and one of samples.
    """
    names = []

    def part_of(part: Any, name: str) -> Any:
        names.append(name)
        if len(part) != rows:
            is_list = isinstance(part, list)
            found = f"{'a list' if is_list else 'a first dimension'} of {len(part)}"
            raise InputError("accumulate", name, found, f"{'one of ' * is_list}{rows}, the samples")
        return part[low:high]

    found = _with_parts(batch, rows, part_of)
    return found if names else _refuse(batch)


def _refuse(batch: Any) -> NoReturn:
    expected = "tensors with samples in the first dimension, or lists of samples"
    raise InputError("accumulate", "batch", type(batch).__name__, expected)


def _with_parts(batch: Any, rows: int | None, part_of: Callable[[Any, str], Any], name: str = "batch") -> Any:
    """The batch with another part in place of each tensor and list of samples; numbers and texts stay.

    rows: the samples, if known. part_of: gets the part and its name.
    """
    if isinstance(batch, torch.Tensor):
        return part_of(batch, name) if batch.dim() else batch
    if isinstance(batch, Mapping):  # transformers' BatchEncoding is no dict
        parts = {key: _with_parts(one, rows, part_of, f"{name}[{key!r}]") for key, one in batch.items()}
        return parts if type(batch) is dict else type(batch)(parts)  # type: ignore[call-arg]
    if not isinstance(batch, list | tuple):
        return batch
    if isinstance(batch, list) and not _is_of_fields(batch, rows, name):
        return part_of(batch, name)
    fields = [_with_parts(one, rows, part_of, f"{name}[{k}]") for k, one in enumerate(batch)]
    return type(batch)(*fields) if hasattr(batch, "_fields") else type(batch)(fields)


def _is_of_fields(batch: list[Any], rows: int | None, name: str) -> bool:
    """Tell whether a list has an entry for each field, not one for each sample, which are all of one kind.

    Raises InputError for one that may be both.
    """
    kinds = {(one.dtype, one.dim()) if isinstance(one, torch.Tensor) else type(one) for one in batch}
    as_samples = len(kinds) == 1 and not isinstance(batch[0], list | tuple)
    is_top, lengths = name == "batch", {_length_of(one) for one in batch}
    as_fields = lengths == {rows} or (rows is None and is_top and len(lengths) == 1 and -1 not in lengths)
    if as_fields and as_samples and rows in (None, len(batch)):
        found = f"a list of {len(batch)} tensors that may be fields or samples"
        raise InputError("accumulate", name, found, "a tuple of fields, or samples in one tensor")
    return as_fields or (is_top and not as_samples)


def _length_of(value: Any) -> int:
    return len(value) if isinstance(value, torch.Tensor) and value.dim() else -1


def _check_number(name: str, number: Any) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise InputError("accumulate", name, repr(number), "a whole number from 1")
