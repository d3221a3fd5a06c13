/* codec.h: the encoded form of a run of floats.
 *
 *     codec   block  code      scale of a block       a value is
 *     f32         -  4 bytes   -                      itself
 *     bf16, f16   -  2 bytes   -                      the nearest half
 *     int8      256  1 byte    amax / 127             code * scale
 *     int4       64  4 bits    amax / 7               code * scale
 *     nf4        64  4 bits    amax                   codebook[code] * scale
 *
 * Encoded data is all codes, then all scales (fp32). A last block that is not full is coded as if zeros
 * followed. Two 4-bit codes share a byte: byte i of a block holds value i below and value i + 32 above. The
 * codes of int8 and int4 are two's complement; the codebook is that of QLoRA (Dettmers et al. 2023, appendix
 * E).
 */
#ifndef PYPS_CODEC_H
#define PYPS_CODEC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "pyps.h"

#define CODECS        6u
#define BLOCK_MAX     256u /* the largest block of any codec, and what non-finite values cost */
#define INFINITE_BITS UINT32_C(0x7f800000) /* of fp32: from here on upwards a magnitude is not finite */
#define TINY_BITS     UINT32_C(0x0da24260) /* 1e-30f: below it a block's scale is 0 */
#define F16_MAX       65504.0f
#define BF16_MAX      0x1.fep127f
#define NF4_ZERO      UINT8_C(0x77) /* two codes of 0.0 */

/* An encode in progress. `first` is the flat index of values[0], a multiple of 64. */
struct encoding {
    uint32_t codec;
    bool stochastic;
    uint32_t nonfinite; /* the policy: PYPS_NONFINITE_ERROR ... */
    float scale;
    uint64_t seed, first;
    const float *values, *residual;
    float *residual_out;
    uint8_t *codes;
    float *scales;
    size_t count;

    /* out: non-finite values, blocks skipped, flat index of the value that stopped the encode */
    uint64_t found_nonfinite, skipped, stopped_at;
};

extern const float codec_nf4_codebook[16];
extern const float codec_nf4_between[16]; /* the middle of codes k and k + 1 */

uint32_t codec_block(uint32_t codec);                  /* values that are coded together */
uint64_t codec_codes(uint32_t codec, uint64_t count);  /* bytes */
uint64_t codec_scales(uint32_t codec, uint64_t count); /* how many */

/* Applies the policy for non-finite values to a block that has one; false: stop. Writes the values to encode
 * to `v`, and the bits of their largest magnitude to `top`. x and r (NULL: none) are the block's values and
 * residual, index is that of x[0]. */
bool codec_replace_nonfinite(struct encoding *e, const float *x, const float *r, float *v, size_t n,
                             uint64_t index, uint32_t *top);

/* PYPS_OK, or PYPS_EINVAL with the field that is wrong; `what` leads the message. */
int codec_check_args(const char *what, const pyps_encode_args *args);

int codec_check_data(const char *what, uint32_t codec, uint64_t count, const void *data, uint64_t bytes);

/* Needs checked arguments. PYPS_ENONFINITE if the policy stops; then only `codes` and `residual_out` have
 * changed. */
int codec_encode(struct encoding *e);
bool codec_scales_finite(const float *scales, uint64_t count);

#endif
