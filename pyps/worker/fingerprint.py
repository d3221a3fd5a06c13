"""Whether all ranks have the same data set: its length, its type, and its first and last sample.

Unlike machines decode and round a little differently. So texts and single whole numbers are compared exactly,
arrays by their shape and, within a tolerance, their mean.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from pyps.native.values import DataSet
from pyps.worker.samples import Source

TOLERANCE = 1e-3  # of the mean size of the values: a JPEG decoder's rounding is a tenth of this
WEIGHT = 0.6180339887498949  # each further value counts this much less, so that two cannot change places


def fingerprint_of(source: Source) -> DataSet:
    """The fingerprint, from the data set's own `fingerprint` (a string), if it has one, or from two samples.

    Samples that come out differently when they are read twice are left out.
    """
    digest = hashlib.blake2b(digest_size=7)
    digest.update(_name(type(source.dataset)).encode())
    own = getattr(source.dataset, "fingerprint", None)
    if isinstance(own, str):
        digest.update(own.encode())
        return _made(source, digest, [])
    values: list[tuple[float, float]] = []
    if source.length:
        example = list(_features(source.example(last=False)))
        if example == list(_features(source.example(last=False))):
            for feature in (*example, *_features(source.example(last=True))):
                if isinstance(feature, str):
                    digest.update(feature.encode())
                else:
                    values.append(feature)
    return _made(source, digest, values)


def _made(source: Source, digest: Any, values: list[tuple[float, float]]) -> DataSet:
    mean = sum(WEIGHT**k * value for k, (value, _) in enumerate(values))
    tolerance = TOLERANCE * sum(WEIGHT**k * size for k, (_, size) in enumerate(values))
    finite = math.isfinite(mean) and math.isfinite(tolerance)
    number = int.from_bytes(digest.digest())
    return DataSet(source.length, number, mean if finite else 0.0, tolerance if finite else 0.0)


def _features(sample: Any) -> Iterator[str | tuple[float, float]]:
    """What is compared of a sample: texts exactly; (mean, mean size) of an array or a float nearly."""
    if isinstance(sample, Mapping):
        for key in sorted(sample, key=str):
            yield f"key {key}"
            yield from _features(sample[key])
    elif isinstance(sample, tuple | list) and not all(isinstance(v, int | float) for v in sample):
        yield f"{len(sample)} values"
        for value in sample:
            yield from _features(value)
    elif isinstance(sample, str):
        yield sample.rpartition("/")[2]  # of a path only the file: folders differ between machines
    elif isinstance(sample, bytes | bool | int | None):
        yield repr(sample)
    else:
        yield from _of_array(sample)


def _of_array(sample: Any) -> Iterator[str | tuple[float, float]]:
    """An array, a tensor, a list of numbers, or a float; of anything else, only its type."""
    yield _name(type(sample))
    if hasattr(sample, "detach"):
        sample = sample.detach().cpu().double().numpy() if not sample.is_complex() else None
    try:
        array = np.asarray(sample)
    except (TypeError, ValueError):
        return
    yield f"shape {list(array.shape)}"
    if array.dtype.kind not in "biuf" or not array.size:
        return
    if not array.ndim and array.dtype.kind in "biu":
        yield repr(array.item())
        return
    numbers = array.astype(np.float64)
    yield float(numbers.mean()), float(np.abs(numbers).mean())


def _name(kind: type) -> str:
    return kind.__qualname__
