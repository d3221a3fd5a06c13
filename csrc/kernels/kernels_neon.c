/* kernels_neon.c: four lanes of a 64-bit Arm. No FMA, as in kernels_avx2.c. */
#if defined(__aarch64__)
#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#define WIDTH 4
#define VEC   float32x4_t
#define TARGET
#define LOAD(p)           vld1q_f32(p)
#define STORE(p, x)       vst1q_f32(p, x)
#define STREAM            STORE
#define STREAM_END()      (void)0
#define SET(x)            vdupq_n_f32(x)
#define ADD(a, b)         vaddq_f32(a, b)
#define SUB(a, b)         vsubq_f32(a, b)
#define MUL(a, b)         vmulq_f32(a, b)
#define DIV(a, b)         vdivq_f32(a, b)
#define SQRT(a)           vsqrtq_f32(a)
#define LOWER             neon_lower
#define UPPER             neon_upper
#define IVEC              uint32x4_t
#define ISET(x)           vdupq_n_u32((uint32_t)(x))
#define LANES             ((uint32x4_t){0, 1, 2, 3})
#define IAND(a, b)        vandq_u32(a, b)
#define IOR(a, b)         vorrq_u32(a, b)
#define IXOR(a, b)        veorq_u32(a, b)
#define IADD(a, b)        vaddq_u32(a, b)
#define ISUB(a, b)        vsubq_u32(a, b)
#define IMAX(a, b)        vmaxq_u32(a, b)
#define IMIN(a, b)        vreinterpretq_u32_s32(vminq_s32(vreinterpretq_s32_u32(a), vreinterpretq_s32_u32(b)))
#define UMIN(a, b)        vminq_u32(a, b)
#define ISHL(a, n)        vshlq_n_u32(a, n)
#define ISHR(a, n)        vshrq_n_u32(a, n)
#define ISAR(a, n)        vreinterpretq_u32_s32(vshrq_n_s32(vreinterpretq_s32_u32(a), n))
#define BITS(x)           vreinterpretq_u32_f32(x)
#define FROM_BITS(x)      vreinterpretq_f32_u32(x)
#define ROUND(x)          vreinterpretq_u32_s32(vcvtnq_s32_f32(x))
#define TO_FLOAT(x)       vcvtq_f32_s32(vreinterpretq_s32_u32(x))
#define FLOOR(x)          vrndmq_f32(x)
#define COUNT_GT(n, a, b) vsubq_u32(n, vcgtq_f32(a, b))
#define LOOKUP            neon_lookup
#define GET_BYTES         neon_get_bytes
#define PUT_BYTES         neon_put_bytes
#define GET_SHORTS(p)     vmovl_u16(vreinterpret_u16_u8(vld1_u8(p)))
#define PUT_SHORTS(p, x)  vst1_u8(p, vreinterpret_u8_u16(vmovn_u32(x)))
#define TO_HALF(x)        vmovl_u16(vreinterpret_u16_f16(vcvt_f16_f32(x)))
#define FROM_HALF(x)      vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(x)))
#define NAME(x)           neon_##x
#define TABLE             kernels_neon
#define TABLE_NAME        "neon"
#define MULHILO(hi, lo, a, m)                                                                                \
    do {                                                                                                     \
        const uint64x2_t below_ = vmull_u32(vget_low_u32(a), vdup_n_u32(m));                                 \
        const uint64x2_t above_ = vmull_high_u32(a, vdupq_n_u32(m));                                         \
        (lo) = vuzp1q_u32(vreinterpretq_u32_u64(below_), vreinterpretq_u32_u64(above_));                     \
        (hi) = vuzp2q_u32(vreinterpretq_u32_u64(below_), vreinterpretq_u32_u64(above_));                     \
    } while (0)

static inline float32x4_t neon_lower(float32x4_t a, float32x4_t b) {
    return vbslq_f32(vcltq_f32(a, b), a, b);
}
static inline float32x4_t neon_upper(float32x4_t a, float32x4_t b) {
    return vbslq_f32(vcgtq_f32(a, b), a, b);
}

static inline uint32x4_t neon_get_bytes(const uint8_t *p) {
    uint32_t four;
    memcpy(&four, p, sizeof four);
    return vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
}

static inline void neon_put_bytes(uint8_t *p, uint32x4_t x) {
    uint16x4_t shorts = vmovn_u32(x);
    uint32_t four = vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(shorts, shorts))), 0);
    memcpy(p, &four, sizeof four);
}

static inline float32x4_t neon_lookup(const float *table, uint32x4_t i) {
    float lanes[4] = {table[vgetq_lane_u32(i, 0)], table[vgetq_lane_u32(i, 1)], table[vgetq_lane_u32(i, 2)],
                      table[vgetq_lane_u32(i, 3)]};
    return vld1q_f32(lanes);
}

#include "kernels/kernels_tail.h"
#include "kernels/kernels_template.h"
#endif
