"""Codecs against a NumPy reference, bit by bit, and against what a quantizer promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sampled import examples

from pyps import errors
from pyps.store.codec import Codec, Encoding, as_codec, decode, encode, encoded_bytes

F32 = np.float32
Array = NDArray[np.float32]
QUANTIZED = (Codec.INT8, Codec.INT4, Codec.NF4)
LOSSY = (Codec.BF16, Codec.F16, *QUANTIZED)
BLOCK = {Codec.INT8: 256, Codec.INT4: 64, Codec.NF4: 64}
LEVELS = {Codec.INT8: F32(127), Codec.INT4: F32(7), Codec.NF4: F32(1)}
# QLoRA (Dettmers et al. 2023), appendix E.
NF4 = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    F32,
)
BETWEEN = ((NF4[:-1].astype(np.float64) + NF4[1:]) / 2).astype(F32)


def randn(count: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(count).astype(F32)


def philox(counters: NDArray[np.uint64], seed: int) -> list[NDArray[np.uint64]]:
    """Philox4x32-10 (Salmon et al., SC 2011): four words for each counter {low, high, 0, 0}."""
    mask, key = np.uint64(0xFFFFFFFF), [seed & 0xFFFFFFFF, seed >> 32]
    c = [counters & mask, counters >> np.uint64(32), np.zeros_like(counters), np.zeros_like(counters)]
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (b >> np.uint64(32)) ^ c[1] ^ np.uint64(key[0]), b & mask,
            (a >> np.uint64(32)) ^ c[3] ^ np.uint64(key[1]), a & mask,
        ]  # fmt: skip
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def test_the_reference_is_philox() -> None:
    """The known answer of the authors' Random123, philox4x32 10, counter and key zero."""
    words = [int(w[0]) for w in philox(np.zeros(1, np.uint64), 0)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def noise(count: int, seed: int, first: int) -> Array:
    """Return noise: of 64 values, value l + 16 j takes word j of counter (its group's number) * 16 + l."""
    index = np.arange(first, first + count, dtype=np.uint64)
    words = philox(index // np.uint64(64) * np.uint64(16) + index % np.uint64(16), seed)
    word = np.choose(((index % np.uint64(64)) // np.uint64(16)).astype(int), words)
    return (word >> np.uint64(8)).astype(F32) * F32(2.0**-24)


def reference(v: Array, codec: Codec, u: Array | None = None) -> tuple[Array, Array]:
    """(codes, decoded) of whole blocks, in fp32 and in the order that the C core promises."""
    blocks = v.reshape(-1, BLOCK[codec])
    top = np.abs(blocks).max(axis=1, keepdims=True)
    tiny = top < F32(1e-30)
    inverse = LEVELS[codec] / np.where(tiny, F32(1), top)
    scale = np.where(tiny, F32(0), top / LEVELS[codec])
    x = blocks * inverse
    if codec is Codec.NF4:
        if u is None:
            code = (x[..., None] > BETWEEN).sum(-1)
        else:
            code = 15 - (NF4[1:] > x[..., None]).sum(-1)
            low, high = NF4[code], NF4[np.minimum(code + 1, 15)]
            code = code + (x - low > u.reshape(x.shape) * (high - low))
        code = np.where(tiny, 7, code)
        return code.ravel(), (NF4[code] * scale).ravel()
    if u is not None:
        x = np.clip(np.floor(x + u.reshape(x.shape)), -LEVELS[codec], LEVELS[codec])
    code = np.where(tiny, F32(0), np.rint(x))
    return code.ravel(), (code * scale).ravel()


def whole(v: Array, codec: Codec) -> Array:
    """Padded with zeros to whole blocks."""
    return np.concatenate([v, np.zeros(-v.size % BLOCK[codec], F32)])


def round_trip(v: Array, how: Encoding | Codec) -> Array:
    codec = how.codec if isinstance(how, Encoding) else how
    return decode(encode(v, how)[0], codec, v.size)


VALUES = st.tuples(
    st.integers(0, 700), st.integers(0, 2**32 - 1), st.sampled_from([1e-38, 1e-31, 1e-4, 1.0, 1e30])
)


@settings(derandomize=True, deadline=None, max_examples=examples(30, 200))
@given(VALUES, st.sampled_from(QUANTIZED), st.booleans(), st.integers(0, 2**64 - 1), st.integers(0, 2**30))
def test_quantized_values_are_the_references(
    values: tuple[int, int, float], codec: Codec, stochastic: bool, seed: int, block: int
) -> None:
    count, source, size = values
    v, first = randn(count, source) * F32(size), 256 * block
    how = Encoding(codec, "stochastic" if stochastic else "nearest", seed=seed)
    data, counts = encode(v, how, first=first)
    padded = whole(v, codec)
    codes, expected = reference(padded, codec, noise(padded.size, seed, first) if stochastic else None)
    np.testing.assert_array_equal(decode(data, codec, count), expected[:count])
    assert (counts.nonfinite, counts.blocks_skipped) == (0, 0)
    if codec is Codec.INT8:
        np.testing.assert_array_equal(data[: codes.size].view(np.int8), codes)
    else:
        pairs = codes.astype(int).reshape(-1, 2, 32) & 15
        np.testing.assert_array_equal(data[: codes.size // 2], (pairs[:, 0] | pairs[:, 1] << 4).ravel())


@pytest.mark.parametrize(("codec", "kind"), [(Codec.F16, np.float16), (Codec.F32, np.float32)])
def test_halves_are_numpys(codec: Codec, kind: type[np.floating]) -> None:
    v = np.concatenate([randn(500) * F32(10.0**e) for e in range(-9, 5)])
    np.testing.assert_array_equal(encode(v, codec)[0].view(kind), v.astype(kind))
    np.testing.assert_array_equal(round_trip(v, codec), v.astype(kind).astype(F32))


def test_bf16_rounds_to_even_and_every_half_decodes() -> None:
    import torch

    v = np.concatenate([randn(5000) * F32(1e-3), np.array([1.00390625, 1.01171875, -0.0, 1e-45], F32)])
    expected = torch.tensor(v).bfloat16()
    np.testing.assert_array_equal(encode(v, Codec.BF16)[0].view(np.int16), expected.view(torch.int16).numpy())
    every = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(
            decode(every.view(np.uint8), "f16", every.size), every.view(np.float16).astype(F32)
        )
    bf16 = torch.tensor(every.view(np.int16)).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(decode(every.view(np.uint8), "bf16", every.size), bf16)


def test_halves_saturate_and_the_residual_keeps_the_rest() -> None:
    v, rest = np.array([1e5, -1e5, 3.4e38, 1.0], F32), np.empty(4, F32)
    data, _ = encode(v, Codec.F16, residual_out=rest)
    assert decode(data, "f16", 4).tolist() == [65504.0, -65504.0, 65504.0, 1.0]
    assert rest[:2].tolist() == [1e5 - 65504, 65504 - 1e5]
    assert np.isfinite(round_trip(v, Codec.BF16)).all()


@pytest.mark.parametrize("codec", LOSSY)
def test_the_error_is_at_most_half_a_step(codec: Codec) -> None:
    v = randn(64 * 256)
    error = np.abs(round_trip(v, codec) - v)
    if codec in QUANTIZED:
        top = np.repeat(np.abs(v.reshape(-1, BLOCK[codec])).max(axis=1), BLOCK[codec])
        step = {Codec.INT8: 1 / 127, Codec.INT4: 1 / 7, Codec.NF4: 1 + NF4[1]}[codec]
        assert (error <= top * step * 0.5 * (1 + 1e-5)).all()
    else:
        assert (error <= np.abs(v) * 2.0 ** (-11 if codec is Codec.F16 else -8)).all()


@pytest.mark.parametrize(("codec", "mean"), [(Codec.INT8, 0.0060), (Codec.NF4, 0.0728)])
def test_errors_on_randn_are_no_worse_than_others(codec: Codec, mean: float) -> None:
    """Mean absolute errors of the same blocks elsewhere: 0.0060 for int8, 0.0728 for NF4."""
    v = randn(1 << 20)
    assert np.abs(round_trip(v, codec) - v).mean() <= mean * 1.005


@pytest.mark.parametrize("codec", QUANTIZED)
def test_stochastic_rounding_has_no_bias(codec: Codec) -> None:
    v, rounds = randn(256, seed=4), 4000
    total = np.zeros(256)
    squares = np.zeros(256)
    for seed in range(rounds):
        x = round_trip(v, Encoding(codec, "stochastic", seed=seed)).astype(np.float64)
        total, squares = total + x, squares + x * x
    mean = total / rounds
    spread = np.sqrt(np.maximum(squares / rounds - mean**2, 1e-12) / rounds)
    z = (mean - v) / spread
    assert np.abs(z).max() < 5.0
    assert abs(z.mean()) < 5 / 16  # 256 values: a common bias would show here
    assert 0.7 < z.std() < 1.3


def test_noise_depends_on_seed_and_place_alone() -> None:
    v = randn(1024)
    how = Encoding(Codec.INT8, "stochastic", seed=7)
    at_once = decode(encode(v, how, first=512)[0], "int8", 1024)
    parts = [decode(encode(v[i : i + 256], how, first=512 + i)[0], "int8", 256) for i in range(0, 1024, 256)]
    np.testing.assert_array_equal(np.concatenate(parts), at_once)
    assert (decode(encode(v, how, first=0)[0], "int8", 1024) != at_once).any()


@pytest.mark.parametrize("codec", [Codec.F32, *LOSSY])
def test_error_feedback_loses_nothing(codec: Codec) -> None:
    """Sent and kept add up to what was given, step by step, save the sum's rounding."""
    kept, sent, given = np.zeros(1000, F32), np.zeros(1000), np.zeros(1000)
    for step in range(50):
        v, left = randn(1000, step), np.empty(1000, F32)
        decoded = decode(encode(v, codec, residual=kept, residual_out=left)[0], codec, 1000)
        np.testing.assert_array_equal(decoded.astype(np.float64) + left, (v + kept).astype(np.float64))
        sent, given, kept = sent + decoded, given + v, left
    assert np.abs(sent + kept - given).max() < 1e-5


@pytest.mark.parametrize("codec", QUANTIZED)
def test_what_is_tiny_stays_in_the_residual(codec: Codec) -> None:
    v, left = np.full(256, 9e-31, F32), np.empty(256, F32)
    data, _ = encode(v, codec, residual_out=left)
    assert (decode(data, codec, 256) == 0).all()
    np.testing.assert_array_equal(left, v)
    assert (decode(encode(v * F32(2), codec)[0], codec, 256) != 0).all()


@pytest.mark.parametrize("codec", [Codec.F32, *LOSSY])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_follows_the_policy(codec: Codec, bad: float) -> None:
    v, kept, left = randn(600), randn(600, 1), np.full(600, 9, F32)
    block = BLOCK.get(codec, 256)
    v[[300, 301]] = bad
    with pytest.raises(errors.NotFinite, match="value 300"):
        encode(v, codec, residual=kept, residual_out=left)
    data, counts = encode(v, Encoding(codec, nonfinite="zero"), residual=kept, residual_out=left)
    assert (counts.nonfinite, counts.blocks_skipped) == (2, 0)
    mended = np.where(np.isfinite(v), v, F32(0))
    np.testing.assert_array_equal(data, encode(mended, codec, residual=kept)[0])
    assert np.isfinite(left).all()
    data, counts = encode(v, Encoding(codec, nonfinite="skip"), residual=kept, residual_out=left)
    assert (counts.nonfinite, counts.blocks_skipped) == (2, 1)
    skipped = slice(300 // block * block, 300 // block * block + block)
    assert (decode(data, codec, 600)[skipped] == 0).all()
    np.testing.assert_array_equal(left[skipped], kept[skipped])


def test_sums_that_overflow_are_not_finite() -> None:
    v = np.full(256, 3e38, F32)
    with pytest.raises(errors.NotFinite):
        encode(v, "int8", residual=v)


@pytest.mark.parametrize("codec", list(Codec))
def test_lengths_are_checked(codec: Codec) -> None:
    for count in (0, 1, 63, 64, 65, 256, 1000):
        data, _ = encode(randn(count), codec)
        assert data.size == encoded_bytes(codec, count)
        for wrong in (data[:-4], np.concatenate([data, data[:4]])):
            if wrong.size != data.size:
                with pytest.raises(errors.InvalidArgument, match="bytes: found"):
                    decode(wrong, codec, count)


@pytest.mark.parametrize("codec", QUANTIZED)
@pytest.mark.parametrize("scale", [np.nan, np.inf])
def test_scales_that_are_not_finite_are_refused(codec: Codec, scale: float) -> None:
    data, _ = encode(randn(300), codec)
    data[-4:] = np.array([scale], F32).view(np.uint8)
    with pytest.raises(errors.SegmentCorrupt, match="scale that is not finite"):
        decode(data, codec, 300)


def test_wrong_arguments_are_named() -> None:
    v = randn(10)
    with pytest.raises(errors.InputError, match="found 'int2'; expected one of f32, bf16"):
        as_codec("int2")
    with pytest.raises(errors.InputError, match="rounding"):
        Encoding(Codec.F16, "stochastic")
    with pytest.raises(errors.InputError, match="feedback"):
        Encoding(Codec.F32, error_feedback=True)
    with pytest.raises(errors.InvalidArgument, match="first: found 64"):
        encode(v, "int8", first=64)
    with pytest.raises(errors.InvalidArgument, match="the same array as residual"):
        encode(v, "int8", residual=v, residual_out=v)
    with pytest.raises(errors.InvalidArgument, match="scale"):
        encode(v, "int8", scale=float("nan"))
    with pytest.raises(errors.InvalidArgument, match="values: found float64"):
        encode(v.astype(np.float64), "int8")  # type: ignore[arg-type]
