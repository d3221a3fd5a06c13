/* kernels_avx2.c: eight lanes. No FMA: it rounds once where the scalar code rounds twice. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <stdint.h>

#define WIDTH             8
#define VEC               __m256
#define TARGET            __attribute__((target("avx2,f16c")))
#define LOAD(p)           _mm256_loadu_ps(p)
#define STORE(p, x)       _mm256_storeu_ps(p, x)
#define STREAM            avx2_store_past
#define STREAM_END()      _mm_sfence()
#define SET(x)            _mm256_set1_ps(x)
#define ADD(a, b)         _mm256_add_ps(a, b)
#define SUB(a, b)         _mm256_sub_ps(a, b)
#define MUL(a, b)         _mm256_mul_ps(a, b)
#define DIV(a, b)         _mm256_div_ps(a, b)
#define SQRT(a)           _mm256_sqrt_ps(a)
#define LOWER(a, b)       _mm256_min_ps(a, b)
#define UPPER(a, b)       _mm256_max_ps(a, b)
#define IVEC              __m256i
#define ISET(x)           _mm256_set1_epi32((int)(x))
#define LANES             _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)
#define IAND(a, b)        _mm256_and_si256(a, b)
#define IOR(a, b)         _mm256_or_si256(a, b)
#define IXOR(a, b)        _mm256_xor_si256(a, b)
#define IADD(a, b)        _mm256_add_epi32(a, b)
#define ISUB(a, b)        _mm256_sub_epi32(a, b)
#define IMAX(a, b)        _mm256_max_epi32(a, b)
#define IMIN(a, b)        _mm256_min_epi32(a, b)
#define UMIN(a, b)        _mm256_min_epu32(a, b)
#define ISHL(a, n)        _mm256_slli_epi32(a, n)
#define ISHR(a, n)        _mm256_srli_epi32(a, n)
#define ISAR(a, n)        _mm256_srai_epi32(a, n)
#define BITS(x)           _mm256_castps_si256(x)
#define FROM_BITS(x)      _mm256_castsi256_ps(x)
#define ROUND(x)          _mm256_cvtps_epi32(x)
#define TO_FLOAT(x)       _mm256_cvtepi32_ps(x)
#define FLOOR(x)          _mm256_floor_ps(x)
#define COUNT_GT(n, a, b) _mm256_sub_epi32(n, _mm256_castps_si256(_mm256_cmp_ps(a, b, _CMP_GT_OQ)))
#define GET_BYTES(p)      _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(p)))
#define GET_SHORTS(p)     _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)(p)))
#define PUT_BYTES         avx2_put_bytes
#define PUT_SHORTS        avx2_put_shorts
#define LOOKUP            avx2_lookup
#define TO_HALF(x)        _mm256_cvtepu16_epi32(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT))
#define FROM_HALF(x)      _mm256_cvtph_ps(avx2_shorts(x))
#define NAME(x)           avx2_##x
#define TABLE             kernels_avx2
#define TABLE_NAME        "avx2"
#define MULHILO(hi, lo, a, m)                                                                                \
    do {                                                                                                     \
        const __m256i even_ = _mm256_mul_epu32(a, ISET(m));                                                  \
        const __m256i odd_ = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), ISET(m));                            \
        (lo) = _mm256_blend_epi32(even_, _mm256_slli_epi64(odd_, 32), 0xaa);                                 \
        (hi) = _mm256_blend_epi32(_mm256_srli_epi64(even_, 32), odd_, 0xaa);                                 \
    } while (0)

TARGET static inline void avx2_store_past(float *p, __m256 x) {
    _mm_stream_ps(p, _mm256_castps256_ps128(x));
    _mm_stream_ps(p + 4, _mm256_extractf128_ps(x, 1));
}

/* The low 16 bits of each lane, in order. */
TARGET static inline __m128i avx2_shorts(__m256i x) {
    x = _mm256_and_si256(x, _mm256_set1_epi32(0xffff));
    return _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
}

TARGET static inline void avx2_put_shorts(uint8_t *p, __m256i x) {
    _mm_storeu_si128((__m128i *)(void *)p, avx2_shorts(x));
}

TARGET static inline void avx2_put_bytes(uint8_t *p, __m256i x) {
    __m128i shorts = avx2_shorts(_mm256_and_si256(x, _mm256_set1_epi32(0xff)));
    _mm_storel_epi64((__m128i *)(void *)p, _mm_packus_epi16(shorts, shorts));
}

TARGET static inline __m256 avx2_lookup(const float *table, __m256i i) {
    __m256 below = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), i);
    __m256 above = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), i);
    return _mm256_blendv_ps(below, above, _mm256_castsi256_ps(_mm256_slli_epi32(i, 28)));
}

#include "kernels/kernels_tail.h"
#include "kernels/kernels_template.h"
#endif
