/* kernels_scalar.c: the specification of the arithmetic. A compiler may vectorise it: same bits. */
#include <math.h>
#include <stdint.h>
#include <string.h>

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* |x| at most 65504. Adding 2^(e+13) aligns the rounding with fp16's last bit, subnormals included. */
static inline uint32_t half_of(float x) {
    uint32_t sign = bits_of(x) >> 16 & 0x8000, bits = bits_of(x) & 0x7fffffff;
    if (bits < 0x38800000) /* below 2^-14: a whole number of 2^-24 */
        return sign | (bits_of(float_of(bits) + 0.5f) - bits_of(0.5f));
    return sign | (bits - 0x38000000 + 0x0fff + (bits >> 13 & 1)) >> 13;
}

static inline float half_to_float(uint32_t half) {
    uint32_t sign = (half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 0x3ff;
    if (exponent == 0) return float_of(bits_of((float)mantissa * 0x1p-24f) | sign);
    if (exponent == 31) /* infinite, or NaN and then quiet */
        return float_of(sign | 0x7f800000 | mantissa << 13 | (mantissa ? 0x400000u : 0));
    return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
}

#define WIDTH 1
#define VEC   float
#define TARGET
#define LOAD(p)                   (*(p))
#define STORE(p, x)               (*(p) = (x))
#define STREAM                    STORE
#define STREAM_END()              (void)0
#define SET(x)                    (x)
#define ADD(a, b)                 ((a) + (b))
#define SUB(a, b)                 ((a) - (b))
#define MUL(a, b)                 ((a) * (b))
#define DIV(a, b)                 ((a) / (b))
#define SQRT(a)                   sqrtf(a)
#define LOWER(a, b)               ((a) < (b) ? (a) : (b))
#define UPPER(a, b)               ((a) > (b) ? (a) : (b))
#define IVEC                      uint32_t
#define ISET(x)                   ((uint32_t)(x))
#define LANES                     0u
#define IAND(a, b)                ((a) & (b))
#define IOR(a, b)                 ((a) | (b))
#define IXOR(a, b)                ((a) ^ (b))
#define IADD(a, b)                ((a) + (b))
#define ISUB(a, b)                ((a) - (b))
#define IMAX(a, b)                ((a) > (b) ? (a) : (b))
#define IMIN(a, b)                ((int32_t)(a) < (int32_t)(b) ? (a) : (b))
#define UMIN(a, b)                ((a) < (b) ? (a) : (b))
#define ISHL(a, n)                ((a) << (n))
#define ISHR(a, n)                ((a) >> (n))
#define ISAR(a, n)                ((uint32_t)((int32_t)(a) >> (n)))
#define MULHILO(hi, lo, a, m)     ((hi) = (uint32_t)((uint64_t)(a) * (m) >> 32), (lo) = (a) * (m))
#define BITS(x)                   bits_of(x)
#define FROM_BITS(x)              float_of(x)
#define ROUND(x)                  ((uint32_t)(int32_t)lrintf(x))
#define TO_FLOAT(x)               ((float)(int32_t)(x))
#define FLOOR(x)                  floorf(x)
#define COUNT_GT(n, a, b)         ((n) + ((a) > (b)))
#define LOOKUP(table, i)          ((table)[i])
#define GET_BYTES(p)              ((uint32_t)*(p))
#define PUT_BYTES(p, x)           (*(p) = (uint8_t)(x))
#define GET_SHORTS(p)             ((uint32_t)(p)[0] | (uint32_t)(p)[1] << 8)
#define PUT_SHORTS(p, x)          ((p)[0] = (uint8_t)(x), (p)[1] = (uint8_t)((x) >> 8))
#define TO_HALF(x)                half_of(x)
#define FROM_HALF(x)              half_to_float(x)
#define NAME(x)                   scalar_##x
#define TABLE                     kernels_scalar
#define TABLE_NAME                "scalar"
#define TAIL(member, done, sound) return sound
#define LOOK_TAIL(member)         (void)0

#include "kernels/kernels_template.h"
