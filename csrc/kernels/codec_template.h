/* codec_template.h: encode and decode over an abstract vector; see kernels_template.h for the float
 * operations. A file for an instruction set defines besides
 *
 *     IVEC, ISET, LANES             32-bit lanes, broadcast, {0, 1, 2, ...}
 *     IAND, IOR, IXOR, IADD, ISUB   bits, wrapping sums and differences
 *     IMAX                          of magnitudes' bits, so positive
 *     IMIN, UMIN                    of signed, of unsigned numbers
 *     ISHL, ISHR, ISAR              shifts by a constant: left, right filling with zeros, with signs
 *     MULHILO(hi, lo, a, m)         the 64-bit products of a's lanes with the constant m
 *     BITS, FROM_BITS               the same lanes as IVEC, as VEC
 *     ROUND, TO_FLOAT, FLOOR        to the nearest whole number, ties to even; back; downwards
 *     COUNT_GT(n, a, b)             n + 1 where a > b, else n
 *     LOOKUP(table, i)              table[i], 16 floats
 *     GET_BYTES, PUT_BYTES          WIDTH bytes; zero-extended, truncated
 *     GET_SHORTS, PUT_SHORTS        WIDTH 16-bit units; the same
 *     TO_HALF, FROM_HALF            fp16 in the low 16 bits of the lanes
 *
 * The noise of stochastic rounding is Philox4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011) with the seed as
 * key: of the 64 values from index 64 g on, value l + 16 j takes word j of counter 16 g + l. It depends on
 * seed and index alone. Parameters that are kept as bf16 take half a word each, of seven rounds (the fewest that pass
 * the paper's tests) and counters with the version above: of the 128 from index 128 g on, value l + 16 j takes the lower
 * half, and the one 64 later the upper half.
 */
#include "kernels/codec.h"

#define INLINE TARGET __attribute__((always_inline)) static inline

/* The bits of the largest magnitude; as integers they order as the magnitudes do, NaN above all. */
INLINE uint32_t NAME(largest)(IVEC top) {
    uint32_t lanes[WIDTH], greatest = 0;
    memcpy(lanes, &top, sizeof lanes);
    for (int i = 0; i < WIDTH; i++) greatest = lanes[i] > greatest ? lanes[i] : greatest;
    return greatest;
}

INLINE uint32_t NAME(magnitude)(const float *x, size_t n) {
    IVEC top = ISET(0);
    for (size_t i = 0; i < n; i += WIDTH) {
        top = IMAX(top, IAND(BITS(LOAD(x + i)), ISET(0x7fffffff)));
    }
    return NAME(largest)(top);
}

/* v = scale * x + r */
INLINE uint32_t NAME(scale_and_add)(float *v, const float *x, const float *r, float scale, size_t n) {
    IVEC top = ISET(0);
    for (size_t i = 0; i < n; i += WIDTH) {
        VEC sum = MUL(SET(scale), LOAD(x + i));
        if (r) sum = ADD(sum, LOAD(r + i));
        STORE(v + i, sum);
        top = IMAX(top, IAND(BITS(sum), ISET(0x7fffffff)));
    }
    return NAME(largest)(top);
}

