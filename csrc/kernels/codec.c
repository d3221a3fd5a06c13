/* codec.c: sizes, the policy for non-finite values, and the public encode and decode. The arithmetic is in
 * codec_template.h. */
#include "kernels/codec.h"

#include <math.h>
#include <string.h>

#include "error.h"
#include "kernels/kernels.h"

const float codec_nf4_codebook[16] = {-1.0f,         -0.696192801f, -0.525073051f,  -0.394917488f,
                                      -0.284441382f, -0.18477343f,  -0.0910500363f, 0.0f,
                                      0.0795802996f, 0.160930201f,  0.246112302f,   0.337915242f,
                                      0.440709829f,  0.562617004f,  0.722956836f,   1.0f};

/* (codebook[k] + codebook[k + 1]) / 2, rounded once; the last is never passed. */
const float codec_nf4_between[16] = {-0.848096371f, -0.610632896f, -0.45999527f,   -0.33967942f,
                                     -0.234607399f, -0.137911737f, -0.0455250181f, 0.0397901498f,
                                     0.120255247f,  0.203521252f,  0.292013764f,   0.389312536f,
                                     0.501663446f,  0.64278692f,   0.861478448f,   INFINITY};

static const struct shape {
    uint32_t block, bits;
    bool scaled;
} shapes[CODECS] = {
    [PYPS_F32] = {1, 32, false},  [PYPS_BF16] = {BLOCK_MAX, 16, false}, [PYPS_F16] = {BLOCK_MAX, 16, false},
    [PYPS_INT8] = {256, 8, true}, [PYPS_INT4] = {64, 4, true},          [PYPS_NF4] = {64, 4, true},
};

uint32_t codec_block(uint32_t codec) { return shapes[codec].block; }

static uint64_t blocks(uint32_t codec, uint64_t count) {
    return count / shapes[codec].block + (count % shapes[codec].block != 0);
}

uint64_t codec_codes(uint32_t codec, uint64_t count) {
    if (!shapes[codec].scaled) return count * shapes[codec].bits / 8;
    return blocks(codec, count) * shapes[codec].block * shapes[codec].bits / 8;
}

uint64_t codec_scales(uint32_t codec, uint64_t count) {
    return shapes[codec].scaled ? blocks(codec, count) : 0;
}

bool codec_replace_nonfinite(struct encoding *e, const float *x, const float *r, float *v, size_t n,
                             uint64_t index, uint32_t *top) {
    float largest = 0;
    bool skip = e->nonfinite == PYPS_NONFINITE_SKIP;
    for (size_t i = 0; i < n; i++) {
        float kept = r ? r[i] : 0.0f, sum = e->scale * x[i] + kept;
        bool finite = isfinite(sum);
        if (!finite && e->nonfinite == PYPS_NONFINITE_ERROR) {
            e->stopped_at = index + i;
            return false;
        }
        e->found_nonfinite += !finite;
        v[i] = finite && !skip ? sum : kept;
        largest = fmaxf(largest, fabsf(v[i]));
    }
    e->skipped += skip;
    if (skip) largest = 0; /* a skipped block is sent as zeros; its residual stays */
    memcpy(top, &largest, sizeof largest);
    return true;
}

int codec_encode(struct encoding *e) {
    if (kernels_chosen()->encode(e)) return PYPS_OK;
    return fail(PYPS_ENONFINITE, "value %lu: found one that is not finite; the policy is to stop",
                e->stopped_at);
}

bool codec_scales_finite(const float *scales, uint64_t count) {
    for (uint64_t i = 0; i < count; i++)
        if (!isfinite(scales[i])) return false;
    return true;
}

uint64_t pyps_encoded_bytes(uint32_t codec, uint64_t count) {
    if (codec >= CODECS || count > UINT64_C(1) << 44) return 0;
    return codec_codes(codec, count) + sizeof(float) * codec_scales(codec, count);
}

