"""The torch codec against the C codec: every bit of codes, scales and residuals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from device import ON_BOTH
from hypothesis import given, settings
from hypothesis import strategies as st

from pyps.errors import InputError, NotFinite
from pyps.native.values import Codec, Encoding, NonFinite
from pyps.store import codec as reference
from pyps.worker.device.buckets import encode

CODECS = [Codec.INT8, Codec.INT4]


def compare(
    kind: Codec,
    values: np.ndarray,
    scale: float,
    residual: np.ndarray | None,
    feedback: bool,
    device: str,
    nonfinite: NonFinite = "error",
) -> None:
    out = np.full(values.size, 7.0, np.float32) if feedback else None
    data, counted = reference.encode(
        values, Encoding(kind, nonfinite=nonfinite), scale=scale, residual=residual, residual_out=out
    )
    mine = np.zeros_like(out) if out is not None else None
    there = [None if a is None else torch.from_numpy(a).to(device) for a in (values, residual, mine)]
    assert there[0] is not None
    codes, scales, counts = encode(
        kind, there[0], scale=scale, residual=there[1], residual_out=there[2], nonfinite=nonfinite
    )
    whole = np.concatenate([codes.cpu().numpy(), scales.cpu().numpy().view(np.uint8)])
    np.testing.assert_array_equal(whole, data)
    assert counts == counted
    if out is not None:
        assert there[2] is not None
        np.testing.assert_array_equal(there[2].cpu().numpy().view(np.uint32), out.view(np.uint32))


@pytest.mark.parametrize("device", ON_BOTH)
@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("size", [1, 63, 64, 65, 255, 256, 257, 4096, 40_001])
def test_bits_are_the_c_codecs(kind: Codec, size: int, device: str) -> None:
    draws = np.random.default_rng(size)
    for spread in (0.0, 3.0, 12.0):
        wide = draws.standard_normal(size) * 10 ** (spread * draws.standard_normal(size))
        values = np.clip(wide, -1e30, 1e30).astype(np.float32)
        values[draws.random(size) < 0.1] = 0.0
        residual = (0.01 * draws.standard_normal(size)).astype(np.float32)
        compare(kind, values, 1.0, None, False, device)
        compare(kind, values, 1.0, None, True, device)
        compare(kind, values, 1 / 3, residual, True, device)


@pytest.mark.parametrize("device", ON_BOTH)
@pytest.mark.parametrize("kind", CODECS)
def test_ties_tiny_and_huge_values(kind: Codec, device: str) -> None:
    most = {Codec.INT8: 127.0, Codec.INT4: 7.0}[kind]
    halves = np.arange(-most, most + 0.25, 0.5, dtype=np.float32)
    compare(kind, np.resize(halves, 512), 1.0, None, True, device)
    for size in (1e-30, 9.9e-31, 1e-38, 1e-42, 3e38):
        compare(kind, np.linspace(-size, size, 300).astype(np.float32), 1.0, None, True, device)
    compare(kind, np.zeros(100, np.float32), 1.0, np.full(100, 1e-31, np.float32), True, device)
    compare(kind, np.full(100, -0.0, np.float32), 1.0, None, True, device)


@pytest.mark.parametrize("device", ON_BOTH)
@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("nonfinite", ["skip", "zero"])
def test_what_is_not_finite(kind: Codec, nonfinite: NonFinite, device: str) -> None:
    draws = np.random.default_rng(3)
    values = draws.standard_normal(2000).astype(np.float32)
    values[[5, 700, 701, 1999]] = [np.nan, np.inf, -np.inf, np.nan]
    values[6] = -0.0
    residual = draws.standard_normal(2000).astype(np.float32)
    for kept in (None, residual):
        compare(kind, values, 1.0, kept, True, device, nonfinite)
        compare(kind, values, 0.5, kept, True, device, nonfinite)
    with pytest.raises(NotFinite, match="4 values that are not finite"):
        encode(kind, torch.from_numpy(values).to(device))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(1, 700), st.sampled_from(CODECS))
def test_any_bits_at_all(seed: int, size: int, kind: Codec) -> None:
    draws = np.random.default_rng(seed)
    values = draws.integers(0, 2**32, size, np.uint32).view(np.float32).copy()
    compare(kind, values, 1.0, None, True, "cpu", "zero")
    compare(kind, values, 0.1, np.ones(size, np.float32), True, "cpu", "skip")


def test_other_codecs_are_refused() -> None:
    with pytest.raises(InputError, match="int8 or int4"):
        encode(Codec.NF4, torch.zeros(64))
