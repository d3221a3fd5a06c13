/* kernels_avx512.c: sixteen lanes. No FMA, as in kernels_avx2.c. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <stdint.h>

#define WIDTH             16
#define VEC               __m512
#define TARGET            __attribute__((target("avx512f,avx512bw")))
#define LOAD(p)           _mm512_loadu_ps(p)
#define STORE(p, x)       _mm512_storeu_ps(p, x)
#define STREAM            avx512_store_past
#define STREAM_END()      _mm_sfence()
#define SET(x)            _mm512_set1_ps(x)
#define ADD(a, b)         _mm512_add_ps(a, b)
#define SUB(a, b)         _mm512_sub_ps(a, b)
#define MUL(a, b)         _mm512_mul_ps(a, b)
#define DIV(a, b)         _mm512_div_ps(a, b)
#define SQRT(a)           _mm512_sqrt_ps(a)
#define LOWER(a, b)       _mm512_min_ps(a, b)
#define UPPER(a, b)       _mm512_max_ps(a, b)
#define IVEC              __m512i
#define ISET(x)           _mm512_set1_epi32((int)(x))
#define LANES             _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
#define IAND(a, b)        _mm512_and_si512(a, b)
#define IOR(a, b)         _mm512_or_si512(a, b)
#define IXOR(a, b)        _mm512_xor_si512(a, b)
#define IADD(a, b)        _mm512_add_epi32(a, b)
#define ISUB(a, b)        _mm512_sub_epi32(a, b)
#define IMAX(a, b)        _mm512_max_epi32(a, b)
#define IMIN(a, b)        _mm512_min_epi32(a, b)
#define UMIN(a, b)        _mm512_min_epu32(a, b)
#define ISHL(a, n)        _mm512_slli_epi32(a, n)
#define ISHR(a, n)        _mm512_srli_epi32(a, n)
#define ISAR(a, n)        _mm512_srai_epi32(a, n)
#define BITS(x)           _mm512_castps_si512(x)
#define FROM_BITS(x)      _mm512_castsi512_ps(x)
#define ROUND(x)          _mm512_cvtps_epi32(x)
#define TO_FLOAT(x)       _mm512_cvtepi32_ps(x)
#define FLOOR(x)          _mm512_roundscale_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)
#define COUNT_GT(n, a, b) _mm512_mask_add_epi32(n, _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), n, ISET(1))
#define LOOKUP(table, i)  _mm512_permutexvar_ps(i, _mm512_loadu_ps(table))
#define GET_BYTES(p)      _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)(p)))
#define PUT_BYTES(p, x)   _mm_storeu_si128((__m128i *)(void *)(p), _mm512_cvtepi32_epi8(x))
#define GET_SHORTS(p)     _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)(p)))
#define PUT_SHORTS(p, x)  _mm256_storeu_si256((__m256i *)(void *)(p), _mm512_cvtepi32_epi16(x))
#define TO_HALF(x)        _mm512_cvtepu16_epi32(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT))
#define FROM_HALF(x)      _mm512_cvtph_ps(_mm512_cvtepi32_epi16(x))
#define NAME(x)           avx512_##x
#define TABLE             kernels_avx512
#define TABLE_NAME        "avx512"
#define MULHILO(hi, lo, a, m)                                                                                \
    do {                                                                                                     \
        const __m512i even_ = _mm512_mul_epu32(a, ISET(m));                                                  \
        const __m512i odd_ = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), ISET(m));                            \
        (lo) = _mm512_mask_blend_epi32(0xaaaa, even_, _mm512_slli_epi64(odd_, 32));                          \
        (hi) = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even_, 32), odd_);                          \
    } while (0)

TARGET static inline void avx512_store_past(float *p, __m512 x) {
    _mm_stream_ps(p, _mm512_castps512_ps128(x));
    _mm_stream_ps(p + 4, _mm512_extractf32x4_ps(x, 1));
    _mm_stream_ps(p + 8, _mm512_extractf32x4_ps(x, 2));
    _mm_stream_ps(p + 12, _mm512_extractf32x4_ps(x, 3));
}

#include "kernels/kernels_tail.h"
#include "kernels/kernels_template.h"
#endif
