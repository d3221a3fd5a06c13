"""The torch codec against the C codec: every bit of codes, scales and residuals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from device import ON_BOTH
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled import examples

from pyps.errors import InputError
from pyps.native.values import Codec, Encoding
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
) -> None:
    out = np.full(values.size, 7.0, np.float32) if feedback else None
    data, _ = reference.encode(values, Encoding(kind), scale=scale, residual=residual, residual_out=out)
    mine = np.zeros_like(out) if out is not None else None
    there = [None if a is None else torch.from_numpy(a).to(device) for a in (values, residual, mine)]
    assert there[0] is not None
    codes, scales = encode(kind, there[0], scale=scale, residual=there[1], residual_out=there[2])
    whole = np.concatenate([codes.cpu().numpy(), scales.cpu().numpy().view(np.uint8)])
    np.testing.assert_array_equal(whole, data)
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
def test_a_block_that_is_not_finite_has_no_scale(kind: Codec, device: str) -> None:
    """A store refuses it; all other blocks are as without it."""
    values = np.random.default_rng(3).standard_normal(2048).astype(np.float32)
    _, plain = encode(kind, torch.from_numpy(values).to(device))
    values[[5, 700, 701, 2047]] = [np.nan, np.inf, -np.inf, np.nan]
    _, scales = encode(kind, torch.from_numpy(values).to(device))
    block = 2048 // len(scales)
    bad = sorted({5 // block, 700 // block, 701 // block, 2047 // block})
    good = [k for k in range(len(scales)) if k not in bad]
    assert torch.isnan(scales[bad]).all()
    assert torch.equal(scales[good], plain[good])


@settings(max_examples=examples(18, 60), deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(1, 700), st.sampled_from(CODECS))
def test_any_finite_bits_at_all(seed: int, size: int, kind: Codec) -> None:
    draws = np.random.default_rng(seed)
    values = draws.integers(0, 2**32, size, np.uint32).view(np.float32).copy()
    values[~np.isfinite(values)] = 0.0
    compare(kind, values, 1.0, None, True, "cpu")
    compare(kind, values, 0.1, np.ones(size, np.float32), True, "cpu")


def test_other_codecs_are_refused() -> None:
    with pytest.raises(InputError, match="int8 or int4"):
        encode(Codec.NF4, torch.zeros(64))