int codec_check_data(const char *what, uint32_t codec, uint64_t count, const void *data, uint64_t bytes) {
    if (codec >= CODECS)
        return fail(PYPS_EINVAL, "%s: codec: found %u; expected PYPS_F32 to PYPS_NF4", what, codec);
    if (count > UINT64_C(1) << 44)
        return fail(PYPS_EINVAL, "%s: count: found %lu; expected at most 2^44", what, count);
    if (bytes != pyps_encoded_bytes(codec, count))
        return fail(PYPS_EINVAL, "%s: bytes: found %lu; expected %lu for %lu values", what, bytes,
                    pyps_encoded_bytes(codec, count), count);
    if (bytes && !data) return fail(PYPS_EINVAL, "%s: data: found NULL; expected a pointer", what);
    if ((uintptr_t)data % sizeof(float))
        return fail(PYPS_EINVAL, "%s: data: found address %p; expected a multiple of 4", what, data);
    return PYPS_OK;
}

int codec_check_args(const char *what, const pyps_encode_args *a) {
    if (a->rounding > PYPS_STOCHASTIC)
        return fail(PYPS_EINVAL, "%s: rounding: found %u; expected PYPS_NEAREST or PYPS_STOCHASTIC", what,
                    a->rounding);
    if (a->rounding == PYPS_STOCHASTIC && a->codec < CODECS && !shapes[a->codec].scaled)
        return fail(PYPS_EINVAL,
                    "%s: rounding: found PYPS_STOCHASTIC; f32, bf16 and f16 only round to "
                    "nearest",
                    what);
    if (a->nonfinite > PYPS_NONFINITE_ZERO)
        return fail(PYPS_EINVAL, "%s: nonfinite: found %u; expected PYPS_NONFINITE_ERROR, _SKIP or _ZERO",
                    what, a->nonfinite);
    if (!isfinite(a->scale))
        return fail(PYPS_EINVAL, "%s: scale: found %g; expected a finite number", what, (double)a->scale);
    if (a->first % BLOCK_MAX)
        return fail(PYPS_EINVAL, "%s: first: found %lu; expected a multiple of %u", what, a->first,
                    BLOCK_MAX);
    return PYPS_OK;
}

int pyps_encode(const pyps_encode_args *given_args, const float *values, uint64_t count, void *out,
                uint64_t bytes, pyps_encode_result *result) {
    pyps_encode_args copy;
    const pyps_encode_args *a = &copy;
    int rc = read_struct("encode", given_args, scale, &copy);
    if (!rc) rc = codec_check_args("encode", a);
    if (count && !rc) rc = require(values);
    if (rc || (rc = codec_check_data("encode", a->codec, count, out, bytes))) return rc;
    if (a->residual_out && a->residual_out == a->residual)
        return fail(PYPS_EINVAL,
                    "encode: residual_out: the same array as residual; expected another, so that "
                    "a refused step can keep the old one");
    struct encoding e = {.codec = a->codec,
                         .stochastic = a->rounding == PYPS_STOCHASTIC,
                         .nonfinite = a->nonfinite,
                         .scale = a->scale,
                         .seed = a->seed,
                         .first = a->first,
                         .values = values,
                         .residual = a->residual,
                         .residual_out = a->residual_out,
                         .codes = out,
                         .count = count};
    e.scales = (float *)(void *)(e.codes + codec_codes(a->codec, count));
    rc = codec_encode(&e);
    if (result) *result = (pyps_encode_result){.nonfinite = e.found_nonfinite, .blocks_skipped = e.skipped};
    return rc;
}

int pyps_decode(uint32_t codec, const void *data, uint64_t bytes, float *out, uint64_t count) {
    int rc = codec_check_data("decode", codec, count, data, bytes);
    if (rc || (count && (rc = require(out)))) return rc;
    const uint8_t *codes = data;
    const float *scales = (const float *)(const void *)(codes + codec_codes(codec, count));
    if (!codec_scales_finite(scales, codec_scales(codec, count)))
        return fail(PYPS_ECORRUPT, "decode: found a scale that is not finite; the data is damaged");
    kernels_chosen()->decode(codec, out, codes, scales, count);
    return PYPS_OK;
}