/* The four words of each of the counters {counter + lane, above}; `counter` is a multiple of WIDTH. */
INLINE void NAME(philox)(IVEC words[4], int rounds, uint64_t counter, uint64_t above, uint64_t key) {
    IVEC c0 = IADD(ISET((uint32_t)counter), LANES), c1 = ISET((uint32_t)(counter >> 32));
    IVEC c2 = ISET((uint32_t)above), c3 = ISET((uint32_t)(above >> 32)), high0, low0, high1, low1;
    uint32_t key0 = (uint32_t)key, key1 = (uint32_t)(key >> 32);
    for (int round = 0; round < rounds; round++, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u) {
        MULHILO(high0, low0, c0, 0xD2511F53u);
        MULHILO(high1, low1, c2, 0xCD9E8D57u);
        c0 = IXOR(IXOR(high1, c1), ISET(key0)), c1 = low1;
        c2 = IXOR(IXOR(high0, c3), ISET(key1)), c3 = low0;
    }
    words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

/* 64 numbers from 0 up to, but not including, 1. `at` is a multiple of 64. */
INLINE void NAME(noise)(float *u, uint64_t seed, uint64_t at) {
    const VEC unit = SET(0x1p-24f);
    for (int lane = 0; lane < 16; lane += WIDTH) {
        IVEC words[4];
        NAME(philox)(words, 10, at / 4 + (uint64_t)lane, 0, seed);
        for (int j = 0; j < 4; j++) STORE(u + 16 * j + lane, MUL(TO_FLOAT(ISHR(words[j], 8)), unit));
    }
}

/* bf16: the upper half of a sum with 16 bits of noise. Infinities stay so. NaN, of which the bits may be all ones, must
 * not become a number by a carry. */
INLINE IVEC NAME(upper_half)(VEC x, IVEC noise) {
    IVEC bits = UMIN(IMIN(BITS(x), ISET(0x7fff0000)), ISET(0xffff0000));
    return ISHR(IADD(bits, noise), 16);
}

INLINE IVEC NAME(nearest_half)(VEC x) {
    return NAME(upper_half)(x, IADD(ISET(0x7fff), IAND(ISHR(BITS(x), 16), ISET(1))));
}

/* The 128 values from index 128 `group` on; `how` NULL: to nearest. */
INLINE void NAME(narrow_group)(uint8_t *to, const float *x, uint64_t group, const struct rounding *how) {
    for (int lane = 0; lane < 16; lane += WIDTH) {
        IVEC words[4];
        if (how) NAME(philox)(words, 7, 16 * group + (uint64_t)lane, how->version, how->seed);
        for (int i = lane, j = 0; j < 4; i += 16, j++) {
            VEC low = LOAD(x + i), high = LOAD(x + 64 + i);
            PUT_SHORTS(to + 2 * i,
                       how ? NAME(upper_half)(low, IAND(words[j], ISET(0xffff))) : NAME(nearest_half)(low));
            PUT_SHORTS(to + 128 + 2 * i,
                       how ? NAME(upper_half)(high, ISHR(words[j], 16)) : NAME(nearest_half)(high));
        }
    }
}

TARGET static void NAME(narrow)(uint8_t *to, const float *from, size_t length, const struct rounding *how) {
    for (size_t done = 0, count; done < length; done += count) {
        uint64_t at = (how ? how->first : 0) + done;
        size_t before = at % 128;
        count = length - done < 128 - before ? length - done : 128 - before;
        if (count == 128) {
            NAME(narrow_group)(to + 2 * done, from + done, at / 128, how);
            continue;
        }
        float x[128] = {0};
        uint8_t halves[256];
        memcpy(x + before, from + done, count * sizeof *x);
        NAME(narrow_group)(halves, x, at / 128, how);
        memcpy(to + 2 * done, halves + 2 * before, 2 * count);
    }
}

/* A linear code of one vector, and what decode will make of it. u: noise, or NULL to round to nearest. */
INLINE IVEC NAME(linear)(VEC v, float inverse, float limit, const float *u) {
    VEC x = MUL(v, SET(inverse));
    if (u) x = UPPER(SET(-limit), LOWER(SET(limit), FLOOR(ADD(x, LOAD(u)))));
    return ROUND(x);
}

INLINE IVEC NAME(nf4)(VEC v, float inverse, const float *u) {
    VEC x = MUL(v, SET(inverse));
    IVEC code = ISET(0);
    if (!u) {
        for (int k = 0; k < 15; k++) code = COUNT_GT(code, x, SET(codec_nf4_between[k]));
        return code;
    }
    IVEC above = ISET(0);
    for (int k = 1; k < 16; k++) above = COUNT_GT(above, SET(codec_nf4_codebook[k]), x);
    code = ISUB(ISET(15), above);
    IVEC next = COUNT_GT(code, SET(15.0f), TO_FLOAT(code)); /* the last has none above it */
    VEC low = LOOKUP(codec_nf4_codebook, code);
    return COUNT_GT(code, SUB(x, low), MUL(LOAD(u), SUB(LOOKUP(codec_nf4_codebook, next), low)));
}

INLINE void NAME(store_residual)(float *residual, size_t i, VEC v, VEC decoded) {
    if (residual) STORE(residual + i, SUB(v, decoded));
}

INLINE void NAME(code_int8)(uint8_t *codes, float *out, const float *v, float amax, float scale,
                            const float *u) {
    float inverse = 127.0f / amax;
    for (size_t i = 0; i < 256; i += WIDTH) {
        IVEC q = NAME(linear)(LOAD(v + i), inverse, 127.0f, u ? u + i : NULL);
        PUT_BYTES(codes + i, q);
        NAME(store_residual)(out, i, LOAD(v + i), MUL(TO_FLOAT(q), SET(scale)));
    }
}

INLINE void NAME(code_int4)(uint8_t *codes, float *out, const float *v, float amax, float scale,
                            const float *u) {
    float inverse = 7.0f / amax;
    for (size_t i = 0; i < 32; i += WIDTH) {
        IVEC low = NAME(linear)(LOAD(v + i), inverse, 7.0f, u ? u + i : NULL);
        IVEC high = NAME(linear)(LOAD(v + 32 + i), inverse, 7.0f, u ? u + 32 + i : NULL);
        PUT_BYTES(codes + i, IOR(IAND(low, ISET(15)), ISHL(high, 4)));
        NAME(store_residual)(out, i, LOAD(v + i), MUL(TO_FLOAT(low), SET(scale)));
        NAME(store_residual)(out, 32 + i, LOAD(v + 32 + i), MUL(TO_FLOAT(high), SET(scale)));
    }
}

INLINE void NAME(code_nf4)(uint8_t *codes, float *out, const float *v, float amax, float scale,
                           const float *u) {
    float inverse = 1.0f / amax;
    for (size_t i = 0; i < 32; i += WIDTH) {
        IVEC low = NAME(nf4)(LOAD(v + i), inverse, u ? u + i : NULL);
        IVEC high = NAME(nf4)(LOAD(v + 32 + i), inverse, u ? u + 32 + i : NULL);
        PUT_BYTES(codes + i, IOR(low, ISHL(high, 4)));
        if (!out) continue;
        NAME(store_residual)(out, i, LOAD(v + i), MUL(LOOKUP(codec_nf4_codebook, low), SET(scale)));
        NAME(store_residual)(out, 32 + i, LOAD(v + 32 + i),
                             MUL(LOOKUP(codec_nf4_codebook, high), SET(scale)));
    }
}

INLINE size_t NAME(block_bytes)(uint32_t codec, size_t n) {
    return codec == PYPS_F32 ? 4 * n : codec < PYPS_INT8 ? 2 * n : codec == PYPS_INT8 ? n : n / 2;
}

/* Halves saturate: a finite value never becomes an infinite one. */
INLINE void NAME(code_half)(uint32_t codec, uint8_t *codes, float *out, const float *v, size_t n) {
    if (codec == PYPS_F32) {
        memcpy(codes, v, n * sizeof *v);
        if (out) memset(out, 0, n * sizeof *out);
        return;
    }
    const VEC high = SET(codec == PYPS_F16 ? F16_MAX : BF16_MAX);
    const VEC low = SET(codec == PYPS_F16 ? -F16_MAX : -BF16_MAX);
    for (size_t i = 0; i < n; i += WIDTH) {
        VEC x = LOAD(v + i), y = UPPER(low, LOWER(high, x));
        if (codec == PYPS_F16) {
            IVEC half = TO_HALF(y);
            PUT_SHORTS(codes + 2 * i, half);
            NAME(store_residual)(out, i, x, FROM_HALF(half));
        } else {
            IVEC bits = BITS(y);
            bits = ISHR(IADD(bits, IADD(ISET(0x7fff), IAND(ISHR(bits, 16), ISET(1)))), 16);
            PUT_SHORTS(codes + 2 * i, bits);
            NAME(store_residual)(out, i, x, FROM_BITS(ISHL(bits, 16)));
        }
    }
}

/* Encodes one whole block; false if the policy stops at a value that is not finite. */
INLINE bool NAME(code_block)(struct encoding *e, uint32_t codec, size_t n, uint64_t index, const float *x,
                             const float *r, float *out, uint8_t *codes, float *scale) {
    float scratch[BLOCK_MAX], *sum = out ? out : scratch;
    const float *v = sum;
    uint32_t top;
    if (r || out || e->scale != 1.0f) {
        top = NAME(scale_and_add)(sum, x, r, e->scale, n);
    } else {
        v = x;
        top = NAME(magnitude)(x, n);
    }
    if (top >= INFINITE_BITS) {
        if (!codec_replace_nonfinite(e, x, r, sum, n, index, &top)) return false;
        v = sum;
    }
    bool scaled = codec >= PYPS_INT8;
    if (scaled) *scale = 0;
    if (top < (scaled ? TINY_BITS : 1)) { /* too small, or skipped: everything stays in the residual */
        memset(codes, codec == PYPS_NF4 ? NF4_ZERO : 0, NAME(block_bytes)(codec, n));
        return true;
    }
    if (!scaled) {
        NAME(code_half)(codec, codes, out, v, n);
        return true;
    }
    float amax, noise[BLOCK_MAX], *u = e->stochastic ? noise : NULL;
    memcpy(&amax, &top, sizeof amax);
    for (size_t i = 0; u && i < n; i += 64) NAME(noise)(u + i, e->seed, index + i);
    *scale = codec == PYPS_INT8 ? amax / 127.0f : codec == PYPS_INT4 ? amax / 7.0f : amax;
    if (codec == PYPS_INT8) NAME(code_int8)(codes, out, v, amax, *scale, u);
    if (codec == PYPS_INT4) NAME(code_int4)(codes, out, v, amax, *scale, u);
    if (codec == PYPS_NF4) NAME(code_nf4)(codes, out, v, amax, *scale, u);
    return true;
}

INLINE bool NAME(code_last)(struct encoding *e, uint32_t codec, size_t n, uint64_t at, uint8_t *codes,
                            float *scale) {
    float x[BLOCK_MAX] = {0}, r[BLOCK_MAX] = {0}, out[BLOCK_MAX];
    uint8_t whole[4 * BLOCK_MAX];
    size_t left = e->count - at;
    memcpy(x, e->values + at, left * sizeof *x);
    if (e->residual) memcpy(r, e->residual + at, left * sizeof *r);
    bool done = NAME(code_block)(e, codec, n, e->first + at, x, e->residual ? r : NULL,
                                 e->residual_out ? out : NULL, whole, scale);
    if (!done) return false;
    memcpy(codes, whole, codec_codes(codec, left));
    if (e->residual_out) memcpy(e->residual_out + at, out, left * sizeof *out);
    return true;
}

INLINE bool NAME(code_run)(struct encoding *e, uint32_t codec, size_t n) {
    const bool scaled = codec >= PYPS_INT8;
    const size_t block_bytes = NAME(block_bytes)(codec, n);
    float unused;
    uint64_t at = 0, block = 0;
    for (; at + n <= e->count; at += n, block++)
        if (!NAME(code_block)(e, codec, n, e->first + at, e->values + at,
                              e->residual ? e->residual + at : NULL,
                              e->residual_out ? e->residual_out + at : NULL, e->codes + block * block_bytes,
                              scaled ? e->scales + block : &unused))
            return false;
    if (at == e->count) return true;
    return NAME(code_last)(e, codec, n, at, e->codes + block * block_bytes,
                           scaled ? e->scales + block : &unused);
}

TARGET static bool NAME(encode)(struct encoding *e) {
    switch (e->codec) {
    case PYPS_BF16:
        return NAME(code_run)(e, PYPS_BF16, BLOCK_MAX);
    case PYPS_F16:
        return NAME(code_run)(e, PYPS_F16, BLOCK_MAX);
    case PYPS_INT8:
        return NAME(code_run)(e, PYPS_INT8, 256);
    case PYPS_INT4:
        return NAME(code_run)(e, PYPS_INT4, 64);
    case PYPS_NF4:
        return NAME(code_run)(e, PYPS_NF4, 64);
    default:
        return NAME(code_run)(e, PYPS_F32, BLOCK_MAX);
    }
}

/* 4-bit codes of one block */
INLINE void NAME(read_nibbles)(uint32_t codec, float *out, const uint8_t *codes, float scale) {
    for (size_t i = 0; i < 32; i += WIDTH) {
        IVEC both = GET_BYTES(codes + i);
        if (codec == PYPS_INT4) {
            STORE(out + i, MUL(TO_FLOAT(ISAR(ISHL(both, 28), 28)), SET(scale)));
            STORE(out + 32 + i, MUL(TO_FLOAT(ISAR(ISHL(both, 24), 28)), SET(scale)));
        } else {
            STORE(out + i, MUL(LOOKUP(codec_nf4_codebook, IAND(both, ISET(15))), SET(scale)));
            STORE(out + 32 + i, MUL(LOOKUP(codec_nf4_codebook, ISHR(both, 4)), SET(scale)));
        }
    }
}

INLINE void NAME(read_block)(uint32_t codec, float *out, const uint8_t *codes, float scale, size_t n) {
    if (codec == PYPS_INT4 || codec == PYPS_NF4) {
        NAME(read_nibbles)(codec, out, codes, scale);
        return;
    }
    for (size_t i = 0; i < n; i += WIDTH) {
        if (codec == PYPS_INT8)
            STORE(out + i, MUL(TO_FLOAT(ISAR(ISHL(GET_BYTES(codes + i), 24), 24)), SET(scale)));
        else if (codec == PYPS_F16) STORE(out + i, FROM_HALF(GET_SHORTS(codes + 2 * i)));
        else STORE(out + i, FROM_BITS(ISHL(GET_SHORTS(codes + 2 * i), 16)));
    }
}

INLINE void NAME(read_run)(uint32_t codec, float *out, const uint8_t *codes, const float *scales,
                           size_t count, size_t n) {
    const bool scaled = codec >= PYPS_INT8;
    const size_t block_bytes = NAME(block_bytes)(codec, n);
    size_t at = 0, block = 0;
    for (; at + n <= count; at += n, block++)
        NAME(read_block)(codec, out + at, codes + block * block_bytes, scaled ? scales[block] : 1.0f, n);
    if (at == count) return;
    float whole[BLOCK_MAX];
    uint8_t padded[2 * BLOCK_MAX] = {0};
    memcpy(padded, codes + block * block_bytes, codec_codes(codec, count - at));
    NAME(read_block)(codec, whole, padded, scaled ? scales[block] : 1.0f, n);
    memcpy(out + at, whole, (count - at) * sizeof *out);
}

TARGET static void NAME(decode)(uint32_t codec, float *out, const uint8_t *codes, const float *scales,
                                size_t count) {
    switch (codec) {
    case PYPS_BF16:
        NAME(read_run)(PYPS_BF16, out, codes, scales, count, BLOCK_MAX);
        break;
    case PYPS_F16:
        NAME(read_run)(PYPS_F16, out, codes, scales, count, BLOCK_MAX);
        break;
    case PYPS_INT8:
        NAME(read_run)(PYPS_INT8, out, codes, scales, count, 256);
        break;
    case PYPS_INT4:
        NAME(read_run)(PYPS_INT4, out, codes, scales, count, 64);
        break;
    case PYPS_NF4:
        NAME(read_run)(PYPS_NF4, out, codes, scales, count, 64);
        break;
    default:
        memcpy(out, codes, count * sizeof *out);
    }
}
